"""Heads that foretell are found among those that do not, by areas that loops confirm."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memdecay.calibration.evidence import (
    COUNTS,
    RIDGE,
    Watched,
    around,
    auc,
    choose,
    held_out,
    measured,
    pursue,
    smooth,
    told,
)
from memdecay.errors import StudyError
from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead, check_evidence
from memdecay.policy.evidence import REACH, evidence, shared

SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=60)
LAYERS, HEADS = 3, 4


class TestSmooth:
    @SEEDED
    @given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 999))
    def test_it_is_the_mean_of_the_neighbours(self, count: int, reach: int, seed: int) -> None:
        values = torch.rand(2, 3, count, generator=torch.Generator().manual_seed(seed)) - 0.5
        found = smooth(values, reach)
        assert found.shape == values.shape
        for row, said in zip(values.flatten(0, 1).tolist(), found.flatten(0, 1), strict=True):
            expected = []
            for place in range(count):
                near = row[max(0, place - reach) : place + reach + 1]
                expected.append(sum(near) / len(near))
            assert said.tolist() == pytest.approx(expected, abs=1e-6)

    def test_it_is_what_the_policy_shares_where_nothing_is_evicted(self) -> None:
        values = torch.rand(1, 40)
        assert torch.allclose(smooth(values)[0], shared(values[0], torch.arange(40)), atol=1e-6)
        assert torch.equal(smooth(values), smooth(values, REACH))


class TestAUC:
    @SEEDED
    @given(st.integers(2, 40), st.integers(0, 9999))
    def test_it_is_the_share_of_pairs_that_are_in_order(self, count: int, seed: int) -> None:
        dice = random.Random(seed)
        rows = [dice.sample(range(1000), count) for _ in range(3)]
        needed = [dice.random() < 0.4 for _ in range(count)]
        needed[0], needed[-1] = True, False
        found = auc(torch.tensor(rows).float(), torch.tensor(needed))
        for row, said in zip(rows, found.tolist(), strict=True):
            wanted = [value for value, one in zip(row, needed, strict=True) if one]
            others = [value for value, one in zip(row, needed, strict=True) if not one]
            won = sum(one > other for one in wanted for other in others)
            assert said == pytest.approx(won / (len(wanted) * len(others)))

    def test_all_none_and_half(self) -> None:
        needed = torch.tensor([False, True, False, True])
        assert float(auc(torch.tensor([0.1, 0.8, 0.2, 0.9]), needed)) == 1.0
        assert float(auc(torch.tensor([0.8, 0.1, 0.9, 0.2]), needed)) == 0.0
        assert float(auc(torch.tensor([0.3, 0.2, 0.1, 0.4]), needed)) == 0.75

    @SEEDED
    @given(st.integers(2, 60), st.integers(0, 9999))
    def test_a_tie_is_won_by_the_later_token(self, count: int, seed: int) -> None:
        dice = random.Random(seed)
        row = [dice.randrange(3) for _ in range(count)]
        needed = [dice.random() < 0.5 for _ in range(count)]
        needed[0], needed[-1] = True, False
        won = [
            (row[one], one) > (row[other], other)
            for one in range(count)
            for other in range(count)
            if needed[one] and not needed[other]
        ]
        found = auc(torch.tensor(row).float(), torch.tensor(needed))
        assert float(found) == pytest.approx(sum(won) / len(won))


def episode(
    seed: int, tells: dict[tuple[int, int, int], float], n: int = 160, quiet: float = -6.0
) -> Watched:
    """Facts of five tokens; some (time, layer, head) looked at them, all others at random."""
    dice = torch.Generator().manual_seed(seed)
    logs = quiet + torch.randn(2, LAYERS, HEADS, n, generator=dice)
    needed = torch.zeros(n, dtype=torch.bool)
    for start in (20, 60, 61, 110):
        needed[start : start + 5] = True
    for place, strength in tells.items():
        logs[place][needed] += strength
    counted = torch.ones(n, dtype=torch.bool)
    counted[:4] = counted[-24:] = False
    # What is not counted is loud everywhere, and would show if it were.
    logs[..., ~counted] = -1.0
    return Watched(f"s{seed}", logs.exp().clamp(max=1).half(), needed, counted)


READS = {(0, 0, 1): 2.5, (0, 2, 3): 1.8, (0, 1, 0): 1.4}
BOTH = {(0, 0, 1): 1.6, (1, 2, 0): 2.5, (1, 0, 1): 1.6}


def places(heads: tuple[EvidenceHead, ...]) -> set[tuple[int, int, int]]:
    return {((READ, REPLAY).index(one.when), one.layer, one.head) for one in heads}


class TestChoose:
    @pytest.mark.parametrize(("use", "tells"), [("read", READS), ("replay", BOTH)])
    def test_the_heads_that_tell_are_found(
        self, use: str, tells: dict[tuple[int, int, int], float]
    ) -> None:
        heads, reached = choose([episode(seed, tells) for seed in range(6)], use)
        assert set(tells) <= places(heads)
        weights = {place: one.weight for one in heads for place in tells if place in places((one,))}
        assert sum(abs(one.weight) for one in heads) == pytest.approx(1, abs=1e-3)
        others = [abs(one.weight) for one in heads if not places((one,)) <= set(tells)]
        assert min(weights.values()) > 0
        assert statistics.fmean(weights.values()) > 3 * statistics.fmean(others)
        assert 0.9 < reached <= 1.0

    def test_a_head_that_looks_at_what_is_not_needed_counts_against(self) -> None:
        """Alone it tells little; with a head that looks at both it tells them apart."""
        made = []
        for seed in range(6):
            one = episode(seed, {})
            decoy = torch.zeros(160, dtype=torch.bool)
            for start in (30, 80, 120):
                decoy[start : start + 6] = True
            peaks = one.peaks.clone()
            peaks[0, 0, 0, one.needed | decoy] *= 40
            peaks[0, 2, 1, decoy] *= 40
            made.append(Watched(one.cluster, peaks.clamp(max=1), one.needed, one.counted))
        heads, reached = choose(made, "read")
        weight = {(one.layer, one.head): one.weight for one in heads}
        assert weight[0, 0] > 0.2 and weight[2, 1] < -0.1 and reached > 0.95
        positive = [one for one in heads if one.weight > 0]
        assert sum(told(one, positive) for one in made) / 6 < reached - 0.02

    def test_as_many_heads_for_replay_begin_with_some_for_reading(self) -> None:
        made = [episode(seed, BOTH) for seed in range(6)]
        read, replay = choose(made, "read")[0], choose(made, "replay")[0]
        assert {one.when for one in replay[: len(read)]} == {READ}
        assert {one.when for one in replay[len(read) :]} == {REPLAY}

    def test_heads_that_say_nothing_are_refused(self) -> None:
        one = episode(0, READS)
        still = Watched("mill", torch.ones_like(one.peaks), one.needed, one.counted)
        with pytest.raises(StudyError, match="No head gave one token more than another"):
            choose([still], "read")

    def test_a_set_for_reading_sees_no_replay(self) -> None:
        loud = {**READS, (1, 1, 1): 4.0}
        heads, _ = choose([episode(seed, loud) for seed in range(4)], "read")
        assert {one.when for one in heads} == {READ}
        heads, _ = choose([episode(seed, loud) for seed in range(4)], "replay")
        assert (1, 1, 1) in places(heads)
        assert list(check_evidence({"replay": heads})) == ["replay"]

    def test_where_no_head_tells_the_sum_reaches_little(self) -> None:
        _, reached = choose([episode(seed, {}) for seed in range(12)], "read")
        told, clear = choose([episode(seed, READS) for seed in range(12)], "read")
        assert reached < 0.7 < 0.9 < clear and told

    def test_means_and_deviations_are_those_of_what_is_counted(self) -> None:
        episodes = [episode(seed, READS, quiet=-5.0 - seed / 4) for seed in range(3)]
        heads, _ = choose(episodes, "read")
        for one in heads:
            means, stds = [], []
            for watched in episodes:
                peaks = watched.peaks[0, one.layer, one.head].float()
                logs = [math.log(peak + FLOOR) for peak in peaks[watched.counted].tolist()]
                means.append(statistics.fmean(logs))
                stds.append(statistics.stdev(logs))
            assert one.mean == pytest.approx(statistics.fmean(means), abs=1e-3)
            assert one.std == pytest.approx(statistics.fmean(stds), abs=1e-3)

    def test_what_is_reached_is_the_auc_of_the_evidence_of_a_policy(self) -> None:
        """With one episode its means are the profile's, so the policy says the same."""
        watched = episode(1, READS)
        heads, reached = choose([watched], "read")
        peaks = [watched.peaks[0, one.layer, one.head].float() for one in heads]
        said = shared(evidence(peaks, heads), torch.arange(len(watched.needed)))
        counted = watched.counted
        assert float(auc(said[counted], watched.needed[counted])) == pytest.approx(
            reached, abs=0.005
        )

    def test_heads_that_tell_different_things_are_all_taken(self) -> None:
        made = []
        for seed in range(6):
            one = episode(seed, {})
            peaks = one.peaks.clone()
            peaks[0, 0, 0, 20:25] *= 20
            peaks[0, 1, 1, 60:66] *= 20
            peaks[0, 2, 2, 110:115] *= 20
            made.append(Watched(one.cluster, peaks.clamp(max=1), one.needed, one.counted))
        heads, _ = choose(made, "read")
        assert {(0, 0, 0), (0, 1, 1), (0, 2, 2)} <= places(heads)

    def test_the_same_again_and_in_any_company(self) -> None:
        def fresh() -> list[Watched]:
            return [episode(seed, BOTH) for seed in range(4)]

        for use in COUNTS:
            first, reached = choose(fresh(), use)
            torch.rand(7)
            again, other = choose(fresh(), use)
            assert first == again and reached == other
            backwards, near = choose(fresh()[::-1], use)
            assert places(backwards) >= set(BOTH) & places(first)
            assert near == pytest.approx(reached, abs=0.02)

    def test_nothing_given_is_changed(self) -> None:
        watched = episode(0, READS)
        before: list[Tensor] = [one.clone() for one in (watched.peaks, watched.needed)]
        choose([watched], "replay")
        assert torch.equal(before[0], watched.peaks) and torch.equal(before[1], watched.needed)

    def test_a_head_that_never_looks_is_no_trouble(self) -> None:
        watched = episode(0, READS)
        peaks = watched.peaks.clone()
        peaks[:, 1] = 0
        heads, reached = choose([Watched("x", peaks, watched.needed, watched.counted)], "read")
        assert all(math.isfinite(one.mean) and one.std > 0 for one in heads) and reached > 0.9


