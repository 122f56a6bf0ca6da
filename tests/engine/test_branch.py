"""A branch: many sequences that share a past and differ in what they keep of it."""

from __future__ import annotations

import pytest
import torch

from engine.families import CONFIGS, make, tokens
from memdecay.engine import MemDecayCache
from memdecay.errors import MemDecayError

SEEN = 40
KEPT = [
    torch.arange(SEEN),
    torch.tensor([0, 1, 2, 3, 20, 21, 30, 37, 38, 39]),
    torch.cat([torch.arange(0, 8), torch.arange(24, 40)]),
]


def filled(model: torch.nn.Module) -> MemDecayCache:
    cache = MemDecayCache(model, budget=None, policy="h2o")
    ids = tokens(SEEN)
    with torch.no_grad():
        model(input_ids=ids[:, :33], cache=cache)
        for place in range(33, SEEN):
            model(input_ids=ids[:, place : place + 1], cache=cache)
    return cache


def evicted(cache: MemDecayCache, keep: torch.Tensor) -> MemDecayCache:
    copy = cache.copy()
    copy.evict([place for place in range(SEEN) if place not in keep.tolist()])
    return copy


def read(model: torch.nn.Module, cache: MemDecayCache, rows: int) -> torch.Tensor:
    """Logits of a chunk and two decode steps."""
    ids = tokens(9, seed=5).expand(rows, -1)
    logits = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 9)):
            place = torch.arange(SEEN + start, SEEN + end).expand(rows, -1)
            out = model(input_ids=ids[:, start:end], position_ids=place, cache=cache)
            logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_sequence_goes_on_as_an_evicted_copy_would(name: str) -> None:
    model = make(name)
    cache = filled(model)
    together = read(model, cache.branch(KEPT), len(KEPT))
    for row, keep in enumerate(KEPT):
        alone = read(model, evicted(cache, keep), 1)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-4)


def test_keep_sets_matter() -> None:
    model = make("llama")
    logits = read(model, filled(model).branch(KEPT), len(KEPT))
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_what_it_came_from_is_not_touched() -> None:
    model = make("qwen2")
    cache = filled(model)
    before = [pool.kv.clone() for pool in cache.pools]
    branch = cache.branch(KEPT)
    read(model, branch, len(KEPT))
    branch.evict([0, 1], row=1)
    assert cache.kept() == SEEN and cache.seen == SEEN
    for pool, kv in zip(cache.pools, before, strict=True):
        assert torch.equal(pool.kv, kv)


def test_ledgers_hold_what_is_kept_and_its_state() -> None:
    model = make("llama")
    cache = filled(model)
    branch = cache.branch(KEPT)
    for row, keep in enumerate(KEPT):
        ledger, alone = branch.ledgers[row], evicted(cache, keep).ledgers[0]
        order = torch.argsort(alone["position"])
        for column in ("position", "page", "region", "state.accumulated", "num_observed"):
            assert torch.equal(ledger[column], alone[column][order]), column
        assert ledger.num_pages == alone.num_pages
        assert branch.kept(row) == len(keep)


def test_it_copies_only_what_is_kept() -> None:
    model = make("llama")
    cache = MemDecayCache(model, budget=None, policy="h2o")
    with torch.no_grad():
        model(input_ids=tokens(600), cache=cache)
    assert cache.branch([torch.arange(10)]).nbytes < cache.nbytes / 4


def test_an_empty_keep_set_is_refused() -> None:
    cache = filled(make("llama"))
    with pytest.raises(MemDecayError, match=r"kept\[1\] holds no token"):
        cache.branch([KEPT[0], torch.tensor([SEEN + 5])])
    with pytest.raises(MemDecayError, match="kept is empty"):
        cache.branch([])
    with pytest.raises(MemDecayError, match="row is 3"):
        cache.branch(KEPT, row=3)


@torch.no_grad()
def test_a_branch_that_keeps_all_of_a_full_ledger_goes_on() -> None:
    model, ids = make("llama"), tokens(300)
    cache = MemDecayCache(model, budget=None)
    model(input_ids=ids[:, :270], cache=cache)
    branch = cache.branch([torch.arange(270)])
    place = torch.arange(270, 300)[None]
    out = model(input_ids=ids[:, 270:], position_ids=place, cache=branch)
    whole = model(input_ids=ids).logits[:, 270:]
    assert torch.allclose(out.logits, whole, atol=1e-4)
