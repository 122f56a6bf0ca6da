"""Reads recorded agent traces into chat messages.

Files of OpenAI messages (JSON, JSONL), SWE-agent `.traj` files (the `history` that the model saw,
or the steps of `trajectory`) and τ-bench results. Which one a file is, is seen from its fields,
not from its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memdecay.errors import TraceError
from memdecay.prompt.types import Message
from memdecay.prompt.validate import validate_messages

_ALLOWED = "OpenAI messages (JSON or JSONL), a SWE-agent .traj file or τ-bench results"


@dataclass(frozen=True)
class Trace:
    """A recorded conversation.

    Args:
        id: the file's own id, else its name.
        messages: checked chat messages.
        tools: tool schemas, if the file has any.
        source: where the file says it comes from, else empty.
        format: `openai`, `openai-jsonl`, `mini-swe-agent`, `swe-agent-history`,
            `swe-agent-trajectory` or `tau-bench`.
        meta: whatever else the file says.
        notes: what was left out in reading.
    """

    id: str
    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    source: str = ""
    format: str = "openai"
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_trace(path: str | Path, *, index: int = 0) -> Trace:
    """Read one trace from a file.

    Args:
        path: the file.
        index: which conversation, if the file holds several.

    Raises:
        TraceError: one sentence saying what is wrong with the file.
    """
    place = Path(path)
    records, is_lines = _parse(_read(place), place)
    item, count = _choose(records, index, place)
    try:
        trace = _convert(item, is_lines, place)
        messages = validate_messages(trace.messages)
    except TraceError as error:
        raise TraceError(f"{place}: {error}") from None
    notes = list(trace.notes)
    if count > 1:
        notes.append(f"The file holds {count} conversations; this is number {index}.")
    return Trace(trace.id, messages, trace.tools, trace.source, trace.format, trace.meta, notes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not text, but a trace must be {_ALLOWED}.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path} cannot be read ({reason}).") from None


def _parse(text: str, path: Path) -> tuple[Any, bool]:
    """Return the JSON value of a file, or the list of its lines' values."""
    if not text.strip():
        raise TraceError(f"{path} is empty, but a trace must be {_ALLOWED}.")
    try:
        return json.loads(text), False
    except RecursionError:
        raise TraceError(f"{path} is nested too deeply to be a trace.") from None
    except ValueError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        values = []
        for number, line in enumerate(lines, start=1):
            try:
                values.append(json.loads(line))
            except RecursionError:
                raise TraceError(f"{path} is nested too deeply to be a trace.") from None
            except ValueError as error:
                if number == 1:
                    raise TraceError(f"{path} is not JSON ({whole}).") from None
                raise TraceError(f"{path} line {number} is not JSON ({error}).") from None
        return values, True


def _choose(records: Any, index: int, path: Path) -> tuple[Any, int]:
    """Return one conversation of a file, and how many it has."""
    if isinstance(index, bool) or not isinstance(index, int):
        raise TraceError(f"index is {index!r}, but it must be an integer.")
    many = (
        isinstance(records, list)
        and records
        and all(isinstance(item, Mapping) and "role" not in item for item in records)
    )
    items = records if many else [records]
    if not 0 <= index < len(items):
        raise TraceError(
            f"index is {index}, but {path} holds {len(items)} conversation"
            f"{'s' if len(items) > 1 else ''} (0 to {len(items) - 1})."
        )
    return items[index], len(items)


def _convert(item: Any, is_lines: bool, path: Path) -> Trace:
    name = path.name.split(".")[0] or path.name
    if isinstance(item, list):
        return Trace(name, item, format="openai-jsonl" if is_lines else "openai")
    if not isinstance(item, Mapping):
        raise TraceError(f"{item!r:.60} is no trace, it must be {_ALLOWED}.")
    if isinstance(item.get("messages"), list):
        return _openai(item, name, is_lines)
    if isinstance(item.get("history"), list):
        return _swe_history(item, name)
    if isinstance(item.get("trajectory"), list):
        return _swe_steps(item, name)
    if isinstance(item.get("traj"), list):
        return _tau(item, name)
    if "role" in item:
        return Trace(name, [dict(item)], format="openai-jsonl" if is_lines else "openai")
    fields = ", ".join(sorted(str(key) for key in item)[:6]) or "no fields"
    raise TraceError(
        f"a mapping with {fields} is no trace, it must have a list of messages, history, "
        f"trajectory or traj."
    )


