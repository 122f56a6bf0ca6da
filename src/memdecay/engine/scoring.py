"""How well a model foresees the assistant's recorded tokens: which count, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from memdecay.engine.report import Scores
from memdecay.errors import TraceError
from memdecay.prompt import Conversation, Rendered

_ANSWER = "zqwxanswer"


class Frame:
    """What a chat template writes around an answer, found out by writing one.

    Args:
        empty: makes a conversation without messages.
        tokenizer: whose special tokens may end a turn.

    Attributes:
        header: what opens an answer; the model does not write it.
        ends: the special token that the template closes an answer with, if it has one.
    """

    def __init__(
        self, empty: Callable[[], Conversation], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._tokenizer = tokenizer
        self.header = ""
        self.ends: frozenset[int] = frozenset()
        conversation = empty()
        try:
            conversation.append([{"role": "user", "content": "Hello."}])
            self.header = conversation.generation_prompt().text
            text = conversation.append([{"role": "assistant", "content": _ANSWER}]).text
        except TraceError:  # it refuses these two, but perhaps not what the user says
            return
        closing = text[text.rfind(_ANSWER) + len(_ANSWER) :]
        known = tokenizer.added_tokens_decoder
        ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
        special = [number for number in ids if number in known and known[number].special]
        self.ends = frozenset(special[:1])

    def opening(self, ids: Sequence[int]) -> int:
        """Return how many tokens of an answer are its header.

        They are compared as text: a tokenizer may cut a header elsewhere when an answer follows.
        """
        count = 0
        while count < len(ids) and self.header.startswith(
            str(self._tokenizer.decode(list(ids[: count + 1])))
        ):
            count += 1
        return count


def targets(
    rendered: Rendered,
    roles: Mapping[int, str],
    frame: Frame,
    ends: Collection[int],
) -> dict[int, int]:
    """Return offset in `rendered` -> message, of the tokens that the assistant itself wrote.

    Args:
        rendered: new tokens.
        roles: message -> role, of the messages that count.
        frame: what the template writes around an answer.
        ends: ids that end one; what the template writes after the last of them does not count.
    """
    found: dict[int, int] = {}
    for message, role in roles.items():
        mine = [span for span in rendered.spans if span.message == message]
        if role != "assistant" or not mine:
            continue
        first, last = mine[0].start, mine[-1].end
        first += frame.opening(rendered.ids[first:last])
        closing = [place for place in range(first, last) if rendered.ids[place] in ends]
        last = closing[-1] + 1 if closing else last
        found.update(dict.fromkeys(range(first, last), message))
    return found


class Scorer:
    """Collects the losses of `targets`, chunk by chunk.

    Args:
        ids: the tokens that are read.
        targets: offset in `ids` -> message.
        start: position of the first token.
        chunk: at most how many targets one forward reads.
    """

    def __init__(
        self, ids: Sequence[int], targets: Mapping[int, int], start: int, *, chunk: int = 1
    ) -> None:
        self._ids, self._targets, self._start, self._most = ids, targets, start, chunk
        self._parts: list[Scores] = []

    def is_target(self, offset: int) -> bool:
        """Return whether this token is scored."""
        return offset in self._targets

    def next_target(self, offset: int) -> int:
        """Return the offset of the first scored token from `offset` on, or the end."""
        return next(
            (at for at in range(offset, len(self._ids)) if at in self._targets), len(self._ids)
        )

    def targets_from(self, offset: int) -> int:
        """Return how many scored tokens from `offset` on, without a gap, one forward reads."""
        count = 0
        while count < self._most and offset + count in self._targets:
            count += 1
        return count

    def rows(self, offset: int, count: int) -> list[int]:
        """Return the rows of a chunk whose logits are needed: before a target, and the last."""
        return [
            row for row in range(count) if row == count - 1 or offset + row + 1 in self._targets
        ]

    def add(self, logits: Tensor, places: Sequence[int]) -> None:
        """Score what the model says.

        Args:
            logits: `(n, vocab_size)` float32.
            places: for each row the offset of the token that it foresees; others are passed over.
        """
        wanted = [number for number, place in enumerate(places) if place in self._targets]
        if not wanted:
            return
        places = [places[number] for number in wanted]
        logits = logits[wanted]
        target = torch.tensor([self._ids[place] for place in places])
        nll = torch.nn.functional.cross_entropy(
            logits, target.to(logits.device), reduction="none"
        ).cpu()
        self._parts.append(
            Scores(
                position=torch.tensor(places) + self._start,
                message=torch.tensor([self._targets[place] for place in places]),
                target=target,
                nll=nll,
                top1=logits.argmax(-1).cpu(),
            )
        )

    def result(self) -> Scores | None:
        """Return all of them, None if there were none."""
        if not self._parts:
            return None
        names = ("position", "message", "target", "nll", "top1")
        return Scores(
            **{name: torch.cat([getattr(part, name) for part in self._parts]) for name in names}
        )
