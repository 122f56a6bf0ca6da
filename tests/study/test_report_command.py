"""`memdecay study report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pandas as pd
import pytest

import memdecay.study.report
from memdecay.cli.main import run_app
from study.study_rows import condition_rows, full, newest, ours, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings of two scenarios."""
    folder = tmp_path_factory.mktemp("runs")
    for setting in ("toy-short", "toy-long"):
        columns = {"setting": setting, "tier": setting[4:], "scenarios": ("bakery", "clinic")}
        parts = [
            condition_rows("memdecay-paper", ours, **columns),
            condition_rows("streaming", newest, **columns),
            condition_rows("kvpress:kvzip", full, group="peer", **columns),
        ]
        write_run(folder / setting, pd.concat(parts))
    return folder


def call(*args: object) -> int:
    return run_app(["study", "report", *map(str, args)])


def test_writes_two_files_a_setting_and_one_page(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "results"
    assert call(runs, "-o", out) == 0
    names = ["study.html", "toy-long.json", "toy-long.md", "toy-short.json", "toy-short.md"]
    assert sorted(file.name for file in out.iterdir()) == names
    said = capsys.readouterr().out
    assert "toy-short" in said and "0/0/1" in said and "Wrote" in said
    cells = json.loads((out / "toy-long.json").read_text())
    assert {cell["setting"] for cell in cells} == {"toy-long"}
    page = (out / "study.html").read_text()
    assert page.index('id="toy-short"') < page.index('id="toy-long"')


def test_json_is_one_object(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(runs / "toy-short", "--json", "-o", tmp_path) == 0
    found = json.loads(capsys.readouterr().out)
    half, quarter = found["settings"]
    assert (half["budget"], quarter["budget"]) == (0.5, 0.25)
    assert half["memdecay-paper_non_system"] == pytest.approx(2 / 9)
    assert half["full_system"] is None
    assert half["peers_system"] == {"win": 0, "tie": 1, "loss": 0}
    assert half["peers_non_system"] == {"win": 0, "tie": 0, "loss": 1}
    assert len(found["files"]) == 3 and all(Path(file).is_file() for file in found["files"])


def test_one_setting_of_two(runs: Path, tmp_path: Path) -> None:
    call(runs, "--setting", "toy-long", "-o", tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {"toy-long", "study"}


def test_the_page_is_shown_only_when_asked(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    call(runs, "--setting", "toy-long", "-o", tmp_path)
    assert shown == []
    call(runs, "--setting", "toy-long", "-o", tmp_path, "--open")
    assert shown == [(tmp_path / "study.html").as_uri()]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["{out}"], "RUNS is '{out}', but there are no rows in it"),
        (["{runs}", "--setting", "toy"], "--setting is 'toy', but it must be one of toy-long"),
        (["{runs}", "-o", "{runs}/toy-long/rows/x.parquet"], "is a file, not a directory"),
    ],
)
def test_refusals_come_before_any_work_and_leave_nothing(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (runs / "toy-long" / "rows" / "x.parquet").touch()
    monkeypatch.setattr(memdecay.study.report, "build", lambda folders: pytest.fail("it worked"))
    assert call(*(arg.format(out=tmp_path, runs=runs) for arg in args)) == 2
    (runs / "toy-long" / "rows" / "x.parquet").unlink()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said.format(out=tmp_path, runs=runs) in sentence
    assert list(tmp_path.iterdir()) == []
