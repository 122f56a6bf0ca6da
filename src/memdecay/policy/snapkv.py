"""SnapKV: the attention of a window of queries, pooled over neighbours (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.errors import PolicyError
from memdecay.policy.base import Policy, Tokens, check_choice, check_parameter
from memdecay.regions import Profile


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the neighbourhoods that the last queries attended to, and those queries themselves.

    The original looks once, at the end of the prompt. Here the window slides: an observation
    that follows n new tokens replaces the share n/window of what was seen before, so the end of
    a prefill replaces all of it and a decode step 1/window.

    Args:
        window: queries that count, and most recent tokens that stay.
        kernel_size: neighbouring positions pooled, odd; neighbours that were evicted are left out.
        pooling: "max" or "avg" over the neighbourhood.

    Raises:
        PolicyError: a parameter is outside its range.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "neighbourhoods with the most attention in a window of recent queries"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    columns: ClassVar[Mapping[str, float]] = {"window_mass": 0.0}

    window: int = 16
    kernel_size: int = 7
    pooling: str = "max"

    def __post_init__(self) -> None:
        """Refuse an empty window, an even kernel and an unknown pooling."""
        check_parameter(self, "window", minimum=1, integer=True)
        check_parameter(self, "kernel_size", minimum=1, integer=True)
        check_choice(self, "pooling", ("max", "avg"))
        if self.kernel_size % 2 == 0:
            raise PolicyError(
                f"kernel_size of policy 'snapkv' is {self.kernel_size}, but it must be odd."
            )

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Slide the window over the new queries."""
        new = tokens.num_observed == 0
        share = (new.sum() / self.window).clamp(1 / self.window, 1.0)
        averaged = torch.lerp(tokens.state["window_mass"], attention_mass, share)
        return {"window_mass": torch.where(new, attention_mass, averaged)}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the window's mass pooled over neighbouring positions, (kv_len,) float32."""
        order = torch.argsort(tokens.position)
        pooled = torch.empty_like(tokens.state["window_mass"])
        pooled[order] = _pool(
            tokens.state["window_mass"][order],
            tokens.position[order],
            self.kernel_size // 2,
            self.pooling,
        )
        return pooled

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the window's own tokens, (kv_len,) bool."""
        return tokens.latest(self.window)


def _pool(mass: Tensor, position: Tensor, reach: int, pooling: str) -> Tensor:
    """Pool over kept tokens at most `reach` positions away; all (kv_len,), in position order."""
    pooled, count = mass.clone(), torch.ones_like(mass)
    # Positions are distinct, so no neighbour is more than `reach` places away.
    for offset in range(1, min(reach, len(mass) - 1) + 1):
        near = position[offset:] - position[:-offset] <= reach
        after, before = slice(offset, None), slice(None, -offset)
        for here, there in ((after, before), (before, after)):
            if pooling == "max":
                neighbour = torch.where(near, mass[there], mass[here])
                pooled[here] = torch.maximum(pooled[here], neighbour)
            else:
                pooled[here] += torch.where(near, mass[there], 0.0)
                count[here] += near
    return pooled / count
