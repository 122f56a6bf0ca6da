"""A study with evidence policies: heads are watched once, and chosen without the asked scenario."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from memdecay.calibration.evidence import COUNTS, choose
from memdecay.engine import MemDecayCache, known
from memdecay.engine.known import Known, shape_of
from memdecay.errors import StudyError
from memdecay.evidence import READ, EvidenceHead
from memdecay.regions import Profile
from memdecay.study import answers, overhead, run, watching, workers
from memdecay.study.conditions import Condition, conditions
from memdecay.study.keeping import ledger_after
from memdecay.study.recording import record
from memdecay.study.rows import read_rows
from memdecay.study.run import Advance, Task, leave_one_out, run_setting, with_changes
from memdecay.study.settings import Setting
from memdecay.study.watching import from_file, to_bytes, watch, watch_all
from memdecay.study.workers import Here
from study.study_tiny import episodes, small, two_scenarios

MODEL = "llama"
NAMES = ("memdecay", "memdecay-replay")


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> Iterator[None]:
    """A tiny model for every name, few conditions, short answers, and no stop watch."""

    def few(groups: tuple[str, ...]) -> list[Condition]:
        kept = (*NAMES, "streaming", "full")
        return [one for one in conditions(groups) if one.name in kept]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_model", lambda name, dtype: small(MODEL))
        patch.setattr(run, "conditions", few)
        patch.setattr(overhead, "measure_overhead", lambda *_: {"scored_step_ms": 1.0})
        patch.setattr(answers, "MAX_NEW_TOKENS", 2)
        yield


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(
        name="tiny-heads",
        model="tiny",
        model_name="tiny",
        tier="short",
        dtype="float32",
        groups=("paper", "policy"),
        scenarios=two_scenarios(tmp_path_factory.mktemp("scenarios")),
        variants=(0,),
        burst=4,
        calibration_burst=24,
    )


class Noted(Here):
    """Notes every task."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def results(self, tasks: Sequence[Task], advance: Advance) -> Iterator[tuple[Task, Any]]:
        self.tasks += tasks
        yield from super().results(tasks, advance)

    @property
    def kinds(self) -> list[str]:
        return [task.kind for task in self.tasks]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> tuple[Path, Noted]:
    """The folder of a run, and its tasks; tests do not write to it."""
    noted = Noted()
    return run_setting(setting, tmp_path_factory.mktemp("runs"), noted), noted


def comparable(folder: Path) -> pd.DataFrame:
    rows = read_rows(folder).drop(columns=["commit", "date"])
    return rows.sort_values(
        ["scenario", "variant", "region", "policy", "budget"], ignore_index=True
    )


def test_every_policy_has_its_rows(done: tuple[Path, Noted]) -> None:
    folder, noted = done
    rows = read_rows(folder)
    counts = rows.groupby(["policy", "budget"]).size().to_dict()
    assert counts == {
        ("full", 1.0): 8,
        **{(name, share): 8 for name in (*NAMES, "streaming") for share in (0.25, 0.5)},
    }
    assert (rows["kept_tokens"] > 0).all()
    bound = rows[rows["budget"] < 1]
    assert (bound["kept_tokens"] <= bound["budget_tokens"]).all()
    assert noted.kinds.count("watch") == 2  # each episode once
    assert {path.stem for path in (folder / "heads").iterdir()} == {"mill-0", "ferry-0"}
    by_probe = bound.pivot_table(
        index=["scenario", "region", "budget"],
        columns="policy",
        values="keep_digest",
        aggfunc="first",
    )
    assert (by_probe["memdecay"] != by_probe["memdecay-replay"]).any()
    assert (by_probe["memdecay"] != by_probe["streaming"]).all()


def test_a_profile_has_the_heads_of_the_other_scenario(done: tuple[Path, Noted]) -> None:
    folder, noted = done
    for left_out, other in (("mill", "ferry"), ("ferry", "mill")):
        saved = Profile.load(folder / "profiles" / f"{left_out}.yaml")
        watched = from_file(folder / "heads" / f"{other}-0.safetensors", other)
        assert set(saved.evidence) == {*COUNTS, "recall"}
        for use in COUNTS:
            assert saved.evidence[use] == choose([watched], use)[0]
        asked = [
            Profile.from_dict(task.profiles["calibrated"])
            for task in noted.tasks
            if task.kind == "ask" and task.episode.scenario == left_out
        ]
        assert asked == [saved]
    first, second = (Profile.load(path) for path in sorted((folder / "profiles").iterdir()))
    assert dict(first.evidence) != dict(second.evidence)


