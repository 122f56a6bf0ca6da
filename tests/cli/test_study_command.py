"""`memdecay study` run, export and episodes: what they write and say, and what they refuse."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memdecay.engine
from memdecay.cli import study
from memdecay.study import answers, overhead, workers
from memdecay.study.rows import read_rows
from study.study_tiny import small, two_scenarios, write_scenario

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two scenarios, and a tiny model for every name."""
    monkeypatch.chdir(tmp_path)
    two_scenarios(tmp_path)
    model = small("llama_one_layer")
    monkeypatch.setattr(memdecay.engine, "load_model", lambda name, *_, **__: model)
    monkeypatch.setattr(workers, "_model", lambda name, dtype: model)
    monkeypatch.setattr(overhead, "measure_overhead", lambda *_: {})
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 2)
    return tmp_path


OWN = ("--setting", "own", "--model", "m", "--tier", "short", "--variant", "2", "--jobs", "1",
       "--scenario", "mill.yaml")  # fmt: skip


@pytest.mark.usefixtures("place")
class TestWhatItWrites:
    def test_a_run_says_where_its_rows_are(self, command: Command) -> None:
        code, out, err = command("study", "run", *OWN, "--groups", "paper,ablation", "--out", "r")
        assert (code, err) == (0, "")
        next_one = "memdecay study report r --setting own -o r/report"
        assert out == f"The rows are in r/own. Next: {next_one}\n"
        rows = read_rows(Path("r/own"))
        assert len(rows) == 4 * (13 + 6) and set(rows["group"]) == {"paper", "ablation"}
        assert set(rows["variant"]) == {2} and set(rows["scenario"]) == {"mill"}
        assert set(rows["model"]) == {"m"}

    def test_json_is_one_object(self, command: Command) -> None:
        command("study", "run", *OWN, "--groups", "paper")
        code, out, _ = command("study", "run", *OWN, "--groups", "paper", "--json")
        assert code == 0
        assert json.loads(out) == {"setting": "own", "folder": "runs/own", "episodes": 1}

    def test_an_interrupt_is_no_traceback(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(name: str, dtype: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(workers, "_model", stop)
        said = "What is done stays; the same command goes on from there.\nmemdecay: interrupted\n"
        assert command("study", "run", *OWN) == (130, "", said)

    def test_a_folder_of_another_text_is_refused(self, command: Command) -> None:
        assert command("study", "run", *OWN, "--groups", "paper")[0] == 0
        write_scenario(Path("mill.yaml"), {"Be brief": "Be short"})
        code, out, err = command("study", "run", *OWN, "--groups", "paper")
        assert (code, out) == (2, "")
        assert err == (
            "memdecay: 'runs/own' holds a run of another text of episode 'mill-2'; use another "
            "--out, or remove it.\n"
        )

    def test_an_export_has_a_line_an_episode(self, command: Command) -> None:
        code, out, _ = command("study", "export", *OWN, "--scenario", "ferry.yaml", "-o", "e.jsonl")
        assert (code, out) == (0, "2 episodes are in e.jsonl.\n")
        lines = [json.loads(line) for line in Path("e.jsonl").read_text().splitlines()]
        assert [(one["scenario"], one["variant"]) for one in lines] == [("mill", 2), ("ferry", 2)]

    def test_episodes_are_listed(self, command: Command) -> None:
        code, out, _ = command("study", "episodes", "mill.yaml", "ferry.yaml", "--json")
        assert code == 0
        told = json.loads(out)
        assert [one["episode"] for one in told["episodes"]] == [
            f"{name}-{variant}" for name in ("mill", "ferry") for variant in range(3)
        ]
        first = told["episodes"][0]
        assert first["stages"] == 4 and 250 < first["tokens"] < 500
        assert first["facts"]["system"] == "K7-41" and first["kinds"]["user"] == "natural"
        shares = [one["straddle_share"] for one in told["episodes"]]
        assert told["mean_straddle_share"] == pytest.approx(sum(shares) / 6, abs=1e-3)
        assert 0 < min(shares) <= max(shares) < 1
        code, out, _ = command("study", "episodes", "mill.yaml")
        assert code == 0 and "3 episodes, short tier" in out and "K7-41" in out


@pytest.fixture
def nothing_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test when a model is loaded, or a process or a cluster started."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the arguments were checked")

    monkeypatch.setattr(workers, "_model", load)
    monkeypatch.setattr(workers.Processes, "results", load)
    monkeypatch.setattr(memdecay.engine, "load_model", load)
    before = sorted(os.listdir(place))
    yield
    assert sorted(os.listdir(place)) == before


MISTAKES: list[tuple[str, str]] = [
    ("run --setting smol-short", "setting is 'smol-short', but it must be one of quick, smollm2-s"),
    ("run --setting smollm-short", "Did you mean 'smollm2-short'?"),
    ("run --setting own --model m", "setting is 'own', but it must be one of"),
    ("run --setting own --model m --tier tall", "tier is 'tall', but it must be one of short, lo"),
    ("run --setting ../x --model m --tier short", "setting is '../x', but it must be letters, dig"),
    ("run --setting .. --model m --tier short", "setting is '..', but it must be letters, digits"),
    ("run --setting quick --tier long", "tier is 'long', but setting 'quick' is of the short tier"),
    ("run --dtype float16", "dtype is 'float16', but it must be bfloat16 or float32."),
    ("run --jobs 0", "jobs is 0, but it must be at least 1."),
    ("run --jobs many", "Invalid value for '--jobs'"),
    ("run --groups papers", "group is 'papers', but it must be one of paper, policy, control"),
    ("run --groups paper,", "--groups is 'paper,', but it must be names with commas between"),
    ("run --variant 3", "variant is 3, but it must be 0, 1 or 2."),
    ("run --variant x", "Invalid value for '--variant'"),
    ("run --scenario none.yaml", "scenario is 'none.yaml', which cannot be read (No such file"),
    ("run --scenario mill.yaml --scenario mill.yaml", "Two scenarios are named 'mill'"),
    ("run --setting smollm2-long --scenario mill.yaml", "'mill.yaml', but it has no long tier"),
    ("run --scenario mill.yaml --out mill.yaml", "--out is 'mill.yaml', but that is a file"),
    ("run --profile p.yaml", "No such option: --profile"),
    ("run more", "unexpected extra argument"),
    ("export", "Missing option '-o'"),
    ("export -o no/e.jsonl", "--output is 'no/e.jsonl', but there is no directory 'no'."),
    ("export -o .", "--output is '.', but that is a directory"),
    ("export -o e.jsonl --setting quik", "Did you mean 'quick'?"),
    ("export -o e.jsonl --jobs 0", "jobs is 0, but it must be at least 1."),
    ("episodes --tier middle", "tier is 'middle', but it must be one of short, long."),
    ("episodes none.yaml", "scenario is 'none.yaml', which cannot be read (No such file"),
    ("episodes mill.yaml --tier long", "scenario is 'mill.yaml', but it has no long tier."),
    ("measure", "No such command 'measure'"),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("line", "sentence"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence_before_any_work(
    command: Command, line: str, sentence: str
) -> None:
    code, out, err = command("study", *line.split())
    assert (code, out) == (2, "") and sentence in err
    assert err.startswith("memdecay: ") and err.count("\n") == 1


@pytest.mark.usefixtures("nothing_runs")
def test_a_cluster_without_ray_is_one_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = command("study", "run", "--ray", "local")
    assert (code, out) == (2, "")
    assert err == (
        "memdecay: ray is needed to spread a study over machines; pip install 'memdecay[ray]' "
        "brings it.\n"
    )


@pytest.mark.parametrize("name", ["run", "export", "episodes"])
def test_the_example_in_the_help_parses(
    command: Command, monkeypatch: pytest.MonkeyPatch, place: Path, name: str
) -> None:
    """It is cut short at the model."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "default_jobs", lambda tasks: 1)
    monkeypatch.setattr(workers, "_model", stop)
    monkeypatch.setattr(memdecay.engine, "load_model", stop)
    example = getattr(study, f"{name.upper()}_EXAMPLE")
    code, out, _ = command("study", name, "--help")
    assert code == 0 and example in " ".join(out.split())
    assert command(*example.split()[1:])[0] == 130
