"""MemDecay by head: every KV head keeps what it looked at itself, all under one budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.evidence import FLOOR
from memdecay.policy import evidence
from memdecay.policy.base import HeadPolicy, Tokens, check_parameter
from memdecay.policy.memdecay_replay import MemDecayReplay
from memdecay.regions import Profile


@dataclass(frozen=True)
class MemDecayHeads(MemDecayReplay, HeadPolicy):
    """Keep in each KV head what it looks at when the model repeats the context (KVzip).

    An entry is a token in one KV head of one layer; all entries compete for one budget. Its score
    is the log of the highest attention that the head gave to it while the model repeated it, plus
    what the evidence heads say of the token, so that heads agree on facts. An entry that was not
    repeated yet counts as an ordinary one of its head. Pinned instructions stay in all heads.

    Args:
        evidence_weight: β, of the evidence against the head's own say.

    The other arguments and the errors are those of `memdecay-replay`.
    """

    name: ClassVar[str] = "memdecay-heads"
    summary: ClassVar[str] = "memdecay-replay in which every KV head keeps its own tokens"
    per_head: ClassVar[bool] = True
    head_columns: ClassVar[Mapping[str, float]] = {"repeated": 0.0}

    usage_offset: float = 0.25
    recent_share: float = 0.0625
    evidence_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse parameters outside their ranges."""
        super().__post_init__()
        check_parameter(self, "evidence_weight")

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Remember the highest attention of each KV head, over its query heads."""
        before = tokens.head_state["repeated"]
        layers, kv_heads, kv_len = before.shape
        most = attention.view(layers, kv_heads, -1, kv_len).amax(2)
        columns = super().on_replay(tokens, attention, profile)
        return {**columns, "repeated": evidence.peak(before, most)}

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return log(ε + m) + β s, (num_layers, num_kv_heads, kv_len) float32."""
        said = (tokens.head_state["repeated"] + FLOOR).log()
        known = tokens.replayed.float()
        ordinary = (said * known).sum(-1, keepdim=True) / known.sum().clamp(min=1)
        said = torch.where(tokens.replayed, said, ordinary)
        return said.add_(MemDecayReplay.score(self, tokens, profile), alpha=self.evidence_weight)

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return (kv_len,) float32, the mean over the heads that hold a token (for pictures)."""
        return HeadPolicy.score(self, tokens, profile)
