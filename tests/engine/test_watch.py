"""The attention of watched heads is what eager attention weights say, at its highest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.evidence import attentions
from engine.families import choose, make, tokens
from memdecay.engine.cache import MemDecayCache
from memdecay.errors import ProfileError
from memdecay.evidence import READ, REPLAY, EvidenceHead
from memdecay.policy import Policy, Tokens
from memdecay.regions import Profile

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "mistral_sliding", "phi", "opt"]
HEADS = ((1, 1), (0, 0), (1, 0))


@dataclass(frozen=True)
class Peaks(Policy):
    """Remembers the most that each watched head gave; keeps the latest tokens."""

    name: ClassVar[str] = "peaks"
    summary: ClassVar[str] = "for this test"
    needs: ClassVar[frozenset[str]] = frozenset({"heads"})
    columns: ClassVar[Mapping[str, float]] = {"peak_0": 0.0, "peak_1": 0.0, "peak_2": 0.0}

    watched: tuple[tuple[int, int], ...] = HEADS

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        return self.watched

    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        assert peak.shape == (len(self.watched), tokens.kv_len)
        return {
            f"peak_{n}": torch.maximum(tokens.state[f"peak_{n}"], one) for n, one in enumerate(peak)
        }

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.position.float()


def spread(cache: MemDecayCache, length: int, row: int = 0) -> Tensor:
    """The columns by position, (heads, length); nan where nothing is kept."""
    ledger = cache.ledgers[row]
    found = torch.full((len(HEADS), length), torch.nan)
    for n in range(len(HEADS)):
        found[n, ledger["position"]] = ledger[f"state.peak_{n}"]
    return found


def expected(weights: Tensor) -> Tensor:
    """The most each position got from another one, (heads, length)."""
    chosen = torch.stack([weights[layer, head] for layer, head in HEADS])
    chosen.diagonal(dim1=1, dim2=2).zero_()
    return chosen.amax(1)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_peaks_are_the_highest_eager_weights(name: str, chunk: int) -> None:
    model, length = make(name), 90
    ids = tokens(length)
    cache = MemDecayCache(model, budget=None, policy=Peaks())
    rng, gone, events = random.Random(5), set(), []
    for start in range(0, length, chunk):
        piece = ids[:, start : start + chunk]
        model(input_ids=piece, cache=cache)
        if start % 35 == 28:
            evicted = choose(rng, start + piece.shape[1], gone, 0.2)
            events.append((start + piece.shape[1], evicted))
            cache.evict(evicted)
    found = spread(cache, length)
    there = ~found.isnan()
    if all(window is None for window in cache.layout.windows):
        assert int(there[0].sum()) == length - len(gone)
    literal = expected(attentions(model, ids, events))
    assert torch.allclose(found[there], literal[there], atol=1e-6)
    assert float(found[there].max()) > 0.05


@torch.no_grad()
def test_rows_of_a_padded_batch_have_their_own_peaks() -> None:
    model = make("llama")
    short, long = tokens(20), tokens(33)[:, :]
    batch = torch.zeros(2, 33, dtype=torch.int64)
    batch[0, 13:], batch[1] = short[0], long[0]
    mask = torch.ones_like(batch)
    mask[0, :13] = 0
    cache = MemDecayCache(model, budget=None, policy=Peaks())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=batch, attention_mask=mask, position_ids=positions, cache=cache)
    for row, ids in enumerate((short, long)):
        literal = expected(attentions(model, ids, []))
        assert torch.allclose(spread(cache, ids.shape[1], row), literal, atol=1e-6)


@torch.no_grad()
def test_watching_changes_no_logits_and_nothing_is_watched_unasked() -> None:
    model, ids = make("qwen3"), tokens(40)
    plain = MemDecayCache(model, budget=32, policy="streaming", page_size=4)
    watched = MemDecayCache(model, budget=32, policy=Peaks(), page_size=4)
    heard: list[Tensor] = []
    watched.on_heads = lambda row, peak: heard.append(peak)
    for start in range(0, 40, 8):
        for cache in (plain, watched):
            model(input_ids=ids[:, start : start + 8], cache=cache)
        assert len(heard[-1]) == len(HEADS)
    assert len(heard) == 5
    assert not plain.watch.by_layer
    assert plain.peak_tokens <= 32 and watched.peak_tokens <= 32


def test_a_head_that_the_model_does_not_have_is_refused() -> None:
    model = make("llama")
    with pytest.raises(ProfileError, match="head 99 of layer 0"):
        MemDecayCache(model, budget=64, policy=Peaks(watched=((0, 99),)))


@pytest.mark.parametrize("when", [READ, REPLAY])
def test_a_head_of_the_profile_is_refused_before_any_forward(when: str) -> None:
    head = EvidenceHead(7, 0, when, weight=1.0, mean=-3.0, std=1.0)
    profile = Profile.default().with_evidence({"replay": (head,)})
    with pytest.raises(ProfileError, match="head 0 of layer 7"):
        MemDecayCache(make("llama"), budget=64, policy="memdecay-replay", profile=profile)
