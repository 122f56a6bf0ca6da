"""Keep sets by head in a whole engine: the budget, the bytes, sessions, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.families import make, tokens
from engine.head_helpers import (
    ByChance,
    HeadRecord,
    Looked,
    head_oracle,
    head_state,
    model_of,
)
from engine.helpers import chunks, close, same
from engine.sessions import NEVER, assistant, failing, session, system, talk, user
from memdecay import Session
from memdecay.engine import saving
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.head_cache import HeadCache
from memdecay.engine.heads import ROOM, HeadPool
from memdecay.engine.ledger import Ledger
from memdecay.engine.slots import Move, Write
from memdecay.errors import BudgetError, MemDecayError, ModelError
from memdecay.policy import get_policy

PARTS = 4 * 2  # layers times KV heads of the tiny llama
ENTRY = 2 * 16 * 4  # bytes: keys and values, head_dim 16, float32


def stored(cache: MemDecayCache) -> int:
    return sum(sum(pool.lengths) for pool in cache.pools)


def consistent(cache: HeadCache) -> None:
    """The ledger, the table and the pools say the same."""
    ledger, table = cache.head_ledger, cache.main
    assert stored(cache) == ledger.entries == int(ledger["held"].sum()) == cache.kept_entries()
    assert ledger.length == table.width <= max(ledger.entries, 1)
    assert torch.equal(ledger["position"], table.index[0, : table.width])
    assert ledger["held"].flatten(1).any(1).all()
    for layer, pool in enumerate(cache.pools):
        assert torch.equal(pool.held(ledger.length), ledger.holding[layer])
        for head, length in enumerate(pool.lengths):
            assert len(set(pool.head(head)[2].tolist())) == length <= pool.capacities[head]
        assert pool.kv.shape[1] == sum(pool.capacities)


@pytest.mark.parametrize("policy", [ByChance(), Looked()])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@torch.no_grad()
def test_the_budget_and_the_bytes_hold_inside_every_layer(
    policy: Any, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, budget = make("llama"), 64
    cache = MemDecayCache(model, budget=budget, policy=policy, page_size=page_size)
    most: list[int] = []
    write = HeadPool.write

    def watched(pool: HeadPool, where: Write, keys: Any, values: Any) -> None:
        write(pool, where, keys, values)
        assert stored(cache) <= budget * PARTS
        assert cache.nbytes <= (budget + 2 * ROOM) * PARTS * ENTRY
        most.append(stored(cache))

    monkeypatch.setattr(HeadPool, "write", watched)
    ids = tokens(900)
    cache.label(["system"] * 8)
    sizes = [60, *([16, 7, *[1] * 9, 33, 1, 16] * 11)]
    for start, end in chunks(900, sizes):
        model(input_ids=ids[:, start:end], cache=cache, logits_to_keep=1)
        consistent(cache)
        assert cache.kept() <= budget
    assert max(most) == budget * PARTS, "the budget is used"
    assert cache.peak_tokens == budget
    assert cache.head_ledger["held"][cache.head_ledger["region"] == 0].all(), "pins hold all heads"
    lengths = {length for pool in cache.pools for length in pool.lengths}
    assert len(lengths) > 1, "heads keep unequal numbers"


@torch.no_grad()
def test_bytes_follow_entries_down() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, policy=ByChance(), page_size=1)
    model(input_ids=tokens(600), cache=cache)
    assert 600 * PARTS * ENTRY <= cache.nbytes <= (600 + 2 * ROOM) * PARTS * ENTRY
    for budget, left in ((500, 500), (300, 300), (301, 300), (40, 40)):
        cache.shrink(budget)
        assert cache.kept_entries() == left * PARTS
        assert cache.nbytes <= cache.kept_entries() * ENTRY + 2 * ROOM * PARTS * ENTRY
    cache.evict(range(590))
    assert cache.nbytes <= (10 + 2 * ROOM) * PARTS * ENTRY
    consistent(cache)


@torch.no_grad()
def test_five_hundred_evictions_leak_nothing() -> None:
    model = make("llama_one_layer")
    cache = MemDecayCache(model, budget=32, policy=Looked(), page_size=2)
    ids = tokens(540)
    model(input_ids=ids[:, :32], cache=cache)
    sizes = []
    for place in range(32, 540):
        model(input_ids=ids[:, place : place + 1], cache=cache)
        sizes.append((cache.nbytes, cache.main.capacity, len(cache.ledgers[0].queries)))
    consistent(cache)
    assert cache.evicted_tokens > 400
    assert max(sizes[50:])[0] <= (32 + 2 * ROOM) * 2 * ENTRY
    assert max(size[1] for size in sizes) <= 32 * 2 * 2, "the union is bounded by the entries"


@torch.no_grad()
def test_tokens_go_when_the_last_head_lets_them_go() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=24, policy=ByChance(), page_size=1)
    told: list[int] = []
    cache.on_evict = lambda evicted: told.extend(evicted.position.tolist())
    ids = tokens(80)
    for start, end in chunks(80, [20, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    known = cache.ledgers[0]["position"].tolist()
    assert len(told) == len(set(told)) == cache.evicted_tokens
    assert sorted(known + told) == list(range(80))
    assert len(known) > 24, "heads keep different tokens"


@torch.no_grad()
def test_a_fresh_token_has_fresh_columns() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=24, policy=Looked(), page_size=1, observe_every=0)
    for start, end in chunks(60, [20, 1]):
        model(input_ids=tokens(60)[:, start:end], cache=cache)
    state = cache.ledgers[0].tokens(0.0).head_state
    assert (state["share"] == 0.5).all()
    assert (state["born"] == cache.ledgers[0]["position"]).all()


# What changes a cache


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2_full"])
@torch.no_grad()
def test_rollbacks_and_evictions_by_hand(name: str) -> None:
    model = model_of(name)
    ids = tokens(80)
    cache = MemDecayCache(model, budget=40, policy=Looked(), page_size=2)
    record = HeadRecord(cache)
    logits: list[torch.Tensor] = []
    for start, end in chunks(50, [30, 10, 1]):
        logits.append(model(input_ids=ids[:, start:end], cache=cache).logits[0])
    model(input_ids=tokens(6, seed=5), cache=cache)
    watch, cache._release = cache._release, record._release  # a rollback is no eviction
    cache.crop(-6)
    cache._release = watch
    consistent(cache)
    cache.evict([1, 2, 44, 45])
    cache.shrink(20)
    assert cache.kept() <= 20
    for start, end in chunks(30, [1, 1, 9, 19]):
        part = ids[:, 50 + start : 50 + end]
        logits.append(model(input_ids=part, cache=cache).logits[0])
    assert all(when <= 50 or when > 60 for when, _ in record.events)
    assert close(torch.cat(logits), head_oracle(model, ids, record.events))


@torch.no_grad()
def test_a_forward_that_raises_is_taken_back() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=40, policy=Looked(), page_size=1)
    ids = tokens(60)
    with failing(model, 0, RuntimeError), pytest.raises(RuntimeError, match="on purpose"):
        model(input_ids=ids[:, :20], cache=cache)
    assert (cache.seen, cache.pools, cache.ledgers) == (0, [], [])
    model(input_ids=ids[:, :29], cache=cache)
    model(input_ids=ids[:, 29:30], cache=cache)
    for count in (1, 9):
        before = head_state(cache)
        with failing(model, 0, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(input_ids=ids[:, 30 : 30 + count], cache=cache)
        assert same(head_state(cache), before)
        consistent(cache)
    cache.evict([3])
    model(input_ids=ids[:, 30:40], cache=cache)
    with pytest.raises(BudgetError, match="41 new tokens do not fit"):
        model(input_ids=tokens(41), cache=cache)
    consistent(cache)


@torch.no_grad()
def test_a_copy_is_independent() -> None:
    model = make("qwen2")
    cache = MemDecayCache(model, budget=30, policy=Looked(), page_size=1)
    ids = tokens(80)
    for start, end in chunks(50, [25, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    before, copied = head_state(cache), cache.copy()
    assert type(copied) is HeadCache
    first = model(input_ids=ids[:, 50:60], cache=copied).logits
    copied.evict(range(20))
    assert same(head_state(cache), before)
    assert torch.equal(model(input_ids=ids[:, 50:60], cache=cache).logits, first)


@pytest.mark.parametrize("policy", [ByChance(), Looked()])
def test_prompt_lookup_is_plain_greedy_search(policy: Any) -> None:
    model = make("llama")
    ids = tokens(12).repeat(1, 4)
    answers = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        cache = MemDecayCache(model, budget=None, policy=policy)
        answers.append(
            model.generate(
                ids, cache=cache, max_new_tokens=30, do_sample=False, pad_token_id=0, **options
            )
        )
        consistent(cache)
    stock = model.generate(
        ids, cache=DynamicCache(), max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert torch.equal(answers[0], stock) and torch.equal(answers[1], stock)


@torch.inference_mode()
def test_inference_mode_leaves_no_inference_tensors() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=30, policy=Looked(), page_size=1)
    for start, end in chunks(60, [20, 1, 10, 1]):
        model(input_ids=tokens(60)[:, start:end], cache=cache)
    for pool in cache.pools:
        assert not pool.kv.is_inference() and not pool.slot.is_inference()


# Sessions


def made(policy: Any, **options: Any) -> Session:
    return session(**{"template": "qwen", "budget": 72, "policy": policy, **options})


def begin(policy: Any, **options: Any) -> Session:
    one = made(policy, **options)
    one.append(talk())
    one.generate(max_new_tokens=5, eos_token_id=NEVER)
    one.pin(region="plan")
    one.append([user(12, 3)], pin=True)
    return one


def go_on(one: Session) -> list[Any]:
    said: list[Any] = []
    for turn in range(3):
        one.append([user(14, 20 + turn)])
        said.append(one.generate(max_new_tokens=6, eos_token_id=NEVER).ids)
    scores = one.append([assistant(5, 40)], score=True).scores
    return [*said, scores.nll.tolist(), one.report().to_dict()]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", [ByChance(), Looked()])
def test_a_session_saved_or_forked_goes_on_as_it_would(
    policy: Any, page_size: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = {"by-chance": ByChance, "looked": Looked}
    monkeypatch.setattr(saving, "from_config", lambda config: classes[config.pop("name")](**config))
    one = begin(policy, page_size=page_size)
    report = one.report()
    assert report.kept_entries == one.cache.kept_entries() > 0
    assert report.kept_tokens == -(-report.kept_entries // PARTS) <= 72
    assert sum(report.kept_by_region.values()) == report.kept_tokens
    assert report.kv_bytes == one.cache.nbytes
    assert report.evicted_pages > 0 and report.pinned_tokens > 0
    one.save(tmp_path / "s")
    state = head_state(one.cache)
    loaded, forked = Session.load(tmp_path / "s", one.model, one.tokenizer), one.fork()
    one.ask("which flight is it?", max_new_tokens=8)
    assert same(head_state(one.cache), state)
    assert same(head_state(loaded.cache), state)
    expected = go_on(one)
    assert same(head_state(loaded.cache), state) and same(head_state(forked.cache), state)
    assert go_on(loaded) == go_on(forked) == expected
    consistent(one.cache)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("template", ["qwen", "chatml", "mistral"])
def test_an_operation_that_fails_is_undone(template: str, error: Any, page_size: int) -> None:
    one = made(Looked(), template=template, budget=200, page_size=page_size)
    one.append([system(), user(8, 1)])
    one.generate(max_new_tokens=4, eos_token_id=NEVER)
    one.append([user(6, 2)])
    before = head_state(one.cache)
    for at in (0, 3):
        with failing(one.model, at, error), pytest.raises(error):
            one.generate(max_new_tokens=8, eos_token_id=NEVER)
        assert sorted_state(head_state(one.cache)) == sorted_state(before)
        with failing(one.model, 0, error), pytest.raises(error):
            one.append([assistant(8, 4), user(30, 3)])
        assert sorted_state(head_state(one.cache)) == sorted_state(before)
        consistent(one.cache)


def sorted_state(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What is known, in an order that does not depend on slots."""
    order = state["position0"].argsort()
    rank = order.argsort()
    known: dict[str, Any] = {}
    for name, tensor in state.items():
        if name.startswith(("keys", "values", "slots")):
            kind, layer, head = name.split(".")
            by = rank[state[f"slots.{layer}.{head}"]].argsort()
            tensor = rank[tensor] if kind == "slots" else tensor
            known[name] = tensor[by].tolist()
        elif name[:-1] in ("clock", "scalars") or name == "clock":
            known[name] = tensor.tolist()
        else:
            known[name] = tensor[order].tolist()
    return known


