"""Which pages outside share rare words with what is asked: a witness that needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memdecay.policy.evidence import standardised
from memdecay.tiers.runs import Runs

WINDOW = 16
"""Token ids of a document, for how many of which have an id."""


class Words:
    """The distinct token ids of each page outside, and how rare an id is.

    It holds 4 bytes for each distinct id of a page, up to half as much again for pages to come or
    gone, and 4 for each id of the vocabulary, however much is read. Not for several threads at
    once.
    """

    def __init__(self) -> None:
        self._having = torch.zeros(0, dtype=torch.int32)
        self._documents = 0
        self._open: list[int] = []
        self._runs = Runs(ids=torch.empty(1, 0, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._runs

    @property
    def pages(self) -> list[int]:
        """The pages that are there, in the order of their rank."""
        return self._runs.pages

    @property
    def bytes(self) -> int:
        """All that is allocated."""
        return self._runs.bytes + self._having.nbytes

    @property
    def seen(self) -> int:
        """Ids that `see` was told of."""
        return self._documents * WINDOW + len(self._open)

    def see(self, ids: Sequence[int]) -> None:
        """Count the next ids of the sequence, however it is cut (mutates).

        Args:
            ids: in order, each once.
        """
        self._open += ids
        whole = len(self._open) // WINDOW * WINDOW
        if whole:
            self._count(torch.tensor(self._open[:whole]).view(-1, WINDOW))
            del self._open[:whole]

    def unsee(self) -> None:
        """Count anew, from the first id of the sequence on; the pages stay (mutates)."""
        self._having.zero_()
        self._documents, self._open = 0, []

    def add(self, page_id: int, ids: Sequence[int]) -> None:
        """Add a page that is not there (mutates).

        Args:
            page_id: its number.
            ids: of its tokens, at least one.
        """
        distinct = torch.tensor(ids).unique()
        self._grow(distinct)
        self._runs.add(page_id, ids=distinct.view(1, -1))

    def remove(self, page_id: int) -> None:
        """Remove a page that is there (mutates)."""
        self._runs.remove(page_id)

    def rarity(self) -> Tensor:
        """Return log((1 + N) / (1 + N_w)) for each id w: N documents were seen, N_w have it."""
        return ((1 + self._documents) / (1 + self._having.float())).log_()

    def _count(self, documents: Tensor) -> None:
        self._grow(documents)
        ordered = documents.sort(1).values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        self._having += torch.bincount(ordered[first], minlength=len(self._having)).int()
        self._documents += len(documents)

    def _grow(self, ids: Tensor) -> None:
        extra = int(ids.max()) + 1 - len(self._having)
        if extra > 0:
            self._having = torch.nn.functional.pad(self._having, (0, extra))


def shared(ids: Sequence[int], words: Words) -> Tensor:
    """Say of each page outside how much it shares with these ids: Σ rarity of the shared ones.

    Args:
        ids: what is asked.
        words: of the pages.

    Returns:
        (num_pages,) float32 in the order of `words.pages`, 0 for a page that shares nothing.
    """
    if not len(words):
        return torch.zeros(0)
    rarity = words.rarity()
    asked = torch.tensor([one for one in {*ids} if one < len(rarity)], dtype=torch.int64)
    weight = torch.zeros_like(rarity).index_copy_(0, asked, rarity[asked])
    return words._runs.total(weight[words._runs["ids"][0].long()])


def rank_by_words(ids: Sequence[int], words: Words) -> Tensor:
    """Say how much each page shares with these ids, next to the others.

    Args:
        ids: what is asked.
        words: of the pages.

    Returns:
        (num_pages,) float32 in the order of `words.pages`: what `shared` says, standardised, so
        that it can be added to what `rank` says of the same pages.
    """
    return standardised(shared(ids, words)) if len(words) else torch.zeros(0)
