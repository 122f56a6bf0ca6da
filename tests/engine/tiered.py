"""What the tests of sessions with tiers share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.families import oracle
from engine.helpers import kept, same
from engine.sessions import (
    NEVER,
    assistant,
    content,
    session,
    user,
)
from memdecay import (
    Profile,
    Session,
    Tiers,
)
from memdecay.engine.cache import Evicted
from memdecay.engine.moving import Moved
from memdecay.evidence import EvidenceHead

HEADS = ((1, 0), (2, 3), (3, 1))


PROFILE = Profile.default().with_evidence(
    {"read": [EvidenceHead(layer, head, "read", 1.0, -4.0, 2.0) for layer, head in HEADS]}
)


def tiered(name: str = "llama", *, budget: int | None = 64, **options: Any) -> Session:
    """A session with tiers on a tiny model."""
    settings = {"page_size": 4, "every": 4, **options.pop("tiers", {})}
    options = {"prefill_chunk": 8, "profile": PROFILE, **options}
    return session(name, budget=budget, tiers=Tiers(**settings), **options)


def outside(made: Session) -> Any:
    memory: Any = made._memory
    return memory.outside


class Watched:
    """A session, who could see whom in it, and everything that it said of each position."""

    def __init__(self, made: Session) -> None:
        self.made, cache = made, made.cache
        self.events: list[tuple[int, list[int], int]] = []
        self.out: dict[int, int] = {}
        self.logits: dict[int, Tensor] = {}
        self.returns = 0
        rolled_back, put_back = cache.on_rollback, cache.put_back
        assert rolled_back is not None

        def back(moved: Moved) -> None:
            put_back(moved)
            self.returns += len(moved)
            for at in moved.positions.tolist():
                self.events.append((self.out.pop(at), [at], cache.seen))

        def rollback(seen: int) -> None:
            rolled_back(seen)
            self.out = {at: min(when, seen) for at, when in self.out.items() if at < seen}
            self.events = [(min(a, seen), at, min(b, seen)) for a, at, b in self.events]
            self.events = [event for event in self.events if event[1][0] < seen]
            self.logits = {at: said for at, said in self.logits.items() if at < seen}
            for at in kept(cache):  # a window that slid in a look slides back
                self.out.pop(at, None)

        cache.on_evict = self._evicted
        cache.on_rollback = rollback
        cache.put_back = back  # type: ignore[method-assign]
        made.model.register_forward_hook(self._ran, with_kwargs=True)

    def _evicted(self, what: Evicted) -> None:
        seen = self.made.cache.seen
        self.out.update(dict.fromkeys(what.position.tolist(), seen))

    def _ran(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if kwargs.get("cache") is self.made.cache:
            self.logits[self.made.cache.seen - 1] = out.logits[0, -1].clone()

    def worst(self, *, returned: bool = True) -> float:
        ids, length = torch.tensor([self.made._ids]), len(self.made._ids)
        events: list[Any] = [(a, at, b if returned else length) for a, at, b in self.events]
        events += [(when, [at]) for at, when in self.out.items()]
        expected = oracle(self.made.model, ids, events)
        return max(
            float((said - expected[at]).abs().max())
            for at, said in self.logits.items()
            if at < length
        )


@contextlib.contextmanager
def watched_budget(made: Session) -> Iterator[list[int]]:
    """Look inside every layer call how much is kept."""
    found: list[int] = []
    update = made.cache._store

    def store(*args: Any) -> Any:
        found.append(max(table.width for table in made.cache.tables))
        found.append(made.cache.kept())
        return update(*args)

    made.cache._store = store  # type: ignore[method-assign]
    yield found
    del made.cache._store  # type: ignore[method-assign]


def turns(made: Session, seed: int, count: int) -> None:
    """Random turns of every kind."""
    rng = random.Random(seed)

    def some() -> None:
        made.append([user(rng.randrange(2, 20), rng.randrange(99))])

    def scored() -> None:
        messages = [user(5, rng.randrange(99)), assistant(rng.randrange(3, 12), rng.randrange(99))]
        made.append(messages, score=True, score_chunk=rng.choice([1, 3]))

    def read() -> None:
        made.append([assistant(7, rng.randrange(99)), user(30, rng.randrange(99))])

    def written() -> None:
        some()
        made.generate(max_new_tokens=rng.randrange(1, 13), eos_token_id=NEVER)

    for _ in range(count):
        rng.choice([some, scored, read, written, written])()


def held(made: Session) -> dict[str, Any]:
    """All that is outside, and all that finds it."""
    memory: Any = made._memory
    plain, tensors = memory.state()
    return {"plain": plain, **{name: tensor.clone() for name, tensor in tensors.items()}}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def goes_on(made: Session, twin: Session) -> None:
    """Two sessions do the same from now on."""
    for one in (made, twin):
        turns(one, 7, 5)
    assert made._ids == twin._ids and same(content(made), content(twin))
    assert equal(held(made), held(twin))
    assert torch.equal(made._last_logits, twin._last_logits)  # type: ignore[arg-type]


def outside_positions(made: Session) -> list[int]:
    found: list[int] = []
    for page in outside(made).pages:
        found += outside(made).store.get(page).positions.tolist()
    assert len(found) == outside(made).stored == outside(made).store.tokens
    gone = sorted({*found} - {*kept(made.cache)})
    assert len(gone) == outside(made).tokens
    return gone
