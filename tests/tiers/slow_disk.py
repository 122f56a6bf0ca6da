"""A disk that can be made slow, and who reads from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class SlowDisk:
    """Reads of a store's file on other threads wait until `go` is set, and are counted.

    Args:
        store: a `DiskStore`; its copies have the same file.
        before: called before every read on another thread, to wait or fail in another way.
    """

    def __init__(self, store: Any, before: Callable[[], object] | None = None) -> None:
        self.file = store._shared
        self.go = threading.Event()
        self.begun = self.ahead = self.at_once = 0
        before = self.go.wait if before is None else before
        read = self.file._read_some

        def slow(into: memoryview, at: int) -> int:
            if threading.current_thread().name != "memdecay-disk":
                self.at_once += 1
                return int(read(into, at))
            self.begun += 1
            before()
            self.ahead += 1
            return int(read(into, at))

        self.file._read_some = slow

    def rest(self) -> None:
        """Return when nothing is being read any more."""
        eventually(lambda: not self.file._background._threads)

    def reading(self, count: int) -> None:
        """Return when so many reads have begun."""
        eventually(lambda: self.begun >= count)


def eventually(true: Callable[[], object]) -> None:
    """Return once something is so; it is an error if it is not after a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)
