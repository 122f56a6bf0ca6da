"""Which attention heads find what a question asks for, when it has left the cache.

A question is read with nothing evicted. A head finds well if its queries claim the page with the
answer before all others (`memdecay.policy.recall`); heads are taken by how early that page comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memdecay.errors import StudyError
from memdecay.evidence import ASK, EvidenceHead
from memdecay.policy.recall import contrast, strength

HEADS = 12
"""How many heads find pages; each costs memory and time."""
PAGE = 16
"""Tokens of a page that is looked for."""


@dataclass(frozen=True)
class Asked:
    """What every head claimed when one question was asked.

    Args:
        cluster: of its episode, such as the scenario.
        claims: (num_layers, num_heads, num_pages), `strength` + `contrast` of each page.
        wanted: (num_pages,) bool, the pages with the answer: some, but not all.
    """

    cluster: str
    claims: Tensor
    wanted: Tensor


def claims(queries: Tensor, keys: Tensor, counted: Tensor, page: int = PAGE) -> Tensor:
    """Return what each head claims of each page.

    Args:
        queries: (num_layers, num_heads, n, head_dim) of a question, rotated.
        keys: (num_layers, num_kv_heads, seq_len, head_dim), rotated.
        counted: (seq_len,) bool, tokens that could be outside.
        page: tokens a page.

    Returns:
        (num_layers, num_heads, num_pages) float32, of the pages with a counted token.
    """
    number = pages_of(counted, page)
    count = int(number.max()) + 1
    found = []
    for asked, known in zip(queries.float(), keys[:, :, counted].float(), strict=True):
        per_kv = len(asked) // len(known)
        products = asked @ known.repeat_interleave(per_kv, 0).transpose(1, 2)
        most = products.new_full((*products.shape[:2], count), -torch.inf)
        most.scatter_reduce_(2, number.expand_as(products), products, "amax")
        found.append(strength(most) + contrast(most))
    return torch.stack(found)


def pages_of(counted: Tensor, page: int = PAGE) -> Tensor:
    """Return (counted tokens,) int64: the page of each, counting pages with a counted token."""
    numbers = counted.nonzero().flatten() // page
    return torch.searchsorted(numbers.unique(), numbers)


def reciprocal_rank(claimed: Tensor, wanted: Tensor) -> Tensor:
    """Return (...,), 1 / the place of the first wanted page; of equals it is the last.

    Args:
        claimed: (..., num_pages).
        wanted: (num_pages,) bool, some true.
    """
    best = claimed[..., wanted].amax(-1, keepdim=True)
    before = (claimed >= best) & ~wanted
    return 1 / (1 + before.sum(-1))


def choose(asked: Sequence[Asked], count: int = HEADS) -> tuple[EvidenceHead, ...]:
    """Return the heads whose claims place what was asked for first, on average.

    Args:
        asked: at least one question.
        count: how many heads, or fewer if the model has not so many.

    Raises:
        StudyError: nothing was asked.
    """
    if not asked:
        raise StudyError("There is no question to choose recall heads on; at least one is needed.")
    alone = torch.stack([reciprocal_rank(one.claims, one.wanted) for one in asked]).mean(0)
    best = alone.flatten().argsort(descending=True, stable=True)[:count]
    places = [torch.unravel_index(one, alone.shape) for one in best]
    return tuple(EvidenceHead(int(layer), int(head), ASK) for layer, head in places)


def told(one: Asked, heads: Sequence[EvidenceHead]) -> float:
    """Return the reciprocal rank of the answer by some heads together."""
    together = torch.stack([one.claims[head.layer, head.head].float() for head in heads]).mean(0)
    return float(reciprocal_rank(together, one.wanted))


def measured(asked: Sequence[Asked]) -> tuple[tuple[EvidenceHead, ...], float, float | None]:
    """Choose heads, and say how early they place the answers.

    Returns:
        The heads; the mean reciprocal rank on these questions; and on questions of clusters that
        had no part in the choice, None if all are of one cluster.

    Raises:
        StudyError: nothing was asked.
    """
    heads = choose(asked)
    clusters = dict.fromkeys(one.cluster for one in asked)
    apart = []
    for cluster in clusters if len(clusters) > 1 else ():
        others = choose([one for one in asked if one.cluster != cluster])
        apart += [told(one, others) for one in asked if one.cluster == cluster]
    reached = sum(told(one, heads) for one in asked) / len(asked)
    return heads, reached, sum(apart) / len(apart) if apart else None
