"""The report of the study of tiers: what was to be reached, and what was, with the losses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from memdecay.errors import StudyError
from memdecay.study import tables, trace_report
from memdecay.study.cells import cells, identity
from memdecay.study.document import Cell, Section, Table, interval, listed, markdown, number, plural
from memdecay.study.findings import Findings
from memdecay.study.held_out import Share
from memdecay.study.report import provenance
from memdecay.study.rows import read_rows
from memdecay.study.statistics import ALL, NON_SYSTEM, collapse, compare, intervals, summarise
from memdecay.study.tier_play import tier_conditions
from memdecay.study.tier_run import FOLDER, TIER_SCHEMA

LADDER, OURS, DROPPED = "memdecay-tiers-graded", "memdecay-tiers", "memdecay"
SAME_BYTES = "memdecay-tiers-graded-bytes"
"""The ladder in about as many bytes as a quarter of the full cache takes."""
CODED = ("memdecay-tiers-int4", "memdecay-tiers-int4-recall")
BOUNDS = ("memdecay-tiers-random", "memdecay-tiers-oracle")
ORDER = ("full", LADDER, SAME_BYTES, OURS, DROPPED, *BOUNDS, *CODED, "quantized-cache")
"""The policies, in the order of a table; others follow."""

SHARE, CODED_SHARE = 0.98, 0.95
"""Recall to reach, as a share of the full cache's: in every region; and, where all else is at four
bits, outside the system region."""
LOGPROB = 0.05
"""How far from the full cache's the log-probability of right answers may be, as a share of it."""
LOGPROB_MODEL = "smollm2"
"""The model that this is asked of, as it answers few questions at all."""
BUDGET, CODED_BUDGET = 0.25, 0.125
FEW = 2
"""Where the full cache answers at most so many questions, a share of its answers is noise."""
RISE = 0.1
"""On recorded traces: at most this much of the rise in NLL of the same budget without tiers."""

_EPISODE = ["scenario", "variant", "region", "fact_kind"]


@dataclass(frozen=True)
class Goal:
    """Something that was to be reached.

    Args:
        what: in words.
        where: the setting, trace run or model.
        goal: in words.
        found: in words, with its interval.
        reached: whether it was; None if it was not measured.
    """

    what: str
    where: str
    goal: str
    found: str
    reached: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return dict(vars(self))


def read(folders: Sequence[Path]) -> list[Findings]:
    """Return what the study of tiers found in each of these folders of settings.

    Raises:
        StudyError: a folder has no such rows, they do not belong together, or two folders hold
            rows of one setting.
    """
    found: dict[str, Findings] = {}
    for folder in folders:
        rows = _of_one_condition(read_rows(folder, (FOLDER,), TIER_SCHEMA))
        name, _ = identity(rows)
        if name in found:
            raise StudyError(f"Two folders hold rows of the setting {name!r}; give one of them.")
        probes = collapse(rows)
        found[name] = Findings(rows, probes, summarise(probes), pd.DataFrame())
    return [*found.values()]