def test_heads_are_chosen_on_the_run_beside_it_too(
    done: tuple[Path, Noted], setting: Setting, tmp_path: Path
) -> None:
    """Of the same model, and never on the scenario that is left out."""
    for name in ("tiny-heads", "tiny-long", "same-tier", "unmeasured"):
        shutil.copytree(done[0], tmp_path / name)
        about = json.loads((done[0] / "setting.json").read_text())
        about["tier"] = "short" if name in ("tiny-heads", "same-tier") else "long"
        (tmp_path / name / "setting.json").write_text(json.dumps(about))
    shutil.rmtree(tmp_path / "unmeasured" / "curves")
    before = leave_one_out(tmp_path / "tiny-heads", setting, ["mill", "ferry"])
    assert before["mill"].evidence == Profile.load(done[0] / "profiles" / "mill.yaml").evidence
    shutil.rmtree(tmp_path / "tiny-heads" / "profiles")
    watched = {}
    for scenario in ("mill", "ferry"):
        path = tmp_path / "tiny-long" / "heads" / f"{scenario}-0.safetensors"
        own = from_file(path, scenario)
        other = replace(own, peaks=own.peaks.flip(1))
        path.write_bytes(to_bytes(other))
        watched[scenario] = (own, other)
    profiles = leave_one_out(tmp_path / "tiny-heads", setting, ["mill", "ferry"])
    for left_out, seen in (("mill", "ferry"), ("ferry", "mill")):
        for use in COUNTS:
            assert profiles[left_out].evidence[use] == choose(watched[seen], use)[0]
            assert profiles[left_out].evidence[use] != choose(watched[seen][:1], use)[0]
        assert profiles[left_out].provenance["heads_also_of"] == ["tiny-long"]


def test_profiles_are_enough_to_go_on(
    done: tuple[Path, Noted], setting: Setting, tmp_path: Path
) -> None:
    """What was watched is not handed on; a second run keeps the same tokens without it."""
    folder = tmp_path / setting.name
    shutil.copytree(done[0], folder)
    before = {path.name: path.read_text() for path in (folder / "profiles").iterdir()}
    shutil.rmtree(folder / "heads")
    nobody = Noted()
    run_setting(setting, tmp_path, nobody)
    assert nobody.tasks == []
    shutil.rmtree(folder / "rows")
    again = Noted()
    run_setting(setting, tmp_path, again)
    assert set(again.kinds) == {"ask"}
    assert not (folder / "heads").exists()
    assert before == {path.name: path.read_text() for path in (folder / "profiles").iterdir()}
    pd.testing.assert_frame_equal(comparable(folder), comparable(done[0]))


def test_without_profiles_what_was_watched_is_used_again(
    done: tuple[Path, Noted], setting: Setting, tmp_path: Path
) -> None:
    folder = tmp_path / setting.name
    shutil.copytree(done[0], folder)
    shutil.rmtree(folder / "profiles")
    (folder / "heads" / "mill-0.safetensors").unlink()
    noted = Noted()
    run_setting(setting, tmp_path, noted)
    assert [(task.kind, task.episode.name) for task in noted.tasks] == [("watch", "mill-0")]
    for path in (folder / "profiles").iterdir():
        assert Profile.load(path) == Profile.load(done[0] / "profiles" / path.name)


def test_heads_are_not_chosen_on_fewer_scenarios_than_rates(
    done: tuple[Path, Noted], setting: Setting, tmp_path: Path
) -> None:
    """A run that was handed on without what was watched, and a scenario that has no heads yet."""
    folder = tmp_path / setting.name
    shutil.copytree(done[0], folder)
    shutil.rmtree(folder / "heads")
    shutil.rmtree(folder / "rows")
    (folder / "profiles" / "ferry.yaml").unlink()
    before = (folder / "profiles" / "mill.yaml").read_text()
    assert setting.scenarios is not None
    alone = with_changes(setting, scenarios=setting.scenarios[1:])
    nobody = Noted()
    with pytest.raises(StudyError) as caught:
        run_setting(alone, tmp_path, nobody)
    assert str(caught.value) == (
        f"The heads for ferry are chosen on all other scenarios of {str(folder)!r}, but it has no "
        f"heads/*.safetensors of mill; ask for these scenarios too, or put the files back."
    )
    assert nobody.tasks == [] and not (folder / "heads").exists()
    both = Noted()
    run_setting(setting, tmp_path, both)
    assert both.kinds.count("watch") == 2
    assert (folder / "profiles" / "mill.yaml").read_text() == before
    other = tmp_path / "files" / setting.name
    shutil.copytree(done[0], other)
    (other / "profiles" / "ferry.yaml").unlink()
    (other / "heads" / "ferry-0.safetensors").unlink()
    run_setting(alone, other.parent, Noted())
    found = Profile.load(other / "profiles" / "ferry.yaml")
    assert found == Profile.load(done[0] / "profiles" / "ferry.yaml")


def test_some_files_of_what_was_watched_change_no_profile(
    done: tuple[Path, Noted], setting: Setting, tmp_path: Path
) -> None:
    """Nor does a run that asks for no heads choose them on whatever is there."""
    folder = tmp_path / setting.name
    shutil.copytree(done[0], folder)
    (folder / "heads" / "mill-0.safetensors").unlink()
    before = {path.name: path.read_text() for path in (folder / "profiles").iterdir()}
    run_setting(setting, tmp_path, Noted())
    assert before == {path.name: path.read_text() for path in (folder / "profiles").iterdir()}
    for path in (folder / "profiles").iterdir():
        path.unlink()
    run_setting(with_changes(setting, groups=("paper",)), tmp_path, Noted())
    for path in (folder / "profiles").iterdir():
        assert not Profile.load(path).evidence_given


