"""A Ctrl-C at a chosen line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


def interrupt_at(
    count: int, run: Callable[[], Any], rooms: Sequence[str] = ("engine",)
) -> tuple[bool, Any]:
    """Send a SIGINT at the `count`-th line of these rooms that `run` passes.

    Returns whether there was such a line, and what `run` returned, None if it was interrupted.
    """
    left = count

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not any(f"memdecay/{room}" in frame.f_code.co_filename for room in rooms):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = run()
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.settrace(before)
    return left <= 0, result
