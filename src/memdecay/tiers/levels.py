"""Two stores as one: pages go to memory first, then to disk, then nowhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memdecay.engine.memory import LOST
from memdecay.errors import MemDecayError
from memdecay.tiers.packing import Layout, unpack
from memdecay.tiers.stores import DiskStore, HostStore, Store

if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self

    from memdecay.tiers.packing import Page

HOST, DISK = "host", "disk"


class Levels:
    """Pages in memory, and on disk where memory has no room for them.

    A page comes into memory. If there is no room, those that have been outside for longest make
    it: they go to disk, and on disk those that have been there for longest are lost for them. So
    the newest is kept, unless it is larger than a limit.

    Args:
        host: the store in memory; None for none.
        disk: the store on disk; None for none.
        not_on_disk: regions, by number, of which no token is written to disk: a page that has one
            stays in memory while others make room, and is lost if only such pages could.

    Attributes:
        on_move: called with a page and where it went on its own, "disk" or "lost".
        moved_down: pages that went from memory to disk, however often.

    Raises:
        MemDecayError: there is neither store.
    """

    def __init__(
        self,
        host: HostStore | None,
        disk: DiskStore | None,
        *,
        not_on_disk: Collection[int] = (),
    ) -> None:
        if host is None and disk is None:
            raise MemDecayError("host and disk are None, but pages need at least one of them.")
        self.host, self.disk = host, disk
        self.on_move: Callable[[int, str], None] | None = None
        self.moved_down = 0
        self._not_on_disk = torch.tensor(sorted(not_on_disk), dtype=torch.int64)
        self._staying: set[int] = set()  # pages of these regions, all of them in memory

    @property
    def stores(self) -> Mapping[str, Store[Any]]:
        """The stores that there are, by the name of their tier."""
        both = {HOST: self.host, DISK: self.disk}
        return {name: store for name, store in both.items() if store is not None}

    def __len__(self) -> int:
        return sum(map(len, self.stores.values()))

    def __contains__(self, page_id: int) -> bool:
        return self.tier_of(page_id) is not None

    def __iter__(self) -> Iterator[int]:
        """Go through the numbers of its pages: those on disk, then those in memory."""
        for store in [*self.stores.values()][::-1]:
            yield from store

    @property
    def tokens(self) -> int:
        """Tokens of all its pages."""
        return sum(store.tokens for store in self.stores.values())

    @property
    def bytes(self) -> int:
        """Bytes of all its pages."""
        return sum(store.bytes for store in self.stores.values())

    def tier_of(self, page_id: int) -> str | None:
        """Return "host" or "disk", or None if the page is not there."""
        return next((name for name, store in self.stores.items() if page_id in store), None)

    def has_room(self, page: Page) -> bool:
        """Say whether a page fits where pages come first, without another one going for it."""
        first = self.host if self.host is not None else self.disk
        return first is not None and first.has_room(page)

    def put(self, page_id: int, page: Page) -> bool:
        """Keep a page (mutates); others may move down or be lost for it, see `on_move`.

        Args:
            page_id: its number.
            page: it is copied.

        Returns:
            False if it could not be kept.

        Raises:
            MemDecayError: there is a page of this number, or the page has no tokens.
        """
        if page_id in self:
            raise MemDecayError(f"page_id is {page_id!r}, but that page is in the store already.")
        stays = self._must_stay(page)
        if self._put_in_memory(page_id, page):
            if stays:
                self._staying.add(page_id)
            return True
        return not stays and self._put_on_disk(page_id, page)

    def get(self, page_id: int) -> Page | None:
        """Return a page, or None if it is not there or was lost."""
        store = self._store_of(page_id)
        return None if store is None else store.get(page_id)

    def pop(self, page_id: int) -> Page | None:
        """Return a page and forget it (mutates), or None if it is not there or was lost."""
        store = self._store_of(page_id)
        self._staying.discard(page_id)
        return None if store is None else store.pop(page_id)

    def discard(self, page_id: int) -> None:
        """Forget a page without reading it, if it is there (mutates)."""
        self._staying.discard(page_id)
        for store in self.stores.values():
            store.discard(page_id)

    def fetch(self, page_ids: Iterable[int]) -> None:
        """Read those of some pages that are on disk ahead, and no others (mutates)."""
        if self.disk is not None:
            self.disk.fetch(page_ids)

    def at_hand(self, page_id: int) -> bool:
        """Say whether to take a page out does not wait for the disk; so if there is no page."""
        disk = self.disk
        return disk is None or page_id not in disk or disk.arrived(page_id)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of pages on disk that are in memory too, as they were fetched."""
        return 0 if self.disk is None else self.disk.fetched_bytes

    def copy(self) -> Self:
        """Return an independent copy that shares the bytes of the pages; nobody listens to it."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.host = None if self.host is None else self.host.copy()
        other.disk = None if self.disk is None else self.disk.copy()
        other.on_move = None
        other._staying = set(self._staying)
        return other

    def close(self) -> None:
        """Forget all pages and give the disk space back; nothing is written there any more."""
        for page_id in [*self]:
            self.discard(page_id)
        if self.disk is not None:
            self.disk.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all pages, as plain JSON values and as tensors; for `restore`."""
        layouts: list[dict[str, Any]] = []
        pages: dict[str, list[list[int]]] = {}
        tensors: dict[str, Tensor] = {}
        for name, store in self.stores.items():
            pages[name] = []
            for page_id in store:
                found = store.packed(page_id)
                if found is None:
                    continue
                tensors[str(page_id)], layout = found[0], found[1].to_dict()
                if layout not in layouts:
                    layouts.append(layout)
                pages[name].append([page_id, layouts.index(layout)])
        return {"layouts": layouts, "pages": pages, "moved_down": self.moved_down}, tensors

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[int, int]:
        """Keep what others of the same tiers kept (mutates); there must be nothing yet.

        Args:
            plain: of `state`.
            tensors: likewise.

        Returns:
            For each page that is kept now its tokens.
        """
        layouts = [Layout.from_dict(layout) for layout in plain["layouts"]]
        kept = {}
        for name, pages in plain["pages"].items():
            for page_id, number in pages:
                page = unpack(tensors[str(page_id)], layouts[number])
                if self.stores[name].put(page_id, page):
                    kept[page_id] = layouts[number].tokens
                    if self._must_stay(page):
                        self._staying.add(page_id)
        self.moved_down = plain["moved_down"]
        return kept

    def _must_stay(self, page: Page) -> bool:
        return bool(torch.isin(page.columns["region"].cpu(), self._not_on_disk).any())

    def _store_of(self, page_id: int) -> Store[Any] | None:
        return next((store for store in self.stores.values() if page_id in store), None)

    def _put_in_memory(self, page_id: int, page: Page) -> bool:
        host = self.host
        if host is None or not host.has_room(page, empty=True):
            return False
        while not host.has_room(page):
            self._move_down(host)
        return host.put(page_id, page)

    def _move_down(self, host: HostStore) -> None:
        """Make room in memory by one page."""
        oldest = next(iter(host))
        if oldest in self._staying and self.disk is not None:
            oldest = next((page for page in host if page not in self._staying), oldest)
        stays = oldest in self._staying
        page = self.pop(oldest)
        kept = page is not None and not stays and self._put_on_disk(oldest, page)
        self.moved_down += kept
        self._tell(oldest, DISK if kept else LOST)

    def _put_on_disk(self, page_id: int, page: Page) -> bool:
        disk = self.disk
        if disk is None or not disk.has_room(page, empty=True):
            return False
        while not disk.has_room(page):
            oldest = next(iter(disk))
            disk.discard(oldest)
            self._tell(oldest, LOST)
        return disk.put(page_id, page)

    def _tell(self, page_id: int, tier: str) -> None:
        if self.on_move is not None:
            self.on_move(page_id, tier)
