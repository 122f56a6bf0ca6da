"""The tiers of a session: which pages a turn, or an answer on its way, brings back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.memory import LOST, RESIDENT
from memdecay.engine.report import TierReport
from memdecay.tiers.inside import inside
from memdecay.tiers.levels import Levels
from memdecay.tiers.recall import Outside

_NOTHING = torch.zeros(0, dtype=torch.int64)
_WORDS_ALONE = (
    "No recall heads are known for this model, so pages are found by shared rare words; memdecay "
    "calibrate measures heads."
)
FEW = 4
"""Pages that an exchange between two decode steps brings back at most."""
EARLY = 4
"""So many steps before an exchange the pages that it may bring back are fetched from disk."""


class TieredMemory:
    """What a cache forgets, by tiers, and when it comes back; see `Tiers` for the settings.

    A turn is looked at for its queries, and the pages that they ask for come back before it is
    read. These stay until the next turn while the answer is written, where every few steps the
    queries of the last ones bring back a few more pages. Each exchange leaves room for the steps
    up to the next one, so that nothing goes in between for which something has just come. Without
    heads, the ids of the turn or of the last steps take the place of queries, and no turn is
    looked at.

    What an exchange between steps brings back from disk is read on another thread: a few steps
    before, it is guessed by the queries so far. What has not arrived when the exchange is due
    comes back at the first step at which it has, up to the next exchange.

    Args:
        cache: of one sequence, which holds nothing yet.
        levels: where pages are kept; it must be empty, and nobody else's.
        page_size: tokens a page.
        heads: (layer, query head) each, by whose keys pages are found; with none, only `words`
            find them.
        words: find pages by the rare words that they share with a turn.
        pages: at most how many pages a turn brings back; None for as many as fill three
            quarters of what pins and the turn leave of the budget.
        every: decode steps between two exchanges; 0 for none.
        looks: how often a turn is looked at before it is read.
        wait: True to wait in an exchange for what comes from disk.
        exact: keep copies of what goes down to fewer bits in the cache.

    Raises:
        MemDecayError, ProfileError: as for `Outside`.
    """

    def __init__(
        self,
        cache: MemDecayCache,
        levels: Levels,
        *,
        page_size: int,
        heads: tuple[tuple[int, int], ...],
        words: bool = False,
        pages: int | None,
        every: int,
        looks: int = 2,
        wait: bool = False,
        exact: bool = True,
    ) -> None:
        self.cache = cache
        self.levels = levels
        self.outside = Outside(
            cache, levels, page_size=page_size, heads=heads, words=words, exact=exact
        )
        self.pages, self.every, self.looks = pages, every, looks if heads else 0
        self.notes: Sequence[str] = () if heads else (_WORDS_ALONE,)
        self.wait = wait
        self._margin = (page_size // 4, 3 * page_size // 4)
        self.on_move: Callable[[str, Sequence[tuple[int, int]]], None] | None = None
        self._stay = _NOTHING  # positions that the last turn brought back
        self._attach()

    def _attach(self) -> None:
        self.levels.on_move = self._moved
        self.begin()
        if self.every:
            self.cache.on_step = self._step
            if self.outside.heads:
                self.cache.listen(self.outside.heads, self._heard)

    @property
    def ids(self) -> Sequence[int]:
        """The ids of the sequence; see `Memory`."""
        return self.outside.ids

    @ids.setter
    def ids(self, ids: Sequence[int]) -> None:
        self.outside.ids = ids

    def _moved(self, page: int, tier: str) -> None:
        if tier == LOST:
            self.outside.dropped(page)
        size = self.outside.page_size
        self._tell(tier, torch.arange(page * size, (page + 1) * size))

    def _tell(self, tier: str, positions: Tensor) -> None:
        if self.on_move is None:
            return
        if tier != RESIDENT:  # copies of what is in the cache may be there too
            positions = positions[~torch.isin(positions, self.cache.ledgers[0]["position"].cpu())]
        if len(positions):
            ends = (positions.diff() > 1).nonzero().flatten() + 1
            runs = positions.tensor_split(ends)
            self.on_move(tier, [(int(run[0]), int(run[-1]) + 1) for run in runs])

    def tier_of(self, position: int) -> str | None:
        """Return the tier of a token that is not in the cache, None if it is nowhere.

        Where a part of a page was lost, this says where the rest of it is.
        """
        return self.levels.tier_of(position // self.outside.page_size)

    # Turns

    def begin(self) -> None:
        """Say that tokens will be read or written now: steps are counted from here."""
        self._asked: list[Tensor] = []
        self._steps = 0
        self._expected = -1
        self._early: list[int] = []  # what the next exchange may bring back
        self._late: list[int] = []  # what the last exchange has still to bring back
        self.levels.fetch(())

    def wants(self, count: int) -> bool:
        """Say whether to look at a turn before it is read: whether anything could come back.

        Args:
            count: tokens of the turn.
        """
        cache = self.cache
        full = cache.budget is not None and cache.kept() + count > cache.budget
        return bool(cache.seen and (self.outside.stored or full) and self._left())

    def look(self, run: Callable[[], object], count: int) -> Tensor:
        """Run a turn and take it back; see `Outside.look`."""
        return self.outside.look(run, count)

    def exchange(
        self, queries: Tensor | None, *, ids: Sequence[int], room: int, again: bool = False
    ) -> None:
        """Bring back what a turn asks for, and let what the last one brought back go (mutates).

        Args:
            queries: of the turn, as `look` returned them; None if there are no heads.
            ids: of what was looked at, or would be.
            room: tokens of the turn. Room for them and for the first steps of an answer is left
                free, but not more than half of what pins leave.
            again: for another look at the same turn: what came back for the one before goes, and
                all that is outside is ranked by queries that have seen it.
        """
        if again:
            self.outside.send(self._stay)
        left = self._left()
        room = min(room + self.every, left // 2)
        # A quarter of the rest stays what the policy keeps.
        most = (left - room) * 3 // 4
        size = self.outside.page_size
        # Of some pages there is little outside.
        pages = 2 * -(-most // size) if self.pages is None else self.pages
        if queries is None and self.cache.budget is not None:
            # What a look would have evicted is outside before pages are chosen, too.
            self.cache.shrink(self.cache.budget - room)
        wanted = self.outside.best(queries, pages, ids)
        limit = most if self.pages is None else None
        self.levels.fetch(self.outside.holding(wanted, self._margin, limit))
        self._stay = self.outside.recall(wanted, room=room, margin=self._margin, most=limit)
        self.levels.fetch(())
        self._tell(RESIDENT, self._stay)

    def _left(self) -> int:
        """Return what pins and the page being filled leave of the budget, in tokens.

        Where tokens are at fewer bits too, it is what they leave at full precision.
        """
        cache = self.cache
        budget = cache.budget if cache.budget is not None else cache.kept() + self.outside.tokens
        left = max(0, budget - sum(cache.ledgers[0].stuck()))
        room = cache.back_room()
        return left if room is None else min(left, room)

    # Decode steps

    def _step(self, count: int) -> None:
        """So many tokens are about to be written, or read as if they were."""
        if self._steps >= self.every:
            wanted = self._best(1)
            self._asked, self._steps, self._early = [], 0, []
            self._late, self._came, self._most = wanted, _NOTHING, self._left() // 4
            if not wanted:
                self._fetch()
        elif self._steps >= self.every - EARLY and not self._early and self._on_disk:
            self._early = self._best(2)
            self._fetch()
        if self._late:
            self._bring_late(count)
        self._steps += count
        self._expected = self.cache.seen + count

    def _best(self, times: int) -> list[int]:
        """Return the pages that the last steps ask for: so many times what may come back."""
        if (self.outside.heads and not self._asked) or not self.outside.stored:
            return []
        few = FEW if self.pages is None else min(FEW, self.pages)
        asked = torch.cat(self._asked, 1)[:, -self.every :] if self._asked else None
        seen = self.cache.seen
        return self.outside.best(asked, times * few, self.ids[max(0, seen - self.every) : seen])

    def _bring_late(self, count: int) -> None:
        """Bring back what an exchange has still to bring back, if it is at hand."""
        self._fetch()
        ready = [page for page in self._late if self.wait or self._at_hand(page)]
        if not ready:
            return
        self._late = [page for page in self._late if page not in ready]
        left = self._left()
        back = self.outside.recall(
            ready,
            room=min(max(count, self.every - self._steps), left // 2),
            margin=self._margin,
            most=self._most,
            staying=torch.cat([self._stay, self._came]),
        )
        self._came = torch.cat([self._came, back])
        self._most -= len(back)
        self._tell(RESIDENT, back)
        self._fetch()

    @property
    def _on_disk(self) -> bool:
        return bool(self.levels.disk)

    def _at_hand(self, page: int) -> bool:
        return not self._on_disk or all(
            map(self.levels.at_hand, self.outside.holding([page], self._margin))
        )

    def _fetch(self) -> None:
        """Have what is late, and what the next exchange may need, read from disk; nothing else."""
        if self._on_disk:
            self.levels.fetch(self.outside.holding([*self._late, *self._early], self._margin))

    def _heard(self, row: int, queries: Tensor) -> None:
        if self.cache.seen == self._expected:  # else they are of a prompt
            self._asked.append(queries)

    # The life of a session

    def mark(self) -> Tensor:
        """Return what `back_to` needs if what follows fails."""
        return self._stay

    def back_to(self, mark: Tensor) -> None:
        """Take note that what followed `mark` never happened; the cache is as it was already."""
        self._stay = mark
        self.begin()

    def copy(self, cache: MemDecayCache) -> TieredMemory:
        """Return an independent copy for a copy of the cache; they share the bytes of pages."""
        other = copy.copy(self)
        other.cache, other.on_move = cache, None
        other.outside = self.outside.copy(cache)
        assert isinstance(other.outside.store, Levels)
        other.levels = other.outside.store
        other._attach()
        return other

    def report(self) -> TierReport:
        """Return what is where, and what moved."""
        outside, stores = self.outside, self.levels.stores
        tokens, size = inside(self.cache)
        tokens |= {name: store.tokens for name, store in stores.items()}
        for page, count in outside.copies.items():
            tokens[str(self.levels.tier_of(page))] -= count
            tokens["copies"] += count
        return TierReport(
            tokens=tokens,
            bytes={
                **size,
                **{name: store.bytes for name, store in stores.items()},
                "fetched": self.levels.fetched_bytes,
                "summaries": outside.summary_bytes,
            },
            moved_down=outside.moved_down + self.levels.moved_down,
            came_back=outside.came_back,
            lost=outside.lost,
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all that is outside, as plain JSON values and as tensors, for `restore`."""
        levels, pages = self.levels.state()
        known, summaries = self.outside.state()
        plain = {
            "levels": levels,
            "outside": known,
            "stay": self._stay.tolist(),
            "heads": [[*head] for head in self.outside.heads],
        }
        return plain, {
            **{f"page.{name}": tensor for name, tensor in pages.items()},
            **{f"known.{name}": tensor for name, tensor in summaries.items()},
        }

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Hold what `state` told, in a memory of the same settings that holds nothing (mutates)."""

        def under(prefix: str) -> dict[str, Tensor]:
            names = [name for name in tensors if name.startswith(prefix)]
            return {name.removeprefix(prefix): tensors[name] for name in names}

        sizes = self.levels.restore(plain["levels"], under("page."))
        self.outside.restore(plain["outside"], under("known."), sizes)
        self._stay = torch.tensor(plain["stay"], dtype=torch.int64)

    def clear(self) -> None:
        """Forget everything; the cache was reset already."""
        self.outside.clear()
        self.levels.moved_down = 0
        self._stay = _NOTHING
        self.begin()

    def close(self) -> None:
        """Free everything; what is evicted from now on is not written to disk any more."""
        self.levels.close()
