"""The tables of a report: half-lives, recall, paired signs, variants, peers, times, counting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from memdecay.study.document import Cell, Table, interval, number, plural
from memdecay.study.findings import GROUPS, Findings
from memdecay.study.scenario import VARIANTS, builtin_scenarios
from memdecay.study.statistics import ALL, BASE, NON_SYSTEM

REGIONS = ("system", "user", "tool_out", "retrieval")
PAPER_ROWS = {"paper": 1_248, "ablation": 576}
"""The rows of a complete setting, as the paper counts them."""

_SHOWN = {ALL: "all", NON_SYSTEM: "non-system"}


def half_lives(findings: Findings) -> Table:
    """Return Table II: fitted half-lives with intervals over scenarios."""
    rows: list[list[str | Cell]] = []
    remarks = any(fit.status != "measured" for fit in findings.fits.values())
    for fit in findings.fits.values():
        remark = ["" if fit.status == "measured" else fit.status] if remarks else []
        rows.append(
            [
                f"`{fit.region}`",
                Cell(_steps(fit.half_life, fit.low, fit.high), fit.half_life),
                Cell(number(fit.decay_rate, 4), fit.decay_rate),
                Cell(number(fit.r2), fit.r2),
                Cell(f"{fit.observations:,}", fit.observations),
                str(fit.clusters),
                *remark,
            ]
        )
    return Table(
        "Half-lives in decode steps (Table II)",
        (
            *("region", "#half-life [95%]", "#rate, 1/step", "#R²", "#observations", "#scenarios"),
            *(["remark"] if remarks else []),
        ),
        rows,
        "Equations (6) and (7) on the attention measured over a full cache. The paper, for other "
        "models: system 148 to 189 steps, scratchpad 14 to 16, retrieval the longest of the "
        "regions that move, R² from 0.30 to 0.95.",
    )


def recall(findings: Findings, budget: float, groups: Sequence[str], title: str) -> Table:
    """Return Table III or IV at one budget: recall by region with intervals."""
    policies = findings.members(*groups)
    # A table of peers says again how the full cache and ours did.
    policies = [*(name for name in ("full", BASE) if name not in policies), *policies]
    shown = [ALL, NON_SYSTEM, *_regions(findings)]
    rows: list[list[str | Cell]] = []
    for policy in policies:
        outside = findings.cell(policy, budget, NON_SYSTEM)
        whole = findings.cell(policy, budget, ALL)
        if not whole:
            continue
        cells: list[str | Cell] = [f"`{policy}`", _percent(whole["kept_fraction"])]
        cells += [_recall(findings.cell(policy, budget, region)) for region in shown]
        cells.append(_logprob(outside))
        cells.append(str(whole["n"]))
        rows.append(cells)
    headings = [f"#{_SHOWN.get(region, region)}" for region in shown]
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == f"`{BASE}`")
    return Table(
        f"{title} at {budget:.0%} of the cache",
        ("policy", "#kept", *headings, "#log p, non-system", "#probes"),
        rows,
        strong=strong,
    )


def kinds(findings: Findings, budget: float, groups: Sequence[str]) -> Table:
    """Return recall outside the system region by kind of fact."""
    rows: list[list[str | Cell]] = []
    for policy in findings.members(*groups):
        code = findings.cell(policy, budget, NON_SYSTEM, "code")
        natural = findings.cell(policy, budget, NON_SYSTEM, "natural")
        if not code or not natural:
            continue
        found = (_recall(code), _logprob(code), _recall(natural), _logprob(natural))
        rows.append([f"`{policy}`", *found])
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == f"`{BASE}`")
    return Table(
        f"Codes and natural values, non-system, at {budget:.0%}",
        ("policy", "#codes", "#log p", "#natural values", "#log p"),
        rows,
        strong=strong,
    )


def signs(findings: Findings, budget: float, region: str, groups: Sequence[str]) -> Table:
    """Return how the study's policy stands against every other one, scenario by scenario."""
    rows: list[list[str | Cell]] = []
    for policy in findings.members(*groups):
        found = findings.difference(policy, budget, region)
        if not found:
            continue
        rows.append(
            [
                f"`{policy}`",
                delta(found),
                f"+{found['better']} / −{found['worse']} / {found['equal']}",
                Cell(number(found["p_value"], 3), found["p_value"]),
                _logprob_delta(found),
                Cell(number(100 * found["kept_delta"], 1, signed=True), found["kept_delta"]),
                str(found["n"]),
            ]
        )
    return Table(
        f"`{BASE}` minus each other policy, {_SHOWN.get(region, region)}, at {budget:.0%}",
        (
            *("against", "#recall [95%]", "#scenarios + / − / equal", "#sign test p"),
            *("#log p of gold [95%]", "#kept, points", "#probes"),
        ),
        rows,
    )


