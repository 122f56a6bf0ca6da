"""`memdecay study traces` and `traces-report`: what they write and say, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memdecay.evidence import ASK, EvidenceHead
from memdecay.regions import Profile
from memdecay.study import workers
from memdecay.study.trace_report import gather
from study.study_tiny import small

Command = Callable[..., tuple[int, str, str]]

ARGS = ("study", "traces", "trace.json", "--jobs", "1", "--policies", "streaming,h2o")


@pytest.fixture(autouse=True)
def tiny_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model for every name, in a directory with a trace."""
    model = small("llama")
    monkeypatch.setattr(workers, "_model", lambda name, dtype: model)


def test_a_run_and_its_report(command: Command) -> None:
    code, out, err = command(*ARGS, "--out", "runs/own", "--model", "some/where/m.gguf")
    assert (code, err) == (0, "")
    assert "streaming" in out and "50%" in out and "25%" in out
    assert out.endswith(
        "The rows are in runs/own. Next: memdecay study traces-report runs/own -o own\n"
    )
    rows = gather(Path("runs/own"))
    assert len(rows) == 1 + 2 * 2 and set(rows["model"]) == {"m.gguf"}
    assert set(rows["score_chunk"]) == {32} and set(rows["dtype"]) == {"bfloat16"}
    code, out, err = command("study", "traces-report", "runs/own", "-o", "own")
    assert (code, err) == (0, "") and out.endswith("Wrote own.md, own.json\n")
    assert Path("own.md").read_text("utf-8").startswith("# Traces: own\n")
    assert len(json.loads(Path("own.json").read_text("utf-8"))) == 5
    before = Path("own.md").read_bytes(), Path("own.json").read_bytes()
    command("study", "traces-report", "runs/own/", "-o", "own")
    assert before == (Path("own.md").read_bytes(), Path("own.json").read_bytes())


def test_json_is_one_object(command: Command) -> None:
    code, out, _ = command(*ARGS, "--budgets", "0.5", "--score-chunk", "8", "--json")
    said = json.loads(out)
    assert code == 0 and said["score_chunk"] == 8 and said["traces"] == 1
    assert [(cell["policy"], cell["budget"]) for cell in said["cells"]] == [
        ("full", 1.0),
        ("h2o", 0.5),
        ("streaming", 0.5),
    ]
    code, out, _ = command("study", "traces-report", "runs/traces", "-o", "r", "--json")
    assert json.loads(out) == {"cells": said["cells"], "files": ["r.md", "r.json"]}


def test_a_cut_is_said(command: Command) -> None:
    command(*ARGS)
    ends = json.loads(Path("runs/traces/traces.json").read_text())["traces"]["trace"]["turn_ends"]
    code, out, _ = command(*ARGS, "--out", "cut", "--max-tokens", str(ends[1]))
    note = f"Note: trace: only the first 2 of {len(ends)} turns, {ends[1]} tokens.\n"
    assert code == 0 and out.startswith(note)


def test_an_interrupt_is_no_traceback_and_keeps_what_is_done(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, left = workers.do_trace, [3]

    def stopped(*args: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return do(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "do_trace", stopped)
    said = "What is done stays; the same command goes on from there.\nmemdecay: interrupted\n"
    assert command(*ARGS) == (130, "", said)
    assert len(gather(Path("runs/traces"))) == 2
    monkeypatch.setattr(workers, "do_trace", do)
    assert command(*ARGS)[0] == 0
    assert len(gather(Path("runs/traces"))) == 5


def test_tiers_are_part_of_a_name(command: Command) -> None:
    heads = (EvidenceHead(0, 1, ASK), EvidenceHead(1, 2, ASK))
    Profile.default().with_evidence({"recall": heads}).save(Path("heads.yaml"))
    own = (*ARGS, "--policies", "streaming,streaming-tiers", "--budgets", "0.5")
    code, out, err = command(*own, "--profile", "heads.yaml", "--out", "tiers")
    assert (code, err) == (0, "") and "streaming-tiers" in out
    assert set(gather(Path("tiers"))["policy"]) == {"full", "streaming", "streaming-tiers"}
    own_bits = (*own, "--policies", "streaming-tiers-graded,h2o-tiers-int4")
    assert command(*own_bits, "--profile", "heads.yaml", "--out", "bits")[0] == 0
    found = set(gather(Path("bits"))["policy"])
    assert found == {"full", "streaming-tiers-graded", "h2o-tiers-int4"}
    code, _, err = command(*own, "--out", "without")
    assert code == 2 and err.startswith("memdecay: policy is 'streaming-tiers', but the profile")
    code, _, err = command(*own, "--policies", "full-tiers")
    assert code == 2 and err.startswith("memdecay: policy is 'full-tiers', but full never evicts")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--budgets", "0.5,2"), "--budgets is '0.5,2', but it must be shares above 0 and up to 1"),
        (("--budgets", "half"), "--budgets is 'half'"),
        (("--policies", "h2o,"), "--policies is 'h2o,', but must be policy names"),
        (("--policies", "h3o"), "did you mean 'h2o'"),
        (("--policies", "h3o-tiers-graded"), "did you mean 'h2o'"),
        (("--profile", "no.yaml"), "--profile is 'no.yaml', but there is no such file"),
        (("--out", "trace.json"), "--out is 'trace.json', but that is a file"),
        (("--jobs", "0"), "jobs is 0, but it must be at least 1"),
        (("--score-chunk", "0"), "--score-chunk"),
        (("--max-tokens", "3"), "max_tokens is 3, but the first turn of 'trace' has"),
        (("no.json",), "trace is 'no.json', but there is no such file or folder"),
    ],
)
def test_what_is_refused(command: Command, changed: tuple[str, ...], said: str) -> None:
    code, out, err = command(*ARGS, *changed)
    assert (code, out) == (2, "") and said in err


def test_a_report_of_nothing(command: Command) -> None:
    code, _, err = command("study", "traces-report", ".", "-o", "x")
    assert code == 2 and err.startswith("memdecay: FOLDER is '.', but there are no rows under it")
    code, _, err = command("study", "traces-report", ".", "-o", "no/x")
    assert code == 2 and "there is no directory 'no'" in err
