"""A file that nobody else can open and that ends with this process, shared by stores."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memdecay.errors import MemDecayError
from memdecay.tiers.extents import Extents


@dataclass(frozen=True)
class Extent:
    """Some bytes of the file, and their checksum."""

    start: int
    size: int
    checksum: int


class NamelessFile:
    """A file without a name, in which several stores may hold the same bytes.

    Bytes are free once every store that held them has given them back. For several threads.

    Args:
        directory: of the file; None for the system's directory of temporary files.

    Raises:
        MemDecayError: no file can be made in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        try:
            made = tempfile.TemporaryFile(  # noqa: SIM115
                buffering=0, prefix=".memdecay-", dir=directory
            )
        except (OSError, TypeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise MemDecayError(
                f"directory is {directory!r}, but no file can be made there: {reason}."
            ) from error
        self.file: Any = made
        self._extents = Extents()
        self._held: dict[int, int] = {}  # start of an extent -> how many stores hold it
        self._users = 1
        self._left: deque[Mapping[int, tuple[Any, Extent]]] = deque()
        self._lock = threading.Lock()
        self._closed = weakref.finalize(self, self.file.close)

    @property
    def end(self) -> int:
        """The length of the file: what is held, and gaps in between."""
        with self._lock:
            self._clean()
            return self._extents.end

    def write(self, buffer: Tensor) -> Extent:
        """Write bytes, (n,) uint8, which the caller holds from now on.

        Raises:
            OSError: they cannot be written; then nothing has changed.
        """
        content = buffer.numpy().data
        with self._lock:
            self._clean()
            if not self._closed.alive:
                raise OSError(errno.EBADF, "the store is closed")
            extent = Extent(self._extents.take(len(content)), len(content), zlib.crc32(content))
            self._held[extent.start] = 1
            try:
                self.file.seek(extent.start)
                while content:
                    content = content[self.file.write(content) :]
            except BaseException:
                self._give_back([extent])
                raise
        return extent

    def read(self, extent: Extent) -> Tensor:
        """Return bytes, (n,) uint8.

        Raises:
            OSError: they are not what was written.
        """
        buffer = torch.empty(extent.size, dtype=torch.uint8)
        content = buffer.numpy().data
        rest = content
        with self._lock:
            self.file.seek(extent.start)
            while rest and (count := self.file.readinto(rest)):
                rest = rest[count:]
        if rest or zlib.crc32(content) != extent.checksum:
            raise OSError(errno.EIO, "what is read is not what was written")
        return buffer

    def free(self, extent: Extent) -> None:
        """Give bytes back."""
        with self._lock:
            self._clean()
            self._give_back([extent])

    def share(self, extents: Iterable[Extent]) -> None:
        """Let one more store hold these bytes."""
        with self._lock:
            self._clean()
            self._users += 1
            for extent in extents:
                self._held[extent.start] += 1

    def close(self) -> None:
        """Say that a store that holds nothing any more is done; the last one ends the file."""
        with self._lock:
            self._clean()
            self._users -= 1
            if not self._users:
                self._closed()

    def leave(self, pages: Mapping[int, tuple[Any, Extent]]) -> None:
        """Say that a store is gone without closing; called from wherever it was collected.

        So it must not wait for a lock: what its pages held is given back at the next use.
        """
        self._left.append(pages)

    def _clean(self) -> None:
        while self._left:
            self._give_back([extent for _, extent in self._left.popleft().values()])
            self._users -= 1

    def _give_back(self, extents: Iterable[Extent]) -> None:
        before = self._extents.end
        for extent in extents:
            self._held[extent.start] -= 1
            if not self._held[extent.start]:
                del self._held[extent.start]
                self._extents.give_back(extent.start, extent.size)
        if self._extents.end < before and self._closed.alive:
            # What cannot be cut off now is written over later.
            with contextlib.suppress(OSError, ValueError):
                self.file.truncate(self._extents.end)
