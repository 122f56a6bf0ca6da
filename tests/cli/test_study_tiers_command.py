"""`memdecay study tiers`: what it writes and says, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from memdecay.evidence import ASK, EvidenceHead
from memdecay.regions import Profile
from memdecay.study import answers, workers
from study.study_tiny import small, two_scenarios

Command = Callable[..., tuple[int, str, str]]

OWN = ("study", "tiers", "own", "--model", "m", "--tier", "short", "--variant", "1", "--jobs", "1",
       "--scenario", "mill.yaml", "--policies", "full,memdecay-tiers")  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with scenarios and a profile, and a tiny model for every name."""
    monkeypatch.chdir(tmp_path)
    two_scenarios(tmp_path)
    monkeypatch.setattr(workers, "_model", lambda name, dtype: small("llama"))
    monkeypatch.setattr(answers, "MAX_NEW_TOKENS", 2)
    path = tmp_path / "runs" / "own" / "profiles" / "mill.yaml"
    path.parent.mkdir(parents=True)
    heads = (EvidenceHead(0, 1, ASK), EvidenceHead(1, 2, ASK))
    Profile.default().with_evidence({"recall": heads}).save(path)


def test_a_run_says_where_its_rows_are(command: Command) -> None:
    assert command(*OWN) == (0, "The rows are in runs/own/tiers.\n", "")
    rows = pq.read_table("runs/own/tiers/mill-1.parquet").to_pylist()
    assert [row["policy"] for row in rows] == ["full"] * 4 + ["memdecay-tiers"] * 4
    assert {row["model"] for row in rows} == {"m"} and {row["variant"] for row in rows} == {1}
    code, out, err = command(*OWN, "--json")
    assert (code, err) == (0, "")
    one = {"setting": "own", "folder": "runs/own/tiers", "episodes": 1}
    assert json.loads(out) == {"runs": [one], "notes": []}


def test_what_does_not_fit_is_said(command: Command) -> None:
    pinned = Profile.load(Path("runs/own/profiles/mill.yaml"))
    everything = pinned.with_region("tool_out", pinned.regions["system"])
    for name in ("user", "retrieval"):
        everything = everything.with_region(name, pinned.regions["system"])
    everything.save(Path("runs/own/profiles/mill.yaml"))
    code, out, _ = command(*OWN)
    assert code == 0 and out.startswith("Note: mill-1 has no memdecay-tiers at 25.0%: ")


def test_an_interrupt_is_no_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str, dtype: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_model", stop)
    said = "What is done stays; the same command goes on from there.\nmemdecay: interrupted\n"
    assert command(*OWN) == (130, "", said)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            ("--policies", "full,tier"),
            "--policies is 'full,tier', but it must be names with commas",
        ),
        (("--scenario", "ferry.yaml"), "'runs/own/profiles/ferry.yaml' is missing, but tiers need"),
        (("--out", "mill.yaml"), "--out is 'mill.yaml', but that is a file"),
        (("--jobs", "0"), "jobs is 0, but it must be at least 1"),
        (("--variant", "7"), "variant is 7, but it must be 0, 1 or 2"),
    ],
)
def test_mistakes_are_one_sentence(command: Command, changed: tuple[str, str], said: str) -> None:
    code, out, err = command(*OWN, *changed)
    assert (code, out) == (2, "")
    assert err.startswith(f"memdecay: {said}") and err.count("\n") == 1


def test_a_report_is_written_and_said(command: Command) -> None:
    assert command(*OWN)[0] == 0
    files = ("-o", "tiers.md", "--cells", "tiers.json")
    code, out, err = command("study", "tiers-report", "runs", *files)
    assert (code, err) == (0, "") and out.endswith("Wrote tiers.md, tiers.json\n")
    assert "own: recall" in Path("tiers.md").read_text("utf-8")
    cells = json.loads(Path("tiers.json").read_text("utf-8"))
    assert {cell["policy"] for cell in cells} == {"full", "memdecay-tiers"}
    before = Path("tiers.md").read_bytes()
    code, out, _ = command("study", "tiers-report", "runs", *files, "--json")
    said = json.loads(out)
    assert code == 0 and said["files"] == ["tiers.md", "tiers.json"]
    assert {one["where"] for one in said["targets"]} == {"own"} and len(said["targets"]) == 4
    assert Path("tiers.md").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--cells", "t.md"), "--cells is 't.md', but that is --output; they must be two files"),
        (("--cells", "no/t.json"), "--cells is 'no/t.json', but there is no directory 'no'"),
        (("--costs", "mill.yaml"), "--costs is 'mill.yaml', but it must be a file that benchmarks"),
        (
            (),
            "RUNS is 'runs', but there are no rows in it; it must be a folder that `memdecay study",
        ),
    ],
)
def test_a_report_refuses(command: Command, changed: tuple[str, str], said: str) -> None:
    own = ("study", "tiers-report", "runs", "-o", "t.md", "--cells", "t.json")
    code, out, err = command(*own, *changed)
    assert (code, out) == (2, "")
    assert err.startswith(f"memdecay: {said}") and err.count("\n") == 1
