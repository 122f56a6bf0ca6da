"""Rows of a batch are what they would be alone: padding, keep sets, what the policy evicts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.families import Event, choose, make, oracle, tokens
from engine.helpers import close, kept
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.forward import Forward
from memdecay.policy import get_policy
from memdecay.regions import REGIONS

FAMILIES = [
    "llama",
    "qwen2_sliding",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral_sliding",
    "phi",
    "gpt_neox",
    "gpt2",
    "opt",
]
FULL = ["llama", "qwen3", "phi", "gpt_neox", "gpt2", "opt"]
PADS = (0, 43, 12)
SCRIPT = [20, 40, "evict", *[1] * 6, 20, "evict", 20, *[1] * 12, "evict", 1, 1]
"""Row 1 is only padding in the first chunk, and partly in the second."""


class Batch:
    """A batch that is fed forward by forward, and what each row would be alone."""

    def __init__(self, script: list[int], holes: dict[int, list[tuple[int, int]]]) -> None:
        total = sum(script)
        self.ids = tokens(total, len(PADS))
        self.mask = torch.ones_like(self.ids)
        for row, pad in enumerate(PADS):
            self.mask[row, :pad] = 0
            for start, end in holes.get(row, []):
                self.mask[row, start:end] = 0
        self.ids[self.mask == 0] = 0
        self.position = (self.mask.cumsum(1) - 1).clamp(min=0)

    def forward(self, model: torch.nn.Module, cache: MemDecayCache, count: int) -> Tensor:
        seen = cache.get_seq_length()
        logits = model(
            input_ids=self.ids[:, seen : seen + count],
            attention_mask=self.mask[:, : seen + count],
            position_ids=self.position[:, seen : seen + count],
            cache=cache,
        ).logits
        assert logits.isfinite().all()
        return logits

    def alone(self, row: int) -> Tensor:
        return self.ids[row][self.mask[row] == 1][None]


def run_with_evictions(
    name: str, observe_every: int, holes: dict[int, list[tuple[int, int]]]
) -> None:
    model = make(name)
    batch = Batch([part for part in SCRIPT if isinstance(part, int)], holes)
    cache = MemDecayCache(model, budget=None, observe_every=observe_every)
    rng = random.Random(2)
    events: list[list[Event]] = [[] for _ in PADS]
    gone: list[set[int]] = [set() for _ in PADS]
    logits = []
    for part in SCRIPT:
        if isinstance(part, int):
            logits.append(batch.forward(model, cache, part))
            continue
        for row in range(len(PADS)):
            seen = cache.ledgers[row].seen
            evicted = choose(rng, seen, gone[row], 0.1 + 0.2 * row)
            cache.evict(evicted, row=row)
            events[row].append((seen, evicted))
    for row in range(len(PADS)):
        own = torch.cat(logits, 1)[row][batch.mask[row] == 1]
        assert close(own, oracle(model, batch.alone(row), events[row])), f"row {row}"
        assert cache.ledgers[row].seen == int(batch.mask[row].sum()), "pads are not counted"
        stored = set(range(cache.ledgers[row].seen)) - gone[row]
        if None in cache.layout.table_windows:
            assert kept(cache, row) == sorted(stored), "pads are not stored"
        else:
            assert set(kept(cache, row)) <= stored, "what left the window may be gone too"


@pytest.mark.parametrize("observe_every", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_padded_rows_equal_the_rows_alone(name: str, observe_every: int) -> None:
    run_with_evictions(name, observe_every, {})


@pytest.mark.parametrize("name", FULL)
@torch.no_grad()
def test_fully_padded_rows_in_a_later_chunk(name: str) -> None:
    run_with_evictions(name, 1, {0: [(86, 106)], 2: [(66, 86), (110, 111)]})


@pytest.mark.parametrize("clock", ["steps", "tokens"])
@pytest.mark.parametrize("align", [None, "region"])
@pytest.mark.parametrize("policy", ["memdecay-paper", "h2o", "tova", "snapkv", "streaming"])
@torch.no_grad()
def test_a_policy_keeps_what_it_would_keep_of_the_row_alone(
    policy: str, align: str | None, clock: str
) -> None:
    model = make("llama")
    prompt, steps = [20] * 6, 30
    batch = Batch([*prompt, *[1] * steps], {})
    options = {
        "budget": 64,
        "policy": get_policy(policy),
        "page_size": 8,
        "align": align,
        "clock": clock,
    }
    cache = MemDecayCache(model, **options)
    alone = [MemDecayCache(model, **options) for _ in PADS]
    rng = random.Random(4)
    for row in range(len(PADS)):
        count = batch.alone(row).shape[1] - steps
        names = [name for name in rng.choices(REGIONS[1:], k=30) for _ in range(5)][:count]
        cache.label(names, row=row)
        alone[row].label(names)
    evictions = [0] * len(PADS)
    for count in [*prompt, *[1] * steps]:
        for one in (cache, *alone):
            one.prefilling = count > 1
        start = cache.get_seq_length()
        batch.forward(model, cache, count)
        for row, one in enumerate(alone):
            ids = batch.ids[row, start : start + count][batch.mask[row, start : start + count] == 1]
            if len(ids):
                model(input_ids=ids[None], cache=one)
            assert kept(cache, row) == kept(one), f"row {row} after {start + count} columns"
            evictions[row] = one.evicted_tokens
            assert cache.kept(row) <= 64
    assert all(evictions), "every row must evict"
    assert evictions[0] + evictions[1] + evictions[2] == cache.evicted_tokens


@torch.no_grad()
def test_rows_have_their_own_labels_and_pins() -> None:
    model = make("llama")
    batch = Batch([60, *[1] * 20], {})
    cache = MemDecayCache(model, budget=64, page_size=4)
    cache.label(["system"] * 20, row=0)
    cache.label(["tool_out"] * 4 + ["system"] * 6, row=2)
    batch.forward(model, cache, 60)
    assert cache.ledgers[1]["region"].tolist() == [cache.default_region] * 17
    cache.shrink(24)
    assert set(range(20)) <= set(kept(cache, 0))
    assert set(range(4, 10)) <= set(kept(cache, 2))
    assert [cache.kept(row) for row in range(3)] == [24, 17, 24]


@torch.no_grad()
def test_a_batch_that_cannot_fit_evicts_nothing_of_any_row() -> None:
    model = make("llama")
    ids = tokens(60, 2)
    cache = MemDecayCache(model, budget=64, page_size=4)
    cache.label(["system"] * 60, row=1)
    model(input_ids=ids, cache=cache)
    before = [kept(cache, row) for row in range(2)]
    with pytest.raises(ValueError, match="8 new tokens do not fit budget=64"):
        model(input_ids=ids[:, :8], cache=cache)
    assert [kept(cache, row) for row in range(2)] == before
    model(input_ids=ids[:, :4], cache=cache)
    assert cache.get_seq_length() == 64


@torch.no_grad()
def test_another_batch_size_is_refused() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None)
    model(input_ids=tokens(5, 2), cache=cache)
    with pytest.raises(ValueError, match="3 sequences, but this cache holds 2"):
        model(input_ids=tokens(5, 3), cache=cache)
    with pytest.raises(ValueError, match="row is 2, but this cache holds 2"):
        cache.evict([0], row=2)


@torch.no_grad()
def test_no_query_is_left_with_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax over nothing is NaN on some devices, even where this machine's gives zeros."""
    masks = []
    make_mask = Forward.mask

    def watched(forward: Forward, **kwargs: Any) -> Tensor | None:
        masks.append(make_mask(forward, **kwargs))
        return masks[-1]

    monkeypatch.setattr(Forward, "mask", watched)
    run_with_evictions("gemma3", 1, {})
    assert sum(mask is not None for mask in masks) > 10
    assert all(bool(mask.any(-1).all()) for mask in masks if mask is not None)
