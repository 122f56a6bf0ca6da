"""A conversation that grows: messages go in, the new tokens come out, each with its region."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memdecay.errors import ModelError, SessionError, TraceError
from memdecay.prompt.generated import read_generated, remaining_closing, split_ending
from memdecay.prompt.label import Piece, label_messages
from memdecay.prompt.locate import Missing, locate, merge
from memdecay.prompt.prepare import Turn, is_short_id, prepare, schemas_text, writes_calls_out
from memdecay.prompt.template import RenderError, Rendering, Template, common_prefix
from memdecay.prompt.tokens import Encoder, rendered, starts_by_decoding
from memdecay.prompt.traits import Traits, probe
from memdecay.prompt.types import CharSpan, Message, Recorded, Rendered, Tokenizer
from memdecay.prompt.validate import validate_messages
from memdecay.regions import Profile

_PROMPT_REGION = "scratchpad"
_STATE_VERSION = 1
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
        self._retrievers = _names(retrievers)
        self._tools = _schemas(tools)
        self._profile = profile if profile is not None else Profile.default()
        self._template, self._traits = _compiled(
            _source(tokenizer, bool(self._tools)), _special(tokenizer)
        )
        self._control = _control_tokens(tokenizer)
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
        notes = [*self._leftovers(view.missing, new, count), *notes]
        if view.ending and not count:
            notes.append(
                f"The chat template ends a conversation with {view.ending!r}; "
                "it is left out, because messages may follow."
            )
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
        spans = self._known_regions(spans)
        closing = self._closing()
        view = self._view([*self._messages, message])
        notes = self._canonical_note(view.text, prompt, written, body_end, closing, count)
        starts = starts_by_decoding(self._encoder, numbers, spans)
        result = rendered(numbers, starts, spans, text=written, notes=notes)
        self._messages = [*self._messages, message]
        self._read(self._pending + prompt + written, view.text, notes)
        self._pending = remaining_closing(written, closing)
        self._pending_region = spans[-1].region
        return Recorded(message, result)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the tokenizer and the profile, as plain JSON values."""
        state = {
            "version": _STATE_VERSION,
            "template": _digest(self._template.source),
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
        _check_state(state)
        made = cls(
            tokenizer,
            retrievers=state["retrievers"],
            tools=state["tools"] or None,
            profile=profile,
            tools_in_system=state["tools_in_system"],
        )
        if state["template"] != _digest(made._template.source):
            raise SessionError(
                "The saved conversation belongs to another chat template, "
                "but it can only go on with the one it was made with."
            )
        made._messages = (
            validate_messages(state["messages"], regions=made._profile.names)
            if state["messages"]
            else []
        )
        made._notes = list(state["notes"])
        made._canonical = state["canonical"]
        made._tail = state["tail"]
        made._pending = state["pending"]
        made._pending_region = state["pending_region"]
        return made

    # Rendering.

    def _turns(self, messages: Sequence[Message]) -> list[Turn]:
        labelled = label_messages(
            messages, retrievers=self._retrievers, control_tokens=self._control
        )
        turns = prepare(messages, labelled, self._traits)
        if self._tools_in_system:
            turns = _with_schemas(turns, self._tools, self._traits)
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
        note = _rewrite_note(self._canonical, view, count)
        view = self._as_new_turn(view, messages, count)
        start = next((s.start for s in view.spans if s.message >= count), len(view.text))
        return view.text[start:], _from(view.spans, start), [note]

    def _as_new_turn(self, view: _View, messages: Sequence[Message], count: int) -> _View:
        """Return a view in which a tool result opens a turn of its own.

        A template that writes neighbouring tool results into one turn gives a later one no
        header; but the turn of the earlier one is closed already. So it is shown as a user
        message, after which the template opens a new turn.
        """
        if messages[count]["role"] != "tool" or messages[count - 1]["role"] != "tool":
            return view
        turns = self._turns(messages)
        for place, turn in enumerate(turns):
            if turn.pieces[-1].message == count - 1:
                payload = {**turn.payload, "role": "user"}
                turns = [*turns[:place], replace(turn, payload=payload), *turns[place + 1 :]]
                try:
                    return self._located(turns, self._render(turns))
                except TraceError:
                    return view
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

    # Notes.

    def _leftovers(
        self, missing: Sequence[Missing], new: Sequence[Message], count: int
    ) -> list[str]:
        """Say what of the new messages is not in the prompt, or is there in another form."""
        notes = []
        calls = [i for i, m in enumerate(new, start=count) if m.get("tool_calls")]
        written = [i for i in calls if writes_calls_out(new[i - count], self._traits)]
        if written:
            why = " beside content" if self._traits.tool_calls else ""
            notes.append(
                f"The chat template ignores tool_calls{why}; those of "
                f"{_list(written)} are written into the content as <tool_call> blocks."
            )
        ids = [c.get("id", "") for i in calls for c in new[i - count]["tool_calls"]]
        if self._traits.short_ids and not all(is_short_id(i) for i in ids):
            notes.append("The chat template wants call ids of nine characters; they are renamed.")
        results = [i for i, m in enumerate(new, start=count) if m["role"] == "tool"]
        if results and not self._traits.tool_role:
            notes.append(
                f"The chat template has no tool role; the results of {_list(results)} are "
                "written into user messages in <tool_response> tags."
            )
        by_kind: dict[str, list[int]] = defaultdict(list)
        for piece in missing:
            if piece.message >= count and piece.message not in by_kind[piece.kind]:
                by_kind[piece.kind].append(piece.message)
        for kind, where in by_kind.items():
            notes.append(f"The chat template leaves out the {kind} of {_list(where)}.")
        if count == 0 and self._tools and not self._traits.tools:
            how = (
                "they are written into the system message"
                if self._tools_in_system
                else "they are not in the prompt (tools_in_system=True writes them into it)"
            )
            notes.append(
                f"The chat template ignores tool schemas; {len(self._tools)} given, {how}."
            )
        return notes

    def _canonical_note(
        self, canonical: str, prompt: str, written: str, body_end: int, closing: str, count: int
    ) -> list[str]:
        """Say when the template would write a generated message differently."""
        if canonical == self._canonical + prompt + written[:body_end] + closing:
            return []
        return [
            f"The chat template would write message {count} differently from how it was "
            "generated; the model keeps what it generated."
        ]

    def _known_regions(self, spans: list[CharSpan]) -> list[CharSpan]:
        """Every profile has the seven regions of the paper; generated text uses no other."""
        for span in spans:
            self._profile.id(span.region)
        return spans


def _rewrite_note(before: str, view: _View, count: int) -> str:
    """Say from which message on the template writes the past differently."""
    place = common_prefix(before, view.text)
    message = next((s.message for s in view.spans if s.end > place), count)
    was, now = (" ".join(text[place : place + 60].split()) for text in (before, view.text))
    return (
        f"The chat template rewrites what was rendered before message {count}, from message "
        f"{min(message, count - 1)} on ({was[:40]!r} became {now[:40]!r}); "
        "the model keeps what it has read."
    )


def _from(spans: Sequence[CharSpan], start: int) -> list[CharSpan]:
    """Return the spans from a character on, counted from there."""
    return [
        replace(span, start=max(span.start - start, 0), end=span.end - start)
        for span in spans
        if span.end > start
    ]


def _with_schemas(turns: Sequence[Turn], tools: Sequence[Any], traits: Traits) -> list[Turn]:
    """Put tool schemas into the system message, or into a new one ahead of all."""
    text = schemas_text(tools)
    first = turns[0]
    schemas = Piece(first.pieces[0].message, "content", text, "system", "template")
    if first.payload["role"] == "system":
        schemas = replace(schemas, text=f"\n\n{text}")
        pieces = [*first.pieces, schemas]
        rest = turns[1:]
    else:
        first = Turn({"role": "system"}, [])
        pieces = [schemas]
        rest = turns
    content: Any = "".join(piece.text or "" for piece in pieces)
    if traits.content_as_parts:
        content = [{"type": "text", "text": content}]
    return [Turn({**first.payload, "content": content}, pieces), *rest]


def _list(indices: Sequence[int]) -> str:
    """Return "message 3" or "messages 3, 5, 7 and 4 more"."""
    shown = ", ".join(str(i) for i in indices[:5])
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return f"message{'s' if len(indices) > 1 else ''} {shown}{more}"


# What a tokenizer says about itself.


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> tuple[Template, Traits]:
    template = Template(source, dict(special))
    return template, probe(template)


def _source(tokenizer: Tokenizer, has_tools: bool) -> str:
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        named = source.get("tool_use") if has_tools else None
        source = named or source.get("default")
    if not isinstance(source, str) or not source:
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} has no chat_template, "
            "but labelling needs one to write messages as the model knows them."
        )
    return source


