"""A Ctrl-C at any line of the engine leaves model and cache as if it had come before or after."""

from __future__ import annotations

import pytest
import torch

from engine.families import make, tokens
from engine.interrupted import interrupt_at
from memdecay.engine.cache import MemDecayCache


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_interrupt_at_any_line_is_before_or_after_a_forward(name: str, chunk: int) -> None:
    model = make(name)
    ids = tokens(48 + 3 * chunk)

    def prepared() -> MemDecayCache:
        cache = MemDecayCache(model, budget=32, page_size=8)
        for first in range(0, 48, 8):
            step(cache, first, 8)
        return cache

    def step(cache: MemDecayCache, first: int, count: int) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids[:, first : first + count], cache=cache).logits

    reference = prepared()
    expected = step(reference, 48, chunk)
    after = step(reference, 48 + chunk, chunk)
    passed, at, interrupted = True, 1, 0
    while passed:
        cache = prepared()
        passed, _ = interrupt_at(at, lambda cache=cache: step(cache, 48, chunk))  # type: ignore[misc]
        assert model.config._attn_implementation == "sdpa"
        assert cache.seen in (48, 48 + chunk)
        assert cache.ledgers[0].seen == cache.seen
        assert cache.kept() == cache.ledgers[0].length <= 32
        if cache.seen == 48:
            interrupted += 1
            assert torch.allclose(step(cache, 48, chunk), expected, atol=1e-4), at
        assert torch.allclose(step(cache, 48 + chunk, chunk), after, atol=1e-4), at
        at += 7
    assert interrupted > 3, "some interrupts must have taken the forward back"
