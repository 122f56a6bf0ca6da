"""What a cache of one sequence was before an operation, to go back to if that fails.

Going back costs no copy of the cache: the tokens of a failed operation are the newest, so they
are taken off the end. Copied are the columns of the ledger, and the keys and values of those few
tokens that the operation would overwrite or slide out of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache, _lasting
from memdecay.engine.interrupts import uninterrupted

_COUNTERS = ("steps", "observations", "_last_count", "_prompt_is_next")
_EVICTIONS = ("evicted_tokens", "evicted_pages", "peak_tokens")


@dataclass(frozen=True)
class _Saved:
    """Slots of one table: their indices `(n,)`, and per layer what its pool's `take` returned."""

    index: Tensor
    kv: list[Any]
    whole: bool


class Checkpoint:
    """Remembers a cache of one row; the cache must be between two forwards.

    Args:
        cache: to be remembered.
        new: at most how many tokens the operation will run.
        again: whether it will take back the newest token and run it once more.
    """

    @_lasting
    def __init__(self, cache: MemDecayCache, new: int, *, again: bool = False) -> None:
        self._cache = cache
        self._seen = cache.seen
        self._counters = {name: getattr(cache, name) for name in _COUNTERS}
        self._evictions = {name: getattr(cache, name) for name in _EVICTIONS}
        self._ledger = cache.ledgers[0].copy() if cache.seen else None
        self._floors = [table.floor for table in cache.tables]
        self._saved: list[_Saved | None] = []
        for number, table in enumerate(cache.tables):
            slides = table.window is not None and table.width + new > table.capacity
            index = table.index[0, : table.width]
            chosen = index >= (0 if slides else cache.seen - again)
            self._saved.append(self._copy(number, chosen, slides) if bool(chosen.any()) else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that were copied."""
        taken = [kv for entry in self._saved if entry is not None for kv in entry.kv]
        saved = [kv[0] if isinstance(kv, tuple) else kv for kv in taken]  # by head: kv, held
        return sum(kv.numel() * kv.element_size() for kv in saved)

    @uninterrupted
    @_lasting
    def restore(self) -> None:
        """Make the cache what it was, except that evicted tokens stay evicted (mutates it)."""
        cache = self._cache
        cache.forget_labels()
        cache.prefilling = cache.stepping = False
        cache._running = cache._rollback_point = None
        if self._ledger is None:
            counted = {name: getattr(cache, name) for name in _EVICTIONS}
            cache.reset()
            cache.__dict__.update(counted)
            return
        # What came back meanwhile was evicted before, so it goes again.
        position = cache.ledgers[0]["position"]
        again = (position < self._seen) & ~torch.isin(position, self._ledger["position"])
        if bool(again.any()):
            cache._forget(0, again)
        for number, saved in enumerate(self._saved):
            self._put_back(number, saved)
        self._put_back_ledger()
        cache.seen = self._seen
        cache.__dict__.update(self._counters)
        if self._saved[0] is not None and self._saved[0].whole:
            peak = cache.peak_tokens
            cache.__dict__.update(self._evictions)
            cache.peak_tokens = peak
        cache.rolled_back()

    def _copy(self, number: int, chosen: Tensor, whole: bool) -> _Saved:
        cache = self._cache
        slots = chosen.nonzero().flatten()
        kv = [
            pool.take(slots)
            for layer, pool in enumerate(cache.pools)
            if cache.layout.table[layer] == number
        ]
        return _Saved(cache.tables[number].index[0, slots], kv, whole)

    def _put_back(self, number: int, saved: _Saved | None) -> None:
        cache, table = self._cache, self._cache.tables[number]
        index = table.index[0, : table.width]
        gone = index >= self._seen
        if saved is not None:
            gone = gone | torch.isin(index, saved.index)
        cache._move(number, 0, gone)
        table.floor = self._floors[number]
        if saved is None:
            return
        back = torch.ones_like(saved.index, dtype=torch.bool)
        if number > 0:
            back = torch.isin(saved.index, cache.main.index[0, : cache.main.width])
        start, count = table.width, int(back.sum())
        table.index[0, start : start + count] = saved.index[back]
        table.lengths[0] = start + count
        pools = [p for layer, p in enumerate(cache.pools) if cache.layout.table[layer] == number]
        for pool, kv in zip(pools, saved.kv, strict=True):
            pool.put(start, kv, back)

    def _put_back_ledger(self) -> None:
        """Give the kept tokens their columns again, in the order of their slots now."""
        cache, ledger = self._cache, self._ledger
        assert ledger is not None
        index = cache.main.index[0, : cache.main.width]
        order = ledger["position"].argsort()
        slots = order[torch.searchsorted(ledger["position"][order], index)]
        count = len(slots)
        for column in (*ledger.columns.values(), ledger.queries):
            column[:count] = column[slots]
        ledger.length = count
        pages, page_index = ledger["page"].unique(return_inverse=True)
        ledger["page_index"].copy_(page_index)
        ledger.num_pages = len(pages)
        ledger.latest_page = int(pages[-1]) if count else -1
        ledger.grow(cache.main.capacity)
        cache.adopt(ledger)
