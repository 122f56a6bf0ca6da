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
from memdecay.cli._timeline import KINDS, TIERS, PageLife, ScoreSample, Timeline

_FINEST = 2
"""Score changes below this many hundredths are not worth their bytes on the page."""
_STRIP = 16
"""Tokens that are drawn as one strip where pages are smaller: a token alone would be a hair."""
_LONGEST = 6
"""Tokens that one character may be made of."""


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
        bits: of tokens at fewer bits, where it has tiers with any.
    """

    policy: str
    summary: str
    bounded: bool
    main: bool
    report: Mapping[str, Any]
    timeline: Timeline
    answers: Sequence[Answer] = ()
    cost: Mapping[str, Any] | None = None
    bits: int | None = None


@dataclass(frozen=True)
class Page:
    """Everything on the page; all of it may contain text of strangers.

    `texts` has one for each token, in order of position.
    """

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


def page_sizes(views: Sequence[PolicyView]) -> str:
    """Return the size of a page, and by policy where the policies differ."""
    sizes: dict[int, list[str]] = {}
    for view in views:
        if view.bounded or len(views) == 1:
            sizes.setdefault(view.timeline.page_size, []).append(view.policy)
    said = {size: f"{size} token{'s' if size > 1 else ''}" for size in sizes}
    if len(sizes) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{said[size]} ({', '.join(names)})" for size, names in sizes.items())


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text.

    Where several tokens make one character, the first of them gets it and the others nothing.
    """
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        # Some tokenizers drop the space before the first token they are given.
        before = list(ids[max(0, at - 1) : at])
        known = len(tokenizer.decode(before)) if before else 0
        for count in range(1, min(_LONGEST, len(ids) - at) + 1):
            text = tokenizer.decode([*before, *ids[at : at + count]])[known:]
            if not text.endswith("\ufffd"):
                break
        texts += [text, *[""] * (count - 1)]
    return texts


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
        "tiers": report.get("tiers"),
        "bits": view.bits,
    }


def _pack(timeline: Timeline, regions: Sequence[str], *, scored: bool) -> dict[str, Any]:
    """Return the timeline as short arrays: a long run has a hundred thousand page scores.

    Small pages are put together in strips, each under the number of its first page: `strips` has
    [first page, pages, region, tokens, pinned, born, evicted], the last two a number, or a list by
    page where they differ; with tiers also the moves, [event, tier, event, tier, ...], one list of
    them or likewise one by page.
    """
    strips = _strips(timeline)
    first = {life.page: strip[0].page for strip in strips for life in strip}
    moved = any(life.moves for life in timeline.pages)
    levels: dict[int, list[int]] = {}
    refreshed: dict[int, list[int]] = {}
    # A policy that never evicts has scores that mean nothing, so its pages do not fade.
    for sample in timeline.scores if scored else ():
        _add_levels(levels, sample, first)
        for page in dict.fromkeys(first.get(page, page) for page in sample.refreshed):
            refreshed.setdefault(page, []).append(sample.event)
    return {
        "page_size": timeline.page_size,
        "strips": [
            [
                strip[0].page,
                len(strip),
                regions.index(strip[0].region),
                sum(life.tokens for life in strip),
                int(strip[0].pinned),
                _same([life.born for life in strip]),
                _same([-1 if life.evicted is None else life.evicted for life in strip]),
                *([_same([_flat(life) for life in strip])] if moved else []),
            ]
            for strip in strips
        ],
        "events": [
            [event.seen, event.kept, event.turn, KINDS.index(event.kind), round(event.step, 3)]
            for event in timeline.events
        ],
        "levels": levels,
        "refreshed": refreshed,
    }


def _strips(timeline: Timeline) -> list[list[PageLife]]:
    """Return the pages, neighbours of one part and one fate together while they are few tokens."""
    together = max(1, _STRIP // timeline.page_size)
    strips: list[list[PageLife]] = []
    for life in sorted(timeline.pages, key=lambda one: one.page):
        last = strips[-1][-1] if strips else None
        if (
            last is not None
            and life.page == last.page + 1
            and life.page % together
            and (life.region, life.pinned) == (last.region, last.pinned)
        ):
            strips[-1].append(life)
        else:
            strips.append([life])
    return strips


def _flat(life: PageLife) -> list[int]:
    return [number for event, tier in life.moves for number in (event, TIERS.index(tier))]


def _same(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def _add_levels(
    levels: dict[int, list[int]], sample: ScoreSample, first: Mapping[int, int]
) -> None:
    """Add what changed; the score of a strip is the mean of its pages that are still there."""
    scores: dict[int, list[float]] = {}
    for page, score in sample.page_scores.items():
        scores.setdefault(first.get(page, page), []).append(score)
    for page, known_scores in scores.items():
        level = round(100 * sum(known_scores) / len(known_scores))
        known = levels.setdefault(page, [])
        if not known or abs(level - known[-1]) >= _FINEST:
            known += [sample.event, level]


def _resource(name: str) -> str:
    return (resources.files("memdecay.cli") / "page" / name).read_text("utf-8")
