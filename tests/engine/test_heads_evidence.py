"""Replay, watched heads and surprisal where heads keep their own tokens, against eager masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.evidence import Evidence, literal
from engine.families import make, tokens
from engine.head_helpers import HeadRecord, head_oracle, head_state, mixed, model_of
from engine.helpers import chunks, close, kept, same
from engine.sessions import failing, session, system, user
from memdecay import BudgetError, Session
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.head_cache import HeadCache
from memdecay.engine.heads import ROOM
from memdecay.engine.replay import ReplayForward
from memdecay.policy import HeadPolicy, Policy, Tokens
from memdecay.policy.registry import GROUP
from memdecay.policy.testing import CHECKS
from memdecay.regions import Profile

PROMPT = torch.tensor([5, 6, 7, 8, 9])
HEADS = ((1, 1), (0, 0), (3, 2))
SOME_FAMILIES = pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2_full", "gpt2"])
"""GQA, norms of queries, softcaps, and as many KV heads as query heads."""


@dataclass(frozen=True)
class AllByHead(HeadPolicy):
    """Asks for everything, keeps it in columns by token and by head, and scores with noise."""

    name: ClassVar[str] = "all-by-head"
    summary: ClassVar[str] = "evidence by head, for tests"
    needs: ClassVar[frozenset[str]] = frozenset({"surprisal", "replay", "heads"})
    columns: ClassVar[Mapping[str, float]] = {"looked": 0.0, "peak": 0.0}
    head_columns: ClassVar[Mapping[str, float]] = {"most": 0.0}

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        return HEADS

    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        return {"peak": torch.maximum(tokens.state["peak"], peak.amax(0))}

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        assert tokens.held is not None
        by_head = attention.unflatten(1, (tokens.held.shape[1], -1)).amax(2)
        return {
            "looked": torch.maximum(tokens.state["looked"], attention.amax((0, 1))),
            "most": torch.maximum(tokens.head_state["most"], by_head),
        }

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        assert tokens.held is not None
        score = tokens.head_state["most"] + tokens.surprisal / 20 + tokens.state["peak"]
        return score + mixed(tokens.position, tokens.held, 5)


def prepared(model: PreTrainedModel, **options: Any) -> tuple[HeadCache, HeadRecord, Tensor]:
    """A cache whose heads have evicted their own tokens, what they lost, and its ids."""
    settings: dict[str, Any] = {"budget": 44, "policy": AllByHead(), "page_size": 2, **options}
    cache = MemDecayCache(model, **settings)
    assert isinstance(cache, HeadCache)
    record = HeadRecord(cache)
    ids = tokens(240)
    with torch.no_grad():
        for start, end in chunks(110, [40, 20, 7, 13, 1]):
            model(input_ids=ids[:, start:end], cache=cache)
        cache.shrink(25)
    assert record.uneven
    return cache, record, ids


def everything(cache: HeadCache) -> dict[str, Tensor]:
    """All of a cache but free memory; and where its memory is."""
    state = head_state(cache)
    state["hidden"] = cache.ledgers[0].trail.hidden()
    state["index"] = cache.main.index[0, : cache.main.width].clone()
    state["storage"] = torch.tensor([pool.kv.data_ptr() for pool in cache.head_pools()])
    state["starts"] = torch.tensor([[*p.starts, *p.lengths] for p in cache.head_pools()])
    state["counts"] = torch.tensor(
        [cache.observations, cache.evicted_tokens, cache.evicted_pages, cache._last_count]
    )
    return state


def unlearned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    learned = ("state.looked", "head.most", "replayed")
    return {name: one for name, one in state.items() if not name.startswith(learned)}


def weights(model: PreTrainedModel, ids: Tensor, record: HeadRecord) -> Tensor:
    """Who looks at whom, `(layers, heads, length, length)`, by eager attention, masks by head."""
    return head_oracle(model, ids, record.events, attention=True, by_head=True)


@SOME_FAMILIES
@torch.no_grad()
def test_a_replay_is_the_most_attention_in_a_literal_forward(name: str) -> None:
    model = model_of(name)
    cache, record, ids = prepared(model)
    before, ledger = everything(cache), cache.head_ledger
    group = cache.layout.num_heads // cache.layout.num_kv_heads
    most = torch.zeros(ledger.holding.shape)
    for start, end in ((0, 11), (11, 20)):
        positions = cache.unreplayed()[: end - start]
        piece = ids[0, positions]
        found = cache.replay(piece, positions, PROMPT)
        whole = torch.cat([ids[0, :110], PROMPT, piece])[None]
        expected = weights(model, whole, record)[:, :, 110 + len(PROMPT) :, :110].amax(2)
        expected = expected[:, :, ledger["position"]]
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5
        assert found.amax() > 0.01
        assert not found[~ledger.holding.repeat_interleave(group, 1)].any()
        most = torch.maximum(most, found.unflatten(1, (-1, group)).amax(2))
        assert torch.equal(ledger.tokens(0.0).head_state["most"], most)
        assert torch.equal(ledger["state.looked"], most.amax((0, 1)))
    assert cache.unreplayed().tolist() == kept(cache)[20:]
    assert same(unlearned(everything(cache)), unlearned(before))
    record_at = len(record.events)
    logits = [
        model(input_ids=ids[:, 110 + a : 110 + b], cache=cache).logits[0]
        for a, b in chunks(12, [7, 1])
    ]
    assert len(record.events) == record_at, "there was room"
    assert close(torch.cat(logits), head_oracle(model, ids[:, :122], record.events)[110:])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_replay_that_fails_never_happened(name: str, error: Any) -> None:
    model = make(name)
    cache, _, ids = prepared(model)
    positions = cache.unreplayed()[:12]
    before, twin = everything(cache), cache.copy()
    with failing(model, 0, error), pytest.raises(error, match="on purpose"):
        cache.replay(ids[0, positions], positions, PROMPT)
    assert same(everything(cache), before)
    logits = [model(input_ids=ids[:, 110:120], cache=one).logits for one in (cache, twin)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_head_that_holds_nothing_replays() -> None:
    model = make("llama")
    full = MemDecayCache(model, budget=None, policy=Evidence())
    ids = tokens(40)
    model(input_ids=ids, cache=full)
    everyone = torch.arange(40)
    keep = [[everyone[layer::3], everyone[:0]] for layer in range(3)] + [[everyone, everyone[9:]]]
    branch = full.branch_heads(keep)
    lost = [[everyone[~torch.isin(everyone, one)] for one in row] for row in keep]
    found = branch.replay(ids[0, 3:20], everyone[3:20], PROMPT)
    whole = torch.cat([ids[0], PROMPT, ids[0, 3:20]])[None]
    expected = head_oracle(model, whole, [(40, lost)], attention=True, by_head=True)
    expected = expected[:, :, 45:, :40].amax(2)[:, :, branch.ledgers[0]["position"]]
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(branch.ledgers[0]["state.looked"], found.amax((0, 1)))
    assert not full.ledgers[0]["replayed"].any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_budget_holds_in_entries_inside_every_layer_of_a_replay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 96
    made = session(name, policy=AllByHead(), budget=budget, page_size=2)
    made.append([system(), user(300)])
    cache = made.cache
    assert isinstance(cache, HeadCache)
    heads, most = cache.layout.num_kv_heads, []
    real = ReplayForward.attention

    def watched(forward: ReplayForward, module: Any, *args: Any, **kwargs: Any) -> Any:
        assert args[1].shape[1:3] == (heads, forward.count)
        stored = sum(sum(pool.lengths) for pool in cache.head_pools())
        assert stored == cache.head_ledger.entries
        allocated = sum(sum(pool.capacities) for pool in cache.head_pools())
        assert allocated <= stored + 2 * ROOM * cache.parts
        most.append(stored + forward.count * heads)
        return real(forward, module, *args, **kwargs)

    monkeypatch.setattr(ReplayForward, "attention", watched)
    cache.peak_tokens = 0
    idle = made.idle()
    assert idle.left == 0 and not idle.interrupted
    assert len(cache.unreplayed()) == 0 and idle.replayed >= cache.head_ledger.length
    assert budget * cache.parts - heads < max(most) <= budget * cache.parts, "room is used"
    assert cache.peak_tokens == -(-max(most) // cache.parts) == budget
    ledger, position = cache.head_ledger, cache.ledgers[0]["position"]
    ledger["replayed"].fill_(False)
    free = (budget * cache.parts - ledger.entries) // heads
    positions = position.sort().values[: free - 1]
    ids = torch.tensor([made._ids[place] for place in positions.tolist()])
    before, one_more = everything(cache), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(BudgetError, match="to repeat take the room of"):
        cache.replay(ids, positions, one_more)
    assert same(everything(cache), before)
    cache.replay(ids, positions, one_more[:1])


def test_a_full_cache_makes_room_and_its_bytes_follow() -> None:
    made = session(policy=AllByHead(), budget=128, page_size=2)
    made.append([system(), user(200)])
    cache = made.cache
    assert isinstance(cache, HeadCache)
    while cache.head_ledger.entries < 128 * cache.parts - 10:
        made.generate(max_new_tokens=1)
    before = cache.head_ledger.entries
    room = cache.replay_room(20, 100)
    assert room == (128 * cache.parts - cache.head_ledger.entries) // 2 - 20
    assert 16 <= room < 16 + 4, "no page more than needed"
    assert cache.head_ledger.entries < before
    for pool in cache.head_pools():
        for length, capacity in zip(pool.lengths, pool.capacities, strict=True):
            assert length <= capacity <= length + 2 * ROOM
    assert made.idle().left == 0


def test_what_was_replayed_is_saved_forked_and_undone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.entry_points
    entry = metadata.EntryPoint(name="all-by-head", value=f"{__name__}:AllByHead", group=GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda **params: [*real(**params), entry])
    made = session(policy="all-by-head", budget=90, page_size=2, prefill_chunk=16)
    made.append([system(), user(120)])
    assert made.idle().replayed > 0
    made.append([user(5)])
    made.save(tmp_path / "saved")
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    fork = made.fork()
    with failing(made.model, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        made.append([user(9)])
    most = loaded.cache.ledgers[0]["head.most"]
    assert most.any() and torch.equal(most, fork.cache.ledgers[0]["head.most"])
    assert loaded.idle().replayed == fork.idle().replayed > 0
    answers = [one.generate(max_new_tokens=8, do_sample=False) for one in (loaded, fork)]
    assert answers[0] == answers[1]
    assert same(head_state(loaded.cache), head_state(fork.cache))
    assert made.idle().left == 0


@pytest.mark.parametrize("chunk", [1, 9])
@SOME_FAMILIES
@torch.no_grad()
def test_peaks_are_the_highest_eager_weights_of_what_a_head_holds(name: str, chunk: int) -> None:
    model, length = model_of(name), 90
    ids = tokens(length)
    cache = MemDecayCache(model, budget=36, policy=AllByHead(), page_size=2)
    record = HeadRecord(cache)
    heard: list[tuple[int, Tensor, Tensor]] = []

    def listen(row: int, peak: Tensor) -> None:
        heard.append((cache.seen, cache.ledgers[0]["position"].clone(), peak.clone()))

    cache.on_heads = listen
    for start in range(0, length, chunk):
        model(input_ids=ids[:, start : start + chunk], cache=cache)
    assert record.uneven and len(heard) == length // chunk
    every = weights(model, ids, record)
    literal_heads = torch.stack([every[layer, head] for layer, head in HEADS])
    literal_heads.diagonal(dim1=1, dim2=2).zero_()
    lost = 0
    for seen, position, peak in heard:
        assert peak.shape == (len(HEADS), len(position))
        expected = literal_heads[:, seen - chunk : seen, position].amax(1)
        assert torch.allclose(peak, expected, atol=1e-5)
        lost += int(((peak == 0) & (position < seen - chunk)).sum())
    assert lost > 50, "heads that do not hold a token give it nothing"
    assert max(float(peak.max()) for _, _, peak in heard) > 0.05


@pytest.mark.parametrize("name", ["llama", "gemma2_full"])
@torch.no_grad()
def test_surprisal_is_what_was_said_of_what_each_head_kept(name: str) -> None:
    model = model_of(name)
    cache = MemDecayCache(
        model, budget=40, policy=AllByHead(), page_size=2, surprisal_vocabulary=None
    )
    record = HeadRecord(cache)
    ids = tokens(160)
    for start, end in chunks(160, [16, 16, 5, 3, 16, *[1] * 70, 8, 2, 1]):
        model(input_ids=ids[:, start:end], cache=cache)
    assert record.uneven and cache.evicted_tokens > 20
    ledger = cache.ledgers[0]
    expected = literal(head_oracle(model, ids, record.events), ids[0].tolist())
    assert (ledger["surprisal"] - expected[ledger["position"]]).abs().max() < 1e-4
    some = [[torch.arange(n, 160, 7) for n in range(2)] for _ in range(4)]
    branch = cache.branch_heads(some)
    theirs = branch.ledgers[0]
    assert (theirs["surprisal"] - expected[theirs["position"]]).abs().max() < 1e-4


def test_a_session_reads_the_same_with_and_without_replay() -> None:
    made = session(policy=AllByHead(), budget=None)
    made.append([system(), user(40)])
    twin = made.fork()
    before = head_state(made.cache)
    assert made.idle().left == 0
    assert same(unlearned(head_state(made.cache)), unlearned(before))
    assert made.generate(max_new_tokens=9) == twin.generate(max_new_tokens=9)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds_for_a_policy_by_head_that_asks_for_all(
    check: Callable[[Policy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.entry_points
    entry = metadata.EntryPoint(name="all-by-head", value=f"{__name__}:AllByHead", group=GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda **params: [*real(**params), entry])
    check(AllByHead())