def of(cluster: str, watched: Watched) -> Watched:
    return Watched(cluster, watched.peaks, watched.needed, watched.counted)


class TestPursuit:
    """Against a search that fits every candidate by numpy."""

    @SEEDED
    @given(st.integers(2, 7), st.integers(0, 9999))
    def test_each_choice_leaves_least_unexplained(self, variables: int, seed: int) -> None:
        dice = np.random.default_rng(seed)
        values = dice.normal(size=(60, variables)) @ dice.normal(size=(variables, variables))
        wanted = values @ dice.normal(size=variables) + dice.normal(size=60)
        covariance, shared_with = values.T @ values / 60, values.T @ wanted / 60
        ridge = RIDGE * covariance.diagonal().mean()

        def fitted(chosen: list[int]) -> tuple[float, np.ndarray]:
            among = covariance[np.ix_(chosen, chosen)] + ridge * np.eye(len(chosen))
            weights = np.linalg.solve(among, shared_with[chosen])
            rest = wanted - values[:, chosen] @ weights
            return float(rest @ rest / 60 + ridge * weights @ weights), weights

        chosen: list[int] = []
        for _ in range(min(4, variables)):
            left = [one for one in range(variables) if one not in chosen]
            chosen.append(min(left, key=lambda one: fitted([*chosen, one])[0]))
        found, weights = pursue(torch.tensor(covariance), torch.tensor(shared_with), 4)
        assert found == chosen
        assert weights.numpy() == pytest.approx(fitted(chosen)[1], rel=1e-6, abs=1e-9)

    def test_it_goes_on_from_what_was_chosen_and_keeps_to_what_is_allowed(self) -> None:
        covariance = torch.eye(5, dtype=torch.float64)
        shared_with = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
        found, _ = pursue(covariance, shared_with, 4, [4, 1], [1, 2, 3])
        assert found == [4, 1, 2, 3]
        assert pursue(covariance, shared_with, 9, [], [3])[0] == [3]


