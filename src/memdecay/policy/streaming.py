"""Streaming: attention sinks and the most recent tokens (Xiao et al., StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.policy.base import Policy, Tokens, check_parameter
from memdecay.regions import Profile


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first few tokens and the most recent ones; the paper's recency baseline.

    Args:
        sinks: tokens at the start of the sequence that stay.

    Raises:
        PolicyError: `sinks` is not an integer of at least 0.
    """

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "attention sinks and the most recent tokens"

    sinks: int = 4

    def __post_init__(self) -> None:
        """Refuse a negative number of sinks."""
        check_parameter(self, "sinks", integer=True)

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return minus the distance from the newest token, (kv_len,) float32 in tokens."""
        # Counted from the end, because float32 is exact only up to 2^24.
        return (tokens.position - tokens.seq_len).to(torch.float32)

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the sinks, (kv_len,) bool."""
        return tokens.first(self.sinks)
