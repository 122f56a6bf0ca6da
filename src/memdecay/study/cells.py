"""The cells of a setting as JSON: what a script reads to compare two runs."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pandas as pd

from memdecay.errors import StudyError
from memdecay.study.statistics import collapse, summarise

FIELDS = (
    *("setting", "model", "policy", "budget", "region", "fact_kind", "n", "recall", "low", "high"),
    *("gold_logprob", "kept_fraction", "commit"),
)
"""The fields of every cell, in this order."""


def cells(rows: pd.DataFrame, summary: pd.DataFrame | None = None) -> list[dict[str, Any]]:
    """Return one object a policy, budget, region and kind of fact.

    Args:
        rows: rows of one setting, as `read_rows` gives them.
        summary: what `summarise` says of them, if it is known already.

    Returns:
        Objects with exactly `FIELDS`: budget is 0.25, 0.5, or 1.0 for the full cache; region is
        also "all" and "non_system", fact_kind also "all"; recall has the interval `low` to
        `high`; gold_logprob is in nats; what is not known is None.

    Raises:
        StudyError: the rows are not of one setting and one model, or hold a probe twice.
    """
    setting, model = identity(rows)
    commits = rows.groupby("policy")["commit"].agg(lambda found: "+".join(sorted(set(found))))
    table = summarise(collapse(rows)) if summary is None else summary
    table = table.assign(setting=setting, model=model, commit=table["policy"].map(commits))
    return [
        {field: _plain(value) for field, value in line.items()}
        for line in table[list(FIELDS)].to_dict("records")
    ]


def cells_json(rows: pd.DataFrame, summary: pd.DataFrame | None = None) -> str:
    """Return `cells` as a JSON list with one object a line, so that a diff shows what moved."""
    lines = [json.dumps(cell, allow_nan=False) for cell in cells(rows, summary)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def identity(rows: pd.DataFrame) -> tuple[str, str]:
    """Return the setting and the model of these rows, after a check that they belong together.

    Raises:
        StudyError: there are none, they are not of one setting, tier and model, or one condition
            asked the same probe twice.
    """
    if rows.empty:
        raise StudyError("There are no rows, but a report needs those of at least one episode.")
    for column in ("setting", "tier", "model"):
        found = sorted(set(rows[column]))
        if len(found) > 1:
            raise StudyError(
                f"The rows of setting {rows['setting'].iloc[0]!r} are of {len(found)} "
                f"{column}s ({', '.join(map(repr, found))}), but a setting has one."
            )
    probe = ["group", "policy", "budget", "scenario", "variant", "region", "seed"]
    twice = rows[rows.duplicated(probe)]
    setting = str(rows["setting"].iloc[0])
    if not re.fullmatch(r"\w[\w.-]*", setting):
        raise StudyError(
            f"The rows are of setting {setting!r}, but a name has only letters, digits and '-_.'."
        )
    _check_probes(rows)
    if not twice.empty:
        row = twice.iloc[0]
        raise StudyError(
            f"The rows of setting {setting!r} hold {len(twice)} probes twice, first "
            f"{row['scenario']}-{row['variant']} {row['region']} under {row['policy']!r} at "
            f"{row['budget']:g}, but each may stand once."
        )
    return setting, str(rows["model"].iloc[0])


def _check_probes(rows: pd.DataFrame) -> None:
    """Refuse rows that asked something else than the others about the same episode.

    Raises:
        StudyError: naming the probe and what differs.
    """
    asked = rows[rows["engine"] != "openvino"]  # it has its own precision and prompt
    for columns, some in ((["gold", "fact_kind"], rows), (["seq_len", "dtype"], asked)):
        for column in columns:
            found = some.groupby(["scenario", "variant", "region"], observed=True)[column].nunique()
            if bool((found > 1).any()):
                scenario, variant, region = found[found > 1].index[0]
                raise StudyError(
                    f"Rows of {scenario}-{variant} {region} have two values of {column!r}, so "
                    f"they are not of the same episode and cannot be compared."
                )


def _plain(value: Any) -> Any:
    """Return a number as JSON can have it: twelve digits, and None for what is not known."""
    if isinstance(value, str):
        return value
    if float(value).is_integer() and not isinstance(value, float):
        return int(value)
    # The last bits of a sum depend on the order of its terms, which a library may change.
    return None if math.isnan(value) else float(f"{value:.12g}")
