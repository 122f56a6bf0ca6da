"""Pins: what is pinned stays, what is released may go, what cannot fit is refused."""

from __future__ import annotations

import random
import re

import pytest

from engine.helpers import kept, same, snapshot
from engine.sessions import NEVER, assistant, session, system, user
from memdecay import BudgetError, Profile, ProfileError, RegionPolicy, SessionError


def positions(made, message):
    """Where a message is, among the kept tokens."""
    ledger = made.cache.ledgers[0]
    return set(ledger["position"][made._chosen(None, message)].tolist())


def test_a_plan_pinned_for_a_while_is_evictable_afterwards():
    made = session(budget=96, policy="streaming")
    made.append([system(4)])
    made.append([{"role": "assistant", "content": "Plan: book the flight, then it."}], pin=True)
    plan = positions(made, 1)
    assert len(plan) > 10 and made.report().kept_by_region["plan"] > 5
    made.append([user(300)])
    assert plan <= set(kept(made.cache))
    assert made.release(message=1) == len(plan)
    made.append([user(300, 2)])
    assert not plan & set(kept(made.cache))


def test_pinning_a_message_later():
    made = session(budget=96, policy="streaming")
    made.append([user(8, 1), user(8, 2)])
    chosen = positions(made, 1)
    assert made.pin(message=1) == len(chosen)
    made.append([user(300)])
    assert chosen <= set(kept(made.cache)) and made.report().pinned_tokens >= len(chosen)


def test_a_pinned_region_holds_what_comes_too_until_it_is_released():
    made = session(budget=96, policy="streaming")
    assert made.pin(region="plan") == 0
    made.append([user(20)])
    made.append([{"role": "assistant", "content": "Plan: search."}, user(200)])
    report = made.report()
    assert report.kept_by_region["plan"] == report.seen_by_region["plan"] > 0
    assert made.release(region="plan") == report.kept_by_region["plan"]
    made.append([{"role": "assistant", "content": "Plan: search."}, user(300)])
    assert made.report().kept_by_region["plan"] == 0


def test_generated_text_of_a_pinned_region_is_pinned():
    made = session(budget=96)
    made.pin(region="user")
    made.append([{"role": "user", "content": "book it"}])
    made.generate(max_new_tokens=5)
    ledger = made.cache.ledgers[0]
    assert bool(ledger["pinned"].all()) and ledger.length == made.cache.seen


def test_pinning_with_a_message_does_not_pin_the_end_of_the_answer_before():
    made = session()
    made.append([user()])
    made.generate(max_new_tokens=2, eos_token_id=NEVER)
    start = made.cache.seen
    result = made.append([user(4)], pin=True)
    ledger = made.cache.ledgers[0]
    pinned = {p - start for p in ledger["position"][ledger["pinned"]].tolist()}
    mine = {p for s in result.spans if s.message == 2 for p in range(s.start, s.end)}
    assert result.spans[0].message == 1 and pinned == mine


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_that_the_error_names_really_works(seed):
    rng = random.Random(seed)
    options = {
        "page_size": rng.choice([1, 4, 8, 16]),
        "align": rng.choice([None, "region"]),
        "prefill_chunk": rng.choice([3, 256]),
        "policy": rng.choice(["memdecay", "memdecay-paper", "streaming", "random", "h2o"]),
    }
    pinned = [system(rng.randint(1, 30)), user(rng.randint(1, 40), seed)]
    first = [user(rng.randint(1, 60), seed + 1)]

    def run(budget):
        made = session(budget=budget, **options)
        made.append(first)
        before = snapshot(made.cache)
        try:
            made.append(pinned, pin=True)
        except BudgetError:
            assert same(before, snapshot(made.cache)) and len(made.conversation.messages) == 1
            raise
        return made

    with pytest.raises(BudgetError) as caught:
        run(max(options["page_size"], 16))
    number, need = map(
        int, re.findall(r"but (\d+) tokens.* at least (\d+)\.", str(caught.value))[0]
    )
    with pytest.raises(BudgetError, match=f"at least {need}"):
        run(need - 1)
    made = run(need)
    expected = positions(made, 1) | positions(made, 2)
    assert len(expected) == number
    for turn in range(2):  # there is room to go on, for as long as one likes
        made.generate(max_new_tokens=3 * options["page_size"] + 2, eos_token_id=NEVER)
        made.append([user(80, turn)])
    assert made.report().peak_resident_tokens <= need
    assert expected <= set(kept(made.cache))


def test_pins_that_do_not_fit_are_refused_and_nothing_changes():
    made = session(budget=48, policy="memdecay-paper")
    made.append([user(60, 3)])
    before = snapshot(made.cache)
    with pytest.raises(BudgetError, match=r"budget is 48 tokens, but \d+ tokens are pinned"):
        made.pin(region="user")
    with pytest.raises(BudgetError, match="needs a budget of at least"):
        made.pin(message=0)
    assert same(before, snapshot(made.cache)) and made._pinned_regions == set()
    made.append([user(60, 4)])
    assert made.cache.kept() <= 48


def test_a_profile_that_pins_everything_says_what_it_needs():
    profile = Profile.default()
    for name in profile.names:
        profile = profile.with_region(name, RegionPolicy(1.0, 0.0, pinned=True))
    made = session(budget=48, profile=profile)
    made.append([user(4)])
    with pytest.raises(BudgetError, match="tokens are pinned"):
        made.append([user(60)])
    with pytest.raises(BudgetError):
        made.generate(max_new_tokens=200, eos_token_id=NEVER)
    assert len(made.conversation.messages) == 1 and len(made._ids) == made.cache.seen


def test_a_policy_without_labels_does_not_pin_regions():
    made = session(budget=48, policy="streaming")
    made.append([system(9), user(200)])
    report = made.report()
    assert report.pinned_tokens == 0 and report.kept_by_region["system"] < 16


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({}, SessionError, "exactly one must be given"),
        ({"region": "user", "message": 0}, SessionError, "exactly one must be given"),
        ({"message": 2}, SessionError, "message is 2, but it must be the index of one of the 2"),
        ({"message": -1}, SessionError, "message is -1"),
        ({"message": True}, SessionError, "message is True"),
        ({"message": "0"}, SessionError, "message is '0'"),
        ({"region": "plans"}, ProfileError, "plan"),
    ],
)
def test_what_cannot_be_pinned(choice, error, message):
    made = session(budget=64)
    made.append([user(), assistant()])
    for use in (made.pin, made.release):
        with pytest.raises(error, match=message):
            use(**choice)


def test_pins_before_the_first_message():
    made = session(budget=64)
    assert made.pin(region="user") == 0 == made.release(region="user")
    with pytest.raises(SessionError, match="one of the 0 messages"):
        made.pin(message=0)


def test_a_policy_sees_what_is_pinned_and_how_large_a_page_is():
    made = session(budget=96, policy="streaming", page_size=4)
    made.append([user(8, 1), user(8, 2)])
    chosen = positions(made, 1)
    made.pin(message=1)
    tokens = made.cache.ledgers[0].tokens(0.0)
    assert tokens.page_size == 4
    assert set(tokens.position[tokens.pinned].tolist()) == chosen
