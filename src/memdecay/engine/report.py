"""What a session says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from memdecay.prompt import Message, Span


@dataclass(frozen=True)
class Scores:
    """How well the model foresaw the assistant's recorded tokens, given what the cache kept.

    Args:
        position: `(n,)` int64, true positions of the scored tokens.
        message: `(n,)` int64, index of the message that each belongs to.
        target: `(n,)` int64, the recorded ids.
        nll: `(n,)` float32, negative log-likelihood of the recorded id, in nats.
        top1: `(n,)` int64, the most likely ids.
    """

    position: Tensor
    message: Tensor
    target: Tensor
    nll: Tensor
    top1: Tensor


@dataclass(frozen=True)
class AppendResult:
    """What `Session.append` did.

    Args:
        tokens: how many tokens were new.
        spans: they tile the new tokens; `start` and `end` count from the first of them.
        notes: what the chat template changed, left out or rewrote.
        scores: of the assistant's tokens, if asked for and if there are any.
    """

    tokens: int
    spans: Sequence[Span]
    notes: Sequence[str]
    scores: Scores | None = None


@dataclass(frozen=True)
class Generated:
    """What the model wrote.

    Args:
        text: without special tokens.
        ids: all of them, the end-of-turn token included.
        message: as it was added to the conversation.
        finish_reason: "stop" (the model ended its turn, or a stop string came), "length", or
            "cancelled" (a stream was closed).
    """

    text: str
    ids: Sequence[int]
    message: Message
    finish_reason: str


@dataclass(frozen=True)
class Idle:
    """What `Session.idle` did.

    Args:
        replayed: kept tokens that were repeated.
        left: kept tokens that have not been repeated yet. If it was not interrupted, there was no
            room to repeat them: pins fill the budget, it is tiny, or the model has no positions
            left.
        interrupted: whether it stopped because the time was over or `stop` was set.
        seconds: how long it took.
    """

    replayed: int
    left: int
    interrupted: bool
    seconds: float


@dataclass(frozen=True)
class TierReport:
    """What is where of a session with tiers, and what moved.

    Args:
        tokens: "resident" (in the cache at full precision), "quantized" (in it at fewer bits),
            "host" and "disk" -> tokens there; and "copies", of how many quantized ones an exact
            copy is in memory or on disk.
        bytes: the same -> bytes: resident those allocated for keys and values, quantized those
            for codes and their scales, host and disk those of the pages there, copies too;
            "scratch", in which attention puts the codes of one layer together; "fetched", pages on
            disk that are in memory too, as they may come back soon; and "summaries", by which pages
            outside are found. Copies of a session share the bytes of pages, and each counts them.
        moved_down: pages, or parts of them, that went from the cache to a tier or from memory to
            disk, however often.
        came_back: pages that came back into the budget, likewise.
        lost: pages for which no tier had room, or that could not be read or written; where there
            is neither memory nor disk, pages that the policy evicted, which may be single tokens.
    """

    tokens: Mapping[str, int]
    bytes: Mapping[str, int]
    moved_down: int
    came_back: int
    lost: int


@dataclass(frozen=True)
class Report:
    """The state of a session; `to_dict` is JSON.

    Args:
        model: name or path of the model.
        policy: name and parameters of the policy.
        budget_tokens: tokens that may be kept, None for no limit; with `Tiers(quantized=...)` those
            at full precision.
        seen_tokens: tokens that the model has read or written.
        kept_tokens: tokens in the cache; where heads keep their own tokens, entries by layers and
            KV heads, rounded up, and so are the other counts of kept tokens.
        kept_entries: entries in the cache; one is a token in one KV head of one layer.
        peak_resident_tokens: the most that were ever in the cache, inside a forward too.
        kept_by_region: region -> tokens in the cache.
        seen_by_region: region -> tokens seen.
        pinned_tokens: kept tokens that a pin holds, alone or through their page.
        evicted_tokens: tokens evicted so far, from all heads.
        evicted_pages: pages evicted so far.
        kv_bytes: bytes allocated for keys and values.
        peak_kv_bytes: bytes of keys and values in use at the peak; free slots do not count, as the
            system gives them no memory before they are written.
        page_size: tokens a page.
        clock: "steps" or "tokens".
        steps: decode steps so far.
        observations: attention observations so far.
        evidence: which evidence heads the policy can go by, and whose; None if it uses none.
        notes: what the user should know.
        tiers: what is where and what moved; None for a session without tiers.
    """

    model: str
    policy: Mapping[str, Any]
    budget_tokens: int | None
    seen_tokens: int
    kept_tokens: int
    kept_entries: int
    peak_resident_tokens: int
    kept_by_region: Mapping[str, int]
    seen_by_region: Mapping[str, int]
    pinned_tokens: int
    evicted_tokens: int
    evicted_pages: int
    kv_bytes: int
    peak_kv_bytes: int
    page_size: int
    clock: str
    steps: int
    observations: int
    evidence: str | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    tiers: TierReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}