def variants(findings: Findings, group: str, title: str, note: str = "") -> Table:
    """Return the conditions of a group beside the study's policy: ablation, sweep, noise, controls.

    Rows that differ are counted against the same probes of the study's policy, a row a seed.
    """
    policies = findings.members(group)
    policies = [*([] if BASE in policies else [BASE]), *policies]
    rows: list[list[str | Cell]] = []
    for budget in findings.budgets:
        for policy in policies:
            outside = findings.cell(policy, budget, NON_SYSTEM)
            if not outside:
                continue
            changed = findings.changed(policy, budget)
            against = findings.difference(policy, budget, NON_SYSTEM)
            rows.append(
                [
                    f"`{policy}`",
                    Cell(f"{budget:.0%}", budget),
                    _percent(outside["kept_fraction"]),
                    _recall(outside),
                    _recall(findings.cell(policy, budget, "system")),
                    delta(against, reverse=True) if against else "",
                    _logprob(outside),
                    *("" if policy == BASE else _share(changed, key) for key in ("kept", "recall")),
                ]
            )
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == f"`{BASE}`")
    return Table(
        title,
        (
            *("condition", "#budget", "#kept", "#non-system", "#system"),
            *(f"#minus `{BASE}`", "#log p of gold", "#kept count differs", "#outcome differs"),
        ),
        rows,
        note,
        strong,
    )


def _share(changed: dict[str, int], key: str) -> Cell:
    return Cell(f"{changed[key]} of {changed['rows']}", float(changed[key]))


def overhead(findings: Findings) -> Table:
    """Return what was timed, whatever it is, with units."""
    rows: list[list[str | Cell]] = []
    for name, value in _scalars(findings.overhead):
        text, unit = _named(name)
        shown = number(float(value), _digits(value)) if _is_number(value) else str(value)
        rows.append([text, shown, unit])
    return Table("What was timed", ("what", "#value", "unit"), rows)


def counting(findings: Findings) -> Table:
    """Return how many rows there are in each group, and in the paper's."""
    rows: list[list[str | Cell]] = []
    known = [group for group in GROUPS if group in set(findings.rows["group"])]
    extra = sorted(set(findings.rows["group"]) - set(known))
    for group in [*known, *extra]:
        part = findings.rows[findings.rows["group"] == group]
        episodes = part[["scenario", "variant"]].drop_duplicates()
        theirs = PAPER_ROWS.get(group)
        rows.append(
            [
                group,
                Cell(f"{part['policy'].nunique():,}", part["policy"].nunique()),
                str(len(episodes)),
                Cell(f"{len(part):,}", len(part)),
                f"{theirs:,}" if theirs else "",
            ]
        )
    return Table("Rows", ("group", "#conditions", "#episodes", "#rows", "#rows in the paper"), rows)


def delta(found: dict[str, Any], *, reverse: bool = False) -> Cell:
    """Return a difference with its interval, marked where the interval leaves 0 out."""
    value, low, high = found["delta"], found["low"], found["high"]
    if reverse:
        value, low, high = -value, -high, -low
    return Cell(interval(value, low, high, signed=True), float(value), _mark(low, high))


def outcome(found: dict[str, Any], by: str = "recall") -> str:
    """Return "win", "loss" or "tie" for a line of `compare`: a tie is an interval with 0 in it.

    Args:
        found: the line.
        by: "recall", or "logprob" for the log-probability of the gold answer.
    """
    before = "logprob_" if by == "logprob" else ""
    return _mark(found[f"{before}low"], found[f"{before}high"]) or "tie"


