"""Exact copies of what is at fewer bits: where they are, when they go, and what they bring back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.graded_tiers import Followed, graded
from engine.helpers import kept
from engine.sessions import NEVER, assistant, failing, system, user
from engine.tiered import outside, outside_positions, tiered, turns
from memdecay import MemDecayError, Session, Tiers
from memdecay.engine.report import TierReport


def tiers_of(made: Session) -> TierReport:
    tiers = made.report().tiers
    assert tiers is not None
    return tiers


def coded_of(made: Session) -> list[int]:
    return sorted(made.cache.ledgers[0]["position"][: made.cache.coded_tokens].tolist())


def test_a_page_goes_up_to_the_bit_and_takes_the_place_of_its_codes() -> None:
    made = graded(tiers={"every": 0, "quantized": None}, policy="streaming")
    followed = Followed(made)
    with followed.checked():
        made.append([system(4), user(100)])
        coded, before = coded_of(made), kept(made.cache)
        page = next(p for p in outside(made).pages if {*range(4 * p, 4 * p + 4)} <= {*coded})
        exact = outside(made).store.get(page)
        made.cache.ledgers[0]["span"][: len(coded)] = 77
        back = outside(made).recall([page])
        assert back.tolist() == [*range(4 * page, 4 * page + 4)]
        assert kept(made.cache) == before and tiers_of(made).came_back == 1
        assert not {*back.tolist()} & {*coded_of(made)}
        ledger = made.cache.ledgers[0]
        slots = torch.cat([(ledger["position"] == at).nonzero().flatten() for at in back])
        for layer, pool in enumerate(made.cache.pools):
            taken = pool.take(slots)
            assert torch.equal(taken[0], exact.keys[layer])
            assert torch.equal(taken[1], exact.values[layer])
        assert ledger["span"][slots].tolist() == [77] * 4, "as the ledger knew it last"
        assert not bool(ledger["pinned"][slots].any())
        assert page not in outside(made).pages
        turns(made, 4, 4)
    assert followed.exact_returns > 4


def test_copies_make_way_for_what_is_outside() -> None:
    made = graded(tiers={"host": 90, "every": 0}, policy="streaming")
    for number in range(9):
        made.append([user(20, number)])
        tiers, gone = tiers_of(made), made.report().seen_tokens - made.cache.kept()
        assert tiers.tokens["host"] == min(gone, tiers.tokens["host"])
        assert tiers.tokens["host"] + tiers.tokens["copies"] <= 90
        if gone <= 80:
            assert tiers.lost == 0 and tiers.tokens["host"] == gone
            assert number < 4 or tiers.tokens["copies"] > 0 or gone > 60
    assert tiers.lost > 0 and tiers.tokens["host"] > 80


def test_a_copy_that_goes_is_not_a_loss() -> None:
    made = graded(tiers={"host": 40, "quantized": None, "every": 0}, record_timeline=True)
    turns(made, 3, 8)
    tiers = tiers_of(made)
    assert tiers.lost == 0 == tiers.tokens["host"] and 0 < tiers.tokens["copies"] <= 40
    assert {*kept(made.cache)} == {*range(made.report().seen_tokens)}
    moves = [tier for page in made.timeline()["pages"] for _, tier in page["moves"]]
    assert "lost" not in moves and "host" not in moves


def test_without_copies_nothing_is_kept_of_codes() -> None:
    made = graded(tiers={"quantized": None, "exact": False})
    turns(made, 3, 8)
    assert made.cache.on_lower is None and made.cache.coded_tokens
    assert not outside(made).stored and tiers_of(made).tokens["copies"] == 0


def test_copies_go_with_a_copy_of_the_session_and_with_a_reset() -> None:
    made = graded(tiers={"quantized": None})
    turns(made, 3, 8)
    copies = tiers_of(made).tokens["copies"]
    fork = made.fork()
    assert tiers_of(fork).tokens["copies"] == copies > 0
    fork.append([user(60, 3)])
    assert tiers_of(fork).tokens["copies"] != copies == tiers_of(made).tokens["copies"]
    fork.close()
    made.reset()
    assert tiers_of(made).tokens["copies"] == 0 == outside(made).stored


@pytest.mark.parametrize("exact", [None, 1, "yes"])
def test_exact_is_true_or_false(exact: Any) -> None:
    with pytest.raises(MemDecayError, match=r"exact is .*, but it must be True or False"):
        Tiers(quantized=9, exact=exact)


def test_a_copy_that_may_not_be_kept_takes_nothing_with_it() -> None:
    made = graded(tiers={"host": 0, "disk": None, "no_disk": ["user"], "page_size": 16})
    made.append([user(2), user(4, region="scratchpad"), user(60)])
    ledger = made.cache.ledgers[0]
    mine = ledger["region"] == made.cache.profile.id("user")
    position = ledger["position"]
    pages = {*(position[mine] // 16).tolist()} & {*(position[~mine] // 16).tolist()}
    page = min(pages)
    there = position // 16 == page
    others, users = position[there & ~mine].clone(), position[there & mine].clone()
    outside(made)._forgotten(0, made.cache.take(others))
    made.cache.lower(users)
    assert made.cache.coded_tokens
    assert outside(made).pages == {page: len(others)} and tiers_of(made).lost == 0


@pytest.mark.parametrize("down", [True, False])
def test_a_newest_token_that_an_undone_answer_let_go_is_not_outside(down: bool) -> None:
    options: dict[str, Any] = {"template": "mistral", "policy": "streaming", "page_size": 1}
    made = graded(tiers={"quantized": None}, **options) if down else tiered(**options)
    made.append([user(12), assistant(9), user(12)])
    assert not made.conversation.generation_prompt().ids
    newest = made.cache.seen - 1
    with failing(made.model, 95, RuntimeError), pytest.raises(RuntimeError, match="on purpose"):
        made.generate(max_new_tokens=100, eos_token_id=NEVER)
    assert newest in kept(made.cache) and newest not in coded_of(made)
    tokens = tiers_of(made).tokens
    assert newest not in outside_positions(made)
    assert sum(tokens.values()) - tokens["copies"] == made.report().seen_tokens


@pytest.mark.parametrize("tiers", [{"host": 12}, {"host": 12, "disk": 16}, {"host": 0, "disk": 8}])
def test_of_pages_that_go_at_once_none_passes_for_a_copy(tiers: dict[str, Any]) -> None:
    made = graded(tiers={"every": 0, **tiers})
    made.append([user(100)])
    room = sum(size for size in tiers.values() if size)
    made.cache.shrink(made.cache.kept() - 40)
    report = made.report()
    assert report.evicted_tokens >= 40 and not tiers_of(made).tokens["copies"]
    assert room - 4 < outside(made).tokens <= room
    assert tiers_of(made).lost >= (report.evicted_tokens - room) / 4
