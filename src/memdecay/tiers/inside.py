"""What of a session's tiers is in the cache; and the memory of a session that has no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.report import TierReport


def inside(cache: MemDecayCache) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tokens of each tier and its bytes, as `TierReport` has them, with none outside."""
    parts = cache.nbytes_by_precision
    coded = cache.coded_tokens
    outside = {"host": 0, "disk": 0, "copies": 0}
    tokens = {"resident": cache.kept() - coded, "quantized": coded, **outside}
    size = {
        "resident": parts["full"],
        "quantized": parts.get("codes", 0),
        "host": 0,
        "disk": 0,
        "scratch": parts.get("scratch", 0),
        "fetched": 0,
        "summaries": 0,
    }
    return tokens, size


class InsideOnly:
    """The memory of a session in whose cache tokens lose precision, and what leaves it is lost."""

    looks = 0
    notes: Sequence[str] = ()

    def __init__(self, cache: MemDecayCache) -> None:
        self.cache = cache
        self.ids: Sequence[int] = ()
        self.on_move: Callable[[str, Sequence[tuple[int, int]]], None] | None = None

    def tier_of(self, position: int) -> str | None:
        """Return None: what is not in the cache is nowhere."""

    def begin(self) -> None:
        """Do nothing."""

    def wants(self, count: int) -> bool:
        """Return False: there is nothing to come back."""
        return False

    def look(self, run: Callable[[], object], count: int) -> Tensor:
        """Run nothing; `wants` never asks for it."""
        return torch.empty(0)

    def exchange(
        self, queries: Tensor | None, *, ids: Sequence[int], room: int, again: bool = False
    ) -> None:
        """Do nothing."""

    def mark(self) -> None:
        """Return nothing: nothing is remembered."""

    def back_to(self, mark: None) -> None:
        """Do nothing."""

    def copy(self, cache: MemDecayCache) -> InsideOnly:
        """Return the same for a copy of the cache."""
        return InsideOnly(cache)

    def report(self) -> TierReport:
        """Return what is in the cache, and how many pages left it."""
        tokens, size = inside(self.cache)
        return TierReport(tokens, size, moved_down=0, came_back=0, lost=self.cache.evicted_pages)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return nothing: all is the cache's."""
        return {}, {}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
