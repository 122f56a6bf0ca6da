"""The way out of a cache and back: what it forgets is kept by pages, and the best are recalled.

A turn is looked at once for its queries and taken back; the pages outside that these queries would
look at come back into the budget, in exchange for the worst that are kept; then the turn is read.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.interrupts import uninterrupted
from memdecay.engine.moving import Moved, movable, slid_away
from memdecay.engine.undo import Checkpoint
from memdecay.errors import MemDecayError
from memdecay.tiers.quantized import Quantized
from memdecay.tiers.summaries import Summaries, rank
from memdecay.tiers.words import Words, rank_by_words, shared

_Result = TypeVar("_Result")
_COUNTS = ("moved_down", "came_back", "lost")


class PageStore(Protocol):
    """What pages outside are kept in, such as a `HostStore` or a `DiskStore`."""

    def put(self, page_id: int, page: Moved) -> bool:
        """Keep a page, of which there is none; False if there is no room for it."""

    def has_room(self, page: Moved) -> bool:
        """Say whether a page fits without another one going for it."""

    def pop(self, page_id: int) -> Moved | Quantized | None:
        """Return a page and forget it; None if it was lost."""

    def discard(self, page_id: int) -> None:
        """Forget a page without reading it, if it is there."""


@runtime_checkable
class Copied(Protocol):
    """A store that can be copied."""

    def copy(self) -> PageStore:
        """Return an independent copy."""


class Outside:
    """The pages that a cache of one sequence has forgotten, and the way back for them.

    From now on all that the budget evicts is kept in the store, until it comes back or there is no
    room for it there. A page is `page_size` neighbours in the sequence, whatever the pages of the
    cache are; a part of it may be outside while the rest is kept. Nothing here goes with a copy of
    the cache, and where all layers slide, what leaves the window is not kept either.

    Of what goes down to fewer bits inside the cache an exact copy is kept here too, with `exact`
    and as long as there is room for it: it is found as what is outside, and takes the place of its
    codes. So a token of which something is here is outside, or codes in the cache.

    Args:
        cache: whose `on_forget` and `on_rollback` are taken.
        store: where pages are kept; it must be empty, and nobody else's.
        page_size: tokens a page.
        heads: (layer, query head) each, by whose keys pages are found; those that the policy of
            the cache watches if None.
        words: find pages by the rare words that they share with what asks: alone if there are no
            heads, else together with them.
        exact: keep copies of what becomes codes.

    Raises:
        MemDecayError: `page_size` is not an integer of at least 1, the cache has another listener
            already, or its heads keep their own tokens.
        ProfileError: the model has no such head.

    Attributes:
        moved_down: pages that came here from the cache, or parts of pages, however often.
        came_back: pages that went back, likewise.
        lost: pages that could not be kept.
        ids: of all tokens of the sequence that the cache has seen, or more; whoever runs them sets
            it, if there are `words`.
        order: orders pages in place of the heads and words, if it is set: called with the queries
            (empty without heads) and the numbers of the pages outside, it returns them best first.
    """

    def __init__(
        self,
        cache: MemDecayCache,
        store: PageStore,
        *,
        page_size: int = 16,
        heads: Sequence[tuple[int, int]] | None = None,
        words: bool = False,
        exact: bool = True,
    ) -> None:
        _check_integer("page_size", page_size, 1)
        if cache.on_forget is not None or cache.on_rollback is not None:
            raise MemDecayError("The cache has what it forgets kept by somebody else already.")
        self.heads = cache.watch.heads if heads is None else tuple(heads)
        cache.listen(self.heads, None)
        self.cache = cache
        self.store = store
        self.page_size = page_size
        self.exact = exact and cache.full_precision is not None
        self._there: dict[int, int] = {}  # of each page, a bit for each token that is here
        self._leaving: dict[int, int] = {}  # likewise for what the cache is about to evict
        self._summaries: Summaries | None = None
        self._words = Words() if words else None
        self.ids: Sequence[int] = ()
        self.moved_down = self.came_back = self.lost = 0
        self.order: Callable[[Tensor, Sequence[int]], Sequence[int]] | None = None
        self._attach()

    def clear(self) -> None:
        """Forget that anything ever moved; the cache forgets the rest with its `reset`."""
        self._summaries = None
        self._words = None if self._words is None else Words()
        self.moved_down = self.came_back = self.lost = 0

    def _attach(self) -> None:
        cache = self.cache
        cache.on_forget = self._forgotten
        cache.on_rollback = self._rolled_back
        if self.exact:
            cache.on_lower = self._lowered

    def copy(self, cache: MemDecayCache) -> Outside:
        """Return the same for a copy of the cache, with a copy of the store (`Levels.copy`)."""
        if not isinstance(self.store, Copied):
            raise MemDecayError(
                f"store is a {type(self.store).__name__}, but only one with `copy` can be copied."
            )
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.cache, other.store = cache, self.store.copy()
        other._there, other._leaving = dict(self._there), {}
        other._summaries = copy.deepcopy(self._summaries)
        other._words = copy.deepcopy(self._words)
        other._attach()
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what is known of the pages, as plain JSON values and as tensors; not the store.

        Words are not among it: whoever has the ids finds them anew.
        """
        about = {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "there": [*self._there.items()],
        }
        if self._summaries is None:
            return {**about, "summaries": None}, {}
        plain, tensors = self._summaries.state()
        return {**about, "summaries": plain}, tensors

    def restore(
        self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], pages: Collection[int]
    ) -> None:
        """Know what others of the same settings knew (mutates).

        Args:
            plain: of `state`.
            tensors: likewise.
            pages: those that are in the store.
        """
        self._there = {page: there for page, there in plain["there"] if page in pages}
        if plain["summaries"] is not None:
            self._summaries = self._new_summaries(tensors["mean"].shape[-1])
            self._summaries.restore(plain["summaries"], tensors)
            for page in {*self._summaries.pages} - {*pages}:
                self._summaries.remove(page)
        self.__dict__.update(plain["counts"])

    # What is outside

    @property
    def pages(self) -> dict[int, int]:
        """For each page of which some is here, how many tokens are."""
        return {page: there.bit_count() for page, there in self._there.items()}

    @property
    def tokens(self) -> int:
        """Tokens outside."""
        return self.stored - sum(self.copies.values())

    @property
    def stored(self) -> int:
        """Tokens that are here, copies of what is in the cache among them."""
        return sum(there.bit_count() for there in self._there.values())

    @property
    def copies(self) -> dict[int, int]:
        """For each page, of how many tokens an exact copy is here while their codes are kept."""
        return {
            page: both.bit_count()
            for page, codes in self._codes().items()
            if (both := codes & self._there.get(page, 0))
        }

    @property
    def summary_bytes(self) -> int:
        """Bytes of what pages are found by."""
        keys = self._summaries.bytes if self._summaries is not None else 0
        words = self._known_words()
        return keys + (words.bytes if words is not None else 0)

    def best(self, queries: Tensor | None, count: int, ids: Sequence[int] = ()) -> list[int]:
        """Return the pages outside that are asked for most, best first.

        By words alone these are only pages that share a word with `ids`.

        Args:
            queries: `(heads, n, head_dim)`, as `look` returns them; None if there are no heads.
            count: at most how many pages.
            ids: what asks, if there are words.

        Raises:
            MemDecayError: there are heads, but no queries of theirs.
        """
        _check_integer("count", count, 0)
        if not count or not self._there:
            return []
        if self.order is not None:
            asked = torch.empty(0) if queries is None else queries
            return list(self.order(asked, [*self.pages]))[:count]
        words = self._known_words()
        if self._summaries is not None:
            if queries is None:
                raise MemDecayError("queries is None, but pages are found by queries of heads.")
            # Of pages that heads leave out words could still think much.
            best = count if words is None else None
            pages, worth = self._summaries.pages, rank(queries, self._summaries, best)
            if words is not None:
                by_words = dict(zip(words.pages, rank_by_words(ids, words).tolist(), strict=True))
                worth = worth + torch.tensor([by_words[page] for page in pages])
        elif words is not None:
            pages, worth = words.pages, shared(ids, words)
            count = min(count, int((worth > 0).sum()))
        else:
            return []
        order = worth.argsort(descending=True, stable=True)
        return [pages[number] for number in order[:count].tolist()]

    def _known_words(self) -> Words | None:
        """Return the words of the pages outside, those that have come since among them.

        These are added only now, as of a token just written the id comes after its keys.
        """
        words = self._words
        if words is not None:
            words.see(self.ids[words.seen : self.cache.seen])
            for page, there in self._there.items():
                if page not in words:
                    first = page * self.page_size
                    offsets = (at for at in range(self.page_size) if there >> at & 1)
                    words.add(page, [self.ids[first + at] for at in offsets])
        return words

    # The way back

    @uninterrupted
    def recall(
        self,
        pages: Sequence[int],
        *,
        room: int = 0,
        margin: tuple[int, int] = (0, 0),
        most: int | None = None,
        staying: Tensor | None = None,
    ) -> Tensor:
        """Bring pages back, in exchange for the worst tokens that are kept.

        What is kept of these pages stays. The budget holds at every moment: the worst go first.

        Args:
            pages: best first; what of them is not outside is passed over.
            room: tokens of the budget to leave free, for what is read next; at full precision too,
                if all of them can be.
            margin: tokens before and after each page that come with it, as what a page is found by
                and what it says need not be on one.
            most: at most how many tokens come back.
            staying: `(n,)` int64, positions that do not go for them, if there is room for that.

        Returns:
            `(n,)` int64, ascending: the positions that came back: as many, from the first page on,
            as the budget can hold beside what pins keep, the page being filled and `room`.

        Raises:
            MemDecayError: `room` is not an integer of at least 0, or the cache does not hold
                exactly one sequence without padding.
        """
        _check_integer("room", room, 0)
        ledger = movable(self.cache)
        # A pin keeps the rest of a page that comes back from going meanwhile.
        free = ledger["position"][~ledger["pinned"]]
        staying = free[:0] if staying is None else staying.to(free.device)
        try:
            wanted = self._windows(pages, margin)
            wanted = self._fitting(wanted, free, room, staying, most)
            return self._bring(wanted, room)
        finally:
            self._pin(free, free[:0])

    @uninterrupted
    def send(self, positions: Tensor) -> None:
        """Let kept tokens go outside, those that a pin keeps and the newest excepted (mutates).

        Where exact copies of codes are kept, they become codes instead.

        Args:
            positions: `(n,)` int64; those that are not kept are passed over.
        """
        ledger = movable(self.cache)
        if self.exact:
            self.cache.lower(positions)
            return
        chosen = torch.isin(ledger["position"], positions.to(ledger.device)) & ~ledger.held()
        chosen &= ledger["position"] != ledger["position"].max()
        if bool(chosen.any()):
            self.moved_down += self._keep(self.cache.take(ledger["position"][chosen]).to("cpu"))

    def look(self, run: Callable[[], object], count: int) -> Tensor:
        """Read a turn only for what it asks for, and take it back.

        Everything is as before, except that what the budget evicted for it is outside.

        Args:
            run: reads the turn: labels its tokens and runs them. It is called once.
            count: tokens of the turn, or more.

        Returns:
            `(heads, tokens read, head_dim)`, the queries of `heads`.

        Raises:
            MemDecayError: there are no heads to listen to, or nothing was read.
        """
        if not self.heads:
            raise MemDecayError(
                f"heads is empty, as policy {self.cache.policy.name!r} watches none for this "
                f"model, but pages are found by at least one head."
            )
        heard: list[Tensor] = []
        cache = self.cache
        checkpoint = Checkpoint(cache, count)
        before, kept = (cache.evicted_tokens, cache.evicted_pages), self._kept()
        heads, listener = cache.listened.heads, cache.on_queries
        cache.listen(self.heads, lambda row, queries: heard.append(queries))
        try:
            run()
        finally:
            cache.listen(heads, listener)
            checkpoint.restore()
            # What was read and evicted in the look was never there.
            gone = [then - now for then, now in zip(kept, self._kept(), strict=True)]
            cache.evicted_tokens, cache.evicted_pages = before[0] + gone[0], before[1] + gone[1]
        if not heard:
            raise MemDecayError("run read no tokens, but a turn is looked at by what it reads.")
        return torch.cat(heard, 1)

    def read(
        self, run: Callable[[], _Result], count: int, *, pages: int = 8, room: int = 0
    ) -> _Result:
        """Read a turn with the pages outside that it asks for.

        Args:
            run: reads the turn, as for `look`. It is called twice, unless nothing is outside.
            count: tokens of the turn, or more.
            pages: at most how many come back.
            room: tokens to leave free beside those of the turn, such as for an answer. For both
                together at most half of the budget is left free.

        Returns:
            What the second call of `run` returned.
        """
        _check_integer("pages", pages, 0)
        _check_integer("room", room, 0)
        if pages and self.cache.seen and (self._there or self._overflows(count)):
            wanted = self.best(self.look(run, count), pages)
            half = self.cache.budget // 2 if self.cache.budget is not None else 0
            self.recall(wanted, room=min(count + room, half))
        return run()

    def _kept(self) -> tuple[int, int]:
        """Return the tokens and pages that the cache keeps."""
        cache = self.cache
        return cache.kept(), cache.ledgers[0].num_pages if cache.ledgers else 0

    def _overflows(self, count: int) -> bool:
        budget = self.cache.budget
        return budget is not None and self.cache.kept() + count > budget

    def holding(
        self, pages: Sequence[int], margin: tuple[int, int] = (0, 0), most: int | None = None
    ) -> list[int]:
        """Return the pages of the store that `recall` takes out for some pages, in their order."""
        wanted = self._windows(pages, margin)
        wanted = wanted[self._outside(wanted)][:most]
        return [*dict.fromkeys((wanted // self.page_size).tolist())]

    def _windows(self, pages: Sequence[int], margin: tuple[int, int]) -> Tensor:
        """Return the positions of pages and of what lies around them, in the order of their worth.

        Of one page these are its own, then those after it, then those before it, nearest first.
        """
        size, (before, after) = self.page_size, margin
        ahead = torch.arange(size + after)
        offsets = torch.cat([ahead, -1 - torch.arange(before)])
        first = size * torch.tensor([*dict.fromkeys(pages)], dtype=torch.int64)
        order = (first[:, None] + offsets).flatten()
        order = order[(order >= 0) & (order < self.cache.seen)]
        distinct, number = torch.unique(order, return_inverse=True)
        places = torch.arange(len(order))
        earliest = torch.full_like(distinct, len(order)).scatter_reduce(0, number, places, "amin")
        return order[earliest.sort().values]

    def _fitting(
        self,
        wanted: Tensor,
        free: Tensor,
        room: int,
        staying: Tensor,
        most: int | None,
    ) -> Tensor:
        """Return the first of some positions for which there is room, and pin those kept.

        What is outside comes first: codes are read already, so that exact copies of them take only
        the room that is left.
        """
        if not len(wanted):
            return wanted
        codes = torch.isin(wanted, self._coded())
        here = self._outside(wanted)
        before = (here & ~codes).cumsum(0)
        codes &= here
        order = wanted.to(free.device)

        def fits(count: int, others: Tensor, copies: int = 0) -> bool:
            self._pin(free, torch.cat([others, order[:count]]))
            new = (int(before[count - 1]) if count else 0) + copies
            return (most is None or new <= most) and self._fits(new, room)

        if not fits(1, staying):
            staying = free[:0]
        count = bisect.bisect_left(
            range(len(order)), True, key=lambda number: not fits(number + 1, staying)
        )
        up = wanted[:count][codes[:count]]
        copies = bisect.bisect_left(
            range(len(up)), True, key=lambda number: not fits(count, staying, number + 1)
        )
        fits(count, staying)
        first = wanted[:count][(here & ~codes)[:count]]
        return torch.cat([first, up[:copies]])

    def _fits(self, count: int, room: int) -> bool:
        """Say whether so many tokens and `room` fit beside what must stay."""
        cache, full = self.cache, self.cache.back_room()
        if cache.budget is not None:
            stuck = max(sum(cache.ledgers[0].stuck()), 1)
            if count + stuck + room > cache.budget:
                return False
        # What comes back may itself have to stay at full precision, and then a page be filled.
        return full is None or count + max(room, cache.page_size) < full

    def _coded(self) -> Tensor:
        """Return `(n,)` int64, the positions that are codes in the cache."""
        cache = self.cache
        if not cache.coded_tokens:
            return torch.zeros(0, dtype=torch.int64)
        return cache.ledgers[0]["position"][: cache.coded_tokens].cpu()

    def _bits(self, positions: Tensor) -> dict[int, int]:
        """Return of each page of some positions a bit for each of them."""
        bits: dict[int, int] = {}
        for position in positions.tolist():
            page, offset = divmod(position, self.page_size)
            bits[page] = bits.get(page, 0) | 1 << offset
        return bits

    def _codes(self, page: int | None = None) -> dict[int, int]:
        """Return of each page, or of one, a bit for each token that is codes and stays so."""
        coded = self._coded()
        if page is not None:
            coded = coded[coded // self.page_size == page]
        bits = self._bits(coded)
        return {page: codes & ~self._leaving.get(page, 0) for page, codes in bits.items()}

    def _copies_only(self, page: int) -> bool:
        """Say whether all that is here of a page is in the cache too."""
        return not self._there.get(page, 0) & ~self._codes(page).get(page, 0)

    def _outside(self, positions: Tensor) -> Tensor:
        """Return `(n,)` bool: whether something of these positions is here."""
        pages, offsets = positions // self.page_size, positions % self.page_size
        there = [
            self._there.get(page, 0) >> offset & 1
            for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True)
        ]
        return torch.tensor(there, dtype=torch.bool)

    def _pin(self, free: Tensor, positions: Tensor) -> None:
        """Pin, of what nobody else pinned (`free`), these positions and no other."""
        ledger = self.cache.ledgers[0]
        position = ledger["position"]
        ours = torch.isin(position, free)
        ledger["pinned"][ours] = torch.isin(position[ours], positions)

    def _bring(self, positions: Tensor, room: int) -> Tensor:
        """Put tokens back with `room` left free; returns those that were not lost."""
        # They leave the store first, where what goes for them may need their room.
        parts = []
        for page in (positions // self.page_size).unique().tolist():
            part = self._out(page)
            if part is not None:
                chosen = torch.isin(part.positions, positions)
                if not bool(chosen.all()):
                    self._keep(part.select(~chosen))
                parts.append(part.select(chosen))
        if not parts:
            return positions[:0]
        moved = Moved.joined(parts)
        waiting = slid_away(self.cache, moved)
        if bool(waiting.any()):
            self._keep(moved.select(waiting))
            moved = moved.select(~waiting)
        back, codes = self._brought_up_to_date(moved)
        try:
            if len(moved):
                if self.cache.budget is not None:
                    self.cache.shrink(self.cache.budget - room - len(moved) + len(codes))
                self.cache.spare_full(room + len(moved))
                self.cache.drop_codes(codes)
            kept = self.cache.ledgers[0]["position"].to(moved.positions.device)
            known = torch.isin(moved.positions, kept)  # where a window that slid has slid back
            self.cache.put_back(back.select(~known) if bool(known.any()) else back)
        except BaseException:
            self._keep(moved)
            raise
        self.came_back += len((moved.positions // self.page_size).unique())
        return moved.positions

    def _brought_up_to_date(self, moved: Moved) -> tuple[Moved, Tensor]:
        """Let exact copies know what the ledger knows of their codes; return which these are."""
        codes = moved.positions[torch.isin(moved.positions, self._coded())]
        if not len(codes):
            return moved, codes
        ledger = self.cache.ledgers[0]
        codes = codes.to(ledger.device)
        order = ledger["position"].argsort()
        slots = order[torch.searchsorted(ledger["position"][order], codes)]
        to = torch.isin(moved.positions.to(ledger.device), codes)
        columns = {}
        for name, column in moved.columns.items():
            columns[name] = column.to(ledger.device, copy=True)
            columns[name][to] = ledger[name][slots]
        return dataclasses.replace(moved, columns=columns), codes

    # The way out

    def _forgotten(self, row: int, moved: Moved) -> None:
        """Keep what the cache is about to evict."""
        try:
            self.moved_down += self._keep(moved.to("cpu"), leaving=True)
        finally:
            self._leaving = {}

    def _keep(self, moved: Moved, *, leaving: bool = False) -> int:
        """Keep tokens, each with what is here of its page already; returns how many pages.

        Those that are about to leave the cache (`leaving`) are no copies of it from then on.
        """
        count = 0
        for page, part in self._by_page(moved):
            rest = None
            before = self._out(page)
            if leaving:
                self._leaving |= self._bits(part.positions)
            if before is not None:
                copied = torch.isin(before.positions, part.positions)
                if bool(copied.any()):
                    part = _exactly(part, before.select(copied))
                rest = before.select(~copied)
                part = Moved.joined([rest, part])
            self._give_up_copies(part)
            if self._store(page, part):
                count += 1
                continue
            self.lost += 1
            if rest is not None and len(rest):
                self._store(page, rest)
        return count

    def _lowered(self, moved: Moved) -> None:
        """Keep copies of what is about to become codes, if nothing outside has to go for them."""
        for page, part in self._by_page(moved.to("cpu")):
            if not self.store.has_room(part):
                continue
            copies, before = self._copies_only(page), self._out(page)
            whole = part
            if before is not None:
                # A newest token that was taken back may be here as it was.
                whole = Moved.joined(
                    [before, part.select(~torch.isin(part.positions, before.positions))]
                )
            if self.store.has_room(whole) and self._store(page, whole):
                continue
            if before is not None and not self._store(page, before):
                self.lost += not copies

    def _by_page(self, moved: Moved) -> Iterator[tuple[int, Moved]]:
        numbers = moved.positions // self.page_size
        for page in numbers.unique().tolist():
            yield page, moved.select(numbers == page)

    def _give_up_copies(self, part: Moved) -> None:
        """Make room for what would be lost without it."""
        if not self.exact or self.store.has_room(part):
            return
        for page, codes in self._codes().items():
            there = self._there.get(page, 0)
            if there and not there & ~codes:
                self._struck(page)
                self.store.discard(page)
                if self.store.has_room(part):
                    return

    def _store(self, page: int, part: Moved) -> bool:
        """Put a page into the store and among the summaries, if there is room for it."""
        kept = self.store.put(page, part)
        if kept:
            offsets = (part.positions - page * self.page_size).tolist()
            self._there[page] = sum(1 << offset for offset in offsets)
            self._summarise(page, part.keys)
        return kept

    def _out(self, page: int) -> Moved | None:
        """Return what is here of a page, and keep it no longer."""
        if page not in self._there:
            return None
        copies = self._copies_only(page)
        self._struck(page)
        found = self.store.pop(page)
        self.lost += found is None and not copies
        return found.restore() if isinstance(found, Quantized) else found

    def dropped(self, page: int) -> None:
        """Take note that the store has lost a page on its own (mutates)."""
        if page in self._there:
            self.lost += not self._copies_only(page)
            self._struck(page)

    def _struck(self, page: int) -> None:
        """Strike a page off that is here, but for the store."""
        del self._there[page]
        if self._summaries is not None:
            self._summaries.remove(page)
        if self._words is not None and page in self._words:
            self._words.remove(page)

    def _summarise(self, page: int, keys: Tensor) -> None:
        if not self.heads:
            return
        if self._summaries is None:
            self._summaries = self._new_summaries(keys.shape[-1])
        self._summaries.add(page, keys)

    def _new_summaries(self, head_dim: int) -> Summaries:
        layout = self.cache.layout
        per_kv = layout.num_heads // layout.num_kv_heads
        return Summaries(self.heads, heads_per_kv=per_kv, head_dim=head_dim)

    def _rolled_back(self, seen: int) -> None:
        """Forget what the sequence has not seen any more."""
        if self._words is not None and self._words.seen > seen:
            self._words.unsee()
        for page in [page for page in self._there if (page + 1) * self.page_size > seen]:
            if page * self.page_size >= seen:
                self._struck(page)
                self.store.discard(page)
                continue
            moved = self._out(page)
            left = None if moved is None else moved.select(moved.positions < seen)
            if left is not None and len(left):
                self._keep(left)
        self._put_back_by_rollback(seen - 1)

    def _put_back_by_rollback(self, newest: int) -> None:
        """Forget the newest token if it is in the cache as it was: it may have left it meanwhile.

        An answer may begin with the newest token being read again. If that fails when it has gone
        out or down, it is put back.
        """
        page = newest // self.page_size
        if self._there.get(page, 0) >> newest % self.page_size & 1:
            cache = self.cache
            if newest in cache.ledgers[0]["position"][cache.coded_tokens :].tolist():
                moved = self._out(page)
                left = None if moved is None else moved.select(moved.positions != newest)
                if left is not None and len(left):
                    self._keep(left)


def _exactly(part: Moved, exact: Moved) -> Moved:
    """Return tokens with the keys and values of exact copies of some of them."""
    to = torch.isin(part.positions, exact.positions)
    keys, values = part.keys.clone(), part.values.clone()
    keys[:, :, to], values[:, :, to] = exact.keys, exact.values
    return dataclasses.replace(part, keys=keys, values=values)


def _check_integer(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise MemDecayError(
            f"{name} is {value!r}, but it must be an integer of at least {minimum}."
        )
