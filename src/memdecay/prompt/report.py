"""Labels a whole trace and sums it up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from memdecay.prompt.conversation import Conversation
from memdecay.prompt.traces import Trace
from memdecay.prompt.types import Tokenizer
from memdecay.regions import Profile

_PREVIEW = 72


@dataclass(frozen=True)
class LabelledSpan:
    """One span of a trace.

    Args:
        message: index of the message.
        role: role of the message.
        region: region name.
        tokens: how many tokens it has.
        source: see `Span`.
        ambiguous: see `Span`.
        note: see `Span`.
        preview: the beginning of its text, in one line.
    """

    message: int
    role: str
    region: str
    tokens: int
    source: str
    ambiguous: bool
    note: str
    preview: str


@dataclass(frozen=True)
class LabelReport:
    """What region each span of a trace got.

    Args:
        trace: id of the trace.
        format: what kind of file it was read from.
        messages: how many messages it has.
        spans: in order; together they are all tokens.
        tokens: tokens of each region of the profile.
        notes: what the template changed or left out, and what the file said oddly.
    """

    trace: str
    format: str
    messages: int
    spans: list[LabelledSpan]
    tokens: dict[str, int]
    notes: list[str]

    @property
    def total(self) -> int:
        """All tokens."""
        return sum(self.tokens.values())

    @property
    def share(self) -> dict[str, float]:
        """Share of each region in all tokens."""
        return {region: count / max(self.total, 1) for region, count in self.tokens.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "trace": self.trace,
            "format": self.format,
            "messages": self.messages,
            "spans": [vars(span) for span in self.spans],
            "tokens": dict(self.tokens),
            "share": {region: round(share, 6) for region, share in self.share.items()},
            "total": self.total,
            "ambiguous": sum(span.ambiguous for span in self.spans),
            "notes": list(self.notes),
        }


def label_trace(
    trace: Trace,
    tokenizer: Tokenizer,
    *,
    retrievers: Collection[str] = (),
    profile: Profile | None = None,
    tools_in_system: bool = False,
) -> LabelReport:
    """Label a trace in one rendering of the tokenizer's chat template.

    Args:
        trace: a loaded trace.
        tokenizer: see `Conversation`.
        retrievers: see `Conversation`.
        profile: see `Conversation`.
        tools_in_system: see `Conversation`.

    Raises:
        TraceError: a message is malformed or the template refuses the trace.
        ModelError: the tokenizer cannot label.
    """
    known = profile if profile is not None else Profile.default()
    conversation = Conversation(
        tokenizer,
        retrievers=retrievers,
        tools=trace.tools or None,
        profile=known,
        tools_in_system=tools_in_system,
    )
    result = conversation.append(trace.messages)
    tokens = dict.fromkeys(known.names, 0)
    spans = []
    for span in result.spans:
        tokens[span.region] += span.end - span.start
        text = str(tokenizer.decode(result.ids[span.start : min(span.end, span.start + 64)]))
        spans.append(
            LabelledSpan(
                message=span.message,
                role=str(conversation.messages[span.message]["role"]),
                region=span.region,
                tokens=span.end - span.start,
                source=span.source,
                ambiguous=span.ambiguous,
                note=span.note,
                preview=" ".join(text.split())[:_PREVIEW],
            )
        )
    return LabelReport(
        trace=trace.id,
        format=trace.format,
        messages=len(trace.messages),
        spans=spans,
        tokens=tokens,
        notes=[*trace.notes, *result.notes],
    )
