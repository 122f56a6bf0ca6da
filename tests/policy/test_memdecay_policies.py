"""What is particular to memdecay and memdecay-replay."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch
from torch import Tensor

from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead
from memdecay.policy import Tokens, evidence, from_config, get_policy, policy_config
from memdecay.policy.memdecay import MemDecay
from memdecay.policy.memdecay_replay import MemDecayReplay
from memdecay.policy.pages import plan_eviction
from memdecay.regions import Profile, RegionPolicy

READ_A = EvidenceHead(1, 3, READ, weight=2.0, mean=-4.0, std=1.5)
READ_B = EvidenceHead(0, 2, READ, weight=1.0, mean=-5.0, std=2.0)
READ_C = EvidenceHead(1, 0, READ, weight=1.0, mean=-3.0, std=1.0)
AGAIN_A = EvidenceHead(0, 1, REPLAY, weight=3.0, mean=-3.0, std=1.0)
AGAIN_B = EvidenceHead(1, 1, REPLAY, weight=1.0, mean=-6.0, std=2.0)
PROFILE = Profile.default().with_evidence(
    {"read": (READ_A, READ_B), "replay": (READ_C, AGAIN_A, READ_A, AGAIN_B)}
)
POLICIES = (MemDecay(), MemDecayReplay())
EITHER = pytest.mark.parametrize("policy", POLICIES, ids=lambda one: one.name)


def cache(count: int, policy: MemDecay, seed: int = 0, **changes: object) -> Tokens:
    """Kept tokens with holes in any slot order, all columns filled at random."""
    dice = torch.Generator().manual_seed(seed)
    position = torch.randperm(2 * count, generator=dice)[:count]
    tokens = Tokens(
        position=position,
        region=torch.randint(len(PROFILE.names), (count,), generator=dice),
        span=torch.zeros_like(position),
        inserted_at=torch.randint(40, (count,), generator=dice).float(),
        num_observed=torch.ones(count, dtype=torch.int32),
        now=50.0,
        seq_len=2 * count,
        state={name: torch.rand(count, generator=dice) ** 4 for name in policy.columns},
        replayed=torch.rand(count, generator=dice) > 0.4,
    )
    return dataclasses.replace(tokens, **changes)


def expected_score(policy: MemDecay, tokens: Tokens, said: Tensor | None) -> Tensor:
    """The score of equations that have tests of their own; `said` before it is shared."""
    base, rate, _ = PROFILE.tensors()
    prior = evidence.log_prior(
        base[tokens.region], rate[tokens.region], tokens.now - tokens.inserted_at
    )
    usage = evidence.passage(tokens.state["usage"], tokens.position)
    usage = evidence.standardised(evidence.log_usage(usage))
    claim, other = (usage, usage)
    if said is not None:
        claim, other = claim_of(said, tokens), usage - policy.usage_offset
    return evidence.score(claim, other, prior, policy.prior_weight)


def claim_of(value: Tensor, tokens: Tokens) -> Tensor:
    """A claim, shared with the neighbours, on the scale of all claims, carried to what precedes."""
    claim = evidence.standardised(evidence.shared(value, tokens.position))
    return evidence.carried(claim, tokens.position, 5)


@EITHER
def test_without_evidence_heads_there_is_usage_and_the_prior(policy: MemDecay) -> None:
    tokens = cache(40, policy)
    for bare in (Profile.default(), PROFILE.with_evidence({})):
        assert policy.heads(bare) == []
        assert policy.observe_heads(tokens, torch.zeros(0, 40), bare) == {}
        assert policy.on_replay(tokens, torch.rand(2, 4, 40), bare) == {}
        assert torch.equal(policy.score(tokens, bare), expected_score(policy, tokens, None))
        # What is in the columns of heads that are not there says nothing.
        state = {**tokens.state, "peak_0": torch.ones(40)}
        other = dataclasses.replace(tokens, state=state)
        assert torch.equal(policy.score(other, bare), policy.score(tokens, bare))


def test_the_set_of_the_other_policy_is_not_its_own() -> None:
    only_read = PROFILE.with_evidence({"read": (READ_A,)})
    only_replay = PROFILE.with_evidence({"replay": (READ_C, AGAIN_A)})
    assert MemDecay().evidence_heads(only_read) == (READ_A,)
    assert MemDecay().evidence_heads(only_replay) == ()
    assert MemDecayReplay().evidence_heads(only_read) == ()
    assert MemDecayReplay().evidence_heads(only_replay) == (READ_C, AGAIN_A)


@EITHER
def test_the_parameters_weigh(policy: MemDecay) -> None:
    tokens = cache(40, policy)
    heavy = dataclasses.replace(policy, prior_weight=5.0)
    assert heavy.score(tokens, PROFILE).argsort().tolist() != (
        policy.score(tokens, PROFILE).argsort().tolist()
    )
    used = dataclasses.replace(policy, usage_offset=0.0, prior_weight=0.0)
    deaf = dataclasses.replace(policy, usage_offset=1000.0, prior_weight=0.0)
    said = claim_of(policy.said(tokens, PROFILE), tokens)
    assert torch.equal(deaf.score(tokens, PROFILE), said)
    assert (used.score(tokens, PROFILE) >= said).all()
    assert (used.score(tokens, PROFILE) > said).any()


def test_the_heads_of_reading_and_their_columns() -> None:
    """What is watched is in the order of the set, and each head has the column of its place."""
    policy = MemDecay()
    assert list(policy.heads(PROFILE)) == [(1, 3), (0, 2)]
    tokens = cache(10, policy)
    now = torch.rand(2, 10)
    changed = policy.observe_heads(tokens, now, PROFILE)
    assert set(changed) == {"peak_0", "peak_1"}
    for number in range(2):
        before = tokens.state[f"peak_{number}"]
        assert torch.equal(changed[f"peak_{number}"], torch.maximum(before, now[number]))
    assert policy.on_replay(tokens, torch.rand(2, 4, 10), PROFILE) == {}


def test_heads_of_reading_and_of_replay_share_the_columns_by_their_place() -> None:
    policy = MemDecayReplay()
    assert list(policy.heads(PROFILE)) == [(1, 0), (1, 3)]
    tokens = cache(10, policy)
    now = torch.rand(2, 10)
    watched = policy.observe_heads(tokens, now, PROFILE)
    assert set(watched) == {"peak_0", "peak_2"}
    for number, place in enumerate((0, 2)):
        before = tokens.state[f"peak_{place}"]
        assert torch.equal(watched[f"peak_{place}"], torch.maximum(before, now[number]))
    attention = torch.rand(2, 4, 10)
    repeated = policy.on_replay(tokens, attention, PROFILE)
    assert set(repeated) == {"peak_1", "peak_3"}
    for place, head in ((1, (0, 1)), (3, (1, 1))):
        before = tokens.state[f"peak_{place}"]
        assert torch.equal(repeated[f"peak_{place}"], torch.maximum(before, attention[head]))


@EITHER
def test_a_head_that_is_not_given_is_noticed(policy: MemDecay) -> None:
    with pytest.raises(ValueError):
        policy.observe_heads(cache(10, policy), torch.rand(1, 10), PROFILE)


def test_usage_is_all_attention_so_far() -> None:
    for policy in POLICIES:
        tokens = cache(10, policy)
        mass = torch.rand(10)
        changed = policy.observe(tokens, mass, PROFILE)
        assert set(changed) == {"usage"}
        assert torch.equal(changed["usage"], tokens.state["usage"] + mass)


def test_the_score_of_reading_is_that_of_the_equations() -> None:
    policy = MemDecay()
    tokens = cache(40, policy)
    peaks = [tokens.state["peak_0"], tokens.state["peak_1"]]
    said = evidence.evidence(peaks, (READ_A, READ_B))
    assert torch.equal(policy.score(tokens, PROFILE), expected_score(policy, tokens, said))
    assert not torch.equal(policy.score(tokens, PROFILE), expected_score(policy, tokens, None))


@pytest.mark.parametrize("own", [True, False], ids=["own", "those for reading"])
def test_what_was_not_repeated_is_judged_by_the_heads_of_reading(own: bool) -> None:
    """By the weights of the set for reading, if all of its heads are watched."""
    policy = MemDecayReplay()
    heads = (READ_C, AGAIN_A, READ_A, AGAIN_B)
    alone = (READ_A, READ_B) if own else (dataclasses.replace(READ_A, weight=-0.5), READ_C)
    profile = PROFILE.with_evidence({"read": alone, "replay": heads})
    tokens = cache(40, policy)
    assert 5 < int(tokens.replayed.sum()) < 35
    peaks = [tokens.state[f"peak_{number}"] for number in range(4)]
    if own:  # READ_B is not watched
        read = evidence.evidence([peaks[0], peaks[2]], (READ_C, READ_A))
    else:
        read = evidence.evidence([peaks[2], peaks[0]], alone)
    all_of_it = evidence.evidence(peaks, heads)
    expected = torch.tensor(
        [
            float((all_of_it if again else read)[slot])
            for slot, again in enumerate(tokens.replayed.tolist())
        ]
    )
    assert torch.equal(policy.said(tokens, profile), expected)
    assert torch.equal(policy.score(tokens, profile), expected_score(policy, tokens, expected))
    for replayed, said in ((torch.zeros(40) > 0, read), (torch.zeros(40) == 0, all_of_it)):
        case = dataclasses.replace(tokens, replayed=replayed)
        assert torch.equal(policy.said(case, profile), said)


def test_a_set_of_replay_alone_says_nothing_for_what_was_not_repeated() -> None:
    """Its columns are still 0 for all of them, so that they are alike and usage speaks."""
    policy = MemDecayReplay(prior_weight=0.0)
    profile = PROFILE.with_evidence({"replay": (AGAIN_A,)})
    tokens = cache(40, policy)
    fresh = dataclasses.replace(
        tokens,
        replayed=torch.zeros(40) > 0,
        state={**tokens.state, "peak_0": torch.zeros(40)},
    )
    usage = evidence.passage(fresh.state["usage"], fresh.position)
    usage = evidence.standardised(evidence.log_usage(usage)) - policy.usage_offset
    assert torch.equal(policy.score(fresh, profile), usage.clamp(min=0))


@EITHER
def test_more_heads_than_it_has_columns_for_are_cut(policy: MemDecay) -> None:
    most = {"memdecay": 12, "memdecay-replay": 20}[policy.name]
    many = tuple(
        EvidenceHead(number // 4, number % 4, READ, weight=1.0, mean=-4.0, std=1.0)
        for number in range(most + 3)
    )
    profile = Profile.default().with_evidence({"read": many, "replay": many})
    assert policy.evidence_heads(profile) == many[:most]
    assert list(policy.heads(profile)) == [(one.layer, one.head) for one in many[:most]]
    changed = policy.observe_heads(cache(9, policy), torch.rand(most, 9), profile)
    assert set(changed) == {f"peak_{number}" for number in range(most)}
    assert set(changed) | {"usage"} == set(policy.columns)
    first = Profile.default().with_evidence({"read": many[:most], "replay": many[:most]})
    tokens = cache(9, policy)
    assert torch.equal(policy.score(tokens, profile), policy.score(tokens, first))


@EITHER
def test_a_looked_at_token_outlives_what_nobody_looked_at(policy: MemDecay) -> None:
    """However old it is, and its neighbours stay with it."""
    state = {name: torch.full((60,), 1e-5) for name in policy.columns}
    for number, head in enumerate(policy.evidence_heads(PROFILE)):
        state[f"peak_{number}"] = torch.full((60,), math.exp(head.mean) - FLOOR)
        state[f"peak_{number}"][20] = 0.9
    order = torch.arange(60)
    tokens = cache(60, policy, position=order, seq_len=60, state=state, now=5000.0)
    tokens = dataclasses.replace(
        tokens,
        inserted_at=order.float(),
        region=torch.full((60,), PROFILE.id("tool_out")),
        replayed=order >= 0,
    )
    calm = dataclasses.replace(policy, prior_weight=0.0)
    score = calm.score(tokens, PROFILE)
    assert set(score.topk(3).indices.tolist()) == {19, 20, 21}
    assert set(score.topk(8).indices.tolist()) == set(range(15, 23))


@EITHER
def test_sinks_and_the_newest_are_protected(policy: MemDecay) -> None:
    made = dataclasses.replace(policy, sinks=3, recent=5, calls_share=0.0)
    tokens = cache(40, made)
    expected = [place < 3 or place >= tokens.seq_len - 5 for place in tokens.position.tolist()]
    assert made.protected(tokens, PROFILE).tolist() == expected
    none = dataclasses.replace(policy, sinks=0, recent=0, recent_share=0.0, calls_share=0.0)
    assert not none.protected(tokens, PROFILE).any()


@EITHER
@pytest.mark.parametrize("room", [0, 20, 40, 97])
def test_a_share_of_what_pins_leave_is_for_the_newest(policy: MemDecay, room: int) -> None:
    made = dataclasses.replace(policy, sinks=0, recent=3, recent_share=0.25, calls_share=0.0)
    tokens = dataclasses.replace(cache(100, made), room=room)
    newest = max(3, int(0.25 * room))
    expected = [place >= tokens.seq_len - newest for place in tokens.position.tolist()]
    assert made.protected(tokens, PROFILE).tolist() == expected


@EITHER
@pytest.mark.parametrize("room", [0, 7, 24, 97])
def test_a_share_is_for_the_calls_that_are_used_most(policy: MemDecay, room: int) -> None:
    made = dataclasses.replace(policy, sinks=0, recent=0, recent_share=0.0, calls_share=0.25)
    tokens = dataclasses.replace(cache(100, made), room=room)
    call = PROFILE.id("tool_in")
    used = tokens.state["usage"].tolist()
    calls = [one for one in range(100) if tokens.region[one] == call]
    most = sorted(calls, key=lambda one: -used[one])[: int(0.25 * room)]
    assert 0 < len(calls) < 24
    assert made.protected(tokens, PROFILE).nonzero().flatten().tolist() == sorted(most)
    # A page stays for one token, so there are fewer where pages are larger.
    paged = made.protected(dataclasses.replace(tokens, page_size=4), PROFILE)
    assert paged.nonzero().flatten().tolist() == sorted(most[: int(0.25 * room) // 4])


@EITHER
def test_pinned_calls_take_nothing_of_the_share(policy: MemDecay) -> None:
    made = dataclasses.replace(policy, sinks=0, recent=0, recent_share=0.0, calls_share=0.1)
    call = PROFILE.id("tool_in")
    tokens = cache(100, made, region=torch.full((100,), call), pinned=torch.arange(100) < 60)
    used = tokens.state["usage"].tolist()
    most = sorted(range(60, 100), key=lambda one: -used[one])[:10]
    assert made.protected(tokens, PROFILE).nonzero().flatten().tolist() == sorted(most)
    pinned = PROFILE.with_region("tool_in", RegionPolicy(0.4, 0.01, pinned=True))
    assert not made.protected(tokens, pinned).any()


@pytest.mark.parametrize("by_span", [False, True], ids=["unpinned", "pinned by span"])
def test_an_eviction_says_how_many_it_leaves_beside_pins(by_span: bool) -> None:
    """The newest that stay are a share of what is kept then, not of what is there now."""
    policy = MemDecay(sinks=0, recent=0, recent_share=0.5, prior_weight=0.0)
    order, pins = torch.arange(100), 20 if by_span else 0
    looked_at = {name: (order < 40) * 0.9 for name in policy.columns}
    tokens = cache(100, policy, position=order, seq_len=100, state=looked_at)
    gone = plan_eviction(
        dataclasses.replace(tokens, region=torch.full((100,), PROFILE.id("user"))),
        policy,
        PROFILE,
        page_index=order,
        num_pages=100,
        pinned=order < pins,
        excess=60,
        open_page=None,
    )
    newest = (40 - pins) // 2
    assert not gone[:pins].any() and not gone[100 - newest :].any()
    assert int(gone[pins:40].sum()) == 40 - pins - newest and gone[40 : 100 - newest].all()


@EITHER
@pytest.mark.parametrize("profile", [PROFILE, Profile.default()], ids=["heads", "none"])
def test_the_order_of_the_slots_means_nothing(policy: MemDecay, profile: Profile) -> None:
    tokens = cache(80, policy)
    for seed in range(5):
        order = torch.randperm(80, generator=torch.Generator().manual_seed(seed))
        columns = {
            name: getattr(tokens, name)[order]
            for name in ("position", "region", "span", "inserted_at", "num_observed", "replayed")
        }
        state = {name: column[order] for name, column in tokens.state.items()}
        moved = dataclasses.replace(tokens, **columns, state=state)
        assert torch.equal(policy.score(moved, profile), policy.score(tokens, profile)[order])


@EITHER
def test_a_config_is_all_of_it(policy: MemDecay) -> None:
    dice = random.Random(3)
    for _ in range(5):
        made = get_policy(
            policy.name,
            usage_offset=dice.random(),
            lead=dice.randrange(9),
            prior_weight=dice.random(),
            sinks=dice.randrange(9),
            recent=dice.randrange(99),
            calls_share=dice.random(),
        )
        config = json.loads(json.dumps(policy_config(made)))
        assert set(config) == {
            "name",
            "usage_offset",
            "lead",
            "prior_weight",
            "sinks",
            "recent",
            "recent_share",
            "calls_share",
        }
        assert from_config(config) == made and type(from_config(config)) is type(policy)


def test_what_they_ask_for() -> None:
    assert MemDecay.needs == {"attention", "heads", "labels"}
    assert MemDecayReplay.needs == MemDecay.needs | {"replay"}
    assert MemDecay.page_size == MemDecayReplay.page_size == 1
