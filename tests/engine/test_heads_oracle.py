"""Keep sets by head against one forward with a mask for each head of each layer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.families import make, tokens
from engine.head_helpers import (
    CONFIGS_BY_HEAD,
    Agreed,
    ByChance,
    HeadRecord,
    Looked,
    head_oracle,
    mixed,
    model_of,
)
from engine.helpers import chunks, close, kept
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.head_cache import HeadCache
from memdecay.policy import Policy, Tokens
from memdecay.regions import Profile

EVERY_FAMILY = pytest.mark.parametrize("name", CONFIGS_BY_HEAD)


@pytest.mark.parametrize(("policy", "page_size"), [(ByChance(), 4), (Looked(), 1), (ByChance(), 1)])
@EVERY_FAMILY
@torch.no_grad()
def test_chunks_single_tokens_and_evictions(name: str, policy: Policy, page_size: int) -> None:
    model = model_of(name)
    ids = tokens(150)
    cache = MemDecayCache(model, budget=48, policy=policy, page_size=page_size)
    record = HeadRecord(cache)
    logits = []
    for start, end in chunks(150, [40, *[1] * 12, 20, 9, *[1] * 20, 12, 12, *[1] * 25]):
        logits.append(model(input_ids=ids[:, start:end], cache=cache).logits[0])
    cache.on_evict = None
    expected = head_oracle(model, ids, record.events)
    assert record.uneven and len(record.events) > 3
    assert close(torch.cat(logits), expected)
    assert not close(expected, head_oracle(model, ids, []), 1e-2), "the evictions must matter"


@EVERY_FAMILY
@torch.no_grad()
def test_a_branch_goes_on_as_each_head_with_its_own_tokens(name: str) -> None:
    model = model_of(name)
    ids = tokens(70)
    full = MemDecayCache(model, budget=None, policy="h2o")
    model(input_ids=ids[:, :50], cache=full)
    layers, heads = len(full.layout.windows), full.layout.num_kv_heads
    rng = random.Random(4)
    keep = [
        [torch.tensor(sorted(rng.sample(range(50), rng.randint(0, 30)))) for _ in range(heads)]
        for _ in range(layers)
    ]
    lost = [[torch.arange(50)[~torch.isin(torch.arange(50), one)] for one in row] for row in keep]
    branch = full.branch_heads(keep)
    assert branch.kept_entries() == sum(len(one) for row in keep for one in row)
    assert full.kept() == 50
    assert branch.nbytes < full.nbytes
    logits = [
        model(input_ids=ids[:, 50 + a : 50 + b], cache=branch).logits[0]
        for a, b in chunks(20, [7, 1, 1, 11])
    ]
    assert close(torch.cat(logits), head_oracle(model, ids, [(50, lost)])[50:])
    again = branch.branch_heads(keep)  # of a cache by head, with what came later left out
    assert torch.equal(
        again.ledgers[0]["held"].sum(0), torch.tensor([[len(x) for x in r] for r in keep])
    )
    more = model(input_ids=tokens(5, seed=9), position_ids=torch.arange(70, 75)[None], cache=again)
    later = [[torch.cat([one, torch.arange(50, 70)]) for one in row] for row in lost]
    both = torch.cat([ids, tokens(5, seed=9)], 1)
    expected = head_oracle(model, both, [(50, lost), (70, later)])
    assert close(more.logits[0], expected[70:])


@pytest.mark.parametrize("cut", [[30], [1], [8, 22]])
@EVERY_FAMILY
@torch.no_grad()
def test_what_is_observed_is_the_mean_over_all_heads(name: str, cut: list[int]) -> None:
    model = model_of(name)
    ids = tokens(60)
    cache = MemDecayCache(model, budget=24, policy=ByChance(), page_size=2, window=5)
    record = HeadRecord(cache)
    observed = []

    def listen(row: int, mass: torch.Tensor, refreshed: torch.Tensor) -> None:
        ledger = cache.ledgers[row]
        observed.append((cache.seen, ledger["position"].clone(), mass.clone()))

    cache.on_observe = listen
    for start, end in chunks(60, [20, 10, *[1] * 30]):
        cache.prefilling = end <= 30
        model(input_ids=ids[:, start:end], cache=cache)
    weights = head_oracle(model, ids, record.events, attention=True)
    steps = [(seen, position, mass) for seen, position, mass in observed if seen > 31]
    assert len(steps) == 29
    for seen, position, mass in steps:
        assert torch.allclose(mass, weights[seen - 1, position], atol=1e-5)
    seen, position, mass = next(entry for entry in observed if entry[0] == 30)
    assert torch.allclose(mass, weights[25:30, position].mean(0), atol=1e-5)


class ByToken(Policy):
    """`Agreed` without heads."""

    name, summary = "by-token", "Random scores."

    def score(self, tokens: Tokens, profile: Profile) -> torch.Tensor:
        return mixed(tokens.position, torch.ones(1, 1, 1), 3)[0, 0]


@pytest.mark.parametrize("budget", [None, 40])
@EVERY_FAMILY
@torch.no_grad()
def test_equal_keep_sets_are_the_cache_without_heads(name: str, budget: int | None) -> None:
    model = model_of(name)
    ids = tokens(30)
    caches = [
        MemDecayCache(model, budget=budget, policy=policy, page_size=1)
        for policy in (Agreed(), ByToken())
    ]
    assert [type(cache) for cache in caches] == [HeadCache, MemDecayCache]
    answers: list[Any] = [
        model.generate(
            ids, cache=cache, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        for cache in caches
    ]
    assert torch.equal(*answers)
    assert kept(caches[0]) == kept(caches[1])
    assert caches[0].kept() == caches[1].kept() == len(kept(caches[0]))
    assert caches[0].kept_entries() == caches[1].kept_entries()


@torch.no_grad()
def test_bfloat16_is_close_to_the_cache_without_heads() -> None:
    model = make("qwen2", torch.bfloat16)
    ids = tokens(60)
    logits = []
    for policy in (Agreed(), ByToken()):
        cache = MemDecayCache(model, budget=32, policy=policy, page_size=1)
        parts = [
            model(input_ids=ids[:, start:end], cache=cache).logits[0].float()
            for start, end in chunks(60, [20, 10, *[1] * 10, 5])
        ]
        logits.append(torch.cat(parts))
    assert close(*logits, 0.1)
