"""The paper's figures beside ours, on rows whose truth is known."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from memdecay.study.beside_paper import beside_paper
from memdecay.study.findings import gather
from study.study_rows import condition_rows, write_run


def table(folder: Path, tier: str) -> dict[str, tuple[str, str]]:
    """Figure -> (the paper's, ours): memdecay answers system always and user once a scenario."""
    rows = [
        condition_rows("full", lambda *_: True, budgets=(1.0,)),
        condition_rows("memdecay-paper", lambda i, v, region, b, s: region == "system" or v == 0),
        condition_rows("streaming", lambda i, v, region, b, s: region == "retrieval" and i < 3),
        condition_rows("h2o", lambda i, v, region, b, s: region == "user" and i < 5),
    ]
    write_run(folder, pd.concat(rows).assign(tier=tier))
    return {str(row[0]): (str(row[1]), str(row[2])) for row in beside_paper(gather(folder)).rows}


def test_each_figure_is_counted_from_the_rows(tmp_path: Path) -> None:
    found = table(tmp_path, "short")
    assert found["system probes, memdecay-paper at 50%"][1] == "24 of 24 (full cache 24 of 24)"
    assert found["user probes, memdecay-paper at 50%"][1] == "8 of 24"
    assert found["user probes, h2o at 50%"][1] == "15 of 24"
    assert found["non-system recall, streaming at 50%"][1] == "0.12"
    assert found["system probes, streaming"][1] == "0 of 24 at 50%, 0 of 24 at 25%"
    signs = "scenarios where memdecay-paper beats / trails streaming, non-system at 50%"
    assert found[signs][1] == "5/0"  # in three of eight both answer a third


def test_the_papers_figures_depend_on_the_tier(tmp_path: Path) -> None:
    short, long = table(tmp_path / "s", "short"), table(tmp_path / "l", "long")
    assert short["user probes, memdecay-paper at 50%"][0] == "0 of 24"
    assert long["user probes, memdecay-paper at 50%"][0].startswith("7 of 24")


def test_what_was_not_measured_has_no_line(tmp_path: Path) -> None:
    found = table(tmp_path, "short")
    assert not any("random" in figure for figure in found)
