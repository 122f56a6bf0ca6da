"""A replay observes what the model attends to when it repeats what is kept, and leaves no trace."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.evidence import Evidence, Watching, install, looked_at
from engine.families import CONFIGS, make, oracle, tokens
from engine.helpers import Record, chunks, close, kept, same, snapshot
from engine.sessions import content, failing, saying, session, system, user
from engine.test_interrupts import interrupt_at
from memdecay import BudgetError, MemDecayError, ModelError, Session, SessionError
from memdecay.engine import Idle
from memdecay.engine import replay as room
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.replay import ReplayForward, repeat_prompts
from memdecay.policy import Policy, Tokens
from memdecay.policy.testing import CHECKS
from memdecay.regions import Profile

EVERY_FAMILY = pytest.mark.parametrize("name", CONFIGS)
PROMPT = [5, 6, 7, 8, 9]


def prepared(model: PreTrainedModel, **options: Any) -> tuple[MemDecayCache, Record, Tensor]:
    """A cache that has evicted, what it evicted, and the ids it was given."""
    settings = {"budget": 60, "policy": Evidence(), "page_size": 4, **options}
    cache = MemDecayCache(model, **settings)
    record = Record(model, cache)
    ids = tokens(240)
    with torch.no_grad():
        for start, end in chunks(110, [40, 20, 7, 13, 1]):
            model(input_ids=ids[:, start:end], cache=cache)
        cache.shrink(34)
    return cache, record, ids


def piece(ids: Tensor, positions: Tensor) -> Tensor:
    return ids[0, positions]


def everything(cache: MemDecayCache) -> dict[str, Tensor]:
    """All of a cache, the free slots of its pools too."""
    state = snapshot(cache)
    for number, table in enumerate(cache.tables):
        state[f"index{number}"] = table.index.clone()
        state[f"table{number}"] = torch.tensor([*table.lengths, table.floor])
    for row, ledger in enumerate(cache.ledgers):
        hidden = ledger.trail.hidden()
        state[f"hidden{row}"] = hidden
    state["counts"] = torch.tensor(
        [cache.observations, cache.evicted_tokens, cache.evicted_pages, cache._last_count]
    )
    state["flags"] = torch.tensor([cache.prefilling, cache._prompt_is_next])
    state["storage"] = torch.tensor([pool.kv.data_ptr() for pool in cache.pools])
    return state


def unlearned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: one
        for name, one in state.items()
        if not name.startswith(("state.looked", "replayed"))
    }


def idle_model(model: PreTrainedModel, implementation: str = "sdpa") -> bool:
    return (
        model.config._attn_implementation == implementation
        and not model.get_decoder()._forward_hooks
    )


@EVERY_FAMILY
@torch.no_grad()
def test_it_is_the_most_attention_in_a_literal_forward(name: str) -> None:
    model = make(name)
    cache, record, ids = prepared(model)
    assert cache.evicted_tokens >= 40
    before, own = everything(cache), model.config._attn_implementation
    for start, end in ((0, 11), (11, 30)):
        positions = cache.ledgers[0]["position"].sort().values[start:end]
        found = cache.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
        expected = looked_at(
            model,
            ids[0, :110].tolist(),
            record.events[0],
            PROMPT,
            piece(ids, positions).tolist(),
        )
        expected = expected[:, :, cache.ledgers[0]["position"]]
        for layer, window in enumerate(cache.layout.windows):
            if window is not None:  # what no later token can see is not held any more
                held = cache.table_of(layer).index[0, : cache.table_of(layer).width]
                gone = ~torch.isin(cache.ledgers[0]["position"], held)
                assert (expected[layer][:, gone] < 1e-6).all()
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5
        assert found.amax() > 0.01
    assert idle_model(model, own)
    assert same(unlearned(everything(cache)), unlearned(before))
    replayed = cache.ledgers[0]["replayed"]
    assert sorted(cache.ledgers[0]["position"][replayed].tolist()) == kept(cache)[:30]
    assert cache.unreplayed().tolist() == kept(cache)[30:]
    logits = [
        model(input_ids=ids[:, 110 + a : 110 + b], cache=cache).logits[0]
        for a, b in chunks(20, [7, 1])
    ]
    assert close(torch.cat(logits), oracle(model, ids[:, :130], record.events[0])[110:])


@torch.no_grad()
def test_the_policy_learns_piece_by_piece_and_new_tokens_are_not_replayed() -> None:
    model = make("llama")
    cache, _, ids = prepared(model)
    most = torch.zeros(cache.kept())
    for start, end in ((0, 15), (15, 30)):
        positions = cache.ledgers[0]["position"].sort().values[start:end]
        found = cache.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
        most = torch.maximum(most, found.amax((0, 1)))
        assert torch.equal(cache.ledgers[0]["state.looked"], most)
    position = cache.ledgers[0]["position"].clone()
    model(input_ids=ids[:, 110:112], cache=cache)
    ledger = cache.ledgers[0]
    tokens_now = ledger.tokens(0.0)
    assert not tokens_now.replayed[ledger["position"] >= 110].any()
    for where, value in zip(position.tolist(), most.tolist(), strict=True):
        still = ledger["position"] == where
        assert not still.any() or ledger["state.looked"][still].item() == value


@pytest.mark.parametrize("where", ["before", "in the middle"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_replay_that_fails_never_happened(name: str, error: Any, where: str) -> None:
    model = make(name)
    cache, _, ids = prepared(model)
    positions = cache.unreplayed()[:20]
    before, twin = everything(cache), cache.copy()
    if where == "before":
        calls = failing(model.get_decoder(), 0, error)
    else:
        calls = failing(model, 0, error)
    with calls, pytest.raises(error, match="on purpose"):
        cache.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
    assert same(everything(cache), before)
    assert idle_model(model)
    assert cache._running is cache._repeating is None
    logits = [model(input_ids=ids[:, 110:120], cache=one).logits for one in (cache, twin)]
    assert torch.equal(*logits)


@dataclass(frozen=True)
class Stubborn(Evidence):
    """Learns nothing, loudly."""

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        raise RuntimeError("on purpose")


@torch.no_grad()
def test_a_policy_that_fails_in_a_replay_changes_nothing() -> None:
    model = make("llama")
    cache, _, ids = prepared(model, policy=Stubborn())
    before, positions = everything(cache), cache.unreplayed()[:20]
    with pytest.raises(RuntimeError, match="on purpose"):
        cache.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
    assert same(everything(cache), before)


@torch.no_grad()
def test_an_interrupt_at_any_line_is_before_or_after_a_replay() -> None:
    model = make("llama")
    cache, _, ids = prepared(model)
    positions = cache.unreplayed()[:20]

    def run(one: MemDecayCache) -> Any:
        return one.replay(piece(ids, positions), positions, torch.tensor(PROMPT))

    done = cache.copy()
    run(done)
    outcomes = {"before": 0, "after": 0}
    passed, at = True, 1
    while passed:
        copy = cache.copy()
        passed, _ = interrupt_at(at, lambda copy=copy: run(copy))  # type: ignore[misc]
        assert idle_model(model) and copy._running is copy._repeating is None
        state = unlearned(content_of(copy))
        assert same(state, unlearned(content_of(cache)))
        after = bool(copy.ledgers[0]["replayed"].any())
        outcomes["after" if after else "before"] += 1
        expected = done if after else cache
        for name in ("replayed", "state.looked"):
            assert torch.equal(copy.ledgers[0][name], expected.ledgers[0][name])
        at += 5
    assert min(outcomes.values()) > 1


def content_of(cache: MemDecayCache) -> dict[str, Tensor]:
    return {name: one for name, one in everything(cache).items() if name != "storage"}


@torch.no_grad()
def test_what_cannot_be_replayed_is_refused() -> None:
    model = make("llama")
    cache, _, ids = prepared(model, budget=None)
    positions = cache.unreplayed()[:5]
    before = everything(cache)
    for wrong, places in (
        (ids[0, :4], positions),
        (ids[0, :0], positions[:0]),
        (ids[0, :2], torch.tensor([3, 400])),
    ):
        with pytest.raises(MemDecayError, match="positions has"):
            cache.replay(wrong, places, torch.tensor(PROMPT))
    assert same(everything(cache), before)
    with pytest.raises(MemDecayError, match="policy 'h2o' does not need replay"):
        MemDecayCache(model, budget=None, policy="h2o").replay(
            ids[0, :5], positions, torch.tensor(PROMPT)
        )
    batch = MemDecayCache(model, budget=None, policy=Evidence())
    model(input_ids=tokens(20, rows=2), cache=batch)
    with pytest.raises(MemDecayError, match="holds 2 sequences"):
        batch.replay(ids[0, :5], positions, torch.tensor(PROMPT))
    full, _, ids = prepared(model)
    model(input_ids=ids[:, 110:134], cache=full)
    free = (60 - full.kept()) * 4
    assert full.replay_room(len(PROMPT), 3) == free - len(PROMPT) == 3, "and nothing is evicted"
    positions = full.unreplayed()[: free - len(PROMPT) + 1]
    assert full.kept() == 58
    with pytest.raises(BudgetError, match="to repeat take the room of"):
        full.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
    learned = make("gpt2")
    cache = MemDecayCache(learned, budget=None, policy=Evidence())
    cache.prefilling = True
    learned(input_ids=tokens(1020), cache=cache)
    assert cache.replay_room(len(PROMPT), 20) == 0
    assert cache.replay_room(3, 20) == 1
    with pytest.raises(ModelError, match="position embeddings for 1024"):
        cache.replay(ids[0, :5], torch.arange(5), torch.tensor(PROMPT))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_budget_holds_inside_every_layer_of_a_replay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 96
    made = session(name, policy=Evidence(), budget=budget, page_size=4)
    made.append([system(), user(300)])
    layers = len(made.cache.layout.windows)
    used: list[float] = []
    real = ReplayForward.attention

    def watched(forward: ReplayForward, module: Any, *args: Any, **kwargs: Any) -> Any:
        own = args[1]
        assert own.shape[2] == forward.count
        assert all(pool.kv.shape[3] <= budget for pool in made.cache.pools)
        used.append(made.cache.kept() + own.shape[2] / layers)
        return real(forward, module, *args, **kwargs)

    monkeypatch.setattr(ReplayForward, "attention", watched)
    made.cache.peak_tokens = 0
    idle = made.idle()
    assert idle.left == 0 and not idle.interrupted
    assert idle.replayed >= made.cache.kept() > budget - 30
    assert max(used) <= made.cache.peak_tokens <= budget
    assert made.cache.peak_tokens == math.ceil(max(used))
    assert len(used) % layers == 0 and len(used) >= layers


def test_idle_repeats_all_that_is_kept_in_order_of_position() -> None:
    made = session(policy=Evidence(), budget=128, page_size=4)
    made.append([system(), user(300)])
    made.generate(max_new_tokens=5)
    prompts = repeat_prompts(made.tokenizer)
    runs: list[tuple[list[int], list[int], list[int], list[int]]] = []
    real = MemDecayCache.replay

    def noted(cache: MemDecayCache, ids: Tensor, positions: Tensor, prompt: Tensor) -> Tensor:
        runs.append((ids.tolist(), positions.tolist(), prompt.tolist(), kept(cache)))
        return real(cache, ids, positions, prompt)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemDecayCache, "replay", noted)
        first = made.idle()
        assert made.idle() == Idle(0, 0, False, pytest.approx(0, abs=1))
        made.append([user(6)])
        second = made.idle()
    positions = [position for _, places, _, _ in runs for position in places]
    assert first.replayed + second.replayed == len(positions) == len(set(positions))
    count = first.replayed
    assert positions[:count] == sorted(positions[:count])
    assert positions[count:] == sorted(positions[count:])
    assert set(kept(made.cache)) <= set(positions)
    assert len(runs) >= 3
    for number, (ids, places, prompt, held) in enumerate(runs):
        assert ids == [made._ids[place] for place in places]
        lead = [made._ids[place] for place in held if place < places[0]][-room.LEAD :]
        assert prompt == ([*prompts[1], *lead] if number else prompts[0])
        assert len(lead) == (room.LEAD if number else 0)
    assert made.tokenizer.decode(prompts[0]).split() == room._FIRST.split()


def test_idle_changes_nothing_that_the_session_says() -> None:
    made = session(policy=Watching(), budget=None, page_size=4)
    made.append([system(), user(40)])
    made.generate(max_new_tokens=9)
    twin, before, report = made.fork(), content(made), made.report().to_dict()
    idle = made.idle()
    assert idle.replayed == made.cache.kept() and idle.left == 0
    assert same(unlearned(content(made)), unlearned(before))
    after = made.report().to_dict()
    for name in ("peak_resident_tokens", "peak_kv_bytes"):
        assert after.pop(name) >= report.pop(name)
    assert after == report
    for one in (made, twin):
        one.append([user(7, 4)])
    assert made.generate(max_new_tokens=9) == twin.generate(max_new_tokens=9)
    assert made.cache.now == twin.cache.now


def test_idle_does_nothing_for_a_policy_that_does_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this must not run")

    for owner, method in (
        (MemDecayCache, "replay"),
        (MemDecayCache, "replay_room"),
        (ReplayForward, "__init__"),
    ):
        monkeypatch.setattr(owner, method, never)
    made = session(budget=64)
    assert made.idle() == Idle(0, 0, False, pytest.approx(0, abs=1))
    made.append([system(), user(90)])
    assert made.idle(seconds=0, stop=threading.Event()).replayed == 0
    empty = session(policy=Evidence())
    assert empty.idle() == Idle(0, 0, False, pytest.approx(0, abs=1))


def several(made: Session) -> None:
    made.append([system(), user(300)])
    made.cache.shrink(100)


def test_time_and_stop_end_it_between_two_pieces() -> None:
    made = session(policy=Evidence(), budget=128, page_size=4)
    several(made)
    whole = made.cache.kept()
    assert made.idle(seconds=0) == Idle(0, whole, True, pytest.approx(0, abs=1))
    stop = threading.Event()
    stop.set()
    assert made.idle(stop=stop) == Idle(0, whole, True, pytest.approx(0, abs=1))
    stop.clear()
    seen: list[Idle] = []

    def once(idle: Idle) -> None:
        seen.append(idle)
        stop.set()

    idle = made.idle(stop=stop, progress=once)
    assert idle.interrupted and idle.replayed == seen[0].replayed > 0 and len(seen) == 1
    assert idle.left == whole - idle.replayed == int((~made.cache.ledgers[0]["replayed"]).sum())
    rest = made.idle()
    assert (rest.left, rest.interrupted) == (0, False)
    assert idle.replayed + rest.replayed == whole


def test_no_piece_starts_that_would_end_too_late() -> None:
    made = session(policy=Evidence(), budget=128, page_size=4)
    several(made)
    clock = [100.0]
    real = MemDecayCache.replay

    def slow(*args: Any) -> Tensor:
        clock[0] += 10
        return real(*args)

    seen: list[Idle] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: clock[0])
        patched.setattr(MemDecayCache, "replay", slow)
        idle = made.idle(seconds=25, progress=seen.append)
    assert [one.seconds for one in seen] == [10, 20]
    assert idle == Idle(seen[1].replayed, seen[1].left, True, 20)
    assert idle.left > 0


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "3"])
def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(SessionError, match="seconds is"):
        session(policy=Evidence()).idle(seconds=seconds)


def test_a_ctrl_c_in_the_second_piece_leaves_the_first() -> None:
    made = session(policy=Evidence(), budget=128, page_size=4)
    several(made)
    twin = made.fork()
    stop = threading.Event()
    twin.idle(stop=stop, progress=lambda idle: stop.set())
    layers: list[int] = []
    real = ReplayForward.attention

    def press(forward: ReplayForward, *args: Any, **kwargs: Any) -> Any:
        layers.append(forward.layer)
        if len(layers) == 6:
            signal.raise_signal(signal.SIGINT)
        return real(forward, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ReplayForward, "attention", press)
        made.idle()
    assert len(layers) == 6
    assert same(content(made), content(twin))
    assert idle_model(made.model)
    assert made.idle().replayed == twin.idle().replayed > 0
    assert same(content(made), content(twin))


def test_a_full_cache_makes_room_and_pins_that_fill_it_end_it() -> None:
    tiny = session(policy=Evidence(), budget=64, page_size=4)
    tiny.append([system(), user(120)])
    while tiny.cache.kept() < 64:
        tiny.generate(max_new_tokens=1)
    assert tiny.idle().left == tiny.cache.kept() == 64, "a replay is not worth a third of it"
    made = session(policy=Evidence(), budget=128, page_size=4)
    made.append([system(), user(120)])
    while made.cache.kept() < 128:
        made.generate(max_new_tokens=1)
    gone = made.cache.evicted_tokens
    assert made.idle().left == 0
    assert made.cache.evicted_tokens > gone
    made.cache.pin(lambda ledger: ledger["position"] >= 0)
    made.cache.ledgers[0]["replayed"].fill_(False)
    made.cache.budget = made.cache.kept()
    assert made.idle() == Idle(0, made.cache.kept(), False, pytest.approx(0, abs=1))


def test_a_busy_session_is_not_idle() -> None:
    made = session(policy=Evidence())
    made.append([user(9)])
    stream = made.stream(max_new_tokens=9)
    next(stream)
    with pytest.raises(SessionError, match="in use"):
        made.idle()
    stream.close()
    errors: list[Exception] = []

    def busy(_: Idle) -> None:
        try:
            made.report()
        except SessionError as error:
            errors.append(error)

    assert made.idle(progress=busy).left == 0
    assert errors


def test_what_was_replayed_is_saved_forked_and_undone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    made = session(policy="watching", budget=400, page_size=4, prefill_chunk=16)
    made.append([system(), user(60)])
    made.idle()
    made.append([user(5)])
    made.save(tmp_path / "saved")
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    fork = made.fork()
    with failing(made.model, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        made.append([user(9), user(9)])
    counts = [one.idle().replayed for one in (made, loaded, fork)]
    assert counts[0] > 0 and len(set(counts)) == 1
    for one in (made, loaded, fork):
        one.generate(**saying(one, "it is so"))
    assert same(content(made), content(loaded))
    assert same(content(made), content(fork))


def test_in_bfloat16_it_is_near() -> None:
    model = make("qwen2", torch.bfloat16)
    cache, record, ids = prepared(model)
    positions = cache.unreplayed()[:20]
    found = cache.replay(piece(ids, positions), positions, torch.tensor(PROMPT))
    expected = looked_at(
        make("qwen2"),
        ids[0, :110].tolist(),
        record.events[0],
        PROMPT,
        piece(ids, positions).tolist(),
    )
    assert (found - expected[:, :, cache.ledgers[0]["position"]]).abs().mean() < 0.01


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("policy", [Evidence(), Watching()], ids=lambda policy: policy.name)
def test_the_contract_holds_for_a_policy_that_asks_for_all(
    policy: Policy, check: Callable[[Policy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    check(policy)
