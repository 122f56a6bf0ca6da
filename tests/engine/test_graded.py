"""Tokens at fewer bits inside the cache: exact beside a reference, and really smaller."""

from __future__ import annotations

import pytest

from engine.lowering import Lockstep


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_random_steps_are_those_of_a_reference_that_quantizes_the_same(name, bits):
    both = Lockstep(
        name, 3, 64, full_precision=24, bits=bits, group_size=8, page_size=4, policy="memdecay"
    )
    both.run(60)
    assert both.lowered > 50
    assert both.worst < 1e-4
