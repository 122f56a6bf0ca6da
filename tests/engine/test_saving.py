"""Saved sessions: restored exactly, saved whole or not at all, refused in one sentence."""

from __future__ import annotations

import json
import os
import pickletools
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.helpers import same
from engine.sessions import NEVER, assistant, content, failing, session, system, talk, tiny, user
from memdecay import MemDecayError, Profile, RegionPolicy, Session, SessionError
from memdecay.engine import saving
from memdecay.policy import get_policy, retention
from memdecay.policy.memdecay import MemDecay

PROFILE = Profile.default().with_region("notes", RegionPolicy(0.55, 0.02))
SETTINGS = {
    "default": {},
    "scaled": {"policy": get_policy("memdecay-paper", refresh_threshold=retention.Scaled(1.5))},
    "fixed": {"policy": get_policy("memdecay-paper", refresh_threshold=0.02, init="zero")},
    "profile": {"profile": PROFILE},
    "aligned": {"align": "region", "clock": "tokens"},
    "sparse": {"observe_every": 3, "window": 5, "page_size": 8, "prefill_chunk": 7},
    "never": {"observe_every": 0},
    "random": {"policy": get_policy("random", seed=5)},
    "streaming": {"policy": "streaming"},
    "h2o": {"policy": "h2o", "clock": "tokens"},
    "tova": {"policy": "tova"},
    "snapkv": {"policy": "snapkv"},
    "observation_masking": {"policy": "observation_masking", "retrievers": ["search"]},
    "free": {"budget": None},
    "full": {"budget": None, "policy": "full"},
    "sliding": {"budget": None, "name": "gemma3"},
    "all_sliding": {"name": "mistral_sliding"},
}


def begin(template="qwen", **options):
    """A session in the middle of a conversation, with evictions and an observation held."""
    made = session(template=template, **{"budget": 72, **options})
    made.append(talk())
    made.generate(max_new_tokens=5, eos_token_id=NEVER)
    made.pin(region="plan")
    made.append([user(12, 3)], pin=True)
    return made


def go_on(made):
    """What a session does next, down to what it keeps."""
    said = []
    for turn in range(3):
        said.append(made.generate(max_new_tokens=9, eos_token_id=NEVER))
        result = made.append([user(9, turn), assistant(4, turn)], score=True)
        said.append((result.tokens, result.spans, result.scores.nll.tolist()))
    return said, made.report(), content(made), made.conversation.state_dict()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loaded_session_goes_on_exactly_as_the_saved_one(name, tmp_path):
    made = begin(**SETTINGS[name])
    made.save(tmp_path / "one")
    first, second = (Session.load(tmp_path / "one", made.model, made.tokenizer) for _ in range(2))
    for loaded in (first, second):
        assert loaded.report() == made.report()
        assert same(content(loaded), content(made))
        assert loaded.conversation.state_dict() == made.conversation.state_dict()
        assert loaded.cache.policy == made.cache.policy
        assert loaded.cache.profile == made.cache.profile
        assert loaded.prefill_chunk == made.prefill_chunk
    go_on(first)
    assert second.report() == made.report() and same(content(second), content(made))
    expected, actual = go_on(made), go_on(second)
    assert expected[0] == actual[0] and expected[1] == actual[1] and expected[3] == actual[3]
    assert same(expected[2], actual[2])
    if made.cache.budget is not None:
        assert expected[1].evicted_tokens > 50


def test_a_failure_after_loading_is_undone_like_before(tmp_path):
    made = begin(align="region")
    made.save(tmp_path / "one")
    loaded = Session.load(tmp_path / "one", made.model, made.tokenizer)
    for one in (made, loaded):
        with failing(one.model, 3, RuntimeError), pytest.raises(RuntimeError):
            one.generate(max_new_tokens=9)
        one.append([user(30, 4)])
    assert same(content(loaded), content(made)) and loaded.cache.ledgers[0].starts
    assert loaded.cache.ledgers[0].starts == made.cache.ledgers[0].starts


@pytest.mark.parametrize("when", ["new", "reset", "pinned"])
def test_empty_sessions_are_saved_too(when, tmp_path):
    made = session(budget=64)
    if when == "reset":
        made.append([user()])
        made.reset()
    if when == "pinned":
        made.pin(region="plan")
    made.save(tmp_path / "one")
    loaded = Session.load(tmp_path / "one", made.model, made.tokenizer)
    assert loaded.report() == made.report() and loaded._pinned_regions == made._pinned_regions
    for one in (made, loaded):
        one.append([system(), user(60)])
        one.generate(max_new_tokens=3)
    assert same(content(made), content(loaded))


def test_reset_after_loading_starts_anew_with_the_same_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    made = begin(tools=tools, budget=200)
    made.save(tmp_path / "one")
    loaded = Session.load(tmp_path / "one", made.model, made.tokenizer)
    for one in (made, loaded):
        one.reset()
        one.append([user(5)])
    assert loaded._ids == made._ids and loaded.report() == made.report()
    assert "search" in made.tokenizer.decode(made._ids)


