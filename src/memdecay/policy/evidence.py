"""How much a token will be needed, as a few attention heads foretell it; one function an equation.

Nothing here mutates its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memdecay.evidence import FLOOR, EvidenceHead

CLIP = 3.0
"""Standard deviations beyond which a head's say does not grow."""
_TINY = 1e-6
REACH = 1
"""Positions to each side that share their evidence: a fact is more than one token."""
AFTER, DISCOUNT = 1, 0.2
"""Positions after evidence that have a part in it, and what it is less by a position."""
PASSAGE = 16
"""Positions that share their usage, as many as the paper's page has."""


def peak(before: Tensor, now: Tensor) -> Tensor:
    """Remember the most attention that a token ever got from another one: m ← max(m, A).

    Not an average: a fact that one later sentence looked at once is worth keeping, however many
    queries passed it by.

    Args:
        before: m, (kv_len,) float32, share of one query's attention.
        now: A, (kv_len,) float32, likewise, the highest of the new queries.
    """
    return torch.maximum(before, now)


def accumulated(before: Tensor, now: Tensor) -> Tensor:
    """Add up the attention that a token got: m ← m + Ā.

    Args:
        before: m, (kv_len,) float32.
        now: Ā, (kv_len,) float32, the share of one query's attention, averaged over heads, layers
            and the observed queries.
    """
    return before + now


def evidence(peaks: Sequence[Tensor], heads: Sequence[EvidenceHead]) -> Tensor:
    """Return what the heads say together: e = Σ w_h z_h / Σ |w_h|.

    z_h = (log(ε + m_h) - μ_h) / σ_h. A head that looks at what will not be needed has w_h < 0. The
    logarithm makes heads comparable that give much and heads that give little; a z beyond
    ±3 counts as 3, so that no single head decides.

    Args:
        peaks: m_h, for each head (kv_len,) float32.
        heads: their weights, means and deviations, from calibration.

    Returns:
        (kv_len,) float32, about 0 for an ordinary token.
    """
    total = torch.zeros_like(peaks[0])
    for one, head in zip(peaks, heads, strict=True):
        said = (one + FLOOR).log_().sub_(head.mean).div_(head.std).clamp_(-CLIP, CLIP)
        total.add_(said, alpha=head.weight)
    return total / sum(abs(head.weight) for head in heads)


def shared(value: Tensor, position: Tensor, reach: int = REACH) -> Tensor:
    """Average over kept neighbours: e_i ← mean of e_j over |p_j - p_i| ≤ reach.

    A value of several tokens is lost with its weakest one.

    Args:
        value: e, (kv_len,) float32.
        position: p, (kv_len,) int64, distinct, in any order.
        reach: positions to each side.
    """
    order = torch.argsort(position)
    sorted_value, sorted_position = value[order], position[order]
    total, count = sorted_value.clone(), torch.ones_like(value)
    for offset in range(1, min(reach, len(value) - 1) + 1):
        near = (sorted_position[offset:] - sorted_position[:-offset] <= reach).float()
        total[offset:] += near * sorted_value[:-offset]
        total[:-offset] += near * sorted_value[offset:]
        count[offset:] += near
        count[:-offset] += near
    averaged = torch.empty_like(value)
    averaged[order] = total / count
    return averaged


