"""What is particular to each policy."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memdecay.policy import Policy, Tokens, get_policy
from memdecay.policy.memdecay_paper import MemDecayPaper
from memdecay.policy.retention import Scaled
from memdecay.policy.testing import sample
from memdecay.regions import Profile, RegionPolicy

PROFILE = Profile.default()
SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=60)


def cache(positions: list[int], policy: Policy, **changes: object) -> Tokens:
    position = torch.tensor(positions)
    tokens = Tokens(
        position=position,
        region=torch.full_like(position, PROFILE.id("user")),
        span=torch.zeros_like(position),
        inserted_at=torch.zeros(len(positions)),
        num_observed=torch.zeros(len(positions), dtype=torch.int32),
        now=0.0,
        seq_len=max(positions) + 1,
        state={name: torch.full((len(positions),), v) for name, v in policy.columns.items()},
    )
    return dataclasses.replace(tokens, **changes)


def observed(tokens: Tokens, policy: Policy, mass: list[float]) -> Tokens:
    columns = policy.observe(tokens, torch.tensor(mass), PROFILE)
    return dataclasses.replace(
        tokens,
        state={**tokens.state, **columns},
        num_observed=tokens.num_observed + 1,
    )


# memdecay-paper


def test_memdecay_paper_defaults_are_the_papers() -> None:
    assert MemDecayPaper() == MemDecayPaper(
        smoothing=0.9, attention_weight=0.5, refresh_threshold=Scaled(2.0), init="first"
    )


def test_a_refresh_resets_the_clock_and_nothing_else() -> None:
    """Figure 2: a short-lived region attended at age 40 starts again from its full prior."""
    policy = MemDecayPaper(attention_weight=0.0, refresh_threshold=0.01)
    tokens = cache([0, 1], policy, region=torch.full((2,), PROFILE.id("tool_out")), now=40.0)
    tokens = observed(tokens, policy, [0.02, 0.005])
    assert policy.score(tokens, PROFILE).tolist() == pytest.approx([0.5, 0.5 * 2 ** (-40 / 30)])
    later = dataclasses.replace(tokens, now=70.0)
    assert policy.score(later, PROFILE)[0].item() == pytest.approx(0.25)


def test_first_and_zero_initialisation() -> None:
    for init, first, second in (("first", 0.4, 0.38), ("zero", 0.04, 0.056)):
        policy = MemDecayPaper(init=init)
        tokens = observed(cache([0], policy), policy, [0.4])
        assert tokens.state["importance"].item() == pytest.approx(first)
        tokens = observed(tokens, policy, [0.2])
        assert tokens.state["importance"].item() == pytest.approx(second)


def test_a_new_token_starts_its_clock_at_insertion() -> None:
    policy = MemDecayPaper()
    tokens = cache([0, 1], policy, inserted_at=torch.tensor([3.0, 9.0]), now=9.0)
    assert policy.on_insert(tokens)["refreshed_at"].tolist() == [3.0, 9.0]


def test_the_scaled_threshold_follows_the_kept_tokens() -> None:
    policy = MemDecayPaper(refresh_threshold=Scaled(2.0))
    for size, refreshed in ((8, False), (32, True)):  # 2/8 and 2/32 around a mass of 0.1
        tokens = observed(cache(list(range(size)), policy, now=5.0), policy, [0.1] * size)
        assert (tokens.state["refreshed_at"] == 5.0).all().item() is refreshed


def test_a_user_region_and_a_region_that_never_decays() -> None:
    profile = PROFILE.with_region("notes", RegionPolicy(0.9, 0.0))
    policy = MemDecayPaper(attention_weight=0.0)
    tokens = cache([0], policy, region=torch.tensor([profile.id("notes")]), now=1e6)
    assert policy.score(tokens, profile).item() == pytest.approx(0.9)


def test_a_long_time_does_not_make_the_score_anything_but_finite() -> None:
    policy = MemDecayPaper()
    tokens = cache([0, 1], policy, now=1e9)
    assert policy.score(tokens, PROFILE).tolist() == [0.0, 0.0]


# the baselines


def test_streaming_is_sinks_and_recency_also_beyond_what_float32_counts() -> None:
    policy = get_policy("streaming")
    far = 2**30
    tokens = cache([far + 2, 0, far, far + 1, 4, 3], policy)
    order = policy.score(tokens, PROFILE).argsort(descending=True).tolist()
    assert order[:3] == [0, 3, 2]
    assert policy.protected(tokens, PROFILE).tolist() == [False, True, False, False, False, True]


def test_random_is_uniform_and_differs_by_seed_and_not_by_slot() -> None:
    positions = list(range(20_000))
    scores = [
        get_policy("random", seed=seed).score(cache(positions, get_policy("random")), PROFILE)
        for seed in (0, 1)
    ]
    for score in scores:
        histogram = torch.histc(score, bins=20, min=0, max=1) / len(positions)
        assert histogram.min() > 0.044 and histogram.max() < 0.056  # four sigma of 0.05
        assert score.min() >= 0 and score.max() < 1
    assert abs(torch.corrcoef(torch.stack(scores))[0, 1]) < 0.03
    for lag in (1, 4, 16):
        pair = torch.stack([scores[0][lag:], scores[0][:-lag]])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.03
    backwards = get_policy("random").score(cache(positions[::-1], get_policy("random")), PROFILE)
    assert torch.equal(backwards.flip(0), scores[0])


def test_random_protects_four_sinks_and_the_sixteen_newest() -> None:
    policy = get_policy("random")
    protected = policy.protected(cache(list(range(100)), policy), PROFILE)
    assert torch.nonzero(protected).flatten().tolist() == [*range(4), *range(84, 100)]


def test_h2o_accumulates_and_protects_the_newest() -> None:
    policy = get_policy("h2o", recent=1)
    tokens = cache([0, 2, 1], policy)
    for mass in ([0.5, 0.2, 0.3], [0.1, 0.8, 0.1]):
        tokens = observed(tokens, policy, mass)
    assert policy.score(tokens, PROFILE).tolist() == pytest.approx([0.6, 1.0, 0.4])
    assert policy.protected(tokens, PROFILE).tolist() == [False, True, False]


def test_tova_forgets_the_past_and_spares_what_nobody_has_seen() -> None:
    policy = get_policy("tova")
    tokens = cache([0, 1], policy)
    tokens = observed(observed(tokens, policy, [0.9, 0.1]), policy, [0.2, 0.8])
    assert policy.score(tokens, PROFILE).tolist() == pytest.approx([0.2, 0.8])
    tokens = dataclasses.replace(tokens, num_observed=torch.tensor([2, 0], dtype=torch.int32))
    assert policy.protected(tokens, PROFILE).tolist() == [False, True]


@SEEDED
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True),
    st.sampled_from([1, 3, 7]),
    st.sampled_from(["max", "avg"]),
    st.integers(0, 1000),
)
def test_snapkv_pools_over_true_positions(
    positions: list[int], kernel_size: int, pooling: str, seed: int
) -> None:
    """Slots are in any order and neighbours may be gone; the literal loop knows only positions."""
    dice = random.Random(seed)
    dice.shuffle(positions)
    mass = {p: dice.randrange(64) / 64 for p in positions}
    policy = get_policy("snapkv", kernel_size=kernel_size, pooling=pooling)
    tokens = observed(cache(positions, policy), policy, [mass[p] for p in positions])
    literal = []
    for here in positions:
        near = [mass[p] for p in positions if abs(p - here) <= kernel_size // 2]
        literal.append(max(near) if pooling == "max" else sum(near) / len(near))
    assert policy.score(tokens, PROFILE).tolist() == pytest.approx(literal)


def test_snapkv_slides_its_window() -> None:
    """A prefill of at least a window replaces what was seen; one decoded token 1/window of it."""
    policy = get_policy("snapkv", window=4, kernel_size=1)
    tokens = cache([0, 1, 2, 3, 4], policy, num_observed=torch.tensor([1, 0, 0, 0, 0]).int())
    tokens = dataclasses.replace(tokens, state={"window_mass": torch.tensor([1.0, 0, 0, 0, 0])})
    prefill = observed(tokens, policy, [0.2, 0.2, 0.2, 0.2, 0.2])
    assert prefill.state["window_mass"].tolist() == pytest.approx([0.2] * 5)
    one = dataclasses.replace(tokens, num_observed=torch.tensor([1, 1, 1, 1, 0]).int())
    decode = observed(one, policy, [0.2, 0.2, 0.2, 0.2, 0.2])
    assert decode.state["window_mass"].tolist() == pytest.approx([0.8, 0.05, 0.05, 0.05, 0.2])
    again = dataclasses.replace(tokens, num_observed=torch.ones(5).int())  # no new token
    again = observed(again, policy, [0.2, 0.2, 0.2, 0.2, 0.2])
    assert again.state["window_mass"].tolist() == pytest.approx([0.8, 0.05, 0.05, 0.05, 0.05])


def test_observation_masking_drops_old_outputs_then_the_oldest() -> None:
    tool_out, user = PROFILE.id("tool_out"), PROFILE.id("user")
    policy = get_policy("observation_masking", keep_newest=1)
    tokens = cache(
        [0, 1, 2, 3, 4, 5],
        policy,
        region=torch.tensor([user, tool_out, user, tool_out, tool_out, user]),
        span=torch.tensor([0, 1, 2, 3, 5, 6]),
    )
    order = policy.score(tokens, PROFILE).argsort().tolist()
    assert order == [1, 3, 0, 2, 4, 5]
    keeps_all = get_policy("observation_masking", keep_newest=9)
    assert keeps_all.score(tokens, PROFILE).argsort().tolist() == [0, 1, 2, 3, 4, 5]
    keeps_none = get_policy("observation_masking", keep_newest=0)
    assert keeps_none.score(tokens, PROFILE).argsort().tolist() == [1, 3, 4, 0, 2, 5]


def test_observation_masking_counts_an_output_by_span_not_by_token() -> None:
    policy = get_policy("observation_masking", keep_newest=2)
    tokens = cache(
        list(range(9)),
        policy,
        region=torch.full((9,), PROFILE.id("tool_out")),
        span=torch.tensor([1, 1, 1, 4, 4, 4, 7, 7, 7]),
    )
    assert (policy.score(tokens, PROFILE) < 0).tolist() == [True] * 3 + [False] * 6


def test_full_says_that_it_never_evicts() -> None:
    policy = get_policy("full")
    assert not policy.bounded and not sample(policy).plan(policy, 0).any()
