"""What is compared: the counting is the paper's, and every condition says what it is."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from memdecay.errors import StudyError
from memdecay.policy import get_policy
from memdecay.policy.registry import available, policy_class
from memdecay.study.conditions import BUDGETS, GROUPS, PAPER, Condition, conditions
from memdecay.study.settings import SETTINGS, Setting, get_setting

EPISODES, PROBES = 24, 4


def rows(*groups: str) -> int:
    """How many rows a setting of 24 episodes has of these groups."""
    return EPISODES * PROBES * sum(len(one.budgets) for one in conditions(groups))


def test_the_counting_is_the_papers() -> None:
    assert rows("paper") == 1248
    assert rows("ablation") == 576
    assert 3 * rows("paper") + rows("ablation") == 4320  # all of the study


def test_the_papers_policies_come_first() -> None:
    found = conditions()
    assert [one.name for one in found[:7]] == [
        "full", "random", "random", "random", "streaming", "h2o", "memdecay-paper",
    ]  # fmt: skip
    assert {one.name for one in conditions(("paper",))} == set(PAPER)
    assert [one.params["seed"] for one in found[1:4]] == [0, 1, 2] == [s.seed for s in found[1:4]]
    assert found[0].budgets == (1.0,) and found[1].budgets == BUDGETS == (0.5, 0.25)


def test_the_papers_setting_is_that_of_section_iv() -> None:
    [ours] = [one for one in conditions(("paper",)) if one.name == "memdecay-paper"]
    policy = get_policy(ours.policy, **ours.params)
    assert (policy.smoothing, policy.attention_weight, policy.refresh_threshold.scale) == (
        0.9,
        0.5,
        2,
    )
    assert (ours.page_size, ours.align, ours.clock, ours.observe_every) == (16, None, "steps", 1)
    assert (ours.rates, ours.pinned, ours.labels) == ("calibrated", None, "true")
    # Baselines get no labels and keep single tokens.
    for one in conditions(("paper",))[1:-1]:
        assert one.page_size == 1 and one.pinned is None
        assert "labels" not in get_policy(one.policy, **one.params).needs


def test_every_policy_is_run() -> None:
    asked = {one.policy for one in conditions(("paper", "policy"))}
    assert asked == set(available())


def test_a_policy_of_others_is_run_with_pages_if_it_is_kin(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*available(), "theirs"]
    monkeypatch.setattr("memdecay.study.conditions.available", lambda: names)
    monkeypatch.setattr(
        "memdecay.study.conditions.policy_class",
        lambda name: policy_class("memdecay-paper" if name == "theirs" else name),
    )
    sizes = {one.name: one.page_size for one in conditions(("policy",))}
    assert sizes["theirs"] == 16
    for name in ("memdecay", "memdecay-replay"):
        assert sizes[name] == policy_class(name).page_size
    assert sizes["tova"] == sizes["snapkv"] == sizes["observation_masking"] == 1


def test_what_is_swept() -> None:
    names = Counter(one.name.split("[")[-1].split("=")[0] for one in conditions(("sweep",)))
    assert names == {
        "refresh_threshold": 5, "observe_every": 4, "smoothing": 3, "page_size": 4, "align": 1,
        "clock": 1,
    }  # fmt: skip
    noise = [(one.noise, one.seed) for one in conditions(("noise",))]
    assert noise == [(share, seed) for share in (0.05, 0.2, 0.5) for seed in range(3)]
    weights = [one.params.get("attention_weight") for one in conditions(("ablation",))]
    assert weights == [0.2, 0.8, None] and conditions(("ablation",))[2].pinned is False
    assert {one.name for one in conditions(("control",))} == {
        "shuffled", "oracle", "streaming+pins", "h2o+pins",
        "h2o[observed=burst]", "memdecay-paper[observed=burst]",
    }  # fmt: skip


def test_every_policy_can_be_made_and_no_condition_is_there_twice() -> None:
    found = conditions()
    for one in found:
        if one.policy != "oracle":
            assert get_policy(one.policy, **one.params).name == one.policy
    assert {one.group for one in found} == set(GROUPS)
    assert len({(one.name, one.to_json()) for one in found}) == len(found)
    # What is not random has one row a probe; names tell conditions apart but for their seeds.
    by_name = Counter(one.name for one in found)
    seeded = {one.name for one in found if one.seed}
    assert {name for name, count in by_name.items() if count > 1} == seeded
    assert {by_name[name] for name in seeded} == {3}


def test_json_says_everything_but_name_and_group() -> None:
    one = Condition("x", "paper", "h2o", {"recent": 3}, page_size=4, seed=2)
    other = Condition("y", "sweep", "h2o", {"recent": 3}, page_size=4, seed=2)
    assert one.to_json() == other.to_json()
    assert json.loads(one.to_json()) == {
        "policy": "h2o", "params": {"recent": 3}, "page_size": 4, "align": None, "clock": "steps",
        "observe_every": 1, "rates": "calibrated", "pinned": None, "labels": "true", "noise": 0.0,
        "seed": 2,
    }  # fmt: skip


class TestSettings:
    def test_those_of_the_results(self) -> None:
        assert set(SETTINGS) == {
            "quick", "smollm2-short", "smollm2-long", "qwen0.5b-short", "qwen0.5b-long",
            "qwen1.5b-short", "qwen1.5b-long",
        }  # fmt: skip
        for name, one in SETTINGS.items():
            assert one.name == name and one.tier == ("long" if "long" in name else "short")
            assert (one.burst, one.calibration_burst) == (8, 48)  # section IV-A
            assert "paper" in one.groups
        assert SETTINGS["smollm2-short"].groups == SETTINGS["qwen0.5b-long"].groups == GROUPS[:-1]
        assert GROUPS[-1] == "terms"  # only where asked for

    def test_near_names_are_suggested(self) -> None:
        with pytest.raises(
            StudyError, match=r"setting is 'smollm-short', .* Did you mean 'smollm2"
        ):
            get_setting("smollm-short")
        with pytest.raises(StudyError) as caught:
            get_setting("xyz")
        assert "Did you mean" not in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"tier": "middle"}, "tier is 'middle', but it must be one of short, long."),
            ({"groups": ("papers",)}, "group is 'papers', but it must be one of paper, policy"),
            ({"groups": ()}, "groups is empty, but it must name some of paper"),
            ({"variants": (0, 3)}, "variant is 3, but it must be 0, 1 or 2."),
            ({"variants": ()}, "variants is empty, but it must name some of 0, 1 and 2."),
            ({"dtype": "float16"}, "dtype is 'float16', but it must be bfloat16 or float32."),
        ],
    )
    def test_what_there_is_not_is_refused(self, changes: dict[str, object], said: str) -> None:
        fields = {"name": "x", "model": "m", "model_name": "m", "tier": "short", **changes}
        with pytest.raises(StudyError) as caught:
            Setting(**fields)  # type: ignore[arg-type]
        assert str(caught.value).startswith(said)
