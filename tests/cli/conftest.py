"""Fixtures of the command tests: a command line without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_fakes import FakeModel, FakeSession, FakeTokenizer, words

import memdecay.engine
import memdecay.prompt
from memdecay.cli.main import run_app

MESSAGES = [
    {"role": "system", "content": "You are a careful agent. The code word is heron."},
    {"role": "user", "content": "Count the boats in the harbour, please. " + "Look well. " * 8},
    {"role": "assistant", "content": "I will ask the harbour office."},
    {"role": "tool", "name": "office", "content": "There are boats: " + "one more, " * 30},
    {"role": "assistant", "content": "There are thirty boats in the harbour."},
    {"role": "user", "content": "Thank you, that is all for today."},
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one trace in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps(MESSAGES))
    return tmp_path


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of words in place of sessions of a model."""

    class Conversation:
        def __init__(self, tokenizer: FakeTokenizer, **_: Any) -> None:
            self.tokenizer = tokenizer

        def append(self, messages: Any) -> Any:
            new = [word for message in messages for word in words(message)]
            start = len(self.tokenizer.words)
            self.tokenizer.words += new
            return SimpleNamespace(ids=list(range(start, start + len(new))), notes=[])

    monkeypatch.setattr(
        memdecay.engine, "load_model", lambda name: (FakeModel(), FakeTokenizer()), raising=False
    )
    monkeypatch.setattr(memdecay.engine, "Session", FakeSession, raising=False)
    monkeypatch.setattr(memdecay.prompt, "Conversation", Conversation)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a command starts to work before it has checked what it was given."""

    def load_model(name: str) -> None:
        raise AssertionError(f"{name} was loaded before the arguments were checked")

    monkeypatch.setattr(memdecay.engine, "load_model", load_model, raising=False)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Run one command line: (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        code = run_app(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
