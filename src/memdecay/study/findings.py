"""Everything that the report of one setting rests on, read from the folder of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from memdecay.calibration.curves import Curves, load_curves
from memdecay.calibration.fit import Fit, fit
from memdecay.errors import StudyError
from memdecay.policy.registry import get_policy, policy_config
from memdecay.study.cells import identity
from memdecay.study.rows import read_rows
from memdecay.study.statistics import ALL, BASE, collapse, compare, summarise

GROUPS = ("paper", "policy", "control", "ablation", "sweep", "noise", "terms", "peer")
"""The groups of conditions, in the order in which a report shows them."""

_CHANGES = ("rows", "kept", "sets", "recall")


@dataclass(frozen=True)
class Findings:
    """What is known of one setting.

    Args:
        rows: as recorded, one a probe, condition and seed.
        probes: `collapse` of them.
        summary: `summarise` of those.
        compared: `compare` of those, the study's policy against every other one.
        curves: measured attention, one for each episode; may be empty.
        fits: what was fitted to it.
        overhead: measured times, by name; may be empty.
        about: what the run says of itself; may be empty.
    """

    rows: pd.DataFrame
    probes: pd.DataFrame
    summary: pd.DataFrame
    compared: pd.DataFrame
    curves: Sequence[Curves] = ()
    fits: Mapping[str, Fit] = field(default_factory=dict)
    overhead: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The setting, such as `smollm2-short`."""
        return str(self.rows["setting"].iloc[0])

    @property
    def model(self) -> str:
        """The model's short name."""
        return str(self.rows["model"].iloc[0])

    @property
    def tier(self) -> str:
        """Short or long."""
        return str(self.rows["tier"].iloc[0])

    @property
    def budgets(self) -> list[float]:
        """The budgets below that of the full cache, the largest first."""
        found = sorted(set(self.rows["budget"]), reverse=True)
        return [budget for budget in found if budget < 1]

    def members(self, *groups: str) -> list[str]:
        """Return the policies of these groups, in the order of a table.

        A condition that stands in several groups is a member of each. The full cache comes
        first, then the study's policy, then the others; numbers in names count as numbers.
        """
        found = {
            policy: GROUPS.index(group) if group in GROUPS else len(GROUPS)
            for group in reversed(groups)
            for policy in self.rows.loc[self.rows["group"] == group, "policy"].unique()
        }
        return sorted(found, key=lambda policy: (found[policy], *_order(policy)))

    def keeps_all(self, policy: str) -> bool:
        """Whether a policy was only asked with everything kept."""
        return (policy, 1.0, ALL, ALL) in self._cells and not any(
            (policy, budget, ALL, ALL) in self._cells for budget in self.budgets
        )

    def cell(self, policy: str, budget: float, region: str, kind: str = ALL) -> dict[str, Any]:
        """Return a line of `summary`, empty if there is none; the full cache has one budget."""
        found = self._cells.get((policy, budget, region, kind))
        return found or self._cells.get((policy, 1.0, region, kind), {})

    def difference(
        self, policy: str, budget: float, region: str, kind: str = ALL
    ) -> dict[str, Any]:
        """Return a line of `compared`, empty if there is none."""
        return self._differences.get((policy, budget, region, kind), {})

    def changed(self, policy: str, *budgets: float) -> dict[str, int]:
        """Return how many rows of a condition differ from the same probe of the study's policy.

        Returns:
            rows; kept (another number of kept tokens); sets (another keep set, where both are
            recorded); recall (another outcome).
        """
        found = [self._changes.get((policy, budget), {}) for budget in budgets]
        return {name: sum(one.get(name, 0) for one in found) for name in _CHANGES}

    @cached_property
    def _changes(self) -> dict[tuple[Any, ...], dict[str, int]]:
        keys = ["budget", "scenario", "variant", "region"]
        base = self.rows[self.rows["policy"] == BASE].drop_duplicates(keys)
        others = self.rows.drop_duplicates(["policy", *keys, "seed"])
        pairs = others.merge(base, on=keys, suffixes=("", "_base"))
        digests, theirs = pairs["keep_digest"], pairs["keep_digest_base"]
        flags = pairs[["policy", "budget"]].assign(
            rows=1,
            kept=pairs["kept_tokens"] != pairs["kept_tokens_base"],
            sets=(digests != "") & (theirs != "") & (digests != theirs),
            recall=pairs["recall"] != pairs["recall_base"],
        )
        counts = flags.groupby(["policy", "budget"])[list(_CHANGES)].sum()
        return {
            tuple(key): {name: int(line[name]) for name in _CHANGES}
            for key, line in counts.iterrows()
        }

    @cached_property
    def _cells(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return _by_key(self.summary)

    @cached_property
    def _differences(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return _by_key(self.compared)


def gather(folder: Path) -> Findings:
    """Read a run's folder: its rows, and what was measured beside them.

    Raises:
        StudyError: there are no rows, they are not rows, or a file beside them is damaged.
    """
    import pyarrow as pa

    try:
        rows = read_rows(folder)
    except pa.ArrowException:
        raise StudyError(f"The rows in '{folder}' are of another schema; run it again.") from None
    return weigh(
        rows,
        curves=load_curves(folder / "curves") if list(folder.glob("curves/*.parquet")) else [],
        overhead=_json(folder / "overhead.json"),
        about=_json(folder / "setting.json"),
    )


def weigh(
    rows: pd.DataFrame,
    *,
    curves: Sequence[Curves] = (),
    overhead: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Findings:
    """Do the statistics of a setting's rows.

    Raises:
        StudyError: the rows are not of one setting, or hold a probe twice.
    """
    identity(rows)
    order = ["group", "policy", "budget", "scenario", "variant", "region", "seed"]
    rows = rows.sort_values(order, ignore_index=True)
    probes = collapse(rows)
    return Findings(
        rows=rows,
        probes=probes,
        summary=summarise(probes),
        compared=compare(probes),
        curves=curves,
        fits=fit(curves) if curves else {},
        overhead=overhead or {},
        about=about or {},
    )


def parameters(policy: str) -> dict[str, Any]:
    """Return what a display name says was changed: `h2o[page_size=8]` -> {"page_size": 8}."""
    found = re.fullmatch(r"[^\[]*\[(.*)\]", policy)
    if not found:
        return {}
    parts = re.findall(r"([^=,\s]+)\s*=\s*([^,]*)", found[1])
    return {name: _value(text.strip()) for name, text in parts}


def base_value(findings: Findings, name: str) -> Any:
    """Return what the study's policy has for a parameter, as display names write it."""
    rows = findings.rows[findings.rows["policy"] == BASE]
    condition: dict[str, Any] = json.loads(rows["condition"].iloc[0]) if len(rows) else {}
    settings = {**policy_config(get_policy(BASE)), **condition.get("params", {}), **condition}
    if name == "label_noise":
        return settings.get("noise", 0)
    if name == "pinned":
        return "no" if settings.get("pinned") is False else "yes"
    value = settings.get(name)
    if isinstance(value, Mapping):
        return f"{value.get('scale', 0):g}x"
    return "none" if value is None else value


def _order(policy: str) -> tuple[Any, ...]:
    words = re.split(r"(\d+(?:\.\d+)?)", policy)
    numbers = [float(word) if index % 2 else word for index, word in enumerate(words)]
    return (policy != "full", policy != BASE, numbers)


def _by_key(table: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines: list[dict[str, Any]] = table.to_dict("records")
    key = ("policy", "budget", "region", "fact_kind")
    return {tuple(line[name] for name in key): line for line in lines}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise StudyError(f"'{path}' is not a readable JSON file; delete it or run again.") from None
    if not isinstance(found, dict):
        raise StudyError(f"'{path}' must hold one JSON object; delete it or run again.")
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
