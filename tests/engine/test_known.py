"""Heads that come with the package: found by shape, used where a profile says nothing, kept."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.sessions import session, system, tiny, user
from memdecay import Profile, Session
from memdecay.engine import known, saving
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.head_cache import HeadCache
from memdecay.engine.known import Known, describe, known_for, known_models, shape_of, with_known
from memdecay.errors import ProfileError
from memdecay.evidence import READ, REPLAY, SETS, EvidenceHead
from memdecay.policy import get_policy

ONE = EvidenceHead(1, 2, READ, weight=2.0, mean=-4.0, std=1.0)
TWO = EvidenceHead(0, 1, REPLAY, weight=1.0, mean=-3.0, std=1.5)
EVIDENCE = {"read": (ONE,), "replay": (ONE, TWO)}
OWN = {"read": (EvidenceHead(0, 0, READ, weight=1.0, mean=-5.0, std=2.0),)}
POLICIES = ("memdecay", "memdecay-replay", "memdecay-heads")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What one test found in a folder of its own is not what the next one finds."""
    known_models.cache_clear()
    yield
    known_models.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder of profiles, which is not there yet."""
    monkeypatch.setattr(known.resources, "files", lambda package: tmp_path)
    return tmp_path / "profiles"


def learn(monkeypatch: pytest.MonkeyPatch, evidence: Any = EVIDENCE) -> None:
    """Let the package know the tiny Llama."""
    about = {"shape": shape_of(tiny()[0].config), "episodes": 3}
    monkeypatch.setattr(known, "known_models", lambda: (Known("tiny", evidence, about),))


class TestThePackage:
    def test_every_file_is_whole(self) -> None:
        found = known_models()
        assert {one.name for one in found} >= {
            "smollm2-135m",
            "qwen2.5-coder-0.5b",
            "qwen2.5-coder-1.5b",
        }
        for one in found:
            assert one.name == one.about["model"]
            shape = one.about["shape"]
            assert set(shape) == set(shape_of(SimpleNamespace())) and None not in shape.values()
            assert set(one.evidence) == set(SETS) == {*one.about["auc"], "recall"}
            for name, reached in one.about["auc"].items():
                assert 0.8 < one.about["auc_held_out"][name] <= reached + 0.01
            assert 0.5 < one.about["mrr_held_out"] <= one.about["mrr"] + 0.01
            for heads in one.evidence.values():
                for head in heads:
                    assert head.layer < shape["num_hidden_layers"]
                    assert head.head < shape["num_attention_heads"]
            config = SimpleNamespace(**shape, rope_parameters={"rope_theta": shape["rope_theta"]})
            assert known_for(config) == one
        shapes = [json.dumps(one.about["shape"], sort_keys=True) for one in found]
        assert len(set(shapes)) == len(shapes)

    def test_a_file_says_nothing_of_regions(self) -> None:
        from ruamel.yaml import YAML

        files = sorted((Path(known.__file__).parents[1] / "profiles").glob("*.yaml"))
        assert [file.stem for file in files] == [one.name for one in known_models()]
        for file in files:
            assert set(YAML(typ="safe").load(file)) == {"evidence", "provenance"}

    def test_without_the_folder_nothing_is_known(self, folder: Path) -> None:
        assert not folder.exists() and known_models() == ()
        cache = MemDecayCache(tiny()[0], budget=16, policy="memdecay")
        assert cache.profile.evidence == {}

    def test_without_a_file_nothing_is_known(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "README.md").write_text("here they go")
        assert known_models() == ()

    def test_a_damaged_file_is_an_error(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "bad.yaml").write_text("evidence: 3\n")
        with pytest.raises(ProfileError, match=r"bad\.yaml"):
            known_models()


class TestShape:
    def test_each_part_of_it_tells_models_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learn(monkeypatch)
        config = tiny()[0].config
        assert known_for(config) is not None
        for name in shape_of(config):
            other = copy.deepcopy(config)
            if name == "rope_theta":
                other.rope_parameters = {**other.rope_parameters, "rope_theta": 123.0}
            else:
                setattr(other, name, "qwen9" if name == "model_type" else 77)
            assert known_for(other) is None, name

    def test_a_config_without_rope_has_one(self) -> None:
        model, _ = tiny("gpt2")
        assert shape_of(model.config)["rope_theta"] is None


class TestWhoseHeads:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_known_ones_where_the_profile_says_nothing(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, _ = tiny()
        assert MemDecayCache(model, budget=32, policy=policy).profile.evidence == {}
        learn(monkeypatch)
        for profile in (None, Profile.default(), Profile.default().with_provenance({"a": 1})):
            cache = MemDecayCache(model, budget=32, policy=policy, profile=profile)
            assert isinstance(cache, HeadCache) == (policy == "memdecay-heads")
            assert dict(cache.profile.evidence) == EVIDENCE
            assert cache.watch.heads == ((1, 2),)
            assert cache.profile.provenance["evidence"]["known_for"] == "tiny"
            assert cache.profile.provenance.get("a") == (profile and profile.provenance.get("a"))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_the_profiles_own_come_first(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learn(monkeypatch)
        own = Profile.default().with_evidence(OWN)
        cache = MemDecayCache(tiny()[0], budget=32, policy=policy, profile=own)
        assert cache.profile is own

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_profile_can_say_no(
        self, policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        learn(monkeypatch)
        none = Profile.default().with_evidence({})
        none.save(tmp_path / "p.yaml")
        assert "evidence: {}" in (tmp_path / "p.yaml").read_text()
        for profile in (none, Profile.load(tmp_path / "p.yaml")):
            cache = MemDecayCache(tiny()[0], budget=32, policy=policy, profile=profile)
            assert cache.profile.evidence == {} and not cache.watch.heads

    def test_another_model_gets_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learn(monkeypatch)
        cache = MemDecayCache(tiny("qwen3")[0], budget=32, policy="memdecay")
        assert cache.profile.evidence == {}

    def test_who_asks_for_no_heads_gets_the_profile_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learn(monkeypatch)
        profile = Profile.default()
        cache = MemDecayCache(tiny()[0], budget=32, policy="memdecay-paper", profile=profile)
        assert cache.profile is profile

    def test_other_heads_forget_whose_they_were(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learn(monkeypatch)
        found = with_known(Profile.default(), tiny()[0].config)
        assert found.with_evidence(OWN) == Profile.default().with_evidence(OWN)
        assert with_known(found, tiny("qwen3")[0].config) is found


class TestReport:
    def test_it_says_where_the_heads_are_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def said(profile: Profile | None = None, policy: str = "memdecay") -> str | None:
            made = session(budget=32, policy=policy, profile=profile)
            assert made.report().to_dict()["evidence"] == made.report().evidence
            return made.report().evidence

        assert said() == "none; memdecay calibrate measures them"
        learn(monkeypatch)
        assert said() == "1 for read, 2 for replay, known for tiny"
        assert said(Profile.default().with_evidence(OWN)) == "1 for read, of the profile"
        none = Profile.default().with_evidence({})
        assert said(none) == "none; memdecay calibrate measures them"
        assert said(policy="memdecay-paper") is None

    def test_any_provenance_can_be_described(self) -> None:
        own = Profile.default().with_evidence(OWN)
        for about in ({"evidence": "ours"}, {"evidence": {"episodes": 4}}, {}):
            assert describe(own.with_provenance(about)) == "1 for read, of the profile"


class TestSaved:
    def begun(self, **options: Any) -> Session:
        made = session(budget=48, policy="memdecay", **options)
        made.append([system(12), user(40)])
        return made

    def test_it_goes_on_with_the_same_heads(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        learn(monkeypatch)
        made = self.begun()
        made.save(tmp_path / "s")
        learn(monkeypatch, OWN)
        again = Session.load(tmp_path / "s", made.model, made.tokenizer)
        assert again.cache.profile == made.cache.profile
        assert dict(again.cache.profile.evidence) == EVIDENCE
        assert again.report() == made.report()
        for one in (made, again):
            one.append([user(30, 7)])
        assert again.report() == made.report()
        assert [*again.cache.ledgers[0]["position"]] == [*made.cache.ledgers[0]["position"]]

    @pytest.mark.parametrize("old", [False, True], ids=["new", "of-before"])
    def test_it_goes_on_without_any(
        self, old: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made = self.begun()
        if old:  # such a session has a profile that says nothing of heads
            made.cache.profile = Profile.default()
        made.save(tmp_path / "s")
        state = json.loads((tmp_path / "s" / saving._JSON).read_text())["session"]
        assert ("evidence" in state["profile"]) != old
        learn(monkeypatch)
        again = Session.load(tmp_path / "s", made.model, made.tokenizer)
        assert again.cache.profile.evidence == {} and not again.cache.watch.heads

    def test_a_policy_without_heads_is_saved_as_ever(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        learn(monkeypatch)
        made = session(budget=48, policy=get_policy("memdecay-paper"))
        made.save(tmp_path / "s")
        again = Session.load(tmp_path / "s", made.model, made.tokenizer)
        assert again.cache.profile == Profile.default()
