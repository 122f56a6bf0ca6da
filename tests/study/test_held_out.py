"""Held-out scenarios: rows so few that every number can be counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from memdecay.cli.main import run_app
from memdecay.errors import StudyError
from memdecay.study import held_out
from memdecay.study.cells import FIELDS
from memdecay.study.held_out import (
    TARGETS,
    HeldOut,
    best,
    cells_json,
    duel,
    hold_out,
    missed,
    numbers,
    read,
    share,
)
from memdecay.study.held_out_report import document, policies, targets
from memdecay.study.rows import write_rows
from memdecay.study.trace_report import gather
from memdecay.study.traces import TRACE_SCHEMA
from study.study_rows import condition_rows, full, write_run

CHOSEN_ON = ("archive", "clinic")
HELD_OUT = ("bakery", "freight")
# What rules get as the index of a scenario.
ARCHIVE, BAKERY, CLINIC, FREIGHT = range(4)


def whole(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """All but one: held out, 6 of 6 in bakery and 5 of 6 in freight."""
    return (index, variant, region) != (FREIGHT, 1, "user")


def ours(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """At the half budget 4 of 6 in bakery, 1 of 6 in freight; at the quarter as the full cache."""
    if region == "system" or index in (ARCHIVE, CLINIC):
        return True
    if budget == 0.25:
        return whole(index, variant, region, budget, seed)
    if index == BAKERY:
        return region != "user"
    return (variant, region) == (0, "tool_out")


def zipped(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """The best on what is held out: all of bakery, another 1 of freight, nothing elsewhere."""
    return index == BAKERY or (index == FREIGHT and (variant, region) == (1, "tool_out"))


def elsewhere(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """The best on all: everything of what was chosen on, nothing of what is held out."""
    return index in (ARCHIVE, CLINIC)


def toy(policy: str, rule: Any, **columns: Any) -> pd.DataFrame:
    usual = {
        "model": "qwen2.5-coder-0.5b",
        "scenarios": ("archive", "bakery", "clinic", "freight"),
        "variants": (0, 1),
    }
    return condition_rows(policy, rule, **{**usual, **columns})


def rows() -> pd.DataFrame:
    return pd.concat(
        [
            toy("full", whole, budgets=(1.0,)),
            toy("memdecay", ours, group="policy"),
            toy("h2o", elsewhere),
            toy("kvpress:kvzip", zipped, group="peer"),
            toy("kvpress:none", full, group="peer", budgets=(1.0,)),
            toy("openvino:question_seen", full, group="peer", engine="openvino"),
            toy("oracle", full, group="control"),
            toy("h2o[observed=burst]", full, group="control"),
            toy("memdecay-paper[page_size=8]", full, group="sweep"),
            toy("memdecay-paper[attention_weight=0.2]", full, group="ablation"),
            toy("memdecay-paper[label_noise=0.5]", full, group="noise"),
        ],
        ignore_index=True,
    )


@pytest.fixture(scope="module")
def one() -> HeldOut:
    found = hold_out(rows(), HELD_OUT)
    assert found is not None
    return found


def line_of(table: Any, name: str) -> dict[str, str]:
    (row,) = [row for row in table.rows if f"`{name}`" in row]
    texts = [cell if isinstance(cell, str) else cell.text for cell in row]
    return dict(zip((column.lstrip("#") for column in table.columns), texts, strict=True))


def test_a_share_is_of_the_full_cache_on_the_same_probes(one: HeldOut) -> None:
    half = share(one.findings.probes, "memdecay", 0.5)
    assert half.value == pytest.approx(5 / 11)
    # Two scenarios: a quarter of the resamples has freight alone, a quarter bakery alone.
    assert (half.low, half.high) == pytest.approx((1 / 5, 4 / 6))
    assert (half.probes, half.system, half.system_full, half.system_probes) == (12, 4, 4, 4)
    quarter = share(one.findings.probes, "memdecay", 0.25)
    assert (quarter.value, quarter.low, quarter.high) == (1, 1, 1)


def test_a_scenario_in_which_the_full_cache_answers_nothing_has_no_share() -> None:
    def blind(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
        return index == BAKERY

    found = hold_out(
        pd.concat([toy("full", blind, budgets=(1.0,)), toy("memdecay", ours, group="policy")]),
        HELD_OUT,
    )
    assert found is not None
    half = share(found.findings.probes, "memdecay", 0.5)
    assert half.value == pytest.approx(4 / 6) and math.isnan(half.low)
    # More in the system region than the full cache has is enough.
    assert (half.system, half.system_full) == (4, 2) and half.at_ceiling


def test_scenarios_are_counted_against_the_best_peer_of_those_held_out(one: HeldOut) -> None:
    probes = one.findings.probes
    assert best(probes, 0.5, one.rivals) == "kvpress:kvzip"
    met = duel(probes, "memdecay", "kvpress:kvzip", 0.5)
    assert met is not None
    # Bakery 4 to 6; freight 1 to 1, though not the same one.
    assert (met.won, met.tied, met.lost, met.probes) == (0, 1, 1, 12)
    assert met.delta == pytest.approx(-2 / 12)
    assert (met.low, met.high) == pytest.approx((-2 / 6, 0))


def test_the_second_count_has_its_own_best_peer(one: HeldOut) -> None:
    assert best(one.every, 0.5, one.rivals) == "h2o"
    met = duel(one.every, "memdecay", "h2o", 0.5)
    assert met is not None
    assert (met.won, met.tied, met.lost, met.probes) == (2, 2, 0, 24)


def test_what_is_no_peer_is_never_the_best_one(one: HeldOut) -> None:
    # The first keeps everything, the second saw the question, the third sees the answer.
    for name in ("kvpress:none", "openvino:question_seen", "oracle"):
        assert name in set(one.findings.probes["policy"])
        assert best(one.findings.probes, 0.5, one.rivals) != name
    assert best(one.findings.probes, 0.5, ()) is None


def test_of_equal_peers_the_likelier_answers_decide_then_the_name() -> None:
    probes = pd.concat(
        [
            toy("streaming", zipped),
            toy("snapkv", zipped, group="policy", gold_logprob=-1.0),
            toy("tova", zipped, group="policy", gold_logprob=-1.0),
            toy("random", zipped, gold_logprob=math.nan),
            toy("memdecay", ours, group="policy"),
        ]
    )
    found = hold_out(probes, HELD_OUT)
    assert found is not None
    assert best(found.findings.probes, 0.5, found.rivals) == "snapkv"
    assert best(found.findings.probes, 0.5, ("streaming", "random")) == "streaming"


def test_a_peer_with_fewer_rows_is_compared_on_those_of_both() -> None:
    def some(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
        return variant == 0 or region == "retrieval"  # 4 of 6

    part = toy("kvpress:tova", some, group="peer", scenarios=("freight",))
    found = hold_out(pd.concat([rows(), part], ignore_index=True), HELD_OUT)
    assert found is not None
    assert best(found.findings.probes, 0.5, found.rivals) == "kvpress:tova"
    met = duel(found.findings.probes, "memdecay", "kvpress:tova", 0.5)
    assert met is not None
    assert (met.won, met.tied, met.lost, met.probes) == (0, 0, 1, 6)
    assert met.delta == pytest.approx(-3 / 6) and math.isnan(met.low)
    tova = share(found.findings.probes, "kvpress:tova", 0.5)
    # The full cache answers 5 of these 6.
    assert (tova.value, tova.probes) == (pytest.approx(4 / 5), 6)
    text = document([found], [], HELD_OUT)
    assert "The best peer is `kvpress:tova`, by recall outside the system region (0.67 on 6" in text
    assert "Of 12 probes outside the system region, fewer were asked of: `kvpress:tova` 6." in text
    (line,) = [line for line in numbers(found) if line["budget"] == 0.5]
    assert line["best"]["probes"] == 6


def test_the_table_of_targets_says_what_was_missed(one: HeldOut) -> None:
    line = line_of(targets([one]), "memdecay")
    assert (line["target, 50%"], line["target, 25%"]) == ("0.85", "0.55")
    assert line["reached, 50% [95%]"] == "0.45 [0.20, 0.67]"
    assert line["reached, 25% [95%]"] == "1.00 [1.00, 1.00]"
    assert line["system region"] == "4 of 4 at 50%; 4 of 4 at 25%"
    assert (line["probes"], line["reached"]) == ("12 of 12", "no: share at 50%")


def test_a_target_needs_the_system_region_and_every_budget() -> None:
    def forgetful(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
        return (index, variant, region) != (BAKERY, 0, "system")

    def table(rule: Any, budgets: tuple[float, ...], **columns: Any) -> Any:
        found = hold_out(
            pd.concat(
                [
                    toy("full", full, budgets=(1.0,), **columns),
                    toy("memdecay-replay", rule, group="policy", budgets=budgets, **columns),
                ]
            ),
            HELD_OUT,
        )
        assert found is not None
        return targets([found])

    line = line_of(table(forgetful, (0.5, 0.25)), "memdecay-replay")
    assert line["reached"] == "no: system at 50%, system at 25%"
    assert line["system region"].startswith("3 of 4 (full 4 of 4) at 50%")
    line = line_of(table(full, (0.5,)), "memdecay-replay")
    assert (line["reached, 25% [95%]"], line["reached"]) == ("not run", "no: 25% not run")
    assert line_of(table(full, (0.5, 0.25)), "memdecay-replay")["reached"] == "yes"
    assert table(full, (0.5, 0.25), model="toy").rows == []


def test_a_share_that_is_not_known_is_not_reached(one: HeldOut) -> None:
    unknown = share(one.findings.probes, "nobody", 0.5)
    assert math.isnan(unknown.value) and missed(unknown, 0.5) == ["share", "system"]


def test_targets_of_every_tier_name_our_policies_and_both_budgets() -> None:
    for tier in ("short", "long"):
        assert tuple(TARGETS[tier]) == held_out.OURS
        assert all(set(goals) == {0.5, 0.25} for goals in TARGETS[tier].values())


def test_the_table_of_a_setting(one: HeldOut) -> None:
    table = policies(one, 0.5)
    names = [str(row[0]).strip("`") for row in table.rows]
    assert names == [
        *("full", "memdecay", "h2o", "kvpress:kvzip", "openvino:question_seen", "oracle")
    ]
    assert table.strong == {1}
    line = line_of(table, "memdecay")
    assert (line["kept"], line["system"]) == ("50.0%", "4 of 4")
    assert line["non-system [95%]"] == "0.42 [0.17, 0.67]"
    assert line["share of full's [95%]"] == "0.45 [0.20, 0.67]"
    # The code stands in the tool's output: 3 of 4; natural values 2 of 8.
    assert line["codes [95%]"] == "0.75 [0.50, 1.00]"
    assert line["natural values [95%]"] == "0.25 [0.00, 0.50]"
    assert line["log p, non-system"] == "−5.5"  # (5 · −0.5 + 7 · −9) / 12
    assert line["scenarios against the best peer"] == "0 / 1 / 1"
    assert line["minus the best peer [95%]"] == "−0.17 [−0.33, 0.00]"
    assert line_of(table, "h2o")["scenarios against the best peer"] == ""
    assert line_of(table, "full")["share of full's [95%]"] == "1.00 [1.00, 1.00]"


def test_the_line_under_a_table_says_which_best_peer_it_counts_against(one: HeldOut) -> None:
    text = document([one], [], HELD_OUT)
    after = text.index("**toy-short at 50% of the cache**")
    line = text.index("The best peer is `kvpress:kvzip`", after)
    assert after < text.index("| `oracle`", after) < line
    assert "Over all 4 scenarios, those on which parameters were chosen included, against the " in (
        text
    )
    assert "`h2o`: `memdecay` 2 / 2 / 0 on 24 probes." in text
    assert "There are no rows of `memdecay-replay` or `memdecay-heads` yet." in text


def test_cells_are_of_the_held_out_rows_and_of_no_sweep(one: HeldOut) -> None:
    found = json.loads(cells_json([one, one]))
    assert {tuple(cell) for cell in found} == {FIELDS}
    assert {cell["policy"] for cell in found} == {
        *("full", "memdecay", "h2o", "kvpress:kvzip", "kvpress:none", "openvino:question_seen"),
        "oracle",
    }
    (cell,) = [
        cell
        for cell in found[: len(found) // 2]
        if (cell["policy"], cell["budget"], cell["region"], cell["fact_kind"])
        == ("memdecay", 0.5, "non_system", "all")
    ]
    assert (cell["n"], cell["recall"]) == (12, pytest.approx(5 / 12))
    assert json.loads(cells_json([])) == []


def test_the_same_rows_give_the_same_bytes(one: HeldOut) -> None:
    again = hold_out(rows().sample(frac=1, random_state=1), HELD_OUT)
    assert again is not None
    assert document([again], [], HELD_OUT) == document([one], [], HELD_OUT)
    assert cells_json([again]) == cells_json([one])


def trace_rows(folder: Path, policy: str, budget: float, rises: list[float]) -> None:
    """Write the rows of one policy, a file a trace; the top token differs as often as it rises."""
    for number, rise in enumerate(rises):
        row: dict[str, Any] = dict.fromkeys(TRACE_SCHEMA.names, "")
        row |= dict.fromkeys(
            ("budget_tokens", "tokens", "scored_tokens", "peak_resident_tokens"), 100
        )
        row |= dict.fromkeys(("past_trained", "evicted_tokens", "observations", "seed"), 0)
        row |= {"trace": f"t{number}", "policy": policy, "policy_config": f'{{"name": "{policy}"}}'}
        row |= {"budget": budget, "nll": 2 + rise, "full_nll": 2.0, "delta_nll": rise}
        row |= {"top1_agreement": 1 - rise, "idle_s": 0.0, "seconds": 1.0, "score_chunk": 32}
        if math.isnan(rise):
            row |= {"nll": None, "delta_nll": None, "top1_agreement": None, "refused": "its pins"}
        write_rows(folder / "rows" / f"{policy}-{budget}-{number}.parquet", [row], TRACE_SCHEMA)


def test_traces_are_compared_with_the_best_baseline(one: HeldOut, tmp_path: Path) -> None:
    trace_rows(tmp_path, "full", 1.0, [0.0, 0.0])
    trace_rows(tmp_path, "streaming", 0.5, [0.2, 0.4])
    trace_rows(tmp_path, "h2o", 0.5, [0.4, 0.4])
    trace_rows(tmp_path, "tova", 0.5, [0.0, 0.0])  # no baseline here
    trace_rows(tmp_path, "memdecay", 0.5, [0.05, 0.1])
    trace_rows(tmp_path, "memdecay-replay", 0.5, [0.1, 0.3])
    trace_rows(tmp_path, "memdecay-heads", 0.5, [math.nan, 0.1])
    text = document([one], [], HELD_OUT, [("toys", gather(tmp_path))])
    assert "## Recorded traces: toys" in text
    lines = {
        line.split("`")[1]: [cell.strip(" *") for cell in line.split("|")[2:-1]]
        for line in text[text.index("## Recorded traces") :].splitlines()
        if line.startswith(("| `", "| **`"))
    }
    assert "full" not in lines and lines["h2o"][-1] == ""
    assert lines["memdecay"] == [
        *("50%", "2", "+0.075 [+0.050, +0.100]", "92.5 [90.0, 95.0]"),
        *("`streaming`", "0.25", "−0.225 [−0.300, −0.150]", "yes"),
    ]
    assert (lines["memdecay-replay"][5], lines["memdecay-replay"][7]) == ("0.67", "no")
    # On the one trace of both 0.1 over 0.4, not over the mean of two.
    assert (lines["memdecay-heads"][1], lines["memdecay-heads"][5]) == ("1", "0.25")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A setting with rows of ours, and one without."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "toy-short", rows())
    write_run(folder / "old-short", toy("full", full, budgets=(1.0,), setting="old-short"))
    return folder


def call(runs: Path, *args: object) -> int:
    return run_app(["study", "held-out", str(runs), *map(str, args)])


def test_the_command_writes_tables_and_cells(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cells = tmp_path / "tables.md", tmp_path / "cells.json"
    asked = [*(f"--scenario={name}" for name in HELD_OUT), "-o", out, "--cells", cells]
    assert call(runs, *asked) == 0
    said = capsys.readouterr().out
    assert "0.45 [0.20, 0.67]" in said and "0/1/1" in said
    assert "Left out: old-short has no rows of the new policies" in said
    text = out.read_text("utf-8")
    assert "Left out: `old-short`, which has no rows of `memdecay`, `memdecay-replay` or" in text
    assert text.index("## Targets") < text.index("## toy-short")
    assert {cell["setting"] for cell in json.loads(cells.read_text())} == {"toy-short"}
    assert call(runs, *asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == ["old-short"] and found["files"] == [str(out), str(cells)]
    half, quarter = found["policies"]
    assert (half["share"], half["target"], half["reached"]) == (
        *(pytest.approx(5 / 11), 0.85),
        False,
    )
    assert half["best_of_all"]["rival"] == "h2o" and quarter["reached"] is True


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["{runs}", "--scenario", "backery"],
            "--scenario is 'backery', but it must be one of archive, bakery, clinic, freight.",
        ),
        (["{tmp}", "--scenario", "bakery"], "RUNS is '{tmp}', but there are no rows in it"),
        (["{runs}", "--scenario", "bakery", "-o", "{tmp}/no/x.md"], "there is no directory"),
        (["{runs}", "--scenario", "bakery", "--cells", "{tmp}"], "is a directory, not a file"),
        (["{runs}", "--scenario", "bakery", "--cells", "{tmp}/x.md"], "must be two files"),
        (["{runs}", "--scenario", "bakery", "--setting", "toy"], "--setting is 'toy', but it must"),
        (["{runs}", "--scenario", "bakery", "--traces", "{tmp}"], "there are no rows under it"),
    ],
)
def test_refusals_are_one_sentence_and_leave_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    given = [arg.format(runs=runs, tmp=tmp_path) for arg in args]
    for option, value in (("-o", "x.md"), ("--cells", "x.json")):
        if option not in given:
            given += [option, str(tmp_path / value)]
    assert run_app(["study", "held-out", *given]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said.format(tmp=tmp_path) in sentence
    assert list(tmp_path.iterdir()) == []


def test_two_folders_of_one_setting_are_refused(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "copy", rows())
    with pytest.raises(StudyError, match="Two folders hold rows of the setting 'toy-short'"):
        read([runs / "toy-short", tmp_path / "copy"], HELD_OUT)
