"""Asks many questions over many keep sets of one context, as the rows of ragged batches.

A step of a batch reads the model's weights once for all of its rows, which is most of the time
that a step takes. The answers are those of one row at a time (up to how a matrix product rounds).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memdecay.engine import MemDecayCache

MAX_NEW_TOKENS = 16
"""Tokens of an answer (section IV-A)."""
_ROWS = 48


@dataclass(frozen=True)
class Ask:
    """One question over one keep set.

    Args:
        kept: (n,) int64, the true positions that are kept; or (num_layers, num_kv_heads, seq_len)
            bool, what each head keeps.
        question: ids that follow the context: what closes the open turn, the question, and what
            opens the answer.
        gold: ids of the right answer.
    """

    kept: Tensor
    question: Sequence[int]
    gold: Sequence[int]


@dataclass(frozen=True)
class Reply:
    """What was answered.

    Args:
        ids: greedy answer, without the token that ended it.
        gold_logprob: sum of the log-probabilities of the gold ids right after the question, nats.
    """

    ids: list[int]
    gold_logprob: float


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    cache: MemDecayCache,
    asks: Sequence[Ask],
    *,
    ends: Sequence[int],
    rows: int = _ROWS,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Reply]:
    """Answer every question greedily, each on its own copy of what is kept.

    Args:
        model: the model that filled the cache.
        cache: one sequence with nothing evicted; it is not changed.
        asks: the questions.
        ends: ids that end an answer.
        rows: most questions of one batch.
        advance: is told how many questions were answered since the last time.

    Returns:
        One reply a question, in order.
    """
    replies: dict[int, Reply] = {}
    whole = [number for number, ask in enumerate(asks) if ask.kept.dim() == 1]
    for number in sorted(set(range(len(asks))) - set(whole)):
        # Where heads keep their own tokens there is no batch.
        [replies[number]] = _answer_batch(model, cache, [asks[number]], frozenset(ends))
        advance(1)
    ragged = not any(window for window in cache.layout.windows)
    for places in _batches([asks[number] for number in whole], rows, ragged=ragged):
        chosen = [whole[place] for place in places]
        batch = _answer_batch(model, cache, [asks[number] for number in chosen], frozenset(ends))
        replies.update(zip(chosen, batch, strict=True))
        advance(len(chosen))
    return [replies[number] for number in range(len(asks))]


def _batches(asks: Sequence[Ask], rows: int, *, ragged: bool) -> Iterator[list[int]]:
    """Yield the numbers of the questions of each batch, rows of like length side by side.

    Attention reads the longest row's width for all of them. A sliding layer counts the padding
    before a question as a distance, so its rows must have questions of one length (not ragged).
    """

    def question(number: int) -> int:
        return 0 if ragged else len(asks[number].question)

    order = sorted(range(len(asks)), key=lambda number: (question(number), len(asks[number].kept)))
    for _, alike in itertools.groupby(order, key=question):
        group = list(alike)
        for start in range(0, len(group), rows):
            yield group[start : start + rows]


def _answer_batch(
    model: PreTrainedModel, full: MemDecayCache, asks: Sequence[Ask], ends: frozenset[int]
) -> list[Reply]:
    cache = _branch(full, asks)
    cache.observe_every = 0
    first, gold_logprob = _read(model, cache, asks)
    written: list[list[int]] = [[] for _ in asks]
    alive = torch.arange(len(asks))
    token = first
    for step in range(MAX_NEW_TOKENS):
        running = []
        for place, number in enumerate(alive.tolist()):
            new = int(token[place])
            if new not in ends:
                written[number].append(new)
                running.append(place)
        if not running or step == MAX_NEW_TOKENS - 1:
            break
        if len(running) < len(alive):
            # A row that has ended costs as much as one that goes on.
            keep = torch.tensor(running)
            cache.batch_select_indices(keep)
            alive, token = alive[keep], token[keep]
        out = model(
            input_ids=token[:, None].to(model.device),
            position_ids=_seen(cache)[:, None],
            cache=cache,
            use_cache=True,
        )
        token = out.logits[:, -1].argmax(-1).cpu()
    return [Reply(ids, logprob) for ids, logprob in zip(written, gold_logprob, strict=True)]


def _branch(full: MemDecayCache, asks: Sequence[Ask]) -> MemDecayCache:
    if asks[0].kept.dim() == 1:
        return full.branch([ask.kept for ask in asks])
    [ask] = asks
    by_head = [[head.nonzero().flatten() for head in layer] for layer in ask.kept]
    return full.branch_heads(by_head)


def _read(
    model: PreTrainedModel, cache: MemDecayCache, asks: Sequence[Ask]
) -> tuple[Tensor, list[float]]:
    """Read the questions, weigh the gold answers and take them back.

    Returns:
        (rows,) the first token of each greedy answer, and each gold answer's log-probability.
    """
    questions = max(len(ask.question) for ask in asks)
    golds = max(len(ask.gold) for ask in asks)
    count = len(asks)
    ids = torch.zeros(count, questions + golds, dtype=torch.int64)
    real = torch.zeros(count, questions + golds, dtype=torch.int64)
    # Questions end, and gold answers begin, in the same column.
    for row, ask in enumerate(asks):
        here = slice(questions - len(ask.question), questions + len(ask.gold))
        ids[row, here] = torch.tensor([*ask.question, *ask.gold])
        real[row, here] = 1
    seen = _seen(cache)
    positions = (real.cumsum(1) - 1).clamp(min=0).to(seen.device) + seen[:, None]
    past = torch.ones(count, cache.seen, dtype=torch.int64)
    cache.prefilling = True
    try:
        out = model(
            input_ids=ids.to(model.device),
            attention_mask=torch.cat([past, real], 1).to(model.device),
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=golds + 1,
        )
        cache.crop(-golds)
    finally:
        cache.prefilling = False
    logprobs = []
    for row, ask in enumerate(asks):
        logits = out.logits[row, : len(ask.gold)].float()
        target = torch.tensor(list(ask.gold), device=logits.device)
        nll = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        logprobs.append(-float(nll))
    return out.logits[:, 0].argmax(-1).cpu(), logprobs


def _seen(cache: MemDecayCache) -> Tensor:
    """Return (rows,) the next true position of each sequence."""
    return torch.tensor([ledger.seen for ledger in cache.ledgers], device=cache.layout.device)
