"""A file that nobody else can open and that ends with this process, shared by stores."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
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
from memdecay.tiers.prefetch import Background, Job


@dataclass(frozen=True)
class Extent:
    """Some bytes of the file, and their checksum."""

    start: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Reading:
    """Bytes of the file on their way into memory, or there.

    Args:
        extent: what is read.
        buffer: (n,) uint8, where it goes.
        job: that brings it there.
    """

    extent: Extent
    buffer: Tensor
    job: Job


class NamelessFile:
    """A file without a name, in which several stores may hold the same bytes.

    Bytes are free once every store that held them has given them back, and nobody is reading them.
    For several threads.

    Args:
        disk_folder: of the file; None for the system's directory of temporary files.

    Raises:
        MemDecayError: no file can be made in the directory.
    """

    def __init__(self, disk_folder: str | os.PathLike[str] | None) -> None:
        try:
            made = tempfile.TemporaryFile(  # noqa: SIM115
                buffering=0, prefix=".memdecay-", dir=disk_folder
            )
        except (OSError, TypeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise MemDecayError(
                f"disk_folder is {disk_folder!r}, but no file can be made there: {reason}."
            ) from error
        self.file: Any = made
        self._extents = Extents()
        self._held: dict[int, int] = {}  # start of an extent -> how many stores hold it
        self._users = 1
        self._left: deque[Mapping[int, tuple[Any, Extent]]] = deque()
        self._lock = threading.Lock()
        self._background = Background()
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
        self._read(extent, buffer.numpy().data)
        return buffer

    def begin_reading(self, extent: Extent) -> Reading:
        """Read bytes on another thread; they are held until they are read or not wanted any more.

        Whoever calls this calls `finish` or `drop` once.
        """
        buffer = torch.empty(extent.size, dtype=torch.uint8)
        content = buffer.numpy().data

        def read() -> None:
            try:
                self._read(extent, content)
            finally:
                self._let_go(extent)

        reading = Reading(extent, buffer, Job(read))
        with self._lock:
            self._clean()
            self._held[extent.start] += 1
            self._users += 1
        self._background.begin(reading.job)
        return reading

    def finish(self, reading: Reading) -> Tensor:
        """Return bytes, (n,) uint8: those being read when they are there, others are read here.

        Raises:
            OSError: they are not what was written.
        """
        if self._background.take_back(reading.job):
            reading.job.run()
        reading.job.wait()
        return reading.buffer

    def drop(self, reading: Reading) -> None:
        """Say that bytes are not wanted any more, and read them only if that has begun."""
        if self._background.take_back(reading.job):
            self._let_go(reading.extent)

    def _read(self, extent: Extent, content: memoryview) -> None:
        """Read bytes and check them; without tensors, as it may be cut off (see `Job`)."""
        at, rest = extent.start, content
        while rest and (count := self._read_some(rest, at)):
            at, rest = at + count, rest[count:]
        if rest or zlib.crc32(content) != extent.checksum:
            raise OSError(errno.EIO, "what is read is not what was written")

    def _read_some(self, into: memoryview, at: int) -> int:
        """Read at least a byte if there is one; no other use waits for it where that can be."""
        if sys.platform != "win32" and hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), [into], at)
        with self._lock:
            self.file.seek(at)
            return int(self.file.readinto(into) or 0)

    def _let_go(self, extent: Extent) -> None:
        """Say that a read is over; one after which nobody is left ends the file."""
        with self._lock:
            self._clean()
            self._give_back([extent])
            self._leave()

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
            self._leave()

    def leave(self, pages: Mapping[int, tuple[Any, Extent]]) -> None:
        """Say that a store is gone without closing; called from wherever it was collected.

        So it must not wait for a lock: what its pages held is given back at the next use.
        """
        self._left.append(pages)

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._closed()

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
