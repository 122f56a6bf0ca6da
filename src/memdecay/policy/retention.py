"""The retention score of MemDecay: equations (2), (3) and (4) of the paper, one function each.

Equation (5) and Algorithm 1, which turn these scores into evicted pages, are in `pages`.
Nothing here mutates its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaled:
    """A refresh threshold relative to uniform attention: τ = scale / |K_t| (section III-C)."""

    scale: float


def importance(
    importance: Tensor, attention_mass: Tensor, smoothing: float, first: Tensor | None = None
) -> Tensor:
    """Average the attention a token receives, equation (2): a ← ρ a + (1 - ρ) Ā.

    Args:
        importance: a, (kv_len,) float32, before this observation.
        attention_mass: Ā, (kv_len,) float32, share of one query's attention.
        smoothing: ρ in [0, 1).
        first: (kv_len,) bool, tokens observed for the first time; their average starts at Ā.
            None is the paper's letter, in which it starts at 0 and so needs 1/(1 - ρ)
            observations to tell a new token's attention.

    Returns:
        a after this observation, (kv_len,) float32.
    """
    averaged = torch.lerp(importance, attention_mass, 1.0 - smoothing)
    return averaged if first is None else torch.where(first, attention_mass, averaged)


def threshold(refresh_threshold: float | Scaled, kv_len: int) -> float:
    """Return the attention above which a token counts as used: τ, fixed or scaled to |K_t|.

    Args:
        refresh_threshold: τ itself, or `Scaled(c)` for c / |K_t|.
        kv_len: |K_t|, tokens kept now.

    Returns:
        τ, share of one query's attention.
    """
    if isinstance(refresh_threshold, Scaled):
        return refresh_threshold.scale / max(kv_len, 1)
    return refresh_threshold


def refresh(refreshed_at: Tensor, attention_mass: Tensor, threshold: float, now: float) -> Tensor:
    """Reset the decay clock of tokens in use, equation (3): t_ref ← t where Ā ≥ τ.

    Args:
        refreshed_at: t_ref, (kv_len,) float32 in steps; a new token's is its insertion time.
        attention_mass: Ā, (kv_len,) float32, share of one query's attention.
        threshold: τ, share of one query's attention.
        now: t in steps, the time of this observation; at least every t_ref and 0.

    Returns:
        t_ref after this observation, (kv_len,) float32 in steps.
    """
    # No clock is ahead of now, so the maximum is the same as a choice, and twice as fast.
    return torch.maximum(refreshed_at, (attention_mass >= threshold) * now)


def decayed_prior(base_priority: Tensor, decay_rate: Tensor, age: Tensor) -> Tensor:
    """Return what structure alone is still worth, first term of (4): b_r exp(-λ_r Δt).

    Args:
        base_priority: b_r of each token's region, (kv_len,) float32.
        decay_rate: λ_r of each token's region, (kv_len,) float32 in 1/step.
        age: Δt = t - t_ref, (kv_len,) float32 in steps.

    Returns:
        (kv_len,) float32.
    """
    return (decay_rate * -age).exp_().mul_(base_priority)


def score(decayed_prior: Tensor, importance: Tensor, attention_weight: float) -> Tensor:
    """Return the retention score, equation (4): s = b_r exp(-λ_r Δt) + α a.

    Args:
        decayed_prior: first term, (kv_len,) float32.
        importance: a, (kv_len,) float32.
        attention_weight: α, at least 0.

    Returns:
        s, (kv_len,) float32; higher stays.
    """
    return torch.add(decayed_prior, importance, alpha=attention_weight)
