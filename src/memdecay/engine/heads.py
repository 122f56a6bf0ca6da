"""Keep sets by head: what each KV head of a layer holds, and what is known of tokens and heads.

An entry is one token in one KV head of one layer. The ledger and the slot table hold every token
that at least one head keeps; a pool says for each of its entries in which of those slots it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.interrupts import uninterrupted
from memdecay.engine.ledger import Labels, Ledger
from memdecay.engine.slots import KVPool, Move, Write
from memdecay.errors import MemDecayError
from memdecay.policy.head_pages import plan_head_eviction

ROOM = 16
"""Free entries that a head is given when its memory is laid out anew; it has at most twice that."""


class HeadPool(KVPool):
    """The keys and values of one layer, of which every KV head holds its own.

    `kv` is `(2, capacity, head_dim)`: keys, then values. Each head has a stretch of it, packed at
    the front, in any order; `slot`, `(capacity,)` int64, is the slot of each entry's token in the
    slot table, 0 where an entry is free. After `fit` no head has more than `2 * ROOM` free entries,
    so what is allocated follows what is kept.

    Args:
        heads: KV heads.
        head_dim: of keys and of values.
        dtype: of keys and values.
        device: where they live.
        need: entries that each head is about to hold.
    """

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, need: int
    ) -> None:
        self.kv = torch.empty(2, 0, head_dim, dtype=dtype, device=device)
        self.slot = torch.empty(0, dtype=torch.int64, device=device)
        self.lengths, self.starts, self.capacities = [0] * heads, [0] * heads, [0] * heads
        self.lay_out([need + ROOM] * heads)

    # What attention reads

    @property
    def even(self) -> bool:
        """Whether all heads hold equally much, so that `block` works."""
        return len(set(self.lengths)) == 1 and len(set(self.capacities)) == 1

    def block(self) -> Tensor:
        """Return `(2, num_kv_heads, length, head_dim)`, a view, if the heads are `even`."""
        rows = self.kv.view(2, len(self.lengths), self.capacities[0], -1)
        return rows[:, :, : self.lengths[0]]

    def head(self, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a head's keys and values, `(length, head_dim)`, and slots, `(length,)`.

        The tokens of the forward that runs are the last ones, in order.
        """
        part = slice(self.starts[head], self.starts[head] + self.lengths[head])
        return self.kv[0, part], self.kv[1, part], self.slot[part]

    def held(self, kv_len: int) -> Tensor:
        """Return `(num_kv_heads, kv_len)` bool: which heads hold the token of a slot."""
        held = torch.zeros(len(self.lengths), kv_len, dtype=torch.bool, device=self.kv.device)
        used = self._used()
        held[self._head[used], self.slot[used]] = True
        return held

    def keys(self, width: int) -> Tensor:
        """Refuse: there is no rectangle of keys.

        Raises:
            MemDecayError: always.
        """
        raise MemDecayError(
            "Each head of this cache keeps its own tokens, so a layer has no tensor of all keys or "
            "values; read them head by head from its pool."
        )

    def values(self, width: int) -> Tensor:
        """Refuse, like `keys`."""
        return self.keys(width)

    # Changes

    def write(self, where: Write, keys: Tensor, values: Tensor) -> None:
        """Store a forward's keys and values, each `(1, num_kv_heads, count, head_dim)`."""
        count, device = where.count, self.kv.device
        self.fit(count)
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        steps = torch.arange(count, device=device)
        entries = (torch.tensor(ends, device=device)[:, None] + steps).flatten()
        for kind, new in enumerate((keys, values)):
            self.kv[kind].index_copy_(0, entries, new.detach()[0].flatten(0, 1))
        self.slot[entries] = (steps + where.start).repeat(len(ends))
        self.lengths = [length + count for length in self.lengths]

    def fit(self, new: int) -> None:
        """Give every head memory for its entries and `new` more, and little beyond (mutates)."""
        needs = [length + new for length in self.lengths]
        if any(
            not need <= capacity <= need + 2 * ROOM
            for need, capacity in zip(needs, self.capacities, strict=True)
        ):
            self.lay_out([need + ROOM for need in needs])

    def growth(self, new: int) -> int:
        """Return how many entries `fit` may add."""
        return sum(self.lengths) + new * len(self.lengths) - sum(self.capacities)

    @uninterrupted
    def lay_out(self, capacities: Sequence[int]) -> None:
        """Move all entries to fresh memory with these capacities, one a head (mutates)."""
        kv = self.kv.new_empty(2, sum(capacities), self.kv.shape[2])
        slot = self.slot.new_zeros(sum(capacities))
        starts, start = [], 0
        for head, capacity in enumerate(capacities):
            old, length = self.starts[head], self.lengths[head]
            kv[:, start : start + length] = self.kv[:, old : old + length]
            slot[start : start + length] = self.slot[old : old + length]
            starts.append(start)
            start += capacity
        sizes = torch.tensor(capacities, device=kv.device)
        heads = torch.arange(len(capacities), device=kv.device)
        self._head = heads.repeat_interleave(sizes)
        firsts = torch.tensor(starts, device=kv.device)
        self._offset = torch.arange(len(slot), device=kv.device) - firsts[self._head]
        self.kv, self.slot, self.starts, self.capacities = kv, slot, starts, list(capacities)

    def drop(self, gone: Tensor) -> None:
        """Free entries; each head's last ones fill its holes (mutates).

        Args:
            gone: `(num_kv_heads, kv_len)` bool, by the slots of the tokens.
        """
        used = self._used()
        dropped = gone[self._head, self.slot] & used
        kept = used & ~dropped
        lengths = torch.bincount(self._head[kept], minlength=len(self.lengths))
        inside = self._offset < lengths[self._head]
        holes = (dropped & inside).nonzero().flatten()
        movers = (kept & ~inside).nonzero().flatten()
        self.kv.index_copy_(1, holes, self.kv.index_select(1, movers))
        self.slot[holes] = self.slot[movers]
        self.slot.masked_fill_(~inside, 0)
        self.lengths = lengths.tolist()

    def truncate(self, length: int) -> None:
        """Take back the latest writes: of tokens in slots from `length` on (mutates)."""
        late = self._used() & (self.slot >= length)
        counts = torch.bincount(self._head[late], minlength=len(self.lengths)).tolist()
        self.slot.masked_fill_(late, 0)
        self.lengths = [have - count for have, count in zip(self.lengths, counts, strict=True)]

    def move(self, move: Move) -> None:
        """Follow tokens to their new slots; those that go were dropped before (mutates)."""
        if move.movers is not None and len(move.movers):
            self.slot = move.renumbered.index_select(0, self.slot)

    def grow(self, capacity: int, used: int) -> None:
        """Do nothing: the slots of a table are not memory here."""

    def _used(self) -> Tensor:
        lengths = torch.tensor(self.lengths, device=self.kv.device)
        return self._offset < lengths[self._head]

    # Copies

    def take(self, slots: Tensor) -> Any:
        """Return copies of the entries of some slots: `(2, num_kv_heads, n, head_dim)`, and held.

        `held` is `(num_kv_heads, n)` bool; what a head does not hold is zero.
        """
        heads = len(self.lengths)
        taken = self.kv.new_zeros(2, heads, len(slots), self.kv.shape[2])
        held = torch.zeros(heads, len(slots), dtype=torch.bool, device=self.kv.device)
        used = self._used()
        for number, slot in enumerate(slots.tolist()):
            found = (used & (self.slot == slot)).nonzero().flatten()
            taken[:, self._head[found], number] = self.kv[:, found]
            held[self._head[found], number] = True
        return taken, held

    def put(self, start: int, taken: Any, which: Tensor) -> None:
        """Store those of the slots that `take` returned, as slots from `start` on (mutates)."""
        kv, held = taken[0][:, :, which], taken[1][:, which]
        self.fit(held.shape[1])
        for head, number in held.nonzero().tolist():
            end = self.starts[head] + self.lengths[head]
            self.kv[:, end] = kv[:, head, number]
            self.slot[end] = start + number
            self.lengths[head] += 1

    def saved(self, width: int) -> dict[str, Tensor]:
        """Return what `restored` needs, by the ends of its names."""
        used = self._used()
        return {
            "": self.kv[:, used],
            ".slot": self.slot[used],
            ".lengths": torch.tensor(self.lengths),
            ".capacities": torch.tensor(self.capacities),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Tensor]) -> HeadPool:
        """Return the pool of which `saved` returned this."""
        kv, slot = saved[""], saved[".slot"]
        lengths, capacities = saved[".lengths"].tolist(), saved[".capacities"].tolist()
        if kv.shape[1] != sum(lengths) or len(slot) != sum(lengths):
            raise ValueError(f"{tuple(kv.shape)} {tuple(slot.shape)} {lengths}")
        pool = cls(len(lengths), kv.shape[2], kv.dtype, kv.device, 0)
        pool.lay_out(capacities)
        pool.lengths = lengths
        used = pool._used()
        pool.kv[:, used], pool.slot[used] = kv, slot
        return pool

    @classmethod
    def of(cls, pool: KVPool, row: int, held: Tensor, slots: Tensor) -> HeadPool:
        """Return a pool with some entries of another pool.

        Args:
            pool: of any kind.
            row: which of its sequences.
            held: `(num_kv_heads, kv_len)` bool, the entries, all of them in `pool`.
            slots: `(kv_len,)` int64, the new slot of each token.
        """
        parts, places = [], []
        for head, wanted in enumerate(held):
            if isinstance(pool, HeadPool):
                keys, values, old = pool.head(head)
                mine = wanted[old].nonzero().flatten()
                parts.append(torch.stack([keys[mine], values[mine]]))
                places.append(slots[old[mine]])
            else:
                mine = wanted.nonzero().flatten()
                parts.append(pool.kv[:, row, head].index_select(1, mine))
                places.append(slots[mine])
        lengths = [len(place) for place in places]
        return cls.restored(
            {
                "": torch.cat(parts, 1),
                ".slot": torch.cat(places),
                ".lengths": torch.tensor(lengths),
                ".capacities": torch.tensor(lengths) + ROOM,
            }
        )

    def copy(self) -> HeadPool:
        """An independent copy."""
        other = copy.copy(self)
        other.kv, other.slot = self.kv.clone(), self.slot.clone()
        other.lengths = [*self.lengths]
        return other


