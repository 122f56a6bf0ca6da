"""A session with tokens at fewer bits, beside the reference of `lowering` for what it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.lowering import Lockstep
from engine.sessions import tiny
from engine.tiered import tiered
from memdecay import Session, Tiers
from memdecay.engine.graded_cache import GradedCache
from memdecay.engine.moving import Moved


def graded(name: str = "llama", **options: Any) -> Session:
    """A session whose budget of 64 is at full precision, with 64 more tokens at 4 bits."""
    tiers = {"quantized": 64, **options.pop("tiers", {})}
    return tiered(name, tiers=tiers, **options)


class Followed(Lockstep):
    """A session and its reference: every forward of it, also in a look, is run there too."""

    def __init__(self, made: Session, name: str = "llama") -> None:
        assert isinstance(made.cache, GradedCache)
        self.made, self.cache = made, made.cache
        self.model = tiny(name)[0]
        self.theirs = DynamicCache(config=self.model.config)
        self.hidden, self.coded, self.outside = set(), set(), []
        self.lowered, self.groups, self.ids, self.exact = 0, [], [], {}
        self.worst, self.returns, self.coded_returns, self.exact_returns = 0.0, 0, 0, 0
        self.full: list[int] = []
        rolled_back, put_back, store = (
            self.cache.on_rollback,
            self.cache.put_back,
            self.cache._store,
        )
        self.listen()

        def back_to(seen: int) -> None:
            if rolled_back is not None:
                rolled_back(seen)
            if seen < len(self.ids):
                self._rolled_back(seen)

        def back(moved: Moved) -> None:
            positions = set(moved.positions.tolist())
            self.returns += len(positions)
            self.coded_returns += len(positions & self.coded)
            for number, at in enumerate(moved.positions.tolist()):
                if at in self.coded and self._is_exact(moved, number, at):
                    self._restore(at)
            self.coded -= positions  # others are at full precision what they stood for
            put_back(moved)
            self.hidden -= positions

        def stored(*args: Any) -> Any:
            self.full.append(self.cache.full_tokens)
            return store(*args)

        self.cache.on_rollback = back_to
        self.cache.put_back = back  # type: ignore[method-assign]
        self.cache._store = stored  # type: ignore[method-assign]
        made.model.register_forward_hook(self._ran, with_kwargs=True)

    def _is_exact(self, moved: Moved, number: int, at: int) -> bool:
        """Say whether a token comes back as it was, to the bit, before it became codes."""
        tiers = self.made.tiers
        assert isinstance(tiers, Tiers)
        back = torch.stack([moved.keys[:, :, number], moved.values[:, :, number]], 1)
        exact = torch.equal(back, torch.stack(self.exact[at]))
        if tiers.host is None:
            assert exact == tiers.exact, "nothing had to go for the copy"
        return exact

    def _restore(self, at: int) -> None:
        self.exact_returns += 1
        for layer, (keys, values) in zip(self.theirs.layers, self.exact[at], strict=True):
            layer.keys[0, :, at], layer.values[0, :, at] = keys, values

    @torch.no_grad()
    def _ran(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if kwargs.get("cache") is not self.cache:
            return
        start = len(self.ids)
        theirs = self.read(kwargs["input_ids"][0, start - self.cache.seen :].tolist())
        assert len(self.ids) == self.cache.seen
        rows = kwargs.get("logits_to_keep")
        said: Tensor = out.logits[0]
        expected = theirs[rows] if isinstance(rows, Tensor) else theirs[-len(said) :]
        self.worst = max(self.worst, float((said - expected).abs().max()))

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """What is run in it equals the reference, and holds the limits in every layer call."""
        yield
        self.check()
        assert self.worst < 1e-4
        assert self.ids == self.made._ids
        assert self.full and max(self.full) <= self.cache.full_precision  # type: ignore[operator]
