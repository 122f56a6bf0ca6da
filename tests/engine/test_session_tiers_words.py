"""A session on a model without known heads: what was evicted is found by shared rare words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.helpers import kept
from engine.sessions import NEVER, failing, saying, system, user
from engine.tiered import outside, outside_positions, tiered
from memdecay import MemDecayError, Profile, Session

NONE = Profile.default().with_evidence({})
FACT = {"role": "user", "content": "flight flight Zq7 flight"}
ASKS = {"role": "user", "content": "which is Zq7 ?"}


def without_heads(**options: Any) -> Session:
    return tiered(profile=NONE, budget=options.pop("budget", 72), **options)


def forgotten(made: Session) -> list[int]:
    """Positions of the rare word, evicted by what is read after it."""
    made.append([system(4), user(3, 5)])
    start = made.cache.seen
    made.append([FACT])
    end = made.cache.seen
    made.append([user(60, 7)])
    made.append([user(30, 8)])
    rare = {*made.tokenizer(" Zq7")["input_ids"]} - {*made.tokenizer(words_of(made))["input_ids"]}
    places = [at for at in range(start, end) if made._ids[at] in rare]
    assert places and not {*places} & {*kept(made.cache)}
    return places


def words_of(made: Session) -> str:
    return " ".join(str(user(60, seed)["content"]) for seed in (5, 7, 8))


def test_what_shares_a_rare_word_comes_back_without_a_look() -> None:
    made = without_heads()
    places = forgotten(made)
    forwards: list[int] = []
    handle = made.model.register_forward_pre_hook(lambda *_: forwards.append(made.cache.seen))
    made.append([ASKS])
    handle.remove()
    assert {*places} <= {*kept(made.cache)}
    assert len({*forwards}) == len(forwards), "nothing is read twice"
    assert any("shared rare words" in note for note in made.report().notes)
    tiers = made.report().tiers
    assert tiers is not None and tiers.bytes["summaries"] > 0


def test_with_heads_words_are_used_only_if_asked_for() -> None:
    assert outside(tiered())._words is None
    assert outside(tiered(tiers={"words": True}))._words is not None
    both = tiered(tiers={"words": True})
    assert not any("rare words" in note for note in both.report().notes)
    forgotten(both)
    both.append([ASKS])
    with pytest.raises(MemDecayError, match="none are known for this model"):
        without_heads(tiers={"words": False})
    with pytest.raises(MemDecayError, match="words is 'yes'"):
        tiered(tiers={"words": "yes"})


def test_a_fork_and_a_loaded_session_find_the_same(tmp_path: Path) -> None:
    made = without_heads()
    forgotten(made)
    copy = made.fork()
    made.save(tmp_path / "saved")
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    before = {*kept(made.cache)}
    made.ask(ASKS["content"])
    assert {*kept(made.cache)} == before
    for one in (made, copy, loaded):
        one.append([ASKS])
    assert kept(made.cache) == kept(copy.cache) == kept(loaded.cache)
    assert outside_positions(made) == outside_positions(copy) == outside_positions(loaded)


def test_a_failed_turn_leaves_the_ids_and_what_is_found() -> None:
    made, twin = without_heads(), without_heads()
    for one in (made, twin):
        places = forgotten(one)
    ids = [*made._ids]
    for at in (0, 1, 2):
        with failing(made.model, at, RuntimeError), pytest.raises(RuntimeError, match="on purpose"):
            made.append([user(20, 9)])
        assert made._ids == ids and made._memory is not None and made._memory.ids is made._ids
    made.append([ASKS])
    assert {*places} <= {*kept(made.cache)}


def test_an_answer_asks_by_what_it_wrote() -> None:
    made = without_heads(tiers={"every": 4}, budget=80)
    places = forgotten(made)
    made.append([user(2, 11)])
    assert not {*places} & {*kept(made.cache)}
    options = saying(made, " Zq7 the Zq7 the Zq7 the Zq7 the")
    made.generate(eos_token_id=NEVER, **options)
    assert {*places} <= {*kept(made.cache)}
    assert len(made._ids) == made.cache.seen
