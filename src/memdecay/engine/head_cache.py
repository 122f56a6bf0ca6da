"""A cache in which every KV head of every layer keeps its own tokens, under one budget for all.

`MemDecayCache(...)` is one of these when the policy is `per_head`. The slot table and the ledger
hold what any head keeps; the pools hold only what each head keeps, so memory is really freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache, _lasting
from memdecay.engine.forward import Forward
from memdecay.engine.head_forward import HeadForward
from memdecay.engine.heads import HeadLedger, HeadPool
from memdecay.engine.interrupts import uninterrupted
from memdecay.engine.ledger import Ledger
from memdecay.engine.replay import ReplayForward
from memdecay.engine.slots import KVPool, Move
from memdecay.engine.support import Layout
from memdecay.errors import MemDecayError, ModelError


class HeadCache(MemDecayCache):
    """A `MemDecayCache` of one sequence whose KV heads keep their own tokens.

    At most `budget * num_layers * num_kv_heads` entries are kept at every moment, wherever they
    are; an entry is one token in one KV head of one layer. `kept`, `peak_tokens` and a report
    count tokens: entries by layers and KV heads, rounded up. What is allocated is beyond that at
    most `2 * ROOM` entries a head (`memdecay.engine.heads`), which `nbytes` counts, and one layer
    more for a moment, while its memory is laid out anew.

    Raises:
        ModelError: a layer of the model has a sliding window.
        Other errors: as `MemDecayCache`.
    """

    by_head: ClassVar[bool] = True
    forward_type: ClassVar[type[Forward]] = HeadForward

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _check_layers(self.layout)

    # What is in it

    @property
    def parts(self) -> int:
        """Layers times KV heads: the entries of a token that all heads keep."""
        return len(self.layout.windows) * self.layout.num_kv_heads

    def head_pools(self) -> list[HeadPool]:
        """The pools, one a layer."""
        return cast("list[HeadPool]", self.pools)

    def pool_of(self, layer: int) -> HeadPool:
        """The pool of a layer."""
        return self.head_pools()[layer]

    @property
    def head_ledger(self) -> HeadLedger:
        """What is known of the tokens that any head keeps."""
        return cast("HeadLedger", self.ledgers[0])

    def kept(self, row: int = 0) -> int:
        """Entries kept, in tokens: by layers and KV heads, rounded up."""
        return -(-self.kept_entries(row) // self.parts)

    def kept_entries(self, row: int = 0) -> int:
        """Entries kept: one is a token in one KV head of one layer."""
        return self.head_ledger.entries if self.ledgers else 0

    def kept_by_head(self) -> list[list[Tensor]]:
        """Return for each layer and KV head the true positions it keeps, `(n,)` int64, sorted."""
        position = self.head_ledger["position"] if self.ledgers else torch.empty(0)
        return [
            [position[pool.head(head)[2]].sort().values for head in range(len(pool.lengths))]
            for pool in self.head_pools()
        ]

    @property
    def peak_nbytes(self) -> int:
        """Bytes of keys and values in use when most entries were kept, without free ones."""
        per_entry = sum(2 * pool.kv.shape[2] * pool.kv.element_size() for pool in self.pools)
        return self.peak_tokens * self.layout.num_kv_heads * per_entry

    def new_ledger(self, capacity: int = 0) -> Ledger:
        """Return the ledger of a sequence of which nothing was seen yet."""
        return HeadLedger(
            layers=len(self.layout.windows),
            heads=self.layout.num_kv_heads,
            **self._ledger_settings(capacity),
        )

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
            MemDecayError: there are several sequences, or padding.
            Other errors: as there.
        """
        if rows != 1:
            raise MemDecayError(
                f"The forward has a batch of {rows} sequences, but a cache whose heads keep their "
                f"own tokens holds 1."
            )
        return super().begin(rows, count, attention_mask, position_ids)

    def _real(self, rows: int, count: int, attention_mask: Tensor | None) -> Tensor | None:
        real = super()._real(rows, count, attention_mask)
        if real is not None:
            raise MemDecayError(
                f"attention_mask hides {int((~real).sum())} of {count} tokens, but a cache whose "
                f"heads keep their own tokens takes no padding."
            )
        return None

    def _make_room(self, new: list[int]) -> None:
        super()._make_room(new)
        self._fit(new[0])

    @_lasting
    def _fit(self, new: int = 0) -> None:
        """Let the memory of every head follow what it keeps; first where it gets less."""
        for pool in sorted(self.head_pools(), key=lambda pool: pool.growth(new)):
            pool.fit(new)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return just them: attention reads the pool."""
        self._store(key_states, value_states, layer_idx)
        return key_states, value_states

    def _new_pool(self, keys: Tensor, layer: int) -> KVPool:
        _, heads, count, head_dim = keys.shape
        if heads != self.layout.num_kv_heads:
            raise ModelError(
                f"Layer {layer} has {heads} KV heads, but the config of the model says "
                f"{self.layout.num_kv_heads}."
            )
        return HeadPool(heads, head_dim, keys.dtype, keys.device, count)

    @_lasting
    def abort(self, forward: Any) -> None:
        """Take back the tokens of a forward that raised; what was evicted for them stays so."""
        super().abort(forward)
        for pool in self.head_pools():
            pool.truncate(self.main.width)

    # Evictions

    @uninterrupted
    def _drop(self, row: int, gone: Tensor) -> None:
        """Evict entries, `(num_layers, num_kv_heads, kv_len)` bool, or whole tokens."""
        if gone.ndim == 3:
            self._release(gone)
            gone = ~self.head_ledger["held"].any(-1).any(-1)
        if bool(gone.any()):
            super()._drop(row, gone)

    def _move(self, number: int, row: int, gone: Tensor) -> None:
        self._release(gone.expand(*self.head_ledger.holding.shape))
        super()._move(number, row, gone)

    def _release(self, gone: Tensor) -> None:
        """Free entries, `(num_layers, num_kv_heads, kv_len)` bool; the tokens stay known."""
        held = self.head_ledger.holding
        gone = gone & held
        touched = gone.any(-1).any(-1).tolist()
        if any(touched):
            for pool, one, some in zip(self.head_pools(), gone, touched, strict=True):
                if some:
                    pool.drop(one)
            self.head_ledger.hold(held & ~gone)

    def evict(self, positions: Tensor | Sequence[int], row: int = 0) -> int:
        """Evict tokens from all heads by their true positions, whatever the policy says."""
        count = super().evict(positions, row)
        self._fit()
        return count

    def shrink(self, budget: int, row: int | None = None) -> None:
        """Evict by the policy until the heads keep at most `budget` tokens on average.

        Raises:
            BudgetError: `budget` is not positive, or the pins leave too little to evict.
        """
        super().shrink(budget, row)
        self._fit()

    def replay_room(self, prompt: int, wanted: int) -> int:
        """Return how many kept tokens `replay` may repeat at once, as in `MemDecayCache`."""
        room = super().replay_room(prompt, wanted)
        self._fit()
        return room

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens seen, as `MemDecayCache.crop`."""
        super().crop(tokens_to_remove)
        self._fit()

    # Copies

    @_lasting
    def restored_pool(self, layer: int, saved: Mapping[str, Tensor]) -> KVPool:
        """Return the pool of a layer of which `HeadPool.saved` returned this."""
        return HeadPool.restored(saved)

    @_lasting
    def adopt(self, ledger: Ledger) -> None:
        """Take a ledger of an earlier time; which heads hold what is what the pools hold now."""
        super().adopt(ledger)
        held = [pool.held(ledger.length) for pool in self.head_pools()]
        self.head_ledger.hold(torch.stack(held))
        self._fit()

    def _select_rows(self, rows: Tensor) -> None:
        if self.rows and rows.tolist() != [0]:
            raise MemDecayError(
                f"rows is {rows.tolist()}, but a cache whose heads keep their own tokens holds one "
                f"sequence, so it must be [0]."
            )

    def branch(self, kept: Sequence[Tensor], *, row: int = 0) -> MemDecayCache:
        """Refuse: a branch has a sequence for each keep set; see `branch_heads`.

        Raises:
            MemDecayError: always.
        """
        raise MemDecayError(
            "A cache whose heads keep their own tokens holds one sequence, so it has no branch of "
            "several; use branch_heads for each keep set."
        )


