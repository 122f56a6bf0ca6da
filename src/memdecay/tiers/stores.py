"""Where pages are kept outside of a cache: in memory, or in a file that nobody else can open."""

from __future__ import annotations

import abc
import errno
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from torch import Tensor

from memdecay.engine.interrupts import uninterrupted
from memdecay.errors import MemDecayError
from memdecay.tiers.files import Extent, NamelessFile, Reading
from memdecay.tiers.packing import Layout, nbytes, pack, unpack

if TYPE_CHECKING:
    from typing_extensions import Self

    from memdecay.tiers.packing import Page

_Place = TypeVar("_Place")


class TierWarning(UserWarning):
    """A page outside was dropped, not for its score but because it could not be kept."""


class Store(abc.ABC, Generic[_Place]):
    """Pages by number, within limits; what comes out is to the bit what went in.

    One thread may put and pop while another gets. A page comes out on the CPU, as views of memory
    that the store may still hold: it is to be read, not written to.

    Args:
        max_tokens: tokens that it may hold, None for any number.
        max_bytes: bytes that its pages may take, likewise.

    Raises:
        MemDecayError: a limit is not an integer of at least 0.
    """

    def __init__(self, *, max_tokens: int | None = None, max_bytes: int | None = None) -> None:
        for name, limit in (("max_tokens", max_tokens), ("max_bytes", max_bytes)):
            integer = isinstance(limit, int) and not isinstance(limit, bool)
            if limit is not None and not (integer and limit >= 0):
                raise MemDecayError(
                    f"{name} is {limit!r}, but it must be an integer of at least 0, or None."
                )
        self.max_tokens = max_tokens
        self.max_bytes = max_bytes
        self._tokens = 0
        self._bytes = 0
        self._pages: dict[int, tuple[Layout, _Place]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._pages

    def __iter__(self) -> Iterator[int]:
        """Go through the numbers of its pages, in the order in which they came."""
        with self._lock:
            return iter([*self._pages])

    @property
    def tokens(self) -> int:
        """Tokens of all its pages."""
        return self._tokens

    @property
    def bytes(self) -> int:
        """Bytes of all its pages."""
        return self._bytes

    def put(self, page_id: int, page: Page) -> bool:
        """Keep a page, if there is room (mutates).

        Args:
            page_id: its number.
            page: it is copied.

        Returns:
            False if a limit or a full disk leaves no room for it; then nothing has changed.

        Raises:
            MemDecayError: the store has a page of this number, or the page has no tokens.
        """
        if page_id in self._pages:
            raise MemDecayError(f"page_id is {page_id!r}, but that page is in the store already.")
        if not len(page.positions):
            raise MemDecayError(f"Page {page_id!r} has no tokens, but it must have at least one.")
        if not self.has_room(page):
            return False
        buffer, layout = self._pack(page)
        try:
            with self._lock:
                self._pages[page_id] = layout, self._keep(buffer)
                self._tokens += layout.tokens
                self._bytes += layout.nbytes
        except OSError as error:
            _warn("could not be kept", error)
            return False
        return True

    def has_room(self, page: Page, *, empty: bool = False) -> bool:
        """Say whether the limits leave room for a page: now, or if nothing else were there."""
        tokens, size = (0, 0) if empty else (self._tokens, self._bytes)
        enough_tokens = self.max_tokens is None or tokens + len(page.positions) <= self.max_tokens
        return enough_tokens and (self.max_bytes is None or size + nbytes(page) <= self.max_bytes)

    def copy(self) -> Self:
        """Return an independent store of the same pages.

        What a page holds never changes, so both have the same bytes of it; each counts them.
        """
        other = object.__new__(type(self))
        with self._lock:
            other.__dict__.update(self.__dict__)
            other._pages = dict(self._pages)
        other._lock = threading.Lock()
        return other

    def get(self, page_id: int) -> Page | None:
        """Return a page, or None if it is not there or was lost."""
        return self._out(page_id, stays=True)

    def pop(self, page_id: int) -> Page | None:
        """Return a page and forget it (mutates), or None if it is not there or was lost."""
        return self._out(page_id, stays=False)

    def packed(self, page_id: int) -> tuple[Tensor, Layout] | None:
        """Return a page as `pack` does, or None if it is not there or was lost."""
        return self._fetched(page_id, stays=True)

    def discard(self, page_id: int) -> None:
        """Forget a page without reading it, if it is there (mutates)."""
        with self._lock:
            if page_id in self._pages:
                self._forget(page_id)

    def _out(self, page_id: int, *, stays: bool) -> Page | None:
        found = self._fetched(page_id, stays=stays)
        return None if found is None else cast("Page", unpack(*found))

    def _fetched(self, page_id: int, *, stays: bool) -> tuple[Tensor, Layout] | None:
        lost: OSError | None = None
        with self._lock:
            if page_id not in self._pages:
                return None
            layout, place = self._pages[page_id]
            try:
                buffer = self._fetch(place)
            except OSError as error:
                lost = error
            if lost or not stays:
                self._forget(page_id)
        if lost:
            _warn("is lost", lost)
            return None
        return buffer, layout

    def _forget(self, page_id: int) -> None:
        layout, place = self._pages.pop(page_id)
        self._tokens -= layout.tokens
        self._bytes -= layout.nbytes
        self._free(place)

    def _pack(self, page: Page) -> tuple[Tensor, Layout]:
        return pack(page)

    @abc.abstractmethod
    def _keep(self, buffer: Tensor) -> _Place:
        """Keep these bytes and return where; OSError if that cannot be done."""

    @abc.abstractmethod
    def _fetch(self, place: _Place) -> Tensor:
        """Return the bytes that are kept there; OSError if they are lost."""

    @abc.abstractmethod
    def _free(self, place: _Place) -> None:
        """Let go of what is kept there."""


class HostStore(Store[Tensor]):
    """Pages in the memory of the host; pinned where they come from a GPU, to copy back fast.

    Arguments and errors are those of `Store`.
    """

    def _pack(self, page: Page) -> tuple[Tensor, Layout]:
        return pack(page, pinned=page.positions.is_cuda)

    def _keep(self, buffer: Tensor) -> Tensor:
        return buffer

    def _fetch(self, place: Tensor) -> Tensor:
        return place

    def _free(self, place: Tensor) -> None:
        pass  # with the last reference


class DiskStore(Store[Extent]):
    """Pages in one file without a name, which ends with this process however it ends.

    Where the system allows it the file never has a name (`O_TMPFILE`); else it is made for this
    user alone and unlinked before anything is written, and on Windows deleted by the system when
    it is closed. So any number of stores may share a directory.

    A page that cannot be written is not kept, and one that does not come back as it was written,
    by its checksum, is forgotten; both with a `TierWarning`, and never with an error. The file is
    not mapped: a mapped file that loses its blocks ends the process, a read says so.

    Pages can be fetched: they are read on another thread, and what takes one out waits only if it
    is being read just then. A copy has fetched nothing.

    Args:
        disk_folder: of the file; None for the system's directory of temporary files, which on some
            systems is memory.
        max_tokens: tokens that it may hold, None for any number.
        max_bytes: bytes that its pages may take, likewise.

    Raises:
        MemDecayError: no file can be made in the directory, or a limit is out of range.
    """

    def __init__(
        self,
        disk_folder: str | os.PathLike[str] | None = None,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(max_tokens=max_tokens, max_bytes=max_bytes)
        self._shared = NamelessFile(disk_folder)
        self._begin()

    def _begin(self) -> None:
        self._open = True
        self._fetched_pages: dict[Extent, Reading] = {}
        self._collected = weakref.finalize(self, self._shared.leave, self._pages)
        self._collected.atexit = False

    @property
    def file_bytes(self) -> int:
        """The length of the file: its pages, those of its copies, and gaps between them."""
        return self._shared.end

    @uninterrupted
    def fetch(self, page_ids: Iterable[int]) -> None:
        """Read these pages ahead, in this order, and no others any more (mutates).

        What is fetched takes memory beside, until it is taken out or fetched no more. Pages that
        are not there are passed over.
        """
        with self._lock:
            wanted = [self._pages[page][1] for page in page_ids if page in self._pages]
            for place in self._fetched_pages.keys() - {*wanted}:
                self._shared.drop(self._fetched_pages.pop(place))
            for place in wanted:
                if place not in self._fetched_pages:
                    self._fetched_pages[place] = self._shared.begin_reading(place)

    def arrived(self, page_id: int) -> bool:
        """Say whether a page that was fetched has been read, or could not be."""
        with self._lock:
            if page_id not in self._pages:
                return False
            reading = self._fetched_pages.get(self._pages[page_id][1])
            return reading is not None and reading.job.over

    @property
    def fetched_bytes(self) -> int:
        """Bytes of what is fetched, on its way or there."""
        with self._lock:
            return sum(place.size for place in self._fetched_pages)

    def copy(self) -> Self:
        """Return an independent store of the same pages, in the same file; see `Store.copy`."""
        other = super().copy()
        self._shared.share(place for _, place in other._pages.values())
        other._begin()
        return other

    def close(self) -> None:
        """Forget all pages and give the disk space back; the store keeps nothing from then on."""
        with self._lock:
            for page_id in [*self._pages]:
                self._forget(page_id)
            if self._open:
                self._open = False
                self._collected.detach()
                self._shared.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self, buffer: Tensor) -> Extent:
        if not self._open:
            raise OSError(errno.EBADF, "the store is closed")
        return self._shared.write(buffer)

    def _fetch(self, place: Extent) -> Tensor:
        reading = self._fetched_pages.pop(place, None)
        return self._shared.read(place) if reading is None else self._shared.finish(reading)

    def _free(self, place: Extent) -> None:
        reading = self._fetched_pages.pop(place, None)
        if reading is not None:
            self._shared.drop(reading)
        self._shared.free(place)


def _warn(what: str, error: OSError) -> None:
    warnings.warn(
        f"A page outside {what} and is dropped: {error.strerror or error}.",
        TierWarning,
        stacklevel=5,
    )
