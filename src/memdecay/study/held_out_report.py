"""The tables of what was held out: targets, each setting beside its peers, recorded traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from memdecay.study import tables, trace_report
from memdecay.study.conditions import BUDGETS
from memdecay.study.document import Cell, Section, Table, interval, listed, markdown, number, plural
from memdecay.study.held_out import (
    CONTROLS,
    OURS,
    TARGET_MODELS,
    Duel,
    HeldOut,
    Share,
    best,
    duel,
    missed,
    share,
    target,
)
from memdecay.study.report import provenance
from memdecay.study.statistics import ALL, BASE, NON_SYSTEM
from memdecay.study.verdict import answerable

TRACE_BASELINES = ("streaming", "h2o", "snapkv", "observation_masking")
"""The best of these at a budget is what ours are compared with on recorded traces."""
TRACE_RATIO = 0.5
"""The target on recorded traces: at most this much of the best baseline's rise in NLL."""


def document(
    settings: Sequence[HeldOut],
    left_out: Sequence[str],
    scenarios: Sequence[str],
    traces: Sequence[tuple[str, pd.DataFrame]] = (),
) -> str:
    """Return all tables as Markdown.

    Args:
        settings: what was found.
        left_out: the settings without rows of ours.
        scenarios: those that were held out.
        traces: name and rows of runs of `memdecay study traces`.
    """
    ours = listed([f"`{name}`" for name in OURS], "or")
    opening = [
        f"Only the rows of {plural(len(scenarios), 'scenario')} count here, on which nothing was "
        f"chosen: {listed(sorted(scenarios))}. Brackets are 95% intervals over scenarios: "
        f"percentile bootstraps, and widened ones for differences, which are paired. With as few "
        f"scenarios as here they are too short, the former more than the latter."
    ]
    opening += [f"Left out: `{name}`, which has no rows of {ours} there." for name in left_out]
    goals = targets(settings)
    sections = [
        Section("Targets", (*opening, *([goals] if goals.rows else []))),
        *(Section(one.findings.name, _setting(one)) for one in settings),
        *(Section(f"Recorded traces: {name}", _traces(rows)) for name, rows in traces),
    ]
    if settings:
        sections.append(
            Section("How it was made", [provenance([one.findings for one in settings])])
        )
    return markdown("Held out", sections)


def targets(settings: Sequence[HeldOut]) -> Table:
    """Return what each of ours should reach and has reached, a line a setting and policy."""
    lines: list[list[str | Cell]] = []
    for one in settings:
        for policy in one.ours:
            goals = {budget: target(one.findings, policy, budget) for budget in BUDGETS}
            if all(goal is None for goal in goals.values()):
                continue
            found = {
                budget: share(one.findings.probes, policy, budget)
                for budget in BUDGETS
                if one.findings.cell(policy, budget, ALL)
            }
            asked = min((part.probes for part in found.values()), default=0)
            line: list[str | Cell] = [f"`{one.findings.name}`", f"`{policy}`"]
            line.append(Cell(f"{asked} of {one.probes}", asked))
            for budget, goal in goals.items():
                line.append("" if goal is None else Cell(number(goal), goal))
                line.append(_share(found[budget]) if budget in found else "not run")
            line.append("; ".join(f"{_system(part)} at {b:.0%}" for b, part in found.items()))
            lines.append([*line, _reached(found, goals)])
    columns = [
        heading
        for budget in BUDGETS
        for heading in (f"#target, {budget:.0%}", f"#reached, {budget:.0%} [95%]")
    ]
    return Table(
        "What was to be reached, and what was",
        ("setting", "policy", "#probes", *columns, "system region", "reached"),
        lines,
        f"Recall outside the system region as a share of the full cache's on the same probes, and "
        f"as many answers in the system region as the full cache has (in brackets where it is "
        f"not the same). Reached is what the mean reaches; the interval says how sure that is. "
        f"Probes are those outside the system region that the policy was asked, of all that were "
        f"asked there. The targets were set for {listed(TARGET_MODELS)}.",
    )


