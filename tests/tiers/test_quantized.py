"""Quantized pages against a literal loop, their error bounds and their bytes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memdecay.engine.moving import Moved
from memdecay.errors import MemDecayError
from memdecay.tiers import nbytes, quantize
from tiers.tier_pages import identical, page, same_bits

SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=25)
BITS = pytest.mark.parametrize("bits", [4, 8])


def bfloat16(number: float, up: bool) -> float:
    """Round by trying the neighbours, to what is not below (up) or above (down)."""
    near = torch.tensor(number, dtype=torch.float32).to(torch.bfloat16)
    wrong = near.item() < number if up else near.item() > number
    towards = torch.tensor(math.inf if up else -math.inf, dtype=torch.bfloat16)
    return (torch.nextafter(near, towards) if wrong else near).item()


def looped(numbers: list[float], bits: int) -> tuple[list[float], float]:
    """What numbers that share a scale are restored to, and the step, one at a time."""
    top = 2**bits - 1
    low = bfloat16(min(numbers), up=False)
    step = bfloat16((max(numbers) - low) / top, up=True)
    restored = []
    for number in numbers:
        code = min(top, max(0, round((number - low) / step))) if step else 0
        restored.append(low + step * code)
    return restored, step


@BITS
@SEEDED
@given(
    count=st.integers(1, 6),
    head_dim=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e20]),
    offset=st.sampled_from([0.0, 1.0, -40.0]),
)
def test_it_is_the_literal_loop_and_within_half_a_step(
    bits: int, count: int, head_dim: int, seed: int, size: float, offset: float
) -> None:
    exact = page(count, seed=seed, shape=(2, 1, head_dim))
    exact = dataclasses.replace(
        exact, keys=(exact.keys + offset) * size, values=(exact.values - offset) * size
    )
    restored = quantize(exact, bits).restore()
    for layer in range(2):
        for channel in range(head_dim):
            _check(exact.keys[layer, 0, :, channel], restored.keys[layer, 0, :, channel], bits)
        for token in range(count):
            _check(exact.values[layer, 0, token], restored.values[layer, 0, token], bits)


def _check(exact: Tensor, restored: Tensor, bits: int) -> None:
    numbers = exact.tolist()
    wanted, step = looped(numbers, bits)
    greatest = max(map(abs, numbers))
    # A tie between two codes may be broken by the last bit; then either is right.
    slack = 4 * greatest * 2**-23 + 1e-37
    for number, got, loop in zip(numbers, restored.tolist(), wanted, strict=True):
        assert abs(got - number) <= step / 2 + slack
        assert abs(got - loop) <= slack or abs(abs(got - number) - step / 2) <= slack
    width = max(numbers) - min(numbers) + abs(min(numbers)) / 128
    assert step <= width / (2**bits - 1) * (1 + 1 / 128) + slack


@BITS
def test_bytes_are_counted_exactly(bits: int) -> None:
    layers, heads, count, head_dim = 2, 3, 16, 8
    made = quantize(page(count, shape=(layers, heads, head_dim)), bits)
    elements = layers * heads * count * head_dim
    codes = 2 * elements * bits // 8
    scales = 2 * 2 * layers * heads * (head_dim + count)
    columns = count * (8 + 4 + 1)
    assert made.bytes == nbytes(made) == codes + scales + 8 * count + columns
    assert (made.keys.numel(), made.key_low.shape) == (elements * bits // 8, (2, 3, 1, 8))
    assert made.value_step.shape == (2, 3, 16, 1)


def test_an_odd_number_of_elements_is_packed_too() -> None:
    exact = page(3, shape=(1, 1, 5))
    made = quantize(exact, 4)
    assert made.keys.numel() == 8
    assert (made.restore().keys - exact.keys).abs().max() < exact.keys.abs().max() / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@BITS
def test_what_is_restored_is_of_the_type_it_was(bits: int, dtype: torch.dtype) -> None:
    exact = page(dtype=dtype)
    before = page(dtype=dtype)
    restored = quantize(exact, bits).restore()
    assert restored.keys.dtype == restored.values.dtype == dtype
    assert restored.keys.shape == exact.keys.shape
    assert same_bits(restored.positions, exact.positions)
    assert all(same_bits(restored.columns[name], exact.columns[name]) for name in exact.columns)
    assert identical(exact, before)


@BITS
def test_few_levels_come_back_as_they_were(bits: int) -> None:
    keys = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]).view(1, 1, 3, 2)
    constant = torch.full_like(keys, -3.0)
    exact = Moved(positions=torch.arange(3), keys=keys, values=constant, columns={})
    restored = quantize(exact, bits).restore()
    assert torch.equal(restored.values, constant)
    assert torch.equal(restored.keys[..., 1], keys[..., 1])
    assert (restored.keys[..., 0] - keys[..., 0]).abs().max() < 4 / (2**bits - 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_what_has_no_scale_is_refused(which: str, bad: float) -> None:
    exact = page()
    getattr(exact, which)[1, 2, 3, 1] = bad
    with pytest.raises(MemDecayError, match="not finite"):
        quantize(exact, 4)


@pytest.mark.parametrize("bits", [0, 2, 16, "4", None])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(MemDecayError, match=r"bits is .*, but it must be 4 or 8"):
        quantize(page(), bits)  # type: ignore[arg-type]
