"""The self-contained HTML page of `demo` and `run`: data and script in one file, nothing else."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from memdecay.cli._episode import Answer
from memdecay.cli._timeline import KINDS, ScoreSample, Timeline

_FINEST = 2
"""Score changes below this many hundredths are not worth their bytes on the page."""


@dataclass(frozen=True)
class TurnMark:
    """A turn on the time axis: its label and the tokens seen before and after it."""

    index: int
    label: str
    start: int
    end: int


@dataclass(frozen=True)
class PolicyView:
    """What the page shows of one policy.

    Args:
        policy: its name.
        summary: one line on it.
        bounded: whether it runs under the budget.
        main: whether it is the one the page is about.
        report: `Report.to_dict()` of its session at the end.
        timeline: the recorded life of its cache.
        answers: what it answered to the probes, all policies in the same order.
        cost: what eviction cost, as in `run --json`, or None.
    """

    policy: str
    summary: str
    bounded: bool
    main: bool
    report: Mapping[str, Any]
    timeline: Timeline
    answers: Sequence[Answer] = ()
    cost: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Page:
    """Everything on the page; all of it may contain text of strangers."""

    title: str
    headline: str
    standfirst: str
    facts: Sequence[tuple[str, str]]
    turns: Sequence[TurnMark]
    views: Sequence[PolicyView]
    notes: Sequence[str] = ()
    texts: Sequence[str] = ()
    clock: str = "steps"
    footer: str = ""


def build_page(page: Page) -> str:
    """Return the page as one HTML document that loads nothing from anywhere."""
    parts = {
        "TITLE": html.escape(page.title),
        "CSS": _resource("page.css"),
        "JS": _resource("page.js"),
        "DATA": script_json(_data(page)),
    }
    # One pass, so that a mark inside a stranger's text is left alone.
    document = re.sub(r"@@([A-Z]+)@@", lambda mark: parts[mark[1]], _resource("page.html"))
    # Lone surrogates survive JSON but not UTF-8; they can only be replaced.
    return document.encode("utf-8", "replace").decode("utf-8")


def footer(result: dict[str, Any], command: str) -> str:
    """Return the line that says how to make the page again, and with what it was made."""
    made = [f"{name} {version}" for name, version in result["versions"].items() if version]
    made.append(f"seed {result['seed']}")
    if result["commit"]:
        made.append(f"commit {result['commit'][:12]}")
    return f"{command} · " + " · ".join(made)


def script_json(value: object) -> str:
    """Return JSON that is safe inside a script element, whatever strings it contains."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(page: Page) -> dict[str, Any]:
    regions: list[str] = []
    for view in page.views:
        regions += [name for name in view.timeline.regions if name not in regions]
        regions += [name for name in view.report["seen_by_region"] if name not in regions]
    return {
        "title": page.title,
        "headline": page.headline,
        "standfirst": page.standfirst,
        "facts": [list(fact) for fact in page.facts],
        "notes": list(page.notes),
        "footer": page.footer,
        "regions": regions,
        "clock": page.clock,
        "page_size": page.views[0].timeline.page_size if page.views else 1,
        "seen_tokens": max((view.report["seen_tokens"] for view in page.views), default=0),
        "turns": [vars(turn) for turn in page.turns],
        "texts": list(page.texts),
        "runs": [_run(view, regions) for view in page.views],
    }


def _run(view: PolicyView, regions: Sequence[str]) -> dict[str, Any]:
    report = view.report
    return {
        "policy": view.policy,
        "summary": view.summary,
        "bounded": view.bounded,
        "main": view.main,
        "budget_tokens": report["budget_tokens"] if view.bounded else None,
        "seen_tokens": report["seen_tokens"],
        "peak_tokens": report["peak_resident_tokens"],
        "peak_bytes": report["peak_kv_bytes"],
        "kept": report["kept_by_region"],
        "seen": report["seen_by_region"],
        "timeline": _pack(view.timeline, regions, scored=view.bounded),
        "answers": [
            {**answer.to_dict(), "short": answer.probe.short, "at": answer.at}
            for answer in view.answers
        ],
        "cost": view.cost,
    }


def _pack(timeline: Timeline, regions: Sequence[str], *, scored: bool) -> dict[str, Any]:
    """Return the timeline as short arrays: a long run has a hundred thousand page scores."""
    levels: dict[int, list[int]] = {}
    refreshed: dict[int, list[int]] = {}
    # A policy that never evicts has scores that mean nothing, so its pages do not fade.
    for sample in timeline.scores if scored else ():
        _add_levels(levels, sample)
        for page in sample.refreshed:
            refreshed.setdefault(page, []).append(sample.event)
    return {
        "pages": [
            [
                life.page,
                regions.index(life.region),
                life.tokens,
                life.born,
                -1 if life.evicted is None else life.evicted,
                int(life.pinned),
            ]
            for life in timeline.pages
        ],
        "events": [
            [event.seen, event.kept, event.turn, KINDS.index(event.kind), round(event.step, 3)]
            for event in timeline.events
        ],
        "levels": levels,
        "refreshed": refreshed,
    }


def _add_levels(levels: dict[int, list[int]], sample: ScoreSample) -> None:
    for page, score in sample.page_scores.items():
        level = round(100 * score)
        known = levels.setdefault(page, [])
        if not known or abs(level - known[-1]) >= _FINEST:
            known += [sample.event, level]


def _resource(name: str) -> str:
    return (resources.files("memdecay.cli") / "page" / name).read_text("utf-8")