@_lasting
def branch_heads(cache: MemDecayCache, kept: Sequence[Sequence[Tensor]], row: int = 0) -> HeadCache:
    """Return a new cache of one sequence; see `MemDecayCache.branch_heads`."""
    layout = cache.layout
    _check_layers(layout)
    layers, heads = len(layout.windows), layout.num_kv_heads
    if len(kept) != layers or any(len(by_head) != heads for by_head in kept):
        raise MemDecayError(
            f"kept has {[len(by_head) for by_head in kept]} keep sets by layer, but it must have "
            f"{heads} for each of the {layers} layers."
        )
    base = cache._ledger(row)
    if base.seen != cache.seen:
        raise MemDecayError(
            f"row {row} has {cache.seen - base.seen} tokens of padding, but a cache whose heads "
            f"keep their own tokens takes none."
        )
    cache._release_queries(row)
    base.settle()
    ledger = HeadLedger.of(base, layers, heads)
    held = torch.stack(
        [
            torch.stack([torch.isin(base["position"], one.to(layout.device)) for one in by_head])
            for by_head in kept
        ]
    )
    if isinstance(base, HeadLedger):
        held &= base.holding
    union = held.any(0).any(0)
    slots = union.nonzero().flatten()
    if not len(slots):
        raise MemDecayError(f"kept holds no token of row {row}.")
    ledger.move(Move(row, len(slots), order=slots))
    ledger.hold(held[:, :, slots])
    other = cache._twin(HeadCache)
    other.rows = 1
    other.ledgers = [ledger]
    other.tables = [cache.main.branch(row, [slots])]
    ledger.grow(other.main.capacity)
    places = union.cumsum(0) - 1
    other.pools = [
        HeadPool.of(pool, row, by_head, places)
        for pool, by_head in zip(cache.pools, held, strict=True)
    ]
    other._padding = [[]]
    other.peak_tokens = other.kept()
    return other


def _check_layers(layout: Layout) -> None:
    window = next((window for window in layout.windows if window is not None), None)
    if window is not None:
        raise ModelError(
            f"Layer {layout.windows.index(window)} of the model has a sliding window of {window} "
            f"tokens, but heads can keep their own tokens only where all layers have full "
            f"attention."
        )
