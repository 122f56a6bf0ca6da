"""Surprisal is -log p of each token as the model's own logits have it, however it was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from engine.evidence import Evidence, Watching, install, literal
from engine.families import CONFIGS, VOCAB, make, oracle, tokens
from engine.helpers import Record, chunks, kept, same, snapshot
from engine.sessions import content, failing, full_logits, session, system, tiny, user
from engine.test_interrupts import interrupt_at
from memdecay import MemDecayError, ModelError, Session
from memdecay.engine import surprisal as room
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.ledger import Ledger

EVERY_FAMILY = pytest.mark.parametrize("name", CONFIGS)


def cache_of(model: PreTrainedModel, **options: Any) -> MemDecayCache:
    settings = {"budget": None, "policy": Evidence(), "surprisal_vocabulary": None, "page_size": 4}
    return MemDecayCache(model, **{**settings, **options})


def by_position(cache: MemDecayCache, row: int = 0) -> Tensor:
    ledger = cache.ledgers[row]
    return ledger["surprisal"][ledger["position"].argsort()].clone()


def agree(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool((left - right).abs().max() < 1e-4)


@EVERY_FAMILY
@pytest.mark.parametrize("sizes", [[90], [1], [40, 7, 1, 1, 1, 30, 2, 1]])
@torch.no_grad()
def test_it_is_the_log_softmax_of_the_models_logits(name: str, sizes: list[int]) -> None:
    model = make(name)
    ids = tokens(90)
    cache = cache_of(model)
    for start, end in chunks(90, sizes):
        model(input_ids=ids[:, start:end], cache=cache)
    stock = -torch.log_softmax(model(ids).logits[0], -1)
    expected = torch.cat([torch.zeros(1), stock[torch.arange(89), ids[0, 1:]]])
    assert agree(by_position(cache), expected[kept(cache)])
    assert agree(literal(model(ids).logits[0], ids[0].tolist()), expected)


@pytest.mark.parametrize("vocabulary", [1, 50, VOCAB - 1, VOCAB, 8192])
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])  # plain, with bias, with a softcap
@torch.no_grad()
def test_a_capped_vocabulary_is_the_first_ids_and_the_token(name: str, vocabulary: int) -> None:
    model = make(name)
    if name == "phi":
        model.lm_head.bias.data.normal_()
    ids = tokens(60)
    cache = cache_of(model, surprisal_vocabulary=vocabulary)
    for start, end in chunks(60, [30, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    expected = literal(model(ids).logits[0], ids[0].tolist(), min(vocabulary, VOCAB))
    assert agree(by_position(cache), expected)
    assert (by_position(cache) >= 0).all()


@pytest.mark.parametrize("policy", [Evidence(), Watching()], ids=["late", "every step"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral_sliding"])
@torch.no_grad()
def test_with_evictions_it_is_what_was_said_of_what_was_kept(name: str, policy: Evidence) -> None:
    model = make(name)
    cache = cache_of(model, budget=40, policy=policy)
    record = Record(model, cache)
    ids = tokens(230)
    for start, end in chunks(230, [16, 16, 5, 3, 16, *[1] * 100, 8, 2, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    assert cache.evicted_tokens > 150
    expected = literal(oracle(model, ids, record.events[0]), ids[0].tolist())
    assert agree(by_position(cache), expected[kept(cache)])


@torch.no_grad()
def test_decode_steps_are_worked_out_64_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    sizes: list[int] = []
    real = room.Head.surprisal

    def counted(head: room.Head, hidden: Tensor, ids: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return real(head, hidden, ids)

    monkeypatch.setattr(room.Head, "surprisal", counted)
    ids = tokens(400)
    cache = cache_of(model)
    model(input_ids=ids[:, :100], cache=cache)
    assert sizes == [99]
    for at in range(100, 300):
        model(input_ids=ids[:, at : at + 1], cache=cache)
        trail = cache.ledgers[0].trail
        assert sum(len(run.hidden) for run in trail.runs) <= 2 * room.HELD
    assert sizes == [99, 64, 64, 64]
    assert agree(by_position(cache), literal(model(ids).logits[0], ids[0, :300].tolist()))
    assert sizes == [99, 64, 64, 64, 8]
    model(input_ids=ids[:, 300:], cache=cache)
    assert sum(len(run.hidden) for run in cache.ledgers[0].trail.runs) == room.HELD


@torch.no_grad()
def test_logits_exist_for_a_block_of_tokens_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    most: list[int] = []
    real = room.Head._surprisal
    monkeypatch.setattr(
        room.Head,
        "_surprisal",
        lambda head, hidden, ids: most.append(len(hidden)) or real(head, hidden, ids),
    )
    ids = tokens(300)
    cache = cache_of(model, surprisal_vocabulary=50)
    model(input_ids=ids, cache=cache)
    assert most == [128, 128, 43]
    assert agree(by_position(cache), literal(model(ids).logits[0], ids[0].tolist(), 50))


@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_rows_of_a_padded_batch_are_as_each_alone(side: str) -> None:
    model = make("llama")
    lengths = [40, 23, 31]
    ids = tokens(60, rows=3)
    mask = torch.zeros(3, 40, dtype=torch.int64)
    for row, length in enumerate(lengths):
        first = {"left": 40 - length, "right": 0, "both": (40 - length) // 2}[side]
        mask[row, first : first + length] = 1
    cache = cache_of(model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=ids[:, :40], attention_mask=mask, position_ids=positions, cache=cache)
    for step in range(12):
        new = torch.ones(3, 1, dtype=torch.int64)
        new[1, 0] = step % 3 != 1  # a row that pauses
        mask = torch.cat([mask, new], 1)
        model(
            input_ids=ids[:, 40 + step : 41 + step],
            attention_mask=mask,
            position_ids=(mask.sum(1) - 1)[:, None],
            cache=cache,
        )
    for row in range(3):
        alone = ids[row, : mask.shape[1]][mask[row] == 1]
        expected = literal(model(alone[None]).logits[0], alone.tolist())
        assert agree(by_position(cache, row), expected), row


@torch.no_grad()
def test_rows_that_move_take_their_hidden_states_with_them() -> None:
    model = make("llama")
    ids = tokens(40, rows=3)
    cache = cache_of(model)
    model(input_ids=ids[:, :20], cache=cache)
    model(input_ids=ids[:, 20:21], cache=cache)
    ids = ids[[2, 0, 2]]
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    ids[0, 21] = 7
    for at in range(21, 30):
        model(input_ids=ids[:, at : at + 1], cache=cache)
    for row in range(3):
        expected = literal(model(ids[row : row + 1, :30]).logits[0], ids[row, :30].tolist())
        assert agree(by_position(cache, row), expected)
    assert cache.ledgers[2].waiting == 0
    model(input_ids=ids[:, 30:31], cache=cache)
    branch = cache.branch([torch.arange(31), torch.arange(5, 31)], row=1)
    assert all(ledger.waiting == 0 for ledger in branch.ledgers), "worked out once for all"
    assert torch.equal(by_position(branch, 1), by_position(cache, 1)[5:])
    model(input_ids=ids[[1, 1], 31:32], cache=branch)
    expected = literal(model(ids[1:2, :32]).logits[0], ids[1, :32].tolist())
    assert agree(by_position(branch, 0), expected)


@torch.no_grad()
def test_after_a_rollback_the_next_token_is_foreseen_by_the_one_before() -> None:
    model = make("llama")
    ids = tokens(320)
    cache = cache_of(model)
    model(input_ids=ids[:, :260], cache=cache)
    for at in range(260, 270):
        model(input_ids=ids[:, at : at + 1], cache=cache)
    model(input_ids=tokens(5, seed=3), cache=cache)  # drafted, and all of it taken back
    cache.crop(-5)
    model(input_ids=ids[:, 270:274], cache=cache)
    by_position(cache)
    model(input_ids=tokens(1, seed=3), cache=cache)
    cache.crop(-3)
    for start, end in ((272, 275), (275, 276)):
        model(input_ids=ids[:, start:end], cache=cache)
    expected = literal(model(ids[:, :276]).logits[0], ids[0, :276].tolist())
    assert agree(by_position(cache), expected)
    cache.crop(-260)
    assert agree(by_position(cache), expected[:16])
    model(input_ids=ids[:, 16:20], cache=cache)
    expected[16] = 0.0  # the hidden state before it is long gone
    assert agree(by_position(cache), expected[:20])
    cache.crop(-20)
    model(input_ids=ids[:, :9], cache=cache)
    assert agree(by_position(cache), literal(model(ids[:, :9]).logits[0], ids[0, :9].tolist()))


@torch.no_grad()
def test_embeddings_have_no_surprisal_and_what_follows_them_does() -> None:
    model = make("llama")
    ids = tokens(50)
    cache = cache_of(model)
    model(input_ids=ids[:, :10], cache=cache)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, 10:30]), cache=cache)
    model(input_ids=ids[:, 30:40], cache=cache)
    expected = literal(model(ids[:, :40]).logits[0], ids[0, :40].tolist())
    expected[10:30] = 0
    assert agree(by_position(cache), expected)


@pytest.mark.parametrize("policy", [Evidence(), Watching()], ids=["late", "every step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@torch.no_grad()
def test_a_forward_that_fails_never_happened(error: Any, policy: Evidence) -> None:
    model = make("llama")
    ids = tokens(100)
    cache = cache_of(model, policy=policy)
    model(input_ids=ids[:, :30], cache=cache)
    model(input_ids=ids[:, 30:31], cache=cache)
    for wrong in (tokens(1, seed=5), tokens(70, seed=5)):
        with failing(model, 0, error), pytest.raises(error):
            model(input_ids=wrong, cache=cache)
    model(input_ids=ids[:, 31:33], cache=cache)
    expected = literal(model(ids[:, :33]).logits[0], ids[0, :33].tolist())
    assert agree(by_position(cache), expected)


@pytest.mark.parametrize("policy", [Evidence(), Watching()], ids=["late", "every step"])
@pytest.mark.parametrize("count", [1, 80])
@torch.no_grad()
def test_a_forward_that_fails_when_all_is_computed_never_happened(
    monkeypatch: pytest.MonkeyPatch, policy: Evidence, count: int
) -> None:
    model = make("llama")
    ids = tokens(200)
    cache = cache_of(model, policy=policy)
    model(input_ids=ids[:, :30], cache=cache)
    late = not isinstance(policy, Watching)
    for at in range(30, 127):
        model(input_ids=ids[:, at : at + 1], cache=cache)
    assert cache.ledgers[0].waiting == 63 * late, "the next step works them out"
    twin = cache.copy()

    def full(*_: Any) -> Tensor:
        raise MemoryError("on purpose")

    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(room.Head, "surprisal", full)
        model(input_ids=tokens(count, seed=5), cache=cache)
    assert cache.seen == twin.seen
    for one in (cache, twin):
        for start, end in chunks(20, [1, 1, 9]):
            model(input_ids=ids[:, 160 + start : 160 + end], cache=one)
    before, after = snapshot(twin), snapshot(cache)
    assert {n for n in before if not torch.equal(before[n], after[n])} <= {
        f"pool{n}" for n in range(4)
    }


@pytest.mark.parametrize("count", [1, 80])
@torch.no_grad()
def test_an_interrupt_at_any_line_is_before_or_after_a_forward(count: int) -> None:
    model = make("llama_one_layer")
    ids = tokens(170)
    ready = cache_of(model, policy=Watching())
    for start, end in chunks(71, [70, 1]):
        model(input_ids=ids[:, start:end], cache=ready)
    expected = literal(model(ids).logits[0], ids[0].tolist())
    passed, at, outcomes = True, 1, {71: 0, 71 + count: 0}
    while passed:
        cache = ready.copy()

        def step(cache: MemDecayCache = cache) -> None:
            with torch.no_grad():
                model(input_ids=ids[:, 71 : 71 + count], cache=cache)

        passed, _ = interrupt_at(at, step)
        outcomes[cache.seen] += 1
        after = cache.seen
        model(input_ids=ids[:, after : after + 2], cache=cache)
        assert agree(by_position(cache), expected[: after + 2]), at
        at += 5
    assert min(outcomes.values()) > 1


def said(made: Session) -> Tensor:
    """The literal surprisal of a session that has evicted nothing."""
    return literal(full_logits(made.model, made._ids), made._ids)


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_a_session_that_writes_forks_saves_and_loads(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    made = session(name, policy="evidence", surprisal_vocabulary=100, prefill_chunk=16)
    made.append([system(), user(20)])
    made.generate(max_new_tokens=20)
    fork = made.fork()
    made.save(tmp_path / "saved")
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    assert loaded.cache.surprisal_vocabulary == 100
    fork.append([user(3, 9)])
    for one in (made, loaded):
        one.append([user(9, 5)])
        one.generate(max_new_tokens=7)
    assert made._ids == loaded._ids and same(content(made), content(loaded))
    for one in (made, fork):
        expected = literal(full_logits(one.model, one._ids), one._ids, 100)
        assert agree(by_position(one.cache), expected)
    with failing(made.model, 3, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        made.generate(max_new_tokens=9)
    assert same(content(made), content(loaded))
    for one in (made, loaded):
        one.append([user(2, 5)])
    assert same(content(made), content(loaded))


def test_prompt_lookup_and_scored_answers_are_read_like_any_other() -> None:
    made = session(policy=Evidence(), surprisal_vocabulary=None)
    made.append([system(), user(20)])
    made.generate(max_new_tokens=40, prompt_lookup_num_tokens=3)
    made.append([{"role": "assistant", "content": "yes it is so"}, user(4)], score=True)
    expected = said(made)
    found = by_position(made.cache)
    unknown = (found == 0) & (expected > 1e-4)
    assert int(unknown.sum()) == 0
    assert agree(found, expected)


@torch.no_grad()
def test_who_does_not_ask_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this must not run")

    for owner, method in (
        (room.Head, "__init__"),
        (room.Trail, "__init__"),
        (Ledger, "read"),
        (Ledger, "trim"),
        (MemDecayCache, "_read"),
    ):
        monkeypatch.setattr(owner, method, never)
    model = make("llama")
    cache = MemDecayCache(model, budget=32)
    for start, end in chunks(80, [16, 16, 1]):
        model(input_ids=tokens(80)[:, start:end], cache=cache)
    ledger = cache.ledgers[0]
    assert not {"surprisal", "replayed"} & set(ledger.columns)
    seen = ledger.tokens(0.0)
    assert seen.surprisal.shape == seen.replayed.shape == (cache.kept(),)
    assert not seen.surprisal.any() and not seen.replayed.any()


def test_what_cannot_be_known_is_refused() -> None:
    model = make("llama")
    with pytest.raises(ModelError, match="has no output embedding"):
        cache_of(model.model)
    assert isinstance(model.model, LlamaModel)
    model.config.logits_scaling = 8.0
    with pytest.raises(ModelError, match=r"logits_scaling=8\.0"):
        cache_of(model)
    MemDecayCache(model, budget=None)
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(MemDecayError, match=f"surprisal_vocabulary is {wrong!r}"):
            MemDecayCache(make("llama"), budget=None, surprisal_vocabulary=wrong)


@torch.no_grad()
def test_in_bfloat16_it_is_near() -> None:
    model = make("qwen2", torch.bfloat16)
    ids = tokens(80)
    cache = cache_of(model, surprisal_vocabulary=60)
    for start, end in chunks(80, [40, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    expected = literal(model(ids).logits[0].float(), ids[0].tolist(), 60)
    assert by_position(cache).dtype == torch.float32
    assert (by_position(cache) - expected).abs().max() < 0.2


def test_a_session_under_inference_mode_goes_on_outside_of_it() -> None:
    model, tokenizer = tiny()
    made = Session(model, tokenizer, budget=None, policy=Evidence(), surprisal_vocabulary=None)
    with torch.inference_mode():
        made.append([system(), user(9)])
        made.generate(max_new_tokens=3)
    made.append([user(4)])
    assert agree(by_position(made.cache), said(made))
