"""Decides which region each part of a message belongs to; docs/mapping.md is the same as a table.

Nothing here knows about templates or tokens. A message becomes `Piece`s, in the order in which a
template writes them: reasoning, content, tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memdecay.prompt.types import Message

_PLAN = re.compile(r"[\s#*_>]*plan[\s*_]*:", re.IGNORECASE)
_BLOCK = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(?P<tool>[\w.-]*)", re.MULTILINE)
_OBSERVATION = re.compile(r"\s*(?:\*\*)?Observation(?:\*\*)?[ \t]*:", re.IGNORECASE)
_TOOL_RESPONSE = "<tool_response>"


@dataclass(frozen=True)
class Piece:
    """A part of one message with its region.

    Args:
        message: index of the message.
        kind: `reasoning_content`, `content` or `tool_calls`.
        text: the text as the message has it; None for tool calls, whose text the template makes.
        region: a region name.
        source: see `Span`.
        ambiguous: see `Span`.
        note: see `Span`.
        names: names of the called tools.
    """

    message: int
    kind: str
    text: str | None
    region: str
    source: str
    ambiguous: bool = False
    note: str = ""
    names: tuple[str, ...] = ()


def label_messages(
    messages: Sequence[Message],
    *,
    retrievers: Collection[str] = (),
    control_tokens: Iterable[str] = (),
) -> list[list[Piece]]:
    """Return the pieces of every message, in order.

    Args:
        messages: messages as `validate_messages` returns them, from the first one on (a label
            depends on the messages before it, never on later ones).
        retrievers: names of the tools whose outputs are documents.
        control_tokens: strings which the tokenizer reads as special tokens; a text that carries
            one keeps its region and is flagged.
    """
    control = tuple(control_tokens)
    labelled: list[list[Piece]] = []
    for index in range(len(messages)):
        pieces = _pieces(messages, index, labelled, retrievers)
        labelled.append([_flag_control(piece, control) for piece in pieces])
    return labelled


def content_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as one string; parts are joined with nothing between."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def _pieces(
    messages: Sequence[Message],
    index: int,
    labelled: Sequence[Sequence[Piece]],
    retrievers: Collection[str],
) -> list[Piece]:
    message = messages[index]
    role = message["role"]
    if role == "assistant":
        return _assistant(message, index)
    if role in ("system", "developer"):
        default = Piece(index, "content", "", "system", "role")
    elif role == "tool":
        default = _tool(messages, index, retrievers)
    else:
        default = _user(messages, index, labelled, retrievers)
    return _content(message, default)


def _content(message: Message, default: Piece) -> list[Piece]:
    """Split content into its parts; a region that the caller wrote wins over the default."""
    if message.get("region"):
        default = replace(
            default, region=message["region"], source="explicit", ambiguous=False, note=""
        )
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    pieces = []
    for part in parts:
        piece = replace(default, text=part["text"])
        if part.get("region"):
            piece = replace(
                piece, region=part["region"], source="explicit", ambiguous=False, note=""
            )
        elif part.get("type") == "plan" and not message.get("region"):
            piece = replace(piece, region="plan", source="structure", ambiguous=False, note="")
        pieces.append(piece)
    return pieces


def _assistant(message: Message, index: int) -> list[Piece]:
    explicit = message.get("region")
    calls = message.get("tool_calls", [])
    pieces = []
    if message.get("reasoning_content"):
        pieces.append(
            Piece(
                index, "reasoning_content", message["reasoning_content"], "scratchpad", "structure"
            )
        )
    content = message.get("content")
    if isinstance(content, list):
        default = Piece(index, "content", "", *_assistant_default(content_text(message), calls))
        pieces += _content(message, default)
    elif content or not (calls or pieces):
        pieces += [
            Piece(
                index,
                "content",
                content[s.start : s.end] if content else "",
                s.region,
                s.source,
                s.ambiguous,
                s.note,
            )
            for s in split_assistant_text(content or "", calls=bool(calls))
        ]
    if calls:
        names = tuple(call["function"]["name"] for call in calls)
        pieces.append(Piece(index, "tool_calls", None, "tool_in", "structure", names=names))
    if explicit:
        pieces = [
            piece
            if piece.source == "explicit"
            else replace(piece, region=explicit, source="explicit", ambiguous=False, note="")
            for piece in pieces
        ]
    return pieces


def _assistant_default(text: str, calls: Sequence[Message]) -> tuple[str, str]:
    if _PLAN.match(text):
        return "plan", "heuristic"
    return ("scratchpad" if calls else "user"), "structure"


@dataclass(frozen=True)
class TextSplit:
    """A run of characters of an assistant's text with its region."""

    start: int
    end: int
    region: str
    source: str
    ambiguous: bool = False
    note: str = ""


