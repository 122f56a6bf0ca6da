"""The equations of the evidence policies against literal loops over plain floats."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead
from memdecay.policy import evidence
from memdecay.policy.evidence import CLIP, REACH

SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=80)

shares = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)
"""Shares of attention."""
kept = st.sets(st.integers(0, 60), min_size=1, max_size=30).flatmap(
    lambda chosen: st.permutations(sorted(chosen))
)
"""Positions with holes, in any order of slots."""
seeds = st.integers(0, 2**16)
heads = st.lists(
    st.builds(
        EvidenceHead,
        layer=st.integers(0, 9),
        head=st.integers(0, 9),
        when=st.sampled_from([READ, REPLAY]),
        weight=st.floats(0.25, 8) | st.floats(-8, -0.25),
        mean=st.floats(-9, 0),
        std=st.floats(0.25, 4),
    ),
    min_size=1,
    max_size=5,
)


def drawn(count: int, seed: int) -> Tensor:
    """Some shares of attention: most of them tiny, a few large, many beyond what is clipped."""
    dice = random.Random(seed)
    return torch.tensor([dice.random() ** dice.choice([1, 4, 40]) for _ in range(count)])


def close(found: Tensor, expected: list[float]) -> bool:
    assert found.dtype == torch.float32 and found.shape == (len(expected),)
    return found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@SEEDED
@given(shares, seeds)
def test_peak_is_the_larger_one(before: list[float], seed: int) -> None:
    now = drawn(len(before), seed)
    old = torch.tensor(before)
    found = evidence.peak(old, now)
    assert found.tolist() == [
        max(one, other) for one, other in zip(old.tolist(), now.tolist(), strict=True)
    ]
    assert torch.equal(old, torch.tensor(before)) and torch.equal(now, drawn(len(before), seed))


@SEEDED
@given(heads, st.integers(1, 20), seeds)
def test_evidence_is_the_weighted_mean_of_clipped_z(
    asked: list[EvidenceHead], count: int, seed: int
) -> None:
    peaks = [drawn(count, seed + number) for number in range(len(asked))]
    expected = []
    for token in range(count):
        said, weights = 0.0, 0.0
        for one, head in zip(peaks, asked, strict=True):
            z = (math.log(float(one[token]) + FLOOR) - head.mean) / head.std
            said += head.weight * min(max(z, -CLIP), CLIP)
            weights += abs(head.weight)
        expected.append(said / weights)
    before = [one.clone() for one in peaks]
    assert close(evidence.evidence(peaks, asked), expected)
    assert all(map(torch.equal, peaks, before))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    moved = evidence.evidence([one[order] for one in peaks], asked)
    assert torch.equal(moved, evidence.evidence(peaks, asked)[order])


def test_no_head_says_more_than_three_deviations() -> None:
    loud = EvidenceHead(0, 0, READ, weight=2.0, mean=-9.0, std=0.1)
    calm = EvidenceHead(0, 1, READ, weight=1.0, mean=math.log(0.5 + FLOOR), std=1.0)
    found = evidence.evidence([torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])], [loud, calm])
    assert found.tolist() == pytest.approx([2 * CLIP / 3, -2 * CLIP / 3 * (2.1 / 3)], abs=0.01)


def test_every_peak_has_its_head() -> None:
    one = EvidenceHead(0, 0, READ, weight=1.0, mean=0.0, std=1.0)
    with pytest.raises(ValueError):
        evidence.evidence([torch.zeros(3), torch.zeros(3)], [one])


@SEEDED
@given(kept, st.integers(0, 5), seeds)
def test_neighbours_share_their_evidence(positions: list[int], reach: int, seed: int) -> None:
    value = drawn(len(positions), seed) - 0.5
    position = torch.tensor(positions)
    expected = []
    for own in positions:
        near = [
            float(value[slot]) for slot, other in enumerate(positions) if abs(other - own) <= reach
        ]
        expected.append(sum(near) / len(near))
    found = evidence.shared(value, position, reach)
    assert close(found, expected)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(evidence.shared(value[order], position[order], reach), found[order])
    assert torch.equal(value, drawn(len(positions), seed) - 0.5)
    assert position.tolist() == positions


def test_the_usual_reach_is_one_and_does_not_cross_a_hole() -> None:
    value, position = torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.tensor([10, 11, 13, 8])
    assert evidence.shared(value, position).tolist() == [4.5, 4.5, 0.0, 0.0]
    assert torch.equal(
        evidence.shared(value, position), evidence.shared(value, position, reach=REACH)
    )


@SEEDED
@given(kept, st.integers(0, 6), st.integers(0, 6), st.floats(0, 1, width=32), seeds)
def test_what_stands_around_evidence_has_a_part_in_it(
    positions: list[int], before: int, after: int, discount: float, seed: int
) -> None:
    value, position = drawn(len(positions), seed) - 0.5, torch.tensor(positions)
    expected = [
        max(
            float(value[slot]) - discount * abs(other - own)
            for slot, other in enumerate(positions)
            if own - after <= other <= own + before
        )
        for own in positions
    ]
    found = evidence.carried(value, position, before, after, discount)
    assert close(found, expected)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
    moved = evidence.carried(value[order], position[order], before, after, discount)
    assert torch.equal(moved, found[order])
    assert torch.equal(value, drawn(len(positions), seed) - 0.5)


def test_evidence_is_carried_five_positions_forward_of_it_and_one_behind() -> None:
    value = torch.full((20,), -9.0)
    value[10] = 0.0
    found = evidence.carried(value, torch.arange(20), 5).tolist()
    assert found[4:13] == pytest.approx([-9, -1, -0.8, -0.6, -0.4, -0.2, 0, -0.2, -9])


@SEEDED
@given(shares, seeds)
def test_the_prior_is_the_logarithm_of_the_papers(base: list[float], seed: int) -> None:
    dice = random.Random(seed)
    rate = torch.tensor([dice.choice([0.0, 0.01, 0.5]) for _ in base])
    age = torch.tensor([float(dice.randrange(200)) for _ in base])
    priority = torch.tensor(base)
    expected = [
        math.log(max(float(b), FLOOR)) - float(r) * float(a)
        for b, r, a in zip(priority, rate, age, strict=True)
    ]
    assert close(evidence.log_prior(priority, rate, age), expected)
    assert torch.equal(priority, torch.tensor(base))


@SEEDED
@given(st.integers(1, 30), st.floats(0, 2, width=32), seeds)
def test_a_score_is_the_better_claim_and_a_little_of_the_prior(
    count: int, prior_weight: float, seed: int
) -> None:
    said, used, prior = (6 * drawn(count, seed + n) - 3 for n in range(3))
    expected = []
    for token in range(count):
        claim = max(float(said[token]), float(used[token]))
        expected.append(claim + prior_weight * float(prior[token]))
    before = [one.clone() for one in (said, used, prior)]
    assert close(evidence.score(said, used, prior, prior_weight), expected)
    assert all(map(torch.equal, (said, used, prior), before))


@SEEDED
@given(st.integers(1, 30), seeds)
def test_standardised_is_the_z_of_what_is_kept(count: int, seed: int) -> None:
    value = drawn(count, seed)
    numbers = [float(one) for one in value]
    mean = statistics.fmean(numbers)
    std = max(statistics.pstdev(numbers), 1e-3)
    expected = [(one - mean) / std for one in numbers]
    found = evidence.standardised(value)
    logs = [math.log(one + 1e-6) for one in numbers]
    assert evidence.log_usage(value).tolist() == pytest.approx(logs, rel=1e-3, abs=2e-3)
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=2e-3)
    assert found.dtype == torch.float32 and torch.equal(value, drawn(count, seed))


@SEEDED
@given(st.integers(1, 400), seeds)
def test_the_order_of_the_slots_changes_no_bit_of_it(count: int, seed: int) -> None:
    value = drawn(count, seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(evidence.standardised(value[order]), evidence.standardised(value)[order])


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("value", [0.0, 0.001, 0.3, 1.0])
def test_where_all_are_alike_nothing_is_said(count: int, value: float) -> None:
    found = evidence.standardised(torch.full((count,), value))
    assert torch.isfinite(found).all() and found.abs().max() < 1e-3


@SEEDED
@given(kept, seeds, st.integers(1, 20))
def test_passage_is_the_sum_over_what_is_kept_of_it(
    positions: list[int], seed: int, size: int
) -> None:
    value = drawn(len(positions), seed)
    found = evidence.passage(value, torch.tensor(positions), size)
    expected = [
        sum(
            v
            for v, other in zip(value.tolist(), positions, strict=True)
            if other // size == p // size
        )
        / size
        for p in positions
    ]
    assert close(found, expected)


def test_a_passage_with_a_hole_goes_before_a_whole_one() -> None:
    position = torch.tensor([0, 1, 2, 3, 4, 5, 7])
    used = evidence.passage(torch.ones(7), position, 4)
    assert used.tolist() == [1, 1, 1, 1, 0.75, 0.75, 0.75]


@SEEDED
@given(st.randoms(use_true_random=False), st.integers(1, 30), st.integers(0, 35))
def test_the_most_used_of_some_tokens(dice: random.Random, length: int, count: int) -> None:
    usage = [dice.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(length)]
    position = dice.sample(range(99), length)
    among = [dice.random() < 0.5 for _ in range(length)]
    ranked = sorted(
        (one for one in range(length) if among[one]),
        key=lambda one: (-usage[one], position[one]),
    )
    found = evidence.most_used(
        torch.tensor(usage), torch.tensor(position), torch.tensor(among), count
    )
    assert found.tolist() == [one in ranked[:count] for one in range(length)]


def test_accumulated_adds() -> None:
    before, now = torch.tensor([0.0, 0.5]), torch.tensor([0.25, 1.0])
    assert evidence.accumulated(before, now).tolist() == [0.25, 1.5]
    assert before.tolist() == [0.0, 0.5]