def policies(one: HeldOut, budget: float) -> Table:
    """Return how everything did in a setting at one budget, outside the system region."""
    findings = one.findings
    names = [
        *("full", *OURS, BASE),
        *findings.members("paper"),
        *findings.members("policy"),
        *findings.members("peer"),
        *(name for name in CONTROLS if name in findings.members("control")),
    ]
    rival = best(findings.probes, budget, one.rivals)
    lines: list[list[str | Cell]] = []
    strong = set()
    for policy in dict.fromkeys(names):
        whole = findings.cell(policy, budget, ALL)
        if not whole or (policy != "full" and findings.keeps_all(policy)):
            continue
        outside, inside = (findings.cell(policy, budget, at) for at in (NON_SYSTEM, "system"))
        kinds = [findings.cell(policy, budget, NON_SYSTEM, kind) for kind in ("code", "natural")]
        if policy in OURS:
            strong.add(len(lines))
        against = duel(findings.probes, policy, rival, budget) if rival and policy in OURS else None
        lines.append(
            [
                f"`{policy}`",
                Cell(f"{100 * whole['kept_fraction']:.1f}%", float(whole["kept_fraction"])),
                _recall(outside),
                _share(share(findings.probes, policy, budget)),
                *(_recall(cell) for cell in kinds),
                _answers(inside["recall"] * inside["n"], inside["n"]) if inside else "",
                number(float(outside["gold_logprob"]), 1) if outside else "",
                *((_score(against), _delta(against)) if against else ("", "")),
            ]
        )
    return Table(
        f"{findings.name} at {budget:.0%} of the cache",
        (
            *("policy", "#kept", "#non-system [95%]", "#share of full's [95%]"),
            *("#codes [95%]", "#natural values [95%]", "#system", "#log p, non-system"),
            *("#scenarios against the best peer", "#minus the best peer [95%]"),
        ),
        lines,
        strong=frozenset(strong),
    )


def _setting(one: HeldOut) -> list[str | Table]:
    findings = one.findings
    episodes = len(findings.rows[["scenario", "variant"]].drop_duplicates())
    scenarios = findings.rows["scenario"].nunique()
    said = (
        f"{findings.model}, {findings.tier} tier: {plural(episodes, 'episode')} of "
        f"{plural(scenarios, 'scenario')}."
    )
    lacking = [f"`{name}`" for name in OURS if name not in one.ours]
    if lacking:
        said += f" There are no rows of {listed(lacking, 'or')} yet."
    if not answerable(findings):
        full = findings.cell("full", 1.0, NON_SYSTEM)
        said += (
            f" The full cache answers only {number(full['recall'])} of the probes outside the "
            f"system region, so recall and shares of it say little here."
        )
    blocks: list[str | Table] = [said]
    for budget in one.budgets:
        table = policies(one, budget)
        blocks += [table, *filter(None, (_best(one, budget), _fewer(one, budget, table)))]
    return blocks


def _best(one: HeldOut, budget: float) -> str:
    """Say who the best peer is, and how ours stand against the best of all scenarios."""
    rival = best(one.findings.probes, budget, one.rivals)
    if rival is None:
        return "No peer was run at this budget."
    cell = one.findings.cell(rival, budget, NON_SYSTEM)
    said = (
        f"The best peer is `{rival}`, by recall outside the system region "
        f"({number(cell['recall'])} on {plural(int(cell['n']), 'probe')}); scenarios are won / "
        f"tied / lost against it."
    )
    everywhere = best(one.every, budget, one.rivals) or rival
    found = [
        (name, met)
        for name in one.ours
        if (met := duel(one.every, name, everywhere, budget)) is not None
    ]
    scores = [f"`{name}` {_score(met)} on {plural(met.probes, 'probe')}" for name, met in found]
    if not scores:
        return said
    return (
        f"{said} Over all {plural(one.every['scenario'].nunique(), 'scenario')}, those on which "
        f"parameters were chosen included, against the best there, `{everywhere}`: "
        f"{', '.join(scores)}."
    )


def _fewer(one: HeldOut, budget: float, table: Table) -> str:
    """Say which policies were asked less outside the system region than others were."""
    shown = [str(row[0]).strip("`") for row in table.rows]
    counts = {
        name: int(cell["n"])
        for name in shown
        if (cell := one.findings.cell(name, budget, NON_SYSTEM))
    }
    most = max(counts.values(), default=0)
    few = [f"`{name}` {count}" for name, count in counts.items() if count < most]
    if not few:
        return f"Every policy was asked {plural(most, 'probe')} outside the system region."
    return (
        f"Of {plural(most, 'probe')} outside the system region, fewer were asked of: "
        f"{', '.join(few)}. Shares and differences are of the probes that both were asked."
    )


