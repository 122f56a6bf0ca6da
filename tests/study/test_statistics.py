"""Intervals and comparisons against hand-made numbers, literal loops and synthetic truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from memdecay.study.statistics import collapse, compare, intervals, sign_test, summarise
from study.study_rows import SCENARIOS, attentive, condition_rows, full, lucky, newest, ours


def cell(table: pd.DataFrame, policy: str, budget: float, region: str, kind: str = "all") -> dict:
    found = table[
        (table["policy"] == policy)
        & (table["budget"] == budget)
        & (table["region"] == region)
        & (table["fact_kind"] == kind)
    ]
    assert len(found) == 1
    return found.iloc[0].to_dict()


class TestCollapse:
    def test_seeds_become_one_probe_with_their_mean(self) -> None:
        probes = collapse(condition_rows("random", lucky, seeds=(0, 1, 2)))
        assert len(probes) == 8 * 3 * 4 * 2
        assert set(probes["seeds"]) == {3}
        outside = probes[probes["region"] != "system"]
        assert outside["recall"].to_numpy() == pytest.approx(1 / 3)
        assert outside["gold_logprob"].to_numpy() == pytest.approx((-0.5 - 9 - 9) / 3)

    def test_a_condition_of_two_groups_counts_once(self) -> None:
        rows = pd.concat([condition_rows("h2o", ours), condition_rows("h2o", ours, group="policy")])
        assert len(collapse(rows)) == 8 * 3 * 4 * 2
        assert set(collapse(rows)["seeds"]) == {1}

    def test_kept_is_a_share_of_what_was_seen(self) -> None:
        probes = collapse(condition_rows("h2o", ours, kept=lambda budget: int(budget * 400) - 4))
        assert sorted(set(probes["kept_fraction"])) == pytest.approx([0.24, 0.49])


class TestSummarise:
    def test_counts_and_means_of_each_cell(self) -> None:
        table = summarise(collapse(condition_rows("memdecay-paper", ours)))
        assert len(table) == 2 * (
            6 + 4 + 4
        )  # both totals with four regions, and with the two of each kind
        half = cell(table, "memdecay-paper", 0.5, "non_system")
        assert (half["n"], half["scenarios"]) == (72, 8)
        assert half["recall"] == pytest.approx(16 / 72)
        assert half["gold_logprob"] == pytest.approx((16 * -0.5 + 56 * -9) / 72)
        assert half["kept_fraction"] == pytest.approx(0.5)
        assert cell(table, "memdecay-paper", 0.5, "all")["recall"] == pytest.approx(40 / 96)
        assert cell(table, "memdecay-paper", 0.5, "all", "natural")["recall"] == pytest.approx(
            16 / 48
        )
        assert cell(table, "memdecay-paper", 0.5, "all", "natural")["n"] == 48
        assert cell(table, "memdecay-paper", 0.25, "system")["recall"] == 1.0

    def test_scenarios_that_agree_leave_no_width(self) -> None:
        table = summarise(collapse(condition_rows("memdecay-paper", ours)))
        for region in ("system", "user", "retrieval"):
            found = cell(table, "memdecay-paper", 0.5, region)
            assert found["low"] == found["recall"] == found["high"]

    def test_one_scenario_has_no_interval(self) -> None:
        table = summarise(collapse(condition_rows("memdecay-paper", ours, scenarios=("clinic",))))
        assert table["low"].isna().all() and table["high"].isna().all()
        assert table["recall"].notna().all()

    def test_a_missing_log_probability_spoils_nothing(self) -> None:
        rows = condition_rows("memdecay-paper", ours)
        rows.loc[rows["region"] == "user", "gold_logprob"] = math.nan
        table = summarise(collapse(rows))
        assert math.isnan(cell(table, "memdecay-paper", 0.5, "user")["gold_logprob"])
        mean = cell(table, "memdecay-paper", 0.5, "non_system")["gold_logprob"]
        assert mean == pytest.approx((16 * -0.5 + 32 * -9) / 48)

    def test_the_order_of_the_rows_does_not_matter(self) -> None:
        rows = pd.concat([condition_rows("memdecay-paper", ours), condition_rows("h2o", attentive)])
        shuffled = rows.sample(frac=1.0, random_state=3)
        pd.testing.assert_frame_equal(summarise(collapse(rows)), summarise(collapse(shuffled)))


class TestIntervals:
    def test_equals_a_literal_loop_over_scenarios(self) -> None:
        sums = np.array([[3.0, 0.0, 5.0, 1.0, 2.0]])
        counts = np.array([[6.0, 3.0, 6.0, 2.0, 6.0]])
        # every draw of five clusters from five, each as likely as another
        every = [
            sums[0, list(draw)].sum() / counts[0, list(draw)].sum()
            for draw in itertools.product(range(5), repeat=5)
        ]
        low, high = intervals(sums, counts, resamples=40_000)
        assert low[0] == pytest.approx(np.quantile(every, 0.025), abs=0.01)
        assert high[0] == pytest.approx(np.quantile(every, 0.975), abs=0.01)

    def test_a_cluster_without_values_is_not_drawn(self) -> None:
        sums = np.array([[3.0, 0.0, 5.0, 1.0], [3.0, 9.0, 5.0, 1.0]])
        counts = np.array([[6.0, 0.0, 6.0, 2.0], [6.0, 9.0, 6.0, 2.0]])
        low, high = intervals(sums, counts)
        alone = intervals(sums[:1, [0, 2, 3]], counts[:1, [0, 2, 3]])
        assert (low[0], high[0]) == (alone[0][0], alone[1][0])
        assert high[1] > high[0]

    def test_rounding_leaves_no_width_where_clusters_agree(self) -> None:
        counts = np.arange(1.0, 9.0)[None]
        low, high = intervals(0.1 * counts, counts)
        assert low[0] == high[0] == (0.1 * counts).sum() / counts.sum()

    def test_many_cells_are_each_as_if_alone(self) -> None:
        rng = np.random.default_rng(5)
        sums, counts = rng.integers(0, 9, (700, 8)).astype(float), np.full((700, 8), 9.0)
        low, high = intervals(sums, counts, resamples=500)
        one = intervals(sums[611:612], counts[611:612], resamples=500)
        assert (low[611], high[611]) == (one[0][0], one[1][0])

    def test_same_seed_same_interval(self) -> None:
        sums, counts = np.array([[1.0, 4, 2, 7]]), np.full((1, 4), 9.0)
        assert intervals(sums, counts) == intervals(sums, counts)
        assert intervals(sums, counts, resamples=99) != intervals(
            sums, counts, resamples=99, seed=1
        )

    @pytest.mark.parametrize(
        ("clusters", "widened", "least", "most"),
        [
            # the binomial error of 1,500 studies is 0.6 to 0.9 points; the bands are 3 of them
            # around what the docstring says
            (8, False, 0.83, 0.91),
            (8, True, 0.905, 0.96),
            (40, False, 0.92, 0.97),
            (40, True, 0.93, 0.975),
        ],
    )
    def test_coverage_on_synthetic_clusters(
        self, clusters: int, widened: bool, least: float, most: float
    ) -> None:
        rng = np.random.default_rng(11)
        truth, within = 0.4, 0.1  # mean, correlation within a cluster
        spread = (1 - within) / within
        chance = rng.beta(truth * spread, (1 - truth) * spread, (1_500, clusters))
        sums = rng.binomial(9, chance).astype(float)
        low, high = intervals(sums, np.full_like(sums, 9), widened=widened, resamples=1_000)
        covered = ((low <= truth) & (truth <= high)).mean()
        assert least <= covered <= most


class TestCompare:
    def test_signs_deltas_and_counts(self) -> None:
        rows = pd.concat([condition_rows("memdecay-paper", ours), condition_rows("h2o", attentive)])
        table = compare(collapse(rows))
        assert set(table["policy"]) == {"h2o"}
        system = cell(table, "h2o", 0.5, "system")
        assert (system["better"], system["worse"], system["equal"]) == (4, 0, 4)
        assert system["delta"] == pytest.approx(0.5)
        assert system["low"] < 0.5 < system["high"]
        assert system["p_value"] == pytest.approx(2 * 0.5**4)
        user = cell(table, "h2o", 0.25, "user")
        assert (user["delta"], user["low"], user["high"]) == (-1, -1, -1)
        assert (user["better"], user["worse"], user["equal"]) == (0, 8, 0)
        assert user["p_value"] == pytest.approx(2 * 0.5**8)
        assert user["logprob_delta"] == pytest.approx(-8.5)

    def test_thirds_of_seeds_that_cancel_are_equal(self) -> None:
        def third(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
            return seed == variant

        rows = pd.concat(
            [
                condition_rows("memdecay-paper", lambda i, variant, r, b, s: variant == 0),
                condition_rows("random", third, seeds=(0, 1, 2)),
            ]
        )
        found = cell(compare(collapse(rows)), "random", 0.5, "all")
        assert (found["better"], found["worse"], found["equal"]) == (0, 0, 8)
        assert found["delta"] == pytest.approx(0)

    def test_the_full_cache_is_compared_at_both_budgets(self) -> None:
        rows = pd.concat(
            [condition_rows("memdecay-paper", ours), condition_rows("full", full, budgets=(1.0,))]
        )
        table = compare(collapse(rows))
        assert set(table["budget"]) == {0.25, 0.5}
        assert cell(table, "full", 0.5, "retrieval")["delta"] == pytest.approx(-1 / 3)
        assert cell(table, "full", 0.25, "all")["kept_delta"] == pytest.approx(-0.75)

    def test_only_probes_that_both_were_asked_count(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", ours),
                condition_rows("h2o", newest, scenarios=SCENARIOS[:3], variants=(0,)),
            ]
        )
        found = cell(compare(collapse(rows)), "h2o", 0.5, "system")
        assert (found["n"], found["scenarios"], found["better"]) == (3, 3, 3)

    def test_nothing_to_compare_is_an_empty_table(self) -> None:
        for rows in (condition_rows("h2o", ours), condition_rows("memdecay-paper", ours)):
            table = compare(collapse(rows))
            assert table.empty and {"policy", "delta", "p_value"} <= set(table.columns)

    def test_a_peer_without_log_probabilities(self) -> None:
        rows = pd.concat(
            [
                condition_rows("memdecay-paper", ours),
                condition_rows("openvino:seen", full, gold_logprob=math.nan),
            ]
        )
        found = cell(compare(collapse(rows)), "openvino:seen", 0.5, "retrieval")
        assert math.isnan(found["logprob_delta"]) and found["delta"] == pytest.approx(-1 / 3)

    def test_what_counts_as_a_difference_is_rarely_noise(self) -> None:
        rng = np.random.default_rng(17)
        deltas = rng.normal(0, 1, (1_500, 8))
        low, high = intervals(deltas, np.ones_like(deltas), widened=True, resamples=1_000)
        wrong = ((low > 0) | (high < 0)).mean()
        assert 0.02 <= wrong <= 0.085


@pytest.mark.parametrize(
    ("better", "worse", "expected"), [(0, 0, 1.0), (4, 0, 0.125), (5, 1, 0.21875), (3, 3, 1.0)]
)
def test_sign_test(better: int, worse: int, expected: float) -> None:
    assert sign_test(better, worse) == pytest.approx(expected)
