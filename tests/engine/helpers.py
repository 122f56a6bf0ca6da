"""What the engine's tests share: what was evicted when, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import Event, oracle
from memdecay.engine.cache import Evicted, MemDecayCache


class Record:
    """What every row of a cache was given, said and lost; it follows the rows of beam search."""

    def __init__(self, model: PreTrainedModel, cache: MemDecayCache) -> None:
        self.events: list[list[Event]] = [[] for _ in range(64)]
        self.ids: list[list[int]] = [[] for _ in range(64)]
        self.logits: list[list[tuple[int, Tensor]]] = [[] for _ in range(64)]
        self.rows_differed = False
        self._model, self._cache, self._select = model, cache, cache._select_rows
        cache.on_evict = self._evicted
        cache._select_rows = self._follow  # type: ignore[method-assign]
        model.register_forward_hook(self._ran, with_kwargs=True)

    def _evicted(self, what: Evicted) -> None:
        seen = self._cache.ledgers[what.row].seen
        self.events[what.row].append((seen, what.position.tolist()))

    def _follow(self, rows: Tensor) -> None:
        sets = {tuple(kept(self._cache, row)) for row in range(self._cache.rows)}
        self.rows_differed |= len(sets) > 1 and rows.tolist() != list(range(len(rows)))
        self._select(rows)
        for kind in (self.events, self.ids, self.logits):
            kind[: len(rows)] = [[*kind[row]] for row in rows.tolist()]

    def _ran(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if kwargs.get("cache") is not self._cache:
            return
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        for row in range(len(ids)):
            self.ids[row] += ids[row][mask[row] == 1].tolist()
            if mask[row, -1]:
                self.logits[row].append((len(self.ids[row]) - 1, out.logits[row, -1]))

    def worst(self, row: int) -> float:
        """The largest distance of a row's logits from the oracle's."""
        expected = oracle(self._model, torch.tensor([self.ids[row]]), self.events[row])
        return max(float((said - expected[at]).abs().max()) for at, said in self.logits[row])


def kept(cache: MemDecayCache, row: int = 0) -> list[int]:
    """Positions of the tokens that a row keeps."""
    return sorted(cache.ledgers[row]["position"].tolist()) if cache.ledgers else []


def chunks(total: int, sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where forwards of these sizes start and end; the last size repeats."""
    bounds, start, size = [], 0, 0
    sizes = iter(sizes)
    while start < total:
        size = next(sizes, size)
        bounds.append((start, min(start + size, total)))
        start += size
    return bounds


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether logits agree as the oracle asks."""
    return left.shape == right.shape and bool((left - right).abs().max() <= tolerance)


def snapshot(cache: MemDecayCache) -> dict[str, Tensor]:
    """Everything that decides later logits and evictions, copied."""
    pools = {f"pool{n}": pool.kv.clone() for n, pool in enumerate(cache.pools)}
    return {**pools, **ledger_state(cache)}


def ledger_state(cache: MemDecayCache) -> dict[str, Tensor]:
    """What is known of the kept tokens, copied."""
    state = {}
    for row, ledger in enumerate(cache.ledgers):
        for name in ledger.columns:
            state[f"{name}{row}"] = ledger[name].clone()
        state[f"queries{row}"] = ledger.queries[: ledger.length, : ledger.num_queries].clone()
        state[f"scalars{row}"] = torch.tensor(list(ledger.mark().values()))
    state["clock"] = torch.tensor([cache.seen, cache.steps])
    return state


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two snapshots are equal to the bit."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
