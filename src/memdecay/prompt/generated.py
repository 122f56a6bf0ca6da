"""Reads what a model wrote: which message it amounts to, and which region each part has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memdecay.prompt.label import TextSplit, parse_tool_calls, split_assistant_text
from memdecay.prompt.types import CharSpan, Message

_BROKEN = "a <tool_call> that is not complete JSON with a name"


def split_ending(text: str, control_tokens: Sequence[str]) -> int:
    """Return where the end markers at the end of a generated text start."""
    end = len(text)
    while True:
        marker = next((t for t in control_tokens if t and text.endswith(t, 0, end)), None)
        if marker is None:
            return end
        end -= len(marker)


def remaining_closing(text: str, closing: str) -> str:
    """Return what is left of a message's closing text after a generated text.

    A model stops after its end marker, and a template writes a newline after that; a model that
    was cut off wrote no marker at all.
    """
    for length in range(len(closing), 0, -1):
        if text.endswith(closing[:length]):
            return closing[length:]
    return closing


def read_generated(
    text: str, body_end: int, *, message: int, thinking: bool
) -> tuple[Message, list[CharSpan]]:
    """Parse a generated text.

    Args:
        text: the text with its end markers.
        body_end: where the end markers start.
        message: the index that the message gets.
        thinking: whether the prompt already opened a `<think>` block.

    Returns:
        The assistant message, and spans that tile `text`.
    """
    body = text[:body_end]
    splits = split_assistant_text(body, calls=False, thinking=thinking)
    calls = parse_tool_calls(
        "".join(body[s.start : s.end] for s in splits if s.region == "tool_in")
    )
    spans = [_span(body, split, message) for split in splits]
    spans[-1] = replace(spans[-1], end=len(text))
    out: Message = {"role": "assistant", "content": None}
    thoughts = [body[s.start : s.end] for s in splits if _is_thought(body, s, thinking)]
    rest = [s for s in splits if not _is_thought(body, s, thinking)]
    if calls:
        rest = [s for s in rest if not (s.region == "tool_in" and s.source == "structure")]
        out["tool_calls"] = [
            {
                "id": f"call{message:05d}" if i == 0 else f"call{message:05d}{i}",
                "type": "function",
                "function": call,
            }
            for i, call in enumerate(calls)
        ]
    content = "".join(body[s.start : s.end] for s in rest)
    if content.strip() or not calls:
        out["content"] = content.strip() if calls or thoughts else content
    if thoughts:
        out["reasoning_content"] = (
            "".join(thoughts).replace("<think>", "").replace("</think>", "").strip()
        )
    return {k: v for k, v in out.items() if v != "" or k == "content"}, spans


def _is_thought(body: str, split: TextSplit, thinking: bool) -> bool:
    return split.region == "scratchpad" and (
        body.startswith("<think>", split.start)
        or (thinking and split.start == 0)
        or body[split.start : split.end].lstrip().startswith("<think>")
    )


def _span(body: str, split: TextSplit, message: int) -> CharSpan:
    part = body[split.start : split.end]
    broken = (
        split.source == "structure"
        and split.region == "tool_in"
        and (len(parse_tool_calls(part)) != part.count("<tool_call>"))
    )
    return CharSpan(
        split.start,
        split.end,
        message,
        split.region,
        split.source,
        split.ambiguous or broken,
        _BROKEN if broken else split.note,
    )
