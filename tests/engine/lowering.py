"""A cache with `full_precision` under random steps, beside a reference that shares no code with it.

The reference is the model's own forward with transformers' own cache. Evicted tokens are hidden by
an explicit mask; what goes down is replaced in that cache by what literal loops of the quantizer's
formula say, at the moment it goes down.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from engine.families import make
from engine.helpers import kept
from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.graded_cache import GradedCache
from memdecay.engine.moving import Moved


def bfloat16_towards(number: float, up: bool) -> float:
    """The nearest bfloat16 that is not below (`up`) or not above a float32."""
    bits = np.array(number, np.float32).view(np.uint32)
    cut = np.array(bits & np.uint32(0xFFFF0000), np.uint32)
    toward_zero = float(cut.view(np.float32))
    away = float(np.array(cut + np.uint32(0x10000), np.uint32).view(np.float32))
    if toward_zero == number:
        return toward_zero
    return away if up == (number > 0) else toward_zero


def levels(numbers: np.ndarray, bits: int) -> tuple[list[float], list[float], float]:
    """What a list of numbers with one scale becomes, how far each is from a tie, and the step."""
    top = 2**bits - 1
    low = bfloat16_towards(float(min(numbers)), up=False)
    span = np.float32(np.float32(max(numbers)) - np.float32(low)) / np.float32(top)
    step = bfloat16_towards(float(span), up=True)
    restored, ties = [], []
    for number in numbers:
        exact = (float(number) - low) / step if step else 0.0
        code = min(max(round(exact), 0), top)
        restored.append(low + step * code)
        ties.append(abs(exact - math.floor(exact) - 0.5))
    return restored, ties, step


def reference(kv: Tensor, axis: int, bits: int, ours: Tensor) -> Tensor:
    """What `(n, head_dim)` becomes when those along an axis share a scale.

    Of a number that lies on the border of two codes, to within what two forwards differ by, both
    are right: there `ours` is taken, if it is one of the two.
    """
    rows = kv.numpy() if axis == 1 else kv.numpy().T
    mine = ours.numpy() if axis == 1 else ours.numpy().T
    out = np.empty_like(rows)
    for at, numbers in enumerate(rows):
        restored, ties, step = levels(numbers, bits)
        for channel, (value, tie) in enumerate(zip(restored, ties, strict=True)):
            got = float(mine[at, channel])
            near = tie < 1e-3 and abs(abs(got - value) - step) < 1e-4
            out[at, channel] = got if near else value
    return torch.from_numpy(out if axis == 1 else out.T.copy())


class Lockstep:
    """A `GradedCache` and its reference, taking the same steps; `worst` compares all logits."""

    def __init__(self, name: str, seed: int, budget: int | None, **settings: Any) -> None:
        self.model = make(name)
        self.rng = random.Random(seed)
        self.cache = MemDecayCache(self.model, budget=budget, **settings)
        assert isinstance(self.cache, GradedCache)
        self.theirs = DynamicCache(config=self.model.config)
        self.hidden: set[int] = set()
        self.coded: set[int] = set()
        self.lowered = 0
        self.groups: list[int] = []
        self.ids: list[int] = []
        self.worst = 0.0
        self.outside: list[Moved] = []
        self._new: list[tuple[list[int], list[int]]] = []
        self.listen()

    def listen(self) -> None:
        cache = self.cache
        cache.on_evict = self._evicted
        cache.on_rollback = self._rolled_back
        own = type(cache)._lower

        def lower(down: Tensor) -> None:
            positions = sorted(cache.ledgers[0]["position"][down].tolist())
            before = len(cache.graded.sizes)
            own(cache, down)
            sizes = cache.graded.sizes[before:]
            assert sum(sizes) == len(positions)
            self._follow(positions, sizes)

        cache._lower = lower  # type: ignore[method-assign]

    def _evicted(self, what: Evicted) -> None:
        self.hidden |= set(what.position.tolist())

    def _rolled_back(self, seen: int) -> None:
        self.hidden = {at for at in self.hidden if at < seen}
        self.coded = {at for at in self.coded if at < seen}
        left = [moved.select(moved.positions < seen) for moved in self.outside]
        self.outside = [moved for moved in left if len(moved)]
        self.theirs.crop(seen - len(self.ids))
        del self.ids[seen:]

    def _follow(self, positions: list[int], sizes: list[int]) -> None:
        """Replace in their cache what went down in ours."""
        assert not self.coded & set(positions), "codes are made once"
        self.coded |= set(positions)
        self.lowered += len(positions)
        self.groups += sizes
        index = self.cache.main.index[0, : self.cache.main.width].tolist()
        slots = torch.tensor([index.index(at) for at in positions])
        where = torch.tensor(positions)
        for layer, pool in zip(self.theirs.layers, self.cache.pools, strict=True):
            ours = pool.take(slots)
            for head in range(layer.keys.shape[1]):
                start = 0
                for size in sizes:
                    part = where[start : start + size]
                    layer.keys[0, head, part] = reference(
                        layer.keys[0, head, part],
                        0,
                        self.cache.bits,
                        ours[0, head, start : start + size],
                    )
                    start += size
                layer.values[0, head, where] = reference(
                    layer.values[0, head, where], 1, self.cache.bits, ours[1, head]
                )

    # Steps

    @torch.no_grad()
    def forward(self, count: int | None = None) -> None:
        count = self.rng.choice([1, 1, 2, 5, 12]) if count is None else count
        new = [self.rng.randrange(3, 211) for _ in range(count)]
        ours = self.model(input_ids=torch.tensor([new]), cache=self.cache).logits[0]
        start = len(self.ids)
        self.ids += new
        total = len(self.ids)
        key = torch.arange(total)
        visible = key[None] <= torch.arange(start, total)[:, None]
        visible[:, sorted(self.hidden)] = False
        theirs = self.model(
            input_ids=torch.tensor([new]),
            attention_mask=visible[None, None],
            position_ids=torch.arange(start, total)[None],
            cache=self.theirs,
        ).logits[0]
        self.worst = max(self.worst, float((ours - theirs).abs().max()))

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
        room = min(len(moved), self.cache.full_room())
        if self.cache.budget is not None:
            room = min(room, self.cache.budget - self.cache.kept())
        moved = moved.select(torch.tensor(sorted(self.rng.sample(range(len(moved)), room))).long())
        back = set(moved.positions.tolist())
        self.coded -= back  # at full precision, what they stood for
        self.cache.put_back(moved)
        self.hidden -= back

    def crop(self) -> None:
        if len(self.ids) > 12:
            self.cache.crop(-self.rng.randrange(1, 6))

    def copy(self) -> None:
        other = self.cache.copy()
        self.cache.on_evict = self.cache.on_rollback = None
        self.cache = other
        self.listen()

    def check(self) -> None:
        cache = self.cache
        assert cache.seen == len(self.ids)
        assert set(kept(cache)) == set(range(cache.seen)) - self.hidden
        assert cache.budget is None or cache.kept() <= cache.budget
        assert cache.full_tokens <= cache.full_precision
        assert cache.full_tokens + cache.coded_tokens == cache.kept()
        index = cache.main.index[0, : cache.main.width]
        assert set(index[: cache.coded_tokens].tolist()) == self.coded - self.hidden
        assert torch.equal(index, cache.ledgers[0]["position"])

    def run(self, steps: int) -> None:
        self.forward(20)
        moves = [self.forward] * 6 + [self.take, self.evict, self.crop, self.put_back, self.copy]
        for _ in range(steps):
            self.rng.choice(moves)()
            self.check()
