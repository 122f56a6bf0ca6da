"""A cache in which tokens lose precision before they lose their place.

`MemDecayCache(...)` is one of these when it is given `full_precision`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache, _lasting
from memdecay.engine.forward import Forward
from memdecay.engine.graded import GradedPool, GradedTable, groups_of
from memdecay.engine.interrupts import uninterrupted
from memdecay.engine.ledger import Ledger
from memdecay.engine.moving import Moved, check_back, movable
from memdecay.engine.replay import LEAST, ReplayForward, token_equivalents
from memdecay.engine.slots import KVPool, Move
from memdecay.errors import BudgetError, MemDecayError, ModelError

_MOST_AT_ONCE = 8192


class GradedCache(MemDecayCache):
    """A `MemDecayCache` of one sequence, of which at most `full_precision` tokens are as they were.

    The others are codes that attention reads as what they stand for. When there are more, those
    that the policy likes least go down, by neighbours in groups of about `group_size`; never back
    up on their own. What stays: what pins keep, the pages of `full_regions`, the newest page, and
    as long as there is something else, what the policy protects. A token that was coded before it
    was pinned stays coded. Pages of `full_regions` for which there is no room at full precision
    leave the cache, even where it has no budget.

    What leaves the cache (`take`, `on_forget`, a branch) is what its codes stand for, at full
    precision. If it comes back, it is at full precision until it goes down again; then its new
    codes stand for what the old ones did to within half a step. Whoever keeps exact copies is told
    by `on_lower` of what goes down, and puts them back in exchange for the codes (`drop_codes`).

    Raises:
        ModelError: a layer of the model has a sliding window.
        Other errors: as `MemDecayCache`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        window = next((window for window in self.layout.windows if window is not None), None)
        if window is not None:
            raise ModelError(
                f"Layer {self.layout.windows.index(window)} of the model has a sliding window of "
                f"{window} tokens, but tokens at fewer bits (full_precision, quantized) are served "
                f"only where all layers have full attention."
            )

    def _clear(self) -> None:
        super()._clear()
        self.lowered_tokens = 0
        self._peak_nbytes = 0

    # What is in it

    @property
    def graded(self) -> GradedTable:
        """The slot table."""
        return cast("GradedTable", self.tables[0])

    def graded_pools(self) -> list[GradedPool]:
        """The pools, one a layer."""
        return cast("list[GradedPool]", self.pools)

    @property
    def coded_tokens(self) -> int:
        """Kept tokens that are codes."""
        return self.graded.coded if self.tables else 0

    @property
    def full_tokens(self) -> int:
        """Kept tokens at full precision."""
        return self.graded.full if self.tables else 0

    @property
    def nbytes_by_precision(self) -> dict[str, int]:
        """Bytes of what is at full precision, of codes with their scales, and of one layer put
        together for attention, used or not."""
        codes = sum(pool.coded_nbytes for pool in self.graded_pools())
        scratch = self.graded.scratch.nbytes if self.tables else 0
        full = sum(pool.nbytes for pool in self.pools) - codes
        return {"full": full, "codes": codes, "scratch": scratch}

    @property
    def nbytes(self) -> int:
        """Bytes that the KV holds of memory, used or not."""
        return sum(self.nbytes_by_precision.values())

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of keys, values, codes and scales ever in use, and one layer's scratch."""
        return max(self._peak_nbytes, self._used_nbytes())

    @property
    def bits_an_element(self) -> float:
        """What a number of a coded key or value takes on average, with its part of the scales."""
        if not self.coded_tokens:
            return float(self.bits)
        pool, coded = self.graded_pools()[0], self.coded_tokens  # all layers are alike
        numbers = pool.kv[:, 0, :, :1].numel() * coded
        return 8 * self._used_by_codes() / numbers

    def _used_by_codes(self) -> int:
        """Bytes that the codes of one layer and their scales take, without free slots."""
        table, pool = self.graded, self.graded_pools()[0]
        used = (
            pool.codes.narrow(2, 0, table.coded),
            pool.value_scales.narrow(2, 0, table.coded),
            pool.key_scales.narrow(2, 0, len(table.sizes)),
        )
        return sum(part.nbytes for part in used)

    def _used_nbytes(self) -> int:
        if not self.pools:
            return 0
        table, pool = self.graded, self.graded_pools()[0]  # all layers are alike
        used = pool.kv[:, 0].narrow(2, 0, table.full).nbytes + self._used_by_codes()
        scratch = pool.kv[:, 0, :, :1].nbytes * table.width if table.coded else 0
        return len(self.pools) * used + scratch

    # A forward

    def begin(
        self,
        rows: int,
        count: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Forward | ReplayForward:
        """Make room for a forward, as `MemDecayCache.begin`; of one sequence without padding.

        Raises:
            MemDecayError: there are several sequences, or padding; or what is to go down is not
                finite, then nothing has changed but for evictions.
            Other errors: as there.
        """
        if rows != 1:
            raise MemDecayError(
                f"The forward has a batch of {rows} sequences, but a cache with full_precision "
                f"holds 1."
            )
        return super().begin(rows, count, attention_mask, position_ids)

    def end(
        self, forward: Forward | ReplayForward, output: Any = None, ids: Tensor | None = None
    ) -> None:
        """Take in what a finished forward observed."""
        super().end(forward, output, ids)
        self._peak_nbytes = self.peak_nbytes

    def _real(self, rows: int, count: int, attention_mask: Tensor | None) -> Tensor | None:
        real = super()._real(rows, count, attention_mask)
        if real is not None:
            raise MemDecayError(
                f"attention_mask hides {int((~real).sum())} of {count} tokens, but a cache with "
                f"full_precision takes no padding."
            )
        return None

    def _make_tables(self, rows: int) -> None:
        super()._make_tables(rows)
        self.tables = [GradedTable(self.main.capacity, self.layout.device)]

    def _new_pool(self, keys: Tensor, layer: int) -> KVPool:
        _, heads, count, head_dim = keys.shape
        return self._empty_pool(heads, count, head_dim, keys.dtype)

    def _empty_pool(self, heads: int, count: int, head_dim: int, dtype: torch.dtype) -> GradedPool:
        assert self.full_precision is not None
        capacity = max(count, min(self.full_precision, _MOST_AT_ONCE))
        return GradedPool(
            self.graded, heads, capacity, head_dim, self.bits, dtype, self.layout.device
        )

    def full_room(self) -> int:
        """Return the most tokens that one forward may have now; see `MemDecayCache.full_room`."""
        assert self.full_precision is not None
        if not self.ledgers:
            return self.full_precision
        return max(0, self.full_precision - sum(self._stuck(self.ledgers[0], leaving=True)))

    def back_room(self) -> int:
        """Return the most tokens that `put_back` may be given now; see there."""
        assert self.full_precision is not None
        if not self.ledgers:
            return self.full_precision
        return max(0, self.full_precision - sum(self._stuck(self.ledgers[0])))

    @_lasting
    def spare_full(self, count: int) -> None:
        """Let tokens go down until so many more fit at full precision, or as many as can."""
        if self.ledgers:
            self._lower_excess(min(count, self.back_room()))

    def _staying(self, device: torch.device) -> Tensor:
        """Return the regions whose tokens stay at full precision: those pinned too."""
        pinned = self.profile.pinned if "labels" in self.policy.needs else ()
        regions = {number for number, one in enumerate(pinned) if one} | {*self.full_regions}
        return torch.tensor(sorted(regions), dtype=torch.int64, device=device)

    def _stays(self, ledger: Ledger) -> tuple[Tensor, Tensor]:
        """Return (kv_len,) bool twice: pages that pins and regions hold, and the newest page."""
        stays = ledger["pinned"] | torch.isin(ledger["region"], self._staying(self.layout.device))
        page = ledger["page_index"]
        pages = torch.zeros(ledger.num_pages, dtype=torch.bool, device=self.layout.device)
        pages[page[stays]] = True
        return pages[page], page == ledger.num_pages - 1

    def _stuck(self, ledger: Ledger, *, leaving: bool = False) -> tuple[int, int]:
        """Return how many tokens at full precision must stay so; and those of the newest page.

        Args:
            ledger: of the sequence.
            leaving: only those that may not leave the cache either.
        """
        stays, newest = self._stays(ledger)
        held = ledger.held() if leaving else stays
        held, newest = held[self.graded.coded :], newest[self.graded.coded :]
        return int(held.sum()), int((newest & ~held).sum())

    def _check_budget(self, new: list[int]) -> None:
        super()._check_budget(new)
        assert self.full_precision is not None
        if self.full_tokens + new[0] <= self.full_precision:
            return
        held, newest = self._stuck(self.ledgers[0], leaving=True)
        room = max(0, self.full_precision - held - newest)
        if new[0] > room:
            raise BudgetError(
                f"{new[0]} new tokens do not fit full_precision={self.full_precision}, of which "
                f"pins hold {held} and the newest page {newest} more; run at most "
                f"{room} tokens a forward (prefill_chunk_size in generate) or raise full_precision."
            )

    def _make_room(self, new: list[int]) -> None:
        super()._make_room(new)
        self._forget_full(new[0])
        self._lower_excess(new[0])

    def _forget_full(self, new: int) -> None:
        """Evict pages that may not go down, if `new` tokens do not fit beside them."""
        assert self.full_precision is not None
        ledger = self.ledgers[0]
        excess = sum(self._stuck(ledger)) + new - self.full_precision
        if excess <= 0 or self.full_tokens + new <= self.full_precision:
            return
        stays, newest = self._stays(ledger)
        others = ~stays | newest | ledger.held()
        others[: self.graded.coded] = True
        excess = min(excess, int((~others).sum()))
        if not excess:
            return  # an eviction made a larger page the newest
        if self.on_forget is not None:
            movable(self)
        self._release_queries()
        page, free = ledger["page_index"], ~others
        stays = ~torch.isin(page, page[free])
        clock, span = self.clock_of(ledger), self.page_size
        room = self.full_tokens - excess - int(ledger.held().sum())
        gone = ledger.plan_down(excess, excess, clock, full=free, stays=stays, span=span, room=room)
        self._forget(0, torch.isin(page, page[gone]))

    # Going down

    def _lower_excess(self, new: int) -> None:
        """Let tokens go down until `new` ones at full precision fit."""
        assert self.full_precision is not None
        need = self.full_tokens + new - self.full_precision
        if need > 0:
            self._release_queries()
            ledger, table = self.ledgers[0], self.graded
            full = torch.ones(ledger.length, dtype=torch.bool, device=self.layout.device)
            full[: table.coded] = False
            held, newest = self._stays(ledger)
            stays = held | newest
            if int((full & ~stays).sum()) < need and ledger.open_page is None:
                stays = held  # an eviction made another page the newest
            self._lower(
                ledger.plan_down(
                    need,
                    -(-need // self.group_size) * self.group_size,
                    self.clock_of(ledger),
                    full=full,
                    stays=stays,
                    span=self.group_size,
                    room=int((full & ~ledger.held()).sum()) - need,
                )
            )
        for pool in self.graded_pools():
            pool.reserve_full(self.full_tokens + new)

    @uninterrupted
    def _lower(self, down: Tensor) -> None:
        """Make codes of tokens, `(kv_len,)` bool, all of them at full precision."""
        ledger, table = self.ledgers[0], self.graded
        slots = down.nonzero().flatten()
        slots = slots[ledger["position"].index_select(0, slots).argsort()]
        sizes = groups_of(ledger["position"][slots], self.group_size)
        made = [pool.made(slots, sizes) for pool in self.graded_pools()]  # what fails, fails here
        if self.on_lower is not None:
            self.on_lower(self._copied(down))
        coded, groups = table.coded, len(table.sizes)
        for pool in self.graded_pools():
            pool.reserve(coded + len(slots), groups + len(sizes), table.capacity)
        order, left = table.lower(slots, sizes)
        for pool, codes in zip(self.graded_pools(), made, strict=True):
            pool.lower(codes, left, coded, groups)
        ledger.move(Move(0, len(order), order=order))
        self.lowered_tokens += len(slots)

    @uninterrupted
    @_lasting
    def lower(self, positions: Tensor) -> None:
        """Let tokens go down that are at full precision and may; others are passed over.

        Args:
            positions: `(n,)` int64, true positions.
        """
        ledger = self.ledgers[0]
        held, newest = self._stays(ledger)
        down = torch.isin(ledger["position"], positions.to(ledger.device)) & ~held & ~newest
        down[: self.graded.coded] = False
        if bool(down.any()):
            self._release_queries()
            self._lower(down)

    @uninterrupted
    @_lasting
    def drop_codes(self, positions: Tensor) -> None:
        """Evict tokens that are codes, pinned or not, for whoever puts exact copies back at once.

        Neither `on_forget` nor `on_evict` is called.

        Args:
            positions: `(n,)` int64, true positions; those that are no codes are passed over.
        """
        ledger = movable(self)
        gone = torch.isin(ledger["position"], positions.to(ledger.device))
        gone[self.graded.coded :] = False
        if bool(gone.any()):
            self._release_queries()
            told, self.on_evict = self.on_evict, None
            try:
                self._drop(0, gone)
            finally:
                self.on_evict = told

    @_lasting
    def replay_room(self, prompt: int, wanted: int) -> int:
        """Return how many kept tokens one forward may repeat now, as `MemDecayCache.replay_room`.

        What they take for the time of it must fit at full precision too; others go down for that.
        """
        assert self.full_precision is not None
        count, layers = super().replay_room(prompt, wanted), len(self.layout.windows)
        if count:
            self.spare_full(token_equivalents(prompt + min(count, LEAST), layers))
        free = (self.full_precision - self.full_tokens) * layers
        return max(0, min(count, free - prompt))

    # Out and back

    def _copied(self, gone: Tensor) -> Moved:
        """Return a copy of kept tokens, `(kv_len,)` bool; codes as what they stand for."""
        ledger = self.ledgers[0]
        slots = gone.nonzero().flatten()
        slots = slots[ledger["position"].index_select(0, slots).argsort()]
        columns = {name: ledger[name].index_select(0, slots) for name in ledger.columns}
        taken = torch.stack([pool.take(slots) for pool in self.pools], 1)
        return Moved(columns["position"].clone(), taken[0], taken[1], columns)

    @uninterrupted
    @_lasting
    def put_back(self, moved: Moved) -> None:
        """Let tokens be kept again; others go down for them, or they do themselves.

        They come back at full precision, as many at a time as can be (`full_room`), those of
        early positions first.

        Args:
            moved: on any device.

        Raises:
            BudgetError: as `MemDecayCache.put_back`, or no token can come back as pins and regions
                fill `full_precision`; nothing has changed.
            MemDecayError: as there.
        """
        if not len(check_back(self, moved)):
            return
        self._check_back(moved)
        self._release_queries()
        start = 0
        while start < len(moved):
            count = min(len(moved) - start, self.back_room())
            self._lower_excess(count)
            part = torch.arange(start, start + count, device=moved.positions.device)
            super().put_back(moved.select(part))
            start += count

    def _check_back(self, moved: Moved) -> None:
        """Refuse tokens to put back if those that must be at full precision would not fit."""
        assert self.full_precision is not None
        if self.full_tokens + len(moved) <= self.full_precision:
            return
        ledger, back = self.ledgers[0], moved.to(self.layout.device).columns
        region, pinned = (torch.cat([ledger[name], back[name]]) for name in ("region", "pinned"))
        stays = pinned | torch.isin(region, self._staying(region.device))
        page = torch.cat([ledger["page"], back["page"]])
        held = int(torch.isin(page, page[stays])[self.graded.coded :].sum())
        if held + self.page_size >= self.full_precision:
            raise BudgetError(
                f"{len(moved)} tokens to put back do not fit full_precision={self.full_precision}, "
                f"of which pins and full_regions would hold {held} and the newest page up to "
                f"{self.page_size}."
            )

    # Copies

    @_lasting
    def copy(self) -> MemDecayCache:
        """Return an independent copy, for the same model."""
        other = cast("GradedCache", super().copy())
        other.pools = [pool.of(other.graded) for pool in other.graded_pools()]
        return other

    @_lasting
    def restored_pool(self, layer: int, saved: Mapping[str, Tensor]) -> KVPool:
        """Return the pool of a layer of which `GradedPool.saved` returned this."""
        sizes = saved[".sizes"].tolist()
        if not layer:
            self.graded.regroup(sizes)
        if sizes != self.graded.sizes:
            raise ValueError(f"{len(sizes)} groups")
        _, _, heads, full, head_dim = saved[""].shape
        pool = self._empty_pool(heads, full, head_dim, saved[""].dtype)
        pool.fill(saved)
        return pool

    @_lasting
    def adopt(self, ledger: Ledger) -> None:
        """Take a ledger of an earlier time whose tokens are those of the table."""
        super().adopt(ledger)
        assert self.full_precision is not None
        excess = self.full_tokens - self.full_precision
        if excess > 0:  # the newest token was coded, as a rollback had made it the newest
            down = torch.zeros(ledger.length, dtype=torch.bool, device=self.layout.device)
            down[-excess:] = True
            self._lower(down)

    def _select_rows(self, rows: Tensor) -> None:
        if self.rows and rows.tolist() != [0]:
            raise MemDecayError(
                f"rows is {rows.tolist()}, but a cache with full_precision holds one sequence, so "
                f"it must be [0]."
            )

    @_lasting
    def branch(self, kept: Sequence[Tensor], *, row: int = 0) -> MemDecayCache:
        """Return a cache with a sequence for each keep set, as `MemDecayCache.branch`.

        All of it is at full precision, what was coded as what its codes stand for, and nothing
        goes down in it: its `full_precision` is None.

        Args:
            kept: for each new sequence the true positions to keep, `(n,)` int64; those that the
                row does not hold are passed over.
            row: 0.

        Raises:
            MemDecayError: there is no keep set, or one of them is empty.
        """
        other = super().branch(kept, row=row)
        other.full_precision = None
        return other

    def branch_heads(self, kept: Sequence[Sequence[Tensor]], *, row: int = 0) -> Any:
        """Refuse: heads that keep their own tokens are not coded.

        Raises:
            MemDecayError: always.
        """
        raise MemDecayError(
            "A cache with full_precision has no branch whose heads keep their own tokens; use "
            "branch."
        )
