"""The timeline: what it says of every page is what happened."""

from __future__ import annotations

import itertools
import json

import pytest

from engine.sessions import NEVER, assistant, failing, session, system, user
from memdecay import SessionError
from memdecay.policy import get_policy


class Witness:
    """Looks at the ledger in every forward and at every eviction, by itself."""

    def __init__(self, made):
        self.made, self.pages, self.gone = made, {}, {}
        self.refreshed = set()
        cache = made.cache
        evicted, observed = cache.on_evict, cache.on_observe

        def on_evict(what):
            evicted(what)
            kept = set(cache.ledgers[0]["page"].tolist())
            for page in set(what.page.tolist()) - kept:
                self.gone[page] = int((what.page == page).sum())

        def on_observe(row, mass, refreshed):
            self.refreshed |= set(cache.ledgers[0]["page"][refreshed].tolist())
            observed(row, mass, refreshed)

        cache.on_evict, cache.on_observe = on_evict, on_observe
        made.model.get_decoder().register_forward_hook(lambda *_: self.look())

    def look(self):
        for page in self.made.cache.ledgers[0]["page"].tolist():
            self.pages.setdefault(page, self.made.cache.seen)


def run(**options):
    made = session(**{"budget": 64, "record_timeline": True, **options})
    witness = Witness(made)
    made.append([system(5)])
    for turn in range(3):
        made.append([user(25, turn), assistant(9, turn)])
        made.generate(max_new_tokens=8, eos_token_id=NEVER)
    return made, witness, made.timeline()


