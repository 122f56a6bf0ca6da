"""Brings labelled messages into the form that one chat template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memdecay.prompt.label import Piece, content_text
from memdecay.prompt.traits import Traits
from memdecay.prompt.types import Message

_OURS = ("region", "content", "role", "tool_calls")


@dataclass(frozen=True)
class Turn:
    """One message for the template, with the pieces that its text is made of.

    A turn may hold several messages: tool results that the template cannot render are written
    into one user message (`fallback`).
    """

    payload: dict[str, Any]
    pieces: list[Piece]
    fallback: bool = False


def prepare(
    messages: Sequence[Message],
    labelled: Sequence[Sequence[Piece]],
    traits: Traits,
    *,
    apart: int = 0,
) -> list[Turn]:
    """Return the turns for a template; nothing that a message says gets lost on the way.

    Args:
        messages: checked messages.
        labelled: the pieces of each.
        traits: what the template does.
        apart: index of a message that must not share a turn with the one before it.
    """
    turns: list[Turn] = []
    if traits.short_ids:
        messages = _with_short_ids(messages)
    for message, pieces in zip(messages, labelled, strict=True):
        role = message["role"]
        turn = _tool_as_user(message, pieces) if _needs_user(role, traits) else None
        if turn is None:
            turns.append(_turn(message, list(pieces), traits))
        elif turns and turns[-1].fallback and turn.pieces[0].message != apart:
            turns[-1] = _merge(turns[-1], turn)
        else:
            turns.append(turn)
    return [_as_parts(turn) for turn in turns] if traits.content_as_parts else turns


def with_schemas(turns: Sequence[Turn], tools: Sequence[Any], traits: Traits) -> list[Turn]:
    """Put tool schemas into the system message, or into a new one ahead of all."""
    text = _schemas_text(tools)
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


def is_short_id(call_id: str) -> bool:
    """Return whether a call id is one that Mistral's templates take."""
    return len(call_id) == 9 and call_id.isalnum()


def writes_calls_out(message: Message, traits: Traits) -> bool:
    """Return whether the calls of a message have to go into its content to be seen."""
    if not message.get("tool_calls"):
        return False
    hidden = traits.calls_need_null and bool(content_text(message))
    return hidden or not traits.tool_calls


def _schemas_text(tools: Sequence[Any]) -> str:
    """Return tool schemas as a system text, for templates that ignore them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"# Tools\n\n<tools>\n{lines}\n</tools>"


def calls_text(calls: Sequence[Message]) -> str:
    """Return tool calls as `<tool_call>` blocks, for templates that ignore them."""
    blocks = []
    for call in calls:
        body = json.dumps(
            {
                "name": call["function"]["name"],
                "arguments": parsed_arguments(call["function"]["arguments"]),
            },
            ensure_ascii=False,
        )
        blocks.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(blocks)


def parsed_arguments(arguments: Any) -> Any:
    """Return call arguments as a mapping when they are JSON text of one, else as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _turn(message: Message, pieces: list[Piece], traits: Traits) -> Turn:
    role = message["role"]
    if role == "developer" and not traits.developer:
        role = "system"
    payload: dict[str, Any] = {"role": role, "content": content_text(message)}
    payload.update({k: v for k, v in message.items() if k not in _OURS})
    if "reasoning_content" in message:
        payload["thinking"] = message["reasoning_content"]
    calls = message.get("tool_calls", ())
    if calls and not writes_calls_out(message, traits):
        payload["tool_calls"] = [_call(call, traits) for call in calls]
        if traits.calls_need_null:
            payload["content"] = None
    elif calls:
        text = calls_text(calls)
        gap = "\n" if payload["content"] else ""
        payload["content"] += gap + text
        pieces[-1] = replace(pieces[-1], kind="content", text=gap + text)
    return Turn(payload, pieces)


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Give calls ids of nine characters, and results the ids of the calls they answer."""
    renamed: dict[str, str] = {}
    waiting: list[str] = []
    out = []
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                count += 1
                own = call.get("id", "")
                short = own if is_short_id(own) else f"{count:09d}"
                renamed[own or short] = short
                waiting.append(short)
                calls.append({**call, "id": short})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            short = renamed.get(message.get("tool_call_id", ""), waiting[0] if waiting else "0" * 9)
            if short in waiting:
                waiting.remove(short)
            message = {**message, "tool_call_id": short}
        out.append(message)
    return out


def _call(call: Message, traits: Traits) -> Message:
    arguments = call["function"]["arguments"]
    if traits.arguments_as_text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        arguments = parsed_arguments(arguments)
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _needs_user(role: str, traits: Traits) -> bool:
    return role == "tool" and not traits.tool_role


def _tool_as_user(message: Message, pieces: Sequence[Piece]) -> Turn:
    parts = list(pieces)
    parts[0] = replace(parts[0], text=f"<tool_response>\n{parts[0].text}")
    parts[-1] = replace(parts[-1], text=f"{parts[-1].text}\n</tool_response>")
    content = "".join(part.text or "" for part in parts)
    return Turn({"role": "user", "content": content}, parts, fallback=True)


def _merge(left: Turn, right: Turn) -> Turn:
    pieces = [replace(right.pieces[0], text=f"\n{right.pieces[0].text}"), *right.pieces[1:]]
    content = f"{left.payload['content']}\n{right.payload['content']}"
    return Turn({"role": "user", "content": content}, [*left.pieces, *pieces], fallback=True)


def _as_parts(turn: Turn) -> Turn:
    if turn.payload["content"] is None:
        return turn
    parts = [{"type": "text", "text": turn.payload["content"]}]
    return replace(turn, payload={**turn.payload, "content": parts})
