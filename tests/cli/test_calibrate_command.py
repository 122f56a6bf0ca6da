"""`memdecay calibrate` with a tiny model: what it writes, says, refuses, and goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memdecay.engine
from engine.sessions import assistant, system, tiny, user, words
from memdecay.calibration import measure as measuring
from memdecay.calibration.evidence import COUNTS
from memdecay.cli import calibrate
from memdecay.evidence import READ, EvidenceHead
from memdecay.regions import Profile
from memdecay.study import watching

Command = Callable[..., tuple[int, str, str]]

SCENARIO = Path(__file__).with_name("calibrate_scenario.yaml")


def trace(seed: int, turns: int = 3) -> list[dict[str, Any]]:
    """A conversation of four regions with some decode steps."""
    messages = [system(10, seed)]
    for turn in range(turns):
        place = 10 * seed + 3 * turn
        messages += [user(8, place), assistant(7, place + 1, region="scratchpad")]
        messages += [user(9, place + 2, region="tool_out"), assistant(5, place + 3)]
    return messages


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny("llama")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Any) -> Path:
    """A working directory with three traces, and a tiny model for every name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    for seed in (1, 2, 3):
        (tmp_path / "traces" / f"t{seed}.json").write_text(json.dumps(trace(seed)))
    monkeypatch.setattr(memdecay.engine, "load_model", lambda name, dtype="float32": small)
    return tmp_path


@pytest.mark.usefixtures("place")
class TestWhatItWrites:
    def test_a_profile_that_every_command_takes(self, command: Command, place: Path) -> None:
        code, out, err = command("calibrate", "traces", "-o", "p.yaml", "--figure", "f.svg")
        assert (code, err) == (0, "")
        made, default = Profile.load("p.yaml"), Profile.default()
        for name in ("system", "user", "tool_out", "scratchpad"):
            assert made.provenance["regions"][name]["source"] == "measured"
            assert made.regions[name].decay_rate != default.regions[name].decay_rate
            assert made.regions[name].base_priority == default.regions[name].base_priority
        assert made.regions["system"].pinned
        assert made.regions["plan"] == default.regions["plan"]
        assert made.provenance["traces"] == ["t1", "t2", "t3"] == made.provenance["clusters"]
        assert made.provenance["burst"] == 48 and made.provenance["seed"] == 0
        assert made.provenance["versions"]["torch"] and "commit" in made.provenance
        for word in ("half-life", "95% interval", "R²", "observations", "measured", "default"):
            assert word in out
        assert "plan does not occur, so it keeps its half-life of 120 steps" in out
        assert "The profile is in p.yaml, the curves are drawn in f.svg." in out
        assert sorted(os.listdir(place)) == ["f.svg", "p.curves", "p.yaml", "traces"]
        assert sorted(os.listdir(place / "p.curves")) == [f"t{n}.parquet" for n in (1, 2, 3)]

    def test_json_is_one_object(self, command: Command) -> None:
        code, out, _ = command("calibrate", "traces", "--json", "--seed", "5", "--burst", "9")
        assert code == 0
        result = json.loads(out)
        assert {"model", "versions", "commit", "notes", "regions"} <= set(result)
        assert result["profile"] == "profile.yaml" and result["figure"] is None
        assert (result["seed"], result["burst"], result["clock"]) == (5, 9, "steps")
        user = result["regions"]["user"]
        assert user["source"] == "measured" and user["low"] is not None
        assert user["observations"] > 100 and user["clusters"] == 3
        plan = result["regions"]["plan"]
        assert plan["source"] == "default" and plan["half_life"] is None
        assert plan["profile_half_life"] == 120 and plan["status"] in result["notes"]
        rate = Profile.load("profile.yaml").regions["user"].half_life
        assert rate == pytest.approx(float(user["profile_half_life"]), rel=1e-3)

    def test_a_base_profile_gives_priorities_pins_and_defaults(self, command: Command) -> None:
        Path("base.yaml").write_text(
            "user: {base_priority: 0.9, half_life: 7, pinned: true}\n"
            "retrieval: {base_priority: 0.1, half_life: 11}\n"
        )
        code, _, _ = command("calibrate", "traces", "--burst", "9", "--profile", "base.yaml")
        made = Profile.load("profile.yaml").regions
        assert code == 0 and made["user"].pinned and made["user"].base_priority == 0.9
        assert made["user"].half_life != 7 and made["retrieval"].half_life == pytest.approx(11)

    def test_episodes_are_clusters_by_scenario(self, command: Command) -> None:
        code, out, _ = command("calibrate", str(SCENARIO), "--burst", "6", "--json")
        assert code == 0
        result = json.loads(out)
        assert result["clusters"] == ["example"]
        assert result["traces"] == [f"short-example-{n}" for n in range(3)]
        assert "user occurs in one cluster only, so it has no interval" in result["notes"]

    def test_long_traces_are_cut_between_turns(self, command: Command) -> None:
        code, out, _ = command("calibrate", "traces/t1.json", "--json", "--max-tokens", "150")
        assert code == 0
        [note] = [note for note in json.loads(out)["notes"] if "t1" in note]
        assert note.startswith("t1: only the first ") and "150 tokens at most" in note

    def test_what_is_not_a_trace_in_a_folder_is_left_out(self, command: Command) -> None:
        Path("traces/MANIFEST.json").write_text('[{"id": "t1"}]')
        code, out, _ = command("calibrate", "traces", "--burst", "9", "--json")
        assert code == 0
        notes = json.loads(out)["notes"]
        assert any("Left out" in note and "MANIFEST.json" in note for note in notes)


