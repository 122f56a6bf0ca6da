"""Logits against the oracle: one forward with a mask that hides exactly the evicted tokens."""

from __future__ import annotations

import random

import pytest
import torch

from engine.families import CONFIGS, choose, make, oracle, tokens
from memdecay.engine.cache import MemDecayCache

SCRIPT = [60, *[1] * 5, "evict", *[1] * 7, 20, "evict", 15, *[1] * 5, "evict", 1, 30, *[1] * 40]
"""Forwards by their number of tokens: a prompt, decode steps, chunks, evictions between them."""


@pytest.mark.parametrize("observe_every", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_single_tokens_chunks_and_evictions(name: str, observe_every: int) -> None:
    model = make(name)
    ids = tokens(sum(part for part in SCRIPT if isinstance(part, int)))
    cache = MemDecayCache(model, budget=None, observe_every=observe_every)
    rng, gone, events, logits, seen = random.Random(1), set(), [], [], 0
    for part in SCRIPT:
        if part == "evict":
            evicted = choose(rng, seen, gone, 0.3)
            cache.evict(evicted)
            events.append((seen, evicted))
            continue
        out = model(input_ids=ids[:, seen : seen + part], cache=cache, use_cache=True)
        logits.append(out.logits[0])
        seen += part
        assert cache.get_seq_length() == seen
    expected = oracle(model, ids, events)
    assert torch.allclose(torch.cat(logits), expected, atol=1e-4, rtol=0)
    unevicted = oracle(model, ids, [])
    assert not torch.allclose(unevicted, expected, atol=1e-2), "the evictions must matter"
