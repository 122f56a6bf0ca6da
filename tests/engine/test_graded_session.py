"""Sessions whose cache keeps most tokens at fewer bits: undone, saved and read again."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.sessions import NEVER, failing, session, system, talk, user
from memdecay import Session, SessionError
from memdecay.engine import saving
from memdecay.engine import session as session_module
from memdecay.engine.cache import MemDecayCache


@pytest.fixture(params=[4, 8])
def graded(request, monkeypatch):
    """Let sessions have a graded cache."""
    made = functools.partial(MemDecayCache, full_precision=40, group_size=8, bits=request.param)
    monkeypatch.setattr(session_module, "MemDecayCache", made)


def begin():
    made = session(template="qwen", budget=90, prefill_chunk=6)
    made.append([system(4), *talk()[1:]])
    made.generate(max_new_tokens=5, eos_token_id=NEVER)
    made.append([user(12, 3)])
    return made


def state(made):
    _, tensors = saving._session_state(made)
    return tensors


@pytest.mark.usefixtures("graded")
def test_a_saved_session_goes_on_as_if_it_had_not_been(tmp_path):
    made = begin()
    assert made.cache.coded_tokens > 8
    made.save(tmp_path / "one")
    again = Session.load(tmp_path / "one", made.model, made.tokenizer)
    assert again.cache.coded_tokens == made.cache.coded_tokens
    assert again.cache.graded.sizes == made.cache.graded.sizes
    for one in (made, again):
        one.append([user(10, 4)])
    first, second = (one.generate(max_new_tokens=12, eos_token_id=NEVER) for one in (made, again))
    assert first.ids == second.ids
    mine, theirs = state(made), state(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.usefixtures("graded")
def test_a_damaged_session_is_refused(tmp_path, monkeypatch):
    made = begin()
    own = type(made.cache.pools[0]).saved

    def damaged(pool, width):
        return {**own(pool, width), ".sizes": torch.tensor([1, 2])}

    monkeypatch.setattr(type(made.cache.pools[0]), "saved", damaged)
    made.save(tmp_path / "one")
    with pytest.raises(SessionError, match="is damaged"):
        Session.load(tmp_path / "one", made.model, made.tokenizer)


@pytest.mark.usefixtures("graded")
def test_a_failed_answer_leaves_the_session_as_it_was():
    made, other = begin(), begin()
    kept = set(made.cache.ledgers[0]["position"].tolist())
    with failing(made.model, 8, RuntimeError), pytest.raises(RuntimeError):
        made.generate(max_new_tokens=30, eos_token_id=NEVER)
    assert set(made.cache.ledgers[0]["position"].tolist()) <= kept
    assert made.cache.full_tokens <= 40 and made.cache.seen == other.cache.seen
    made.generate(max_new_tokens=5, eos_token_id=NEVER)
