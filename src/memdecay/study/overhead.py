"""What retention costs on one episode: ratios of medians, measured in turn in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.engine import MemDecayCache
from memdecay.study.answers import Ask, answer
from memdecay.study.keeping import budget_tokens
from memdecay.study.recording import Recording

_STEPS = 24
_ROUNDS = 15
_ROWS = 24


def measure_overhead(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recording: Recording
) -> dict[str, Any]:
    """Return times in milliseconds, and how much faster asking in batches is."""
    cache = MemDecayCache(model, budget=None, policy="memdecay-paper")
    ids = torch.tensor([recording.tape.ids], device=model.device)
    began = time.perf_counter()
    with torch.no_grad():
        cache.label(recording.tape.regions, spans=recording.tape.spans)
        model.get_decoder()(input_ids=ids, cache=cache, use_cache=True)
    prefill = time.perf_counter() - began
    scored, unscored = cache, cache.copy()
    unscored.observe_every = 0
    times: dict[str, list[float]] = {"scored": [], "unscored": []}
    token = ids[:, -1:]
    for _ in range(_STEPS):
        for name, one in (("scored", scored), ("unscored", unscored)):
            times[name].append(_timed(lambda one=one: _step(model, one, token)))  # type: ignore[misc]
    ledger = scored.ledgers[0]
    budget = budget_tokens(0.5, ledger.length)
    plan = [_timed(lambda: ledger.plan(ledger.length - budget, scored.now)) for _ in range(_ROUNDS)]
    evict = []
    for _ in range(_ROUNDS):
        copy = scored.copy()
        evict.append(_timed(lambda copy=copy: copy.shrink(copy.kept() - 32)))  # type: ignore[misc]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "scored_step_ms": round(medians["scored"] * 1e3, 3),
        "unscored_step_ms": round(medians["unscored"] * 1e3, 3),
        "scored_over_unscored": round(medians["scored"] / medians["unscored"], 4),
        "paper_scored_over_unscored": 2.69,
        "score_and_select_ms": round(statistics.median(plan) * 1e3, 3),
        "evict_ms": round(statistics.median(evict) * 1e3, 3),
        "cache_tokens": ledger.length,
        "prefill_seconds": round(prefill, 3),
        "threads": torch.get_num_threads(),
        **_batching(model, tokenizer, recording),
    }


def _step(model: PreTrainedModel, cache: MemDecayCache, token: torch.Tensor) -> None:
    with torch.no_grad():
        model(input_ids=token, cache=cache, use_cache=True)


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _batching(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recording: Recording
) -> dict[str, Any]:
    """Ask the same rows together and one at a time."""
    length = recording.seq_len
    asks = [
        Ask(torch.arange(length)[torch.arange(length) % 6 != hole], probe.question, probe.gold)
        for hole in range(_ROWS // len(recording.probes))
        for probe in recording.probes
    ]
    cache, ends = recording.cache, recording.ends
    answer(model, cache, asks[:1], ends=ends)
    began = time.perf_counter()
    together = answer(model, cache, asks, ends=ends)
    middle = time.perf_counter()
    alone = [answer(model, cache, [ask], ends=ends)[0] for ask in asks]
    end = time.perf_counter()
    equal = sum(one.ids == other.ids for one, other in zip(together, alone, strict=True))
    furthest = max(
        abs(one.gold_logprob - other.gold_logprob)
        for one, other in zip(together, alone, strict=True)
    )
    return {
        "batched_rows_per_second": round(len(asks) / (middle - began), 2),
        "single_rows_per_second": round(len(asks) / (end - middle), 2),
        "batch_speedup": round((end - middle) / (middle - began), 2),
        "batch_agreement": f"{equal} of {len(asks)} answers equal",
        "batch_largest_logprob_difference": round(furthest, 4),
    }