class HeadLedger(Ledger):
    """A ledger of the tokens that at least one head keeps, which knows which heads those are.

    Its columns by head are `(capacity, num_layers, num_kv_heads)`: "held", and "head.NAME" for
    each of the policy's `head_columns`.

    Args:
        layers: of the model.
        heads: KV heads of a layer.
        settings: as of `Ledger`.
    """

    planner = staticmethod(plan_head_eviction)

    def __init__(self, *args: Any, layers: int, heads: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._split(layers, heads)

    def _split(self, layers: int, heads: int) -> None:
        self.layers, self.heads, self.parts = layers, heads, layers * heads
        self.entries = 0
        shape = (len(self.queries), layers, heads)
        self.columns["held"] = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for name in self.policy.head_columns:
            self.columns[f"head.{name}"] = torch.zeros(shape, device=self.device)

    @classmethod
    def of(cls, ledger: Ledger, layers: int, heads: int) -> HeadLedger:
        """Return a copy of any ledger; of another kind, as one whose tokens no head keeps yet."""
        if isinstance(ledger, HeadLedger):
            copied = ledger.copy()
            assert isinstance(copied, HeadLedger)
            return copied
        made: HeadLedger = object.__new__(cls)
        made.__dict__.update(ledger.copy().__dict__)
        made._split(layers, heads)
        return made

    def _fields(self, where: slice, now: float) -> dict[str, Any]:
        by_head = {
            name: self.columns[f"head.{name}"][where].permute(1, 2, 0)
            for name in self.policy.head_columns
        }
        held = self.columns["held"][where].permute(1, 2, 0)
        return {**super()._fields(where, now), "head_state": by_head, "held": held}

    @property
    def holding(self) -> Tensor:
        """Which heads hold a token, `(num_layers, num_kv_heads, kv_len)` bool, a view."""
        return self["held"].permute(1, 2, 0)

    def put(self, changed: Mapping[str, Tensor], where: slice | None = None) -> None:
        """Take in columns that the policy returned, by token or by head (mutates)."""
        by_head = self.policy.head_columns
        for name, column in changed.items():
            if name in by_head:
                place = where or slice(0, self.length)
                self.columns[f"head.{name}"][place] = column.permute(2, 0, 1)
        super().put({name: changed[name] for name in changed if name not in by_head}, where)

    def append(self, labels: Labels, now: float, inserted_at: Tensor | float) -> None:
        """Enter the next tokens; every head holds them (mutates)."""
        count = len(labels.region)
        fresh = slice(self.length, self.length + count)
        self.columns["held"][fresh] = True
        for name, value in self.policy.head_columns.items():
            self.columns[f"head.{name}"][fresh] = value
        self.entries += count * self.parts
        super().append(labels, now, inserted_at)

    def mark(self) -> dict[str, Any]:
        """Return what `back_to` needs to take back later appends."""
        return {**super().mark(), "entries": self.entries}

    def hold(self, held: Tensor) -> None:
        """Say which heads hold what, `(num_layers, num_kv_heads, kv_len)` bool (mutates)."""
        self["held"].copy_(held.permute(2, 0, 1))
        self.entries = int(held.sum())

    @property
    def size(self) -> int:
        """The entries kept."""
        return self.entries

    def sizes(self) -> Tensor:
        """Return (kv_len,) int64, the heads that hold each token."""
        return self["held"].sum((1, 2))