@pytest.mark.parametrize("template", ["qwen", "mistral"])
def test_a_failure_after_evictions_keeps_what_is_left(template: str) -> None:
    one = made(Looked(), template=template, budget=60, page_size=1)
    one.append([system(), user(30, 1)])
    one.generate(max_new_tokens=6, eos_token_id=NEVER)
    one.append([user(10, 7)])
    held = one.cache.kept_by_head()
    with failing(one.model, 20, RuntimeError), pytest.raises(RuntimeError):
        one.generate(max_new_tokens=40, eos_token_id=NEVER)
    consistent(one.cache)
    for before, after in zip(held, one.cache.kept_by_head(), strict=True):
        for old, new in zip(before, after, strict=True):
            assert torch.isin(new, old).all()
    assert one.cache.kept_entries() <= 60 * PARTS
    one.generate(max_new_tokens=10, eos_token_id=NEVER)
    consistent(one.cache)


def test_pins_are_counted_in_what_heads_hold() -> None:
    one = made(ByChance(), budget=64, page_size=1)
    one.append([user(30, 1), assistant(30, 2), user(30, 3), assistant(20, 5), user(10, 6)])
    known = one.cache.ledgers[0].length
    assert known > 64, "more tokens are known than the budget holds whole"
    with pytest.raises(BudgetError, match="are pinned"):
        one.pin(region="user"), one.pin(region="plan"), one.pin(region="scratchpad")
    one.release(region="user")
    one.append([user(40, 9)])
    consistent(one.cache)


