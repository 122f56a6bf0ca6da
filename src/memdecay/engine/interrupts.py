"""Steps that a Ctrl-C must not cut in two: it is delivered when they are done."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


class HeldInterrupts:
    """A context in which a Ctrl-C waits until the end, or until the next `delivered`.

    Only the main thread is ever interrupted, so in others this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._waiting: list[tuple[int, FrameType | None]] = []

    def _hold(self) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: self._waiting.append((number, frame)))

    def _release(self) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._waiting:
            arrived = self._waiting.pop()
            self._waiting.clear()
            self._handler(*arrived)

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                self._hold()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            self._release()

    @contextlib.contextmanager
    def delivered(self) -> Iterator[None]:
        """Let a Ctrl-C through inside, one that waited first of all."""
        if self._handler is None:
            yield
            return
        self._release()
        try:
            yield
        finally:
            self._hold()


def uninterrupted(method: _Method) -> _Method:
    """Let a short method finish before a KeyboardInterrupt is raised.

    An eviction moves tokens in every layer; half of it would be silently wrong attention.
    """

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with HeldInterrupts():
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
