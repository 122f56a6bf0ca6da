"""Fits: known rates come back, weights and clusters count, intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

from memdecay.calibration.curves import Curves
from memdecay.calibration.fit import _resampled, fit, half_life
from memdecay.errors import StudyError
from memdecay.regions import REGIONS

RATES = {"system": 0.004, "user": 0.01, "tool_out": 0.02, "scratchpad": 0.045}


def curves_of(means, counts=1000, *, name="t", cluster="c", bucket=4):
    """Curves of one region, `user`, with these mean masses by bucket."""
    made = Curves(name, cluster, bucket=bucket)
    means = np.asarray(means, float)
    made.total = np.zeros((len(REGIONS), len(means)))
    made.count = np.zeros((len(REGIONS), len(means)), np.int64)
    made.count[2] = counts
    made.total[2] = means * made.count[2]
    return made


def synthetic(clusters, seed, *, spread=0.0, noise=0.0, buckets=40, rates=RATES, per_cluster=1):
    """Traces of clusters whose rates and levels differ, with counts that fall with age."""
    rng = np.random.default_rng(seed)
    age = 2.5 + 4 * np.arange(buckets)
    found = []
    for cluster in range(clusters):
        shared = {name: rate * (1 + spread * rng.standard_normal()) for name, rate in rates.items()}
        level = {name: noise * rng.standard_normal() for name in rates}
        for trace in range(per_cluster):
            made = Curves(f"{cluster}-{trace}", f"c{cluster}")
            made.total = np.zeros((len(REGIONS), buckets))
            made.count = np.zeros((len(REGIONS), buckets), np.int64)
            for name, rate in shared.items():
                row = REGIONS.index(name)
                made.count[row] = rng.integers(50, 80) * (buckets - np.arange(buckets))
                jitter = noise * rng.standard_normal(buckets)
                mean = 0.01 * np.exp(level[name] - rate * age + jitter)
                made.total[row] = mean * made.count[row]
            found.append(made)
    return found


def test_a_log_linear_curve_is_fitted_exactly():
    age = 2.5 + 4 * np.arange(30)
    one = fit([curves_of(0.02 * np.exp(-0.013 * age), np.arange(1, 31))])["user"]
    assert one.decay_rate == pytest.approx(0.013, rel=1e-9)
    assert one.half_life == pytest.approx(math.log(2) / 0.013, rel=1e-9)
    assert one.intercept == pytest.approx(math.log(0.02), rel=1e-9)
    assert one.r2 == pytest.approx(1) and one.slope == -one.decay_rate
    assert (one.observations, one.buckets, one.clusters) == (465, 30, 1)


def test_single_tokens_of_a_known_rate_are_fitted_exactly():
    made = Curves("t", "c", bucket=4)
    age = np.arange(1, 81)
    made.add(np.full(80, 2), age, np.exp(-0.03 * age))
    assert fit([made])["user"].decay_rate == pytest.approx(0.03, rel=1e-5)


def test_weights_are_the_counts():
    age = 2.5 + 4 * np.arange(12)
    means = 0.01 * np.exp(-0.02 * age) * np.exp(0.3 * np.sin(age))
    counts = np.array([900, 800, 5, 300, 200, 150, 90, 4000, 40, 20, 9, 3])
    one = fit([curves_of(means, counts)])["user"]
    slope, intercept = np.polyfit(age, np.log(means), 1, w=np.sqrt(counts))
    assert one.slope == pytest.approx(slope) and one.intercept == pytest.approx(intercept)
    line = intercept + slope * age
    centre = np.average(np.log(means), weights=counts)
    left = np.sum(counts * (np.log(means) - line) ** 2)
    assert one.r2 == pytest.approx(1 - left / np.sum(counts * (np.log(means) - centre) ** 2))
    alike = fit([curves_of(means, 100)])["user"]
    assert abs(alike.slope - one.slope) > 1e-4


def test_means_are_over_all_token_steps_not_over_traces():
    age = 2.5 + 4 * np.arange(10)
    many = curves_of(np.exp(-0.05 * age), 9000, name="a")
    few = curves_of(np.exp(-0.01 * age), 1000, name="b")
    pooled = 0.9 * np.exp(-0.05 * age) + 0.1 * np.exp(-0.01 * age)
    expected = fit([curves_of(pooled, 10_000)])["user"].slope
    assert fit([many, few])["user"].slope == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_known_rates_lie_in_their_intervals(seed):
    found = fit(synthetic(24, seed, noise=0.15))
    for name, rate in RATES.items():
        one = found[name]
        assert one.low <= one.half_life <= one.high
        assert one.half_life == pytest.approx(half_life(rate), rel=0.1)
        assert one.low < 1.1 * half_life(rate) and one.high > 0.9 * half_life(rate)
        assert one.status == "measured" and one.clusters == 24
    assert not found["plan"].measured


@pytest.mark.parametrize("clusters", [8, 40])
def test_intervals_cover_the_rate_that_endless_data_would_give(clusters):
    """Near 95% in 300 studies; without widening it is 88% for eight clusters."""
    options = {"spread": 0.1, "noise": 0.2, "rates": {"tool_out": 0.02}}
    truth = fit(synthetic(5000, 99, **options), resamples=2)["tool_out"].half_life
    inside = 0
    for seed in range(300):
        one = fit(synthetic(clusters, seed, **options), seed=seed, resamples=400)["tool_out"]
        inside += one.low <= truth <= one.high
    assert 0.91 <= inside / 300 <= 0.99


def test_widening_makes_up_for_few_clusters_only():
    def width(clusters, widened):
        found = synthetic(clusters, 1, spread=0.2, rates={"user": 0.01})
        one = fit(found, widened=widened)["user"]
        return one.high - one.low

    assert 1.15 < width(8, True) / width(8, False) < 1.6
    assert 1 <= width(200, True) / width(200, False) < 1.03


def test_resampling_is_the_fit_of_resampled_clusters():
    found = synthetic(6, 3, spread=0.2, noise=0.3)
    total = np.stack([one.total for one in found])
    count = np.stack([one.count for one in found]).astype(float)
    slopes = _resampled(found[0].ages, total, count, seed=11, resamples=5)
    drawn = np.random.default_rng(11).multinomial(6, np.full(6, 1 / 6), 5)
    for row, times in enumerate(drawn):
        again = [one for one, n in zip(found, times, strict=True) for _ in range(n)]
        fits = fit(again, resamples=1)
        for name in RATES:
            assert slopes[row, REGIONS.index(name)] == pytest.approx(fits[name].slope)


def test_traces_of_a_cluster_are_drawn_together():
    age = 2.5 + 4 * np.arange(10)
    traces = [
        curves_of(np.exp(-rate * age), name=f"{n}", cluster=cluster)
        for n, (rate, cluster) in enumerate([(0.02, "x"), (0.04, "x"), (0.02, "y"), (0.04, "y")])
    ]
    together = fit(traces)["user"]
    assert together.high - together.low < 1e-9  # both clusters are alike
    apart = fit(traces, clusters=["a", "b", "c", "d"])["user"]
    assert apart.high - apart.low > 5 and apart.clusters == 4
    assert apart.half_life == pytest.approx(together.half_life)


def test_leaving_one_out_is_as_if_it_had_not_been_measured():
    found = synthetic(5, 2, spread=0.3, per_cluster=3)
    without = [one for one in found if one.cluster != "c3"]
    assert len(without) == 12
    assert fit(found, leave_out="c3") == fit(without)
    assert fit(found)["user"] != fit(without)["user"]
    with pytest.raises(StudyError, match="leave_out is 'c9', but the clusters are c0, c1, c2"):
        fit(found, leave_out="c9")
    with pytest.raises(StudyError, match="nothing is left to fit"):
        fit(found[:3], leave_out="c0")


def test_the_seed_decides_the_interval_and_nothing_else():
    found = synthetic(8, 1, spread=0.3)
    one, same, other = (fit(found, seed=seed)["user"] for seed in (1, 1, 2))
    assert one == same
    assert (one.low, one.high) != (other.low, other.high)
    assert one.half_life == other.half_life


def test_attention_that_rises_does_not_decay():
    age = 2.5 + 4 * np.arange(10)
    one = fit([curves_of(np.exp(0.01 * age), cluster=c, name=c) for c in "ab"])["user"]
    assert one.decay_rate == 0 and one.half_life == math.inf and one.measured
    assert one.low == one.high == math.inf and one.slope == pytest.approx(0.01)
    assert one.status == "the attention to user does not fall with age, so it does not decay"
    assert one.to_dict()["half_life"] == "inf"


def test_an_interval_may_be_open():
    age = 2.5 + 4 * np.arange(10)
    rates = (0.02, 0.022, -0.002)
    one = fit([curves_of(np.exp(-r * age), name=str(r), cluster=str(r)) for r in rates])["user"]
    assert 0 < one.low < one.half_life < one.high == math.inf


def test_too_little_data_is_said_in_words():
    found = fit([curves_of([0.1, 0.05], 30)])
    one = found["user"]
    assert not one.measured and math.isnan(one.decay_rate) and math.isnan(one.low)
    assert one.status == "user has only 60 observations in 2 age buckets, 3 are needed"
    assert found["plan"].status == "plan does not occur"
    assert one.to_dict()["r2"] is None and one.observations == 60
    assert fit([curves_of([0.1, 0.05, 0.04], 30)])["user"].measured


def test_one_cluster_has_no_interval():
    one = fit([curves_of([0.4, 0.2, 0.1], name=n) for n in "ab"])["user"]
    assert one.measured and math.isnan(one.low) and math.isnan(one.high)
    assert one.status == "user occurs in one cluster only, so it has no interval"


def test_buckets_without_attention_are_passed_over():
    age = 2.5 + 4 * np.arange(8)
    means = np.exp(-0.02 * age)
    means[5] = 0  # out of a sliding window
    one = fit([curves_of(means)])["user"]
    assert one.decay_rate == pytest.approx(0.02) and one.buckets == 7


def test_clusters_are_named_one_for_each():
    with pytest.raises(StudyError, match="clusters has 1 names, but there are 2 curves"):
        fit([curves_of([1, 1, 1])] * 2, clusters=["a"])
