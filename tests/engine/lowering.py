"""A cache with `full_precision` under random steps, beside a reference that shares no code with it.

The reference is the model's own forward with transformers' own cache. Evicted tokens are hidden by
an explicit mask; what goes down is replaced in that cache by what literal loops of the quantizer's
formula say, at the moment it goes down.
"""

from __future__ import annotations

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


def levels(numbers: np.ndarray, bits: int) -> list[np.float32]:
    """What a list of float32 numbers with one scale becomes."""
    top = np.float32(2**bits - 1)
    low = np.float32(bfloat16_towards(float(min(numbers)), up=False))
    span = np.float32(max(numbers) - low) / top
    step = np.float32(bfloat16_towards(float(span), up=True))
    restored = []
    for number in numbers:
        code = np.float32(round(float((number - low) / step))) if step else np.float32(0)
        code = min(max(code, np.float32(0)), top)
        restored.append(np.float32(low + step * code))
    return restored


def reference(numbers: Tensor, axis: int, bits: int) -> Tensor:
    """What `(n, head_dim)` becomes when those along an axis share a scale."""
    rows = numbers.numpy() if axis == 1 else numbers.numpy().T
    out = np.array([levels(row, bits) for row in rows], np.float32)
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
        self.exact: dict[int, list[Tensor]] = {}
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
            was = self._kept(positions)
            own(cache, down)
            sizes = cache.graded.sizes[before:]
            assert sum(sizes) == len(positions)
            self._follow(positions, sizes, was)

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

    def _kept(self, positions: list[int]) -> list[Tensor]:
        """What each layer of ours holds of some tokens, `(2, num_kv_heads, n, head_dim)`."""
        index = self.cache.main.index[0, : self.cache.main.width].tolist()
        slots = torch.tensor([index.index(at) for at in positions])
        return [pool.take(slots) for pool in self.cache.pools]

    def _follow(self, positions: list[int], sizes: list[int], was: list[Tensor]) -> None:
        """Replace in their cache what went down in ours.

        The loops are given what ours had, once that is seen to be theirs: of two forwards that
        differ in the last place, one may find a number on the other side of the border of a code.
        """
        assert not self.coded & set(positions), "codes are made once"
        self.coded |= set(positions)
        self.lowered += len(positions)
        self.groups += sizes
        where = torch.tensor(positions)
        for at in positions:
            self.exact.pop(at, None)
        for layer, (keys, values) in zip(self.theirs.layers, was, strict=True):
            assert bool((layer.keys[0, :, where] - keys).abs().max() < 1e-4)
            assert bool((layer.values[0, :, where] - values).abs().max() < 1e-4)
            for number, at in enumerate(positions):
                self.exact.setdefault(at, []).append(torch.stack([keys, values])[:, :, number])
            for head in range(len(keys)):
                parts = keys[head].split(sizes)
                coded = torch.cat([reference(part, 0, self.cache.bits) for part in parts])
                layer.keys[0, head, where] = coded
                layer.values[0, head, where] = reference(values[head], 1, self.cache.bits)

    # Steps

    @torch.no_grad()
    def forward(self, count: int | None = None) -> None:
        count = self.rng.choice([1, 1, 2, 5, 12]) if count is None else count
        new = [self.rng.randrange(3, 211) for _ in range(count)]
        ours = self.model(input_ids=torch.tensor([new]), cache=self.cache).logits[0]
        theirs = self.read(new)
        self.worst = max(self.worst, float((ours - theirs).abs().max()))

    def read(self, new: list[int]) -> Tensor:
        """Let the reference read tokens that ours has read; returns its logits."""
        start = len(self.ids)
        self.ids += new
        total = len(self.ids)
        visible = torch.arange(total)[None] <= torch.arange(start, total)[:, None]
        visible[:, sorted(self.hidden)] = False
        out = self.model(
            input_ids=torch.tensor([new]),
            attention_mask=visible[None, None],
            position_ids=torch.arange(start, total)[None],
            cache=self.theirs,
        )
        logits: Tensor = out.logits[0]
        return logits

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
