"""H2O: heavy hitters by accumulated attention (Zhang et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from memdecay.policy.base import Policy, Tokens, check_parameter
from memdecay.regions import Profile


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the tokens that have received the most attention, and a recent window.

    Attention is accumulated over the same observations that memdecay-paper gets, as in the
    paper (section IV-C); the original sums every query of the prompt, per head.

    Args:
        recent: most recent tokens that stay; they have not had the time to accumulate.

    Raises:
        PolicyError: `recent` is not an integer of at least 0.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "heavy hitters: the most attention accumulated over all observations"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    columns: ClassVar[Mapping[str, float]] = {"accumulated": 0.0}

    recent: int = 16

    def __post_init__(self) -> None:
        """Refuse a negative window."""
        check_parameter(self, "recent", integer=True)

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Add the observed mass."""
        return {"accumulated": tokens.state["accumulated"] + attention_mass}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the accumulated mass, (kv_len,) float32."""
        return tokens.state["accumulated"]

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the recent window, (kv_len,) bool."""
        return tokens.latest(self.recent)