def split_assistant_text(text: str, *, calls: bool, thinking: bool = False) -> list[TextSplit]:
    """Split what an assistant wrote into thinking, plan, actions and answer.

    Args:
        text: the content of the message, or the text as generated.
        calls: whether the message calls tools besides.
        thinking: whether the prompt already opened a `<think>` block.

    Returns:
        Splits that tile `text`; one empty split for an empty text.
    """
    blocks = [(m.start(), m.end(), m.group().startswith("<think>")) for m in _BLOCK.finditer(text)]
    if thinking:
        end = text.find("</think>")
        end = len(text) if end < 0 else end + len("</think>")
        blocks = [(0, end, True), *(b for b in blocks if b[0] >= end)]
    acts = calls or any(not is_thought for _, _, is_thought in blocks)
    splits: list[TextSplit] = []
    cursor = 0
    for start, end, is_thought in blocks:
        splits += _plain(text, cursor, start, acts)
        if is_thought:
            splits.append(TextSplit(start, end, "scratchpad", "structure"))
        else:
            splits.append(TextSplit(start, end, "tool_in", "structure"))
        cursor = end
    splits += _plain(text, cursor, len(text), acts)
    return _absorb_blank(text, splits)


def _plain(text: str, start: int, end: int, acts: bool) -> list[TextSplit]:
    """Label text that is outside of any tag."""
    if start == end:
        return []
    if _PLAN.match(text, start, end):
        return [TextSplit(start, end, "plan", "heuristic")]
    action = None if acts else _ACTION.search(text, start, end)
    if action:
        note = 'split at "Action:"'
        return [
            TextSplit(start, action.start(), "scratchpad", "heuristic", True, note),
            TextSplit(action.start(), end, "tool_in", "heuristic", True, note),
        ]
    return [TextSplit(start, end, "scratchpad" if acts else "user", "structure")]


def _absorb_blank(text: str, splits: list[TextSplit]) -> list[TextSplit]:
    """Give blank runs between tags to the run before them (after them at the start)."""
    kept: list[TextSplit] = []
    carried = None
    for split in splits:
        if not text[split.start : split.end].strip():
            if kept:
                kept[-1] = replace(kept[-1], end=split.end)
            else:
                carried = split.start if carried is None else carried
            continue
        kept.append(split if carried is None else replace(split, start=carried))
        carried = None
    return (
        kept or [replace(splits[0], end=len(text))]
        if splits
        else [TextSplit(0, 0, "user", "structure")]
    )


def _user(
    messages: Sequence[Message],
    index: int,
    labelled: Sequence[Sequence[Piece]],
    retrievers: Collection[str],
) -> Piece:
    text = content_text(messages[index])
    piece = Piece(index, "content", "", "user", "role")
    marked = _TOOL_RESPONSE in text or bool(_OBSERVATION.match(text))
    if index and _acts(messages[index - 1], labelled[index - 1]):
        if marked:
            tools = _called(messages[index - 1])
            found = any(name in retrievers for name in tools)
            return replace(piece, region="retrieval" if found else "tool_out", source="heuristic")
        return replace(
            piece, ambiguous=True, note="follows an action, may be an unmarked observation"
        )
    if marked:
        return replace(piece, ambiguous=True, note="looks like an observation, follows no action")
    if _PLAN.match(text):
        return replace(piece, ambiguous=True, note='a user message that starts with "Plan:"')
    return piece


def _acts(message: Message, pieces: Sequence[Piece]) -> bool:
    """Return whether an assistant message asks for something to be run."""
    if message["role"] != "assistant":
        return False
    return bool(_called(message)) or any(piece.region == "tool_in" for piece in pieces)


def _called(message: Message) -> list[str]:
    """Return the names of the tools that an assistant message calls, in tags or "Action:" too."""
    if message.get("tool_calls"):
        return [call["function"]["name"] for call in message["tool_calls"]]
    text = content_text(message)
    names = [call["name"] for call in parse_tool_calls(text)]
    return names or [m.group("tool") for m in _ACTION.finditer(text)]


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """Return name and arguments of every well-formed `<tool_call>` block in a text."""
    calls = []
    for match in re.finditer(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(match.group(1))
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]:
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, (dict, str)):
                calls.append({"name": call["name"], "arguments": arguments})
    return calls


def _tool(messages: Sequence[Message], index: int, retrievers: Collection[str]) -> Piece:
    name, doubt = _tool_name(messages, index)
    if name in retrievers:
        return Piece(index, "content", "", "retrieval", "structure", bool(doubt), doubt)
    return Piece(index, "content", "", "tool_out", "role", bool(doubt), doubt)


def _tool_name(messages: Sequence[Message], index: int) -> tuple[str | None, str]:
    """Return which tool a tool message answers, and what is doubtful about it.

    Ids are looked up from the newest call back: recorded traces reuse them.
    """
    message = messages[index]
    own, call_id = message.get("name"), message.get("tool_call_id")
    if call_id is not None:
        for earlier in reversed(messages[:index]):
            for call in earlier.get("tool_calls", ()):
                if call.get("id") == call_id:
                    name = call["function"]["name"]
                    conflict = own is not None and own != name
                    return name, f"named {own!r}, but its call is {name!r}" if conflict else ""
    if own is not None:
        return own, ""
    before = index - 1
    while before >= 0 and messages[before]["role"] == "tool":
        before -= 1
    calls = messages[before].get("tool_calls", ()) if before >= 0 else ()
    position = index - before - 1
    if position < len(calls):
        return calls[position]["function"]["name"], "matched to its call by order"
    return None, "answers no call"


def _flag_control(piece: Piece, control: Sequence[str]) -> Piece:
    found = next((token for token in control if token in (piece.text or "")), None)
    if found is None:
        return piece
    note = f"its text carries the control token {found!r}"
    return replace(piece, ambiguous=True, note=f"{piece.note}; {note}" if piece.note else note)
