"""What the engine says of attention is what eager attention weights say, averaged."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.families import choose, make, oracle, tokens
from engine.helpers import chunks, kept
from memdecay.engine.cache import MemDecayCache
from memdecay.regions import REGIONS

WINDOW = 16
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "mistral_sliding", "phi", "opt"]


class Seen:
    """The observations of each row, with a place for every position of the sequence."""

    def __init__(self, cache: MemDecayCache, length: int) -> None:
        self.cache, self.length = cache, length
        self.rows: dict[int, list[Tensor]] = {}
        self.steps: list[int] = []
        cache.on_observe = self._observed

    def _observed(self, row: int, mass: Tensor, refreshed: Tensor) -> None:
        assert mass.shape == refreshed.shape
        spread = torch.zeros(self.length)
        spread[self.cache.ledgers[row]["position"]] = mass
        self.rows.setdefault(row, []).append(spread)
        self.steps.append(self.cache.steps)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_observations_are_eager_weights(name: str) -> None:
    model = make(name)
    prompt, steps = 60, 30
    ids = tokens(prompt + steps)
    cache = MemDecayCache(model, budget=None, window=WINDOW)
    seen = Seen(cache, prompt + steps)
    rng, gone, events = random.Random(5), set(), []
    model(input_ids=ids[:, :prompt], cache=cache)
    for step in range(prompt, prompt + steps):
        model(input_ids=ids[:, step : step + 1], cache=cache)
        if step % 10 == 3:
            evicted = choose(rng, step + 1, gone, 0.2)
            events.append((step + 1, evicted))
            cache.evict(evicted)
    expected = oracle(model, ids, events, attention=True)
    window, *decoded = seen.rows[0]
    assert torch.allclose(window, expected[prompt - WINDOW : prompt].mean(0), atol=1e-6)
    assert len(decoded) == steps
    for step, mass in enumerate(decoded, prompt):
        assert torch.allclose(mass, expected[step], atol=1e-6), step
        assert abs(float(mass.sum()) - 1) < 1e-5
    assert float((expected.sum(1) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])
@torch.no_grad()
def test_rows_of_a_padded_batch_are_observed_alone(name: str) -> None:
    model = make(name)
    pads, prompt, steps = (0, 30, 9), 40, 12
    ids = tokens(prompt + steps, 3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = MemDecayCache(model, budget=None, window=WINDOW)
    seen = Seen(cache, prompt + steps)
    for start, end in chunks(prompt + steps, [18, 22, 1]):
        cache.prefilling = end <= prompt
        model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=position[:, start:end],
            cache=cache,
        )
    for row, pad in enumerate(pads):
        expected = oracle(model, ids[row : row + 1, pad:], [], attention=True)
        window, *decoded = seen.rows[row]
        count = prompt - pad
        reference = expected[max(0, count - WINDOW) : count].mean(0)
        assert torch.allclose(window[: len(reference)], reference, atol=1e-6)
        assert len(decoded) == steps
        for step, mass in enumerate(decoded, count):
            assert torch.allclose(mass[: len(reference)], expected[step], atol=1e-6)


CUTS = [[60], [16], [7], [50, 10], [59, 1], [1], [30, 25, 5], [44, 16]]


@pytest.mark.parametrize("policy", ["memdecay-paper", "h2o", "snapkv"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_prompt_in_chunks_is_observed_as_in_one_piece(name: str, policy: str) -> None:
    model = make(name)
    ids = tokens(61)
    labels = random.Random(3).choices(REGIONS[1:], k=60)
    results = []
    for cut in CUTS:
        cache = MemDecayCache(model, budget=None, policy=policy, page_size=4, window=WINDOW)
        cache.label(labels)
        seen = Seen(cache, 61)
        cache.prefilling = True
        for start, end in chunks(60, cut):
            model(input_ids=ids[:, start:end], cache=cache)
        cache.prefilling = False
        model(input_ids=ids[:, 60:], cache=cache)
        assert cache.observations == len(seen.rows[0]) == 2
        cache.shrink(30)
        results.append((seen.rows[0], kept(cache)))
    for cut, (masses, positions) in zip(CUTS, results, strict=True):
        assert positions == results[0][1], cut
        for mass, reference in zip(masses, results[0][0], strict=True):
            assert torch.allclose(mass, reference, atol=1e-6), cut


@pytest.mark.parametrize("observe_every", [0, 1, 3, 16])
@torch.no_grad()
def test_every_kth_decode_step_is_observed(observe_every: int) -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, observe_every=observe_every)
    seen = Seen(cache, 80)
    ids = tokens(80)
    model(input_ids=ids[:, :40], cache=cache)
    for step in range(40, 80):
        model(input_ids=ids[:, step : step + 1], cache=cache)
    expected = [step for step in range(1, 41) if observe_every and step % observe_every == 0]
    assert seen.steps == ([0] if observe_every else []) + expected
    assert cache.observations == len(seen.steps)
    assert cache.ledgers[0]["num_observed"][0] == len(seen.steps)
    assert cache.steps == 40


@torch.no_grad()
def test_a_policy_without_need_of_attention_is_not_charged_for_it() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, policy="streaming")
    model(input_ids=tokens(40), cache=cache)
    model(input_ids=tokens(1), cache=cache)
    assert cache.observations == 0
    assert not cache._slabs


@torch.no_grad()
def test_the_two_clocks() -> None:
    model = make("llama")
    ids = tokens(40)
    caches = {
        clock: MemDecayCache(model, budget=None, policy="memdecay-paper", clock=clock)
        for clock in ("steps", "tokens")
    }
    for cache in caches.values():
        for start, end in chunks(40, [10, 1, 1, 1, 20, 1]):
            model(input_ids=ids[:, start:end], cache=cache)
    steps = [0.0] * 10 + [1.0, 2.0, 3.0] + [3.0] * 20 + [float(step) for step in range(4, 11)]
    assert caches["steps"].ledgers[0]["inserted_at"].tolist() == steps
    assert caches["tokens"].ledgers[0]["inserted_at"].tolist() == [float(n) for n in range(40)]
    assert caches["steps"].now == 10
    assert caches["tokens"].now == 40
    for cache in caches.values():
        assert float(cache.ledgers[0]["state.refreshed_at"].max()) <= cache.now


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_counters_do_not_stall_in_bfloat16(name: str) -> None:
    """bf16 `+= 1` stalls at 256; every counter and accumulator is wider."""
    model = make(name, torch.bfloat16)
    cache = MemDecayCache(model, budget=64, page_size=4)
    cache.label(["system"] * 4)
    sums = []
    cache.on_observe = lambda row, mass, refreshed: sums.append(float(mass.sum()))
    ids = tokens(400)
    model(input_ids=ids[:, :40], cache=cache)
    for step in range(40, 400):
        out = model(input_ids=ids[:, step : step + 1], cache=cache)
    assert out.logits.isfinite().all()
    assert cache.pools[0].kv.dtype == torch.bfloat16
    ledger = cache.ledgers[0]
    first = ledger["position"] == 0
    assert int(ledger["num_observed"][first]) == 361
    assert float(ledger["inserted_at"].max()) == cache.steps == 360
    assert max(abs(total - 1) for total in sums) < 1e-3
    assert cache.kept() <= 64
    assert kept(cache)[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.no_grad()
def test_bfloat16_is_as_near_to_the_oracle_as_a_bfloat16_forward(name: str) -> None:
    exact, model = make(name), make(name, torch.bfloat16)
    ids = tokens(100)
    cache = MemDecayCache(model, budget=None)
    rng, gone, events, logits = random.Random(6), set(), [], []
    for start, end in chunks(100, [60, 20, 1]):
        logits.append(model(input_ids=ids[:, start:end], cache=cache).logits[0])
        if end in (60, 85):
            evicted = choose(rng, end, gone, 0.2)
            cache.evict(evicted)
            events.append((end, evicted))
    expected = oracle(exact, ids, events)
    mine = (torch.cat(logits).float() - expected).abs().mean()
    theirs = (oracle(model, ids, events).float() - expected).abs().mean()
    assert mine < 1.3 * theirs
