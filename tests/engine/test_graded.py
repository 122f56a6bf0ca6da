"""Tokens at fewer bits inside the cache: exact beside a reference, and really smaller."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch

from engine.families import make, tokens
from engine.helpers import close, kept
from engine.lowering import Lockstep, reference
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.graded import groups_of, quantized
from memdecay.engine.graded_cache import GradedCache
from memdecay.engine.undo import Checkpoint
from memdecay.errors import BudgetError, MemDecayError, ModelError, ProfileError
from memdecay.policy import get_policy
from memdecay.regions import Profile

SMALL = {"full_precision": 24, "group_size": 8, "page_size": 4}
"""Of the tiny models here."""


def graded(model=None, budget=64, **settings):
    cache = MemDecayCache(model or make("llama"), budget=budget, **{**SMALL, **settings})
    assert isinstance(cache, GradedCache)
    return cache


@torch.no_grad()
def read(cache, model, ids, step=10):
    out = [
        model(input_ids=ids[:, start : start + step], cache=cache).logits[0]
        for start in range(0, ids.shape[1], step)
    ]
    return torch.cat(out)


# Exact


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("bits", [4, 8])
def test_random_steps_are_those_of_a_reference_that_quantizes_the_same(name, bits):
    both = Lockstep(name, 3, 64, **SMALL, bits=bits)
    both.run(60)
    assert both.lowered > 50
    assert both.worst < 1e-4


@pytest.mark.parametrize(
    ("policy", "page_size"),
    [("memdecay", 1), ("h2o", 4), ("tova", 1), ("streaming", 4), ("random", 3), ("snapkv", 8)],
)
def test_every_order_of_going_down_is_exact(policy, page_size):
    settings = {**SMALL, "page_size": page_size, "policy": policy}
    for seed in range(2):
        both = Lockstep("llama", seed, 40, **settings)
        both.run(50)
        assert both.lowered > 30
        assert both.worst < 1e-4


def test_without_a_budget_nothing_is_lost_and_most_of_it_is_coded():
    both = Lockstep("qwen2", 1, None, **SMALL)
    both.run(40)
    for _ in range(20):
        both.forward(12)
        both.check()
    assert both.cache.coded_tokens > 200
    assert both.worst < 1e-4


def test_the_reference_would_see_a_coded_token_at_full_precision():
    both = Lockstep("llama", 0, None, **SMALL)
    both._follow = lambda positions, sizes, was: None
    for _ in range(6):
        both.forward(12)
    assert both.worst > 1e-3


def test_coded_keys_and_values_are_those_of_the_formula_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(13, 15, generator=generator) * torch.logspace(-3, 3, 15)
    numbers[:, 4] = 2.5
    for bits in (4, 8):
        for axis in (0, 1):
            codes, low, step = quantized(numbers, axis, bits)
            if bits == 4:
                codes = torch.cat([codes & 15, codes >> 4], -1)[:, :15]
            restored = low.float() + step.float() * codes
            assert torch.equal(restored, reference(numbers, axis, bits))
            assert bool(((restored - numbers).abs() <= step.float() / 2 * 1.0001).all())


def test_the_cache_stays_in_the_type_of_the_model():
    model = make("llama", torch.bfloat16)
    cache = graded(model)
    read(cache, model, tokens(60))
    keys = cache.layers[0].keys
    assert cache.coded_tokens and keys.dtype == torch.bfloat16
    pool = cache.graded_pools()[0]
    codes, low, step = quantized(pool.kv[1, 0, :, :24], -1, 4)
    exact = low.float() + step.float() * torch.cat([codes & 15, codes >> 4], -1)
    down = torch.arange(len(cache.ledgers[0]["page"])) == cache.coded_tokens
    cache._lower(down)
    assert torch.equal(cache.layers[0].values[0, :, cache.coded_tokens - 1], exact[:, 0].bfloat16())


# What goes down


def test_groups_are_of_neighbours_and_never_of_few():
    rng = random.Random(3)
    for count in (1, 2, 7, 30, 90, 200):
        positions = sorted(rng.sample(range(600), count))
        sizes = groups_of(torch.tensor(positions), 16)
        assert sum(sizes) == count
        assert len(sizes) == 1 or min(sizes) >= 8
        assert max(sizes[:-1], default=0) <= 16 and sizes[-1] < 24
        start = 0
        for number, size in enumerate(sizes):
            group = positions[start : start + size]
            start += size
            if number < len(sizes) - 1:
                assert all(at - group[0] < 32 for at in group[8:])
                assert size == 16 or positions[start] - group[0] >= 32, "cut only at a gap"
    assert groups_of(torch.arange(7, 71), 16) == [16] * 4
    assert groups_of(torch.arange(7, 71 + 7), 16) == [16, 16, 16, 23]
    assert groups_of(torch.tensor([*range(9), *range(90, 102)]), 16) == [9, 12]
    assert groups_of(torch.tensor([*range(3), *range(90, 102)]), 16) == [15]


def literally_down(cache, need, wanted):
    """The positions that go down of single tokens, by loops."""
    ledger, span = cache.ledgers[0], cache.group_size
    now = cache.clock_of(ledger)
    score = ledger.policy.score(ledger.tokens(now), ledger.profile).double().tolist()
    first, last = {}, {}
    room = max(0, ledger.length - cache.coded_tokens - need)
    tokens = dataclasses.replace(ledger.tokens(now), room=room)
    saved = ledger.policy.protected(tokens, ledger.profile)
    for slot in range(cache.coded_tokens, ledger.length):
        at = int(ledger["position"][slot])
        if at < ledger.seen - 1 and not bool(ledger.held()[slot]):
            (last if saved is not None and bool(saved[slot]) else first)[at] = score[slot]

    def worst(free, count):
        pages = {at // span: [] for at in sorted(free)}
        for at in free:
            pages[at // span].append(free[at])
        mean = {page: sum(values) / len(values) for page, values in pages.items()}
        return sorted(free, key=lambda at: (mean[at // span], at))[:count]

    if len(first) >= need:
        return set(worst(first, min(wanted, len(first))))
    return {*first, *worst(last, need - len(first))}


@pytest.mark.parametrize("policy", ["memdecay", "streaming", "h2o"])
def test_neighbours_go_down_worst_first_as_by_loops(policy):
    model = make("llama")
    cache = graded(model, budget=None, page_size=1, policy=policy, group_size=8)
    for start in range(0, 90, 6):
        read(cache, model, tokens(90)[:, start : start + 6], step=6)
        if not cache.coded_tokens:
            continue
        ledger = cache.ledgers[0]
        full = torch.arange(ledger.length) >= cache.coded_tokens
        stays = ledger.held() | (ledger["position"] == ledger.seen - 1)
        for need, wanted in ((1, 1), (3, 8), (8, 8), (int((full & ~stays).sum()), 99)):
            down = ledger.plan_down(
                need, wanted, cache.clock_of(ledger), full=full, stays=stays, span=8
            )
            found = {*ledger["position"][down].tolist()}
            assert found == literally_down(cache, need, wanted)
    assert cache.coded_tokens > 20
    with pytest.raises(BudgetError, match="must go down to fewer bits, but"):
        ledger.plan_down(500, 500, 0.0, full=full, stays=stays, span=8)


def test_the_policys_lowest_go_down_first_and_whole_groups_of_them():
    model = make("llama")
    cache = graded(model, budget=None, policy="streaming", page_size=8, full_precision=40)
    read(cache, model, tokens(60), step=1)
    coded = cache.ledgers[0]["position"][: cache.coded_tokens].tolist()
    assert sorted(coded) == list(range(4, 4 + len(coded)))  # the sinks are protected
    assert cache.graded.sizes == [8, 8, 8]
    assert cache.lowered_tokens == len(coded) == 24


def test_single_tokens_go_down_in_groups_too():
    model = make("llama")
    cache = graded(model, budget=None, page_size=1)
    read(cache, model, tokens(80), step=1)
    assert min(cache.graded.sizes) >= 4 and len(cache.graded.sizes) > 5


def test_what_the_policy_protects_goes_down_last():
    model = make("llama")
    cache = graded(model, budget=None, policy=get_policy("streaming", sinks=8))
    read(cache, model, tokens(24), step=8)
    read(cache, model, tokens(16), step=16)  # three pages are free, and one of two must follow
    coded = sorted(cache.ledgers[0]["position"][: cache.coded_tokens].tolist())
    assert coded == [*range(4), *range(8, 20)]


def test_the_end_of_a_prompt_that_was_held_is_seen_before_tokens_go_down():
    model = make("llama")
    cache = graded(model, budget=None)
    read(cache, model, tokens(24), step=8)
    assert cache.observations == 0
    read(cache, model, tokens(8), step=8)
    assert cache.observations == 1 and cache.coded_tokens


class Newest(type(get_policy("streaming"))):
    """Evicts the newest page."""

    name = "newest"

    def score(self, tokens, profile):
        return -tokens.position.float()

    def protected(self, tokens, profile):
        return None


def test_the_newest_page_stays_whatever_the_policy_says():
    model = make("llama")
    cache = graded(model, budget=None, policy=Newest())
    read(cache, model, tokens(24), step=8)
    read(cache, model, tokens(1))
    # the rest of the worst eight neighbours, and the first of the next
    coded = cache.ledgers[0]["position"][: cache.coded_tokens].tolist()
    assert coded == [*range(8, 12), *range(16, 20)]


class NewestThenOldest(Newest):
    """Evicts the newest page, then the oldest ones, but no system prompt."""

    needs = frozenset({"labels"})

    def score(self, tokens, profile):
        newest = tokens.position >= tokens.seq_len - 4
        return tokens.position.float() - 1000 * newest


def test_an_eviction_that_makes_a_larger_page_the_newest_leaves_room():
    model = make("llama")
    cache = graded(model, budget=24, full_precision=16, policy=NewestThenOldest())
    cache.label(["system"] * 8)
    read(cache, model, tokens(24), step=4)
    assert sorted(cache.ledgers[0]["position"][: cache.coded_tokens].tolist()) == [*range(8, 16)]
    cache.evict([21, 22, 23])
    read(cache, model, tokens(5))
    assert kept(cache) == [*range(8), *range(12, 20), *range(24, 29)]
    assert cache.full_tokens == 13


def test_pins_full_regions_and_the_newest_page_stay():
    model, profile = make("llama"), Profile.default()
    regions = ["system"] * 10 + ["plan"] * 8 + ["scratchpad"] * 60
    for full_regions, stay in ((None, {"system"}), (["plan"], {"system", "plan"})):
        cache = graded(model, full_precision=40, full_regions=full_regions)
        cache.label(regions)
        read(cache, model, tokens(40))
        if full_regions is None:
            assert profile.names[cache.full_regions[0]] == "system"
        cache.pin(lambda ledger: ledger["position"] == 39)
        read(cache, model, tokens(38, seed=1))
        ledger = cache.ledgers[0]
        coded = torch.arange(ledger.length) < cache.coded_tokens
        found = {profile.names[region] for region in ledger["region"][coded].tolist()}
        assert not found & stay
        assert not bool(coded[ledger["position"] >= 76].any())
        assert not bool(coded[ledger["position"] == 39].any())
        assert cache.coded_tokens


def test_a_pin_on_a_coded_token_keeps_its_codes():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    position = int(cache.ledgers[0]["position"][0])
    cache.pin(lambda ledger: ledger["position"] == position)
    read(cache, model, tokens(60, seed=1))
    assert position in kept(cache)
    at = cache.ledgers[0]["position"].tolist().index(position)
    assert at < cache.coded_tokens


# Bytes


def used(cache):
    """Bytes of what is in use, counted by hand; float32 models with 4 layers, 2 heads of 16."""
    per_token = 4 * 2 * (2 * 16 * cache.bits // 8 + 2 * 2)
    scales = len(cache.graded.sizes) * 4 * 2 * 2 * 16 * 2
    full = cache.full_tokens * 4 * 2 * 2 * 16 * 4
    return full + cache.coded_tokens * per_token + scales


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_slots_codes_scales_and_the_scratch_of_one_layer(bits):
    model = make("llama")
    plain = MemDecayCache(model, budget=1024, page_size=4)
    cache = graded(model, budget=1024, bits=bits)
    ids = tokens(900)
    for one in (plain, cache):
        read(one, model, ids, step=16)
    parts = cache.nbytes_by_precision
    assert cache.nbytes == sum(parts.values())
    assert parts["full"] == 4 * 2 * 2 * 16 * 4 * 24
    scratch = 2 * 2 * cache.kept() * 16 * 4
    assert scratch <= parts["scratch"] <= 1.3 * scratch + 64 * 4 * 64
    exact = used(cache)
    assert exact + scratch <= cache.nbytes <= 1.2 * exact + 1.3 * scratch + 64 * 4 * 64
    assert exact + scratch <= cache.peak_nbytes <= exact + scratch + 4 * 2 * 2 * 16 * 4 * 24
    assert plain.nbytes_by_precision == {"full": plain.nbytes} and plain.coded_tokens == 0
    peak = cache.peak_nbytes
    cache.shrink(600)
    read(cache, model, tokens(1))
    assert cache.peak_nbytes == peak > used(cache) + 2 * 2 * cache.kept() * 16 * 4
    share = (parts["full"] + parts["codes"]) / plain.nbytes
    assert share < (0.25 if bits == 4 else 0.40)


def test_codes_of_what_is_evicted_are_used_again():
    model = make("llama")
    cache = graded(model, budget=80, page_size=1)
    read(cache, model, tokens(200))
    before = cache.nbytes
    read(cache, model, tokens(300, seed=1))
    assert cache.kept() <= 80
    pool = cache.graded_pools()[0]
    assert pool.codes.shape[2] <= 80
    assert cache.nbytes <= before + 4 * pool.key_scales.untyped_storage().nbytes()


# Going back, out and away


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_operation_leaves_what_it_was_but_for_precision(again):
    for seed in range(3):
        both = Lockstep("llama", seed, 64, **SMALL)
        both.run(20)
        seen, before, lowered = both.cache.seen, set(kept(both.cache)), both.lowered
        point = Checkpoint(both.cache, 30, again=again)
        ids = [*both.ids]
        if again:
            both.cache.crop(-1)
        for _ in range(4):
            both.forward(6)
        assert both.lowered > lowered
        point.restore()
        assert both.cache.seen == seen and set(kept(both.cache)) <= before
        both.ids = ids
        if again:  # the newest token is that of before, which the reference has not any more
            assert seen - 1 in kept(both.cache)
            both.cache.crop(-1)
        both.check()
        both.run(20)
        assert both.worst < 1e-4


def test_undo_of_a_newest_token_that_was_coded_holds_full_precision():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    newest = int(cache.ledgers[0]["position"][: cache.coded_tokens].max())
    cache.crop(newest + 1 - cache.seen)
    cache.pin(lambda ledger: torch.arange(ledger.length) >= cache.coded_tokens)
    cache.full_precision = cache.full_tokens
    for pool in cache.pools:  # no slot more than that
        pool.kv = pool.kv[:, :, :, : cache.full_tokens].clone()
    values = cache.layers[0].values[0, :, cache.ledgers[0]["position"] == newest]
    point = Checkpoint(cache, 1, again=True)
    cache.crop(-1)
    point.restore()
    assert cache.full_tokens <= cache.full_precision
    again = cache.layers[0].values[0, :, cache.ledgers[0]["position"] == newest]
    assert close(values, again, 1e-2)


def test_what_is_taken_comes_back_to_the_bit_of_what_its_codes_stand_for():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    coded = cache.ledgers[0]["position"][: cache.coded_tokens]
    chosen = torch.cat([coded[3:7], cache.ledgers[0]["position"][-2:]])
    slots = torch.isin(cache.ledgers[0]["position"], chosen)
    order = cache.ledgers[0]["position"][slots].argsort()
    was = torch.stack([layer.keys[0, :, slots][:, order] for layer in cache.layers])
    moved = cache.take(chosen)
    assert close(moved.keys, was, 1e-6)
    cache.put_back(moved)
    again = cache.take(chosen)
    assert torch.equal(again.keys, moved.keys) and torch.equal(again.values, moved.values)
    assert again.columns.keys() == moved.columns.keys()
    assert cache.full_tokens <= 24


def test_who_listens_gets_what_codes_stand_for():
    model = make("llama")
    cache = graded(model, budget=40)
    heard = []
    cache.on_forget = lambda row, moved: heard.append(moved)
    read(cache, model, tokens(40))
    before = dict(
        zip(cache.ledgers[0]["position"].tolist(), cache.layers[2].keys[0, 1], strict=True)
    )
    read(cache, model, tokens(10, seed=1))
    (moved,) = heard
    for at, position in enumerate(moved.positions.tolist()):
        assert close(moved.keys[2, 1, at], before[position], 1e-6)


def test_more_than_can_be_at_full_precision_comes_back_in_parts():
    both = Lockstep("llama", 0, None, **SMALL)
    for _ in range(8):
        both.forward(12)
    cache = both.cache
    coded = cache.coded_tokens
    both.outside.append(cache.take([*range(1, 91)]))
    assert len(both.outside[0]) == 90 and cache.full_room() < 90
    both.put_back()
    both.check()
    assert cache.kept() == 96 and cache.coded_tokens >= coded
    both.forward(12)
    assert both.worst < 1e-4


def test_nothing_comes_back_where_pins_fill_full_precision():
    model = make("llama")
    cache = graded(model, budget=None, page_size=1)
    cache.label(["scratchpad"] * 20 + ["system"] * 23)
    read(cache, model, tokens(20), step=5)
    read(cache, model, tokens(23), step=1)
    moved = cache.take([3, 4])
    held, full = kept(cache), cache.full_tokens
    cache.label(["system"])
    read(cache, model, tokens(1))
    with pytest.raises(
        BudgetError, match=r"^2 tokens to put back do not fit full_precision=24.*hold 24"
    ):
        cache.put_back(moved)
    assert kept(cache) == [*held, 43] and cache.full_tokens == full + 1 == 24


def test_tokens_of_a_full_region_come_back_only_where_they_can_be_full():
    model = make("llama")
    cache = graded(model, budget=None, full_regions=["plan"])
    cache.label(["plan"] * 12)
    read(cache, model, tokens(12), step=4)
    early = cache.take(range(12))
    cache.label(["scratchpad"] * 2 + ["plan"] * 12 + ["scratchpad"] * 6)
    read(cache, model, tokens(20, seed=1), step=4)
    held = kept(cache)
    with pytest.raises(BudgetError, match="12 tokens to put back do not fit full_precision=24"):
        cache.put_back(early)
    assert kept(cache) == held
    cache.put_back(early.select(torch.arange(4)))
    assert kept(cache) == [0, 1, 2, 3, *held] and cache.full_tokens <= 24


def test_what_is_repeated_attends_to_what_the_codes_stand_for():
    model = make("llama")
    cache = graded(model, policy="memdecay-replay")
    ids = tokens(60)
    read(cache, model, ids)
    cache.evict(cache.ledgers[0]["position"][:20].tolist())  # some room
    other = cache.branch([torch.tensor(kept(cache))])
    positions = torch.tensor(kept(cache)[5:15])
    said = [one.replay(ids[0, positions], positions, ids[0, :3]) for one in (cache, other)]
    assert cache.coded_tokens
    assert close(*said)


def test_a_forward_that_fails_leaves_everything_but_precision(monkeypatch):
    both = Lockstep("llama", 2, 64, **SMALL)
    both.run(15)
    layer = both.model.model.layers[2].mlp
    monkeypatch.setattr(layer, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        both.model(input_ids=tokens(12), cache=both.cache)
    monkeypatch.undo()
    both.check()
    both.run(15)
    assert both.worst < 1e-4


def test_a_number_that_is_not_finite_is_refused_before_anything_goes_down():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(24), step=8)
    cache.pools[3].kv[0, 0, 1, 5, 3] = torch.inf
    index = cache.main.index.clone()
    with pytest.raises(MemDecayError, match="not finite"):
        read(cache, model, tokens(1))
    assert cache.coded_tokens == 0 and cache.seen == 24
    assert torch.equal(index, cache.main.index)


def test_a_copy_is_independent_and_shares_no_scratch():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    other = copy.copy(cache)
    ids = tokens(30, seed=2)
    mine, theirs = read(cache, model, ids), read(other, model, ids)
    assert torch.equal(mine, theirs)
    assert other.graded.scratch is not cache.graded.scratch
    assert all(pool.table is other.graded for pool in other.graded_pools())
    third = cache.copy()
    read(other, model, tokens(20, seed=3))
    assert torch.equal(read(cache, model, ids), read(third, model, ids))


def test_a_branch_goes_on_from_what_the_codes_stand_for():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    cache.evict(cache.ledgers[0]["position"][cache.coded_tokens :][:2].tolist())  # some room
    keep = torch.tensor(random.Random(0).sample(kept(cache), 30))
    other = cache.branch([keep, torch.tensor(kept(cache))])
    assert type(other) is MemDecayCache and other.full_precision is None
    ids = tokens(1, seed=4)
    with torch.no_grad():
        both = model(input_ids=ids.expand(2, 1), cache=other).logits[:, 0]
    whole = cache.copy()
    assert close(read(whole, model, ids), both[1:])
    cache.evict(sorted(set(kept(cache)) - set(keep.tolist())))
    assert close(read(cache, model, ids), both[:1])


def test_layers_give_copies_of_their_own():
    model = make("llama")
    cache = graded(model)
    read(cache, model, tokens(60))
    first = cache.layers[0].keys
    was = first.clone()
    assert not torch.equal(cache.layers[1].keys, was)
    assert torch.equal(first, was)


def test_it_runs_in_inference_mode_and_out_of_it():
    model = make("llama")
    ids = tokens(90)
    mixed, plain = graded(model), graded(model)
    expected = read(plain, model, ids)
    with torch.inference_mode():
        first = read(mixed, model, ids[:, :50])
    second = read(mixed, model, ids[:, 50:])
    assert close(torch.cat([first.clone(), second]), expected, 1e-5)


def test_generate_counts_what_it_wrote():
    model = make("llama")
    cache = graded(model)
    out = model.generate(
        tokens(50),
        attention_mask=torch.ones(1, 50, dtype=torch.int64),
        cache=cache,
        max_new_tokens=40,
        do_sample=False,
        prefill_chunk_size=10,
    )
    assert out.shape[1] == 90 and cache.seen == 89
    assert cache.full_tokens <= 24 and cache.kept() <= 64


# Refused


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"full_precision": 0}, BudgetError, "full_precision is 0, but it must be an integer"),
        ({"full_precision": 11}, BudgetError, "full_precision is 11 tokens.*at least 12"),
        ({"full_precision": 65}, BudgetError, "full_precision is 65 tokens.*budget, which is 64"),
        ({"bits": 2}, MemDecayError, "bits is 2, but it must be 4 or 8"),
        ({"group_size": 0}, MemDecayError, "group_size is 0"),
        ({"full_regions": "system"}, ProfileError, "full_regions is 'system'"),
        ({"full_regions": ["nowhere"]}, ProfileError, "nowhere"),
        ({"policy": "full", "budget": None}, BudgetError, "has no order"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, says):
    with pytest.raises(error, match=says):
        graded(**{"budget": 64, **settings})


def test_heads_and_sliding_windows_are_refused():
    with pytest.raises(MemDecayError, match="heads keep their own tokens, so it must be None"):
        MemDecayCache(make("llama"), budget=64, policy="memdecay-heads", **SMALL)
    with pytest.raises(ModelError, match=r"Layer 0 .* sliding window of 24"):
        MemDecayCache(make("mistral_sliding"), budget=64, **SMALL)


def test_batches_and_padding_are_refused():
    model = make("llama")
    with pytest.raises(MemDecayError, match="batch of 2 sequences"):
        model(input_ids=tokens(4, rows=2), cache=graded(model))
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(MemDecayError, match="hides 1 of 4 tokens"):
        model(input_ids=tokens(4), attention_mask=mask, cache=graded(model))
    cache = graded(model)
    read(cache, model, tokens(4))
    with pytest.raises(MemDecayError, match=r"rows is \[0, 0\]"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(MemDecayError, match="no branch whose heads"):
        cache.branch_heads([])


def test_pins_that_fill_full_precision_say_so_in_one_sentence():
    model = make("llama")
    cache = graded(model)
    cache.label(["system"] * 20 + ["scratchpad"] * 20)
    read(cache, model, tokens(20))
    assert cache.full_room() == 4
    before = cache.seen
    with pytest.raises(
        BudgetError, match=r"^5 new tokens do not fit full_precision=24.*hold 20.*4"
    ):
        model(input_ids=tokens(5), cache=cache)
    assert cache.seen == before and cache.coded_tokens == 0
    read(cache, model, tokens(4))
    with pytest.raises(
        BudgetError, match=r"^1 new tokens do not fit .* newest page 4 more; run at"
    ):
        model(input_ids=tokens(1), cache=cache)