@torch.no_grad()
def test_aligned_pages() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=48, policy=ByChance(), page_size=4, align="region")
    rng = random.Random(1)
    cache.label([rng.choice(["user", "tool_out"]) for _ in range(200)])
    for start, end in chunks(200, [30, 7, 1, 1, 12]):
        model(input_ids=tokens(200)[:, start:end], cache=cache)
        consistent(cache)
    assert cache.kept_entries() <= 48 * PARTS


# What is refused


def test_models_with_sliding_windows_are_refused() -> None:
    for name in ("mistral_sliding", "gemma3"):
        with pytest.raises(ModelError, match="sliding window of 24"):
            MemDecayCache(make(name), budget=32, policy=ByChance())
        plain = MemDecayCache(make(name), budget=None, policy="h2o")
        with pytest.raises(ModelError, match="sliding window"):
            plain.branch_heads([])


def test_several_sequences_and_padding_are_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=32, policy=ByChance())
    with pytest.raises(MemDecayError, match="a batch of 2 sequences"):
        model(input_ids=tokens(5, rows=2), cache=cache)
    with pytest.raises(MemDecayError, match="hides 2 of 5 tokens"):
        model(input_ids=tokens(5), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]), cache=cache)
    with pytest.raises(MemDecayError, match="a batch of 3 sequences"):
        model.generate(tokens(5), cache=cache, num_beams=3, max_new_tokens=4, pad_token_id=0)
    assert cache.seen == 0
    model(input_ids=tokens(5), cache=cache)
    with pytest.raises(MemDecayError, match=r"rows is \[0, 0\]"):
        cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))
    with pytest.raises(MemDecayError, match="use branch_heads"):
        cache.branch([torch.arange(3)])
    with pytest.raises(MemDecayError, match="read them head by head"):
        _ = cache.layers[0].keys


