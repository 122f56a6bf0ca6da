"""Whether a budget can hold what is pinned, asked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.ledger import Ledger
from memdecay.errors import BudgetError


def check_pins(
    cache: MemDecayCache, regions: Sequence[str] = (), pinned: Sequence[bool] = ()
) -> None:
    """Refuse tokens with whose pins the budget of a cache of one row could not be held.

    Where a cache has tokens at fewer bits too, what is pinned must fit at full precision.

    A page with a pinned token stays whole, also what will be written to it later: the page that
    is open after these tokens counts as full. And a page must be left to write in.

    Args:
        cache: which is not changed.
        regions: of the tokens to come.
        pinned: whether each of them is pinned, beside what the profile pins.

    Raises:
        BudgetError: with the budget that would do.
    """
    budget = cache.budget if cache.full_precision is None else cache.full_precision
    if budget is None:
        return
    ledger = cache.ledgers[0] if cache.ledgers else cache.new_ledger()
    ids = [cache.profile.id(name) for name in regions]
    filled = ledger.filled
    if ids:
        filled = ledger.pages_of(torch.tensor(ids, device=ledger.device))[2]
    later = _later(cache, ids, ledger)
    rest = [] if later is None else [later] * (cache.page_size - filled)
    if ids or rest:
        flags = torch.tensor([*pinned, *[False] * len(rest)], dtype=torch.bool)
        number, held = ledger.held_with(torch.tensor([*ids, *rest]), flags)
    else:
        number = held = int(ledger.held().sum())
    need = held + cache.page_size
    if cache.full_precision is not None:
        need += cache.page_size  # the newest stays too, when the next is begun
    if number and need > budget:
        raise BudgetError(
            f"budget is {budget} tokens, but {number} tokens are pinned ({held} with the "
            f"pages they share), which needs a budget of at least {need}."
        )


def _later(cache: MemDecayCache, ids: Sequence[int], ledger: Ledger) -> int | None:
    """Return a region that unpinned tokens may bring into the open page, None if none can."""
    by_label = "labels" in cache.policy.needs
    pinned = [by_label and pin for pin in cache.profile.pinned]
    if cache.align is None:
        return next((number for number, pin in enumerate(pinned) if not pin), None)
    last = ids[-1] if ids else ledger.last_region
    return None if last < 0 or pinned[last] else last
