"""`--tiers` of the commands, with a tiny model that has heads to find pages by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memdecay.engine
from engine.sessions import tiny
from memdecay.engine import known
from memdecay.evidence import EvidenceHead
from memdecay.policy import DEFAULT_POLICY

Command = Callable[..., tuple[int, str, str]]
TIERED = f"{DEFAULT_POLICY}+tiers"


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model whose heads are known."""
    heads = tuple(EvidenceHead(*one, "read", 1.0, -4.0, 2.0) for one in ((1, 0), (2, 3)))
    found = known.Known("tiny", {"read": heads}, {})
    monkeypatch.setattr(memdecay.engine, "load_model", lambda name: tiny())
    monkeypatch.setattr(known, "known_for", lambda config: found)


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.usefixtures("tiny_engine")
def test_run_shows_the_policy_with_tiers_beside_itself(command: Command, here: Path) -> None:
    code, out, err = command(
        "run", "trace.json", "--budget", "160", "--compare", "streaming", "--tiers", "--json",
        "--html", "run.html",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result["policy"] == TIERED
    assert list(result["compare"]) == [DEFAULT_POLICY, "streaming"]
    tiers = result["tiers"]
    assert tiers["came_back"] > 0 and tiers["tokens"]["host"] > 0
    assert result["peak_resident_tokens"] <= 160
    assert all(one["tiers"] is None for one in result["compare"].values())
    data = data_of(here / "run.html")
    first, plain, _ = data["runs"]
    assert first["tiers"] == tiers and first["main"] and plain["tiers"] is None
    assert "come back" in first["summary"] and "come back" not in plain["summary"]
    strips = first["timeline"]["strips"]
    assert all(len(strip) == 8 for strip in strips)
    assert any(number == 0 for strip in strips for number in flat(strip[7])[1::2])
    assert all(len(strip) == 7 for strip in plain["timeline"]["strips"])
    assert data["footer"].startswith("memdecay run ") and " --tiers" in data["footer"]
    assert f"--policy {DEFAULT_POLICY} --compare streaming" in data["footer"]


def flat(moves: list[Any]) -> list[int]:
    """The moves of the first page of a strip that has any."""
    if moves and isinstance(moves[0], list):
        return next((one for one in moves if one), [])
    return moves


@pytest.mark.usefixtures("tiny_engine")
def test_people_see_what_is_outside(command: Command, here: Path) -> None:
    code, out, err = command("run", "trace.json", "--budget", "160", "--compare", "none", "--tiers")
    assert code == 0, err
    assert TIERED in out and "outside" in out and "back" in out
    code, out, _ = command("run", "trace.json", "--budget", "160", "--compare", "none")
    assert code == 0 and "outside" not in out


@pytest.mark.usefixtures("tiny_engine")
def test_the_demo_asks_for_a_fact_that_comes_back(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memdecay.cli import _demo_play

    whole = _demo_play.load_episode()
    short = _demo_play.Episode(whole.id, whole.messages[:4], whole.retrievers, whole.probes[:2])
    monkeypatch.setattr(_demo_play, "load_episode", lambda: short)
    monkeypatch.setattr(_demo_play, "_ANSWER_TOKENS", 4)
    code, out, err = command("demo", "--tiers", "--budget", "40%", "--json", "--html", "t.html")
    assert code == 0, err
    result = json.loads(out)
    assert [*result["tiers"]] == ["full", TIERED, DEFAULT_POLICY]
    assert result["tiers"]["full"] is result["tiers"][DEFAULT_POLICY] is None
    asked = result["asked"]
    assert asked["question"] in {probe.question for probe in short.probes}
    assert asked["came_back"] > 0 and isinstance(asked["fact"], bool)
    assert result["quantized_tokens"] == result["budget_tokens"] and result["bits"] == 4
    assert result["tiers"][TIERED]["tokens"]["quantized"] > 0
    assert result["tiers"][TIERED]["tokens"]["host"] > 0
    data = data_of(here / "t.html")
    assert data["turns"][-1]["label"].startswith("asked: ")
    assert data["turns"][-1]["end"] == result["seen_tokens"] == len(data["texts"])
    assert [run["policy"] for run in data["runs"] if run["main"]] == [TIERED]
    assert asked["question"] in data["standfirst"] and "at 4 bits" in data["standfirst"]
    assert " --tiers --quantized 40% --bits 4" in data["footer"]


@pytest.mark.usefixtures("tiny_engine")
def test_run_keeps_more_at_fewer_bits(command: Command, here: Path) -> None:
    code, out, err = command(
        "run", "trace.json", "--budget", "160", "--compare", "none", "--tiers", "--json",
        "--quantized", "60", "--bits", "8", "--html", "run.html",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert (result["quantized"], result["quantized_tokens"], result["bits"]) == ("60", 60, 8)
    tokens = result["tiers"]["tokens"]
    assert tokens["quantized"] > 0 and tokens["host"] > 0
    assert 160 < result["peak_resident_tokens"] <= 220
    data = data_of(here / "run.html")
    first = data["runs"][0]
    assert first["bits"] == 8 and "8 bits first" in first["summary"]
    assert any(1 in flat(strip[7])[1::2] for strip in first["timeline"]["strips"])
    assert " --tiers --quantized 60 --bits 8" in data["footer"]


@pytest.mark.usefixtures("tiny_engine")
def test_people_see_what_is_at_fewer_bits(command: Command, here: Path) -> None:
    asked = ("run", "trace.json", "--budget", "160", "--compare", "none", "--tiers")
    code, out, err = command(*asked, "--quantized", "all")
    assert code == 0, err
    assert "in the cache, at 4 bits" in out and "in the cache, at full precision" in out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--quantized", "25%"), "--quantized is '25%', but --tiers is not given"),
        (("--bits", "8"), "--bits is 8, but --tiers is not given"),
        (("--tiers", "--bits", "8"), "--bits is 8, but no token is at fewer bits"),
        (("--tiers", "--quantized", "9", "--bits", "5"), "--bits is 5, but must be 4 or 8."),
        (("--tiers", "--quantized", "1e3"), "--quantized is '1e3', but must be a whole number"),
        (("--tiers", "--quantized", "9", "--budget", "20"), "budget is 20 tokens at full"),
    ],
)
def test_what_cannot_be_at_fewer_bits_is_one_sentence(
    given: tuple[str, ...], said: str, command: Command, here: Path
) -> None:
    code, out, err = command("run", "trace.json", *given)
    assert (code, out) == (2, "") and err.startswith(f"memdecay: {said}") and err.count("\n") == 1


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("policy", ["full", "memdecay-heads"])
def test_a_policy_without_tiers_is_refused(policy: str, command: Command, here: Path) -> None:
    code, out, err = command("run", "trace.json", "--policy", policy, "--tiers")
    assert code == 2 and not out
    assert "--tiers is given, but policy" in " ".join(err.split())