def test_bfloat16(tmp_path):
    model, tokenizer = tiny()
    made = Session(model.to(torch.bfloat16), tokenizer, budget=64, page_size=4)
    made.append([user(60)])
    made.save(tmp_path / "one")
    loaded = Session.load(tmp_path / "one", model, tokenizer)
    assert same(content(loaded), content(made)) and loaded.ask("x") == made.ask("x")


# Saving again, and being interrupted


def test_saving_again_replaces_what_was_there(tmp_path):
    made = begin()
    for _ in range(3):
        made.append([user(9)])
        made.save(tmp_path / "one")
    assert len(list((tmp_path / "one").iterdir())) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]
    loaded = Session.load(tmp_path / "one", made.model, made.tokenizer)
    assert loaded.report() == made.report()
    (tmp_path / "empty").mkdir()
    made.save(tmp_path / "empty")
    made.save(str(tmp_path / "deep" / "er"))
    assert Session.load(tmp_path / "deep" / "er", made.model, made.tokenizer)


PLACES = {
    "tensors": ("safetensors.torch", "save_file"),
    "digest": ("memdecay.engine.saving", "_sha256"),
    "json": ("pathlib.Path", "write_text"),
    "rename": ("pathlib.Path", "replace"),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_save_leaves_the_old_session_or_nothing(
    place, again, error, tmp_path, monkeypatch
):
    made = begin()
    folder = tmp_path / "one"
    if again:
        made.save(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    twin = made.fork()
    made.append([user(9)])

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(".".join(PLACES[place]), fail)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else SessionError
    with pytest.raises(expected) as caught:
        made.save(folder)
    monkeypatch.undo()
    if expected is SessionError:
        assert str(caught.value).endswith("No space left on device.")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert folder.exists() == again
    if again:
        loaded = Session.load(folder, made.model, made.tokenizer)
        assert same(content(loaded), content(twin))
    made.save(folder)
    assert Session.load(folder, made.model, made.tokenizer).report() == made.report()


def test_a_killed_save_leaves_the_old_session(tmp_path):
    folder = tmp_path / "one"
    made = begin()
    made.save(folder)
    code = f"""
        import os, sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from engine.test_saving import begin, user
        made = begin()
        made.append([user(9)])
        pathlib.Path.replace = lambda *args: os._exit(9)
        made.save({str(folder)!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.returncode == 9, done.stderr
    assert len(list(folder.iterdir())) == 4
    loaded = Session.load(folder, made.model, made.tokenizer)
    assert same(content(loaded), content(made)) and loaded.report() == made.report()
    made.save(folder)
    assert len(list(folder.iterdir())) == 2


# What cannot be loaded


@pytest.fixture
def saved(tmp_path):
    made = begin()
    made.save(tmp_path / "one")
    return made, tmp_path / "one"


def refused(made, folder, message, *, model=None, tokenizer=None):
    with pytest.raises(SessionError, match=message) as caught:
        Session.load(folder, model or made.model, tokenizer or made.tokenizer)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and len(sentence) < 500
    assert str(folder) in sentence


def rewrite(folder, change, *, seal=True):
    file = folder / "session.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    if seal:
        document["sha256"] = saving._digest(document["session"])
    file.write_text(json.dumps(document), encoding="utf-8")


def test_missing_sessions(saved, tmp_path):
    made, folder = saved
    refused(made, tmp_path / "none", "no saved session in it")
    refused(made, tmp_path, "no saved session in it")
    refused(made, folder / "session.json", "no saved session in it")


@pytest.mark.parametrize("folder", ["", None, 3, b"x", "a\0b"])
def test_what_is_not_a_path(folder):
    made = session()
    for use in (made.save, lambda path: Session.load(path, made.model, made.tokenizer)):
        with pytest.raises(SessionError, match="must be the path of a folder"):
            use(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", '{"a": 1}', "\x00\x01", "[" * 100_000]
)
def test_foreign_and_damaged_json(saved, text):
    made, folder = saved
    (folder / "session.json").write_text(text, encoding="utf-8")
    refused(made, folder, "is damaged|is not a saved session")


def test_json_that_is_not_text(saved):
    made, folder = saved
    (folder / "session.json").write_bytes(b"\xff\xfe\x00garbage\x80")
    refused(made, folder, "is damaged")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_files(saved, share):
    made, folder = saved
    for file in folder.iterdir():
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])
        refused(made, folder, "is damaged")
        file.write_bytes(data)
    Session.load(folder, made.model, made.tokenizer)


def test_damaged_and_missing_tensors(saved):
    made, folder = saved
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    refused(made, folder, "is damaged: .* not the file that was saved")
    file.unlink()
    refused(made, folder, "is damaged: .* is missing")


def test_a_policy_with_other_columns_is_another_version_of_it(tmp_path, monkeypatch):
    model, tokenizer = tiny("llama", "qwen")
    session = Session(model, tokenizer, budget=80, policy="memdecay")
    session.append([{"role": "user", "content": "Which crew is free on Friday?"}])
    session.save(tmp_path)
    session.close()
    monkeypatch.setattr(MemDecay, "columns", {**MemDecay.columns, "later": 0.0})
    with pytest.raises(SessionError, match="'memdecay' has a column 'later' here") as caught:
        Session.load(tmp_path, model, tokenizer)
    assert "\n" not in str(caught.value) and "damaged" not in str(caught.value)


def test_a_changed_number_is_noticed(saved):
    made, folder = saved
    rewrite(folder, lambda d: d["session"]["counters"].update(steps=7), seal=False)
    refused(made, folder, "was changed after saving")


@pytest.mark.parametrize("version", [0, 4, "1", None, {}])
def test_another_format(saved, version):
    made, folder = saved
    rewrite(folder, lambda d: d.update(format=version))
    refused(made, folder, "has format .* but this memdecay reads formats 1 to 3")


def test_another_model(saved):
    made, folder = saved
    refused(made, folder, "belongs to another model.*gemma3", model=tiny("gemma3")[0])
    other = tiny()[0]
    other.model.layers[2].mlp.up_proj.weight.data.mul_(1.001)
    refused(made, folder, "belongs to another model.*weights", model=other)
    refused(made, folder, "another model.*bfloat16", model=tiny()[0].to(torch.bfloat16))
    other = tiny()[0]
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    refused(made, folder, "another model.*positions", model=other)


def test_another_tokenizer_or_template(saved):
    made, folder = saved
    _, other = tiny(template="chatml")
    refused(made, folder, "another chat template", tokenizer=other)
    _, other = tiny(template="qwen")
    other.add_tokens(["<new>"])
    refused(made, folder, "another tokenizer", tokenizer=other)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("ledgers"),
        lambda s: s["settings"].pop("budget"),
        lambda s: s["settings"].update(budget=-1),
        lambda s: s["settings"].update(clock="minutes"),
        lambda s: s["settings"].update(surprise=1),
        lambda s: s.update(policy={"name": "unknown"}),
        lambda s: s.update(policy=None),
        lambda s: s.update(profile={"x": {"nonsense": 1}}),
        lambda s: s.update(conversation={}),
        lambda s: s["conversation"].update(messages=[{"role": "nobody"}]),
        lambda s: s["tables"][0].update(lengths=[3]),
        lambda s: s.update(tables=[]),
        lambda s: s.update(prefill_chunk=0),
        lambda s: s.update(spans_of={"x": [1]}),
        lambda s: s.update(counters=[]),
    ],
)
def test_a_session_that_does_not_fit_together(saved, change):
    made, folder = saved
    rewrite(folder, lambda document: change(document["session"]))
    refused(made, folder, "is damaged|cannot be restored")


def test_tensors_that_are_not_those_of_the_session(saved, tmp_path):
    made, folder = saved
    file = next(folder.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    for change in ({"pool.0": torch.zeros(3)}, {"ledger.0.position": torch.zeros(1)}, None):
        other = dict(tensors) if change else {}
        other.update(change or {"x": torch.zeros(1)})
        safetensors.torch.save_file(other, file)
        rewrite(folder, lambda d: d["tensors"].update(sha256=saving._sha256(file)))
        refused(made, folder, "is damaged")


def test_a_tensors_file_elsewhere_is_not_followed(saved, tmp_path):
    made, folder = saved
    file = next(folder.glob("*.safetensors"))
    shutil.move(file, tmp_path / file.name)
    rewrite(folder, lambda d: d["tensors"].update(file=f"../{file.name}"))
    refused(made, folder, "is damaged")


def test_an_unsupported_model_is_refused_by_name(saved):
    made, folder = saved
    with pytest.raises(MemDecayError, match="model is a Linear"):
        Session.load(folder, torch.nn.Linear(1, 1), made.tokenizer)


# What cannot be saved to


def test_files_and_foreign_folders_in_the_way(tmp_path):
    made = session()
    made.append([user()])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        ("file", "holds something else"),
        ("folder", "holds something else"),
        ("file/below", "cannot be saved to"),
    ):
        with pytest.raises(SessionError, match=message) as caught:
            made.save(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"
    made.generate(max_new_tokens=1)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_an_unwritable_folder(tmp_path):
    made = session()
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SessionError, match="cannot be saved"):
            made.save(tmp_path / "one")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    made = session()

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(SessionError, match=r"cannot be saved to .*: Permission denied\."):
        made.save(tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_nothing_is_pickled(saved):
    folder = saved[1]
    for file in folder.iterdir():
        with pytest.raises(Exception):  # noqa: B017
            list(pickletools.genops(file.read_bytes()))
    assert {re.sub(r"-\w+", "", file.name) for file in folder.iterdir()} == {
        "session.json",
        "session.safetensors",
    }
    source = Path(saving.__file__).parent
    for path in source.glob("*.py"):
        code = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) pickle|torch\.(save|load)\(", code, re.M), path
