"""A policy that asks for everything, and what it should be given, computed literally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import Event, additive, hiding_masks
from memdecay.policy import Policy, Tokens
from memdecay.policy.registry import GROUP
from memdecay.regions import Profile


@dataclass(frozen=True)
class Evidence(Policy):
    """Keeps what surprised and what a replay looked at."""

    name: ClassVar[str] = "evidence"
    summary: ClassVar[str] = "surprise and replay, for tests"
    needs: ClassVar[frozenset[str]] = frozenset({"surprisal", "replay"})
    columns: ClassVar[Mapping[str, float]] = {"looked": 0.0}

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        most = attention.amax((0, 1))
        return {"looked": torch.maximum(tokens.state["looked"], most)}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.surprisal + 20 * tokens.state["looked"]


@dataclass(frozen=True)
class Watching(Evidence):
    """Also reads the surprisal in every decode step."""

    name: ClassVar[str] = "watching"
    needs: ClassVar[frozenset[str]] = frozenset({"surprisal", "replay", "attention"})
    columns: ClassVar[Mapping[str, float]] = {"looked": 0.0, "weighed": 0.0}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"weighed": tokens.state["weighed"] + attention_mass * tokens.surprisal}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return super().score(tokens, profile) + tokens.state["weighed"]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the policies be found by their names."""
    real = metadata.entry_points
    extra = [
        metadata.EntryPoint(name=one.name, value=f"{__name__}:{one.__name__}", group=GROUP)
        for one in (Evidence, Watching)
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda **params: [*real(**params), *extra])


def literal(logits: Tensor, ids: Sequence[int], vocabulary: int | None = None) -> Tensor:
    """-log softmax at each id of a sequence, from the logits before it; 0 for the first.

    Args:
        logits: `(length, vocab)` float32.
        ids: of the sequence.
        vocabulary: sum only over so many ids and the right one.
    """
    said = [0.0]
    for place in range(1, len(ids)):
        row, right = logits[place - 1].double(), ids[place]
        others = set(range(len(row) if vocabulary is None else vocabulary)) | {right}
        total = sum(torch.exp(row[other]) for other in sorted(others))
        said.append(float(torch.log(total) - row[right]))
    return torch.tensor(said)


@torch.no_grad()
def attentions(model: PreTrainedModel, ids: Tensor, events: Sequence[Event]) -> Tensor:
    """Who looks at whom, `(num_layers, num_heads, length, length)`, by eager attention."""
    mask = hiding_masks(model, ids.shape[1], events)
    mask = (
        {kind: additive(one) for kind, one in mask.items()}
        if isinstance(mask, dict)
        else additive(mask)
    )
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=torch.arange(ids.shape[1])[None],
        use_cache=False,
        output_attentions=True,
    )
    model.set_attn_implementation(own)
    return torch.stack(out.attentions)[:, 0]


def looked_at(
    model: PreTrainedModel,
    ids: Sequence[int],
    events: Sequence[Event],
    prompt: Sequence[int],
    piece: Sequence[int],
) -> Tensor:
    """What a replay observes at every position seen, `(num_layers, num_heads, seen)`."""
    seen = len(ids)
    whole = torch.tensor([[*ids, *prompt, *piece]])
    return attentions(model, whole, events)[:, :, seen + len(prompt) :, :seen].amax(2)
