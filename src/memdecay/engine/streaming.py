"""An answer piece by piece: the model writes in a thread of its own, the caller reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextIteratorStreamer


class Cancel(StoppingCriteria):
    """Stops an answer when its reader has gone.

    Attributes:
        forget: drop what was written, too.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.forget = False

    def set(self) -> None:
        """Stop after the token that is being written."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether the reader has gone."""
        return self._event.is_set()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return for each row whether to stop."""
        return torch.full((len(input_ids),), self.is_set(), device=input_ids.device)


class DroppedError(Exception):
    """An answer was dropped because its reader was interrupted; never seen by a caller."""


def stream(
    tokenizer: PreTrainedTokenizerBase, write: Callable[[TextIteratorStreamer, Cancel], object]
) -> Iterator[str]:
    """Yield what `write` gives to the streamer, while it writes.

    If the iterator is closed, `write` ends with what it has. If its reader is interrupted inside
    it, `write` is to raise `DroppedError`.

    Args:
        tokenizer: to make text of ids.
        write: runs in another thread; its exceptions are raised here.
    """
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    cancel = Cancel()
    failures: queue.Queue[BaseException] = queue.Queue()

    def work() -> None:
        try:
            write(pieces, cancel)
        except DroppedError:
            pieces.end()
        except BaseException as error:
            failures.put(error)
            pieces.end()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        for piece in pieces:
            if piece:
                yield piece
    except GeneratorExit:
        raise
    except BaseException:
        cancel.forget = True
        raise
    finally:
        cancel.set()
        worker.join()
        if not failures.empty():
            raise failures.get()