VARIANTS = {
    "default": {},
    "single tokens": {"page_size": 1},
    "paper": {"policy": "memdecay-paper"},
    "aligned": {"align": "region", "clock": "tokens", "page_size": 8},
    "sparse": {"observe_every": 4},
    "never": {"observe_every": 0},
    "streaming": {"policy": "streaming"},
    "random": {"policy": "random"},
    "free": {"budget": None},
    "fixed": {"policy": get_policy("memdecay-paper", refresh_threshold=0.03)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_timeline_is_valid(name):
    made, _, timeline = run(**VARIANTS[name])
    assert json.loads(json.dumps(timeline)) == timeline
    assert timeline["regions"] == list(made.cache.profile.names)
    assert timeline["page_size"] == made.cache.page_size
    events, pages = timeline["events"], timeline["pages"]
    assert [event["index"] for event in events] == list(range(len(events)))
    for field in ("step", "seen", "turn"):
        values = [event[field] for event in events]
        assert values == sorted(values)
    budget = made.cache.budget or 10**9
    assert all(0 < event["kept"] <= min(budget, event["seen"]) for event in events)
    assert {event["kind"] for event in events} <= {"prefill", "decode", "evict"}
    assert events[-1]["turn"] == 6 and events[0]["turn"] == 0
    for page in pages:
        assert page["region"] in timeline["regions"]
        assert 1 <= page["tokens"] <= timeline["page_size"]
        assert 0 <= page["born"] < len(events)
        assert page["evicted"] is None or page["born"] <= page["evicted"] < len(events)
        if page["evicted"] is not None:
            assert events[page["evicted"]]["kind"] == "evict"


@pytest.mark.parametrize("name", VARIANTS)
def test_pages_are_evicted_pinned_and_refreshed_as_they_were(name):
    made, witness, timeline = run(**VARIANTS[name])
    pages = {page["page"]: page for page in timeline["pages"]}
    ledger = made.cache.ledgers[0]
    kept = {page: int((ledger["page"] == page).sum()) for page in set(ledger["page"].tolist())}
    assert set(pages) == set(witness.pages)
    assert {page for page, life in pages.items() if life["evicted"] is None} == set(kept)
    assert {p: pages[p]["tokens"] for p in kept} == kept
    assert {p: pages[p]["tokens"] for p in witness.gone} == witness.gone
    assert len(witness.gone) == made.report().evicted_pages
    held = set(ledger["page"][ledger.held()].tolist())
    assert {page for page, life in pages.items() if life["pinned"]} == held
    for page in kept:
        regions = ledger["region"][ledger["page"] == page].bincount()
        name_of = made.cache.profile.id(pages[page]["region"])
        assert int(regions[name_of]) == int(regions.max())
    said = {page for shot in timeline["scores"] for page in shot["refreshed"]}
    assert said <= witness.refreshed <= said | made._recorder._refreshed


def test_the_scores_are_those_of_the_pages_then_kept():
    made, _, timeline = run()
    alive = {page["page"]: (page["born"], page["evicted"]) for page in timeline["pages"]}
    for shot in timeline["scores"]:
        values = list(shot["page_scores"].values())
        assert all(0 <= value <= 1 for value in values) and max(values) == 1.0
        for page in shot["page_scores"]:
            born, evicted = alive[int(page)]
            assert born <= shot["event"] and (evicted is None or shot["event"] <= evicted)
    last = timeline["scores"][-1]
    score = made.cache.ledgers[0].page_score(made.cache.now)
    if last["event"] == len(timeline["events"]) - 1:
        assert len(last["page_scores"]) == len(score)


def test_snapshots_are_bounded_and_spread_over_the_whole_life():
    made = session(budget=64, record_timeline=True)
    made.append([user(9)])
    made.generate(max_new_tokens=900, eos_token_id=NEVER)
    timeline = made.timeline()
    shots = [shot["event"] for shot in timeline["scores"]]
    assert len(timeline["events"]) > 900 and 80 <= len(shots) <= 200
    assert shots == sorted(set(shots)) and shots[0] == 0
    assert max(b - a for a, b in itertools.pairwise(shots)) <= len(shots) // 10
    assert shots[-1] > len(timeline["events"]) * 0.95


def test_a_timeline_does_not_change_what_happens():
    plain, told = (session(budget=64, record_timeline=flag) for flag in (False, True))
    for made in (plain, told):
        made.append([system(), user(60)])
        made.generate(max_new_tokens=20, eos_token_id=NEVER)
    assert plain.report() == told.report() and plain._ids == told._ids
    assert plain.conversation.messages == told.conversation.messages


def test_a_failure_leaves_the_timeline_as_it_was():
    made = session(budget=64, record_timeline=True, prefill_chunk=8)
    made.append([system(4), user(9)])
    before = made.timeline()
    with failing(made.model, 2, RuntimeError), pytest.raises(RuntimeError):
        made.append([user(9, 5)])
    assert made.timeline() == before
    with failing(made.model, 12, RuntimeError), pytest.raises(RuntimeError):
        made.append([user(200, 5)])
    after = made.timeline()
    assert after["events"][:-1] == before["events"] and after["events"][-1]["kind"] == "evict"
    gone = [page for page in after["pages"] if page["evicted"] is not None]
    assert gone and {page["evicted"] for page in gone} == {len(before["events"])}
    assert {page["page"] for page in after["pages"]} == {page["page"] for page in before["pages"]}
    made.append([user(60, 6)])
    made.timeline()


def test_refreshes_of_a_failed_answer_are_not_told():
    made = session(budget=64, policy="memdecay-paper", record_timeline=True)
    made.append([user(20)])
    made.generate(max_new_tokens=500, eos_token_id=NEVER)
    for at in range(9, 13):
        before = set(made._recorder._refreshed)
        with failing(made.model, at, RuntimeError), pytest.raises(RuntimeError):
            made.generate(max_new_tokens=20, eos_token_id=NEVER)
        assert made._recorder._refreshed == before


def test_an_empty_timeline_and_none():
    timeline = session(record_timeline=True).timeline()
    assert timeline["pages"] == timeline["events"] == timeline["scores"] == []
    with pytest.raises(SessionError, match="record_timeline=True"):
        session().timeline()


def test_the_returned_timeline_is_the_callers():
    made, _, timeline = run()
    timeline["events"].clear()
    timeline["scores"].clear()
    timeline["pages"].clear()
    again = made.timeline()
    assert again["events"] and again["scores"] and again["pages"]
