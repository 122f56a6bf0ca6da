"""What the new policies reached on scenarios on which nothing was chosen, beside their targets.

Their parameters were chosen on half of the scenarios; here only the rows of the other half count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from memdecay.errors import StudyError
from memdecay.study.cells import cells, identity
from memdecay.study.conditions import BUDGETS
from memdecay.study.findings import Findings
from memdecay.study.rows import read_rows
from memdecay.study.statistics import ALL, BASE, NON_SYSTEM, collapse, compare, intervals, summarise

OURS = ("memdecay", "memdecay-replay", "memdecay-heads")
"""The policies that are held against targets."""
CONTROLS = ("shuffled", "oracle", "streaming+pins", "h2o+pins")
"""The controls that stand beside them."""
RIVALS = ("h2o", "snapkv", "tova", "streaming", "observation_masking", "random", BASE)
"""The best peer is the best of these and of the peers that kvpress ran."""

TARGETS: Mapping[str, Mapping[str, Mapping[float, float]]] = {
    "short": {
        "memdecay": {0.5: 0.85, 0.25: 0.55},
        "memdecay-replay": {0.5: 0.95, 0.25: 0.75},
        "memdecay-heads": {0.5: 0.98, 0.25: 0.90},
    },
    "long": {
        "memdecay": {0.5: 0.95, 0.25: 0.75},
        "memdecay-replay": {0.5: 0.95, 0.25: 0.75},
        "memdecay-heads": {0.5: 0.98, 0.25: 0.90},
    },
}
"""Tier -> policy -> budget -> recall outside the system region, as a share of the full cache's.

