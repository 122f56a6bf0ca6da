"""Rows of made-up studies, whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from memdecay.calibration.curves import Curves
from memdecay.study.rows import write_rows

SCENARIOS = ("archive", "bakery", "clinic", "freight", "network", "observatory", "press", "theatre")
REGIONS = {"system": "code", "user": "natural", "tool_out": "code", "retrieval": "natural"}
SEQ_LEN = 400

Rule = Callable[[int, int, str, float, int], bool]
"""(scenario's index, variant, region, budget, seed) -> whether the probe is answered."""


def condition_rows(
    policy: str,
    rule: Rule,
    *,
    group: str = "paper",
    budgets: tuple[float, ...] = (0.25, 0.5),
    seeds: tuple[int, ...] = (0,),
    scenarios: tuple[str, ...] = SCENARIOS,
    variants: tuple[int, ...] = (0, 1, 2),
    condition: Mapping[str, Any] | None = None,
    kept: Callable[[float], int] = lambda budget: int(budget * SEQ_LEN),
    **columns: Any,
) -> pd.DataFrame:
    """Return the rows of one condition; further columns replace the usual values."""
    rows = []
    for index, scenario in enumerate(scenarios):
        for variant in variants:
            for region, kind in REGIONS.items():
                for budget in budgets:
                    for seed in seeds:
                        right = rule(index, variant, region, budget, seed)
                        row = {
                            "setting": "toy-short",
                            "model": "toy",
                            "tier": "short",
                            "dtype": "float32",
                            "scenario": scenario,
                            "variant": variant,
                            "region": region,
                            "fact_kind": kind,
                            "group": group,
                            "policy": policy,
                            "condition": json.dumps(condition or {"policy": {"name": policy}}),
                            "seed": seed,
                            "budget": budget,
                            "budget_tokens": int(budget * SEQ_LEN),
                            "seq_len": SEQ_LEN,
                            "kept_tokens": kept(budget),
                            "recall": right,
                            "answer": "KX-4471" if right else "no idea",
                            "gold": "KX-4471",
                            "gold_logprob": -0.5 if right else -9.0,
                            "gold_tokens": 5,
                            "keep_digest": "",
                            "engine": "kvpress" if group == "peer" else "memdecay",
                            "versions": json.dumps({"memdecay": "0.1.0"}),
                            "commit": "a" * 40,
                            "date": "2026-11-30",
                        }
                        rows.append({**row, **columns})
    return pd.DataFrame(rows)


def full(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """Answers everything."""
    return True


def ours(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """The system always; outside it the retrieval fact at the half budget, in two variants."""
    return region == "system" or (region == "retrieval" and budget == 0.5 and variant < 2)


def newest(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """Never the system; the tool's fact at the half budget in one variant."""
    return region == "tool_out" and budget == 0.5 and variant == 0


def attentive(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """The user's fact always, and half of the scenarios' system facts."""
    return region == "user" or (region == "system" and index < 4)


def lucky(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """One seed of three is right about everything outside the system region."""
    return region != "system" and seed == 1


def strong(index: int, variant: int, region: str, budget: float, seed: int) -> bool:
    """Everything but the system at the quarter budget."""
    return region != "system" or budget == 0.5


def study() -> pd.DataFrame:
    """Return the rows of a whole setting with every group in it."""
    parts = [
        condition_rows("full", full, budgets=(1.0,)),
        condition_rows("random", lucky, seeds=(0, 1, 2)),
        condition_rows("streaming", newest),
        condition_rows("h2o", attentive),
        condition_rows("memdecay-paper", ours, condition=_condition()),
        condition_rows("snapkv", attentive, group="policy"),
        condition_rows("oracle", full, group="control"),
        condition_rows("shuffled", newest, group="control"),
        condition_rows("kvpress:snapkv", strong, group="peer"),
        condition_rows(
            "kvpress:kvzip", full, group="peer", kept=lambda budget: int((budget + 0.1) * SEQ_LEN)
        ),
    ]
    parts += [
        condition_rows(
            f"memdecay-paper[{name}={value}]",
            rule,
            group=group,
            condition=_condition(**{name: value}),
        )
        for group, name, value, rule in (
            ("ablation", "attention_weight", 0.2, ours),
            ("ablation", "attention_weight", 0.8, ours),
            ("ablation", "pinned", "no", newest),
            ("sweep", "page_size", 8, attentive),
            ("sweep", "page_size", 32, newest),
            ("sweep", "observe_every", 4, ours),
            ("sweep", "clock", "tokens", ours),
            ("noise", "label_noise", 0.05, ours),
            ("noise", "label_noise", 0.5, newest),
            ("terms", "sinks", 0, ours),
        )
    ]
    return pd.concat(parts, ignore_index=True)


def _condition(**changed: Any) -> dict[str, Any]:
    """What the run records of memdecay's conditions."""
    base: dict[str, Any] = {
        "policy": "memdecay-paper",
        "params": {},
        "page_size": 16,
        "align": None,
        "clock": "steps",
        "observe_every": 1,
        "pinned": None,
        "noise": 0.0,
    }
    if "attention_weight" in changed:
        return {**base, "params": changed}
    return {**base, **changed}


def made_curves() -> list[Curves]:
    """Return curves of eight scenarios: system halves in 100 steps, scratchpad in 15."""
    rng = np.random.default_rng(3)
    curves = []
    for scenario in SCENARIOS:
        one = Curves(f"{scenario}-0", scenario)
        age = np.arange(1, 41)
        for region, half_life in (("system", 100), ("scratchpad", 15)):
            index = np.full(len(age), one.regions.index(region))
            mass = 0.003 * 0.5 ** (age / half_life) * rng.lognormal(0, 0.002, len(age))
            one.add(index, age, mass)
        curves.append(one)
    return curves


def write_run(folder: Path, rows: pd.DataFrame) -> None:
    """Write rows as a run does, those of peers apart, one file an episode."""
    for (scenario, variant), part in rows.groupby(["scenario", "variant"]):
        for peers, name in ((False, "rows"), (True, "peers")):
            chosen = part[(part["group"] == "peer") == peers]
            if len(chosen):
                path = folder / name / f"{scenario}-{variant}.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_rows(path, chosen.to_dict("records"))
