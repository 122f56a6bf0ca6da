"""Observation masking: forget old tool outputs first (arXiv 2508.21433)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.policy.base import Policy, Tokens, check_parameter
from memdecay.regions import Profile


@dataclass(frozen=True)
class ObservationMasking(Policy):
    """Drop all but the newest tool outputs first, then the oldest of what is left.

    What agent frameworks do to the text, done to the cache. It acts only when the budget binds.

    Args:
        keep_newest: tool outputs, counted by span, that are treated like other text.

    Raises:
        PolicyError: `keep_newest` is not an integer of at least 0.
    """

    name: ClassVar[str] = "observation_masking"
    summary: ClassVar[str] = "drops all but the newest tool outputs first, then the oldest text"
    needs: ClassVar[frozenset[str]] = frozenset({"labels"})

    keep_newest: int = 3

    def __post_init__(self) -> None:
        """Refuse a negative number of tool outputs."""
        check_parameter(self, "keep_newest", integer=True)

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return recency in [0, 1), less 1 for old tool outputs, (kv_len,) float32."""
        recency = tokens.position.to(torch.float32) / max(tokens.seq_len, 1)
        is_output = tokens.region == profile.id("tool_out")
        outputs = torch.unique(tokens.span[is_output])
        newest = outputs[max(len(outputs) - self.keep_newest, 0) :]
        old = is_output & ~torch.isin(tokens.span, newest)
        return recency - old.to(torch.float32)