def _of_one_condition(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of which those of a policy and budget are of what its name stands for now.

    Rows of what it stood for earlier are left out where there are newer ones.
    """
    now = {
        (one.name, one.share, one.to_json())
        for tier in set(rows["tier"])
        for one in tier_conditions(str(tier))
    }
    columns = (rows[name] for name in ("policy", "budget", "condition"))
    keys = list(zip(*columns, strict=True))
    newer = {key[:2] for key in keys if key in now}
    return rows[[key in now or key[:2] not in newer for key in keys]].reset_index(drop=True)


def cells_json(settings: Sequence[Findings]) -> str:
    """Return the cells of all settings as one JSON list with one object a line."""
    found = [
        json.dumps(cell, allow_nan=False)
        for one in settings
        for cell in cells(one.rows, one.summary)
    ]
    return "[\n" + ",\n".join(found) + "\n]\n"


def share(probes: pd.DataFrame, policy: str, budget: float, region: str) -> Share:
    """Return how much of the full cache's recall a policy has in a region.

    Args:
        probes: what `collapse` returns.
        policy: whose share.
        budget: of the policy.
        region: one, or "non_system".
    """
    some = probes[(probes["policy"] == policy) & (probes["budget"] == budget)]
    whole = probes[probes["policy"] == "full"]
    pairs = some.merge(whole, on=_EPISODE, suffixes=("", "_full"), validate="one_to_one")
    here = pairs["region"] != "system" if region == NON_SYSTEM else pairs["region"] == region
    counts = pairs[here].groupby("scenario", sort=True)[["recall", "recall_full"]].sum()
    counts = counts[counts["recall_full"] > 0]
    ours, theirs = (counts[name].to_numpy(dtype=float) for name in ("recall", "recall_full"))
    value = low = high = math.nan
    if len(counts):
        value = float(ours.sum() / theirs.sum())
        # Sums over counts, so that resampling scenarios resamples both recalls together.
        low, high = (float(end[0]) for end in intervals(ours[None], theirs[None]))
    inside = pairs["region"] == "system"
    return Share(
        value=value,
        low=low,
        high=high,
        probes=int(here.sum()),
        system=float(pairs.loc[inside, "recall"].sum()),
        system_full=float(pairs.loc[inside, "recall_full"].sum()),
        system_probes=int(inside.sum()),
        answers_full=float(pairs.loc[here, "recall_full"].sum()),
    )


def goals(
    settings: Sequence[Findings],
    traces: Sequence[tuple[str, pd.DataFrame]] = (),
    costs: Sequence[dict[str, Any]] = (),
) -> list[Goal]:
    """Return what was to be reached, each with what was.

    Args:
        settings: what was found.
        traces: name and rows of runs of `memdecay study traces`.
        costs: rows of `benchmarks/tiers.py`.
    """
    found = [goal for one in settings for goal in _recall_goals(one)]
    for name, rows in traces:
        for line in trace_report.rises(rows):
            if line["policy"] not in (LADDER, OURS, *CODED):
                continue
            value, low, high = (trace_report.known(line[end]) for end in ("share", "low", "high"))
            found.append(
                Goal(
                    f"`{line['policy']}` at {line['budget']:.0%}: rise in NLL, as a share of that "
                    "without tiers",
                    name,
                    f"≤ {RISE:g}",
                    f"{interval(value, low, high, 3)}, {plural(line['n'], 'trace')}",
                    None if math.isnan(value) else value <= RISE + 1e-9,
                )
            )
    for cost in costs:
        if cost["limit"] is not None:
            digits = 3 if cost["unit"] in ("times", "bits") else 1
            found.append(
                Goal(
                    cost["what"],
                    cost["model"],
                    f"≤ {cost['limit']:g} {cost['unit']}",
                    f"{number(cost['value'], digits)} {cost['unit']}",
                    cost["value"] <= cost["limit"],
                )
            )
    return found


def _recall_goals(one: Findings) -> list[Goal]:
    probes, found = one.probes, []
    for policy in (LADDER, OURS):
        if not ((probes["policy"] == policy) & (probes["budget"] == BUDGET)).any():
            continue
        for region in tables.REGIONS:
            part = share(probes, policy, BUDGET, region)
            if part.probes:
                what = f"`{policy}` at {BUDGET:.0%}: recall of {region} facts, as a share of full's"
                found.append(_goal(what, one.name, part, SHARE))
        found += _logprob_goals(one, policy, BUDGET, f"`{policy}` at {BUDGET:.0%}")
    for policy in CODED:
        if (probes["policy"] == policy).any():
            part = share(probes, policy, CODED_BUDGET, NON_SYSTEM)
            what = f"`{policy}`: recall outside the system region, as a share of full's"
            found.append(_goal(what, one.name, part, CODED_SHARE))
            found += _logprob_goals(one, policy, CODED_BUDGET, f"`{policy}`")
    return found


def _logprob_goals(one: Findings, policy: str, budget: float, name: str) -> list[Goal]:
    """Return the goal of the model that is held against the full cache by log-probability."""
    if LOGPROB_MODEL not in one.model:
        return []
    ours, full = _logprobs(one.probes, policy, budget)
    off = ours / full - 1 if full else math.nan
    return [
        Goal(
            f"{name}: log-probability of right answers, from full's",
            one.name,
            f"within {LOGPROB:.0%}",
            f"{number(ours, 2)} against {number(full, 2)} nats, "
            f"{number(-100 * off, 1, signed=True)}%",
            off <= LOGPROB + 1e-9,
        )
    ]


def _goal(what: str, where: str, part: Share, goal: float) -> Goal:
    found = f"{interval(part.value, part.low, part.high)}, {plural(part.probes, 'probe')}"
    if part.answers_full <= FEW:
        found += f", of which full answers {part.answers_full:g}"
        found += ": noise" if part.answers_full else ""
    reached = None if math.isnan(part.value) else part.value > goal - 1e-9
    return Goal(what, where, f"≥ {goal:g}", found, reached)


def _logprobs(probes: pd.DataFrame, policy: str, budget: float) -> tuple[float, float]:
    """Return the means of a policy at a budget and of the full cache, over the probes of both."""
    some = probes[(probes["policy"] == policy) & (probes["budget"] == budget)]
    whole = probes[probes["policy"] == "full"]
    pairs = some.merge(whole, on=_EPISODE, suffixes=("", "_full"), validate="one_to_one")
    return float(pairs["gold_logprob"].mean()), float(pairs["gold_logprob_full"].mean())


def document(
    settings: Sequence[Findings],
    traces: Sequence[tuple[str, pd.DataFrame]] = (),
    costs: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the report as Markdown; the arguments are those of `goals`."""
    opening = (
        "A session reads each episode stage by stage, within its budget from the first token, and "
        "every question is asked of a copy of it. The budget is tokens of the context at full "
        "precision; question and answer come on top, and no more of the context is kept when the "
        "answer begins. `full` keeps everything, `memdecay` drops what leaves the budget, "
        f"`{OURS}` keeps it in memory, where a turn brings back the pages that it asks for. "
        f"`{LADDER}` has one step more on the way down: what leaves full precision stays in the "
        "cache at 4 bits, as many tokens again as the budget, and only what leaves that too is in "
        "memory alone. From both a turn brings back what it asks for, to full precision: of what "
        "is at 4 bits memory has an exact copy."
    )
    room = (
        f"**`{LADDER}` holds more bytes than the others at its budget**: what is at 4 bits takes "
        "4.75 bits a number or more with its part of the scales, so that a quarter of the tokens "
        "more adds at least 7% of the full cache's bytes to 25%. Each setting's table of bytes "
        f"says what was held. `{SAME_BYTES}` is there for a comparison at as many bytes as a "
        "quarter of the full cache takes: 19% of the tokens at full precision and 16% at 4 bits, "
        "13% on the short tier. "
        f"{_held(settings)}"
    )
    references = (
        f"`{BOUNDS[0]}` brings pages back at random (three seeds), `{BOUNDS[1]}` those that the "
        "question and its right answer attend to on the full cache: references for how well pages "
        f"can be chosen, with the same room. `{CODED[0]}` keeps an eighth at full precision and "
        f"the rest at 4 bits inside the cache, `{CODED[1]}` with exact copies in memory, of which "
        "a turn brings back what it asks for; `quantized-cache` is transformers' QuantizedCache, "
        "all at 4 bits, from one prompt at full precision."
    )
    how = (
        "Recall is the share of questions whose answer has the value in it; brackets are 95% "
        "percentile bootstraps over scenarios, and those of differences are paired and widened. "
        "▲ and ▼ mark differences whose interval leaves 0 out. A share of the full cache's answers "
        f"is noise where it answers {FEW} questions or fewer, and not known where it answers none; "
        "such cells say so, or have a ~."
    )
    met = goals(settings, traces, costs)
    sections = [
        Section(
            "What was to be reached",
            (opening, room, references, how, *([_targets(met)] if met else ())),
        )
    ]
    sections += [Section(one.name, _setting(one)) for one in settings]
    for name, rows in traces:
        sections.append(Section(f"Recorded traces: {name}", _traces(rows)))
    if costs:
        sections.append(Section("Cost", (_costs(costs),)))
    sections.append(Section("How it was made", (provenance(settings),)))
    return markdown("Tiers: what is evicted can come back", sections)


def _held(settings: Sequence[Findings]) -> str:
    """Return how many bytes the ladder in the bytes of a quarter took, in a sentence."""
    parts = []
    for one in settings:
        mean = one.rows.groupby("policy")["resident_bytes"].mean()
        if SAME_BYTES in mean and "full" in mean:
            parts.append(float(mean[SAME_BYTES] / mean["full"]))
    if not parts:
        return "It was not run."
    between = listed([number(end, 3) for end in dict.fromkeys((min(parts), max(parts)))], "to")
    return (
        f"It held {between} of the full cache's bytes, as means by setting: a group of which some "
        "tokens have left keeps its scales, so that a number takes more than 4.75 bits."
    )


def _targets(met: Sequence[Goal]) -> Table:
    said = {True: "reached", False: "**not reached**", None: "not known"}
    count = sum(goal.reached is True for goal in met)
    return Table(
        f"Targets: {count} of {len(met)} reached",
        ("what", "where", "#target", "#found", "reached"),
        [[one.what, one.where, one.goal, one.found, said[one.reached]] for one in met],
        "What the mean reaches; the interval says how sure that is.",
    )


def policies_of(one: Findings) -> list[tuple[str, float]]:
    """Return the policies and budgets of a setting, in the order of a table."""
    pairs = {
        (str(p), float(b)) for p, b in zip(one.probes["policy"], one.probes["budget"], strict=True)
    }
    known = {name: number for number, name in enumerate(ORDER)}
    return sorted(pairs, key=lambda pair: (-pair[1], known.get(pair[0], len(known)), pair[0]))


def _setting(one: Findings) -> list[str | Table]:
    episodes = len(one.rows[["scenario", "variant"]].drop_duplicates())
    scenarios = one.rows["scenario"].nunique()
    said = (
        f"{one.model}, {one.tier} tier: {plural(episodes, 'episode')} of "
        f"{plural(scenarios, 'scenario')}, {int(one.rows['seq_len'].min()):,} to "
        f"{int(one.rows['seq_len'].max()):,} tokens."
    )
    blocks: list[str | Table] = [said, _recalls(one), _of_full(one)]
    for policy, budget in policies_of(one):
        if policy in (LADDER, SAME_BYTES, OURS, *CODED):
            table = _against(one, policy, budget)
            blocks += [table] if table.rows else []
    return [*blocks, _bytes(one)]


def _recalls(one: Findings) -> Table:
    lines: list[list[str | Cell]] = []
    strong = set()
    for policy, budget in policies_of(one):
        outside = one.cell(policy, budget, NON_SYSTEM)
        whole = one.cell(policy, budget, ALL)
        if policy in (LADDER, OURS, *CODED):
            strong.add(len(lines))
        lines.append(
            [
                f"`{policy}`",
                f"{budget:.1%}",
                Cell(f"{100 * whole['kept_fraction']:.1f}%", float(whole["kept_fraction"])),
                *(_recall(one.cell(policy, budget, region)) for region in tables.REGIONS),
                _recall(outside),
                number(float(outside["gold_logprob"]), 2) if outside else "",
                str(int(whole["n"])),
            ]
        )
    regions = (f"#{region} [95%]" for region in tables.REGIONS)
    return Table(
        f"{one.name}: recall",
        (
            "policy",
            "#budget",
            "#kept",
            *regions,
            "#non-system [95%]",
            "#log p, non-system",
            "#probes",
        ),
        lines,
        "Kept is what of the context is at full precision when the answer begins, on average.",
        frozenset(strong),
    )


def _of_full(one: Findings) -> Table:
    lines: list[list[str | Cell]] = []
    regions = (*tables.REGIONS, NON_SYSTEM)
    for policy, budget in policies_of(one):
        if policy != "full":
            parts = [share(one.probes, policy, budget, region) for region in regions]
            values = [
                Cell(
                    f"{'~ ' * (0 < p.answers_full <= FEW)}{interval(p.value, p.low, p.high)}",
                    p.value,
                )
                for p in parts
            ]
            lines.append([f"`{policy}`", f"{budget:.1%}", *values])
    return Table(
        f"{one.name}: recall as a share of the full cache's",
        ("policy", "#budget", *(f"#{region.replace('_', '-')} [95%]" for region in regions)),
        lines,
        f"~: the full cache answers {FEW} or fewer of these questions, so this is noise.",
    )


def _against(one: Findings, policy: str, budget: float) -> Table:
    """Return how a policy stands against every other one at its budget, outside the system.

    The ladder in the bytes of a quarter is compared with what has a quarter.
    """
    probes = one.probes.copy()
    probes.loc[probes["policy"] == SAME_BYTES, "budget"] = BUDGET
    level = BUDGET if policy == SAME_BYTES else budget
    here = probes[
        (probes["region"] != "system") & ((probes["budget"] == level) | (probes["budget"] == 1))
    ]
    table = compare(here, policy)
    found = table[(table["region"] == NON_SYSTEM) & (table["fact_kind"] == ALL)]
    by_name = {line["policy"]: line for line in found.to_dict("records")}
    names = [name for name in ORDER if name in by_name]
    lines: list[list[str | Cell]] = []
    for name in [*names, *sorted(set(by_name) - set(names))]:
        line = by_name[name]
        ends = ("logprob_delta", "logprob_low", "logprob_high")
        logprob = dict(zip(("delta", "low", "high"), (line[end] for end in ends), strict=True))
        lines.append(
            [
                f"`{name}`",
                tables.delta(line),
                f"{int(line['better'])} / {int(line['equal'])} / {int(line['worse'])}",
                f"{float(line['p_value']):.3f}",
                tables.delta(logprob),
                str(int(line["n"])),
            ]
        )
    other = "" if level == budget else f" at {level:.1%}"
    return Table(
        f"{one.name}: `{policy}` at {budget:.1%} minus each{other}, outside the system region",
        (
            *("policy", "#recall [95%]", "#scenarios won / tied / lost", "#sign test, p"),
            *("#log p [95%]", "#probes"),
        ),
        lines,
    )


def _bytes(one: Findings) -> Table:
    rows = one.rows[one.rows["resident_bytes"].notna()]
    full = rows.loc[rows["policy"] == "full", "resident_bytes"].mean()
    rows = rows.assign(coded=rows["coded_tokens"] / rows["seq_len"])
    means = rows.groupby(["policy", "budget"])[
        ["resident_bytes", "coded", "outside_bytes", "summary_bytes", "came_back"]
    ].mean()
    lines: list[list[str | Cell]] = []
    for policy, budget in policies_of(one):
        if (policy, budget) not in means.index:
            continue
        mean = means.loc[(policy, budget)]
        resident, outside, known = (
            float(mean[name]) for name in ("resident_bytes", "outside_bytes", "summary_bytes")
        )
        part = known / outside if outside else math.nan
        lines.append(
            [
                f"`{policy}`",
                f"{budget:.1%}",
                _kib(resident),
                Cell(f"{number(resident / full)}", resident / full) if full else "",
                _percent(float(mean["coded"])),
                _kib(outside),
                _kib(known),
                _percent(part),
                _count(float(mean["came_back"])),
            ]
        )
    return Table(
        f"{one.name}: bytes",
        (
            *("policy", "#budget", "#resident, KiB", "#of full's", "#tokens at fewer bits"),
            *("#outside, KiB", "#summaries, KiB", "#of what is outside", "#pages back"),
        ),
        lines,
        "Keys and values of the context while the answer begins, as means. Resident are those at "
        "full precision and those at fewer bits, whose share of the context's tokens is told; "
        "outside are exact copies of the latter too. Pages back: since the first token.",
    )


def _percent(value: float) -> str | Cell:
    return "" if math.isnan(value) else Cell(f"{100 * value:.1f}%", value)


def _kib(value: float) -> str | Cell:
    return "" if math.isnan(value) else Cell(f"{value / 1024:,.0f}", value)


def _count(value: float) -> str | Cell:
    return "" if math.isnan(value) else Cell(number(value, 1), value)


def _recall(cell: dict[str, Any]) -> str | Cell:
    if not cell:
        return ""
    return Cell(interval(cell["recall"], cell["low"], cell["high"]), float(cell["recall"]))


def _traces(rows: pd.DataFrame) -> list[str | Table]:
    first = rows.iloc[0]
    said = f"{first['model']} in {first['dtype']}, {plural(rows['trace'].nunique(), 'trace')}."
    left = trace_report.rises(rows)
    if not left:
        return [said, "No policy with tiers was run on them."]
    return [said, trace_report.left_of_rises(left)]


def _costs(costs: Sequence[dict[str, Any]]) -> Table:
    lines: list[list[str | Cell]] = []
    for cost in costs:
        digits = 3 if cost["unit"] in ("times", "bits") else 1
        limit = "" if cost["limit"] is None else f"{cost['limit']:g} {cost['unit']}"
        mark = "" if cost["limit"] is None or cost["value"] <= cost["limit"] else "loss"
        value = Cell(f"{number(cost['value'], digits)} {cost['unit']}", cost["value"], mark)
        lines.append([cost["what"], cost["model"], value, limit])
    return Table(
        "benchmarks/tiers.py",
        ("what", "model", "#measured", "#at most"),
        lines,
        "Times of one thread on the CPU; ratios are of medians measured in turns.",
    )


def read_costs(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows that `benchmarks/tiers.py --json` wrote, none without a file.

    Raises:
        StudyError: the file is not one of those.
    """
    if path is None:
        return []
    names = ("what", "model", "value", "unit", "limit")
    try:
        return [{name: row[name] for name in names} for row in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, LookupError, TypeError):
        raise StudyError(
            f"--costs is '{path}', but it must be a file that benchmarks/tiers.py --json wrote."
        ) from None