@pytest.mark.usefixtures("place")
class TestHeads:
    def test_episodes_give_heads_and_how_good_they_are(self, command: Command) -> None:
        other = SCENARIO.read_text().replace("name: example", "name: second")
        Path("second.yaml").write_text(other)
        args = ("calibrate", str(SCENARIO), "second.yaml", "--burst", "6", "-o", "p.yaml")
        code, out, _ = command(*args)
        assert code == 0 and "Evidence heads, chosen on 6 episodes" in out
        assert "those left out" in out
        assert len(os.listdir("p.curves/heads")) == 6
        code, out, _ = command(*args, "--json")
        result = json.loads(out)
        made, found = Profile.load("p.yaml"), result["evidence"]
        assert set(made.evidence) == set(found["heads"]) == {*COUNTS, "recall"}
        assert 0 < found["mrr_held_out"] <= 1 and 0 < found["mrr"] <= 1
        assert found["questions"] == 6 * 3  # those on pinned text are not asked
        assert all(len(made.evidence[use]) == count for use, count in found["heads"].items())
        for use in COUNTS:
            assert 0 < found["auc_held_out"][use] <= 1 and 0.5 < found["auc"][use] <= 1
        assert found["episodes"] == 6 and found["clusters"] == ["example", "second"]
        about = {key: value for key, value in found.items() if key != "heads"}
        assert made.provenance["evidence"] == about
        assert not any("vidence heads" in note for note in result["notes"])

    def test_one_scenario_says_that_nothing_was_left_out(self, command: Command) -> None:
        code, out, _ = command("calibrate", str(SCENARIO), "--burst", "6")
        assert code == 0 and "nothing is left out to see whether" in " ".join(out.split())

    def test_nobody_looks_where_nobody_should(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "watch_all", None)  # calling it would fail
        own = EvidenceHead(0, 1, READ, weight=1.0, mean=-3.0, std=1.0)
        about = {"known_for": "tiny"}
        base = Profile.default().with_evidence({"read": (own,)})
        base.with_provenance({"evidence": about}).save("base.yaml")
        for source, options, said in (
            ("traces", (), True),
            ("traces", ("--no-heads",), False),
            (str(SCENARIO), ("--no-heads",), False),
        ):
            args = ("calibrate", source, "--burst", "9", "--json", *options)
            code, out, _ = command(*args)
            result = json.loads(out)
            assert code == 0 and result["evidence"] is None
            assert not Profile.load("profile.yaml").evidence_given
            notes = [note for note in result["notes"] if "vidence heads" in note]
            assert len(notes) == said
            if said:
                assert "they need episodes with known answers" in notes[0]
            assert command(*args, "--profile", "base.yaml")[0] == 0
            made = Profile.load("profile.yaml")
            assert dict(made.evidence) == {"read": (own,)}
            assert made.provenance["evidence"] == about

    def test_what_is_cut_has_no_say(self, command: Command) -> None:
        args = ("calibrate", str(SCENARIO), "--burst", "9", "--json", "--max-tokens", "260")
        code, out, _ = command(*args)
        result = json.loads(out)
        assert code == 0 and result["evidence"] is None
        [note] = [note for note in result["notes"] if "evidence heads are not chosen" in note]
        assert "cut by --max-tokens" in note and "short-example-0" in note

    def test_episodes_whose_facts_do_not_count_are_left_out(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "UNREAD", 10_000)
        code, out, _ = command("calibrate", str(SCENARIO), "--burst", "6", "--json")
        result = json.loads(out)
        assert code == 0 and result["evidence"] is None
        assert any("no fact is among the tokens that count" in note for note in result["notes"])


