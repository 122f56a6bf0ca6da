"""Tokens kept in attention at 8 or 4 bits: their codes, the slots they have, and a layer's pool.

The coded tokens of a sequence are its first slots, the others follow at full precision; so one
number, `GradedTable.coded`, says for all layers where a slot lives. Tokens go down in groups.
A group's keys have a scale a channel and its values one a token, as in KIVI (arXiv 2402.02750).
With x the numbers that share a scale, l ≤ min x the lowest level and s ≥ (max x - l) / (2^bits - 1)
the step:

    code = round((x - l) / s),    x' = l + s · code,    |x' - x| ≤ s / 2

before x' is rounded to the type of the cache. Codes are made once: what stays of a group keeps the
scales of the group, whatever leaves it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memdecay.engine.slots import KVPool, Move, SlotTable, Write
from memdecay.errors import MemDecayError

BITS = (4, 8)
"""Bits of a code; two codes of 4 share a byte."""
GROUP = 32
"""Tokens that go down together, unless asked for other groups."""
_KEYS, _VALUES = 0, 1
_ROOM = 64
_AT_ONCE = 2048


@dataclass(frozen=True)
class Codes:
    """Keys and values of one layer on their way down, and what they cost.

    Args:
        codes: `(2, num_kv_heads, n, bytes a token)` uint8; at 4 bits the second half of the
            channels are the high halves of the bytes.
        key_scales: `(2, num_kv_heads, groups, head_dim)` bfloat16: l, then s.
        value_scales: `(2, num_kv_heads, n, 1)` bfloat16, likewise.
    """

    codes: Tensor
    key_scales: Tensor
    value_scales: Tensor


@dataclass(frozen=True)
class Closing:
    """How a run of entries closes its holes in order: `stay` of them are left."""

    stay: Tensor

    @functools.cached_property
    def _first(self) -> int:
        moved = self.stay != torch.arange(len(self.stay), device=self.stay.device)
        return int(moved.to(torch.int8).argmax()) if bool(moved.any()) else len(self.stay)

    @functools.cached_property
    def _rest(self) -> Tensor:
        return self.stay[self._first :]

    def close(self, entries: Tensor, dim: int) -> None:
        """Move what stays of `entries` to their front (mutates)."""
        if len(self._rest):
            into = entries.narrow(dim, self._first, len(self._rest))
            into.copy_(entries.index_select(dim, self._rest))


@dataclass(frozen=True)
class Shift(Move):
    """A move of a row whose first slots are coded: codes, groups and the rest close up apart.

    Args:
        codes: of the coded slots; None if all of them stay.
        groups: of the groups; likewise.
        full: of the slots at full precision; likewise.
    """

    codes: Closing | None = None
    groups: Closing | None = None
    full: Closing | None = None


@dataclass(eq=False)
class Scratch:
    """Memory in which the keys and values of one layer are put together; all layers share it."""

    kv: Tensor | None = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return 0 if self.kv is None else self.kv.untyped_storage().nbytes()

    def of(self, like: Tensor, width: int, most: int) -> Tensor:
        """Return `(2, 1, num_kv_heads, width, head_dim)` to write to.

        Args:
            like: `(2, 1, num_kv_heads, any, head_dim)`, of the same kind.
            width: slots needed.
            most: slots that will ever be.
        """
        if self.kv is None or self.kv.shape[3] < width:
            room = max(width, min(most, width + width // 4 + _ROOM))
            two, rows, heads, _, head_dim = like.shape
            self.kv = None  # never both
            with torch.inference_mode(False):
                self.kv = like.new_zeros(two, rows, heads, room, head_dim)
        return self.kv[:, :, :, :width]


class GradedTable(SlotTable):
    """The slots of one sequence, of which the first `coded` hold codes.

    `sizes` are the tokens left of each group, in the order of their slots; `unit` divides them all,
    so that many slots that follow each other are of one group.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__(1, capacity, None, device)
        self.sizes: list[int] = []
        self.scratch = Scratch()
        self._regroup([])

    @property
    def coded(self) -> int:
        """Slots that hold codes."""
        return len(self.group_of)

    @property
    def full(self) -> int:
        """Slots in use that hold keys and values."""
        return self.lengths[0] - self.coded

    def _regroup(self, sizes: Sequence[int]) -> None:
        self.sizes = [*sizes]
        self.unit = math.gcd(*self.sizes) or 1
        count = torch.tensor(self.sizes, dtype=torch.int64, device=self.index.device)
        self.group_of = torch.arange(len(count), device=count.device).repeat_interleave(count)

    def lower(self, slots: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Closing]:
        """Let slots hold codes from now on, after those that do (mutates the table only).

        Args:
            slots: `(n,)` int64, slots at full precision, in the order they get.
            sizes: of the new groups; their sum is n.

        Returns:
            `(kv_len,)` int64, the slot that each slot was; and how those left at full precision
            close up.
        """
        coded, length = self.coded, self.lengths[0]
        stays = torch.ones(self.full, dtype=torch.bool, device=slots.device)
        stays[slots - coded] = False
        stay = stays.nonzero().flatten()
        order = torch.cat([torch.arange(coded, device=slots.device), slots, stay + coded])
        self.index[0, :length] = self.index[0, order]
        self._regroup([*self.sizes, *sizes])
        return order, Closing(stay)

    def regroup(self, sizes: Sequence[int]) -> None:
        """Take the groups of a table that was saved (mutates).

        Raises:
            ValueError: they do not fit the slots in use.
        """
        if any(size < 1 for size in sizes) or sum(sizes) > self.lengths[0]:
            raise ValueError(sizes)
        self._regroup(sizes)

    def drop(self, row: int, gone: Tensor, *, ordered: bool = False) -> Move | None:
        """Free slots, as in `SlotTable`; all others keep their order."""
        coded = self.coded
        keep = ~gone
        move = super().drop(row, gone, ordered=True)
        if move is None:
            return None
        codes = groups = full = None
        if bool(gone[:coded].any()):
            of = self.group_of[keep[:coded]]
            sizes = torch.bincount(of)
            codes, groups = (
                Closing(keep[:coded].nonzero().flatten()),
                Closing(sizes.nonzero()[:, 0]),
            )
            self._regroup(sizes[sizes > 0].tolist())
        if bool(gone[coded:].any()):
            full = Closing(keep[coded:].nonzero().flatten())
        return Shift(row, move.length, order=move.order, codes=codes, groups=groups, full=full)

    def copy(self) -> SlotTable:
        """An independent copy, with a scratch of its own."""
        other = super().copy()
        assert isinstance(other, GradedTable)
        other.sizes, other.scratch = [*self.sizes], Scratch()
        return other


