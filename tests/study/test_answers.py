"""Answers in ragged batches are those of one row at a time, and of a full forward that hides."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine.families import make, oracle, tokens
from engine.helpers import same, snapshot
from memdecay.engine import MemDecayCache
from memdecay.study import answers
from memdecay.study.answers import MAX_NEW_TOKENS, Ask, Reply, answer

SEEN = 60
FAMILIES = ("llama", "qwen2", "gpt2", "gemma3", "qwen2_sliding")


@cache
def filled(name: str = "llama") -> tuple[torch.nn.Module, MemDecayCache]:
    """A model and a cache that has read 60 tokens, the last few of them decode steps."""
    model = make(name)
    context = MemDecayCache(model, budget=None, policy="h2o")
    ids = tokens(SEEN)
    with torch.no_grad():
        model(input_ids=ids[:, :52], cache=context)
        for place in range(52, SEEN):
            model(input_ids=ids[:, place : place + 1], cache=context)
    return model, context


def asks() -> list[Ask]:
    """Rows of different keep sets, questions and gold answers."""
    everything = torch.arange(SEEN)
    kept = [
        everything,
        torch.cat([everything[:4], everything[-11:]]),
        everything[everything % 3 != 1],
        torch.cat([everything[:20], everything[40:44]]),  # the newest gone
        everything[-1:],
    ]
    made = []
    for number, keep in enumerate([*kept, kept[2], kept[1]]):
        question = tokens(3 + 4 * (number % 4), seed=10 + number)[0].tolist()
        gold = tokens(1 + number % 5, seed=30 + number)[0].tolist()
        made.append(Ask(keep, question, gold))
    return made


@torch.no_grad()
def literal(model: torch.nn.Module, ask: Ask, ends: set[int]) -> Reply:
    """Full forwards over everything, with a mask that hides what was evicted from what follows."""
    gone = sorted(set(range(SEEN)) - set(ask.kept.tolist()))
    read = [*tokens(SEEN)[0].tolist(), *ask.question]

    def logits(ids: list[int]) -> torch.Tensor:
        return oracle(model, torch.tensor([ids]), [(SEEN, gone)]).float()

    logprob = logits([*read, *ask.gold]).log_softmax(-1)
    gold = sum(float(logprob[len(read) + n - 1, token]) for n, token in enumerate(ask.gold))
    written: list[int] = []
    while len(written) < MAX_NEW_TOKENS:
        token = int(logits([*read, *written])[-1].argmax())
        if token in ends:
            break
        written.append(token)
    return Reply(written, gold)


def equal(one: Reply, other: Reply) -> bool:
    return one.ids == other.ids and abs(one.gold_logprob - other.gold_logprob) <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_those_of_full_forwards(name: str) -> None:
    model, context = filled(name)
    together = answer(model, context, asks(), ends=[])
    for number, ask in enumerate(asks()):
        assert equal(together[number], literal(model, ask, set())), (number, together[number])
    assert {len(reply.ids) for reply in together} == {MAX_NEW_TOKENS} == {16}


def test_answers_end_where_an_end_is_written() -> None:
    model, context = filled()
    free = [reply.ids for reply in answer(model, context, asks(), ends=[])]
    assert len({tuple(ids) for ids in free}) > 3
    # One row ends at once, another later; both as the first and as the last row of a batch.
    ends = {free[1][0], free[4][5]}
    found = answer(model, context, asks(), ends=sorted(ends))
    lengths = set()
    for ids, reply, ask in zip(free, found, asks(), strict=True):
        cut = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        assert reply.ids == ids[:cut]
        assert equal(reply, literal(model, ask, ends))
        lengths.add(cut)
    assert {0, MAX_NEW_TOKENS} < lengths | {MAX_NEW_TOKENS} and len(lengths) > 1


def test_all_may_end_at_once() -> None:
    model, context = filled()
    ends = sorted({reply.ids[0] for reply in answer(model, context, asks(), ends=[])})
    assert [reply.ids for reply in answer(model, context, asks(), ends=ends)] == [[]] * 7


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_size_of_a_batch_does_not_matter(name: str) -> None:
    model, context = filled(name)
    ends = answer(model, context, asks()[:1], ends=[])[0].ids[7:8]
    whole = answer(model, context, asks(), ends=ends)
    for rows in (1, 3):
        told: list[int] = []
        parts = answer(model, context, asks(), ends=ends, rows=rows, advance=told.append)
        assert all(equal(one, other) for one, other in zip(whole, parts, strict=True))
        assert sum(told) == len(asks()) and max(told) <= rows


def test_replies_come_in_the_order_of_the_questions() -> None:
    model, context = filled()
    backwards = answer(model, context, asks()[::-1], ends=[])[::-1]
    assert all(
        equal(one, other)
        for one, other in zip(answer(model, context, asks(), ends=[]), backwards, strict=True)
    )


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model, context = filled()
    first = asks()[0]
    alone = answer(model, context, [first], ends=[])[0]
    for other in asks()[1:4]:
        assert equal(answer(model, context, [first, other], ends=[])[0], alone)


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
def test_the_given_cache_is_not_changed(name: str) -> None:
    model, context = filled(name)
    before, observe_every = snapshot(context), context.observe_every
    answer(model, context, asks(), ends=[], rows=3)
    assert same(before, snapshot(context))
    assert (context.observe_every, context.prefilling) == (observe_every, False)
    assert context.rows == 1 and context.steps == SEEN - 52


def test_a_keep_set_changes_the_answer() -> None:
    model, context = filled()
    base = asks()[0]
    less = Ask(torch.arange(30, SEEN), base.question, base.gold)
    one, other = answer(model, context, [base, less], ends=[])
    assert one.ids != other.ids and abs(one.gold_logprob - other.gold_logprob) > 1e-3


def test_no_questions_no_replies() -> None:
    model, context = filled()
    assert answer(model, context, [], ends=[]) == []


def test_batches_are_large_and_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed-up is this: few batches, none padded to the longest row of all."""
    model, context = filled()
    seen: list[list[int]] = []
    answer_batch = answers._answer_batch

    def noted(model, full, asks, ends):
        seen.append([len(ask.kept) for ask in asks])
        return answer_batch(model, full, asks, ends)

    monkeypatch.setattr(answers, "_answer_batch", noted)
    answer(model, context, asks(), ends=[], rows=3)
    assert [len(batch) for batch in seen] == [3, 3, 1]
    assert [length for batch in seen for length in batch] == sorted(len(ask.kept) for ask in asks())
