"""What the rows of a setting say: recall with intervals over scenarios, and paired differences.

Three variants of one scenario are not independent, so everything here resamples whole scenarios
(section IV-A). A probe that was asked under several seeds counts once, with its mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from numpy.typing import NDArray

stats: Any = scipy.stats
"""As Any: scipy says nothing about its types."""

RESAMPLES = 10_000
SEED = 0
LEVEL = 0.95
BASE = "memdecay-paper"
"""The policy that the study is about; every other one is compared with it."""
ALL = "all"
NON_SYSTEM = "non_system"

_PROBE = ["policy", "budget", "scenario", "variant", "region", "fact_kind"]
_CELL = ["policy", "budget", "region", "fact_kind"]
_BATCH = 250_000_000
"""Bytes that one batch of resamples may take."""


def collapse(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a probe: the mean over the seeds under which it was asked.

    Args:
        rows: rows of one setting, as `read_rows` gives them.

    Returns:
        Columns policy, budget, scenario, variant, region, fact_kind, recall (share of the seeds
        that answered), gold_logprob (nats; NaN where it is not known), kept_fraction
        (kept tokens over tokens seen) and seeds.
    """
    kept = rows["kept_tokens"] / rows["seq_len"]
    numbers = rows.assign(recall=rows["recall"].astype(float), kept_fraction=kept)
    # A condition that belongs to two groups is one condition, and its rows count once.
    numbers = numbers.drop_duplicates([*_PROBE, "seed"])
    return numbers.groupby(_PROBE, sort=True, as_index=False, observed=True).agg(
        recall=("recall", "mean"),
        gold_logprob=("gold_logprob", "mean"),
        kept_fraction=("kept_fraction", "mean"),
        seeds=("seed", "nunique"),
    )


def summarise(probes: pd.DataFrame) -> pd.DataFrame:
    """Return recall with its interval for every policy, budget, region and kind of fact.

    Args:
        probes: what `collapse` returns.

    Returns:
        One line a cell: policy, budget, region (also "all" and "non_system"), fact_kind (also
        "all"), n (probes), scenarios, recall, low, high (95%, `intervals`; NaN with fewer than
        two scenarios), gold_logprob (mean, nats), kept_fraction (mean).
    """
    cells, sums, counts = _clusters(_with_totals(probes), "recall")
    low, high = intervals(sums, counts)
    means = _with_totals(probes).groupby(_CELL, sort=True, observed=True)
    means = means[["gold_logprob", "kept_fraction"]].mean().reset_index()
    return cells.assign(
        n=counts.sum(axis=1).astype(int),
        scenarios=(counts > 0).sum(axis=1),
        recall=sums.sum(axis=1) / counts.sum(axis=1),
        low=low,
        high=high,
    ).merge(means, on=_CELL, validate="one_to_one")


