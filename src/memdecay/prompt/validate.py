"""Checks chat messages before anything is changed, and brings them into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from memdecay.errors import TraceError
from memdecay.prompt.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_TYPES = ("text", "input_text", "output_text", "plan")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def validate_messages(
    messages: Any, *, regions: Sequence[str] | None = None, start: int = 0
) -> list[Message]:
    """Check messages and return them in one form; the input is not changed.

    In the returned form `function` is `tool`, a legacy `function_call` is a `tool_calls` list, the
    names `reasoning` and `thinking` are `reasoning_content`, and empty optional fields are gone.

    Args:
        messages: a sequence of OpenAI chat messages.
        regions: the region names a `region` may have; None leaves regions unchecked.
        start: index of the first message, for the error texts.

    Raises:
        TraceError: one sentence naming the message, the field, its value and what is allowed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TraceError(f"messages is {_show(messages)}, but it must be a list of chat messages.")
    if not messages:
        raise TraceError("messages is empty, but it must hold at least one chat message.")
    return [_message(m, start + i, regions) for i, m in enumerate(messages)]


def _message(message: Any, index: int, regions: Sequence[str] | None) -> Message:
    if not isinstance(message, Mapping):
        raise TraceError(f"Message {index} is {_show(message)}, but it must be a mapping.")
    role = message.get("role")
    if role not in ROLES:
        raise TraceError(
            f"Message {index} has role {_show(role)}, but it must be one of {', '.join(ROLES)}."
        )
    known = {*_REASONING, "role", "content", "tool_calls", "function_call", "region"}
    out: Message = {"role": "tool" if role == "function" else role}
    content = _content(message.get("content"), index, regions)
    calls = _tool_calls(message, index, role)
    reasoning = _reasoning(message, index, role)
    if content is None and not calls and reasoning is None:
        raise TraceError(
            f"Message {index} (role {role!r}) has neither content nor tool_calls, "
            "but it must have one of them."
        )
    out["content"] = content
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    if message.get("region") is not None:
        out["region"] = _region(message["region"], f"Message {index}", regions)
    for key in ("tool_call_id", "name"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise TraceError(f"Message {index} has {key} {_show(value)}, but it must be a string.")
    for key, value in message.items():
        if key not in known and value is not None:
            out[str(key)] = _jsonable(value, f"Message {index} field {key!r}")
    return out


def _content(content: Any, index: int, regions: Sequence[str] | None) -> Any:
    if content is None:
        return None
    if isinstance(content, str):
        return _text(content, f"Message {index} content")
    if not isinstance(content, (list, tuple)):
        raise TraceError(
            f"Message {index} has content {_show(content)}, "
            "but it must be a string, null or a list of text parts."
        )
    parts = [
        _part(part, f"Message {index} content part {j}", regions) for j, part in enumerate(content)
    ]
    return parts or None


def _part(part: Any, where: str, regions: Sequence[str] | None) -> Message:
    if not isinstance(part, Mapping):
        raise TraceError(f"{where} is {_show(part)}, but it must be a mapping with type and text.")
    kind = part.get("type", "text")
    if kind not in PART_TYPES:
        raise TraceError(
            f"{where} has type {_show(kind)}, but it must be one of {', '.join(PART_TYPES)}."
        )
    if not isinstance(part.get("text"), str):
        raise TraceError(f"{where} has text {_show(part.get('text'))}, but it must be a string.")
    out: Message = {"type": kind, "text": _text(part["text"], where)}
    if part.get("region") is not None:
        out["region"] = _region(part["region"], where, regions)
    return out


def _tool_calls(message: Mapping[str, Any], index: int, role: str) -> list[Message]:
    calls = message.get("tool_calls")
    if message.get("function_call") is not None and not calls:
        calls = [{"function": message["function_call"]}]
    if calls is None or calls == []:
        return []
    if role != "assistant":
        raise TraceError(
            f"Message {index} (role {role!r}) has tool_calls, but only an assistant message may."
        )
    if not isinstance(calls, (list, tuple)):
        raise TraceError(f"Message {index} has tool_calls {_show(calls)}, but it must be a list.")
    return [_tool_call(call, f"Message {index} tool call {j}") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TraceError(f"{where} is {_show(call)}, but it must be a mapping with a function.")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise TraceError(f"{where} has name {_show(name)}, but it must be a non-empty string.")
    if isinstance(arguments, str):
        _text(arguments, f"{where} arguments")
    elif isinstance(arguments, Mapping):
        arguments = _jsonable(dict(arguments), f"{where} arguments")
    else:
        raise TraceError(
            f"{where} has arguments {_show(arguments)}, but it must be a JSON string or a mapping."
        )
    out: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        if not isinstance(call["id"], str):
            raise TraceError(f"{where} has id {_show(call['id'])}, but it must be a string.")
        out = {"id": call["id"], **out}
    return out


def _reasoning(message: Mapping[str, Any], index: int, role: str) -> str | None:
    value = next((message[k] for k in _REASONING if message.get(k) is not None), None)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise TraceError(
            f"Message {index} has reasoning_content {_show(value)}, but it must be a string."
        )
    if role != "assistant":
        raise TraceError(
            f"Message {index} (role {role!r}) has reasoning_content, "
            "but only an assistant message may."
        )
    return _text(value, f"Message {index} reasoning_content")


def _region(region: Any, where: str, regions: Sequence[str] | None) -> str:
    if not isinstance(region, str) or (regions is not None and region not in regions):
        allowed = f"one of {', '.join(regions)}" if regions is not None else "a region name"
        raise TraceError(f"{where} has region {_show(region)}, but it must be {allowed}.")
    return region


def _text(text: str, where: str) -> str:
    """Refuse what no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TraceError(
            f"{where} has the lone surrogate {text[error.start]!r} at character {error.start}, "
            "but it must be text that UTF-8 can encode."
        ) from None
    return text


def _jsonable(value: Any, where: str) -> Any:
    try:
        copied = json.loads(json.dumps(value, ensure_ascii=False))
        json.dumps(copied, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError):
        raise TraceError(f"{where} is {_show(value)}, but it must be plain JSON.") from None
    return copied


def _show(value: Any) -> str:
    """Return a short one-line form of a value for an error text."""
    try:
        text = " ".join(repr(value).split())
    except RecursionError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
