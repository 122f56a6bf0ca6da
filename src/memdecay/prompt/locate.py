"""Finds the pieces of every message in a rendering, so that each character gets one region.

A template says which message it is at (`template.py`); inside that message's text the pieces are
searched, because a template may trim them, escape them or leave them out. Between two pieces the
scaffolding belongs to the piece before it, ahead of the first one to the first one. What a
template writes after the last message only when nothing follows (an end-of-text, say) is the
ending: it belongs to no message and gets no span.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memdecay.prompt.label import Piece
from memdecay.prompt.prepare import Turn
from memdecay.prompt.template import Rendering, Segment
from memdecay.prompt.traits import Traits
from memdecay.prompt.types import CharSpan

_CHANGED = "the template changed its text, so the whole message has one region"
_WRITINGS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)


@dataclass(frozen=True)
class _Found:
    """A piece and where its text stands."""

    start: int
    end: int
    piece: Piece


@dataclass(frozen=True)
class Missing:
    """A piece that the template does not render."""

    message: int
    kind: str


def locate(
    rendering: Rendering, turns: Sequence[Turn], traits: Traits, *, has_tools: bool
) -> tuple[list[CharSpan], list[Missing]]:
    """Label every character of a rendering.

    Args:
        rendering: a rendering of `turns`, without generation prompt.
        turns: what was rendered.
        traits: what the template does.
        has_tools: whether tool schemas are in the rendering.

    Returns:
        Spans that tile the text without its ending, and the pieces that are not in it.
    """
    return _Locator(rendering, turns, traits, has_tools).run()


class _Locator:
    """One labelling; holds what its steps share."""

    def __init__(
        self, rendering: Rendering, turns: Sequence[Turn], traits: Traits, has_tools: bool
    ) -> None:
        self._text = rendering.text
        self._segments = rendering.segments
        self._turns = turns
        self._traits = traits
        self._has_tools = has_tools

    def run(self) -> tuple[list[CharSpan], list[Missing]]:
        own: dict[int, list[Segment]] = defaultdict(list)
        for segment in self._segments:
            if segment.turn is not None:
                own[segment.turn].append(segment)
        spans: list[CharSpan] = []
        lost: list[Piece] = []
        homeless: list[Piece] = []
        for index, turn in enumerate(self._turns):
            if own[index]:
                main = max(own[index], key=lambda s: s.end - s.start)
                found, missing = self._pieces(turn, main.start, main.end)
                spans += self._tile(turn, main, found)
                last = turn.pieces[-1]
                spans += [_span(s.start, s.end, last) for s in own[index] if s is not main]
                lost += missing
            else:
                homeless += turn.pieces
        spans += self._unowned(homeless)
        spans = self._carve(sorted(spans, key=lambda s: s.start), homeless)
        missing = [p for p in lost + homeless if p.text is None or p.text.strip()]
        return merge(spans), [Missing(piece.message, piece.kind) for piece in missing]

    # Inside a message.

    def _pieces(self, turn: Turn, start: int, end: int) -> tuple[list[_Found], list[Piece]]:
        """Search the pieces of one turn between two offsets."""
        role = turn.payload["role"]
        header = self._traits.header.get(role, "")
        closing = self._traits.closing.get(role) or self._traits.closing.get("user", "")
        at = self._text.find(header, start, end) if header else start
        low = at + len(header) if at >= 0 else start
        ending = self._text.rfind(closing, low, end) if closing else -1
        high = ending if ending >= 0 else end
        found: list[_Found] = []
        missing: list[Piece] = []
        cursor = low
        texts = [piece for piece in turn.pieces if piece.text is not None]
        only = [p.kind for p in turn.pieces] == ["content"] * len(turn.pieces)
        for kind in ("reasoning_content", "content"):
            group = [piece for piece in texts if piece.kind == kind]
            hits = self._group(group, cursor, high, from_end=only)
            found += hits
            missing += [piece for piece in group if all(hit.piece is not piece for hit in hits)]
            cursor = found[-1].end if found else cursor
        for piece in turn.pieces:
            if piece.text is None:
                hit = self._calls(piece, found, low, cursor, end)
                found += [hit] if hit else []
                missing += [] if hit else [piece]
        found.sort(key=lambda hit: hit.start)
        return found, missing

    def _group(
        self, pieces: Sequence[Piece], low: int, high: int, *, from_end: bool
    ) -> list[_Found]:
        """Search pieces that stand one after the other; if not found together, one by one."""
        if not any(piece.text for piece in pieces):
            return [_Found(low, low, piece) for piece in pieces]
        for write in _WRITINGS:
            texts = [write(piece.text or "") for piece in pieces]
            hit = self._search("".join(texts), low, high, from_end=from_end)
            if hit is not None:
                return _split(pieces, texts, *hit)
        found: list[_Found] = []
        if len(pieces) > 1:
            for piece in pieces:
                hits = self._group([piece], found[-1].end if found else low, high, from_end=False)
                found += hits
        return found

    def _search(
        self, text: str, low: int, high: int, *, from_end: bool
    ) -> tuple[int, int, int] | None:
        """Return start and end of a text, trimmed if need be, and how much is trimmed ahead."""
        for candidate in dict.fromkeys((text, text.strip())):
            if not candidate:
                continue
            at = high - len(candidate)
            if not (from_end and at >= low and self._text.startswith(candidate, at)):
                at = self._text.find(candidate, low, high)
            if at >= 0:
                return at, at + len(candidate), text.find(candidate)
        return None

    def _calls(
        self, piece: Piece, found: Sequence[_Found], low: int, cursor: int, end: int
    ) -> _Found | None:
        """Find tool calls by their first name: all that is left after the texts, or ahead of them.

        A closing think tag stays with the reasoning.
        """
        at = self._text.find(piece.names[0], cursor, end)
        if at >= 0:
            start = cursor
            tag = self._text.find("</think>", cursor, at)
            if tag >= 0:
                start = tag + len("</think>")
                while start < at and self._text[start].isspace():
                    start += 1
            return _Found(start, end, piece)
        first = min((hit.start for hit in found), default=low)
        if self._text.find(piece.names[0], low, first) >= 0:
            return _Found(low, first, piece)
        return None

    def _tile(self, turn: Turn, segment: Segment, found: Sequence[_Found]) -> list[CharSpan]:
        """Cover one segment with the pieces found in it."""
        real = [hit for hit in found if hit.end > hit.start]
        if not real:
            last = turn.pieces[-1]
            doubt = bool((last.text or "").strip())
            return [_span(segment.start, segment.end, last, _CHANGED if doubt else "")]
        spans = list(self._lead(turn, segment.start, real[0]))
        start = spans[-1].end if spans else segment.start
        for hit, after in zip(real, [*real[1:], None], strict=True):
            end = after.start if after else segment.end
            spans.append(_span(start, end, hit.piece))
            start = end
        return spans

    def _lead(self, turn: Turn, start: int, first: _Found) -> Iterator[CharSpan]:
        """Yield what the template put ahead of a user message besides its header.

        That is a default system prompt or tool schemas: both are system.
        """
        header = self._traits.header.get(turn.payload["role"], "")
        if turn.payload["role"] != "user" or not header.strip():
            return
        lead = self._text[start : first.start]
        at = lead.rfind(header)
        if at < 0:
            return
        injected = _template_span(start, start + at, first.piece.message)
        behind = lead[at + len(header) :]
        if at:
            yield injected
        if behind.strip():
            yield _span(start + at, start + at + len(header), first.piece)
            yield _template_span(start + at + len(header), first.start, first.piece.message)

    # Outside of messages.

    def _unowned(self, homeless: list[Piece]) -> list[CharSpan]:
        """Label text outside of the loop; pieces found there leave `homeless`."""
        spans: list[CharSpan] = []
        owners = [s for s in self._segments if s.turn is not None]
        first_owned = owners[0].start if owners else len(self._text)
        for segment in self._segments:
            if segment.turn is not None:
                continue
            if segment.start < first_owned or any(
                self._place(piece, segment) for piece in homeless
            ):
                spans += self._outside(segment, homeless)
            elif segment is not self._segments[-1]:
                spans.append(_template_span(segment.start, segment.end, self._first_message()))
        return spans

    def _place(self, piece: Piece, segment: Segment) -> tuple[int, int, int] | None:
        return self._search(piece.text or "", segment.start, segment.end, from_end=False)

    def _first_message(self) -> int:
        return self._turns[0].pieces[0].message

    def _outside(self, segment: Segment, homeless: list[Piece]) -> list[CharSpan]:
        """Label what stands outside: the system message, schemas, a default prompt."""
        hits: list[_Found] = []
        cursor = segment.start
        for piece in list(homeless):
            place = self._search(piece.text or "", cursor, segment.end, from_end=False)
            if place is not None:
                hits.append(_Found(place[0], place[1], piece))
                cursor = place[1]
                homeless.remove(piece)
        spans: list[CharSpan] = []
        start = segment.start
        message = self._first_message()
        for number, hit in enumerate(hits):
            is_system = self._role(hit.piece) in ("system", "developer")
            if hit.start > start and (number or not is_system):
                spans.append(_template_span(start, hit.start, message))
                start = hit.start
            own_end = number + 1 == len(hits) and not (is_system and self._has_tools)
            end = segment.end if own_end else hit.end
            spans.append(_span(start, end, hit.piece))
            start = end
        if start < segment.end:
            spans.append(_template_span(start, segment.end, message))
        return spans

    def _role(self, piece: Piece) -> str:
        return next(
            str(turn.payload["role"])
            for turn in self._turns
            if any(piece.message == p.message for p in turn.pieces)
        )

    def _carve(self, spans: list[CharSpan], homeless: list[Piece]) -> list[CharSpan]:
        """Give a system text that the template wrote into a later message its place there."""
        for piece in list(homeless):
            if self._role(piece) not in ("system", "developer"):
                continue
            for span in spans:
                if span.message <= piece.message:
                    continue
                hit = self._search(piece.text or "", span.start, span.end, from_end=False)
                if hit is not None:
                    homeless.remove(piece)
                    spans = [cut for other in spans for cut in _cut(other, hit[0], hit[1])]
                    spans.append(_span(hit[0], hit[1], piece))
                    spans.sort(key=lambda s: s.start)
                    break
        return spans


def _split(
    pieces: Sequence[Piece], texts: Sequence[str], start: int, end: int, trimmed: int
) -> list[_Found]:
    """Give each piece its share of a text that was found as a whole."""
    found = []
    position = start - trimmed
    for piece, text in zip(pieces, texts, strict=True):
        low, high = position, position + len(text)
        found.append(_Found(min(max(low, start), end), min(max(high, start), end), piece))
        position = high
    return found


def _span(start: int, end: int, piece: Piece, doubt: str = "") -> CharSpan:
    note = "; ".join(part for part in (piece.note, doubt) if part)
    return CharSpan(
        start, end, piece.message, piece.region, piece.source, piece.ambiguous or bool(doubt), note
    )


def _template_span(start: int, end: int, message: int) -> CharSpan:
    return CharSpan(start, end, message, "system", "template")


def _cut(span: CharSpan, start: int, end: int) -> list[CharSpan]:
    """Return what is left of a span outside of an interval."""
    if span.end <= start or span.start >= end:
        return [span]
    left = [replace(span, end=start)] if span.start < start else []
    right = [replace(span, start=end)] if span.end > end else []
    return left + right


def merge(spans: Sequence[CharSpan]) -> list[CharSpan]:
    """Join neighbours which say the same, drop empty spans."""
    merged: list[CharSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if merged and replace(merged[-1], start=span.start, end=span.end) == span:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return merged
