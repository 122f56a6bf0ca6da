"""Tokens leave a cache and come back: exact to the bit, and logits as the oracle says."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import make, tokens
from engine.helpers import kept, same, snapshot
from engine.moves import Machine, by_position
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.moving import Moved
from memdecay.engine.undo import Checkpoint
from memdecay.errors import BudgetError, MemDecayError, SessionError

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral_sliding", "gpt2"]


SETTINGS = [
    {"budget": None, "policy": "snapkv"},
    {"budget": 64, "policy": "memdecay-paper", "page_size": 4, "align": "region"},
    {"budget": 40, "policy": "memdecay"},
]


@pytest.mark.parametrize("setting", range(3))
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_any_moves_equal_the_oracle(name: str, setting: int) -> None:
    machine = Machine(name, setting, **SETTINGS[setting])
    machine.run(40)
    assert machine.returns >= 5
    assert machine.worst(machine.events()) < 1e-4
    assert machine.worst(machine.events(returned=False)) > 1e-2, "what came back must matter"


@torch.no_grad()
def filled(
    name: str = "llama", count: int = 60, budget: int | None = None, **settings: Any
) -> tuple[PreTrainedModel, MemDecayCache]:
    model = make(name)
    cache = MemDecayCache(model, budget=budget, **settings)
    cache.label(["system"] * 8 + ["tool_out"] * 30)
    for start in range(0, count, 12):
        model(input_ids=tokens(count)[:, start : start + 12], cache=cache)
    return model, cache


@pytest.mark.parametrize("policy", ["memdecay", "memdecay-paper", "memdecay-replay", "snapkv"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral_sliding"])
def test_taken_and_put_back_is_as_if_never_taken(name: str, policy: str) -> None:
    _, cache = filled(name, policy=policy)
    cache._release_queries()
    before = by_position(cache)
    pages, nbytes = cache.evicted_pages, cache.nbytes
    positions = [at for at in [50, 17, 33, 58, 59, 40] if at in kept(cache)]
    moved = cache.take(positions)
    assert moved.positions.tolist() == sorted(positions)
    assert not set(positions) & set(kept(cache))
    assert cache.evicted_tokens == cache.seen - cache.kept()
    cache.put_back(moved)
    after = by_position(cache)
    assert same(before, after)
    assert (cache.evicted_pages, cache.nbytes) == (pages, nbytes)


def test_all_of_a_cache_can_go_and_come_back() -> None:
    _, cache = filled(policy="streaming", page_size=4, align="region")
    cache._release_queries()
    before = by_position(cache)
    moved = cache.take(kept(cache))
    assert cache.kept() == 0
    cache.put_back(moved.select(torch.arange(10, 60)))
    cache.put_back(moved.select(torch.arange(10)))
    assert same(before, by_position(cache))


def test_bfloat16_comes_back_to_the_bit() -> None:
    model = make("llama", torch.bfloat16)
    cache = MemDecayCache(model, budget=None)
    with torch.no_grad():
        model(input_ids=tokens(40), cache=cache)
    cache._release_queries()
    before = by_position(cache)
    cache.put_back(cache.take(range(10, 30)))
    assert same(before, by_position(cache))


@torch.no_grad()
def test_what_the_budget_evicts_is_handed_out_before_it_goes() -> None:
    _, cache = filled(budget=None)
    cache._release_queries()
    truth = cache.take(range(8, 60))
    cache.put_back(truth)
    told: list[tuple[list[int], list[int]]] = []
    parts = []

    def forget(row: int, moved: Moved) -> None:
        told.append((kept(cache), moved.positions.tolist()))
        parts.append(moved)

    cache.on_forget = forget
    cache.shrink(40)
    assert told and all(set(gone) <= set(present) for present, gone in told)
    whole = Moved.joined(parts)
    assert whole.positions.tolist() == sorted(set(range(60)) - set(kept(cache)))
    expected = truth.select(torch.isin(truth.positions, whole.positions))
    assert torch.equal(whole.keys, expected.keys) and torch.equal(whole.values, expected.values)
    assert all(torch.equal(whole.columns[name], expected.columns[name]) for name in whole.columns)


@torch.no_grad()
def test_an_error_of_who_listens_loses_nothing() -> None:
    model, cache = filled(budget=60, page_size=4)

    def fails(row: int, moved: Moved) -> None:
        raise OSError("full")

    cache.on_forget = fails
    before = snapshot(cache)
    with pytest.raises(OSError, match="full"):
        model(input_ids=tokens(4), cache=cache)
    cache._release_queries()
    assert kept(cache) == list(range(60)) and cache.seen == 60
    cache.on_forget = None
    model(input_ids=tokens(4), cache=cache)
    assert cache.seen == 64 and before["clock"].tolist()[0] == 60


def test_nobody_who_listens_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr("memdecay.engine.cache.copy_out", refuse)
    _, cache = filled(budget=40)
    assert cache.kept() <= 40


@torch.no_grad()
def test_a_thousand_cycles_leak_nothing() -> None:
    _, cache = filled("gemma2", budget=64)
    rng = random.Random(5)
    cache.put_back(cache.take(rng.sample(range(8, 60), 20)))
    before, nbytes = by_position(cache), cache.nbytes
    storages: set[int] = set()
    for cycle in range(1000):
        cache.put_back(cache.take(rng.sample(range(8, 60), 20)))
        if cycle in (1, 999):
            gc.collect()
            storages.add(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
    assert same(before, by_position(cache))
    assert cache.nbytes == nbytes and cache.peak_tokens == 60
    assert len(storages) == 1, "as many tensors alive as after the first cycles"


def test_a_failed_operation_takes_out_again_what_came_back_in_it() -> None:
    for name in ("llama", "gemma2", "mistral_sliding"):
        model, cache = filled(name, count=36, budget=64)
        cache._release_queries()
        outside = [cache.take([20, 30, 33])]
        cache.on_forget = lambda row, moved, outside=outside: outside.append(moved)
        left: list[int] = []
        cache.on_rollback = left.append
        before = by_position(cache)
        checkpoint = Checkpoint(cache, 8)
        cache.put_back(outside.pop())
        with torch.no_grad():
            model(input_ids=tokens(8), cache=cache)
        checkpoint.restore()
        assert same(before, by_position(cache))
        assert left == [36]
        assert [moved.positions.tolist() for moved in outside] == [[20, 30, 33]]
        cache.put_back(outside.pop())
        assert cache.kept() == 36


def test_rollbacks_are_told() -> None:
    _, cache = filled()
    told: list[int] = []
    cache.on_rollback = told.append
    moved = cache.take([40, 57])
    cache.crop(-5)
    with pytest.raises(MemDecayError, match="go from 40 to 57, but only 55 tokens were seen"):
        cache.put_back(moved)
    cache.put_back(moved.select(moved.positions < 55))
    cache.reset()
    assert told == [55, 0]


@torch.no_grad()
def test_a_rollback_to_where_a_sliding_layer_lacks_a_token_is_refused() -> None:
    model, cache = filled("gemma2", count=60)
    moved = cache.take([50])
    lacking = Moved(
        moved.positions,
        moved.keys,
        moved.values,
        {**moved.columns, "window.24": torch.tensor([False])},
    )
    with pytest.raises(MemDecayError, match="has 50, which the sliding layers let go of"):
        cache.put_back(lacking)
    model(input_ids=tokens(20), cache=cache)
    cache.put_back(lacking)
    cache.crop(-3)
    with pytest.raises(MemDecayError, match="only to token 74 of 77"):
        cache.crop(-4)


@pytest.mark.parametrize("kind", ["copy", "branch"])
def test_nobody_listens_to_a_copy_and_it_takes_back_what_the_original_gave(kind: str) -> None:
    _, cache = filled("gemma2", budget=64)
    cache._release_queries()
    before = by_position(cache)
    cache.on_forget = lambda row, moved: pytest.fail("told of a copy")
    cache.on_rollback = lambda seen: pytest.fail("told of a copy")
    moved = cache.take(range(30, 40))
    other = cache.copy() if kind == "copy" else cache.branch([torch.arange(60)])
    other.put_back(moved)
    now = by_position(other)
    assert all(torch.equal(before[name], now[name]) for name in before if name != "counts")
    other.shrink(20)
    other.crop(-2)
    assert sorted(kept(cache)) == [*range(30), *range(40, 60)]


def refused(call: Any, match: str, kind: type[MemDecayError] = MemDecayError) -> None:
    with pytest.raises(kind, match=match):
        call()


def test_what_cannot_go_is_refused_and_nothing_changes() -> None:
    _, cache = filled()
    before = snapshot(cache)
    refused(lambda: cache.take([3, 70, 71]), "positions has 70, 71, but each must be of a kept")
    refused(lambda: cache.take([9, 4, 2]), "positions has 2, 4, but what a pin keeps must stay")
    refused(lambda: cache.take(range(60, 80)), "60, 61, 62, 63, 64, 65 and 14 more")
    assert same(before, snapshot(cache))
    assert len(cache.take([])) == 0 and len(cache.take([9, 9])) == 1


def test_what_does_not_belong_is_refused_and_nothing_changes() -> None:
    _, cache = filled(budget=60)
    moved = cache.take([20, 40])
    before = snapshot(cache)

    def changed(**new: Any) -> Moved:
        return Moved(**{**moved.__dict__, **new})

    def back(one: Any) -> None:
        refused(lambda: cache.put_back(one), match)

    match = "moved is a list, but it must be a Moved"
    back([])
    match = r"keys of shape \(3, 2, 2, 16\) and torch.float32"
    back(changed(keys=moved.keys[:3], values=moved.values[:3]))
    match = "torch.float32 and values of torch.bfloat16"
    back(changed(values=moved.values.bfloat16()))
    match = "moved differs in the columns span, usage from this cache"
    columns = {name: column for name, column in moved.columns.items() if name != "span"}
    back(changed(columns={**columns, "usage": moved.positions}))
    match = "positions of moved are 40, 20, but they must be ascending"
    back(changed(positions=moved.positions.flip(0)))
    match = "positions of moved are 20, 41, but its column of positions says 20, 40"
    back(changed(positions=torch.tensor([20, 41])))
    late = torch.tensor([20, 60])
    match = "go from 20 to 60, but only 60 tokens were seen"
    back(changed(positions=late, columns={**moved.columns, "position": late}))
    match = r"keys has shape \(4, 2, 2, 16\).*for the \(1,\) positions"
    refused(lambda: changed(positions=torch.tensor([20])), match)
    match = r"column 'span' has shape \(1,\), but it must be \(2,\)"
    refused(lambda: changed(columns={**moved.columns, "span": late[:1]}), match)
    assert same(before, snapshot(cache))
    cache.put_back(moved)
    match = "positions of moved has 20, 40, but each must be of a token that is not kept"
    back(moved)


@torch.no_grad()
def test_no_room_is_refused() -> None:
    model, cache = filled(budget=60)
    moved = cache.take(range(20, 30))
    model(input_ids=tokens(4), cache=cache)
    before = snapshot(cache)
    refused(
        lambda: cache.put_back(moved),
        "10 tokens do not fit back into budget=60, of which 54 are kept; evict 4 first",
        BudgetError,
    )
    assert same(before, snapshot(cache))
    cache.put_back(moved.select(torch.arange(6)))
    assert cache.kept() == cache.peak_tokens == 60


@torch.no_grad()
def test_only_a_cache_of_one_sequence_gives_and_takes() -> None:
    model, _ = filled()
    cache = MemDecayCache(model, budget=8, page_size=4)
    refused(lambda: cache.take([0]), "holds 0 sequences, but tokens move out and back only in")
    model(input_ids=tokens(8, rows=2), cache=cache)
    refused(lambda: cache.take([0]), "holds 2 sequences")
    cache.on_forget = lambda row, moved: None
    before = snapshot(cache)
    refused(lambda: model(input_ids=tokens(2, rows=2), cache=cache), "holds 2 sequences")
    assert same(before, snapshot(cache))

    padded = MemDecayCache(model, budget=None)
    model(
        input_ids=tokens(8), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]), cache=padded
    )
    refused(lambda: padded.take([2]), "has 2 tokens of padding")

    heads = MemDecayCache(model, budget=8, policy="memdecay-heads")
    model(input_ids=tokens(8), cache=heads)
    refused(lambda: heads.take([2]), "policy 'memdecay-heads' lets heads keep their own tokens")
    heads.on_forget = lambda row, moved: None
    refused(lambda: model(input_ids=tokens(2), cache=heads), "lets heads keep their own tokens")


@torch.no_grad()
def test_nothing_moves_while_a_forward_runs() -> None:
    model, cache = filled()
    errors = []

    def inside(*_: Any) -> None:
        with pytest.raises(SessionError) as error:
            cache.take([20])
        errors.append(str(error.value))

    handle = model.get_decoder().layers[1].register_forward_hook(inside)
    model(input_ids=tokens(2), cache=cache)
    handle.remove()
    assert errors == ["A forward is running, but tokens move out and back only between two."]
