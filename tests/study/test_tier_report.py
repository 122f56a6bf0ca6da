"""The report of tiers: what was reached of what was to be, on rows whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from memdecay.errors import StudyError
from memdecay.study.cells import FIELDS
from memdecay.study.rows import write_rows
from memdecay.study.tier_play import tier_conditions
from memdecay.study.tier_report import cells_json, document, goals, read, read_costs, share
from memdecay.study.tier_run import TIER_SCHEMA
from study.study_rows import SEQ_LEN, condition_rows

Rule = Callable[[int, int, str, float, int], bool]


def full(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    return not (index == 0 and region == "user")


def tiers(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """As the full cache, but for one value of a tool in 24."""
    lost = region == "tool_out" and (index, variant) == (3, 0)
    return full(index, variant, region, budget, seed) and not lost


def dropped(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    return region == "system"


def rows(policy: str, rule: Rule, *budgets: float, **more: Any) -> pd.DataFrame:
    tiered = "tiers" in policy
    made = condition_rows(policy, rule, group="tiers", budgets=budgets or (0.25,), **more)
    kept = made["kept_tokens"]
    return made.assign(
        resident_bytes=kept * 100,
        outside_bytes=(SEQ_LEN - kept) * 100 if tiered else 0,
        summary_bytes=(SEQ_LEN - kept) * 5 if tiered else 0,
        outside_tokens=SEQ_LEN - kept if tiered else 0,
        coded_tokens=0,
        came_back=12 if tiered else 0,
    )


def written(folder: Path, *parts: pd.DataFrame, name: str = "toy-short") -> Path:
    """A folder of runs with these rows, an episode a file."""
    frame = pd.concat(parts)
    for key, one in frame.groupby(["scenario", "variant"]):
        path = folder / name / "tiers" / f"{key[0]}-{key[1]}.parquet"
        write_rows(path, one.assign(setting=name).to_dict("records"), TIER_SCHEMA)
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    peer = rows("quantized-cache", dropped, 1.0).assign(group="peer", engine="transformers")
    return written(
        tmp_path,
        rows("full", full, 1.0),
        rows("memdecay-tiers", tiers),
        rows("memdecay", dropped),
        rows("memdecay-tiers-random", dropped, seeds=(0, 1, 2)),
        rows("memdecay-tiers-int4", tiers, 0.125),
        peer,
    )


def test_a_share_is_of_the_probes_of_both(folder: Path) -> None:
    [one] = read([folder])
    part = share(one.probes, "memdecay-tiers", 0.25, "tool_out")
    assert (part.value, part.probes) == (pytest.approx(23 / 24), 24)
    assert part.low < part.value <= part.high == 1
    # Where the full cache answers nothing there is no share: 7 scenarios are left.
    part = share(one.probes, "memdecay-tiers", 0.25, "user")
    assert (part.value, part.probes) == (1, 24)
    part = share(one.probes, "memdecay-tiers", 0.25, "non_system")
    assert part.value == pytest.approx(68 / 69) and part.probes == 72


def test_what_was_reached_and_what_was_not(folder: Path) -> None:
    met = {goal.what: goal for goal in goals(read([folder]))}
    said = "`memdecay-tiers` at 25%: recall of {} facts, as a share of full's"
    reached = {
        region: met[said.format(region)].reached for region in ("system", "user", "retrieval")
    }
    assert reached == {"system": True, "user": True, "retrieval": True}
    lost = met[said.format("tool_out")]
    assert lost.reached is False and lost.found.startswith("0.96 [") and lost.goal == "≥ 0.98"
    four = met["`memdecay-tiers-int4`: recall outside the system region, as a share of full's"]
    assert four.reached is True and four.goal == "≥ 0.95"
    assert len(met) == 5  # the log-probability is asked of SmolLM2 only


def test_smollm2_is_held_to_its_log_probability(tmp_path: Path) -> None:
    small = {"model": "smollm2-135m"}
    for off, reached in ((1.04, True), (1.06, False), (0.5, True)):
        folder = written(
            tmp_path / str(off),
            rows("full", full, 1.0, **small).assign(gold_logprob=-2.0),
            rows("memdecay-tiers", full, **small).assign(gold_logprob=-2.0 * off),
            rows("memdecay-tiers-int4", full, 0.125, **small).assign(gold_logprob=-2.0 * off),
        )
        met = [one for one in goals(read([folder])) if "log-probability" in one.what]
        names = [goal.what.split(":")[0] for goal in met]
        assert names == ["`memdecay-tiers` at 25%", "`memdecay-tiers-int4`"]
        for goal in met:
            assert goal.reached is reached, off
            assert f"{-2 * off:.2f}".replace("-", "−") in goal.found


def test_costs_and_traces_are_targets_too(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    step = {"what": "a step", "model": "m", "value": 1.07, "unit": "times", "limit": 1.05}
    free = {"what": "words", "model": "any", "value": 3.0, "unit": "MB", "limit": None}
    path.write_text(json.dumps([step, free]), "utf-8")
    costs = read_costs(path)
    played = pd.DataFrame(
        {
            "trace": ["a", "b"] * 3,
            "policy": ["memdecay"] * 2 + ["memdecay-tiers"] * 2 + ["memdecay-tiers-graded"] * 2,
            "policy_config": ['{"name": "memdecay"}'] * 2
            + ['{"name": "memdecay-tiers", "tiers": {}}'] * 2
            + ['{"name": "memdecay-tiers-graded", "quantized": 1.0, "tiers": {"bits": 4}}'] * 2,
            "budget": 0.25,
            "refused": "",
            "delta_nll": [0.4, 0.6, 0.02, 0.06, 0.1, 0.1],
            "model": "m",
            "dtype": "float32",
        }
    )
    met = {goal.what: goal for goal in goals(read([folder]), [("real", played)], costs)}
    assert [name for name in met if "rise in NLL" in name] == [
        f"`{name}` at 25%: rise in NLL, as a share of that without tiers"
        for name in ("memdecay-tiers", "memdecay-tiers-graded")
    ]
    graded = met["`memdecay-tiers-graded` at 25%: rise in NLL, as a share of that without tiers"]
    assert graded.reached is False and graded.found.startswith("0.200 [")
    assert met["a step"].reached is False and met["a step"].found == "1.070 times"
    assert "words" not in met
    rise = met["`memdecay-tiers` at 25%: rise in NLL, as a share of that without tiers"]
    assert rise.reached is True and rise.found.startswith("0.080 [") and rise.where == "real"
    text = document(read([folder]), [("real", played)], costs)
    assert "| a step | m | ▼ 1.070 times | 1.05 times |" in text
    assert "## Recorded traces: real" in text
    path.write_text("[1]", "utf-8")
    with pytest.raises(StudyError, match=r"it must be a file that benchmarks/tiers\.py --json"):
        read_costs(path)


def test_the_document_says_losses_as_plainly_as_wins(folder: Path) -> None:
    [one] = read([folder])
    text = document([one])
    assert text.startswith("# Tiers: what is evicted can come back\n")
    assert "**Targets: 4 of 5 reached**" in text and "**not reached**" in text
    lines = text.splitlines()
    # Against dropping and random a win, against the full cache a draw of one scenario.
    assert any(line.startswith("| `memdecay` | ▲ ") and "| 8 / 0 / 0 |" in line for line in lines)
    assert any(line.startswith("| `full` |") and "| 0 / 7 / 1 |" in line for line in lines)
    assert "toy-short: `memdecay-tiers` at 25.0% minus each, outside the system region" in text
    # 100 of 400 tokens: a quarter of the bytes, and summaries of a twentieth of the rest.
    assert "| **`memdecay-tiers`** |" in text
    assert "| `memdecay-tiers` | 25.0% | 10 | 0.25 | 0.0% | 29 | 1 | 5.0% | 12.0 |" in text
    assert text == document(read([folder]))


def test_the_ladder_has_targets_beside_those_without_bits(folder: Path) -> None:
    def once(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
        return region != "tool_out" or (index, variant) == (0, 0)

    ladder = (
        rows("full", once, 1.0),
        rows("memdecay-tiers", dropped),
        rows("memdecay-tiers-graded", full).assign(coded_tokens=100, resident_bytes=13_000),
        rows("memdecay-tiers-graded-bytes", full, 0.19),
        rows("memdecay-tiers-int4-recall", full, 0.125),
    )
    [one] = read([written(folder.parent / "ladder", *ladder)])
    met = {goal.what: goal for goal in goals([one])}
    of = "`{}` at 25%: recall of {} facts, as a share of full's"
    assert met[of.format("memdecay-tiers-graded", "system")].reached is True
    assert met[of.format("memdecay-tiers", "retrieval")].reached is False
    assert met[of.format("memdecay-tiers-graded", "user")].reached is False
    # One question that full answers is no evidence, and it is said.
    few = met[of.format("memdecay-tiers-graded", "tool_out")]
    assert few.found.endswith("24 probes, of which full answers 1: noise")
    assert not met[of.format("memdecay-tiers-graded", "system")].found.endswith("noise")
    recalled = (
        "`memdecay-tiers-int4-recall`: recall outside the system region, as a share of full's"
    )
    assert met[recalled].goal == "≥ 0.95" and len(met) == 9
    text = document([one])
    # 13,000 of 40,000 bytes, with a quarter at fewer bits.
    assert "| `memdecay-tiers-graded` | 25.0% | 13 | 0.33 | 25.0% |" in text
    assert "holds more bytes than the others at its budget" in text
    # 76 tokens of 400.
    assert "It held 0.190 of the full cache's bytes" in text
    assert "| ~ 3.00 |" in text
    # What has as many bytes is compared with what has a quarter.
    assert "`memdecay-tiers-graded-bytes` at 19.0% minus each at 25.0%, outside" in text


def test_where_full_answers_nothing_no_share_is_known(tmp_path: Path) -> None:
    folder = written(
        tmp_path, rows("full", dropped, 1.0), rows("memdecay-tiers-graded", full, 0.25)
    )
    met = {goal.what: goal for goal in goals(read([folder]))}
    goal = met["`memdecay-tiers-graded` at 25%: recall of user facts, as a share of full's"]
    assert goal.reached is None and goal.found == "–, 24 probes, of which full answers 0"


def test_rows_of_what_a_name_stood_for_give_way(tmp_path: Path) -> None:
    """On the short tier int4 had its pins at full precision once."""
    [now] = [one for one in tier_conditions("short") if one.name == "memdecay-tiers-int4"]
    before = replace(now, pins=True)
    old = rows("memdecay-tiers-int4", dropped, 0.125, scenarios=("archive",))
    old = old.assign(condition=before.to_json())
    new = rows("memdecay-tiers-int4", full, 0.125).assign(condition=now.to_json())
    whole = rows("full", full, 1.0)
    [one] = read([written(tmp_path / "old", whole, old)])
    assert (one.rows["policy"] == "memdecay-tiers-int4").sum() == 12
    [one] = read([written(tmp_path / "both", whole, old, new)])
    found = one.rows[one.rows["policy"] == "memdecay-tiers-int4"]
    assert len(found) == 96 and set(found["condition"]) == {now.to_json()}


def test_cells_are_those_of_the_study(folder: Path) -> None:
    found = json.loads(cells_json(read([folder])))
    assert all(tuple(cell) == FIELDS for cell in found)
    [cell] = [
        cell
        for cell in found
        if (cell["policy"], cell["region"], cell["fact_kind"])
        == ("memdecay-tiers", "tool_out", "all")
    ]
    assert cell["budget"] == 0.25 and cell["recall"] == pytest.approx(23 / 24)
    assert cell["n"] == 24 and cell["kept_fraction"] == 0.25


def test_folders_must_be_of_different_settings(folder: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "again", rows("full", full, 1.0))
    with pytest.raises(StudyError, match="Two folders hold rows of the setting 'toy-short'"):
        read([folder, other])
