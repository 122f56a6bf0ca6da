"""What a session asks of the memory beside its cache; the room of tiers has it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor

from memdecay.errors import SessionError
from memdecay.policy import Policy, get_policy

if TYPE_CHECKING:
    from memdecay.engine.cache import MemDecayCache
    from memdecay.engine.report import TierReport


RESIDENT, QUANTIZED, LOST = "resident", "quantized", "lost"
"""Where tokens are that are in the cache, at full precision or at fewer bits, and those that are
nowhere; tiers are in between."""


class Memory(Protocol):
    """What a cache has forgotten, and the way back for it.

    Attributes:
        looks: how often a turn is looked at before it is read; 0 if its ids say what it asks for.
        ids: of all tokens of the sequence, that about to be run among them: the session sets it to
            its own list once, which is changed in place.
        notes: what the user should know.
        on_move: called with a tier, or "resident" or "lost", and the tokens that went there, each
            run from its first to before its second position. What the cache evicts is not told.
    """

    looks: int
    ids: Sequence[int]
    notes: Sequence[str]
    on_move: Callable[[str, Sequence[tuple[int, int]]], None] | None

    def tier_of(self, position: int) -> str | None:
        """Return the tier of a token that is not in the cache, None if it is nowhere."""

    def begin(self) -> None:
        """Say that tokens will be read or written now."""

    def wants(self, count: int) -> bool:
        """Say whether to look at a turn of so many tokens before it is read."""

    def look(self, run: Callable[[], object], count: int) -> Tensor:
        """Run a turn and take it back from the cache; returns its queries."""

    def exchange(
        self, queries: Tensor | None, *, ids: Sequence[int], room: int, again: bool = False
    ) -> None:
        """Bring back what a turn asks for, with room left for so many tokens.

        `queries` and `ids` are of what was looked at; there are no queries where `looks` is 0.
        `again` takes the exchange before it back, which let the same turn ask better.
        """

    def mark(self) -> Any:
        """Return what `back_to` needs if what follows fails."""

    def back_to(self, mark: Any) -> None:
        """Take note that what followed `mark` never happened; the cache is as it was already."""

    def copy(self, cache: MemDecayCache) -> Memory:
        """Return an independent copy for a copy of the cache."""

    def report(self) -> TierReport:
        """Return what is where, and what moved."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all of it, as plain JSON values and as tensors on the CPU."""

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Hold what `state` told, in a memory of the same settings that holds nothing."""

    def clear(self) -> None:
        """Forget everything; the cache was reset already."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class OpensMemory(Protocol):
    """Settings of a memory, such as `memdecay.Tiers`."""

    def cache_settings(
        self, budget: int | None, policy: Policy, page_size: int | None
    ) -> Mapping[str, Any]:
        """Return what the cache of a session of these settings has as its budget and precision.

        Raises:
            MemDecayError: these settings do not fit the session's.
        """

    def open(self, cache: MemDecayCache) -> Memory:
        """Return the memory of a cache that was just made."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""


def cache_settings(
    tiers: object, budget: int | None, policy: Policy | str, page_size: int | None
) -> Mapping[str, Any]:
    """Return what the cache of a session has as its budget, and as its precision if tiers say so.

    Raises:
        SessionError: these are no settings of a memory.
        MemDecayError: they do not fit the other settings.
    """
    if tiers is None:
        return {"budget": budget}
    if isinstance(tiers, type) or not isinstance(tiers, OpensMemory):
        raise SessionError(f"tiers is {tiers!r}, but it must be memdecay.Tiers(...) or None.")
    policy = get_policy(policy) if isinstance(policy, str) else policy
    return tiers.cache_settings(budget, policy, page_size)


def open_memory(tiers: OpensMemory | None, cache: MemDecayCache) -> Memory | None:
    """Return the memory of a session, None if it has none.

    Raises:
        MemDecayError: the settings do not fit the cache.
    """
    return None if tiers is None else tiers.open(cache)


def tiers_from_dict(saved: Mapping[str, Any] | None) -> OpensMemory | None:
    """Return the settings that were saved; their room is below this one, so it is looked up."""
    if saved is None:
        return None
    made = importlib.import_module("memdecay.tiers").Tiers.from_dict(saved)
    return cast("OpensMemory", made)