def missing(findings: Findings) -> list[str]:
    """Return in words what a complete setting would have and this one has not, if anything."""
    probes = findings.probes
    episodes = {f"{s}-{v}" for s, v in zip(probes["scenario"], probes["variant"], strict=True)}
    expected = _expected(findings, probes)
    lines = []
    if expected - episodes:
        lines.append(f"Not run: {_names(expected - episodes)}.")
    every = episodes | expected
    lacking: dict[str, list[str]] = {}
    by_condition = probes.groupby(["policy", "budget"], sort=True, observed=True)
    for (policy, budget), part in by_condition:
        have = {f"{s}-{v}" for s, v in zip(part["scenario"], part["variant"], strict=True)}
        gone = every - have - (expected - episodes)
        if gone:
            lacking.setdefault(_names(gone), []).append(f"`{policy}` at {budget:.0%}")
    for names, conditions in lacking.items():
        lines.append(f"{'; '.join(conditions)}: without {names}.")
    uneven = [
        f"`{policy}` at {budget:.0%}"
        for (policy, budget), part in by_condition
        if part["seeds"].nunique() > 1
    ]
    if uneven:
        lines.append(f"Not every probe has all seeds: {'; '.join(uneven)}.")
    return lines


def groups_not_run(findings: Findings) -> str:
    """Return a sentence that names the groups of conditions which this setting has no rows of."""
    groups = [group for group in GROUPS if not findings.members(group)]
    return f"No conditions were run of: {', '.join(groups)}." if groups else ""


def _expected(findings: Findings, probes: pd.DataFrame) -> set[str]:
    """Return the episodes that a complete setting has: what the run says, and whole scenarios."""
    scenarios = set(probes["scenario"])
    variants: Iterable[int] = set(probes["variant"])
    if scenarios <= set(builtin_scenarios()):
        scenarios, variants = set(builtin_scenarios()), range(VARIANTS)
    told = {str(name) for name in findings.about.get("episodes", ())}
    return told | {f"{scenario}-{variant}" for scenario in scenarios for variant in variants}


def _names(episodes: set[str]) -> str:
    names = sorted(episodes)
    if len(names) <= 6:
        return ", ".join(names)
    return f"{plural(len(names), 'episode')} ({', '.join(names[:4])}, …)"


def _regions(findings: Findings) -> list[str]:
    found = set(findings.rows["region"])
    return [*(r for r in REGIONS if r in found), *sorted(found - set(REGIONS))]


def _recall(cell: dict[str, Any]) -> str | Cell:
    if not cell:
        return ""
    return Cell(interval(cell["recall"], cell["low"], cell["high"]), float(cell["recall"]))


def _logprob(cell: dict[str, Any]) -> str | Cell:
    value = float(cell["gold_logprob"]) if cell else math.nan
    return Cell(number(value, 1), value)


def _logprob_delta(found: dict[str, Any]) -> Cell:
    value, low, high = (float(found[f"logprob_{end}"]) for end in ("delta", "low", "high"))
    return Cell(interval(value, low, high, 1, signed=True), value, _mark(low, high))


def _mark(low: float, high: float) -> str:
    """Say whether an interval leaves 0 out, by more than sums of thirds are off."""
    return "win" if low > 1e-9 else "loss" if high < -1e-9 else ""


def _percent(share: float) -> Cell:
    return Cell(f"{100 * share:.1f}%", float(share))


def _steps(value: float, low: float, high: float) -> str:
    digits = 0 if value >= 100 else 1
    return interval(value, low, high, digits)


_UNITS = {
    "_per_second": "per second",
    "_seconds": "seconds",
    "_ms": "milliseconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
}


def _named(name: str) -> tuple[str, str]:
    """Return a key's words and its unit, which its ending says."""
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            stem = name.removesuffix(ending) if ending != "_tokens" else name
            return stem.replace("_", " "), unit
    ratio = "_over_" in name or name.endswith("speedup")
    return name.replace("_", " "), "times" if ratio else ""


def _scalars(found: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(found, dict):
        pairs = [(f"{prefix}{key}", value) for key, value in found.items()]
        return [item for key, value in pairs for item in _inner(key, value)]
    return []


def _inner(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return _scalars(value, f"{key}: ")
    return [] if value is None or isinstance(value, list) else [(key, value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(value: float) -> int:
    if isinstance(value, int):
        return 0
    return 0 if abs(value) >= 1_000 else 1 if abs(value) >= 100 else 2
