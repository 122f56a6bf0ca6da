"""Steps that a Ctrl-C must not cut in two: it is delivered when they are done."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def uninterrupted(method: _Method) -> _Method:
    """Let a short method finish before a KeyboardInterrupt is raised.

    An eviction moves tokens in every layer; half of it would be silently wrong attention. Only
    the main thread is ever interrupted, so elsewhere this does nothing.
    """

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return method(*args, **kwargs)
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return method(*args, **kwargs)
        held: list[tuple[Any, ...]] = []
        signal.signal(signal.SIGINT, lambda *arrived: held.append(arrived))
        try:
            result = method(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, handler)
            if held:
                handler(*held[0])
        return result

    return wrapped  # type: ignore[return-value]
