"""Pages at 8 or 4 bits: keys by channel, values by token, as in KIVI (arXiv 2402.02750).

A key's channels differ in size and offset by far more than its tokens do, so each channel of a page
has a scale of its own; a value's do not, so each token has one. With x the numbers that share
a scale, l ≤ min x the lowest level and s ≥ (max x - l) / (2^bits - 1) the step:

    code = round((x - l) / s),    restored = l + s · code,    |restored - x| ≤ s / 2

before the result is rounded to the type of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memdecay.engine.graded import BITS, levels
from memdecay.engine.moving import Moved
from memdecay.errors import MemDecayError
from memdecay.tiers.packing import nbytes

_OVER_TOKENS, _OVER_CHANNELS = -2, -1


@dataclass(frozen=True, eq=False)
class Quantized:
    """A page at `bits` bits an element; positions and columns are as they were.

    Args:
        positions: (n,) int64, as in `Moved`.
        columns: likewise.
        bits: 8 or 4.
        shape: (num_layers, num_kv_heads, n, head_dim).
        dtype: of the keys and values that were quantized, and of those restored.
        keys: codes, uint8, flat; at 4 bits an even element is the low half of its byte.
        key_low: l, (num_layers, num_kv_heads, 1, head_dim) bfloat16.
        key_step: s, likewise.
        values: codes, as `keys`.
        value_low: l, (num_layers, num_kv_heads, n, 1) bfloat16.
        value_step: s, likewise.
    """

    positions: Tensor
    columns: Mapping[str, Tensor]
    bits: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    keys: Tensor
    key_low: Tensor
    key_step: Tensor
    values: Tensor
    value_low: Tensor
    value_step: Tensor

    @property
    def bytes(self) -> int:
        """All bytes of it: codes, levels, steps, positions and columns."""
        return nbytes(self)

    def restore(self) -> Moved:
        """Return the page in the type of its cache, with what quantizing cost."""
        return Moved(
            positions=self.positions,
            keys=self._restored(self.keys, self.key_low, self.key_step),
            values=self._restored(self.values, self.value_low, self.value_step),
            columns=self.columns,
        )

    def _restored(self, codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten()
        count = torch.Size(self.shape).numel()
        numbers = codes[:count].view(self.shape).to(torch.float32)
        return numbers.mul_(step.float()).add_(low.float()).to(self.dtype)


def quantize(moved: Moved, bits: int) -> Quantized:
    """Return a page at 8 or 4 bits an element.

    A page of few tokens gains little, as each channel of its keys has a level and a step however
    few they are: compare `bytes`.

    Args:
        moved: the page; it is not changed.
        bits: 8 or 4.

    Raises:
        MemDecayError: bits is neither, or a key or value is not finite.
    """
    if bits not in BITS:
        raise MemDecayError(f"bits is {bits!r}, but it must be 4 or 8.")
    keys, key_low, key_step = _quantized(moved.keys, _OVER_TOKENS, bits)
    values, value_low, value_step = _quantized(moved.values, _OVER_CHANNELS, bits)
    return Quantized(
        positions=moved.positions,
        columns=moved.columns,
        bits=bits,
        shape=tuple(moved.keys.shape),
        dtype=moved.keys.dtype,
        keys=keys,
        key_low=key_low,
        key_step=key_step,
        values=values,
        value_low=value_low,
        value_step=value_step,
    )


def _quantized(numbers: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return flat codes, levels and steps of numbers that share a scale along an axis."""
    codes, low, step = levels(numbers, axis, bits)
    codes = codes.flatten()
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, len(codes) % 2))
        codes = codes[0::2] | (codes[1::2] << 4)
    return codes, low, step
