"""What the prompt room gives away: spans, rendered tokens, and the tokenizer it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
"""One OpenAI chat message, checked by `memdecay.prompt.validate`."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that labelling uses (fast, with a chat template)."""

    @property
    def chat_template(self) -> Any:
        """The jinja source, or name -> source."""

    def __call__(
        self, text: str, *, return_offsets_mapping: bool, add_special_tokens: bool, **kwargs: Any
    ) -> Mapping[str, Any]:
        """Return `input_ids` and, when asked, `offset_mapping`."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Return the text of ids."""


@dataclass(frozen=True)
class CharSpan:
    """A run of characters of one rendering which have one message and one region."""

    start: int
    end: int
    message: int
    region: str
    source: str
    ambiguous: bool = False
    note: str = ""


@dataclass(frozen=True)
class Span:
    """A run of tokens of one `Rendered` which have one message and one region.

    Args:
        message: index into `Conversation.messages`; an answer that is still to come has the
            index that it will get.
        region: a region name of the profile.
        start: first token, counted from the start of `Rendered.ids`.
        end: one past the last token.
        source: why the region: `explicit` (the caller said so), `role`, `structure` (tool calls,
            reasoning, retrievers), `heuristic` (a leading "Plan:", "Observation:"), or `template`
            (text that the chat template added by itself).
        ambiguous: whether a reader may want to check the label.
        note: why it is ambiguous, else empty.
    """

    message: int
    region: str
    start: int
    end: int
    source: str
    ambiguous: bool = False
    note: str = ""


@dataclass(frozen=True)
class Rendered:
    """Tokens that go to the model next, each with its region.

    Args:
        ids: token ids.
        regions: one region name per token.
        span_index: one index into `spans` per token.
        spans: they tile `ids` without gaps, in order.
        notes: what the template changed, left out or rewrote.
        generation_prompt: how many trailing tokens only open the next answer.
        text: the text of `ids`.
    """

    ids: list[int]
    regions: list[str]
    span_index: list[int]
    spans: list[Span]
    notes: list[str] = field(default_factory=list)
    generation_prompt: int = 0
    text: str = ""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


class Recorded(NamedTuple):
    """What the model wrote: the message it amounts to, and its tokens with their regions."""

    message: Message
    rendered: Rendered