def test_nobody_watches_where_no_policy_asks(setting: Setting, tmp_path: Path) -> None:
    noted = Noted()
    told: dict[str, float] = {}

    def advance(kind: str, share: float) -> None:
        told[kind] = told.get(kind, 0.0) + share

    folder = run_setting(with_changes(setting, groups=("paper",)), tmp_path, noted, advance=advance)
    assert "watch" not in noted.kinds and told["watch"] == 2
    assert not (folder / "heads").exists()
    assert all(not Profile.load(path).evidence for path in (folder / "profiles").iterdir())
    more = Noted()
    run_setting(setting, tmp_path, more)
    assert more.kinds.count("watch") == 2 and set(more.kinds) == {"watch", "ask"}
    assert all(Profile.load(path).evidence for path in (folder / "profiles").iterdir())


def test_the_study_knows_no_heads_but_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, tokenizer = small(MODEL)
    head = EvidenceHead(0, 1, READ, weight=1.0, mean=-3.0, std=1.0)
    found = Known("tiny", {"read": (head,)}, {"shape": shape_of(model.config)})
    monkeypatch.setattr(known, "known_models", lambda: (found,))
    assert MemDecayCache(model, budget=64, policy="memdecay").profile.evidence  # it is known
    recording = record(model, tokenizer, episodes(tmp_path)[0], burst=4)
    assert recording.cache.profile.evidence == {}
    [condition] = [one for one in conditions(("policy",)) if one.name == "memdecay"]
    observations, profile = recording.observations, Profile.default()
    ledger = ledger_after(recording.tape, observations, condition, profile, recording.tape.regions)
    assert ledger.profile.evidence == {}


def test_what_is_watched_and_what_is_needed(tmp_path: Path) -> None:
    model, tokenizer = small(MODEL)
    episode = episodes(tmp_path)[1]
    watched = watch(model, tokenizer, episode, burst=4)
    length = len(watched.needed)
    shape = (2, model.config.num_hidden_layers, model.config.num_attention_heads, length)
    assert watched.peaks.shape == shape and watched.cluster == "mill"
    assert watched.peaks.min() >= 0 and 0.05 < watched.peaks.max() <= 1
    assert (watched.peaks[0] != watched.peaks[1]).any()
    counted = [watching.SINKS <= place < length - watching.UNREAD for place in range(length)]
    assert watched.counted.tolist() == counted
    assert 4 <= int(watched.needed.sum()) < length // 4
    path = tmp_path / "x.safetensors"
    path.write_bytes(to_bytes(watched))
    again = from_file(path, "mill")
    assert again.cluster == watched.cluster
    for name in ("peaks", "needed", "counted"):
        assert torch.equal(getattr(again, name), getattr(watched, name))
    again = watch(model, tokenizer, episode, burst=4)
    assert torch.equal(again.peaks, watched.peaks)
    assert all(head.when == READ for head in choose([watched], "read")[0])


def test_each_is_watched_once_and_as_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = small(MODEL)
    asked = {f"short-{one.name}": one for one in episodes(tmp_path)[:2]}
    folder = tmp_path / "heads"
    told: list[int] = []
    first = watch_all(model, tokenizer, asked, folder=folder, burst=4, progress=told.append)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(asked) == sorted(first)
    read = sum(len(one.needed) for one in first.values())
    assert 1.9 * read < sum(told) <= 2 * read  # each once, and then repeated
    for name, one in first.items():
        again = watch(model, tokenizer, asked[name], burst=4)
        assert torch.equal(one.peaks, again.peaks) and one.cluster == "mill"

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(watching, "watch", never)
    again = watch_all(model, tokenizer, asked, folder=folder, burst=4)
    assert all(torch.equal(again[name].peaks, one.peaks) for name, one in first.items())
    others = {"short-mill-0": episodes(tmp_path)[2]}
    (folder / "short-mill-1.safetensors").write_bytes(b"no")
    for changes, sentence in (
        ({"burst": 5}, "was made with burst 4, not 5; measure into another folder"),
        ({"model": small("qwen3")[0]}, "was made with another model;"),
        ({"episodes": others}, "was made with another text;"),
        ({"episodes": asked}, "short-mill-1.safetensors' is not a file of watched heads; remove"),
    ):
        given = {"model": model, "episodes": {"short-mill-0": asked["short-mill-0"]}, "burst": 4}
        given |= changes
        with pytest.raises(StudyError) as caught:
            watch_all(tokenizer=tokenizer, folder=folder, **given)
        assert sentence in str(caught.value) and "\n" not in str(caught.value)
    (folder / "short-mill-1.safetensors").write_bytes(to_bytes(first["short-mill-1"]))
    with pytest.raises(StudyError, match="is not a file of watched heads"):
        watch_all(model, tokenizer, asked, folder=folder, burst=4)
