"""The parts of the peers' scripts that need no peer: episodes in, rows out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memdecay.study.rows import SCHEMA
from memdecay.study.scenario import find_gold

PEERS = Path(__file__).parents[2] / "peers"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


common = _load("common")
MAKER = common.Maker("somebody", ("pyarrow",))


def _line(**changed: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "setting": "tiny-short",
        "model": "tiny",
        "tier": "short",
        "dtype": "float32",
        "scenario": "bakery",
        "variant": 1,
        "context_ids": list(range(10, 50)),
        "budgets": {"0.5": 20, "0.25": 10},
        "probes": [
            {
                "region": region,
                "fact_kind": "code",
                "question_ids": [5, 6, 7],
                "gold": f"Q{n}",
                "gold_ids": [8, n],
            }
            for n, region in enumerate(("system", "user"))
        ],
        "end_ids": [2],
    }
    return {**line, **changed}


def _file(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "episodes.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _rows(episode: Any, budgets: tuple[float, ...] = (0.5, 0.25), **more: Any) -> list[Any]:
    return [
        MAKER.row(
            episode,
            probe,
            **{
                "policy": "somebody:one",
                "condition": {"b": 1, "a": 2},
                "budget": budget,
                "kept": 9.6,
                "answer": "It is Q1.",
                "gold_logprob": -1.5,
                **more,
            },
        )
        for budget in budgets
        for probe in episode.probes
    ]


WORDS = st.text(alphabet="aB1. ,-\n\t€", min_size=1, max_size=12)


@given(WORDS, WORDS.filter(lambda gold: gold.split()))
@example("it is 2.31.", "2.31")
@example("12.31", "2.31")
@example("2.31.4", "2.31")
@example("the BOAT\n shed", "boat shed")
def test_recall_is_judged_by_memdecays_rule(answer: str, gold: str) -> None:
    assert common.find_gold(answer, gold) == find_gold(answer, gold)


def test_the_rows_have_memdecays_columns() -> None:
    assert common.SCHEMA == SCHEMA


def test_an_episode_is_read_as_it_was_written(tmp_path: Path) -> None:
    (episode,) = common.read_episodes(_file(tmp_path, _line()))
    assert episode.name == "bakery-1"
    assert episode.context_ids == tuple(range(10, 50))
    assert episode.budgets == {0.5: 20, 0.25: 10}
    assert [probe.gold for probe in episode.probes] == ["Q0", "Q1"]
    assert episode.probes[1].question_ids == (5, 6, 7)
    assert episode.end_ids == {2}


def test_only_some_scenarios_are_read(tmp_path: Path) -> None:
    path = _file(tmp_path, _line(), _line(scenario="clinic"))
    assert [e.scenario for e in common.read_episodes(path, ["clinic"])] == ["clinic"]


@pytest.mark.parametrize(
    ("lines", "only", "says"),
    [
        ([], (), "no episode in it"),
        ([_line()], ("mill",), "--only-scenario is 'mill', but the file has bakery"),
        ([{"setting": "x"}], (), "Line 1 of .* is not an episode"),
        ([_line(), _line(probes=[])], (), "Line 2 of .* a probe without"),
        ([_line(budgets={"0.5": 0})], (), "budgets"),
        ([_line(budgets={"0.5": 41})], (), "budgets"),
    ],
)
def test_what_is_no_episode_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], only: tuple[str, ...], says: str
) -> None:
    with pytest.raises(common.PeerError, match=says):
        common.read_episodes(_file(tmp_path, *lines), only)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(common.PeerError, match="No such file"):
        common.read_episodes(tmp_path / "none.jsonl")


def test_a_row_carries_what_was_asked_and_what_came_out(tmp_path: Path) -> None:
    (episode,) = common.read_episodes(_file(tmp_path, _line()))
    wrong, right = _rows(episode, (0.25,))
    assert set(right) == set(SCHEMA.names)
    assert (wrong["recall"], right["recall"]) == (False, True)
    assert (right["budget_tokens"], right["kept_tokens"], right["seq_len"]) == (10, 10, 40)
    assert (right["region"], right["gold"], right["gold_tokens"]) == ("user", "Q1", 2)
    assert (right["group"], right["engine"], right["dtype"]) == ("peer", "somebody", "float32")
    assert right["condition"] == '{"a": 2, "b": 1}'
    assert json.loads(right["versions"])["pyarrow"]
    (full, _) = _rows(episode, (1.0,), dtype="q4")
    assert (full["budget_tokens"], full["dtype"]) == (40, "q4")


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    (episode,) = common.read_episodes(_file(tmp_path, _line()))
    rows = _rows(episode)
    common.write_rows(tmp_path / "deep" / "rows.parquet", rows)
    assert pq.read_table(tmp_path / "deep" / "rows.parquet").to_pylist() == rows
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.parquet"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (episode,) = common.read_episodes(_file(tmp_path, _line()))
    path = tmp_path / "rows" / "rows.parquet"
    common.write_rows(path, _rows(episode))
    before = path.read_bytes()

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(common.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        common.write_rows(path, _rows(episode, (0.5,)))
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == ["rows.parquet"]


def _open(path: Path, out: Path, budgets: str = "0.5,0.25") -> list[Any]:
    policies = ["somebody:one", "somebody:none"]
    tasks = common.open_tasks(common.read_episodes(path), policies, budgets, out)
    return [(task.episode.name, task.policies) for task in tasks]


def test_what_is_written_is_not_run_again(tmp_path: Path) -> None:
    path, out = _file(tmp_path, _line(), _line(variant=2)), tmp_path / "out"
    one = common.read_episodes(path)[0]
    both = ("somebody:one", "somebody:none")
    assert _open(path, out) == [("bakery-1", both), ("bakery-2", both)]
    task = common.Task(one, both, one.budgets)
    common.write_rows(task.file(out, both[0]), _rows(one))
    assert _open(path, out) == [("bakery-1", both[1:]), ("bakery-2", both)]
    common.write_rows(task.file(out, both[1]), _rows(one, (1.0,)))
    assert _open(path, out) == [("bakery-2", both)]


def test_fewer_budgets_or_another_text_count_as_not_written(tmp_path: Path) -> None:
    path, out = _file(tmp_path, _line()), tmp_path / "out"
    (episode,) = common.read_episodes(path)
    task = common.Task(episode, ("somebody:one",), episode.budgets)
    common.write_rows(task.file(out, "somebody:one"), _rows(episode, (0.5,)))
    assert ("somebody:one" in _open(path, out)[0][1]) is True
    assert ("somebody:one" in _open(path, out, "0.5")[0][1]) is False
    changed = _file(tmp_path, _line(context_ids=list(range(11, 51))))
    assert ("somebody:one" in _open(changed, out, "0.5")[0][1]) is True


@pytest.mark.parametrize("budgets", ["half", "0.5,", "0.3"])
def test_budgets_that_there_are_not_are_refused(tmp_path: Path, budgets: str) -> None:
    path = _file(tmp_path, _line())
    with pytest.raises(common.PeerError, match="--budgets"):
        _open(path, tmp_path, budgets)


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise common.PeerError("It is wrong.")

    with pytest.raises(SystemExit) as stopped:
        common.run(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "Error: It is wrong.\n"


@pytest.mark.slow
def test_the_plumbing_around_kvpress_changes_no_answer() -> None:
    python = PEERS.parent / ".venv-kvpress" / "bin" / "python"
    if not python.exists():
        pytest.skip("`make peers` has not been run")
    done = subprocess.run(
        [python, PEERS / "check_kvpress.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
