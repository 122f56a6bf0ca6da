"""Faults that hit libraries like ours, one test each, where no other file has it.

Elsewhere: budgets (test_budget), padding (test_batch), beams, assisted decoding and two `generate`
calls (test_generate), chunked prompts and bf16 counters (test_observation), stale state, restored
copies, exceptions and threads (test_isolation).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.families import CONFIGS, make, oracle, tokens
from engine.helpers import Record, chunks, close, kept, same, snapshot
from memdecay.engine.cache import MemDecayCache
from memdecay.errors import BudgetError, MemDecayError, ModelError, PolicyError
from memdecay.policy import Policy, Tokens, get_policy
from memdecay.regions import Profile

EVERY_FAMILY = pytest.mark.parametrize("name", CONFIGS)


@EVERY_FAMILY
@torch.no_grad()
def test_evicting_every_token_does_not_restart_positions(name: str) -> None:
    model = make(name)
    ids = tokens(80)
    cache = MemDecayCache(model, budget=None)
    model(input_ids=ids[:, :40], cache=cache)
    assert cache.evict(range(40)) == cache.evicted_tokens == 40
    assert (cache.kept(), cache.get_seq_length()) == (0, 40)
    logits = [
        model(input_ids=ids[:, 40 + a : 40 + b], cache=cache).logits[0]
        for a, b in chunks(40, [1, 19, 1])
    ]
    assert close(torch.cat(logits), oracle(model, ids, [(40, range(40))])[40:])


@EVERY_FAMILY
@torch.no_grad()
def test_evicted_sinks_are_what_the_model_would_see_without_them(name: str) -> None:
    model = make(name)
    ids = tokens(60)
    cache = MemDecayCache(model, budget=None)
    model(input_ids=ids[:, :50], cache=cache)
    cache.evict([0, 1, 2, 3])
    logits = [model(input_ids=ids[:, at : at + 1], cache=cache).logits[0] for at in range(50, 60)]
    assert close(torch.cat(logits), oracle(model, ids, [(50, [0, 1, 2, 3])])[50:])


@EVERY_FAMILY
@torch.no_grad()
def test_a_turn_of_many_tokens_after_evictions(name: str) -> None:
    model = make(name)
    cache = MemDecayCache(model, budget=None, page_size=4)
    record = Record(model, cache)
    ids = tokens(130)
    for start, end in chunks(130, [60, 20, 1, 30, 19]):
        model(input_ids=ids[:, start:end], cache=cache)
        cache.shrink(24)
    assert cache.get_seq_length() == 130
    assert record.worst(0) < 1e-4
    assert cache.evicted_tokens >= 80


@EVERY_FAMILY
@torch.no_grad()
def test_a_rollback_over_evicted_tokens(name: str) -> None:
    model = make(name)
    ids = tokens(100)
    cache = MemDecayCache(model, budget=None)
    model(input_ids=ids[:, :60], cache=cache)
    model(input_ids=tokens(20, seed=8), cache=cache)  # to be rolled back but for 5 tokens
    ids[:, 60:65] = tokens(20, seed=8)[:, :5]
    cache.evict([*range(10, 30), 55, 62, *range(70, 76), 79])
    cache.crop(-15)
    assert cache.get_seq_length() == cache.ledgers[0].seen == 65
    if name != "mistral_sliding":
        assert cache.kept() == 65 - 22
    logits = [
        model(input_ids=ids[:, 65 + a : 65 + b], cache=cache).logits[0]
        for a, b in chunks(35, [12, 1])
    ]
    assert close(torch.cat(logits), oracle(model, ids, [(65, [*range(10, 30), 55, 62])])[65:])
    assert cache.ledgers[0]["position"].max() == 99


@pytest.mark.parametrize("name", ["gemma3", "mistral_sliding", "qwen2_sliding"])
@torch.no_grad()
def test_a_rollback_to_where_a_sliding_window_was_is_refused(name: str) -> None:
    model = make(name)
    ids = tokens(220)
    cache = MemDecayCache(model, budget=None)
    for start, end in chunks(200, [100, 100]):
        model(input_ids=ids[:, start:end], cache=cache)
    before = snapshot(cache)
    with pytest.raises(MemDecayError, match="can go back only to token 100 of 200"):
        cache.crop(-101)
    assert same(snapshot(cache), before)
    cache.crop(-100)
    ids[:, 100:] = tokens(120, seed=3)
    logits = model(input_ids=ids[:, 100:120], cache=cache).logits[0]
    assert close(logits, oracle(model, ids[:, :120], [])[100:])


@pytest.mark.parametrize("argument", [1, -41])
@torch.no_grad()
def test_a_rollback_of_what_was_not_seen_is_refused(argument: int) -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    model(input_ids=tokens(40), cache=cache)
    with pytest.raises(MemDecayError, match=f"tokens_to_remove is {argument}"):
        cache.crop(argument)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    cache.crop(-40)
    assert (cache.get_seq_length(), cache.kept()) == (0, 0)
    ids = tokens(30, seed=2)
    assert close(model(input_ids=ids, cache=cache).logits, model(input_ids=ids).logits)


@torch.no_grad()
def test_twelve_tokens_under_a_tiny_budget() -> None:
    model = make("llama_one_layer")
    ids = tokens(30)
    cache = MemDecayCache(model, budget=6, page_size=2)
    with pytest.raises(BudgetError, match="run at most 6 tokens a forward"):
        model(input_ids=ids[:, :12], cache=cache)
    record = Record(model, cache)
    for start, end in chunks(30, [4, 4, 4, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
        assert cache.kept() <= 6
    assert record.worst(0) < 1e-4


@pytest.mark.parametrize("budget", [16, 64])
@torch.no_grad()
def test_a_budget_where_every_layer_slides(budget: int) -> None:
    """Smaller than the window, and larger than all that the window can see."""
    model = make("mistral_sliding")
    cache = MemDecayCache(model, budget=budget, page_size=4)
    record = Record(model, cache)
    cache.label(["system"] * 8)
    ids = tokens(150)
    for start, end in chunks(150, [8, 5, 7, 1, 1, 1, 5, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
        assert cache.kept() <= budget
    assert record.worst(0) < 1e-4


@dataclass(frozen=True)
class Constant(Policy):
    """Every token ties with every other; the window is protected."""

    name: ClassVar[str] = "constant"
    summary: ClassVar[str] = "for this test"
    columns: ClassVar[Mapping[str, float]] = {}
    value: float = 0.0

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.full((tokens.kv_len,), self.value)

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        return tokens.latest(10)


@torch.no_grad()
def test_a_protected_window_tied_with_the_best_score_stays() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=24, policy=Constant(), page_size=1)
    ids = tokens(60)
    for start, end in chunks(60, [20, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
        assert set(range(max(0, end - 10), end)) <= set(kept(cache))
    assert kept(cache) == list(range(36, 60)), "of equal scores the older goes"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@torch.no_grad()
def test_an_eviction_is_never_decided_on_nan(value: float) -> None:
    model = make("llama")
    ids = tokens(60)
    cache = MemDecayCache(model, budget=40, policy=Constant(value=value))
    model(input_ids=ids[:, :40], cache=cache)
    before = snapshot(cache)
    with pytest.raises(PolicyError, match="'constant' scored a token NaN or infinite"):
        model(input_ids=ids[:, 40:41], cache=cache)
    assert same(snapshot(cache), before)
    assert model.config._attn_implementation == "sdpa"
    cache.evict(range(20))
    logits = model(input_ids=ids[:, 40:60], cache=cache).logits[0]
    assert close(logits, oracle(model, ids, [(40, range(20))])[40:])


@torch.no_grad()
def test_attention_that_is_nan_evicts_nothing() -> None:
    model = make("llama")
    ids = tokens(60)
    cache = MemDecayCache(model, budget=40)
    model(input_ids=ids[:, :39], cache=cache)
    weight = model.model.layers[0].self_attn.q_proj.weight
    right = weight.data.clone()
    weight.data.fill_(float("nan"))
    model(input_ids=ids[:, 39:40], cache=cache)
    weight.data.copy_(right)
    with pytest.raises(PolicyError, match="the attention it observed may be NaN"):
        model(input_ids=ids[:, 40:41], cache=cache)
    assert kept(cache) == list(range(40))
    cache.reset()
    assert close(
        model(input_ids=ids[:, :20], cache=cache).logits[0], oracle(model, ids[:, :20], [])
    )


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 1024), ("opt", 1024)])
@torch.no_grad()
def test_positions_beyond_the_table_of_learned_ones_are_refused(name: str, limit: int) -> None:
    model = make(name)
    ids = tokens(limit + 1)
    cache = MemDecayCache(model, budget=512, policy="streaming")
    for start, end in chunks(limit - 2, [200]):
        model(input_ids=ids[:, start:end], cache=cache, logits_to_keep=1)
    before = snapshot(cache)
    message = f"would have {limit + 1} tokens, but this model has position embeddings for {limit}"
    with pytest.raises(ModelError, match=message):
        model(input_ids=ids[:, -3:], cache=cache)
    assert same(snapshot(cache), before)
    assert model(input_ids=ids[:, -3:-1], cache=cache).logits.isfinite().all()
    with pytest.raises(ModelError, match="position embeddings"):
        model(input_ids=ids[:, -1:], cache=cache)
    fresh = MemDecayCache(model, budget=None)
    with pytest.raises(ModelError, match="position embeddings"):
        model(input_ids=ids, cache=fresh)
    assert fresh.rows == 0
    assert model(input_ids=ids[:, :5], cache=fresh).logits.isfinite().all()


@torch.no_grad()
def test_labels_that_say_the_wrong_thing_are_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    with pytest.raises(MemDecayError, match="sytem"):
        cache.label(["system", "sytem"])
    with pytest.raises(MemDecayError, match="spans has 1 entries"):
        cache.label(["system", "user"], spans=[1])
    with pytest.raises(MemDecayError, match="row is -1"):
        cache.label(["system"], row=-1)
    cache.label(["system"], row=2)
    with pytest.raises(MemDecayError, match="row 2 has labels, but the forward has 1"):
        model(input_ids=tokens(4), cache=cache)
    cache.reset()
    model(input_ids=tokens(4), cache=cache)
    with pytest.raises(MemDecayError, match="row is 1, but this cache holds 1"):
        cache.label(["system"], row=1)
    with pytest.raises(MemDecayError, match="row is 1, but this cache holds 1"):
        cache.pin(lambda ledger: ledger["position"] < 2, row=1)


@torch.no_grad()
def test_generated_text_belongs_to_the_span_and_region_it_is_told() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, default_region="plan")
    cache.label(["system"] * 3 + ["user"] * 2, spans=[0, 0, 0, 1, 1])
    for count in (4, 3, 1):
        model(input_ids=tokens(count), cache=cache)
    names = [cache.profile.name(region) for region in cache.ledgers[0]["region"].tolist()]
    assert names == ["system"] * 3 + ["user"] * 2 + ["plan"] * 3
    assert cache.ledgers[0]["span"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@torch.no_grad()
def test_pins_come_and_go() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, policy=get_policy("streaming"), page_size=4)
    model(input_ids=tokens(60), cache=cache)
    chosen = [random.Random(2).randrange(60) for _ in range(4)]

    def pick(ledger: object) -> Tensor:
        return torch.isin(cache.ledgers[0]["position"], torch.tensor(chosen))

    assert cache.pin(pick) == len(set(chosen))
    cache.shrink(24)
    assert set(chosen) <= set(kept(cache))
    cache.pin(pick, pinned=False)
    cache.shrink(4)
    assert cache.kept() <= 4
