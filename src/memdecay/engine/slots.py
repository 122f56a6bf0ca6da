"""Which token lies in which slot: the table that every layer of one attention type shares."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FEW_RUNS = 8
_ROOM = 64


@dataclass(frozen=True)
class Write:
    """Where the tokens of one forward go.

    When every row writes the same slots, `start` is the first of them and the index tensors are
    None. Otherwise (padding, rows of different lengths) the four index tensors, each
    `(num_written,)`, say which column of the forward goes to which slot of which row.
    """

    start: int
    count: int
    source_row: Tensor | None = None
    source_column: Tensor | None = None
    slot: Tensor | None = None


@dataclass(frozen=True)
class Move:
    """How one row closes its holes: the tokens in `movers` are copied into the slots `holes`.

    Both are `(num_moved,)` int64; `length` is the row's length afterwards. `order` is given
    instead, `(length,)`, when the row must keep its tokens in order of position.
    """

    row: int
    length: int
    holes: Tensor | None = None
    movers: Tensor | None = None
    order: Tensor | None = None

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """The (first hole, first mover, count) of tokens that move side by side."""
        if self.holes is None or self.movers is None or not len(self.holes):
            return []
        both = torch.stack([self.holes, self.movers])
        breaks = (both.diff(dim=1) != 1).any(0).nonzero().flatten() + 1
        starts = [0, *breaks.tolist()]
        ends = [*starts[1:], len(self.holes)]
        firsts = both[:, starts].tolist()
        return [
            (hole, mover, end - start)
            for hole, mover, start, end in zip(*firsts, starts, ends, strict=True)
        ]

    @functools.cached_property
    def renumbered(self) -> Tensor:
        """The slots after the move, `(at least the last slot in use + 1,)`, by those before it."""
        if self.holes is None or self.movers is None or not len(self.holes):
            return torch.arange(self.length)
        slots = torch.arange(int(self.movers[-1]) + 1, device=self.movers.device)
        slots[self.movers] = self.holes
        return slots


class SlotTable:
    """Slot -> index of the token in its sequence, for each row, packed at the front.

    `index` is `(rows, capacity)` int64 with -1 in free slots; `lengths[row]` slots of a row are in
    use. A row is one sequence of the batch. Nothing here knows of layers or heads; where those
    differ in what they keep, the table holds what any of them keeps (docs/decisions.md).

    Args:
        rows: sequences in the batch.
        capacity: slots a row.
        window: width of a sliding-window layer, or None for full attention.
        device: where `index` lives.
    """

    def __init__(self, rows: int, capacity: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.floor = 0  # a rollback below this index would miss what left the window
        self.index = torch.full((rows, capacity), -1, dtype=torch.int64, device=device)
        self.lengths = [0] * rows

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.index.shape[1]

    @property
    def width(self) -> int:
        """Columns that attention has to read: the longest row."""
        return max(self.lengths, default=0)

    @property
    def ragged(self) -> bool:
        """Whether rows have different lengths."""
        return len(set(self.lengths)) > 1

    def grow(self, capacity: int) -> None:
        """Add free slots until there are `capacity` of them (mutates)."""
        extra = capacity - self.capacity
        if extra > 0:
            self.index = torch.nn.functional.pad(self.index, (0, extra), value=-1)

    def append(self, first_index: int, count: int, real: Tensor | None) -> Write:
        """Give slots to the next tokens of every row (mutates).

        Args:
            first_index: sequence index of the first token of the forward.
            count: tokens of the forward, padding included.
            real: `(rows, count)` bool, False for padding, which gets no slot; None if all are real.

        Returns:
            Where to write keys and values.
        """
        device = self.index.device
        arrivals = torch.arange(first_index, first_index + count, device=device)
        if real is None and not self.ragged:
            start = self.lengths[0]
            self.index[:, start : start + count] = arrivals
            self.lengths = [start + count] * self.rows
            return Write(start, count)
        if real is None:
            real = torch.ones(self.rows, count, dtype=torch.bool, device=device)
        starts = torch.tensor(self.lengths, device=device)
        source_row, source_column = real.nonzero(as_tuple=True)
        slot = starts[source_row] + real.cumsum(1)[source_row, source_column] - 1
        self.index[source_row, slot] = arrivals[source_column]
        new = real.sum(1).tolist()
        self.lengths = [length + extra for length, extra in zip(self.lengths, new, strict=True)]
        return Write(0, count, source_row, source_column, slot)

    def drop(self, row: int, gone: Tensor, *, ordered: bool = False) -> Move | None:
        """Free slots of one row and plan how to close the holes (mutates the table only).

        The tokens at the end of the row fill the holes, which moves as few tokens as were
        dropped; the mask reads true positions, so the order of slots means nothing.

        Args:
            row: which row.
            gone: `(lengths[row],)` bool, True for slots to free.
            ordered: keep the rest in order of position instead (sliding layers, whose tokens
                leave from the front).

        Returns:
            The move that keys, values and per-token columns must repeat; None if nothing goes.
        """
        old = self.lengths[row]
        keep = ~gone
        length = int(keep.sum())
        if length == old:
            return None
        if ordered:
            order = keep.nonzero().flatten()
            self.index[row, :length] = self.index[row, order]
            move = Move(row, length, order=order)
        else:
            holes = gone[:length].nonzero().flatten()
            movers = keep[length:].nonzero().flatten() + length
            self.index[row, holes] = self.index[row, movers]
            move = Move(row, length, holes, movers)
        self.index[row, length:old] = -1
        self.lengths[row] = length
        return move

    def find(self, row: int, wanted: Tensor) -> Tensor:
        """Return `(n,)` int64, the slot of each of these indices in a row; -1 for none."""
        index = self.index[row, : self.lengths[row]]
        if not len(index):
            return torch.full_like(wanted, -1)
        order = index.argsort()
        slot = order[torch.searchsorted(index[order], wanted).clamp_(max=len(index) - 1)]
        return torch.where(index[slot] == wanted, slot, -1)

    def put_back(self, row: int, indices: Tensor) -> int:
        """Give slots to `(n,)` tokens of earlier; returns the first of those slots (mutates)."""
        start = self.lengths[row]
        self.index[row, start : start + len(indices)] = indices
        self.lengths[row] = start + len(indices)
        return start

    def truncate(self, lengths: list[int]) -> None:
        """Take back the latest appends, until rows have these lengths again (mutates)."""
        for row, length in enumerate(lengths):
            self.index[row, length : self.lengths[row]] = -1
        self.lengths = [*lengths]

    def select_rows(self, rows: Tensor) -> None:
        """Make row i of the table what row `rows[i]` was (mutates)."""
        self.index = self.index.index_select(0, rows.to(self.index.device))
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    def branch(self, row: int, slots: Sequence[Tensor]) -> SlotTable:
        """Return a table with a row for each set of slots of one row of this table."""
        lengths = [len(chosen) for chosen in slots]
        other = SlotTable(len(slots), max(lengths) + _ROOM, self.window, self.index.device)
        other.floor = self.floor
        for number, chosen in enumerate(slots):
            other.index[number, : len(chosen)] = self.index[row, chosen]
        other.lengths = lengths
        return other

    def copy(self) -> SlotTable:
        """An independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.index, other.lengths = self.index.clone(), [*self.lengths]
        return other