@pytest.mark.usefixtures("place")
class TestGoingOn:
    def test_an_interrupt_keeps_what_was_watched(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        once = ("calibrate", str(SCENARIO), "--burst", "6", "-o")
        assert command(*once, "whole.yaml")[0] == 0
        watch, seen = watching.watch, []

        def until(model: Any, tokenizer: Any, episode: Any, **options: Any) -> Any:
            if seen == ["example-0"]:
                seen.append("stop")
                raise KeyboardInterrupt
            seen.append(episode.name)
            return watch(model, tokenizer, episode, **options)

        monkeypatch.setattr(watching, "watch", until)
        assert command(*once, "parts.yaml")[0] == 130
        assert os.listdir("parts.curves/heads") == ["short-example-0.safetensors"]
        assert not Path("parts.yaml").exists()
        assert command(*once, "parts.yaml")[0] == 0
        assert seen == ["example-0", "stop", "example-1", "example-2"]
        assert Path("parts.yaml").read_text() == Path("whole.yaml").read_text()

    def test_an_interrupt_keeps_what_was_measured(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        once = ("calibrate", "traces", "--burst", "9", "-o")
        assert command(*once, "whole.yaml")[0] == 0
        play, played = measuring.play, []

        def until(model: Any, tokenizer: Any, script: Any, curves: Any, **options: Any) -> Any:
            if played:
                raise KeyboardInterrupt
            played.append(script.name)
            return play(model, tokenizer, script, curves, **options)

        monkeypatch.setattr(measuring, "play", until)
        code, _, err = command(*once, "parts.yaml")
        assert (code, err) == (130, "memdecay: interrupted\n")
        assert os.listdir("parts.curves") == ["t1.parquet"] and not Path("parts.yaml").exists()
        monkeypatch.setattr(measuring, "play", play)
        assert command(*once, "parts.yaml")[0] == 0
        assert Path("parts.yaml").read_text() == Path("whole.yaml").read_text()

    def test_curves_of_another_burst_are_refused(self, command: Command) -> None:
        assert command("calibrate", "traces", "--work", "w", "--burst", "9")[0] == 0
        code, _, err = command("calibrate", "traces", "--work", "w", "--burst", "8")
        assert code == 2
        assert err == (
            "memdecay: 'w/t1.parquet' was measured with burst 9, not 8; measure into another "
            "folder, or remove it.\n"
        )


@pytest.mark.usefixtures("here", "no_model")
class TestMistakes:
    @pytest.mark.parametrize(
        ("args", "sentence"),
        [
            (["none.json"], "trace is 'none.json', but there is no such file or folder"),
            (["trace.json", "trace.json"], "Two traces are named 'trace'"),
            (["trace.json", "-o", "no/p.yaml"], "--output is 'no/p.yaml', but there is no"),
            (["trace.json", "--figure", "no/f.svg"], "--figure is 'no/f.svg', but there is no"),
            (["trace.json", "--figure", "f.gif"], "--figure is 'f.gif', but its name must end in"),
            (["trace.json", "--profile", "x.yaml"], "--profile is 'x.yaml', but there is no"),
            (["trace.json", "--burst", "-1"], "Invalid value for '--burst'"),
            (["empty"], "The folder 'empty' has no trace (no .json, .jsonl, .traj file)."),
            (["broken.yaml"], "The scenario 'broken.yaml' is not usable"),
            (["silent.json"], "The trace 'silent' has no labels: all of its text is of the region "
                              "user"),
            ([], "Missing argument"),
        ],
    )  # fmt: skip
    def test_are_one_sentence_before_any_work(
        self, command: Command, here: Path, args: list[str], sentence: str
    ) -> None:
        (here / "empty").mkdir()
        (here / "broken.yaml").write_text("name: broken\n")
        (here / "silent.json").write_text(json.dumps([user(3), user(4)]))
        before = sorted(os.listdir(here))
        code, out, err = command("calibrate", *args)
        assert (code, out) == (2, "") and sentence in err
        assert err.startswith("memdecay: ") and err.count("\n") == 1
        assert sorted(os.listdir(here)) == before


@pytest.mark.usefixtures("place")
class TestMistakesThatNeedTheModel:
    def test_a_profile_of_another_tokenizer(
        self, command: Command, monkeypatch: pytest.MonkeyPatch, small: Any
    ) -> None:
        assert command("calibrate", "traces", "--burst", "9", "-o", "p.yaml")[0] == 0
        model, tokenizer = tiny("llama")
        tokenizer.add_tokens(["<new>"])
        monkeypatch.setattr(memdecay.engine, "load_model", lambda *_: (model, tokenizer))
        for args in (
            ("run", "traces/t1.json", "--profile", "p.yaml"),
            ("calibrate", "traces", "--profile", "p.yaml", "-o", "q.yaml"),
        ):
            code, out, err = command(*args)
            assert (code, out) == (2, "")
            assert err.startswith("memdecay: The profile was measured with another tokenizer")
            assert err.count("\n") == 1 and not Path("q.yaml").exists()

    def test_a_first_turn_that_is_too_long(self, command: Command) -> None:
        code, _, err = command("calibrate", "traces", "--max-tokens", "5")
        assert code == 2 and "--max-tokens is 5, but the first turn of 't1' has" in err

    def test_too_little_for_any_region(self, command: Command) -> None:
        Path("tiny.json").write_text(json.dumps([system(2), {"role": "user", "content": words(2)}]))
        code, _, err = command("calibrate", "tiny.json", "--burst", "3")
        assert code == 2
        assert err.startswith("memdecay: No region has enough data: 3 decode steps were observed")
        assert not Path("profile.yaml").exists()


def test_the_example_in_the_help_parses(
    command: Command, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """It is run in full on SmolLM2 for docs/calibration.md; here it is cut short at the model."""

    def stop(name: str, dtype: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memdecay.engine, "load_model", stop)
    code, out, _ = command("calibrate", "--help")
    assert code == 0 and calibrate.EXAMPLE.split(" --")[0] in " ".join(out.split())
    assert command(*calibrate.EXAMPLE.split()[1:])[0] == 130