def compare(probes: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """Return how `base` differs from every other policy on the probes that both were asked.

    A policy that only exists at budget 1.0 (the full cache) is compared at every budget of
    `base`.

    Args:
        probes: what `collapse` returns.
        base: the policy that is compared; positive differences are in its favour.

    Returns:
        One line a cell: policy (the other one), budget, region, fact_kind, n (probes), scenarios,
        delta (mean recall of `base` minus the other's), low, high (`intervals`, widened),
        better, worse, equal (scenarios), p_value (two-sided sign test on them),
        logprob_delta, logprob_low, logprob_high (nats), kept_delta (mean kept fraction).
        Empty if `base` has no probes.
    """
    ours = probes[probes["policy"] == base].drop(columns=["policy", "seeds"])
    others = probes[probes["policy"] != base]
    whole = others.groupby("policy")["budget"].transform("min") == 1.0
    budgets = sorted(ours["budget"].unique())
    copies = [others[whole].assign(budget=budget) for budget in budgets]
    others = pd.concat([others[~whole], *copies]) if copies else others[~whole]
    keys = [key for key in _PROBE if key != "policy"]
    pairs = others.merge(ours, on=keys, suffixes=("", "_base"), validate="many_to_one")
    deltas = pairs[_PROBE].copy()
    for name in ("recall", "gold_logprob", "kept_fraction"):
        deltas[name] = pairs[f"{name}_base"] - pairs[name]
    deltas = _with_totals(deltas)
    if deltas.empty:
        return pd.DataFrame(columns=[*_CELL, *_COMPARED])
    cells, sums, counts = _clusters(deltas, "recall")
    known, logprob_sums, logprob_counts = _clusters(
        deltas[deltas["gold_logprob"].notna()], "gold_logprob"
    )
    low, high = intervals(sums, counts, widened=True)
    logprob_low, logprob_high = intervals(logprob_sums, logprob_counts, widened=True)
    totals = logprob_counts.sum(axis=1)
    known = known.assign(
        logprob_delta=logprob_sums.sum(axis=1) / totals,
        logprob_low=logprob_low,
        logprob_high=logprob_high,
    )
    kept = deltas.groupby(_CELL, sort=True, observed=True)["kept_fraction"].mean()
    signs = np.where(np.abs(sums) < 1e-9, 0, np.sign(sums)) * (counts > 0)
    better, worse = (signs > 0).sum(axis=1), (signs < 0).sum(axis=1)
    scenarios = (counts > 0).sum(axis=1)
    compared = cells.assign(
        n=counts.sum(axis=1).astype(int),
        scenarios=scenarios,
        delta=sums.sum(axis=1) / counts.sum(axis=1),
        low=low,
        high=high,
        better=better,
        worse=worse,
        equal=scenarios - better - worse,
        p_value=[sign_test(int(b), int(w)) for b, w in zip(better, worse, strict=True)],
    )
    compared = compared.merge(known, on=_CELL, how="left", validate="one_to_one")
    return compared.merge(kept.rename("kept_delta").reset_index(), on=_CELL, validate="one_to_one")


_COMPARED = [
    *("n", "scenarios", "delta", "low", "high", "better", "worse", "equal", "p_value"),
    *("logprob_delta", "logprob_low", "logprob_high", "kept_delta"),
]


def intervals(
    sums: NDArray[np.float64],
    counts: NDArray[np.float64],
    *,
    widened: bool = False,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return 95% percentile bootstrap intervals of means whose clusters are resampled whole.

    The bootstrap draws as many clusters as there are, with replacement, and takes the sum of the
    drawn sums over the sum of the drawn counts. With the eight scenarios of the study such an
    interval is too short; the paper calls its own approximate. Measured on 2,000 synthetic
    studies a setting (8 clusters of 9 or 12 binary probes, means 0.2 to 0.6, correlation within a
    cluster 0.05 to 0.3), it holds the true mean in 84 to 89% of them instead of 95%. `widened`
    takes percentiles further out, where the normal quantile is replaced by Student's t times
    sqrt(n / (n - 1)) (the expanded percentiles of Hesterberg, 2015): 90 to 94%. With 40
    clusters the two hold it in 93 to 95% and 95 to 96%. Recall is printed with the former, to be
    read beside the paper's; what counts as a win or a loss rests on the latter.

    Args:
        sums: (cells, clusters), the sum of the values of each cluster.
        counts: (cells, clusters), how many values each cluster has; a cluster without any is
            no cluster of that cell.
        widened: whether to make up for few clusters.
        resamples: how many to draw.
        seed: of the draws; all cells see the same ones.

    Returns:
        low, high: (cells,) each; NaN where fewer than two clusters have values, and both equal
        to the mean where all clusters agree.
    """
    low, high = np.full(len(sums), np.nan), np.full(len(sums), np.nan)
    present = counts > 0
    for clusters in np.unique(present, axis=0):
        num_clusters = int(clusters.sum())
        if num_clusters < 2:
            continue
        (cells,) = np.nonzero((present == clusters).all(axis=1))
        # (cells, batch, clusters) float64, twice and a little more
        most = max(1, _BATCH // (32 * num_clusters * min(resamples, 1_000)))
        for start in range(0, len(cells), most):
            part = cells[start : start + most]
            drawn = stats.bootstrap(
                (sums[part][:, clusters], counts[part][:, clusters]),
                _ratio,
                n_resamples=resamples,
                batch=1_000,
                vectorized=True,
                paired=True,
                axis=-1,
                confidence_level=_level(num_clusters) if widened else LEVEL,
                method="percentile",
                rng=np.random.default_rng(seed),
            )
            low[part], high[part] = drawn.confidence_interval
    with np.errstate(invalid="ignore"):
        same = sums.sum(axis=1) / counts.sum(axis=1)
    off = np.abs(sums - same[:, None] * counts)
    agree = ((off < 1e-12 * counts) | ~present).all(axis=1) & (present.sum(axis=1) >= 2)
    return np.where(agree, same, low), np.where(agree, same, high)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of that many scenarios for and against, ties left out."""
    decided = better + worse
    return float(stats.binomtest(better, decided, 0.5).pvalue) if decided else 1.0


def _ratio(sums: NDArray[np.float64], counts: NDArray[np.float64], axis: int) -> Any:
    return sums.sum(axis=axis) / counts.sum(axis=axis)


def _level(clusters: int) -> float:
    quantile = stats.t.ppf(0.5 + LEVEL / 2, clusters - 1) * math.sqrt(clusters / (clusters - 1))
    return float(1 - 2 * stats.norm.sf(quantile))


def _with_totals(probes: pd.DataFrame) -> pd.DataFrame:
    """Return the probes once for every region and kind of fact that they count under."""
    outside = probes[probes["region"] != "system"]
    regions = pd.concat(
        [probes, probes.assign(region=ALL), outside.assign(region=NON_SYSTEM)], ignore_index=True
    )
    both: pd.DataFrame = pd.concat([regions, regions.assign(fact_kind=ALL)], ignore_index=True)
    return both


def _clusters(
    probes: pd.DataFrame, value: str
) -> tuple[pd.DataFrame, NDArray[np.float64], NDArray[np.float64]]:
    """Return the cells, and the sum and the count of a value in each of their scenarios."""
    grouped = probes.groupby([*_CELL, "scenario"], sort=True, observed=True)[value]
    sums = grouped.sum().unstack("scenario", fill_value=0.0)
    counts = grouped.count().unstack("scenario", fill_value=0)
    cells = sums.index.to_frame(index=False)
    return cells, sums.to_numpy(dtype=float), counts.to_numpy(dtype=float)
