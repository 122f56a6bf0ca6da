"""Random moves of tokens out of a cache and back, and what the oracle has to know of them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from engine.families import Event, make, oracle
from engine.helpers import kept
from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.moving import Moved


def by_position(cache: MemDecayCache) -> dict[str, Tensor]:
    """What is known of the kept tokens, in order of position instead of slots."""
    state = {}
    ledger = cache.ledgers[0]
    order = ledger["position"].argsort()
    for name in ledger.columns:
        state[name] = ledger[name][order]
    for layer, pool in enumerate(cache.pools):
        table = cache.table_of(layer)
        at = table.index[0, : table.width].argsort()
        state[f"pool{layer}"] = pool.kv[:, 0][:, :, at]
    state["counts"] = torch.tensor([*ledger.mark().values(), cache.seen, cache.evicted_tokens])
    return {name: tensor.clone() for name, tensor in state.items()}


class Machine:
    """A cache under random moves, and everything that the oracle has to know of them."""

    def __init__(self, name: str, seed: int, budget: int | None, **settings: Any) -> None:
        self.model = make(name)
        self.cache = MemDecayCache(self.model, budget=budget, **settings)
        self.rng = random.Random(seed)
        self.ids: list[int] = []
        self.logits: list[tuple[int, Tensor]] = []
        self.out: dict[int, int] = {}
        self.returned: list[tuple[int, int, int]] = []
        self.outside: list[Moved] = []
        self.returns = 0
        self.cache.on_evict = self._evicted
        self.cache.on_forget = lambda row, moved: self.outside.append(moved)
        self.cache.on_rollback = self._rolled_back

    def _evicted(self, what: Evicted) -> None:
        self.out.update(dict.fromkeys(what.position.tolist(), self.cache.seen))

    def _rolled_back(self, seen: int) -> None:
        left = [moved.select(moved.positions < seen) for moved in self.outside]
        self.outside = [moved for moved in left if len(moved)]
        self.out = {at: min(when, seen) for at, when in self.out.items() if at < seen}
        self.returned = [(at, min(a, seen), min(b, seen)) for at, a, b in self.returned]
        self.logits = [(at, said) for at, said in self.logits if at < seen]
        del self.ids[seen:]

    def forward(self) -> None:
        count = self.rng.choice([1, 1, 2, 5, 12])
        new = [self.rng.randrange(3, 211) for _ in range(count)]
        out = self.model(input_ids=torch.tensor([new]), cache=self.cache)
        start = len(self.ids)
        self.logits += [(start + at, row.clone()) for at, row in enumerate(out.logits[0])]
        self.ids += new

    def generate(self) -> None:
        start, inputs = len(self.ids), torch.tensor([[*self.ids, self.rng.randrange(3, 211)]])
        out = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            cache=self.cache,
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        self.ids = out.sequences[0, : self.cache.seen].tolist()
        self.logits += [(start + at, row[0]) for at, row in enumerate(out.logits)]

    def some(self) -> list[int]:
        ledger = self.cache.ledgers[0]
        free = ledger["position"][~ledger.held()].tolist()
        return self.rng.sample(free, min(len(free), self.rng.randrange(1, 14)))

    def take(self) -> None:
        self.outside.append(self.cache.take(self.some()))

    def evict(self) -> None:
        self.cache.evict(self.some()[:3])

    def put_back(self) -> None:
        if not self.outside:
            return
        moved = self.outside.pop(self.rng.randrange(len(self.outside)))
        room = len(moved)
        if self.cache.budget is not None:
            room = min(room, self.cache.budget - self.cache.kept())
        chosen = torch.tensor(sorted(self.rng.sample(range(len(moved)), room)), dtype=torch.int64)
        rest = torch.ones(len(moved), dtype=torch.bool)
        rest[chosen] = False
        if bool(rest.any()):
            self.outside.append(moved.select(rest))
        back = moved.select(chosen)
        self.cache.put_back(back)
        self.returns += len(back)
        for at in back.positions.tolist():
            self.returned.append((at, self.out.pop(at), self.cache.seen))

    def crop(self) -> None:
        count = self.rng.randrange(1, 6)
        floor = max(table.floor for table in self.cache.tables)
        if self.cache.seen - count >= floor:
            self.cache.crop(-count)

    def run(self, steps: int) -> None:
        self.forward()
        moves = [self.forward] * 4 + [self.generate, self.take, self.take, self.evict, self.crop]
        moves += [self.put_back] * 3
        for _ in range(steps):
            self.rng.choice(moves)()
            cache = self.cache
            assert cache.seen == len(self.ids)
            assert cache.budget is None or cache.kept() <= cache.budget
            assert set(kept(cache)) == set(range(cache.seen)) - set(self.out)

    def worst(self, events: list[Event]) -> float:
        expected = oracle(self.model, torch.tensor([self.ids]), events)
        return max(float((said - expected[at]).abs().max()) for at, said in self.logits)

    def events(self, *, returned: bool = True) -> list[Event]:
        ends = [(a, b if returned else len(self.ids), at) for at, a, b in self.returned]
        ends += [(when, len(self.ids), at) for at, when in self.out.items()]
        together: dict[tuple[int, int], list[int]] = {}
        for start, end, at in ends:
            together.setdefault((start, end), []).append(at)
        return [(start, positions, end) for (start, end), positions in together.items()]
