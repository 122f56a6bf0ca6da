"""TOVA: what the newest query attends to (Oren et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from memdecay.policy.base import Policy, Tokens
from memdecay.regions import Profile


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep what the latest observation attended to; the past of a token does not count.

    The original drops one token a step and layer; here the mass is the mean over the layers.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "the most attention at the latest observation"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    columns: ClassVar[Mapping[str, float]] = {"latest_mass": 0.0}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Replace the mass."""
        return {"latest_mass": attention_mass}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the mass at the latest observation, (kv_len,) float32."""
        return tokens.state["latest_mass"]

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the tokens that no query has looked at yet, (kv_len,) bool."""
        return tokens.num_observed == 0
