"""A conversation that grows: messages go in, the new tokens come out, each with its region."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memdecay.errors import SessionError, TraceError
from memdecay.prompt.generated import read_generated, remaining_closing, split_ending
from memdecay.prompt.inputs import (
    STATE_VERSION,
    check_state,
    compiled,
    control_tokens,
    digest,
    special_tokens,
    template_source,
    tool_names,
    tool_schemas,
)
from memdecay.prompt.label import Piece, label_messages
from memdecay.prompt.locate import Missing, locate, merge
from memdecay.prompt.notes import (
    about_ending,
    about_generated,
    about_messages,
    about_missing,
    about_rewrite,
    about_tools,
)
from memdecay.prompt.prepare import Turn, prepare, with_schemas
from memdecay.prompt.template import RenderError, Rendering
from memdecay.prompt.tokens import Encoder, rendered, starts_by_decoding
from memdecay.prompt.types import CharSpan, Message, Recorded, Rendered, Tokenizer
from memdecay.prompt.validate import validate_messages
from memdecay.regions import Profile

_PROMPT_REGION = "scratchpad"
_SENTINEL = "zqwxanswer"


@dataclass(frozen=True)
class _View:
    """The whole conversation as the template writes it now."""

    text: str
    spans: list[CharSpan]
    missing: list[Missing]
    ending: str


class Conversation:
    """Labelled rendering through the model's own chat template, message by message.

    `append` returns only the tokens that are new. What was returned once is never taken back: when
    the template would now write the earlier messages differently, `notes` says so, and the new
    messages still come out as the template writes them.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        retrievers: names of the tools whose outputs are documents (region `retrieval`).
        tools: tool schemas for the template.
        profile: its names are the regions that a message may ask for.
        tools_in_system: write the schemas into the system message when the template ignores them.

    Raises:
        ModelError: the tokenizer has no chat template or gives no offsets.
        TraceError: `tools` or `retrievers` is not what it should be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        retrievers: Collection[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        profile: Profile | None = None,
        tools_in_system: bool = False,
    ) -> None:
        """Compile the template and find out what it renders."""
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._retrievers = tool_names(retrievers)
        self._tools = tool_schemas(tools)
        self._profile = profile if profile is not None else Profile.default()
        self._template, self._traits = compiled(
            template_source(tokenizer, bool(self._tools)), special_tokens(tokenizer)
        )
        self._control = control_tokens(tokenizer)
        self._tools_in_system = bool(tools_in_system and self._tools and not self._traits.tools)
        self._messages: list[Message] = []
        self._notes: list[str] = []
        self._canonical = ""  # how the template wrote all messages when last asked
        self._tail = ""  # the last characters the model has read
        self._pending = ""  # what closes the last answer, not yet read by the model
        self._pending_region = _PROMPT_REGION

    @property
    def messages(self) -> list[Message]:
        """The messages so far; a copy of the list."""
        return list(self._messages)

    @property
    def notes(self) -> list[str]:
        """What the template changed, left out or rewrote so far."""
        return list(self._notes)

    def append(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """Add messages and return their tokens: the text after what is already rendered.

        Args:
            messages: one or more OpenAI chat messages.

        Raises:
            TraceError: a message is malformed, or the template refuses the conversation; nothing
                has changed then.
        """
        count = len(self._messages)
        new = validate_messages(messages, regions=self._profile.names, start=count)
        everything = self._messages + new
        view = self._view(everything)
        text, spans, notes = self._continue(view, everything, count)
        notes = [*self._notes_on(view, new, count), *notes]
        text, spans = self._with_pending(text, spans)
        ids, offsets = self._encoder.encode(text, self._tail)
        result = rendered(ids, [s for s, _ in offsets], spans, text=text, notes=notes)
        self._messages = everything
        self._read(text, view.text, notes)
        return result

    def generation_prompt(self) -> Rendered:
        """Return the tokens that open an assistant answer after the messages so far.

        Nothing changes: `record_generated` says that they were read and answered. Their region is
        `scratchpad`, because it is not yet known what the answer will be.

        Raises:
            TraceError: there is no message yet, or the template refuses.
        """
        text, notes = self._prompt_text()
        spans = [CharSpan(0, len(text), len(self._messages), _PROMPT_REGION, "template")]
        text, spans = self._with_pending(text, spans)
        ids, offsets = self._encoder.encode(text, self._tail)
        return rendered(
            ids,
            [s for s, _ in offsets],
            spans,
            text=text,
            notes=notes,
            generation_prompt=len(ids),
        )

    def record_generated(self, ids: Sequence[int]) -> Recorded:
        """Add what the model wrote after the generation prompt.

        The next `append` yields only what comes after it: the end of the message as far as the
        model did not write it, then the next messages.

        Args:
            ids: the generated ids, with or without an end-of-turn token at the end.

        Returns:
            The assistant message (tool calls in `<tool_call>` tags parsed, `<think>` as
            reasoning), and its tokens with regions.

        Raises:
            TraceError: `ids` is empty, or the template refuses the message.
        """
        if isinstance(ids, (str, bytes)) or not len(ids):
            raise TraceError(f"ids is {ids!r}, but it must hold at least one generated token id.")
        numbers = [int(i) for i in ids]
        written = self._encoder.decode(numbers)
        prompt, _ = self._prompt_text()
        count = len(self._messages)
        thinking = prompt.rfind("<think>") > prompt.rfind("</think>")
        body_end = split_ending(written, self._control)
        message, spans = read_generated(written, body_end, message=count, thinking=thinking)
        closing = self._closing()
        view = self._view([*self._messages, message])
        as_written = self._canonical + prompt + written[:body_end] + closing
        notes = [] if view.text == as_written else [about_generated(count)]
        starts = starts_by_decoding(self._encoder, numbers, spans)
        result = rendered(numbers, starts, spans, text=written, notes=notes)
        self._messages = [*self._messages, message]
        self._read(self._pending + prompt + written, view.text, notes)
        self._pending = remaining_closing(written, closing)
        self._pending_region = spans[-1].region
        return Recorded(message, result)

    def copy(self) -> Conversation:
        """Return an independent copy; it costs nothing, whatever was said so far."""
        other = copy.copy(self)
        other._notes = [*self._notes]
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the tokenizer and the profile, as plain JSON values."""
        state = {
            "version": STATE_VERSION,
            "template": digest(self._template.source),
            "messages": self._messages,
            "tools": self._tools,
            "retrievers": sorted(self._retrievers),
            "tools_in_system": self._tools_in_system,
            "notes": self._notes,
            "canonical": self._canonical,
            "tail": self._tail,
            "pending": self._pending,
            "pending_region": self._pending_region,
        }
        copied: dict[str, Any] = json.loads(json.dumps(state))
        return copied

    @classmethod
    def from_state(
        cls, tokenizer: Tokenizer, state: Mapping[str, Any], *, profile: Profile | None = None
    ) -> Conversation:
        """Return the conversation that `state_dict` was taken from.

        Args:
            tokenizer: the same tokenizer as then.
            state: what `state_dict` returned.
            profile: a profile that knows the regions used.

        Raises:
            SessionError: the state is damaged or belongs to another chat template.
        """
        check_state(state)
        made = cls(
            tokenizer,
            retrievers=state["retrievers"],
            tools=state["tools"] or None,
            profile=profile,
            tools_in_system=state["tools_in_system"],
        )
        if state["template"] != digest(made._template.source):
            raise SessionError(
                "The saved conversation belongs to another chat template, "
                "but it can only go on with the one it was made with."
            )
        if state["messages"]:
            try:
                made._messages = validate_messages(state["messages"], regions=made._profile.names)
            except TraceError as error:
                raise SessionError(f"The saved conversation is damaged: {error}") from None
        made._notes = list(state["notes"])
        made._canonical = state["canonical"]
        made._tail = state["tail"]
        made._pending = state["pending"]
        made._pending_region = state["pending_region"]
        return made

    # Rendering.

    def _turns(self, messages: Sequence[Message], apart: int = 0) -> list[Turn]:
        labelled = label_messages(
            messages, retrievers=self._retrievers, control_tokens=self._control
        )
        turns = prepare(messages, labelled, self._traits, apart=apart)
        if self._tools_in_system:
            turns = with_schemas(turns, self._tools, self._traits)
        return turns

    def _render(self, turns: Sequence[Turn], *, prompt: bool = False) -> Rendering:
        tools = self._tools if self._traits.tools else None
        try:
            return self._template.render(
                [turn.payload for turn in turns], tools=tools, add_generation_prompt=prompt
            )
        except RenderError as error:
            where = ""
            if error.turn is not None and error.turn < len(turns):
                turn = turns[error.turn]
                where = f" at message {turn.pieces[0].message} (role {turn.payload['role']!r})"
            reason = str(error).rstrip(".")
            raise TraceError(
                f"The chat template refuses the conversation{where}: {reason}."
            ) from None

    def _view(self, messages: Sequence[Message]) -> _View:
        turns = self._turns(messages)
        return self._located(turns, self._render(turns))

    def _located(self, turns: Sequence[Turn], rendering: Rendering) -> _View:
        has_tools = bool(self._tools) and self._traits.tools
        spans, missing = locate(rendering, turns, self._traits, has_tools=has_tools)
        end = spans[-1].end if spans else 0
        return _View(rendering.text[:end], spans, missing, rendering.text[end:])

    def _continue(
        self, view: _View, messages: Sequence[Message], count: int
    ) -> tuple[str, list[CharSpan], list[str]]:
        """Return the text after what is rendered already, its spans, and what was rewritten."""
        if view.text.startswith(self._canonical):
            start = len(self._canonical)
            return view.text[start:], _from(view.spans, start), []
        note = about_rewrite(self._canonical, view.text, view.spans, count)
        view = self._as_new_turn(view, messages, count)
        start = next((s.start for s in view.spans if s.message >= count), len(view.text))
        return view.text[start:], _from(view.spans, start), [note]

    def _as_new_turn(self, view: _View, messages: Sequence[Message], count: int) -> _View:
        """Return a view in which a tool result opens a turn of its own.

        A template that writes neighbouring tool results into one turn gives a later one no
        header; but the turn of the earlier one is closed already. So the new turn is read off a
        rendering with an answer between the two.
        """
        if messages[count]["role"] != "tool" or messages[count - 1]["role"] != "tool":
            return view
        turns = self._turns(messages, apart=count)
        place = next(i for i, turn in enumerate(turns) if turn.pieces[0].message >= count)
        answer = prepare(
            [{"role": "assistant", "content": _SENTINEL}],
            [[Piece(count - 1, "content", _SENTINEL, _PROMPT_REGION, "template")]],
            self._traits,
        )
        try:
            turns = [*turns[:place], *answer, *turns[place:]]
            return self._located(turns, self._render(turns))
        except TraceError:
            return view

    def _prompt_text(self) -> tuple[str, list[str]]:
        """Return what the template adds to open an answer."""
        if not self._messages:
            raise TraceError("There is no message yet, but a generation prompt needs one before.")
        turns = self._turns(self._messages)
        opened = self._render(turns, prompt=True)
        if opened.text.startswith(self._canonical):
            return opened.text[len(self._canonical) :], []
        last = max((s.end for s in opened.segments if s.turn is not None), default=0)
        note = "The chat template writes the earlier messages differently ahead of an answer."
        return opened.text[last:], [note]

    def _closing(self) -> str:
        """Return what the template writes after the content of an answer that comes last."""
        turns = self._turns([*self._messages, {"role": "assistant", "content": _SENTINEL}])
        try:
            text = self._located(turns, self._render(turns)).text
        except TraceError:
            return self._traits.closing.get("assistant", "")
        at = text.rfind(_SENTINEL)
        return text[at + len(_SENTINEL) :] if at >= 0 else ""

    def _with_pending(self, text: str, spans: list[CharSpan]) -> tuple[str, list[CharSpan]]:
        """Put the end of the last answer ahead."""
        shift = len(self._pending)
        if not shift:
            return text, spans
        closing = CharSpan(0, shift, len(self._messages) - 1, self._pending_region, "template")
        moved = [replace(s, start=s.start + shift, end=s.end + shift) for s in spans]
        return self._pending + text, merge([closing, *moved])

    def _read(self, text: str, canonical: str, notes: Sequence[str]) -> None:
        """Remember what the model has read now."""
        self._tail = (self._tail + text)[-Encoder.CONTEXT :]
        self._canonical = canonical
        self._pending = ""
        self._notes += [note for note in notes if note not in self._notes]

    def _notes_on(self, view: _View, new: Sequence[Message], count: int) -> list[str]:
        notes = about_messages(new, count, self._traits) + about_missing(view.missing, count)
        if not count and self._tools and not self._traits.tools:
            notes.append(about_tools(len(self._tools), written=self._tools_in_system))
        if not count and view.ending:
            notes.append(about_ending(view.ending))
        return notes


def _from(spans: Sequence[CharSpan], start: int) -> list[CharSpan]:
    """Return the spans from a character on, counted from there."""
    return [
        replace(span, start=max(span.start - start, 0), end=span.end - start)
        for span in spans
        if span.end > start
    ]
