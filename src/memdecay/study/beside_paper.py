"""The figures that the paper's prose gives, beside ours."""

from __future__ import annotations

import math

from memdecay.study.document import Table, number
from memdecay.study.findings import Findings
from memdecay.study.statistics import BASE, NON_SYSTEM

_MOVABLE = ("tool_in", "tool_out", "retrieval")
_BASELINES = ("random", "streaming", "h2o")
_NOTE = (
    "The paper's models are Qwen2.5 1.5B and 3B, its texts and its observation bursts are others; "
    "agreement is not the aim, an explained difference is (docs/results/paper.md)."
)


def beside_paper(findings: Findings) -> Table:
    """Return what the paper's section IV says in words, with what this setting measured."""
    long = findings.tier == "long"
    rows = [
        ("half-life of system", "148 to 189 steps", _half_life(findings, "system")),
        ("half-life of scratchpad", "14 to 16 steps", _half_life(findings, "scratchpad")),
        ("longest-lived region that moves", "retrieval", _longest(findings)),
        (
            f"system probes, {BASE} at 50%",
            "21 of 24, as the full cache" if long else "24 of 24, as the full cache",
            f"{_count(findings, BASE, 0.5, 'system')} "
            f"(full cache {_count(findings, 'full', 1.0, 'system')})",
        ),
        ("system probes, best baseline at 50%", "at most 13 of 24", _best_baseline(findings)),
        (
            "system probes, streaming",
            "0 to 2 of 24",
            _both(findings, "streaming", "system"),
        ),
        (
            "non-system recall, streaming at 50%",
            "0.01 to 0.13" if long else "0.36",
            _recall(findings, "streaming"),
        ),
        ("non-system recall, random at 50%", "" if long else "0.37", _recall(findings, "random")),
        (
            "non-system recall, h2o at 50%",
            "0.60 (3B)" if long else "0.40",
            _recall(findings, "h2o"),
        ),
        (
            f"user probes, {BASE} at 50%",
            "7 of 24 (1.5B), 5 of 24 (3B)" if long else "0 of 24",
            _count(findings, BASE, 0.5, "user"),
        ),
        ("user probes, h2o at 50%", "11 to 20 of 24", _count(findings, "h2o", 0.5, "user")),
        (
            f"scenarios where {BASE} beats / trails streaming, non-system at 50%",
            "4/0 to 6/0" if long else "0 better",
            _signs(findings),
        ),
        (f"kept by {BASE} at 25%", "24.5%" if long else "a little under 25%", _kept(findings)),
        (
            "a scored step over an unscored one",
            "2.69",
            number(float(findings.overhead.get("scored_over_unscored", math.nan))),
        ),
    ]
    shown = [row for row in rows if row[1] and row[2] not in ("", "–")]
    return Table("The paper's own figures", ("figure", "the paper", "here"), shown, _NOTE)


def _half_life(findings: Findings, region: str) -> str:
    fit = findings.fits.get(region)
    if fit is None or not fit.measured:
        return ""
    return f"{fit.half_life:.0f} [{fit.low:.0f}, {fit.high:.0f}]"


def _longest(findings: Findings) -> str:
    known = {
        name: findings.fits[name].half_life
        for name in _MOVABLE
        if name in findings.fits and findings.fits[name].measured
    }
    ordered = sorted(known, key=lambda name: -known[name])
    return ", then ".join(f"{name} {known[name]:.0f}" for name in ordered)


def _count(findings: Findings, policy: str, budget: float, region: str) -> str:
    cell = findings.cell(policy, budget, region)
    if not cell:
        return ""
    return f"{cell['recall'] * cell['n']:.4g} of {cell['n']}"


def _both(findings: Findings, policy: str, region: str) -> str:
    counts = {
        f"{budget:.0%}": _count(findings, policy, budget, region) for budget in findings.budgets
    }
    return ", ".join(f"{count} at {budget}" for budget, count in counts.items() if count)


def _best_baseline(findings: Findings) -> str:
    found = {
        policy: findings.cell(policy, 0.5, "system")["recall"]
        for policy in _BASELINES
        if findings.cell(policy, 0.5, "system")
    }
    if not found:
        return ""
    best = max(found, key=lambda policy: found[policy])
    return f"{_count(findings, best, 0.5, 'system')} ({best})"


def _recall(findings: Findings, policy: str) -> str:
    cell = findings.cell(policy, 0.5, NON_SYSTEM)
    return number(cell["recall"]) if cell else ""


def _signs(findings: Findings) -> str:
    found = findings.difference("streaming", 0.5, NON_SYSTEM)
    return f"{found['better']}/{found['worse']}" if found else ""


def _kept(findings: Findings) -> str:
    cell = findings.cell(BASE, 0.25, "all")
    return f"{cell['kept_fraction']:.1%}" if cell else ""