class TestAround:
    @SEEDED
    @given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 4), st.integers(0, 4))
    def test_what_stands_before_and_after_is_needed_too(
        self, needed: list[bool], before: int, after: int
    ) -> None:
        expected = [
            any(needed[max(0, place - after) : place + before + 1]) for place in range(len(needed))
        ]
        assert around(torch.tensor(needed), before, after).tolist() == expected


class TestHeldOut:
    def test_what_a_policy_makes_of_an_episode(self) -> None:
        """`told` is the AUC of the policy's own evidence, by the profile's means."""
        chosen, asked = episode(1, BOTH), episode(2, BOTH)
        heads, _ = choose([chosen], "replay")
        peaks = [asked.peaks[int(h.when == REPLAY), h.layer, h.head].float() for h in heads]
        said = shared(evidence(peaks, heads), torch.arange(160)).tolist()
        pairs = [
            said[one] > said[other]
            for one in range(160)
            for other in range(160)
            if asked.counted[one] and asked.counted[other]
            if asked.needed[one] and not asked.needed[other]
        ]
        assert told(asked, heads) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)

    def test_each_cluster_is_told_by_heads_of_the_others(self) -> None:
        """Two clusters whose heads have nothing to do with each other."""
        one, other = {(0, 0, 1): 3.0}, {(0, 2, 3): 3.0}
        same = [of("ab"[seed % 2], episode(seed, one)) for seed in range(6)]
        apart = [of("ab"[seed % 2], episode(seed, (one, other)[seed % 2])) for seed in range(6)]
        within = held_out(same, "read")
        across = held_out(apart, "read")
        assert within is not None and across is not None
        assert across < 0.65 < 0.85 < within
        assert choose(apart, "read")[1] > 0.8  # on what they were chosen on they seem to be good
        first = choose([watched for watched in same if watched.cluster == "a"], "read")[0]
        second = choose([watched for watched in same if watched.cluster == "b"], "read")[0]
        each = [told(w, second if w.cluster == "a" else first) for w in same]
        assert within == pytest.approx(statistics.fmean(each))

    def test_one_cluster_leaves_nothing_out(self) -> None:
        alike = [of("a", episode(seed, READS)) for seed in range(3)]
        assert held_out(alike, "read") is None
        _, about = measured(alike)
        assert about["auc_held_out"] == dict.fromkeys(COUNTS)

    def test_all_sets_at_once(self) -> None:
        watched = [of("abc"[seed % 3], episode(seed, BOTH)) for seed in range(6)]
        heads, about = measured(watched)
        assert about["episodes"] == 6 and about["clusters"] == ["a", "b", "c"]
        for use in COUNTS:
            chosen, reached = choose(watched, use)
            assert heads[use] == chosen and about["auc"][use] == pytest.approx(reached, abs=1e-4)
            assert about["auc_held_out"][use] == pytest.approx(held_out(watched, use), abs=1e-4)


class TestUnusable:
    @pytest.mark.parametrize("needed", [False, True])
    def test_nothing_to_tell_apart_is_refused(self, needed: bool) -> None:
        good = episode(0, READS)
        bad = Watched("mill", good.peaks, torch.full((160,), needed), good.counted)
        assert good.usable and not bad.usable
        with pytest.raises(StudyError, match="An episode of 'mill' has") as caught:
            choose([good, bad], "read")
        assert "\n" not in str(caught.value)

    def test_facts_that_do_not_count_are_no_facts(self) -> None:
        good = episode(0, READS)
        needed = torch.zeros(160, dtype=torch.bool)
        needed[150:155] = True
        assert not Watched("mill", good.peaks, needed, good.counted).usable

    def test_where_all_stands_around_facts_there_is_nothing_to_tell_apart(self) -> None:
        needed = torch.arange(160) % 3 == 0
        good = episode(0, READS)
        assert not Watched("mill", good.peaks, needed, good.counted).usable

    def test_no_episode_is_refused(self) -> None:
        with pytest.raises(StudyError, match="There is no episode"):
            choose([], "read")
