"""The typed form of the timeline that a session records, and the check that it is one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memdecay.errors import SessionError

KINDS = ("prefill", "decode", "evict", "recall")
"""What an event can be; the page refers to them by index."""
TIERS = ("resident", "quantized", "host", "disk", "lost")
"""Where a page can go; likewise."""


@dataclass(frozen=True)
class PageLife:
    """One page of the cache: what it holds, when it came and when it went.

    Args:
        page: true position of its first token // page_size.
        region: the region most of its tokens belong to.
        tokens: how many tokens it holds, or held when it was evicted.
        born: index of the event that brought its first token.
        evicted: index of the event that evicted it; None while it is in the cache.
        pinned: whether a pinned token protects it.
        moves: with tiers, the event and the one of `TIERS` of each move since it was born.
    """

    page: int
    region: str
    tokens: int
    born: int
    evicted: int | None
    pinned: bool
    moves: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Event:
    """One change of the cache.

    Args:
        index: its place in the list of events.
        step: clock reading, in steps.
        seen: tokens seen after it.
        kept: tokens in the cache after it.
        turn: the turn it belongs to.
        kind: one of `KINDS`.
    """

    index: int
    step: float
    seen: int
    kept: int
    turn: int
    kind: str


@dataclass(frozen=True)
class ScoreSample:
    """The page scores at one event.

    Args:
        event: index of the event.
        page_scores: page -> score between 0 and 1.
        refreshed: the pages whose decay clock attention has reset.
    """

    event: int
    page_scores: Mapping[int, float]
    refreshed: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """The whole life of a cache, by page and event."""

    page_size: int
    regions: tuple[str, ...]
    pages: tuple[PageLife, ...]
    events: tuple[Event, ...]
    scores: tuple[ScoreSample, ...]

    @classmethod
    def parse(cls, value: object) -> Timeline:
        """Read a timeline from what `Session.timeline()` returns, or from its JSON.

        Raises:
            SessionError: the first field that is missing or wrong, by its place and value.
        """
        top = _mapping(value, "timeline")
        page_size = _integer(top, "page_size", "timeline", minimum=1)
        regions = tuple(str(name) for name in _list(top, "regions", "timeline"))
        events = tuple(
            _event(item, i, f"timeline.events[{i}]")
            for i, item in enumerate(_list(top, "events", "timeline"))
        )
        pages = tuple(
            _page(item, regions, len(events), f"timeline.pages[{i}]")
            for i, item in enumerate(_list(top, "pages", "timeline"))
        )
        scores = tuple(
            _sample(item, len(events), f"timeline.scores[{i}]")
            for i, item in enumerate(_list(top, "scores", "timeline"))
        )
        for i, (before, after) in enumerate(itertools.pairwise(scores), start=1):
            if after.event < before.event:
                raise _wrong(f"timeline.scores[{i}].event", after.event, "in order of events")
        return cls(page_size, regions, pages, events, scores)


def _event(value: object, index: int, where: str) -> Event:
    item = _mapping(value, where)
    kind = item.get("kind")
    if kind not in KINDS:
        raise _wrong(f"{where}.kind", kind, f"one of {', '.join(KINDS)}")
    if _integer(item, "index", where) != index:
        raise _wrong(f"{where}.index", item["index"], f"{index}, its place in the list")
    return Event(
        index=index,
        step=_number(item.get("step"), f"{where}.step"),
        seen=_integer(item, "seen", where),
        kept=_integer(item, "kept", where),
        turn=_integer(item, "turn", where),
        kind=str(kind),
    )


def _page(value: object, regions: Sequence[str], num_events: int, where: str) -> PageLife:
    item = _mapping(value, where)
    region = item.get("region")
    if region not in regions:
        raise _wrong(f"{where}.region", region, f"one of {', '.join(regions)}")
    born = _integer(item, "born", where, below=num_events)
    evicted = item.get("evicted")
    if evicted is not None:
        evicted = _integer(item, "evicted", where, minimum=born, below=num_events)
    return PageLife(
        page=_integer(item, "page", where),
        region=str(region),
        tokens=_integer(item, "tokens", where),
        born=born,
        evicted=evicted,
        pinned=bool(item.get("pinned", False)),
        moves=_moves(item.get("moves", []), born, num_events, f"{where}.moves"),
    )


def _moves(value: object, born: int, num_events: int, where: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, "a list")
    moves: list[tuple[int, str]] = []
    for i, move in enumerate(value):
        here = f"{where}[{i}]"
        if not isinstance(move, list | tuple) or len(move) != 2 or move[1] not in TIERS:
            raise _wrong(here, move, f"an event and one of {', '.join(TIERS)}")
        least = moves[-1][0] if moves else born
        event = _integer({"event": move[0]}, "event", here, minimum=least, below=num_events)
        moves.append((event, str(move[1])))
    return tuple(moves)


def _sample(value: object, num_events: int, where: str) -> ScoreSample:
    item = _mapping(value, where)
    scores = {}
    # JSON has only string keys, a session's own dict has integers: both name the same pages.
    for key, score in _mapping(item.get("page_scores"), f"{where}.page_scores").items():
        number = _number(score, f"{where}.page_scores[{key}]")
        if not 0 <= number <= 1:
            raise _wrong(f"{where}.page_scores[{key}]", score, "between 0 and 1")
        scores[_page_number(key, f"{where}.page_scores")] = number
    return ScoreSample(
        event=_integer(item, "event", where, below=num_events),
        page_scores=scores,
        refreshed=tuple(
            _page_number(page, f"{where}.refreshed") for page in _list(item, "refreshed", where)
        ),
    )


def _mapping(value: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a mapping")
    return value


def _list(item: Mapping[Any, Any], field: str, where: str) -> Sequence[Any]:
    value = item.get(field)
    if not isinstance(value, list | tuple):
        raise _wrong(f"{where}.{field}", value, "a list")
    return value


def _integer(
    item: Mapping[Any, Any], field: str, where: str, minimum: int = 0, below: int | None = None
) -> int:
    value: Any = item.get(field)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < minimum or (below is not None and value >= below):
        limit = f" and below {below}" if below is not None else ""
        raise _wrong(f"{where}.{field}", value, f"an integer of at least {minimum}{limit}")
    return int(value)


def _number(value: object, where: str) -> float:
    # `value == value` is False for NaN alone.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise _wrong(where, value, "a number")
    return float(value)


def _page_number(value: object, where: str) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise _wrong(where, value, "a page number") from None


def _wrong(where: str, value: object, allowed: str) -> SessionError:
    shown = repr(value)
    return SessionError(
        f"{where} is {shown if len(shown) <= 60 else shown[:57] + '...'}, but must be {allowed}."
    )
