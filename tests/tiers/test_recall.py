"""What a cache forgets is outside, whole and exact, until it comes back inside the budget."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import make, tokens
from engine.helpers import kept
from engine.moves import Machine, by_position
from memdecay.engine.cache import MemDecayCache
from memdecay.engine.moving import Moved
from memdecay.errors import MemDecayError, ProfileError
from memdecay.tiers import nbytes as page_bytes
from memdecay.tiers.recall import Outside
from memdecay.tiers.stores import DiskStore, HostStore, Store

HEADS = [(1, 0), (2, 3), (3, 1)]


class Moves(Machine):
    """A machine whose tokens go out by the budget and come back by pages."""

    def __init__(self, name: str, seed: int, store: Store[Any], **settings: Any) -> None:
        super().__init__(name, seed, **settings)
        self.cache.on_forget = self.cache.on_rollback = None
        self.controller = Outside(self.cache, store, page_size=4, heads=HEADS)
        self.store = store
        rolled_back, put_back = self.cache.on_rollback, self.cache.put_back
        assert rolled_back is not None

        def rollback(seen: int) -> None:
            rolled_back(seen)
            self._rolled_back(seen)
            for at in kept(self.cache):  # a window that slid in a look slides back
                self.out.pop(at, None)

        def back(moved: Moved) -> None:
            put_back(moved)
            self.returns += len(moved)
            for at in moved.positions.tolist():
                self.returned.append((at, self.out.pop(at), self.cache.seen))

        self.cache.on_rollback = rollback
        self.cache.put_back = back  # type: ignore[method-assign]

    def recall(self) -> None:
        pages = [*self.controller.pages]
        self.rng.shuffle(pages)
        self.controller.recall(pages[:5], room=self.rng.choice([0, 6]))

    def turn(self) -> None:
        new = [self.rng.randrange(3, 211) for _ in range(7)]

        def run() -> None:
            self.ids, start = self.ids[: self.cache.seen], self.cache.seen
            for part in (new[:5], new[5:]):
                out = self.model(input_ids=torch.tensor([part]), cache=self.cache)
                self.logits += [(start + at, row.clone()) for at, row in enumerate(out.logits[0])]
                self.ids += part
                start += len(part)

        self.controller.read(run, len(new), pages=3)

    def run(self, steps: int) -> None:
        for _ in range(5):
            self.forward()
        moves = [self.forward] * 3 + [self.generate, self.crop, self.recall, self.turn, self.turn]
        for _ in range(steps):
            self.rng.choice(moves)()
            cache, controller = self.cache, self.controller
            assert cache.seen == len(self.ids)
            assert cache.kept() <= cache.peak_tokens <= cache.budget
            assert not bool(cache.ledgers[0]["pinned"].any())
            assert set(kept(cache)) == set(range(cache.seen)) - set(self.out)
            if cache.main.window is None:
                assert controller.tokens == len(self.out), "all that is gone is outside"
                assert set(controller.pages) == {at // 4 for at in self.out}
            assert self.store.tokens == controller.tokens


SETTINGS = [
    {"budget": 32, "policy": "memdecay"},
    {"budget": 24, "policy": "memdecay-paper", "page_size": 4, "align": "region"},
]


@pytest.mark.parametrize("setting", range(2))
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral_sliding", "gpt2"])
@torch.no_grad()
def test_any_way_out_and_back_equals_the_oracle(name: str, setting: int, tmp_path: Path) -> None:
    store: Store[Any] = DiskStore(tmp_path) if setting else HostStore()
    machine = Moves(name, setting, store, **SETTINGS[setting])
    machine.run(25)
    assert machine.returns >= 20
    assert machine.worst(machine.events()) < 1e-4
    assert machine.worst(machine.events(returned=False)) > 1e-2, "what came back must matter"


@torch.no_grad()
def filled(
    count: int = 60, budget: int | None = 40, **settings: Any
) -> tuple[PreTrainedModel, MemDecayCache, Outside]:
    model = make("llama")
    settings = {"policy": "streaming", "page_size": 4, **settings}
    cache = MemDecayCache(model, budget=budget, **settings)
    outside = Outside(cache, HostStore(), page_size=4, heads=HEADS)
    for start in range(0, count, 10):
        model(input_ids=tokens(count)[:, start : start + 10], cache=cache)
    return model, cache, outside


def test_pages_come_back_to_the_bit_in_exchange_for_the_worst() -> None:
    given: dict[int, tuple[Tensor, ...]] = {}
    _, cache, outside = filled(count=40)
    forget = cache.on_forget
    assert forget is not None and not outside.pages

    def noted(row: int, moved: Moved) -> None:
        for at, position in enumerate(moved.positions.tolist()):
            columns = [moved.columns[name][at] for name in sorted(moved.columns)]
            given[position] = (moved.keys[:, :, at], moved.values[:, :, at], *columns)
        forget(row, moved)

    cache.on_forget = noted
    cache.shrink(20)
    assert outside.pages == {1: 4, 2: 4, 3: 4, 4: 4, 5: 4} and outside.tokens == 20
    assert outside.summary_bytes >= 20 * 3 * (16 + 4)
    cache.budget = 24
    assert outside.recall([4, 9, 2]).tolist() == [*range(8, 12), *range(16, 20)]
    assert cache.kept() == 24 and outside.pages == {1: 4, 3: 4, 5: 4, 6: 4}
    moved = cache.take([*range(8, 12), *range(16, 20)])
    for at, position in enumerate(moved.positions.tolist()):
        expected = given[position]
        assert torch.equal(moved.keys[:, :, at], expected[0])
        assert torch.equal(moved.values[:, :, at], expected[1])
        for name, value in zip(sorted(moved.columns), expected[2:], strict=True):
            assert name == "page_index" or torch.equal(moved.columns[name][at], value)


def test_as_many_pages_come_back_as_have_room() -> None:
    _, cache, outside = filled()
    assert cache.kept() == 40 and outside.tokens == 20
    cache.pin(lambda ledger: ledger["position"] >= 32)  # 28 of 40
    assert outside.recall([1, 2, 3, 4, 5], room=4).tolist() == [*range(4, 12)]
    assert cache.kept() == 36 and kept(cache)[:8] == [*range(4, 12)]
    assert not len(outside.recall([3], room=12))
    assert cache.kept() == 36, "nothing goes for what cannot come"
    assert not len(outside.recall([], room=40)) and not len(outside.recall([99], room=40))
    assert outside.recall([3], room=10).tolist() == [12, 13], "a part, where the whole has no room"
    assert outside.pages[3] == 2 and outside.recall([3]).tolist() == [14, 15]
    assert cache.ledgers[0]["pinned"].sum() == 28


def test_what_is_kept_of_a_page_stays_when_the_rest_comes_back() -> None:
    _, cache, outside = filled(page_size=1)
    outside._forgotten(0, cache.take([30, 31]))
    assert outside.recall([7], room=8).tolist() == [30, 31]
    worst = [*range(24, 28), *range(32, 36)]
    assert kept(cache) == [at for at in [0, 1, 2, 3, *range(24, 60)] if at not in worst]
    assert 7 not in outside.pages and {6, 8} <= outside.pages.keys()


def test_a_part_joins_what_is_outside_of_its_page() -> None:
    _, cache, outside = filled(count=40, policy="streaming", page_size=1, budget=None)
    for positions in ([9], [11, 21], [8, 10]):
        outside._forgotten(0, cache.take(positions))
    assert outside.pages == {2: 4, 5: 1}
    assert outside.recall([5, 2]).tolist() == [8, 9, 10, 11, 21] and cache.kept() == 40


def test_a_rollback_reaches_outside() -> None:
    _, cache, outside = filled(count=40)
    outside._forgotten(0, cache.take([20, 33, 34, 37]))
    cache.crop(-6)
    assert outside.pages == {5: 1, 8: 1} and outside.store.tokens == 2
    assert outside.recall([8, 9, 5]).tolist() == [20, 33]
    cache.shrink(10)
    cache.reset()
    assert outside.pages == {} and len(outside.store) == 0


@torch.no_grad()
def test_a_look_leaves_no_trace() -> None:
    model, cache, outside = filled(count=30, policy="memdecay-paper")
    before = by_position(cache)
    new = tokens(6, seed=3)
    queries = outside.look(lambda: model(input_ids=new, cache=cache), 6)
    assert queries.shape == (3, 6, 16)
    after = by_position(cache)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert cache.on_queries is None and not outside.pages

    with pytest.raises(OSError, match="stop"):
        outside.look(lambda: fails(model(input_ids=new, cache=cache)), 6)
    after = by_position(cache)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert cache.on_queries is None


def fails(_: object) -> None:
    raise OSError("stop")


@torch.no_grad()
def test_a_turn_is_read_with_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, outside = filled(count=60)
    new = tokens(6, seed=4)
    runs: list[tuple[int, list[int]]] = []
    claims: dict[int, float] = {}

    def run() -> str:
        model(input_ids=new, cache=cache)
        runs.append((cache.seen, kept(cache)))
        return "answer"

    best = outside.best

    def watched(queries: Tensor, count: int) -> list[int]:
        claims.update(exact_claims(outside, queries))
        return best(queries, count)

    monkeypatch.setattr(outside, "best", watched)
    assert outside.read(run, 6, pages=2, room=3) == "answer"
    assert [at for at, _ in runs] == [66, 66] and cache.seen == 66
    came = {at // 4 for at in set(runs[1][1]) - set(runs[0][1])}
    # Keys at 8 bits cannot tell pages apart that are nearly alike.
    second = sorted(claims.values())[-2]
    assert len(came) == 2 and min(claims[page] for page in came) > second - 0.1
    assert min(claims.values()) < second - 0.5
    assert cache.kept() <= 40 - 3


def exact_claims(outside: Outside, queries: Tensor) -> dict[int, float]:
    """What each page's exact keys are worth to these queries."""
    found = []
    for page in outside.pages:
        part = outside.store.get(page)  # type: ignore[attr-defined]
        keys = torch.stack([part.keys[layer, head // 2] for layer, head in HEADS])
        found.append((queries @ keys.transpose(1, 2)).amax(2))
    products = torch.stack(found, 2)  # head, query, page
    z = (products - products.mean(2, keepdim=True)) / products.std(2, keepdim=True)
    claims = []
    for one in (products.amax(1), (z - z.mean(1, keepdim=True)).amax(1)):
        claims.append((one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True))
    return dict(zip(outside.pages, (claims[0] + claims[1]).mean(0).tolist(), strict=True))


@torch.no_grad()
def test_a_turn_runs_once_while_nothing_is_outside_or_wanted() -> None:
    model, cache, outside = filled(count=20)
    runs: list[int] = []

    def run() -> None:
        runs.append(cache.seen)
        model(input_ids=tokens(6), cache=cache)

    outside.read(run, 6)
    outside.read(run, 6, pages=0)
    assert runs == [20, 26]


def test_a_thousand_recalls_leak_nothing() -> None:
    _, cache, outside = filled()
    store, rng = outside.store, random.Random(2)
    assert isinstance(store, HostStore)
    nbytes, alive = cache.nbytes, set()
    for cycle in range(1000):
        assert len(outside.recall(rng.sample([*outside.pages], 2))) == 8
        assert cache.kept() == 40 and outside.tokens == store.tokens == 20
        if cycle in (500, 999):
            assert store.bytes == sum(page_bytes(store.get(page)) for page in outside.pages)
            gc.collect()
            alive.add(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
    assert cache.nbytes == nbytes and cache.peak_tokens == 40
    assert outside.summary_bytes <= 4 * 20 * 3 * (16 + 4)
    assert len(alive) == 1, "as many tensors alive as before"


class Forgetful(HostStore):
    """A store that is full after two pages, and loses one."""

    lost = 2

    def put(self, page_id: int, page: Any) -> bool:
        return len(self) < 2 and super().put(page_id, page)

    def pop(self, page_id: int) -> Any:
        page = super().pop(page_id)
        return None if page_id == self.lost else page


def test_what_the_store_cannot_keep_is_dropped() -> None:
    _, cache, outside = filled(count=40)
    outside.store = Forgetful()
    cache.shrink(20)
    assert outside.pages == {1: 4, 2: 4} and cache.kept() == 20
    assert outside.recall([2, 1]).tolist() == [*range(4, 8)]
    assert outside.pages == {} and set(range(4, 8)) <= set(kept(cache))
    assert not set(range(8, 12)) & set(kept(cache))


def test_a_part_for_which_there_is_no_room_is_dropped_alone() -> None:
    _, cache, outside = filled(count=40, page_size=1)
    outside.store = HostStore(max_tokens=3)
    for positions in ([8, 9], [10, 11]):
        outside._forgotten(0, cache.take(positions))
    assert outside.pages == {2: 2} and outside.store.tokens == 2
    assert outside.recall([2]).tolist() == [8, 9] and {8, 9} <= set(kept(cache))


def test_what_cannot_be_done_is_refused() -> None:
    model, cache, outside = filled()

    def refused(call: Any, match: str, kind: type[MemDecayError] = MemDecayError) -> None:
        with pytest.raises(kind, match=match):
            call()

    refused(lambda: Outside(cache, HostStore()), "kept by somebody else already")
    other = MemDecayCache(model, budget=40)
    refused(lambda: Outside(other, HostStore(), page_size=0), "page_size is 0, but")
    refused(lambda: Outside(other, HostStore(), heads=[(9, 0)]), "layer 9", ProfileError)
    assert other.on_forget is None
    by_head = MemDecayCache(model, budget=40, policy="memdecay-heads")
    refused(lambda: Outside(by_head, HostStore()), "lets heads keep their own tokens")
    refused(lambda: outside.recall([1], room=-1), "room is -1, but")
    refused(lambda: outside.best(torch.zeros(3, 1, 16), -1), "count is -1, but")
    refused(lambda: outside.read(lambda: None, 3, pages=True), "pages is True, but")
    refused(lambda: outside.look(lambda: None, 3), "run read no tokens")
    blind = Outside(other, HostStore())
    assert blind.heads == ()
    refused(lambda: blind.look(lambda: None, 3), "heads is empty, as policy 'memdecay' watches")