class KVPool:
    """The keys and values of one layer, preallocated and written in place.

    `kv` is `(2, rows, num_kv_heads, capacity, head_dim)`: keys, then values, in one tensor so that
    closing holes is one copy a layer. It starts as zeros, never as uninitialised memory: a masked
    slot has weight zero, and zero times NaN is NaN.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv = torch.zeros(2, rows, heads, capacity, head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds, used or not."""
        return self.kv.untyped_storage().nbytes()

    def keys(self, width: int) -> Tensor:
        """`(rows, num_kv_heads, width, head_dim)` view of the first `width` slots' keys."""
        return self.kv[0, :, :, :width]

    def values(self, width: int) -> Tensor:
        """`(rows, num_kv_heads, width, head_dim)` view of the first `width` slots' values."""
        return self.kv[1, :, :, :width]

    def write(self, where: Write, keys: Tensor, values: Tensor) -> None:
        """Store a forward's keys and values, each `(rows, num_kv_heads, count, head_dim)`."""
        for kind, new in enumerate((keys.detach(), values.detach())):
            if where.source_row is None:
                self.kv[kind, :, :, where.start : where.start + where.count].copy_(new)
            else:
                chosen = new[where.source_row, :, where.source_column]
                self.kv[kind, where.source_row, :, where.slot] = chosen

    def move(self, move: Move) -> None:
        """Close the holes of one row as its slot table did."""
        row = self.kv[:, move.row]
        if move.order is not None:
            row[:, :, : move.length] = row.index_select(2, move.order)
        elif len(move.runs) <= _FEW_RUNS:  # evicted pages: a few slices cost less than indexing
            for hole, mover, count in move.runs:
                row[:, :, hole : hole + count] = row[:, :, mover : mover + count]
        elif move.holes is not None and move.movers is not None:
            if self.kv.shape[1] == 1:  # indexing takes longer the more dimensions there are
                row = self.kv.view(-1, *self.kv.shape[3:])
            slots = row.ndim - 2
            row.index_copy_(slots, move.holes, row.index_select(slots, move.movers))

    def grow(self, capacity: int, used: int) -> None:
        """Reallocate with room for `capacity` slots a row, keeping the first `used`."""
        two, rows, heads, old, head_dim = self.kv.shape
        if capacity > old:
            kv = self.kv.new_zeros(two, rows, heads, capacity, head_dim)
            kv[:, :, :, :used] = self.kv[:, :, :, :used]
            self.kv = kv

    def select_rows(self, rows: Tensor, used: int) -> None:
        """Make row i of the pool what row `rows[i]` was."""
        rows = rows.to(self.kv.device)
        if len(rows) == self.kv.shape[1]:
            self.kv[:, :, :, :used] = self.kv[:, :, :, :used].index_select(1, rows)
        else:
            self.kv = self.kv.index_select(1, rows)

    def take(self, slots: Tensor) -> Tensor:
        """Return a copy of slots of the first row, `(2, num_kv_heads, n, head_dim)`."""
        return self.kv[:, 0].index_select(2, slots)

    def put(self, start: int, taken: Tensor, which: Tensor) -> None:
        """Store those of the slots that `take` returned, from slot `start` on."""
        chosen = taken[:, :, which]
        self.kv[:, 0, :, start : start + chosen.shape[2]] = chosen

    def put_back(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of the first row, `(num_kv_heads, n, head_dim)`, from a slot on."""
        for kind, back in enumerate((keys, values)):
            self.kv[kind, 0, :, start : start + back.shape[1]].copy_(back)

    def saved(self, width: int) -> dict[str, Tensor]:
        """Return what `restored` needs, by the ends of its names."""
        return {"": self.kv[:, :, :, :width].contiguous()}

    def branch(self, row: int, slots: Sequence[Tensor], capacity: int) -> KVPool:
        """Return a pool with a row for each set of slots of one row of this pool."""
        two, _, heads, _, head_dim = self.kv.shape
        other = KVPool.__new__(KVPool)
        other.kv = self.kv.new_zeros(two, len(slots), heads, capacity, head_dim)
        for number, chosen in enumerate(slots):
            other.kv[:, number, :, : len(chosen)] = self.kv[:, row].index_select(2, chosen)
        return other

    def copy(self) -> KVPool:
        """An independent copy."""
        other = KVPool.__new__(KVPool)
        other.kv = self.kv.clone()
        return other
