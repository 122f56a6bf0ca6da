"""Says what a chat template left out, wrote another way, or rewrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memdecay.prompt.locate import Missing
from memdecay.prompt.prepare import is_short_id, writes_calls_out
from memdecay.prompt.template import common_prefix
from memdecay.prompt.traits import Traits
from memdecay.prompt.types import CharSpan, Message


def about_messages(new: Sequence[Message], first: int, traits: Traits) -> list[str]:
    """Say what of new messages has to be written another way.

    Args:
        new: the messages.
        first: index of the first one.
        traits: what the template does.
    """
    notes = []
    calls = [i for i, m in enumerate(new, start=first) if m.get("tool_calls")]
    written = [i for i in calls if writes_calls_out(new[i - first], traits)]
    if written:
        why = " beside content" if traits.tool_calls else ""
        notes.append(
            f"The chat template ignores tool_calls{why}; those of "
            f"{_list(written)} are written into the content as <tool_call> blocks."
        )
    ids = [c.get("id", "") for i in calls for c in new[i - first]["tool_calls"]]
    if traits.short_ids and not all(is_short_id(i) for i in ids):
        notes.append("The chat template wants call ids of nine characters; they are renamed.")
    results = [i for i, m in enumerate(new, start=first) if m["role"] == "tool"]
    if results and not traits.tool_role:
        notes.append(
            f"The chat template has no tool role; the results of {_list(results)} are "
            "written into user messages in <tool_response> tags."
        )
    return notes


def about_missing(missing: Sequence[Missing], first: int) -> list[str]:
    """Say which texts of the messages from `first` on are not in the prompt."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for piece in missing:
        if piece.message >= first and piece.message not in by_kind[piece.kind]:
            by_kind[piece.kind].append(piece.message)
    return [
        f"The chat template leaves out the {kind} of {_list(where)}."
        for kind, where in by_kind.items()
        if where
    ]


def about_tools(count: int, *, written: bool) -> str:
    """Say what became of tool schemas that the template ignores."""
    how = (
        "they are written into the system message"
        if written
        else "they are not in the prompt (tools_in_system=True writes them into it)"
    )
    return f"The chat template ignores tool schemas; {count} given, {how}."


def about_ending(ending: str) -> str:
    """Say that the text which ends a conversation is left out."""
    return (
        f"The chat template ends a conversation with {ending!r}; "
        "it is left out, because messages may follow."
    )


def about_rewrite(before: str, now: str, spans: Sequence[CharSpan], first: int) -> str:
    """Say from which message on the template writes the past differently.

    Args:
        before: how it wrote the messages ahead of `first`.
        now: how it writes the conversation.
        spans: the spans of `now`.
        first: index of the first new message.
    """
    place = common_prefix(before, now)
    message = next((s.message for s in spans if s.end > place), first)
    was, becomes = (" ".join(text[place : place + 60].split()) for text in (before, now))
    return (
        f"The chat template rewrites what was rendered before message {first}, from message "
        f"{min(message, first - 1)} on ({was[:40]!r} became {becomes[:40]!r}); "
        "the model keeps what it has read."
    )


def about_generated(message: int) -> str:
    """Say that the template would write a generated message differently."""
    return (
        f"The chat template would write message {message} differently from how it was "
        "generated; the model keeps what it generated."
    )


def _list(indices: Sequence[int]) -> str:
    """Return "message 3" or "messages 3, 5, 7 and 4 more"."""
    shown = ", ".join(str(i) for i in indices[:5])
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return f"message{'s' if len(indices) > 1 else ''} {shown}{more}"
