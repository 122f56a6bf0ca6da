"""Pages and the budget: equation (5) and Algorithm 1 of the paper, for every policy.

A policy scores tokens; here the scores become pages to evict, under pins. Nothing is mutated.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from memdecay.errors import BudgetError, PolicyError
from memdecay.policy.base import Policy, Tokens
from memdecay.regions import Profile


def page_scores(score: Tensor, page_index: Tensor, num_pages: int) -> Tensor:
    """Return the mean score of the tokens of each page, equation (5): S_p = 1/|p| Σ s_i.

    Args:
        score: s, (kv_len,) float32.
        page_index: (kv_len,) int64, the page of each token; pages are numbered in the order of
            their first positions, and none is empty.
        num_pages: number of pages.

    Returns:
        S_p, (num_pages,) float64: in that precision the sum of a page does not depend on the
        order of the slots, so a permuted cache evicts the same tokens.
    """
    sums = torch.zeros(num_pages, dtype=torch.float64, device=score.device)
    if num_pages == len(score):  # pages of one token each
        return sums.index_copy_(0, page_index, score.double())
    sums.index_add_(0, page_index, score.double())
    return sums / torch.bincount(page_index, minlength=num_pages)


def select(page_score: Tensor, page_tokens: Tensor, page_protected: Tensor, excess: int) -> Tensor:
    """Choose the pages to evict, lines 5-10 of Algorithm 1: lowest score first until enough.

    Args:
        page_score: S_p, (num_pages,) float.
        page_tokens: (num_pages,) int64, tokens in each page.
        page_protected: (num_pages,) bool, pages that stay.
        excess: tokens to free, |K_t| - B.

    Returns:
        (num_pages,) bool, pages to evict; of equal scores the older page goes first.

    Raises:
        BudgetError: the unprotected pages together hold fewer than `excess` tokens.
    """
    evicted = torch.zeros_like(page_protected)
    if excess <= 0:
        return evicted
    pages = torch.nonzero(~page_protected).squeeze(1)
    _check_enough(page_tokens, page_protected, excess)
    # A heap would pop few pages; here only those that can be among the few are sorted.
    enough = -(-excess // int(page_tokens[pages].min()))
    if enough < len(pages):
        candidate_score = page_score[pages]
        pages = pages[candidate_score <= torch.kthvalue(candidate_score, enough).values]
    pages = pages[torch.sort(page_score[pages], stable=True).indices]
    freed_before = torch.cumsum(page_tokens[pages], dim=0) - page_tokens[pages]
    evicted[pages[freed_before < excess]] = True
    return evicted


def plan_eviction(
    tokens: Tokens,
    policy: Policy,
    profile: Profile,
    *,
    page_index: Tensor,
    num_pages: int,
    pinned: Tensor,
    excess: int,
    open_page: int | None,
) -> Tensor:
    """Choose the tokens to evict so that at least `excess` are freed: lines 3-10 of Algorithm 1.

    Whole pages go, lowest mean score first. A page with a pinned token stays, and so does the
    page being filled. Pages that the policy would rather keep go last.

    Args:
        tokens: the kept tokens, in slot order.
        policy: scores them.
        profile: the region policies; pinned regions count if the policy needs labels.
        page_index: (kv_len,) int64, the page of each token; pages are numbered from 0 in the
            order of their first positions, and none is empty.
        num_pages: number of pages.
        pinned: (kv_len,) bool, tokens pinned by span.
        excess: tokens to free; at most 0 evicts nothing.
        open_page: the page being filled, or None.

    Returns:
        (kv_len,) bool, tokens to evict.

    Raises:
        BudgetError: pins and the page being filled leave too little to evict.
        PolicyError: the policy never evicts, or its score is not a finite float32 per token.
    """
    if excess <= 0:
        return torch.zeros_like(pinned)
    check_bounded(policy)
    if num_pages == len(page_index):
        page_tokens = torch.ones_like(page_index)
    else:
        page_tokens = torch.bincount(page_index, minlength=num_pages)
    score = check_score(policy, policy.score(tokens, profile), tokens.position.shape)
    page_score = page_scores(score, page_index, num_pages)
    check_finite(policy, page_score)
    by_pin = held(tokens, policy, profile, pinned)
    must_stay = pages_of(by_pin, page_index, num_pages)
    if open_page is not None:
        must_stay[open_page] = True

    _check_enough(page_tokens, must_stay, excess)

    room = tokens.kv_len - excess - int(by_pin.sum())
    preferred = policy.protected(leaving(tokens, room), profile)
    if preferred is None:
        return select(page_score, page_tokens, must_stay, excess).index_select(0, page_index)
    stays = must_stay | pages_of(preferred, page_index, num_pages)
    free = int(page_tokens.masked_fill(stays, 0).sum())
    if free >= excess:
        return select(page_score, page_tokens, stays, excess).index_select(0, page_index)
    evicted = ~stays | select(page_score, page_tokens, must_stay | ~stays, excess - free)
    return evicted.index_select(0, page_index)


def _check_enough(page_tokens: Tensor, page_protected: Tensor, excess: int) -> None:
    available = int(page_tokens.masked_fill(page_protected, 0).sum())
    if available < excess:
        raise BudgetError(
            f"The budget is too small by {excess - available} tokens: {excess} must be freed, but "
            f"only {available} are in pages that are neither pinned nor being filled."
        )


# What eviction by head does alike (`head_pages`)


def held(tokens: Tokens, policy: Policy, profile: Profile, pinned: Tensor) -> Tensor:
    """Return (kv_len,) bool, the tokens that a pin keeps: their own, or that of their region."""
    if "labels" not in policy.needs or not any(profile.pinned):
        return pinned
    return pinned | profile.tensors(pinned.device)[2].index_select(0, tokens.region)


def leaving(tokens: Tokens, room: int) -> Tokens:
    """Return the tokens with how many of them an eviction leaves beside pinned ones."""
    return dataclasses.replace(tokens, room=max(0, room))


def check_bounded(policy: Policy) -> None:
    """Refuse a policy that never evicts."""
    if not policy.bounded:
        raise PolicyError(f"Policy {policy.name!r} never evicts, so it cannot keep a budget.")


def check_score(policy: Policy, score: Tensor, shape: torch.Size, kind: str = "score") -> Tensor:
    """Return the score that a policy gave, or refuse it."""
    if score.shape != shape or score.dtype != torch.float32:
        raise PolicyError(
            f"Policy {policy.name!r} returned a {kind} of shape {tuple(score.shape)} and "
            f"{score.dtype}, but it must be {tuple(shape)} and torch.float32."
        )
    return score


def check_finite(policy: Policy, page_score: Tensor, what: str = "a token") -> None:
    """Refuse the scores of pages if one of them is not a finite number."""
    ends = page_score.aminmax() if page_score.numel() else ()
    if not all(math.isfinite(end) for end in ends):  # NaN is an end too
        raise PolicyError(
            f"Policy {policy.name!r} scored {what} NaN or infinite, but a score must be finite; "
            f"the attention it observed may be NaN."
        )


def pages_of(chosen: Tensor, page_index: Tensor, num_pages: int) -> Tensor:
    """Return (num_pages,) bool: the pages that hold at least one chosen token."""
    pages = torch.zeros(num_pages, dtype=torch.bool, device=page_index.device)
    if num_pages == len(page_index):
        return pages.index_copy_(0, page_index, chosen)
    pages[page_index[chosen]] = True
    return pages