def carried(
    value: Tensor,
    position: Tensor,
    before: int,
    after: int = AFTER,
    discount: float = DISCOUNT,
) -> Tensor:
    """Give evidence to what stands around it: e_i ← max of e_j - δ |p_j - p_i| over near kept j.

    Near is p_i - after ≤ p_j ≤ p_i + before. A value that is kept alone is not found again: a
    question leads to the words before it, and the model goes on from these.

    Args:
        value: e, (kv_len,) float32.
        position: p, (kv_len,) int64, distinct, in any order.
        before: positions before evidence that have a part in it.
        after: positions after it.
        discount: δ, per position, at least 0.
    """
    order = torch.argsort(position)
    sorted_value, sorted_position = value[order], position[order]
    best = sorted_value.clone()
    for offset in range(1, min(max(before, after), len(value) - 1) + 1):
        distance = sorted_position[offset:] - sorted_position[:-offset]
        part = distance * discount
        for least, here, there in (
            (before, slice(None, -offset), slice(offset, None)),
            (after, slice(offset, None), slice(None, -offset)),
        ):
            offered = (sorted_value[there] - part).masked_fill_(distance > least, -math.inf)
            torch.maximum(best[here], offered, out=best[here])
    spread = torch.empty_like(value)
    spread[order] = best
    return spread


def passage(value: Tensor, position: Tensor, size: int = PASSAGE) -> Tensor:
    """Average over fixed passages: u_i ← Σ u_j / size over kept j with ⌊p_j / size⌋ = ⌊p_i / size⌋.

    What a model goes on from is a run of text: it repeats a sentence or a call by following it
    token by token, which does not work with holes. What was evicted counts as 0, so a passage
    with holes goes before a whole one.

    Args:
        value: u, (kv_len,) float32.
        position: p, (kv_len,) int64.
        size: positions of a passage.
    """
    number = position.div(size, rounding_mode="floor")
    number = number - number.min()
    sums = value.new_zeros(int(number.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, number, value.double())
    return (sums / size).float()[number]


def most_used(usage: Tensor, position: Tensor, among: Tensor, count: int) -> Tensor:
    """Return (kv_len,) bool: of some tokens the `count` with the highest usage.

    Of equals the older one.

    Args:
        usage: m, (kv_len,) float32.
        position: p, (kv_len,) int64, distinct.
        among: (kv_len,) bool, tokens to choose from.
        count: how many at most.
    """
    found = among.nonzero().flatten()
    found = found[position[found].argsort()]
    best = found[usage[found].argsort(descending=True, stable=True)[:count]]
    return torch.zeros_like(among).index_fill_(0, best, True)


def log_prior(base_priority: Tensor, decay_rate: Tensor, age: Tensor) -> Tensor:
    """Return the logarithm of the paper's prior, first term of (4): log b_r - λ_r Δt.

    Args:
        base_priority: b_r of each token's region, (kv_len,) float32; 0 counts as ε.
        decay_rate: λ_r of each token's region, (kv_len,) float32 in 1/step.
        age: Δt, (kv_len,) float32 in steps.

    Returns:
        (kv_len,) float32.
    """
    return base_priority.clamp(min=FLOOR).log() - decay_rate * age


def score(evidence: Tensor, usage: Tensor, log_prior: Tensor, prior_weight: float) -> Tensor:
    """Return the retention score: s = max(e, u) + γ (log b_r - λ_r Δt).

    A token stays for either reason: as evidence, or as something all heads use. The prior tips
    the scales between tokens of which attention says the same.

    Args:
        evidence: e, (kv_len,) float32.
        usage: u, (kv_len,) float32, on the same scale.
        log_prior: (kv_len,) float32.
        prior_weight: γ, at least 0.
    """
    return torch.maximum(evidence, usage).add_(log_prior, alpha=prior_weight)


def standardised(value: Tensor) -> Tensor:
    """Return z = (v - mean) / std over the kept tokens, so that two claims can be compared.

    In float64, so that the order of the slots cannot change what is rounded.

    Args:
        value: v, (kv_len,) float32.

    Returns:
        (kv_len,) float32; zeros where all are alike.
    """
    exact = value.double()
    return ((exact - exact.mean()) / exact.std(correction=0).clamp(min=1e-3)).float()


def log_usage(usage: Tensor) -> Tensor:
    """Return log(ε' + m), as what all heads use spans orders of magnitude.

    Args:
        usage: m, (kv_len,) float32, all attention so far on the average of all heads.
    """
    return (usage + _TINY).log_()
