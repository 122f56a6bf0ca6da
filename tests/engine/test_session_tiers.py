"""A session with tiers: what the budget evicts comes back for what asks for it, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.helpers import kept
from engine.sessions import (
    NEVER,
    assistant,
    session,
    system,
    user,
)
from engine.tiered import (
    Watched,
    outside,
    outside_positions,
    tiered,
    turns,
    watched_budget,
)
from memdecay.engine import session as engine_session

SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy": "memdecay-paper", "align": "region", "tiers": {"host": 0, "disk": None}},
    {"policy": "streaming", "page_size": 1, "tiers": {"pages": 3, "page_size": 3, "looks": 1}},
    {"clock": "tokens", "tiers": {"host": 40, "disk": 30, "every": 1}},
]


@pytest.mark.parametrize("setting", range(4))
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_any_turns_equal_a_forward_that_hides_what_is_outside(
    name: str, setting: int, tmp_path: Path
) -> None:
    made = tiered(name, **SETTINGS[setting])
    made.append([system(4)])
    watched = Watched(made)
    with watched_budget(made) as sizes:
        turns(made, setting, 9)
    assert watched.worst() < 1e-4
    assert watched.returns >= 20
    assert watched.worst(returned=False) > 1e-3, "what came back must matter"
    assert made.cache.peak_tokens <= 64
    assert max(sizes[1::2]) <= 64
    if made.cache.main.window is None:
        assert max(sizes) <= 64
    report = made.report()
    tiers = report.tiers
    assert tiers is not None and tiers.came_back > 0 and tiers.moved_down > 0
    assert report.evicted_tokens == report.seen_tokens - report.kept_tokens
    where = tiers.tokens
    assert where["resident"] == report.kept_tokens
    if tiers.lost == 0:
        assert where["host"] + where["disk"] == report.evicted_tokens
    limits = SETTINGS[setting].get("tiers", {})
    for tier, default in (("host", None), ("disk", 0)):
        limit = limits.get(tier, default)
        assert limit is None or where[tier] <= limit
    assert report.to_dict()["tiers"]["tokens"] == dict(where)


def test_without_tiers_there_is_nothing_to_say() -> None:
    made = session(budget=64)
    assert made.report().tiers is None and made.report().to_dict()["tiers"] is None


def test_a_look_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered(record_timeline=True)
    made.append([system(4), user(50)])
    memory: Any = made._memory
    seen: list[tuple[Any, ...]] = []
    look = memory.look

    def state() -> tuple[Any, ...]:
        logits = made._last_logits
        return [*made._ids], logits, made.cache.seen, made.cache.steps, made._peak_bytes

    def looked(run: Any, count: int) -> Tensor:
        before = state()
        queries = look(run, count)
        seen.append((before, count, queries.shape))
        return queries

    def exchange(queries: Tensor, *, ids: list[int], room: int, again: bool) -> None:
        assert again == (len(seen) == 2)
        before = seen[-1][0]
        after = state()
        assert before[0] == after[0] and torch.equal(before[1], after[1])
        assert before[2:] == after[2:] and room == seen[-1][1]

    monkeypatch.setattr(memory, "look", looked)
    monkeypatch.setattr(memory, "exchange", exchange)
    probe = made.fork()
    rendered = probe.conversation.append([user(7, 3)])
    opening = probe.conversation.generation_prompt()
    made.append([user(7, 3)])
    assert len(seen) == 2
    for _, count, shape in seen:
        assert count == len(rendered) + len(opening) == shape[1]


def test_only_the_end_of_a_long_turn_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "_LOOKED_AT", 10)
    made = tiered()
    made.append([system(4), user(50)])
    memory: Any = made._memory
    looks: list[tuple[int, int]] = []
    look, exchange = memory.look, memory.exchange

    def looked(run: Any, count: int) -> Tensor:
        queries: Tensor = look(run, count)
        looks.append((count, queries.shape[1]))
        return queries

    def exchanged(queries: Tensor, *, room: int, **told: Any) -> None:
        looks.append((room, room))
        exchange(queries, room=room, **told)

    monkeypatch.setattr(memory, "look", looked)
    monkeypatch.setattr(memory, "exchange", exchanged)
    probe = made.fork()
    rendered = probe.conversation.append([user(30, 3)])
    opening = probe.conversation.generation_prompt()
    made.append([user(30, 3)])
    short, whole = 10 + len(opening), len(rendered) + len(opening)
    assert looks == [(short, short), (whole, whole)] * 2
    assert made._ids[-len(rendered) :] == rendered.ids


def test_a_second_look_ranks_again_all_that_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered()
    made.append([system(4), user(90)])
    memory: Any = made._memory
    best, ranked = outside(made).best, []

    def noted(queries: Tensor, count: int, ids: list[int]) -> list[int]:
        ranked.append({*outside_positions(made)})
        found: list[int] = best(queries, count, ids)
        return found

    monkeypatch.setattr(outside(made), "best", noted)
    made.append([user(7, 3)])
    first, second = ranked
    assert first <= second and memory._stay.tolist()
    assert {*memory._stay.tolist()} <= second


def test_what_an_assistant_wrote_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered(tiers={"looks": 1})
    made.append([system(4), user(50)])
    memory: Any = made._memory
    looks: list[list[int]] = []
    look = memory.look

    def looked(run: Any, count: int) -> Tensor:
        start = made.cache.seen
        queries: Tensor = look(lambda: (run(), looks.append(made._ids[start:])), count)
        return queries

    monkeypatch.setattr(memory, "look", looked)
    turn = [user(7, 3), assistant(9, 4), user(8, 5)]
    rendered = made.fork().conversation.append(turn)
    made.append(turn, score=True)
    text = [made.tokenizer.decode(ids) for ids in looks]
    assert len(text) == 2
    assert text[0].endswith("assistant\n") and text[1].endswith("assistant\n")
    assert turn[0]["content"] in text[0] and turn[2]["content"] in text[1]
    assert not any(turn[1]["content"] in one for one in text)
    assert made._ids[-len(rendered) :] == rendered.ids
    looks.clear()
    made.append([assistant(9, 4)], score=True)
    assert not looks


def test_an_answer_brings_pages_back_every_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiered(tiers={"every": 5})
    made.append([system(4), user(70)])
    calls: list[tuple[int, int]] = []
    best = outside(made).best

    def asked(queries: Tensor, count: int, ids: list[int]) -> list[int]:
        calls.append((made.cache.seen, queries.shape[1]))
        found: list[int] = best(queries, count, ids)
        return found

    monkeypatch.setattr(outside(made), "best", asked)
    start = made.cache.seen + len(made.conversation.generation_prompt())
    made.generate(max_new_tokens=16, eos_token_id=NEVER)
    decoded = start - 1  # the prompt's last token is a step of its own
    assert calls == [(decoded + 5, 5), (decoded + 10, 5), (decoded + 15, 5)]
    calls.clear()
    made.append([user(3, 4), assistant(14, 5)], score=True, score_chunk=4)
    steps = [count for _, count in calls[2:]]
    assert steps and all(count == 5 for count in steps)
    never = tiered(tiers={"every": 0})
    assert never.cache.on_step is None and never.cache.on_queries is None


def test_what_a_turn_brought_back_stays_while_it_is_answered() -> None:
    made = tiered(tiers={"every": 4, "pages": 4})
    made.append([system(4), user(70)])
    made.append([user(4, 9)])
    memory: Any = made._memory
    came = {*memory._stay.tolist()}
    assert came <= {*kept(made.cache)}
    made.generate(max_new_tokens=20, eos_token_id=NEVER)
    assert len(came) >= 12 and came <= set(kept(made.cache))