def _traces(rows: pd.DataFrame) -> list[str | Table]:
    """Return what eviction cost on recorded traces, and how ours stand to the best baseline."""
    cells = trace_report.cells(rows)
    keys = ["policy", "policy_config", "budget"]
    by_trace = [
        group.set_index("trace")[["delta_nll", "top1_agreement"]].dropna()
        for _, group in rows.groupby(keys, sort=False)  # the order of the cells
    ]
    found = [
        (cell, group)
        for cell, group in zip(cells, by_trace, strict=True)
        if cell["n"] and cell["budget"] < 1
    ]
    lines: list[list[str | Cell]] = []
    strong = set()
    for budget in dict.fromkeys(cell["budget"] for cell, _ in found):
        here = [pair for pair in found if pair[0]["budget"] == budget]
        baselines = [pair for pair in here if _name(pair[0]) in TRACE_BASELINES]
        first = min(baselines, key=lambda pair: pair[0]["delta_nll"], default=None)
        for cell, group in here:
            beside: list[str | Cell] = ["", "", "", ""]
            if _name(cell) in OURS:
                strong.add(len(lines))
                if first:
                    beside = _beside(cell, group, first, baselines)
            rise, low, high = (trace_report.known(cell[k]) for k in ("delta_nll", "low", "high"))
            same = [100 * trace_report.known(cell[f"agreement{e}"]) for e in ("", "_low", "_high")]
            lines.append(
                [
                    f"`{cell['policy']}`",
                    f"{budget:.0%}",
                    str(cell["n"]),
                    Cell(interval(rise, low, high, 3, signed=True), rise),
                    Cell(interval(same[0], same[1], same[2], 1), same[0]),
                    *beside,
                ]
            )
    table = Table(
        "What evicting cost",
        (
            *("policy", "#budget", "#traces", "#rise in NLL [95%]", "#same top token, % [95%]"),
            *("best baseline", "#ratio of rises", "#minus the best [95%]", "target reached"),
        ),
        lines,
        f"Nats per token that the assistant wrote, over what the full cache has; every trace "
        f"counts once, and intervals are over traces. The best baseline has the lowest rise at "
        f"that budget of {listed([f'`{name}`' for name in TRACE_BASELINES])}; a ratio is of the "
        f"mean rises on the traces of both. The target: at most {TRACE_RATIO:g}, and the full "
        f"cache's top token more often than with any of these.",
        frozenset(strong),
    )
    traces = plural(rows["trace"].nunique(), "recorded trace")
    return [f"{rows['model'].iloc[0]} in {rows['dtype'].iloc[0]}, {traces}.", table]


_Played = tuple[dict[str, Any], pd.DataFrame]
"""A cell of `trace_report`, and what stands behind it, by trace."""


def _beside(
    cell: dict[str, Any], group: pd.DataFrame, first: _Played, baselines: Sequence[_Played]
) -> list[str | Cell]:
    """Return the best baseline, the ratio to it, the difference, and whether that is enough."""
    name = first[0]["policy"]
    pairs = _both(group, first[1])
    rise, theirs = pairs["delta_nll"].mean(), pairs["delta_nll_theirs"].mean()
    # Where the best loses nothing there is no ratio to it.
    ratio = float(rise / theirs) if theirs > 0 else math.nan
    nearer = all(_nearer(group, other) for _, other in baselines)
    reached = ratio < TRACE_RATIO + 1e-9 and nearer
    met = cell["against"][name]
    delta, low, high = (trace_report.known(met[end]) for end in ("delta", "low", "high"))
    verdict = "–" if math.isnan(ratio) else "yes" if reached else "no"
    difference = Cell(interval(delta, low, high, 3, signed=True), delta)
    return [f"`{name}`", Cell(number(ratio), ratio), difference, verdict]


def _nearer(group: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether its top token is the full cache's more often, on the traces of both."""
    pairs = _both(group, other)
    return bool(pairs["top1_agreement"].mean() > pairs["top1_agreement_theirs"].mean())


def _both(group: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return the traces that two policies were run on, what the other one did as `_theirs`."""
    return group.merge(other, left_index=True, right_index=True, suffixes=("", "_theirs"))


def _name(cell: dict[str, Any]) -> str:
    """Return a policy's name without the parameters that tell two of one name apart."""
    return str(cell["policy"]).partition("(")[0]


def _reached(found: dict[float, Share], goals: dict[float, float | None]) -> str:
    """Say whether every target was reached, and which were not."""
    lacking = []
    for budget, goal in goals.items():
        if goal is None:
            continue
        if budget not in found:
            lacking.append(f"{budget:.0%} not run")
            continue
        lacking += [f"{what} at {budget:.0%}" for what in missed(found[budget], goal)]
    return f"no: {', '.join(lacking)}" if lacking else "yes"


def _share(part: Share) -> Cell:
    return Cell(interval(part.value, part.low, part.high), part.value)


def _system(part: Share) -> str:
    said = _answers(part.system, part.system_probes)
    if abs(part.system - part.system_full) < 1e-9:
        return said
    return f"{said} (full {_answers(part.system_full, part.system_probes)})"


def _answers(count: float, of: int) -> str:
    """Return `21 of 24`; seeds may make a tenth of it."""
    digits = 0 if abs(count - round(count)) < 1e-9 else 1
    return f"{number(count, digits)} of {of}"


def _recall(cell: dict[str, Any]) -> str | Cell:
    if not cell:
        return ""
    return Cell(interval(cell["recall"], cell["low"], cell["high"]), float(cell["recall"]))


def _score(met: Duel) -> str:
    return f"{met.won} / {met.tied} / {met.lost}"


def _delta(met: Duel) -> Cell:
    return tables.delta({"delta": met.delta, "low": met.low, "high": met.high})


def gather_traces(folders: Sequence[Path]) -> list[tuple[str, pd.DataFrame]]:
    """Return name and rows of runs of `memdecay study traces`.

    Raises:
        StudyError: a folder has no rows, or they do not belong together.
    """
    return [(folder.resolve().name, trace_report.gather(folder)) for folder in folders]