def _openai(item: Mapping[str, Any], name: str, is_lines: bool) -> Trace:
    kind = "openai-jsonl" if is_lines else "openai"
    notes = []
    messages = item["messages"]
    if str(item.get("trajectory_format", "")).startswith("mini-swe-agent"):
        kind = "mini-swe-agent"
        kept = [_without(m, ("extra",)) for m in messages if _role(m) != "exit"]
        if len(kept) < len(messages):
            notes.append("The exit record at the end is no message and is left out.")
        messages = kept
    tools = item.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise TraceError(f"tools is a {type(tools).__name__}, but it must be a list of schemas.")
    meta = {k: v for k, v in item.items() if k not in ("messages", "tools", "id", "source")}
    return Trace(
        str(item.get("id") or name),
        list(messages),
        list(tools or ()),
        str(item.get("source") or ""),
        kind,
        meta,
        notes,
    )


def _tau(item: Mapping[str, Any], name: str) -> Trace:
    meta = {k: v for k, v in item.items() if k != "traj"}
    trial = f"_t{item['trial']}" if "trial" in item else ""
    task = f"_{item['task_id']}" if "task_id" in item else ""
    return Trace(f"{name}{task}{trial}", list(item["traj"]), format="tau-bench", meta=meta)


# SWE-agent. Observations are user messages in text mode; the file says which ones they are, so
# they carry an explicit region.

_SWE_FIELDS = (
    "agent",
    "is_demo",
    "message_type",
    "thought",
    "action",
    "tool_call_ids",
    "thinking_blocks",
    "cache_control",
    "tags",
)


def _swe_history(item: Mapping[str, Any], name: str) -> Trace:
    messages = []
    after_action = False
    for entry in item["history"]:
        if not isinstance(entry, Mapping):
            messages.append(entry)  # the check of messages names it
            continue
        message = _without(entry, _SWE_FIELDS)
        role = message.get("role")
        if role == "assistant":
            after_action = bool(entry.get("action") or message.get("tool_calls"))
            message.update(_swe_action(entry, message.get("content")))
        elif role == "tool":
            _answer_call(message, entry.get("tool_call_ids"))
        elif role == "user":
            if after_action and not entry.get("is_demo"):
                message["region"] = "tool_out"
            after_action = False
        messages.append(message)
    return Trace(name, messages, format="swe-agent-history", meta=_swe_meta(item))


def _swe_steps(item: Mapping[str, Any], name: str) -> Trace:
    """Rebuild the conversation from steps of thought, action and observation."""
    messages: list[Any] = []
    for place, step in enumerate(item["trajectory"]):
        if not isinstance(step, Mapping):
            raise TraceError(f"step {place} of trajectory is {step!r:.40}, it must be a mapping.")
        if place == 0:
            query = step.get("query") or step.get("messages") or []
            if isinstance(query, list):
                messages += [
                    _without(m, _SWE_FIELDS) if isinstance(m, Mapping) else m for m in query
                ]
        response = step.get("response")
        if not isinstance(response, str):
            response = f"{step.get('thought') or ''}\n{step.get('action') or ''}".strip()
        message: Message = {"role": "assistant", "content": response}
        if step.get("tool_calls"):
            message["tool_calls"] = step["tool_calls"]
        message.update(_swe_action(step, response))
        messages.append(message)
        observation = step.get("observation")
        if not isinstance(observation, str) or not observation:
            continue
        if step.get("tool_calls"):
            result: Message = {"role": "tool", "content": observation}
            _answer_call(result, step.get("tool_call_ids"))
        else:
            result = {"role": "user", "content": observation, "region": "tool_out"}
        messages.append(result)
    return Trace(name, messages, format="swe-agent-trajectory", meta=_swe_meta(item))


def _swe_action(entry: Mapping[str, Any], content: Any) -> Message:
    """Return thinking, and in text mode the content split into thought and action."""
    out: Message = {}
    blocks = entry.get("thinking_blocks")
    if isinstance(blocks, list):
        thoughts = [b.get("thinking") for b in blocks if isinstance(b, Mapping)]
        text = "\n".join(t for t in thoughts if isinstance(t, str))
        if text:
            out["reasoning_content"] = text
    thought, action = entry.get("thought"), entry.get("action")
    if entry.get("tool_calls") or not isinstance(content, str) or not action:
        return out
    cut = len(thought) if isinstance(thought, str) and content.startswith(thought) else 0
    if not cut:
        cut = max(content.find(str(action).strip()), 0)
        fence = content.rfind("```", 0, cut)
        cut = fence if fence >= 0 else cut
    parts = [("scratchpad", content[:cut]), ("tool_in", content[cut:])]
    out["content"] = [
        {"type": "text", "text": text, "region": region} for region, text in parts if text
    ]
    return out


def _answer_call(message: Message, ids: Any) -> None:
    if isinstance(ids, Sequence) and not isinstance(ids, str) and ids and isinstance(ids[0], str):
        message.setdefault("tool_call_id", ids[0])


def _swe_meta(item: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k in ("environment", "info")}


def _without(message: Any, fields: Sequence[str]) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {k: v for k, v in message.items() if k not in fields}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