They were set before the policies were made, and go with a second one in every cell: in the system
region, as many answers as the full cache gives.
"""
TARGET_MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
"""The models that the targets were set for."""

_GROUPS = ("paper", "policy", "peer")
_EPISODE = ["scenario", "variant", "region", "fact_kind"]


@dataclass(frozen=True)
class HeldOut:
    """The rows of one setting that count here.

    Args:
        findings: those of the scenarios that were held out; nothing is compared in it.
        every: `collapse` of the rows of all scenarios.
        rivals: the policies of which the best is the best peer.
    """

    findings: Findings
    every: pd.DataFrame
    rivals: tuple[str, ...]

    @property
    def ours(self) -> list[str]:
        """The policies of `OURS` that were run."""
        return [name for name in OURS if name in set(self.findings.probes["policy"])]

    @property
    def budgets(self) -> list[float]:
        """The budgets of the study that were run."""
        return [budget for budget in BUDGETS if budget in self.findings.budgets]

    @property
    def probes(self) -> int:
        """How many probes there are outside the system region, whoever was asked them."""
        probes = self.findings.probes
        return len(probes[probes["region"] != "system"].drop_duplicates(_EPISODE))


@dataclass(frozen=True)
class Share:
    """How much of the full cache's recall a policy has, on the probes that both were asked.

    Args:
        value: recall outside the system region over the full cache's, NaN if it has none.
        low, high: 95% interval over scenarios; NaN with fewer than two.
        probes: outside the system region.
        system: answers in the system region.
        system_full: the full cache's answers to the same probes.
        system_probes: how many these are.
        answers_full: the full cache's answers to `probes`; NaN if they were not counted.
    """

    value: float
    low: float
    high: float
    probes: int
    system: float
    system_full: float
    system_probes: int
    answers_full: float = math.nan

    @property
    def at_ceiling(self) -> bool:
        """Whether it answers as much of the system region as the full cache does."""
        return self.system_probes > 0 and self.system > self.system_full - 1e-9


@dataclass(frozen=True)
class Duel:
    """How a policy stands against another one outside the system region, on the probes of both.

    Args:
        rival: the other one.
        won, tied, lost: scenarios in which it answers more, as much, and less.
        delta: mean recall minus the other's.
        low, high: its paired 95% interval over scenarios, widened; NaN with fewer than two.
        probes: that both were asked.
    """

    rival: str
    won: int
    tied: int
    lost: int
    delta: float
    low: float
    high: float
    probes: int


def read(
    folders: Sequence[Path],
    scenarios: Sequence[str],
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[HeldOut], list[str]]:
    """Return what these scenarios say in each setting, and the settings that were left out.

    Args:
        folders: of the settings.
        scenarios: those on which nothing was chosen.
        advance: called after each folder.

    Raises:
        StudyError: no setting has such a scenario, the rows of a folder cannot be read or do not
            belong together, or two folders hold rows of one setting.
    """
    settings: dict[str, pd.DataFrame] = {}
    for folder in folders:
        rows = read_rows(folder)
        name, _ = identity(rows)
        if name in settings:
            raise StudyError(f"Two folders hold rows of the setting {name!r}; give one of them.")
        settings[name] = rows
        advance()
    known = sorted({str(name) for rows in settings.values() for name in rows["scenario"].unique()})
    for name in scenarios:
        if name not in known:
            raise StudyError(f"--scenario is {name!r}, but it must be one of {', '.join(known)}.")
    found, left_out = [], []
    for name, rows in settings.items():
        one = hold_out(rows, scenarios)
        if one is None:
            left_out.append(name)
        else:
            found.append(one)
    return found, left_out


def hold_out(rows: pd.DataFrame, scenarios: Sequence[str]) -> HeldOut | None:
    """Return what these scenarios say in one setting, None if none of `OURS` was run on them.

    Args:
        rows: of one setting, as `read_rows` gives them; sweeps, ablations, noise and the other
            controls are left out.
        scenarios: those on which nothing was chosen.
    """
    control = (rows["group"] == "control") & rows["policy"].isin(CONTROLS)
    order = ["group", "policy", "budget", "scenario", "variant", "region", "seed"]
    rows = rows[rows["group"].isin(_GROUPS) | control].sort_values(order, ignore_index=True)
    held = rows[rows["scenario"].isin(scenarios)].reset_index(drop=True)
    if not held["policy"].isin(OURS).any():
        return None
    probes = collapse(held)
    findings = Findings(held, probes, summarise(probes), pd.DataFrame())
    kvpress = sorted(set(rows.loc[rows["engine"] == "kvpress", "policy"]))
    return HeldOut(findings, collapse(rows), (*RIVALS, *kvpress))


def cells_json(settings: Sequence[HeldOut]) -> str:
    """Return the cells of all settings as one JSON list with one object a line."""
    found = [
        json.dumps(cell, allow_nan=False)
        for one in settings
        for cell in cells(one.findings.rows, one.findings.summary)
    ]
    return "[\n" + ",\n".join(found) + "\n]\n" if found else "[]\n"


def target(findings: Findings, policy: str, budget: float) -> float | None:
    """Return the share of the full cache's recall that a policy should reach, None without one."""
    if findings.model not in TARGET_MODELS:
        return None
    return TARGETS.get(findings.tier, {}).get(policy, {}).get(budget)


def share(probes: pd.DataFrame, policy: str, budget: float) -> Share:
    """Return how much of the full cache's recall a policy has at one budget.

    A scenario in which the full cache answers nothing has no share, and is left out of it.

    Args:
        probes: what `collapse` returns.
        policy: whose share.
        budget: of the policy; the full cache has its own. "full" is a share of 1 of itself.
    """
    whole = probes[probes["policy"] == "full"]
    if policy == "full":
        some = whole
    else:
        some = probes[(probes["policy"] == policy) & (probes["budget"] == budget)]
    pairs = some.merge(whole, on=_EPISODE, suffixes=("", "_full"), validate="one_to_one")
    inside = pairs["region"] == "system"
    outside = pairs[~inside].groupby("scenario", sort=True)[["recall", "recall_full"]].sum()
    outside = outside[outside["recall_full"] > 0]
    ours, theirs = (outside[name].to_numpy(dtype=float) for name in ("recall", "recall_full"))
    value = low = high = math.nan
    if len(outside):
        value = float(ours.sum() / theirs.sum())
        # Sums over counts, so that resampling scenarios resamples both recalls together.
        ends = intervals(ours[None], theirs[None])
        low, high = (float(end[0]) for end in ends)
    return Share(
        value=value,
        low=low,
        high=high,
        probes=int((~inside).sum()),
        system=float(pairs.loc[inside, "recall"].sum()),
        system_full=float(pairs.loc[inside, "recall_full"].sum()),
        system_probes=int(inside.sum()),
    )


