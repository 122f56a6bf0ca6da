"""Pages and one budget for all heads, where every KV head of every layer keeps its own tokens.

Algorithm 1 as in `memdecay.policy.pages`, with the page of one head in the place of a page. Nothing
is mutated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memdecay.errors import BudgetError, PolicyError
from memdecay.policy.base import Policy, Tokens
from memdecay.policy.pages import (
    check_bounded,
    check_finite,
    check_score,
    held,
    leaving,
    pages_of,
)
from memdecay.regions import Profile


def plan_head_eviction(
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
    """Choose the entries to evict so that at least `excess` are freed.

    An entry is one token in one KV head of one layer. A head's entries of a page go together,
    lowest mean score first, whichever head it is; of equal scores the older page goes first, then
    the lower layer, then the lower head. A page with a pinned token stays in all heads, and so
    does the page being filled. Pages that the policy would rather keep go last.

    Args:
        tokens: the tokens that at least one head holds, in slot order; `held` is given.
        policy: scores them (`head_score`).
        profile: the region policies; pinned regions count if the policy needs labels.
        page_index: (kv_len,) int64, the page of each token; pages are numbered from 0 in the
            order of their first positions, and none is empty.
        num_pages: number of pages.
        pinned: (kv_len,) bool, tokens pinned by span.
        excess: entries to free; at most 0 evicts nothing.
        open_page: the page being filled, or None.

    Returns:
        (num_layers, num_kv_heads, kv_len) bool, entries to evict.

    Raises:
        BudgetError: pins and the page being filled leave too little to evict.
        PolicyError: the policy never evicts, or its score is not float32 of the right shape, or
            not finite where a head holds the token.
    """
    holding = tokens.held
    if holding is None:
        raise PolicyError("tokens.held is None, but keep sets by head need to say who holds what.")
    if excess <= 0:
        return torch.zeros_like(holding)
    check_bounded(policy)
    layers, heads, kv_len = holding.shape
    score = policy.head_score(tokens, profile)
    check_score(policy, score, holding.shape, "score by head")
    # Pages of heads are numbered page by page, then by layer, then by head: the order of ties.
    here = holding.permute(2, 0, 1).reshape(kv_len, layers * heads)
    score = score.permute(2, 0, 1).reshape(kv_len, layers * heads).masked_fill(~here, 0.0)
    if num_pages == kv_len:  # a page is a token: nothing to add up
        order = torch.argsort(page_index)
        mean, entries = score.index_select(0, order), here.index_select(0, order)
    else:
        sums = torch.zeros(num_pages, layers * heads, dtype=torch.float64, device=score.device)
        entries = torch.zeros_like(sums).index_add_(0, page_index, here.double()).long()
        mean = sums.index_add_(0, page_index, score.double()).div_(entries.clamp(min=1))
    check_finite(policy, mean, "an entry")
    by_pin = held(tokens, policy, profile, pinned)
    stuck = pages_of(by_pin, page_index, num_pages)
    if open_page is not None:
        stuck[open_page] = True
    stays = (entries == 0) | stuck[:, None]
    free = int((entries * ~stays).sum())
    if free < excess:
        raise BudgetError(
            f"The budget is too small by {excess - free} entries: {excess} must be freed, but only "
            f"{free} are in pages that are neither pinned nor being filled."
        )

    room = (int((holding & ~by_pin).sum()) - excess) // (layers * heads)
    preferred = policy.protected(leaving(tokens, room), profile)
    gone = torch.zeros_like(stays)
    if preferred is not None:
        first = ~stays & ~pages_of(preferred, page_index, num_pages)[:, None]
        others = int((entries * first).sum())
        if others < excess:
            gone, stays, excess = first, stays | first, excess - others
        else:
            stays = ~first
    gone.view(-1)[_lowest(mean.flatten(), entries.flatten(), stays.flatten(), excess)] = True
    return (gone.index_select(0, page_index) & here).t().reshape(layers, heads, kv_len)


def _lowest(mean: Tensor, entries: Tensor, stays: Tensor, excess: int) -> Tensor:
    """Return the indices of pages to evict, lowest mean first until `excess` entries are freed.

    Most pages stay, so only those that can be among the few are looked up and sorted.
    """
    smallest = int(entries.long().masked_fill(stays, excess).min())
    enough = min(-(-excess // smallest), len(mean))
    candidates = mean.masked_fill(stays, torch.inf)
    limit = torch.topk(candidates, enough, largest=False, sorted=False).values.max()
    pages = torch.nonzero((candidates <= limit) & ~stays).squeeze(1)
    pages = pages[torch.sort(mean[pages], stable=True).indices]
    sizes = entries[pages].long()
    return pages[torch.cumsum(sizes, dim=0) - sizes < excess]
