"""The life of every page of one session, recorded as it happens, for the picture of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.memory import LOST, QUANTIZED, RESIDENT, Memory

_INSIDE = (RESIDENT, QUANTIZED)
_MOST_SNAPSHOTS = 200
_MOST_SCORES = 500_000
"""Page scores in all snapshots together; single tokens as pages make large ones."""


class TimelineRecorder:
    """Listens to a cache of one row. What it keeps grows with the pages and events seen.

    Args:
        cache: to listen to; its `on_evict` and `on_observe` are taken.
        memory: where what is evicted goes, if anywhere; its `on_move` is taken.
    """

    def __init__(self, cache: MemDecayCache, memory: Memory | None = None) -> None:
        self._cache = cache
        self._memory = memory
        self._first: dict[int, int] = {}  # page -> position of its first token
        self._by_first: dict[int, int] = {}  # the same, the other way round
        self._below: dict[int, str] = {}  # pages that moved outside since the last event
        self._pages: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._snapshots: list[dict[str, Any]] = []
        self._stride = 1
        self._looked = 0  # the newest page that was looked at: earlier ones do not grow
        self._held = torch.empty(0, dtype=torch.int64)
        self._coded: set[int] = set()  # pages of which most is at fewer bits
        self._lower = 0  # tokens that were when that was noted
        self._refreshed: set[int] = set()
        self._steps = cache.steps
        self.turn = 0
        cache.on_evict = self._evicted
        cache.on_observe = self._observed
        if memory is not None:
            memory.on_move = self._moved

    def prefilled(self) -> None:
        """A chunk of a prompt has been read."""
        self._event("prefill")

    def mark(self) -> dict[str, Any]:
        """Return what `back_to` needs to take back what is recorded from now on."""
        return {
            "events": len(self._events),
            "turn": self.turn,
            "pages": set(self._pages),
            "refreshed": set(self._refreshed),
        }

    def back_to(self, mark: dict[str, Any]) -> None:
        """Take back what was recorded since `mark`, except that what was evicted is gone."""
        count = mark["events"]
        del self._events[count:]
        self._snapshots = [shot for shot in self._snapshots if shot["event"] < count]
        self._pages = {page: life for page, life in self._pages.items() if page in mark["pages"]}
        self.turn, self._steps = mark["turn"], self._cache.steps
        self._refreshed = mark["refreshed"]
        if self._memory is not None:
            self._first = {page: self._first[page] for page in self._pages}
            self._by_first = {first: page for page, first in self._first.items()}
            for life in self._pages.values():
                life["moves"] = [move for move in life["moves"] if move[0] < count]
            if self._misplaced():
                self._event("evict")
            self._settle()
        else:
            kept = self._kept()
            gone = [
                life
                for page, life in self._pages.items()
                if page not in kept and (life["evicted"] is None or life["evicted"] >= count)
            ]
            if gone:
                self._event("evict")
                for life in gone:
                    life["evicted"] = count
        self._look(everywhere=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as plain JSON values."""
        names = self._cache.profile.names
        self._look(everywhere=True)
        self._settle()
        pages = []
        for page, life in sorted(self._pages.items()):
            counts: dict[int, int] = life["counts"]
            region = names[max(counts, key=lambda key: counts[key])]
            known = {name: life[name] for name in ("tokens", "born", "evicted", "pinned")}
            if self._memory is not None:
                known["moves"] = [[*move] for move in life["moves"]]
            pages.append({"page": page, "region": region, **known})
        return {
            "page_size": self._cache.page_size,
            "regions": list(names),
            "pages": pages,
            "events": [dict(event) for event in self._events],
            "scores": [_told(shot) for shot in self._snapshots],
        }

    def _event(self, kind: str) -> None:
        cache = self._cache
        self._events.append(
            {
                "index": len(self._events),
                "step": cache.now,
                "seen": cache.seen,
                "kept": cache.kept(),
                "turn": self.turn,
                "kind": kind,
            }
        )
        self._look()
        if kind not in ("prefill", "decode") or self._cache.coded_tokens != self._lower:
            self._grade()
        if (len(self._events) - 1) % self._stride == 0:
            self._snapshot()

    def _look(self, *, everywhere: bool = False) -> None:
        """Note the pages that are new or still growing, or all, and which of the kept are held."""
        ledger = self._cache.ledgers[0] if self._cache.ledgers else None
        if ledger is None or not ledger.length:
            return
        page, region = ledger["page"], ledger["region"]
        both = torch.stack([page, region])
        if not everywhere:
            both = both[:, page >= min(self._looked, ledger.latest_page)]
        if self._memory is not None:
            self._begins(page, ledger["position"])
        for number, kinds in _counted(both).items():
            event = max(len(self._events) - 1, 0)
            life = self._life(number, event)
            life.update(counts=kinds, tokens=sum(kinds.values()), evicted=None)
            if _tier(life) not in _INSIDE:  # it went on growing
                self._place(number, event, self._inside(number))
        self._looked = ledger.latest_page
        held = page[ledger.held()].unique()
        if everywhere or not torch.equal(held, self._held):
            self._held, pages = held, set(held.tolist())
            for number in page.unique().tolist():
                if number in self._pages:
                    self._pages[number]["pinned"] = number in pages

    def _grade(self) -> None:
        """Note which pages went to fewer bits since the last event, or are no longer there."""
        if self._memory is None:
            return
        before, self._coded = self._coded, self._at_fewer_bits()
        self._lower = self._cache.coded_tokens
        changed = before ^ self._coded
        kept = self._kept() if changed else set()
        for page in changed & kept:
            self._place(page, len(self._events) - 1, self._inside(page))

    def _at_fewer_bits(self) -> set[int]:
        """Return the pages of whose kept tokens at least half are at fewer bits."""
        coded = self._cache.coded_tokens
        if not coded:
            return set()
        page = self._cache.ledgers[0]["page"]  # of codes first
        lower, count = page[:coded].unique(return_counts=True)
        pages, kept = page.unique(return_counts=True)
        kept = kept[torch.searchsorted(pages, lower)]
        return set(lower[2 * count >= kept].tolist())

    def _inside(self, page: int) -> str:
        """Return where a page is of which some is in the cache."""
        return QUANTIZED if page in self._coded else RESIDENT

    def _snapshot(self) -> None:
        ledger = self._cache.ledgers[0]
        if not ledger.length:
            return
        score = ledger.page_score(self._cache.now).float()
        lowest = min(0.0, float(score.min()))
        above = float(score.max()) - lowest
        share = (score - lowest) / above if above > 0 else torch.ones_like(score)
        first = torch.zeros(ledger.num_pages, dtype=torch.int64, device=ledger.device)
        first[ledger["page_index"]] = ledger["page"]
        self._snapshots.append(
            {
                "event": len(self._events) - 1,
                "pages": first,
                "scores": share,
                "refreshed": sorted(self._refreshed & set(first.tolist()))
                if self._refreshed
                else [],
            }
        )
        self._refreshed.clear()
        scores = sum(len(shot["pages"]) for shot in self._snapshots)
        many = len(self._snapshots) > _MOST_SNAPSHOTS or scores > _MOST_SCORES
        if many and len(self._snapshots) > 1:
            # A refresh belongs to the next snapshot that stays.
            kept: list[dict[str, Any]] = []
            carried: set[int] = set()
            for number, snapshot in enumerate(self._snapshots):
                carried |= set(snapshot["refreshed"])
                if number % 2 == 0:
                    there = set(snapshot["pages"].tolist()) if carried else set()
                    kept.append({**snapshot, "refreshed": sorted(carried & there)})
                    carried = set()
            self._refreshed |= carried
            self._snapshots = kept
            self._stride *= 2

    def _observed(self, row: int, mass: Tensor, refreshed: Tensor) -> None:
        self._refreshed |= set(self._cache.ledgers[row]["page"][refreshed].unique().tolist())
        if self._cache.steps != self._steps:  # else the end of a prompt was observed
            self._steps = self._cache.steps
            self._event("decode")

    def _evicted(self, evicted: Evicted) -> None:
        self._event("evict")
        event = len(self._events) - 1
        kept = self._kept()
        if self._memory is not None:
            self._begins(evicted.page, evicted.position)
            for page, tier in self._below.items():
                self._place(page, event, tier)
            self._below.clear()
        pairs = torch.stack([evicted.page, evicted.region])
        for page, kinds in _counted(pairs).items():
            if page in kept:
                continue
            life = self._life(page, event)
            life.update(counts=kinds, tokens=sum(kinds.values()), evicted=event)
            if self._memory is not None:
                self._place(page, event, self._memory.tier_of(self._first[page]) or LOST)

    def _life(self, page: int, event: int) -> dict[str, Any]:
        return self._pages.setdefault(page, {"born": event, "pinned": False, "moves": []})

    def _kept(self) -> set[int]:
        """Return the pages of which some is in the cache."""
        ledgers = self._cache.ledgers
        return set(ledgers[0]["page"].unique().tolist()) if ledgers else set()

    # Where the pages are that are not in the cache

    def _begins(self, page: Tensor, position: Tensor) -> None:
        """Note where pages begin of which nothing was known."""
        order = position.argsort(descending=True)
        firsts = dict(zip(page[order].tolist(), position[order].tolist(), strict=True))
        for number, first in firsts.items():
            if number not in self._first:
                self._first[number] = first
                self._by_first[first] = number

    def _moved(self, tier: str, spans: Sequence[tuple[int, int]]) -> None:
        """Tokens, from the first to before the second each, went to a tier."""
        pages = [
            self._by_first[first]
            for start, stop in spans
            for first in range(start, stop)
            if first in self._by_first
        ]
        if tier != RESIDENT:  # to make room for what the next event will tell
            self._below.update(dict.fromkeys(pages, tier))
            return
        self._event("recall")
        for page in self._kept():  # of some only a part came back, and not the first token
            self._place(page, len(self._events) - 1, self._inside(page))

    def _place(self, page: int, event: int, tier: str) -> None:
        """Note that a page is in a tier from an event on."""
        life = self._pages.get(page)
        if life is None:
            return
        moves = life["moves"]
        if moves and moves[-1][0] == event:
            moves.pop()
        if _tier(life) != tier:
            moves.append([event, tier])
        away = [at for (at, to), before in _pairs(moves) if before in _INSIDE and to not in _INSIDE]
        life["evicted"] = away[-1] if _tier(life) not in _INSIDE else None

    def _misplaced(self) -> dict[int, str]:
        """Return the pages that are not where their last move says, and where they are."""
        assert self._memory is not None
        kept, found = self._kept(), {}
        self._coded = self._at_fewer_bits()
        for page, life in self._pages.items():
            outside = None if page in kept else self._memory.tier_of(self._first[page]) or LOST
            tier = outside or self._inside(page)
            if tier != _tier(life):
                found[page] = tier
        return found

    def _settle(self) -> None:
        """Note where the pages are that moved without an event of their own."""
        if self._memory is None or not self._events:
            return
        for page, tier in self._misplaced().items():
            self._place(page, len(self._events) - 1, tier)
        self._below.clear()


def _tier(life: dict[str, Any]) -> str:
    """Return where a page is by its last move."""
    return str(life["moves"][-1][1]) if life["moves"] else RESIDENT


def _pairs(moves: list[list[Any]]) -> Iterable[tuple[list[Any], str]]:
    """Return each move with the tier that it left."""
    return zip(moves, [RESIDENT, *(tier for _, tier in moves)], strict=False)


def _told(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot as plain JSON values."""
    pairs = zip(snapshot["pages"].tolist(), snapshot["scores"].tolist(), strict=True)
    return {
        "event": snapshot["event"],
        "page_scores": {str(page): round(score, 4) for page, score in pairs},
        "refreshed": [*snapshot["refreshed"]],
    }


def _counted(pairs: Tensor) -> dict[int, dict[int, int]]:
    """Return page -> region -> tokens, from `(2, n)` pages and regions."""
    unique, counts = torch.unique(pairs, dim=1, return_counts=True)
    found: dict[int, dict[int, int]] = {}
    for page, region, count in zip(*unique.tolist(), counts.tolist(), strict=True):
        found.setdefault(page, {})[region] = count
    return found
