"""Asks the probes of an episode, each on its own copy of what a press left of the context."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import NEW_TOKENS, Probe
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "attending"


@dataclass(frozen=True)
class Kept:
    """What is left of a context.

    Args:
        keys: a layer each, (kv_heads, m, head_dim), already rotated to their true positions.
        values: a layer each, (kv_heads, m, head_dim).
        masked: a layer each, (kv_heads, m) bool, what a press hides rather than removes; empty if
            it removes.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    masked: Sequence[Tensor] = ()

    @property
    def tokens(self) -> float:
        """Entries that can be attended to, a mean over layers and heads."""
        entries = [float(keys.shape[1]) for keys in self.keys]
        hidden = [float(masked.sum()) / len(masked) for masked in self.masked]
        return (sum(entries) - sum(hidden)) / len(entries)

    @property
    def width(self) -> int:
        """Entries a head has room for, m."""
        return max(keys.shape[1] for keys in self.keys)


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Args:
        ids: greedy tokens, without the one that ends the answer.
        gold_logprob: sum of the log-probabilities of the gold answer's tokens, in nats, when they
            follow the question.
    """

    ids: list[int]
    gold_logprob: float


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    kept: Sequence[Kept],
    probes: Sequence[Probe],
    *,
    seq_len: int,
    ends: Collection[int],
    new_tokens: int = NEW_TOKENS,
) -> list[list[Answer]]:
    """Ask every probe of every context, all as the rows of one batch.

    The questions stand at their true positions, whatever was evicted before them. One forward
    reads question and gold answer; then the gold answer is dropped and the model goes on by
    itself. Shorter rows are padded on the left, and nothing attends to the padding.

    Args:
        model: any that kvpress supports.
        kept: contexts of one episode, compressed in different ways.
        probes: the questions.
        seq_len: tokens of the context before it was compressed.
        ends: tokens that end an answer.
        new_tokens: at most so many are decoded.

    Returns:
        For each context the answer to each probe.
    """
    rows = [(context, probe) for context in kept for probe in probes]
    width = max(context.width for context in kept)
    cache = _copied(kept, len(probes), width)
    longest = max(len(probe.question_ids) for probe in probes)
    golds = max(len(probe.gold_ids) for probe in probes)
    ids = torch.zeros(len(rows), longest + golds - 1, dtype=torch.long)
    read = torch.zeros(len(rows), width + ids.shape[1], dtype=torch.bool)
    lengths = torch.tensor([len(probe.question_ids) for _, probe in rows])
    for row, (context, probe) in enumerate(rows):
        first = longest - len(probe.question_ids)
        given = torch.tensor([*probe.question_ids, *probe.gold_ids[:-1]])
        ids[row, first : first + len(given)] = given
        read[row, width - context.width : width] = True
        read[row, width + first : width + first + len(given)] = True
    offsets = torch.arange(ids.shape[1]) - (longest - lengths)[:, None]
    with _attending(model, kept, len(probes), width):
        logits = _forward(
            model, cache, ids, seq_len + offsets.clamp(min=0), _mask(read, width), keep=golds
        )
        scores = logits.float().log_softmax(-1)
        sums = [
            float(
                scores[row, torch.arange(len(probe.gold_ids)), torch.tensor(probe.gold_ids)].sum()
            )
            for row, (_, probe) in enumerate(rows)
        ]
        cache.crop(width + longest)
        written = _decode(
            model,
            cache,
            logits[:, 0],
            read[:, : width + longest],
            seq_len + lengths,
            ends,
            new_tokens,
        )
    answers = [Answer(*answer) for answer in zip(written, sums, strict=True)]
    return [answers[first : first + len(probes)] for first in range(0, len(rows), len(probes))]


def _decode(
    model: PreTrainedModel,
    cache: DynamicCache,
    logits: Tensor,
    read: Tensor,
    positions: Tensor,
    ends: Collection[int],
    new_tokens: int,
) -> list[list[int]]:
    """Decode greedily until every row has ended."""
    written: list[list[int]] = [[] for _ in logits]
    open_rows = set(range(len(written)))
    for step in range(new_tokens):
        chosen = logits.argmax(-1)
        for row in sorted(open_rows):
            if int(chosen[row]) in ends:
                open_rows.discard(row)
            else:
                written[row].append(int(chosen[row]))
        if not open_rows or step == new_tokens - 1:
            break
        read = pad(read, (0, 1), value=True)
        places = (positions + step)[:, None]
        logits = _forward(model, cache, chosen[:, None], places, read[:, None, None], keep=1)[:, 0]
    return written


def _forward(
    model: PreTrainedModel,
    cache: DynamicCache,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor,
    *,
    keep: int,
) -> Tensor:
    """Return the logits of the last `keep` places, (rows, keep, vocabulary)."""
    logits: Tensor = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    ).logits
    return logits


def _copied(kept: Sequence[Kept], times: int, width: int) -> DynamicCache:
    """Return a cache with so many rows of every context, in order, padded on the left."""
    cache = DynamicCache()
    for layer, (like_k, like_v) in enumerate(zip(kept[0].keys, kept[0].values, strict=True)):
        parts: list[list[Tensor]] = [[], []]
        for context in kept:
            for part, entries in zip(
                parts, (context.keys[layer], context.values[layer]), strict=True
            ):
                padded = pad(entries, (0, 0, width - entries.shape[1], 0))
                part.append(padded.expand(times, *padded.shape))
        cache.update(torch.cat(parts[0]).to(like_k), torch.cat(parts[1]).to(like_v), layer)
    return cache


def _mask(read: Tensor, width: int) -> Tensor:
    """Return who may attend to what, (rows, 1, queries, width + queries) bool.

    A query that is padding sees the context, as a softmax over nothing is not a number.
    """
    queries = read.shape[1] - width
    causal = torch.ones(queries, read.shape[1], dtype=torch.bool).tril(width)
    return read[:, None, None] & causal


@contextlib.contextmanager
def _attending(
    model: PreTrainedModel, kept: Sequence[Kept], times: int, width: int
) -> Iterator[None]:
    """Let a model attend exactly to what is kept, head by head.

    kvpress hides with keys that get next to no attention; here it is exactly none, and padding
    cannot disturb the search for such keys. The heads that share a key are folded into one
    product, so that no step copies the cache as often as there are heads: twice as fast here.
    """
    hidden = _hidden(kept, times, width)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        rows, heads, queries, size = query.shape
        shared, entries = key.shape[1:3]
        folded = query.reshape(rows, shared, -1, size)
        scores = (folded @ key.transpose(2, 3)).float() * scaling
        scores = scores.view(rows, shared, -1, queries, entries)
        scores.masked_fill_(~attention_mask[:, None], -torch.inf)
        if hidden:
            scores[..., :width].masked_fill_(hidden[module.layer_idx][:, :, None, None], -torch.inf)
        weights = scores.softmax(-1).to(value.dtype).view(rows, shared, -1, entries)
        attended = (weights @ value).view(rows, heads, queries, size)
        return attended.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def _hidden(kept: Sequence[Kept], times: int, width: int) -> list[Tensor]:
    """Return what is hidden in each layer, (rows, kv_heads, width) bool; empty if nothing is."""
    if not any(context.masked for context in kept):
        return []
    layers = []
    for layer, keys in enumerate(kept[0].keys):
        rows = []
        for context in kept:
            entries = context.keys[layer].shape[1]
            none = torch.zeros(len(keys), entries, dtype=torch.bool)
            one = context.masked[layer] if context.masked else none
            rows.append(pad(one, (width - entries, 0)).expand(times, -1, -1))
        layers.append(torch.cat(rows))
    return layers
