"""Caches, threads and failures do not touch each other, nor the model."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import make, tokens
from engine.helpers import chunks, close, same, snapshot
from memdecay.engine.cache import MemDecayCache
from memdecay.errors import MemDecayError, ModelError, SessionError

BOUNDS = chunks(100, [40, 7, 13, 1, 1, 1, 1, 1, 20, 1])


def new_cache(model: PreTrainedModel, budget: int | None = 64) -> MemDecayCache:
    cache = MemDecayCache(model, budget=budget, page_size=4)
    cache.label(["system"] * 8 + ["tool_out"] * 40 + ["user"] * 12)
    return cache


@torch.no_grad()
def run(
    model: PreTrainedModel, cache: MemDecayCache, ids: Tensor, bounds: Any = BOUNDS
) -> Iterator[Tensor]:
    """Forward by forward, so that others can run in between."""
    for start, end in bounds:
        with torch.no_grad():
            yield model(input_ids=ids[:, start:end], cache=cache).logits


def untouched(model: PreTrainedModel, implementation: str = "sdpa") -> bool:
    decoder = model.get_decoder()
    return (
        model.config._attn_implementation == implementation
        and "forward" not in decoder.__dict__
        and not decoder._forward_hooks
        and not decoder._forward_pre_hooks
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_interleaved_caches_equal_each_alone(name: str) -> None:
    model = make(name)
    ids = [tokens(100, seed=seed) for seed in range(3)]
    budgets = (64, None, 80)
    alone = [
        list(run(model, new_cache(model, budget), one))
        for budget, one in zip(budgets, ids, strict=True)
    ]
    runs = [
        run(model, new_cache(model, budget), one) for budget, one in zip(budgets, ids, strict=True)
    ]
    for expected, actual in zip(zip(*alone, strict=True), zip(*runs, strict=True), strict=True):
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        barrier.wait()
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gpt2", "eager")],
)
def test_threads_on_one_model_equal_each_alone(name: str, implementation: str) -> None:
    model = make(name)
    model.set_attn_implementation(implementation)
    ids = [tokens(100, seed=seed) for seed in range(2)]

    def with_cache(number: int) -> Callable[[], list[Tensor]]:
        return lambda: list(run(model, new_cache(model), ids[number]))

    def stock() -> list[Tensor]:
        return [
            model.generate(tokens(20, seed=seed), max_new_tokens=20, do_sample=False)
            for seed in range(3)
        ]

    jobs = [with_cache(0), with_cache(1), stock]
    alone = [job() for job in jobs]
    for _ in range(3):
        for number, result in enumerate(in_threads(jobs)):
            assert not isinstance(result, BaseException), result
            for actual, expected in zip(result, alone[number], strict=True):
                assert torch.equal(actual, expected), f"thread {number}"
    gc.collect()
    assert untouched(model, implementation)


def test_models_that_share_a_config_do_not_share_anything_else() -> None:
    """`from_config` does not copy the config, and the config says which attention runs."""
    one = make("llama")
    two = type(one)(one.config).eval()
    assert one.config is two.config
    ids = tokens(100)
    jobs = [lambda m=m: list(run(m, new_cache(m), ids)) for m in (one, two)]
    jobs.append(lambda: [two.generate(tokens(20), max_new_tokens=30, do_sample=False)])
    alone = [job() for job in jobs]
    assert not torch.equal(alone[0][0], alone[1][0])
    for result, expected in zip(in_threads(jobs), alone, strict=True):
        assert not isinstance(result, BaseException), result
        assert all(torch.equal(a, e) for a, e in zip(result, expected, strict=True))
    gc.collect()
    assert untouched(one)
    assert untouched(two)


class Bomb:
    """A hook on a layer that raises at one forward."""

    def __init__(self, model: PreTrainedModel, at: int, error: type[BaseException]) -> None:
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        self._handle = layers[2].register_forward_hook(self._ran)
        self._left, self._error = at, error

    def _ran(self, *_: Any) -> None:
        self._left -= 1
        if self._left < 0:
            self._handle.remove()
            raise self._error("boom")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("align", [None, "region"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding", "gpt2"])
def test_a_forward_that_raises_has_never_been(
    name: str, align: str | None, error: type[BaseException]
) -> None:
    model = make(name)
    own = model.config._attn_implementation
    ids = tokens(100)

    def fresh() -> MemDecayCache:
        cache = MemDecayCache(model, budget=64, page_size=4, align=align)
        cache.label(["system"] * 8 + ["tool_out"] * 40 + ["user"] * 12)
        return cache

    reference = fresh()
    expected = list(run(model, reference, ids))
    stock = model.generate(tokens(9), max_new_tokens=5, do_sample=False)
    for fails in (0, 1, 2, 5, 8, 20):
        cache = fresh()
        Bomb(model, fails, error)
        logits: list[Tensor] = []
        done = failures = 0
        while done < len(BOUNDS):
            try:
                for out in run(model, cache, ids, BOUNDS[done:]):
                    logits.append(out)
                    done += 1
            except error:
                failures += 1
                assert done == fails
                assert cache.get_seq_length() == BOUNDS[done][0]
                assert model.config._attn_implementation == own
                assert torch.equal(
                    model.generate(tokens(9), max_new_tokens=5, do_sample=False), stock
                )
        assert failures == 1
        assert all(torch.equal(a, e) for a, e in zip(logits, expected, strict=True))
        assert same(snapshot(cache), snapshot(reference))
        assert (cache.steps, cache.evicted_tokens, cache.observations) == (
            reference.steps,
            reference.evicted_tokens,
            reference.observations,
        )
    del cache, reference
    gc.collect()
    assert untouched(model, own)


def test_a_padded_forward_that_raises_has_never_been() -> None:
    model = make("llama")
    ids = tokens(60, 2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)

    @torch.no_grad()
    def run_padded(cache: MemDecayCache, fails: bool) -> Tensor:
        out = torch.empty(0)
        for start, end in chunks(60, [20, 20, 1]):
            for attempt in range(2 if fails else 1):
                if fails and attempt == 0:
                    Bomb(model, 0, RuntimeError)
                try:
                    out = model(
                        input_ids=ids[:, start:end],
                        attention_mask=mask[:, :end],
                        position_ids=position[:, start:end],
                        cache=cache,
                    ).logits
                except RuntimeError:
                    continue
        cache.crop(-10)
        return out

    caches = [MemDecayCache(model, budget=48, page_size=4) for _ in range(2)]
    assert torch.equal(run_padded(caches[0], False), run_padded(caches[1], True))
    assert same(snapshot(caches[0]), snapshot(caches[1]))
    assert [ledger.seen for ledger in caches[0].ledgers] == [50, 20]


@torch.no_grad()
def test_a_listener_or_a_refusal_that_raises_leaves_the_model_as_it_was() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=64)
    model(input_ids=tokens(20), cache=cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("listener")

    cache.on_observe = fail
    for count in (1, 1):
        with pytest.raises(RuntimeError, match="listener"):
            model(input_ids=tokens(count), cache=cache)
        assert model.config._attn_implementation == "sdpa"
        assert cache.get_seq_length() == 20
    cache.on_observe = None
    with pytest.raises(ValueError, match="do not fit"):
        model(input_ids=tokens(65), cache=cache)
    assert model.config._attn_implementation == "sdpa"
    stock = model(input_ids=tokens(30)).logits
    assert close(model(input_ids=tokens(30)[:, 20:], cache=cache).logits, stock[:, 20:])


@torch.no_grad()
def test_the_guard_goes_with_the_last_cache() -> None:
    model = make("llama")
    one, two = MemDecayCache(model, budget=None), MemDecayCache(model, budget=None)
    model(input_ids=tokens(5), cache=one)
    three = one.copy()
    del one, two
    gc.collect()
    assert not untouched(model)
    model(input_ids=tokens(5), cache=three)
    del three
    gc.collect()
    assert untouched(model)


@torch.no_grad()
def test_a_copied_or_pickled_model_has_no_guard() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    expected = model(input_ids=tokens(20)).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=tokens(20)).logits, expected)
        other.model.embed_tokens.weight.data.zero_()
        assert not torch.equal(other(input_ids=tokens(20)).logits, expected)
        with pytest.raises(SessionError, match="only by a forward of the model it was made for"):
            other(input_ids=tokens(5), cache=cache)
        mine = MemDecayCache(other, budget=None)
        assert other(input_ids=tokens(5), cache=mine).logits.shape == (1, 5, 211)
    assert torch.equal(model(input_ids=tokens(20)).logits, expected)
    assert model(input_ids=tokens(5), cache=cache).logits.shape == (1, 5, 211)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    model, other = make("llama"), make("llama")
    cache = MemDecayCache(model, budget=None)
    with pytest.raises(SessionError, match="only by a forward of the model it was made for"):
        other(input_ids=tokens(5), cache=cache)
    guarded = MemDecayCache(other, budget=None)
    with pytest.raises(ModelError, match="made for another model than this LlamaModel"):
        other(input_ids=tokens(5), cache=cache)
    assert cache.get_seq_length() == guarded.get_seq_length() == 0
    assert model(input_ids=tokens(5), cache=cache).logits.isfinite().all()


@pytest.mark.parametrize("duplicate", [MemDecayCache.copy, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_copies_are_independent(name: str, duplicate: Callable[[Any], Any]) -> None:
    """A restored cache that is changed in place: restore twice, compare."""
    model = make(name)
    ids = tokens(100)
    cache = new_cache(model)
    list(run(model, cache, ids, BOUNDS[:6]))
    before = snapshot(cache)
    one, two = duplicate(cache), duplicate(cache)
    first = list(run(model, one, ids, BOUNDS[6:]))
    one.crop(-3)
    one.label(["user"])
    one.pin(lambda ledger: ledger["position"] < 12)
    assert same(snapshot(cache), before)
    assert same(snapshot(two), before)
    second = list(run(model, two, ids, BOUNDS[6:]))
    third = list(run(model, cache, ids, BOUNDS[6:]))
    assert all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(first, second, third, strict=True)
    )
    assert same(snapshot(two), snapshot(cache))
    assert two.evicted_tokens == cache.evicted_tokens > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_second_shorter_prompt_after_reset_finds_no_stale_state(name: str) -> None:
    model = make(name)
    used, new = new_cache(model), MemDecayCache(model, budget=64, page_size=4)
    list(run(model, used, tokens(100)))
    used.label(["plan"] * 5)
    used.reset()
    assert (used.get_seq_length(), used.kept(), used.nbytes, used.steps) == (0, 0, 0, 0)
    assert (used.evicted_tokens, used.peak_tokens, used.observations) == (0, 0, 0)
    ids, bounds = tokens(30, seed=9), chunks(30, [20, 1])
    for a, b in zip(run(model, used, ids, bounds), run(model, new, ids, bounds), strict=True):
        assert torch.equal(a, b)
    assert same(snapshot(used), snapshot(new))
    out = model.generate(
        tokens(12, seed=4), cache=MemDecayCache(model, budget=64), max_new_tokens=8
    )
    used.reset()
    again = model.generate(tokens(12, seed=4), cache=used, max_new_tokens=8)
    assert torch.equal(out, again)


@pytest.mark.parametrize("observe_every", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_gradients_and_inference_mode_may_come_and_go(name: str, observe_every: int) -> None:
    model = make(name)
    ids = tokens(100)
    caches = [
        MemDecayCache(model, budget=64, page_size=4, observe_every=observe_every) for _ in range(2)
    ]
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for number, (start, end) in enumerate(BOUNDS):
        with torch.no_grad():
            expected = model(input_ids=ids[:, start:end], cache=caches[0]).logits
        with modes[number % 3]():
            actual = model(input_ids=ids[:, start:end], cache=caches[1]).logits
        assert torch.equal(actual, expected)
    for cache in caches:
        cache.crop(-2)
    assert not any(pool.kv.requires_grad or pool.kv.is_inference() for pool in caches[1].pools)
    assert same(snapshot(caches[0]), snapshot(caches[1]))


@torch.no_grad()
def test_the_model_s_own_attention_may_change_between_forwards() -> None:
    model = make("llama")
    ids = tokens(60)
    cache = MemDecayCache(model, budget=None)
    expected = model(input_ids=ids).logits[0]
    logits = []
    for implementation, (start, end) in zip(
        ["sdpa", "eager", "eager"], chunks(60, [30, 29, 1]), strict=True
    ):
        model.set_attn_implementation(implementation)
        logits.append(model(input_ids=ids[:, start:end], cache=cache).logits[0])
        assert model.config._attn_implementation == implementation
    assert close(torch.cat(logits), expected)


@torch.no_grad()
def test_what_is_in_the_pool_cannot_be_taken_out_of_it() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    layer = cache.layers[0]
    assert layer.keys is None
    assert layer.values is None
    with pytest.raises(SessionError, match="only by a forward"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    model(input_ids=tokens(5), cache=cache)
    assert layer.keys.shape == layer.values.shape == (1, 2, 5, 16)
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(MemDecayError, match="own pool"):
            move(0)
    with pytest.raises(MemDecayError, match="own pool"):
        layer.keys = torch.zeros(1)
    with pytest.raises(MemDecayError, match="own pool"):
        layer.values = torch.zeros(1)
    del cache, move
    with pytest.raises(SessionError, match="outlived"):
        layer.get_seq_length()
