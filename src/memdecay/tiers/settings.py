"""What a session is told about its tiers."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from memdecay.engine.cache import MemDecayCache
from memdecay.errors import MemDecayError
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

    Args:
        host: how much memory may hold: tokens as an integer, bytes as a text like "512MB" or
            "2GiB", None for any amount, 0 for no such tier.
        disk: how much the disk may hold, likewise. Its file has no name and ends with the process.
        disk_folder: where its file is; the system's folder of temporary files if None, which on
            some systems is memory.
        page_size: neighbouring tokens that move together.
        pages: at most how many pages a turn brings back; None for as many as fill half of what
            pins leave of the budget, and for a long turn less: a quarter stays what the policy
            keeps.
        every: an answer brings pages back every so many decode steps; 0 for never.
        looks: how often new messages are looked at before they are read. A second look finds more
            than the first, as it sees what that brought back; each takes as long as reading them,
            or their last 512 tokens if they are longer.
        no_disk: regions of which nothing is written to disk by this; what is evicted of them
            stays in memory or is lost.
        words: find pages also by the rare words that they share with a turn.

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
    no_disk: Collection[str] = ()
    words: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("host", "disk"):
            _limits(name, getattr(self, name))
        if self.host == 0 and self.disk == 0:
            raise MemDecayError(
                "host and disk are both 0, but at least one of them must hold pages."
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
        names = self.no_disk
        if isinstance(names, str) or not isinstance(names, Collection):
            raise MemDecayError(f"no_disk is {names!r}, but it must be a list of regions.")
        if not all(isinstance(name, str) for name in names):
            raise MemDecayError(f"no_disk is {names!r}, but it must hold only names of regions.")
        object.__setattr__(self, "no_disk", tuple(names))
        if not isinstance(self.words, bool):
            raise MemDecayError(f"words is {self.words!r}, but it must be True or False.")

    def open(self, cache: MemDecayCache) -> TieredMemory:
        """Return the memory of a cache that holds nothing yet.

        Raises:
            MemDecayError: heads of the cache keep their own tokens, it has several sequences or
                holds tokens, no heads are known by which to find pages, or no file can be made in
                `disk_folder`.
            ProfileError: a region of `no_disk` is unknown.
        """
        if cache.by_head:
            raise MemDecayError(
                f"policy is {cache.policy.name!r}, by which heads keep their own tokens, but tiers "
                f"need a policy by which all heads keep the same."
            )
        if cache.rows > 1:
            raise MemDecayError(
                f"The cache holds {cache.rows} sequences, but tiers are for a cache of one."
            )
        if cache.seen:
            raise MemDecayError(
                f"The cache has seen {cache.seen} tokens, but tiers are for a cache that is new."
            )
        heads = cache.recall_heads
        if not heads:
            raise MemDecayError(
                "tiers find pages by evidence heads, but none are known for this model; give a "
                "profile with them, as memdecay calibrate writes it."
            )
        not_on_disk = [cache.profile.id(name) for name in self.no_disk]
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
            pages=self.pages,
            every=self.every,
            looks=self.looks,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {**dataclasses.asdict(self), "no_disk": [*self.no_disk]}

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


def _check_integer(name: str, value: object, minimum: int, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise MemDecayError(
            f"{name} is {value!r}, but it must be an integer of at least {minimum}{other}."
        )
