"""Pages as the tests of the tiers move them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.moving import Moved


def page(
    count: int = 5,
    *,
    seed: int = 0,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (2, 3, 4),
) -> Moved:
    """A page of random tokens, of (layers, KV heads, head_dim)."""
    rng = torch.Generator().manual_seed(seed)
    layers, heads, head_dim = shape
    keys, values = torch.randn(2, layers, heads, count, head_dim, generator=rng).to(dtype)
    return Moved(
        positions=torch.arange(start, start + count),
        keys=keys,
        values=values,
        columns={
            "region": torch.randint(0, 9, (count,), generator=rng),
            "inserted_at": torch.rand(count, generator=rng),
            "pinned": torch.rand(count, generator=rng) > 0.5,
        },
    )


def identical(one: Any, other: Any) -> bool:
    """Whether two pages are the same to the bit."""
    if type(one) is not type(other):
        return False
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, Tensor):
            left, right = {"": left}, {"": right}
        if not isinstance(left, dict):
            if left != right:
                return False
            continue
        if left.keys() != right.keys():
            return False
        if not all(same_bits(left[name], right[name]) for name in left):
            return False
    return True


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit, NaN and the sign of zero included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