def _special(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Return what the template may name: bos_token, eos_token and the like."""
    named = getattr(tokenizer, "special_tokens_map", None) or {}
    return tuple(sorted((str(k), str(v)) for k, v in named.items() if isinstance(v, str)))


def _control_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the strings that the tokenizer reads as special tokens, longest first."""
    found = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found |= {str(t) for t in added.values() if getattr(t, "special", False)}
    return tuple(sorted((t for t in found if t.strip()), key=lambda t: (-len(t), t)))


# Checks.


def _names(retrievers: Collection[str]) -> frozenset[str]:
    if isinstance(retrievers, str) or not all(isinstance(name, str) for name in retrievers):
        raise TraceError(
            f"retrievers is {retrievers!r}, but it must be a collection of tool names."
        )
    return frozenset(retrievers)


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not all(isinstance(t, Mapping) for t in tools):
        raise TraceError(
            f"tools is a {type(tools).__name__}, but it must be a list of tool schemas (mappings)."
        )
    try:
        copied: list[Any] = json.loads(json.dumps(list(tools)))
    except (TypeError, ValueError, RecursionError):
        raise TraceError("tools holds a value that is not plain JSON, but it must.") from None
    return copied


def _check_state(state: Any) -> None:
    kinds = {
        "version": int,
        "template": str,
        "messages": list,
        "tools": list,
        "retrievers": list,
        "tools_in_system": bool,
        "notes": list,
        "canonical": str,
        "tail": str,
        "pending": str,
        "pending_region": str,
    }
    if not isinstance(state, Mapping):
        raise SessionError(f"state is a {type(state).__name__}, but it must be a mapping.")
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise SessionError(
                f"state has {key} {state.get(key)!r:.60}, but it must be a {kind.__name__}."
            )
    if state["version"] != _STATE_VERSION:
        raise SessionError(
            f"state has version {state['version']}, but only {_STATE_VERSION} can be read."
        )


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:16]
