"""What a session is told about its tiers."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.graded import BITS, GROUP
from memdecay.engine.memory import Memory
from memdecay.errors import BudgetError, MemDecayError, ProfileError
from memdecay.policy import Policy
from memdecay.regions import Profile
from memdecay.tiers.inside import InsideOnly
from memdecay.tiers.levels import Levels
from memdecay.tiers.memory import TieredMemory
from memdecay.tiers.stores import DiskStore, HostStore

_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?)?B", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Tiers:
    """Where a session keeps what its budget evicts, and when that comes back.

        session = Session(model, tokenizer, budget=512, tiers=Tiers(host="2GiB"))

    What is evicted goes to memory. What has been outside for longest makes room for it: it goes to
    disk if there is such a tier, and is lost else. New messages bring back the pages that they ask
    for, in exchange for the worst that are kept, before they are read; so do the last steps of an
    answer. A page that came back is to the bit what it was.

    With `quantized` there is a tier between the two: what has no place at full precision is still
    attended to, at fewer bits. An exact copy of it is outside, by which it comes back up.

    Args:
        host: how much memory may hold: tokens as an integer, bytes as a text like "512MB" or
            "2GiB", None for any amount, 0 for no such tier.
        disk: how much the disk may hold, likewise. Its file has no name and ends with the process.
        disk_folder: where its file is; the system's folder of temporary files if None, which on
            some systems is memory.
        page_size: neighbouring tokens that move together.
        pages: at most how many pages a turn brings back; None for as many as fill three
            quarters of what pins and the turn leave of the budget.
        every: an answer brings pages back every so many decode steps; 0 for never.
        looks: how often new messages are looked at before they are read. A second look finds more
            than the first, as it sees what that brought back; each takes as long as reading them,
            or their last 512 tokens if they are longer.
        wait: False lets an answer go on while pages are read from disk for it, so that they come
            back some steps later, or not at all, as fast as the disk is; True waits for them, so
            that the same is answered every time.
        no_disk: regions of which nothing is written to disk by this; what is evicted of them
            stays in memory or is lost.
        words: find pages by the rare words that they share with a turn: None only where no heads
            are known for the model, True always, together with heads where there are any, False
            never. Words alone put the page with the answer first for 0.33 of 36 questions and
            among the first four for 0.6 (SmolLM2, short tier), heads for 0.4 to 1.0 and 0.9 to
            1.0; both together did worse than heads.
        quantized: how many tokens more than the session's budget are kept, so that the budget is
            of those at full precision. Where fewer are, as after an exchange, more are at fewer
            bits: the sum holds. None for any number, then nothing goes out; 0 for no such
            tier.
        bits: 4 or 8, of a number of them.
        full_regions: regions whose tokens are never at fewer bits, as those that pins keep; if
            they have no room at full precision, they go out. An answer gets its region when it
            is written.
        exact: keep, where there is room outside, exact copies of what is at fewer bits, so that
            what a turn asks for goes back to full precision, and what goes out goes to the bit.
            Without them what comes back is what its codes stand for.

    Raises:
        MemDecayError: an argument is not usable; the sentence says which.
    """

    host: int | str | None = None
    disk: int | str | None = 0
    disk_folder: str | os.PathLike[str] | None = None
    page_size: int = 16
    pages: int | None = None
    every: int = 16
    looks: int = 2
    wait: bool = False
    no_disk: Collection[str] = ()
    words: bool | None = None
    quantized: int | None = 0
    bits: int = 4
    full_regions: Collection[str] = ()
    exact: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("host", "disk"):
            _limits(name, getattr(self, name))
        if self.quantized is not None:
            _check_integer("quantized", self.quantized, 0, ", or None for any number")
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise MemDecayError(f"bits is {self.bits!r}, but it must be 4 or 8.")
        if self.host == 0 and self.disk == 0 and self.quantized == 0:
            raise MemDecayError(
                "host and disk are both 0, but at least one of them must hold pages, unless "
                "quantized is set."
            )
        if self.disk_folder is not None:
            folder = self.disk_folder
            path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
            if not isinstance(path, str) or not path:
                raise MemDecayError(
                    f"disk_folder is {folder!r}, but it must be the path of a folder, or None."
                )
            if self.disk == 0:
                raise MemDecayError(
                    f"disk_folder is {str(folder)!r}, but disk is 0, so nothing is kept there; "
                    f"set disk to an amount or to None."
                )
            object.__setattr__(self, "disk_folder", path)
        _check_integer("page_size", self.page_size, 1)
        if self.pages is not None:
            _check_integer("pages", self.pages, 1, ", or None")
        _check_integer("every", self.every, 0)
        _check_integer("looks", self.looks, 1)
        for name in ("no_disk", "full_regions"):
            object.__setattr__(self, name, _regions(name, getattr(self, name)))
        if self.full_regions and self.quantized == 0:
            raise MemDecayError(
                f"full_regions is {[*self.full_regions]}, but quantized is 0, so no token is at "
                f"fewer bits; set quantized to a number of tokens or to None."
            )
        if not isinstance(self.wait, bool):
            raise MemDecayError(f"wait is {self.wait!r}, but it must be True or False.")
        if not isinstance(self.exact, bool):
            raise MemDecayError(f"exact is {self.exact!r}, but it must be True or False.")
        if self.words is not None and not isinstance(self.words, bool):
            raise MemDecayError(f"words is {self.words!r}, but it must be True, False or None.")

    def cache_settings(
        self, budget: int | None, policy: Policy, page_size: int | None
    ) -> dict[str, Any]:
        """Return what the cache of a session has as its budget and precision.

        Args:
            budget: of the session.
            policy: likewise.
            page_size: of its cache, what the policy prefers if None.

        Raises:
            BudgetError: with `quantized`, the session has no budget, or too small a one.
            MemDecayError: with `quantized`, heads keep their own tokens by the policy.
        """
        if self.quantized == 0:
            return {"budget": budget}
        if policy.per_head:
            raise self._by_head(policy)
        if not policy.bounded:
            raise BudgetError(
                f"quantized is {self.quantized}, but policy {policy.name!r} has no order in which "
                f"tokens could go down; choose one that evicts."
            )
        if budget is None:
            raise BudgetError(
                f"quantized is {self.quantized}, but budget is None, so all is kept at full "
                f"precision; give the session a budget."
            )
        page_size = policy.page_size if page_size is None else page_size
        _check_integer("budget", budget, 1)
        _check_integer("page_size", page_size, 1)
        if budget < page_size + GROUP:
            raise BudgetError(
                f"budget is {budget} tokens at full precision, but with quantized it must be at "
                f"least {page_size + GROUP}: a page of {page_size}, and the {GROUP} tokens that go "
                f"down together."
            )
        return {
            "budget": None if self.quantized is None else budget + self.quantized,
            "full_precision": budget,
            "bits": self.bits,
            "group_size": GROUP,
            "full_regions": self.full_regions,
        }

    @staticmethod
    def _by_head(policy: Policy) -> MemDecayError:
        return MemDecayError(
            f"policy is {policy.name!r}, by which heads keep their own tokens, but tiers need a "
            f"policy by which all heads keep the same."
        )

    def open(self, cache: MemDecayCache) -> Memory:
        """Return the memory of a cache that holds nothing yet.

        Raises:
            MemDecayError: the cache is not one of `cache_settings`, heads of it keep their own
                tokens, it has several sequences or holds tokens, no heads are known by which to
                find pages and words are not to, or no file can be made in `disk_folder`.
            ProfileError: a region of `no_disk` is unknown.
        """
        if cache.by_head:
            raise self._by_head(cache.policy)
        if cache.rows > 1:
            raise MemDecayError(
                f"The cache holds {cache.rows} sequences, but tiers are for a cache of one."
            )
        if cache.seen:
            raise MemDecayError(
                f"The cache has seen {cache.seen} tokens, but tiers are for a cache that is new."
            )
        if (cache.full_precision is None) != (self.quantized == 0):
            raise MemDecayError(
                f"quantized is {self.quantized}, but the cache has full_precision="
                f"{cache.full_precision}; make it with `cache_settings`, or use a Session."
            )
        not_on_disk = _numbers("no_disk", self.no_disk, cache.profile)
        if self.host == 0 and self.disk == 0:
            return InsideOnly(cache)
        heads = cache.recall_heads
        if not heads and self.words is False:
            raise MemDecayError(
                "words is False, so tiers find pages by evidence heads alone, but none are known "
                "for this model; give a profile with them, as memdecay calibrate writes it, or let "
                "words be None."
            )
        host, disk = _limits("host", self.host), _limits("disk", self.disk)
        levels = Levels(
            None if self.host == 0 else HostStore(**host),
            None if self.disk == 0 else DiskStore(self.disk_folder, **disk),
            not_on_disk=not_on_disk,
        )
        return TieredMemory(
            cache,
            levels,
            page_size=self.page_size,
            heads=heads,
            words=not heads if self.words is None else self.words,
            pages=self.pages,
            every=self.every,
            looks=self.looks,
            wait=self.wait,
            exact=self.exact,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        regions = {"no_disk": [*self.no_disk], "full_regions": [*self.full_regions]}
        return {**dataclasses.asdict(self), **regions}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tiers:
        """Return what `to_dict` told."""
        return cls(**data)


def _limits(name: str, value: object) -> dict[str, int | None]:
    """Return the limits of a store.

    Raises:
        MemDecayError: the value is no amount.
    """
    if value is None:
        return {}
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return {"max_tokens": value}
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found:
        unit = (found[2] or "").lower()
        size = int(float(found[1]) * (1024 if "i" in unit else 1000) ** _POWER[unit[:1]])
        if size > 0:
            return {"max_bytes": size}
    raise MemDecayError(
        f"{name} is {value!r}, but it must be a number of tokens of at least 0, a size such as "
        f"'512MB' or '2GiB', or None for no limit."
    )


def _numbers(name: str, regions: Collection[str], profile: Profile) -> list[int]:
    """Return regions by their numbers.

    Raises:
        ProfileError: one is unknown.
    """
    try:
        return [profile.id(region) for region in regions]
    except ProfileError as error:
        raise ProfileError(f"{name} is {[*regions]}: {error}") from None


def _regions(name: str, value: object) -> tuple[str, ...]:
    """Return names of regions.

    Raises:
        MemDecayError: the value is something else.
    """
    if isinstance(value, str) or not isinstance(value, Collection):
        raise MemDecayError(f"{name} is {value!r}, but it must be a list of regions.")
    if not all(isinstance(one, str) for one in value):
        raise MemDecayError(f"{name} is {value!r}, but it must hold only names of regions.")
    return tuple(value)


def _check_integer(name: str, value: object, minimum: int, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise MemDecayError(
            f"{name} is {value!r}, but it must be an integer of at least {minimum}{other}."
        )
