"""The commands with sessions of words: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memdecay.engine
import memdecay.prompt
from memdecay.cli import _terminal, demo, doctor, label, policies, run
from memdecay.policy import DEFAULT_POLICY, available
from memdecay.provenance import versions

Command = Callable[..., tuple[int, str, str]]
FOUR = ["full", "memdecay-heads", DEFAULT_POLICY, "streaming"]


@pytest.mark.usefixtures("fake_engine")
class TestDemo:
    def test_json_is_one_object_with_the_promised_fields(
        self, command: Command, here: Path
    ) -> None:
        code, out, _ = command("demo", "--json")
        assert code == 0
        result = json.loads(out)
        assert list(dict.fromkeys(a["policy"] for a in result["answers"])) == FOUR
        assert len(result["answers"]) == 20
        for answer in result["answers"]:
            assert {"policy", "region", "gold", "answer", "correct"} <= set(answer)
        assert result["budget_tokens"] == int(0.25 * result["seen_tokens"])
        peaks = result["peak_resident_tokens"]
        assert peaks["full"] == result["seen_tokens"]
        assert peaks[DEFAULT_POLICY] <= result["budget_tokens"] >= peaks["streaming"]
        assert result["versions"]["torch"] and result["seed"] == 0 and "commit" in result
        assert (here / result["html"]).is_file()

    def test_the_pinned_fact_is_right_and_the_streamed_one_wrong(
        self, command: Command, here: Path
    ) -> None:
        _, out, _ = command("demo", "--json", "--html", "x.html")
        system = {a["policy"]: a["correct"] for a in json.loads(out)["answers"]
                  if a["where"] == "system text"}  # fmt: skip
        assert system == {policy: policy != "streaming" for policy in FOUR}
        assert set(os.listdir(here)) == {"x.html", "trace.json"}

    def test_people_see_answers_bars_and_peaks(self, command: Command, here: Path) -> None:
        code, out, _ = command("demo", "--budget", "200")
        assert code == 0
        for word in ("system text", "Marta Vance", "Kept tokens by region", "200", "MB", "5 of 5"):
            assert word in out
        assert "demo.html" in out and (here / "demo.html").is_file()

    def test_the_page_has_all_four(self, command: Command, here: Path) -> None:
        command("demo")
        page = (here / "demo.html").read_text()
        for policy in FOUR:
            assert f'"policy":"{policy}","summary"' in page
            # The page is about the default policy; the others stand beside it.
            view = page[page.index(f'"policy":"{policy}","summary"') :]
            assert (
                re.search(r'"main":(true|false)', view)[1] == str(policy == DEFAULT_POLICY).lower()
            )
        assert '"gold":"Marta Vance"' in page


@pytest.mark.usefixtures("fake_engine")
class TestRun:
    def test_json_is_one_object_with_the_promised_fields(
        self, command: Command, here: Path
    ) -> None:
        code, out, _ = command(
            "run", "trace.json", "--budget", "60", "--compare", "streaming,full", "--json"
        )
        assert code == 0
        result = json.loads(out)
        assert result["model"] == "smollm2" and result["policy"] == DEFAULT_POLICY
        assert result["budget_tokens"] == 60
        assert result["peak_resident_tokens"] <= 60 < result["seen_tokens"]
        assert [turn["index"] for turn in result["turns"]] == [0, 1, 2]
        for turn in result["turns"]:
            assert turn["kept_total"] == sum(turn["kept_tokens"].values()) <= 60
        assert result["turns"][2]["delta_nll_per_token"] is None
        assert result["turns"][1]["delta_nll_per_token"] > 0
        assert result["turns"][1]["top1_agreement"] < 1
        assert list(result["compare"]) == ["streaming", "full"]
        for other in result["compare"].values():
            assert {
                "policy",
                "budget_tokens",
                "seen_tokens",
                "peak_resident_tokens",
                "turns",
            } <= set(other)
        full = result["compare"]["full"]
        assert full["budget_tokens"] is None and full["delta_nll_per_token"] == 0
        assert full["top1_agreement"] == 1
        assert not list(here.glob("*.html"))

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ((), ["memdecay-paper", "streaming"]),
            (("--policy", "streaming"), ["memdecay-paper"]),
            (("--compare", "none"), []),
            (("--compare", "h2o"), ["h2o"]),
        ],
    )
    def test_what_it_compares(
        self, options: tuple[str, ...], names: list[str], command: Command, here: Path
    ) -> None:
        code, out, _ = command("run", "trace.json", "--budget", "60", *options, "--json")
        assert code == 0 and list(json.loads(out)["compare"]) == names

    def test_only_the_pinned_region_differs_from_streaming(
        self, command: Command, here: Path
    ) -> None:
        _, out, _ = command(
            "run", "trace.json", "--budget", "40", "--compare", "streaming", "--json"
        )
        result = json.loads(out)
        assert result["kept_by_region"]["system"] == result["seen_by_region"]["system"]
        assert result["compare"]["streaming"]["kept_by_region"]["system"] == 0

    def test_people_see_turns_cost_and_bars(self, command: Command, here: Path) -> None:
        code, out, _ = command("run", "trace.json", "--html", "run.html")
        assert code == 0
        for word in (
            "turn",
            "Δ NLL",
            "Kept tokens by region",
            "Against the full cache",
            "run.html",
        ):
            assert word in out
        assert '"delta_nll_per_token"' in (here / "run.html").read_text()

    def test_a_share_is_of_what_is_replayed(self, command: Command, here: Path) -> None:
        _, whole, _ = command("run", "trace.json", "--budget", "50%", "--json")
        _, part, _ = command("run", "trace.json", "--budget", "50%", "--max-turns", "1", "--json")
        whole_result, part_result = json.loads(whole), json.loads(part)
        assert len(part_result["turns"]) == 1
        assert part_result["seen_tokens"] == whole_result["turns"][0]["seen_tokens"]
        assert part_result["budget_tokens"] == part_result["seen_tokens"] // 2

    def test_max_tokens_stops_before_the_turn_that_passes_it(
        self, command: Command, here: Path
    ) -> None:
        args = ("run", "trace.json", "--budget", "60", "--json", "--max-tokens")
        _, out, _ = command(*args, "999")
        ends = [turn["seen_tokens"] for turn in json.loads(out)["turns"]]
        _, out, _ = command(*args, str(ends[1]))
        assert json.loads(out)["seen_tokens"] == ends[1]
        _, out, _ = command(*args, str(ends[1] - 1))
        assert json.loads(out)["seen_tokens"] == ends[0]
        code, out, err = command(*args, "3")
        assert (code, out) == (2, "") and "--max-tokens is 3" in err

    def test_positions_past_the_trained_length_are_said_aloud(
        self, command: Command, here: Path
    ) -> None:
        long = [{"role": "user", "content": "word " * 700}, {"role": "assistant", "content": "ok"}]
        (here / "long.json").write_text(json.dumps(long))
        _, out, _ = command("run", "long.json", "--json")
        assert any("past the 600" in note for note in json.loads(out)["notes"])
        _, out, _ = command("run", "long.json")
        assert "past the 600" in out
        _, out, _ = command("run", "trace.json", "--json")
        assert json.loads(out)["notes"] == []

    def test_a_note_is_said_once(
        self, command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append = memdecay.prompt.Conversation.append

        def noting(self: object, messages: object) -> object:
            result = append(self, messages)  # type: ignore[arg-type]
            result.notes = ["odd template"]
            return result

        monkeypatch.setattr(memdecay.prompt.Conversation, "append", noting)
        _, out, _ = command("run", "trace.json", "--compare", "streaming", "--json")
        assert json.loads(out)["notes"] == ["odd template"]

    def test_who_has_no_evidence_heads_is_named(
        self, command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake: Any = memdecay.engine.Session
        report = fake.report
        for said in ("none; memdecay calibrate measures them", "8 for read, known for m", None):

            def saying(self: Any, said: str | None = said) -> Any:
                made = report(self)
                made.evidence = said if self.policy == "memdecay" else None
                return made

            monkeypatch.setattr(fake, "report", saying)
            code, out, err = command(
                *("run", "trace.json", "--policy", "memdecay-paper"),
                *("--compare", "memdecay", "--json"),
            )
            assert (code, err) == (0, "")
            result = json.loads(out)
            assert result["evidence"] is None
            assert result["compare"]["memdecay"]["evidence"] == said
            assert [note.split()[0] for note in result["notes"]] == (
                ["memdecay"] if said and said.startswith("none") else []
            )

    def test_a_trace_may_be_full_of_markup(self, command: Command, here: Path) -> None:
        trace = {"id": "[red]</script>[/nonsense]", "messages": [
            {"role": "user", "content": "[bold] </script><script>alert(1)</script>"},
            {"role": "assistant", "content": "[/]"}]}  # fmt: skip
        (here / "odd.json").write_text(json.dumps(trace))
        code, out, _ = command("run", "odd.json", "--budget", "100%", "--html", "odd.html")
        assert code == 0 and "[red]</script>[/nonsense]" in out
        assert (here / "odd.html").read_text().count("</script>") == 2


class TestPoliciesAndDoctor:
    def test_every_policy_is_listed_with_its_parameters(self, command: Command) -> None:
        code, out, _ = command("policies", "--json")
        found = {p["name"]: p for p in json.loads(out)["policies"]}
        others = [name for name in available() if name != DEFAULT_POLICY]
        assert code == 0 and list(found) == [DEFAULT_POLICY, *others]
        assert [name for name, policy in found.items() if policy["default"]] == [DEFAULT_POLICY]
        assert found["memdecay-paper"]["page_size"] == 16
        assert found["memdecay-paper"]["needs"] == ["attention", "labels"]
        assert found["memdecay-paper"]["parameters"]["smoothing"] == 0.9
        assert found["full"]["bounded"] is False
        _, out, _ = command("policies")
        assert out.split()[0] == DEFAULT_POLICY and out.count("\ndefault ") == 1
        for name, policy in found.items():
            assert name in out and policy["summary"].split()[0] in out


MODULES = {"demo": demo, "run": run, "label": label, "policies": policies, "doctor": doctor}


@pytest.mark.parametrize("name", MODULES)
def test_help_shows_an_example(name: str, command: Command) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    plain = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert f"Example: {MODULES[name].EXAMPLE}" in plain


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("name", ["demo", "run", "policies"])
def test_the_examples_run(name: str, command: Command, here: Path) -> None:
    program, *args = MODULES[name].EXAMPLE.split()
    assert program == "memdecay" and args[0] == name
    code, out, err = command(*args)
    assert code == 0 and out and not err


BAD = [
    ("demo", "--budget", "250%"),
    ("demo", "--budget", "0"),
    ("demo", "--html", "nowhere/demo.html"),
    ("demo", "--html", "."),
    ("run", "missing.json"),
    ("run", "trace.json", "--budget", "-3"),
    ("run", "trace.json", "--budget", "NaN"),
    ("run", "trace.json", "--budget", "lots"),
    ("run", "trace.json", "--policy", "memdekay"),
    ("run", "trace.json", "--compare", "streeming"),
    ("run", "trace.json", "--compare", "h2o,,tova"),
    ("run", "trace.json", "--profile", "missing.yaml"),
    ("run", "trace.json", "--clock", "minutes"),
    ("run", "trace.json", "--max-turns", "0"),
    ("run", "trace.json", "--max-tokens", "many"),
    ("run", "trace.json", "--html", "nowhere/run.html"),
    ("run", "empty.json"),
    ("run", "junk.json"),
    ("run", "role.json"),
    ("label", "missing.json"),
    ("label", "junk.json"),
    ("label", "trace.json", "--profile", "junk.json"),
    ("run",),
    ("run", "trace.json", "--bogus"),
    ("bogus",),
]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("args", BAD, ids=" ".join)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["", "json"])
def test_a_mistake_is_one_sentence_before_any_work(
    args: tuple[str, ...], flags: tuple[str, ...], command: Command, here: Path
) -> None:
    (here / "empty.json").write_text("")
    (here / "junk.json").write_text("{not json")
    (here / "role.json").write_text('[{"role": "wizard", "content": "x"}]')
    before = sorted(os.listdir(here))
    code, out, err = command(*args, *flags)
    assert code == 2 and out == ""
    assert err.startswith("memdecay: ") and err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(os.listdir(here)) == before


@pytest.mark.usefixtures("no_model")
def test_near_names_are_suggested(command: Command, here: Path) -> None:
    assert "'memdecay-paper'" in command("run", "trace.json", "--policy", "memdekay-paper")[2]
    assert "'streaming'" in command("run", "trace.json", "--compare", "streeming")[2]


@pytest.mark.usefixtures("fake_engine")
def test_an_interrupt_keeps_what_was_written(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("demo")[0] == 0
    first = (here / "demo.html").read_bytes()

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memdecay.engine, "load_model", interrupted)
    code, out, err = command("demo", "--json")
    assert (code, out) == (130, "") and err == "memdecay: interrupted\n"
    assert (here / "demo.html").read_bytes() == first


@pytest.mark.usefixtures("fake_engine")
def test_our_own_mistakes_are_not_hidden(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(memdecay.engine, "load_model", broken)
    with pytest.raises(ZeroDivisionError):
        command("demo")


@pytest.mark.usefixtures("fake_engine")
def test_what_a_library_prints_does_not_reach_the_json(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = memdecay.engine.load_model

    def chatty(name: str) -> object:
        print("loading, please wait")
        return load(name)

    monkeypatch.setattr(memdecay.engine, "load_model", chatty)
    code, out, err = command("run", "trace.json", "--json")
    assert code == 0 and json.loads(out)["policy"] == DEFAULT_POLICY
    assert "please wait" in err


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    _terminal.write_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        _terminal.write_file(path, "new \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]
    _terminal.write_file(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["page.html"]


def cli(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memdecay.cli.main", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_console_script_keeps_stdout_pure(tmp_path: Path) -> None:
    done = cli("policies", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(p["name"] for p in json.loads(done.stdout)["policies"]) == available()


def test_the_console_script_fails_in_one_sentence(tmp_path: Path) -> None:
    done = cli("run", "missing.json", "--json", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("memdecay: ") and done.stderr.count("\n") == 1
    assert "missing.json" in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    script = f"{sys.executable} -m memdecay.cli.main policies --json | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""


def test_the_version_is_the_package_version(command: Command) -> None:
    code, out, _ = command("--version")
    assert code == 0 and out == f"memdecay {versions()['memdecay']}\n"


def test_a_terminal_without_unicode_gets_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memdecay.cli.main", "run", "τ.json", "--policy", "σ"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("memdecay: policy is '?'")


def test_an_interrupted_process_exits_with_130(tmp_path: Path) -> None:
    program = (
        "import signal, threading, time, memdecay.engine\n"
        "def load_model(name):\n"
        "    signal.raise_signal(signal.SIGINT); time.sleep(60)\n"
        "memdecay.engine.load_model = load_model\n"
        "import sys; sys.argv = ['memdecay', 'demo', '--json']\n"
        "from memdecay.cli.main import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "memdecay: interrupted\n" and os.listdir(tmp_path) == []
