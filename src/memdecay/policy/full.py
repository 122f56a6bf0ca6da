"""Full: the cache without eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.policy.base import Policy, Tokens
from memdecay.regions import Profile


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything: the ceiling that every other policy is compared with."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keeps everything; the ceiling, without a budget"
    bounded: ClassVar[bool] = False

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return zeros, (kv_len,) float32: no token is worth less than another."""
        return torch.zeros_like(tokens.inserted_at)