def test_keep_sets_that_do_not_fit_the_model_are_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, policy="h2o")
    with torch.no_grad():
        model(input_ids=tokens(5), cache=cache)
    with pytest.raises(MemDecayError, match=r"kept has \[2, 2\] keep sets"):
        cache.branch_heads([[torch.arange(3)] * 2] * 2)
    with pytest.raises(MemDecayError, match="kept holds no token"):
        cache.branch_heads([[torch.arange(9, 12)] * 2] * 4)
    with pytest.raises(MemDecayError, match="row is 1"):
        cache.branch_heads([[torch.arange(3)] * 2] * 4, row=1)


def test_other_policies_have_no_heads() -> None:
    cache = MemDecayCache(make("llama"), budget=32, policy=get_policy("h2o"))
    assert type(cache) is MemDecayCache and type(cache.new_ledger()) is Ledger


# A pool


def test_a_pool_follows_its_entries() -> None:
    pool = HeadPool(2, 3, torch.float32, torch.device("cpu"), 4)
    keys = torch.arange(24.0).view(1, 2, 4, 3)
    pool.write(Write(0, 4), keys, -keys)
    pool.drop(torch.tensor([[True, False, False, True], [True, False, True, False]]))
    assert pool.lengths == [2, 2]
    pool.move(Move(0, 3, torch.tensor([0]), torch.tensor([3])))
    assert [sorted(pool.head(head)[2].tolist()) for head in (0, 1)] == [[1, 2], [0, 1]]
    for head, slots in ((0, {1: 1, 2: 2}), (1, {0: 3, 1: 1})):
        got_keys, got_values, got_slots = pool.head(head)
        for slot, key, value in zip(got_slots.tolist(), got_keys, got_values, strict=True):
            assert torch.equal(key, keys[0, head, slots[slot]]) and torch.equal(value, -key)
    assert pool.held(3).tolist() == [[False, True, True], [True, True, False]]
    pool.fit(100)
    assert pool.capacities == [2 + 100 + ROOM] * 2
    pool.fit(0)
    assert pool.capacities == [2 + ROOM] * 2 and pool.lengths == [2, 2]
