"""The JSON of a setting."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from memdecay.errors import StudyError
from memdecay.study.cells import cells, cells_json
from study.study_rows import condition_rows, full, ours, study

FIELDS = [
    "setting", "model", "policy", "budget", "region", "fact_kind", "n", "recall", "low", "high",
    "gold_logprob", "kept_fraction", "commit",
]  # fmt: skip


def test_every_cell_has_exactly_the_promised_fields() -> None:
    found = json.loads(cells_json(study()))
    assert {tuple(cell) for cell in found} == {tuple(FIELDS)}
    assert {cell["budget"] for cell in found if cell["policy"] == "full"} == {1.0}
    assert {cell["budget"] for cell in found if cell["policy"] != "full"} == {0.25, 0.5}
    regions = {"all", "non_system", "system", "user", "tool_out", "retrieval"}
    assert {cell["region"] for cell in found} == regions
    assert {cell["fact_kind"] for cell in found} == {"all", "code", "natural"}
    keys = [(c["policy"], c["budget"], c["region"], c["fact_kind"]) for c in found]
    assert len(set(keys)) == len(keys)


def test_values_of_a_cell() -> None:
    (cell,) = [
        cell
        for cell in cells(condition_rows("memdecay-paper", ours))
        if (cell["budget"], cell["region"], cell["fact_kind"]) == (0.5, "all", "natural")
    ]
    assert (cell["setting"], cell["model"], cell["n"]) == ("toy-short", "toy", 48)
    assert cell["recall"] == pytest.approx(1 / 3)
    assert cell["commit"] == "a" * 40


def test_what_is_not_known_is_null() -> None:
    rows = condition_rows("memdecay-paper", ours, scenarios=("clinic",), gold_logprob=math.nan)
    text = cells_json(rows)
    assert "NaN" not in text
    assert {(c["low"], c["high"], c["gold_logprob"]) for c in json.loads(text)} == {
        (None, None, None)
    }


def test_rows_of_two_commits_name_both() -> None:
    rows = pd.concat(
        [
            condition_rows("h2o", ours, variants=(0,), commit="b"),
            condition_rows("h2o", ours, variants=(1,), commit="a"),
            condition_rows("full", full, budgets=(1.0,), commit="c"),
        ]
    )
    assert {cell["policy"]: cell["commit"] for cell in cells(rows)} == {"h2o": "a+b", "full": "c"}


@pytest.mark.parametrize("column", ["setting", "tier", "model"])
def test_rows_that_do_not_belong_together_are_refused(column: str) -> None:
    rows = pd.concat(
        [condition_rows("h2o", ours), condition_rows("full", ours, **{column: "other"})]
    )
    with pytest.raises(StudyError, match=f"2 {column}s"):
        cells(rows)


def test_a_probe_that_stands_twice_is_refused() -> None:
    rows = condition_rows("h2o", ours)
    with pytest.raises(StudyError, match=r"1 probes twice, first bakery-0 system under 'h2o'"):
        cells(pd.concat([rows, rows.iloc[24:25]]))
    with pytest.raises(StudyError, match="no rows"):
        cells(rows.iloc[:0])