def best(probes: pd.DataFrame, budget: float, names: Sequence[str]) -> str | None:
    """Return which of these has the highest mean recall outside the system region at a budget.

    Of equals, the one to which the gold answers are more likely, then the first by name. None if
    none of them has probes there.
    """
    some = probes[
        probes["policy"].isin(names) & (probes["budget"] == budget) & (probes["region"] != "system")
    ]
    if some.empty:
        return None
    means = some.groupby("policy", sort=True)[["recall", "gold_logprob"]].mean()
    # Means of thirds that are equal may differ in their last bits.
    ranks = {
        str(name): (-round(recall, 9), -round(logprob, 9) if logprob == logprob else math.inf)
        for name, recall, logprob in means.itertuples()
    }
    return min(sorted(ranks), key=lambda name: ranks[name])


def duel(probes: pd.DataFrame, policy: str, rival: str, budget: float) -> Duel | None:
    """Return how a policy stands against another one, None if they share no probe."""
    some = probes[
        probes["policy"].isin((policy, rival))
        & (probes["budget"] == budget)
        & (probes["region"] != "system")
    ]
    table = compare(some, policy)
    lines = table[(table["region"] == NON_SYSTEM) & (table["fact_kind"] == ALL)].to_dict("records")
    if not lines:
        return None
    line = lines[0]
    return Duel(
        rival=rival,
        won=int(line["better"]),
        tied=int(line["equal"]),
        lost=int(line["worse"]),
        **{name: float(line[name]) for name in ("delta", "low", "high")},
        probes=int(line["n"]),
    )


def numbers(one: HeldOut) -> list[dict[str, Any]]:
    """Return an object for each of `OURS` and budget, as JSON can have it: None is not known."""
    found = []
    for policy in one.ours:
        for budget in one.budgets:
            if not one.findings.cell(policy, budget, ALL):
                continue
            part = share(one.findings.probes, policy, budget)
            goal = target(one.findings, policy, budget)
            line: dict[str, Any] = {
                "setting": one.findings.name,
                "policy": policy,
                "budget": budget,
                "target": goal,
                "share": _plain(part.value),
                "low": _plain(part.low),
                "high": _plain(part.high),
                "probes": part.probes,
                "system": _plain(part.system),
                "system_full": _plain(part.system_full),
                "system_probes": part.system_probes,
                "reached": None if goal is None else not missed(part, goal),
            }
            for name, probes in (("best", one.findings.probes), ("best_of_all", one.every)):
                rival = best(probes, budget, one.rivals)
                met = rival and duel(probes, policy, rival, budget)
                line[name] = {k: _plain(v) for k, v in vars(met).items()} if met else None
            found.append(line)
    return found


def missed(part: Share, goal: float) -> list[str]:
    """Return what a policy has not reached at a budget: "share", "system", both or nothing."""
    # A share that is not known has not been reached.
    lacking = [] if part.value > goal - 1e-9 else ["share"]
    return lacking if part.at_ceiling else [*lacking, "system"]


def _plain(value: Any) -> Any:
    """Return a number as JSON can have it: twelve digits, and None for what is not known."""
    if not isinstance(value, float):
        return value
    return None if not np.isfinite(value) else float(f"{value:.12g}")