class GradedPool(KVPool):
    """The keys and values of one layer: codes, and `kv` for the slots after them.

    `kv` is `(2, 1, num_kv_heads, capacity, head_dim)` for slots at full precision, so its first
    entry is slot `table.coded`. What `keys` and `values` return is of the scratch that all layers
    share, if any slot is coded: it holds until the next call, of whichever layer.

    Args:
        table: of this layer.
        heads: KV heads.
        capacity: slots at full precision.
        head_dim: channels of a head.
        bits: of a code, 4 or 8.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        table: GradedTable,
        heads: int,
        capacity: int,
        head_dim: int,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(1, heads, capacity, head_dim, dtype, device)
        self.table = table
        self.bits = bits
        width = head_dim if bits == 8 else -(-head_dim // 2)
        scale = torch.bfloat16
        self.codes = torch.zeros(2, heads, 0, width, dtype=torch.uint8, device=device)
        self.key_scales = torch.zeros(2, heads, 0, head_dim, dtype=scale, device=device)
        self.value_scales = torch.zeros(2, heads, 0, 1, dtype=scale, device=device)

    @property
    def coded_nbytes(self) -> int:
        """Bytes of codes and scales, used or not."""
        parts = (self.codes, self.key_scales, self.value_scales)
        return sum(part.untyped_storage().nbytes() for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds, used or not; the scratch is the table's."""
        return super().nbytes + self.coded_nbytes

    def keys(self, width: int) -> Tensor:
        """`(1, num_kv_heads, width, head_dim)`, the keys of the first `width` slots."""
        return self._together(_KEYS, width)

    def values(self, width: int) -> Tensor:
        """`(1, num_kv_heads, width, head_dim)`, the values of the first `width` slots."""
        return self._together(_VALUES, width)

    def _together(self, kind: int, width: int) -> Tensor:
        table = self.table
        coded = min(table.coded, width)
        if not coded:
            return self.kv[kind, :, :, :width]
        out = table.scratch.of(self.kv, width, table.capacity)[kind]
        scales = self.key_scales.float() if kind == _KEYS else self.value_scales
        unit = table.unit
        piece = max(1, _AT_ONCE // unit) * unit  # stays in the caches of a processor
        for start in range(0, coded, piece):
            part = slice(start, min(start + piece, coded))
            self._restore(kind, scales, part, unit, out[0, :, part])
        out[:, :, coded:] = self.kv[kind, :, :, : width - coded]
        return out

    def _restore(
        self, kind: int, scales: Tensor, where: slice | Tensor, unit: int, out: Tensor
    ) -> None:
        """Put what coded slots stand for into `out`, `(num_kv_heads, n, head_dim)` (mutates it).

        Args:
            kind: keys or values.
            scales: of all of them; those of keys are float32, as they are few.
            where: the slots.
            unit: so many slots that follow each other are always of one group.
            out: where to.
        """
        codes = self.codes[kind][:, where]
        numbers = out
        if out.dtype != torch.float32:
            numbers = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        if self.bits == 8:
            numbers.copy_(codes)
        else:
            half, rest = codes.shape[-1], out.shape[-1] - codes.shape[-1]
            numbers[..., :half] = codes & 15
            numbers[..., half:] = (codes >> 4)[..., :rest]
        if kind == _KEYS:
            group = self.table.group_of[where][::unit]
            for low, step, mine in zip(*scales, numbers.unflatten(1, (-1, unit)), strict=True):
                low, step = (scale.index_select(0, group)[:, None] for scale in (low, step))
                torch.addcmul(low, mine, step, out=mine)
        else:
            low, step = scales[:, :, where].float()
            numbers.mul_(step).add_(low)
        if numbers is not out:
            out.copy_(numbers)

    def write(self, where: Write, keys: Tensor, values: Tensor) -> None:
        """Store a forward's keys and values, each `(1, num_kv_heads, count, head_dim)`."""
        super().write(Write(where.start - self.table.coded, where.count), keys, values)

    def made(self, slots: Tensor, sizes: Sequence[int]) -> Codes:
        """Return the codes of slots at full precision, in groups of these sizes; nothing changes.

        Raises:
            MemDecayError: a key or value is not finite.
        """
        kv = self.kv[:, 0].index_select(2, slots - self.table.coded)
        codes, low, step = quantized(kv[_VALUES], -1, self.bits)
        both = [torch.empty(0), codes]
        by_group, scales, start = [], [], 0
        for count, size in _alike(sizes):
            part = kv[_KEYS, :, start : start + count * size].unflatten(1, (count, size))
            made, *scale = quantized(part, -2, self.bits)
            by_group.append(made.flatten(1, 2))
            scales.append(torch.stack(scale).squeeze(-2))
            start += count * size
        both[_KEYS] = torch.cat(by_group, 1)
        return Codes(torch.stack(both), torch.cat(scales, 2), torch.stack([low, step]))

    def reserve(self, coded: int, groups: int, most: int) -> None:
        """Have room for so many coded slots and groups, and little more (mutates).

        Args:
            coded: slots.
            groups: of them.
            most: coded slots that will ever be.
        """
        if coded > self.codes.shape[2]:
            room = max(coded, min(most, coded + coded // 8 + _ROOM))
            self.codes = _grown(self.codes, room)
            self.value_scales = _grown(self.value_scales, room)
        if groups > self.key_scales.shape[2]:
            self.key_scales = _grown(self.key_scales, groups + groups // 8 + 2)

    def reserve_full(self, full: int) -> None:
        """Have room for so many slots at full precision (mutates)."""
        if full > self.kv.shape[3]:
            super().grow(full, self.kv.shape[3])

    def lower(self, made: Codes, left: Closing, coded: int, groups: int) -> None:
        """Store codes for slots of `made` after the coded ones, and close up the rest (mutates).

        Args:
            made: from `made`.
            left: from `GradedTable.lower`.
            coded: slots that were coded before.
            groups: of them.
        """
        stop = coded + made.codes.shape[2]
        self.codes[:, :, coded:stop] = made.codes
        self.value_scales[:, :, coded:stop] = made.value_scales
        self.key_scales[:, :, groups : groups + made.key_scales.shape[2]] = made.key_scales
        left.close(self.kv[:, 0], 2)

    def move(self, move: Move) -> None:
        """Close the holes as the table did."""
        assert isinstance(move, Shift)
        if move.codes is not None and move.groups is not None:
            move.codes.close(self.codes, 2)
            move.codes.close(self.value_scales, 2)
            move.groups.close(self.key_scales, 2)
        if move.full is not None:
            move.full.close(self.kv[:, 0], 2)

    def grow(self, capacity: int, used: int) -> None:
        """Do nothing: the table may have any number of slots, `reserve` makes room for them."""

    def take(self, slots: Tensor) -> Tensor:
        """Return a copy of slots, `(2, num_kv_heads, n, head_dim)`; codes as what they say."""
        coded = self.table.coded
        low = slots < coded
        taken = self.kv[:, 0].index_select(2, (slots - coded).clamp(min=0))
        if bool(low.any()):
            at, which = low.nonzero().flatten(), slots[low]
            for kind, scales in enumerate((self.key_scales.float(), self.value_scales)):
                part = taken[kind].index_select(1, at)
                self._restore(kind, scales, which, 1, part)
                taken[kind].index_copy_(1, at, part)
        return taken

    def put(self, start: int, taken: Tensor, which: Tensor) -> None:
        """Store those of the slots that `take` returned, from slot `start` on."""
        self.reserve_full(start - self.table.coded + int(which.sum()))
        super().put(start - self.table.coded, taken, which)

    def put_back(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, `(num_kv_heads, n, head_dim)`, from a slot on."""
        super().put_back(start - self.table.coded, keys, values)

    def saved(self, width: int) -> dict[str, Tensor]:
        """Return what `restore` needs, by the ends of its names."""
        coded, groups = self.table.coded, len(self.table.sizes)
        return {
            "": self.kv[:, :, :, : width - coded].contiguous(),
            ".codes": self.codes[:, :, :coded].contiguous(),
            ".key_scales": self.key_scales[:, :, :groups].contiguous(),
            ".value_scales": self.value_scales[:, :, :coded].contiguous(),
            ".sizes": torch.tensor(self.table.sizes, dtype=torch.int64),
        }

    def fill(self, saved: Mapping[str, Tensor]) -> None:
        """Take what `saved` returned, of a table that has its groups already (mutates).

        Raises:
            ValueError: it does not fit.
        """
        coded, groups, full = self.table.coded, len(self.table.sizes), self.table.full
        self.reserve(coded, groups, coded)
        self.reserve_full(full)
        for into, name in (
            (self.kv[:, :, :, :full], ""),
            (self.codes[:, :, :coded], ".codes"),
            (self.key_scales[:, :, :groups], ".key_scales"),
            (self.value_scales[:, :, :coded], ".value_scales"),
        ):
            if saved[name].shape != into.shape or saved[name].dtype != into.dtype:
                raise ValueError(f"{name} {tuple(saved[name].shape)} {saved[name].dtype}")
            into.copy_(saved[name])

    def branch(self, row: int, slots: Sequence[Tensor], capacity: int) -> KVPool:
        """Return a pool at full precision with a row for each set of slots."""
        two, _, heads, _, head_dim = self.kv.shape
        other = KVPool.__new__(KVPool)
        other.kv = self.kv.new_zeros(two, len(slots), heads, capacity, head_dim)
        for number, chosen in enumerate(slots):
            other.kv[:, number, :, : len(chosen)] = self.take(chosen)
        return other

    def copy(self) -> GradedPool:
        """An independent copy, but for the table, which is the same: see `of`."""
        other = GradedPool.__new__(GradedPool)
        other.__dict__.update(self.__dict__)
        for name in ("kv", "codes", "key_scales", "value_scales"):
            setattr(other, name, getattr(self, name).clone())
        return other

    def of(self, table: GradedTable) -> GradedPool:
        """Return this pool as a layer of another table that is alike."""
        self.table = table
        return self


def levels(numbers: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, l and s of numbers that share a scale along an axis.

    Args:
        numbers: of any shape.
        axis: of the numbers that share one; it is 1 long in l and s, which are bfloat16.
        bits: 4 or 8.

    Returns:
        Codes, uint8, of the shape of the numbers; l; s.

    Raises:
        MemDecayError: a number is not finite.
    """
    top = 2**bits - 1
    exact = numbers.to(torch.float32)
    low = _rounded(exact.amin(axis, keepdim=True), -torch.inf)
    step = _rounded((exact.amax(axis, keepdim=True) - low.float()) / top, torch.inf)
    if not bool(torch.isfinite(step).all()):
        raise MemDecayError("A key or value is not finite, so it has no scale for fewer bits.")
    divisor = step.float().masked_fill_(step == 0, 1)
    codes = ((exact - low.float()) / divisor).round_().clamp_(0, top).to(torch.uint8)
    return codes, low, step


def quantized(numbers: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with the codes of `(..., head_dim)` numbers packed as `Codes` holds them."""
    codes, low, step = levels(numbers, axis, bits)
    if bits == 4:
        half = -(-codes.shape[-1] // 2)
        high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - codes.shape[-1]))
        codes = codes[..., :half] | (high << 4)
    return codes, low, step


def groups_of(positions: Tensor, size: int) -> list[int]:
    """Return the sizes of groups of tokens, each of at most `size` that are near each other.

    A group ends before a token that is `2 * size` or more after its first one, unless that leaves
    it less than half full: scales are worth their bytes only for enough tokens. So the last group
    may have to take in what is left.

    Args:
        positions: (n,) int64, ascending.
        size: of a full group.
    """
    groups: list[int] = []
    start = 0
    for at in positions.tolist():
        near = groups and (at - start < 2 * size or groups[-1] < size / 2)
        if near and groups[-1] < size:
            groups[-1] += 1
        else:
            groups.append(1)
            start = at
    if len(groups) > 1 and groups[-1] < size / 2:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def _rounded(numbers: Tensor, towards: float) -> Tensor:
    """Round to bfloat16, down or up, so that no number is outside of its levels."""
    near = numbers.to(torch.bfloat16)
    wrong = near.float() > numbers if towards < 0 else near.float() < numbers
    return torch.where(wrong, torch.nextafter(near, near.new_tensor(towards)), near)


def _alike(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Give (how many, size) of groups of one size that follow each other."""
    for size, same in itertools.groupby(sizes):
        yield len([*same]), size


def _grown(entries: Tensor, room: int) -> Tensor:
    """Return the same with zeros after it, `room` along its third dimension."""
    first, second, old, last = entries.shape
    grown = entries.new_zeros(first, second, room, last)
    grown[:, :, :old] = entries
    return grown
