"""What the tests of keep sets by head share: policies, a record of evictions, the oracle."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families import CONFIGS, additive, make
from engine.helpers import ledger_state
from memdecay.engine.cache import MemDecayCache
from memdecay.policy import HeadPolicy, Tokens
from memdecay.regions import Profile

FULL_GEMMA = copy.deepcopy(CONFIGS["gemma2"])
FULL_GEMMA.layer_types = ["full_attention"] * 4
FULL_GEMMA.attn_logit_softcapping = 2.0  # low, so that it matters for small random logits
CONFIGS_BY_HEAD = {
    **{
        name: config
        for name, config in CONFIGS.items()
        if "sliding" not in name and not name.startswith("gemma")
    },
    "gemma2_full": FULL_GEMMA,
}
"""Families all of whose layers have full attention: GQA, MHA, softcaps, norms of queries."""


def model_of(name: str) -> PreTrainedModel:
    """A tiny random model, always the same for a name."""
    if name != "gemma2_full":
        return make(name)
    own = CONFIGS["gemma2"]
    CONFIGS["gemma2"] = FULL_GEMMA
    try:
        return make("gemma2")
    finally:
        CONFIGS["gemma2"] = own


def mixed(position: Tensor, held: Tensor, seed: int) -> Tensor:
    """Numbers that look random, fixed for a position, layer and head, `held.shape`."""
    layers, heads, _ = held.shape
    where = torch.arange(layers * heads).view(layers, heads, 1) * 7919 + position * 104729
    return torch.sin((where + seed * 31337).double()).mul(43758.5453).frac().abs().float()


@dataclass(frozen=True)
class ByChance(HeadPolicy):
    """Random scores, each head its own."""

    name: ClassVar[str] = "by-chance"
    summary: ClassVar[str] = "Random scores by head."
    needs: ClassVar[frozenset[str]] = frozenset({"labels"})
    seed: int = 0

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        assert tokens.held is not None
        score = mixed(tokens.position, tokens.held, self.seed)
        return score.masked_fill(~tokens.held, torch.nan)  # what a head lost must not matter


@dataclass(frozen=True)
class Agreed(HeadPolicy):
    """Random scores, the same in all heads; `ByToken` is the same policy without heads."""

    name: ClassVar[str] = "agreed"
    summary: ClassVar[str] = "Random scores, all heads alike."

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        assert tokens.held is not None
        return mixed(tokens.position, tokens.held[:1, :1], 3)[0, 0].expand(tokens.held.shape)


@dataclass(frozen=True)
class Looked(HeadPolicy):
    """Attention, kept in a column by token and, a bit different in each head, in one by head."""

    name: ClassVar[str] = "looked"
    summary: ClassVar[str] = "Attention with noise by head."
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "labels"})
    columns: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    head_columns: ClassVar[Mapping[str, float]] = {"share": 0.5, "born": -1.0}
    recent: int = 4

    def on_insert(self, tokens: Tokens) -> Mapping[str, Tensor]:
        assert tokens.held is not None
        return {"born": tokens.position.float().expand(tokens.held.shape)}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        assert tokens.held is not None
        noise = mixed(tokens.position, tokens.held, 1)
        share = tokens.head_state["share"] * 0.5 + attention_mass * noise
        return {"mass": tokens.state["mass"] + attention_mass, "share": share}

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.head_state["share"]

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        return tokens.first(2) | tokens.latest(self.recent)


class HeadRecord:
    """Which entries a cache lost when, as it happens: `(seen, layer x head x positions)`."""

    def __init__(self, cache: MemDecayCache) -> None:
        self.events: list[tuple[int, list[list[Tensor]]]] = []
        self._cache, self._release = cache, cache._release
        cache._release = self._released  # type: ignore[method-assign]

    def _released(self, gone: Tensor) -> None:
        before = self._cache.kept_by_head()
        self._release(gone)
        after = self._cache.kept_by_head()
        lost = [
            [one[~torch.isin(one, other)] for one, other in zip(*pair, strict=True)]
            for pair in zip(before, after, strict=True)
        ]
        self.events.append((self._cache.ledgers[0].seen, lost))

    @property
    def uneven(self) -> bool:
        """Whether heads lost different tokens."""
        lost = [{tuple(one.tolist()) for row in event for one in row} for _, event in self.events]
        return any(len(kinds) > 1 for kinds in lost)


@torch.no_grad()
def head_oracle(
    model: PreTrainedModel,
    ids: Tensor,
    events: Sequence[tuple[int, list[list[Tensor]]]],
    *,
    attention: bool = False,
    by_head: bool = False,
) -> Tensor:
    """One forward over the full sequence, each head hiding what it lost from then on.

    Returns:
        Logits, `(length, vocab)`; with `attention` who looks at whom, averaged over layers and
        heads, or `by_head`, `(layers, heads, length, length)`.
    """
    length = ids.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    heads = model.config.num_attention_heads
    modules = [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
    ]
    masks = []
    for layer in range(model.config.num_hidden_layers):
        visible = (key <= query).repeat(heads, 1, 1)
        for when, lost in events:
            group = heads // len(lost[layer])
            for head in range(heads):
                hidden = torch.isin(key, lost[layer][head // group])
                visible[head] &= ~((query >= when) & hidden)
        masks.append(additive(visible[None]))

    def swap(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": masks[module.layer_idx]}

    handles = [module.register_forward_pre_hook(swap, with_kwargs=True) for module in modules]
    assert len(handles) == model.config.num_hidden_layers
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        out = model(
            input_ids=ids,
            attention_mask=additive(key <= query)[None, None],
            position_ids=torch.arange(length)[None],
            use_cache=False,
            output_attentions=attention,
        )
    finally:
        model.set_attn_implementation(own)
        for handle in handles:
            handle.remove()
    if not attention:
        return out.logits[0]
    every = torch.stack(out.attentions)[:, 0]
    return every if by_head else every.mean((0, 1))


def head_state(cache: MemDecayCache) -> dict[str, Tensor]:
    """Everything that decides later logits and evictions, not what lies in free memory."""
    state = {}
    for layer, pool in enumerate(cache.pools):
        for head in range(len(pool.lengths)):
            names = ("keys", "values", "slots")
            for name, tensor in zip(names, pool.head(head), strict=True):
                state[f"{name}.{layer}.{head}"] = tensor.clone()
    return {**state, **ledger_state(cache)}
