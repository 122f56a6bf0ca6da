"""Whatever interrupts a session, it is as it was, and goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

from engine.families import oracle
from engine.helpers import kept, same
from engine.sessions import (
    NEVER,
    assistant,
    content,
    failing,
    full_logits,
    saying,
    session,
    system,
    user,
)
from memdecay import BudgetError, TraceError
from memdecay.engine.slots import KVPool

ERRORS = (RuntimeError, KeyboardInterrupt)
SLIDING = ("gemma3", "mistral_sliding", "qwen2_sliding", "gemma2")


def state(made):
    """Everything that a failed operation must leave alone."""
    return (
        made.conversation.state_dict(),
        [*made._ids],
        dict(made._seen_by_region),
        made._next_span,
        dict(made._spans_of),
        set(made._pinned_regions),
        None if made._last_logits is None else made._last_logits.tolist(),
        made.cache.seen,
        made.cache.observations,
        made.cache.now,
        sum(map(len, made.cache._labels)),
        made.cache.prefilling,
        made.cache._last_count,
    )


def goes_on(made, twin):
    """Two sessions do the same from now on."""
    for one in (made, twin):
        one.append([assistant(3, 4), user(20, 5)], pin=True)
        one.generate(max_new_tokens=7)
    assert made._ids == twin._ids and same(content(made), content(twin))
    assert made.report().seen_by_region == twin.report().seen_by_region


OPERATIONS = {
    "append": lambda made: made.append([user(30, 3), assistant(9, 3)], score=True),
    "generate": lambda made: made.generate(max_new_tokens=30, eos_token_id=NEVER),
    "stream": lambda made: list(made.stream(max_new_tokens=30, eos_token_id=NEVER)),
    "lookup": lambda made: made.generate(
        max_new_tokens=30, eos_token_id=NEVER, prompt_lookup_num_tokens=3
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"align": "region", "clock": "tokens"}, {"budget": 400, "record_timeline": True}],
    ids=["free", "aligned", "budget"],
)
def test_a_failure_in_any_forward_never_happened(operation, error, options):
    made = session(prefill_chunk=8, **options)
    made.append([system(), user(20)])
    made.generate(max_new_tokens=5)
    made.append([user(9, 8)])
    twin, before, cache = made.fork(), state(made), content(made)
    timeline = made.timeline() if options.get("record_timeline") else None
    for at in (0, 1, 4):
        with failing(made.model, at, error), pytest.raises(error, match="on purpose"):
            OPERATIONS[operation](made)
        assert state(made) == before and same(cache, content(made))
        if timeline is not None:
            assert made.timeline() == timeline
    goes_on(made, twin)


@pytest.mark.parametrize("operation", ["append", "generate"])
@pytest.mark.parametrize("name", SLIDING)
def test_a_failure_after_a_window_has_slid_is_undone_too(name, operation):
    made = session(name, prefill_chunk=16)
    made.append([system(), user(60)])
    twin, before, cache = made.fork(), state(made), content(made)
    run = {
        "append": lambda: made.append([user(250, 3)]),
        "generate": lambda: made.generate(max_new_tokens=150, eos_token_id=NEVER),
    }[operation]
    at = 20 if operation == "append" else 140
    with failing(made.model, at, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run()
    assert state(made) == before
    after = content(made)
    for number in range(len(made.cache.tables)):
        table, other = made.cache.tables[number], twin.cache.tables[number]
        assert table.floor == other.floor
        assert sorted(table.index[0, : table.width].tolist()) == sorted(
            other.index[0, : other.width].tolist()
        )
    assert cache.keys() == after.keys()
    made.append([user(9, 5)])
    twin.append([user(9, 5)])
    assert made.generate(max_new_tokens=9).ids == twin.generate(max_new_tokens=9).ids
    assert torch.allclose(full_logits(made.model, made._ids)[-1], made._last_logits, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_after_a_failure_with_evictions_the_session_is_exact(name):
    made = session(name, budget=64, prefill_chunk=8, align="region", record_timeline=True)
    events = []
    recorded = made.cache.on_evict
    made.cache.on_evict = lambda what: (
        recorded(what),
        events.append((made.cache.seen, what.position.tolist())),
    )
    made.append([system(4), user(25)])
    made.generate(max_new_tokens=4)
    before, start, labels = state(made), made.cache.seen, columns(made)
    count = len(events)
    for run in (
        lambda: made.append([user(200, 3)]),
        lambda: made.generate(max_new_tokens=60, eos_token_id=NEVER),
    ):
        with failing(made.model, 12, RuntimeError), pytest.raises(RuntimeError):
            run()
    assert len(events) > count
    assert state(made) == before
    assert columns(made).items() <= labels.items()
    assert (len(labels) == made.cache.kept()) == (name == "mistral_sliding")  # all slid, none gone
    assert made.report().peak_resident_tokens <= 64
    check_pages(made)
    # What the failed operations evicted is gone for whoever comes now.
    events[count:] = [(start, sorted(set(labels) - set(kept(made.cache))))]
    made.append([user(40, 5)])
    made.generate(max_new_tokens=5)
    expected = oracle(made.model, torch.tensor([made._ids]), events)
    assert torch.allclose(expected[-1], made._last_logits, atol=1e-4)
    timeline = made.timeline()
    assert [event["index"] for event in timeline["events"]] == [*range(len(timeline["events"]))]
    seen = [event["seen"] for event in timeline["events"]]
    assert seen == sorted(seen)


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding"])
def test_a_ctrl_c_in_the_middle_of_an_eviction_does_not_cut_it_in_two(name, at, monkeypatch):
    made = session(name, budget=64, prefill_chunk=8)
    events = []
    made.cache.on_evict = lambda what: events.append((made.cache.seen, what.position.tolist()))
    made.append([system(4), user(30)])
    before, start, old = state(made), made.cache.seen, kept(made.cache)
    count, moves, move = len(events), itertools.count(1), KVPool.move

    def interrupted(pool, what):
        if next(moves) == at:
            signal.raise_signal(signal.SIGINT)
        move(pool, what)

    monkeypatch.setattr(KVPool, "move", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.append([user(60, 5)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert state(made) == before
    check_pages(made)
    events[count:] = [(start, sorted(set(old) - set(kept(made.cache))))]
    made.append([user(3, 2)])
    expected = oracle(made.model, torch.tensor([made._ids]), events)
    assert torch.allclose(expected[-1], made._last_logits, atol=1e-4)


def columns(made):
    """Position -> every column of the ledger that does not depend on what else is kept."""
    ledger = made.cache.ledgers[0]
    names = [name for name in ledger.columns if name not in ("position", "page_index")]
    rows = zip(*(ledger[name].tolist() for name in names), strict=True)
    return dict(zip(ledger["position"].tolist(), rows, strict=True))


def check_pages(made):
    ledger = made.cache.ledgers[0]
    pages = ledger["page"].unique()
    assert ledger.num_pages == len(pages)
    assert torch.equal(pages[ledger["page_index"]], ledger["page"])
    assert torch.equal(made.cache.main.index[0, : ledger.length], ledger["position"])


@pytest.mark.parametrize("error", ERRORS)
def test_the_first_append_fails(error):
    made, fresh = session(budget=64), session(budget=64)
    for at in (0, 3):
        with failing(made.model, at, error), pytest.raises(error):
            made.append([system(4), user(90)])
        assert made.cache.seen == 0 and made.conversation.messages == [] and made._ids == []
        assert made.report().kept_tokens == 0
    for one in (made, fresh):
        one.append([system(4), user(90)])
        one.generate(max_new_tokens=4)
    assert same(content(made), content(fresh))


@pytest.mark.parametrize("template", ["mistral", "parts"])
@pytest.mark.parametrize("budget", [None, 48])
def test_an_answer_without_a_generation_prompt_fails(template, budget):
    made = session(template=template, budget=budget)
    made.append([user(40)])
    made.pin(message=0) if budget is None else None
    twin, before, cache = made.fork(), state(made), content(made)
    for at in (0, 3):
        with failing(made.model, at, RuntimeError), pytest.raises(RuntimeError):
            made.generate(max_new_tokens=9)
        assert state(made) == before
        assert columns(made).items() <= columns(twin).items()
        assert same(cache, content(made)) or made.cache.evicted_tokens
    if budget is None:
        assert made.generate(max_new_tokens=9).ids == twin.generate(max_new_tokens=9).ids
        assert same(content(made), content(twin))


def test_an_answer_that_the_template_refuses_is_forgotten():
    made = session(template="llama3")
    made.append([user()])
    before = state(made)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    with pytest.raises(TraceError, match="One call at a time"):
        made.generate(**saying(made, call + call))
    assert state(made) == before
    made.generate(**saying(made, "Hello."))


def test_a_stream_that_is_interrupted_while_it_waits_is_forgotten():
    made = session()
    made.append([user()])
    before, cache = state(made), content(made)
    stream = made.stream(max_new_tokens=500, eos_token_id=NEVER)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)
    assert state(made) == before and same(cache, content(made))
    assert list(stream) == []
    made.generate(max_new_tokens=2)


def test_a_stream_that_fails_says_so_even_when_it_is_closed():
    made = session()
    made.append([user()])
    before = state(made)
    with failing(made.model, 40, RuntimeError):
        stream = made.stream(max_new_tokens=500, eos_token_id=NEVER)
        next(stream)
        with pytest.raises(RuntimeError, match="on purpose"):
            for _ in stream:
                pass
    assert state(made) == before


def test_a_failing_streamer_and_criterion_are_undone():
    made = session()
    made.append([user()])
    before, cache = state(made), content(made)

    def criterion(ids, scores, **_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.generate(max_new_tokens=9, stopping_criteria=[criterion])
    with pytest.raises(ValueError, match="nonsense"):
        made.generate(max_new_tokens=9, nonsense=True)
    assert state(made) == before and same(cache, content(made))


def test_errors_leave_the_model_unpatched():
    made = session()
    own = made.model.config._attn_implementation
    made.append([user()])
    for error, at in itertools.product(ERRORS, (0, 2)):
        with failing(made.model, at, error), pytest.raises(error):
            made.generate(max_new_tokens=5)
    assert made.model.config._attn_implementation == own
    ids = torch.tensor([made._ids])
    assert torch.equal(made.model(ids, use_cache=False).logits, made.model(ids).logits)


def test_a_budget_error_comes_before_anything_runs():
    made = session(budget=48, record_timeline=True)
    made.append([system(4), user(20)])
    before, cache, timeline = state(made), content(made), made.timeline()
    with (
        failing(made.model, 0, AssertionError),
        pytest.raises(BudgetError, match=r"budget is 48 tokens, but \d+ tokens are"),
    ):
        made.append([user(60)], pin=True)
    assert state(made) == before and same(cache, content(made))
    assert made.timeline() == timeline
