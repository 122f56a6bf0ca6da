"""The figures that the paper's prose gives, beside ours."""

from __future__ import annotations

import math

from memdecay.study.document import Table, number
from memdecay.study.evidence import Evidence
from memdecay.study.statistics import BASE, NON_SYSTEM

_MOVABLE = ("tool_in", "tool_out", "retrieval")
_BASELINES = ("random", "streaming", "h2o")
_NOTE = (
    "The paper's models are Qwen2.5 1.5B and 3B, its texts and its observation bursts are others; "
    "agreement is not the aim, an explained difference is (docs/results/paper.md)."
)


def beside_paper(evidence: Evidence) -> Table:
    """Return what the paper's section IV says in words, with what this setting measured."""
    long = evidence.tier == "long"
    rows = [
        ("half-life of system", "148 to 189 steps", _half_life(evidence, "system")),
        ("half-life of scratchpad", "14 to 16 steps", _half_life(evidence, "scratchpad")),
        ("longest-lived region that moves", "retrieval", _longest(evidence)),
        (
            f"system probes, {BASE} at 50%",
            "21 of 24, as the full cache" if long else "24 of 24, as the full cache",
            f"{_count(evidence, BASE, 0.5, 'system')} "
            f"(full cache {_count(evidence, 'full', 1.0, 'system')})",
        ),
        ("system probes, best baseline at 50%", "at most 13 of 24", _best_baseline(evidence)),
        (
            "system probes, streaming",
            "0 to 2 of 24",
            _both(evidence, "streaming", "system"),
        ),
        (
            "non-system recall, streaming at 50%",
            "0.01 to 0.13" if long else "0.36",
            _recall(evidence, "streaming"),
        ),
        ("non-system recall, random at 50%", "" if long else "0.37", _recall(evidence, "random")),
        (
            "non-system recall, h2o at 50%",
            "0.60 (3B)" if long else "0.40",
            _recall(evidence, "h2o"),
        ),
        (
            f"user probes, {BASE} at 50%",
            "7 of 24 (1.5B), 5 of 24 (3B)" if long else "0 of 24",
            _count(evidence, BASE, 0.5, "user"),
        ),
        ("user probes, h2o at 50%", "11 to 20 of 24", _count(evidence, "h2o", 0.5, "user")),
        (
            f"scenarios where {BASE} beats / trails streaming, non-system at 50%",
            "4/0 to 6/0" if long else "0 better",
            _signs(evidence),
        ),
        (f"kept by {BASE} at 25%", "24.5%" if long else "a little under 25%", _kept(evidence)),
        (
            "a scored step over an unscored one",
            "2.69",
            number(float(evidence.overhead.get("scored_over_unscored", math.nan))),
        ),
    ]
    shown = [row for row in rows if row[1] and row[2] not in ("", "–")]
    return Table("The paper's own figures", ("figure", "the paper", "here"), shown, _NOTE)


def _half_life(evidence: Evidence, region: str) -> str:
    fit = evidence.fits.get(region)
    if fit is None or not fit.measured:
        return ""
    return f"{fit.half_life:.0f} [{fit.low:.0f}, {fit.high:.0f}]"


def _longest(evidence: Evidence) -> str:
    known = {
        name: evidence.fits[name].half_life
        for name in _MOVABLE
        if name in evidence.fits and evidence.fits[name].measured
    }
    ordered = sorted(known, key=lambda name: -known[name])
    return ", then ".join(f"{name} {known[name]:.0f}" for name in ordered)


def _count(evidence: Evidence, policy: str, budget: float, region: str) -> str:
    cell = evidence.cell(policy, budget, region)
    if not cell:
        return ""
    return f"{cell['recall'] * cell['n']:.4g} of {cell['n']}"


def _both(evidence: Evidence, policy: str, region: str) -> str:
    counts = {
        f"{budget:.0%}": _count(evidence, policy, budget, region) for budget in evidence.budgets
    }
    return ", ".join(f"{count} at {budget}" for budget, count in counts.items() if count)


def _best_baseline(evidence: Evidence) -> str:
    found = {
        policy: evidence.cell(policy, 0.5, "system")["recall"]
        for policy in _BASELINES
        if evidence.cell(policy, 0.5, "system")
    }
    if not found:
        return ""
    best = max(found, key=lambda policy: found[policy])
    return f"{_count(evidence, best, 0.5, 'system')} ({best})"


def _recall(evidence: Evidence, policy: str) -> str:
    cell = evidence.cell(policy, 0.5, NON_SYSTEM)
    return number(cell["recall"]) if cell else ""


def _signs(evidence: Evidence) -> str:
    found = evidence.difference("streaming", 0.5, NON_SYSTEM)
    return f"{found['better']}/{found['worse']}" if found else ""


def _kept(evidence: Evidence) -> str:
    cell = evidence.cell(BASE, 0.25, "all")
    return f"{cell['kept_fraction']:.1%}" if cell else ""
