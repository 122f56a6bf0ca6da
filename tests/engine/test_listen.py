"""What heads ask for in a forward, for whoever listens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.families import make, tokens
from memdecay.engine.cache import MemDecayCache
from memdecay.errors import MemDecayError, ProfileError

HEADS = [(1, 0), (2, 3), (3, 1)]


@torch.no_grad()
def test_queries_are_those_of_the_attention() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    heard: list[Tensor] = []
    cache.listen(HEADS, lambda row, queries: heard.append(queries))
    ids = tokens(20)
    for part in ids.split([12, 1, 7], 1):
        model(input_ids=part, cache=cache)
    cache.listen((), None)
    model(input_ids=ids[:, :1], cache=cache)
    assert [one.shape for one in heard] == [(3, 12, 16), (3, 1, 16), (3, 7, 16)]
    queries = torch.cat(heard, 1)
    model.set_attn_implementation("eager")
    weights = model(input_ids=ids, output_attentions=True).attentions
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    for number, (layer, head) in enumerate(HEADS):
        keys = cache.pools[layer].keys(20)[0, head // 2]
        logits = (queries[number] @ keys.T / 4).masked_fill(hidden, -1e9)
        assert torch.allclose(logits.softmax(-1), weights[layer][0, head], atol=1e-4)


@torch.no_grad()
def test_queries_of_padding_are_left_out() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    heard: dict[int, Tensor] = {}
    cache.listen(HEADS, heard.__setitem__)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model(input_ids=tokens(5, rows=2), attention_mask=mask, cache=cache)
    assert {row: queries.shape[1] for row, queries in heard.items()} == {0: 3, 1: 5}


def test_heads_that_cannot_be_heard_are_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    with pytest.raises(ProfileError, match="head 4 of layer 1"):
        cache.listen([(1, 4)], lambda row, queries: None)
    by_head = MemDecayCache(model, budget=8, policy="memdecay-heads")
    with pytest.raises(MemDecayError, match="lets heads keep their own tokens, but queries"):
        by_head.listen(HEADS, lambda row, queries: None)
    assert cache.on_queries is None and by_head.on_queries is None
