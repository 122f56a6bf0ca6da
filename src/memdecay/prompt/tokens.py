"""From labelled characters to labelled tokens."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memdecay.errors import ModelError
from memdecay.prompt.types import CharSpan, Rendered, Span, Tokenizer


class Encoder:
    """Tokenizes text with offsets, so that pieces put together say what the whole says.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        ModelError: the tokenizer cannot say which characters a token covers.
    """

    CONTEXT = 64
    """How many characters ahead of a text a tokenizer may look at (see `encode`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Check that offsets work, and whether the start of a text is treated specially."""
        self._tokenizer = tokenizer
        if getattr(tokenizer, "is_fast", True) is False:
            raise ModelError(_no_offsets(tokenizer))
        # transformers warns of texts longer than the model was trained on; callers say it better.
        self._quiet = {"verbose": False} if hasattr(tokenizer, "init_kwargs") else {}
        try:
            pieces = self._encode("a.")[0] + self._encode("b c")[0]
        except (NotImplementedError, KeyError, TypeError):
            raise ModelError(_no_offsets(tokenizer)) from None
        self._start_matters = self.decode(pieces) != self.decode(self._encode("a.b c")[0])
        self._guard = str(getattr(tokenizer, "eos_token", None) or "\n")

    def encode(self, text: str, before: str = "") -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and character offsets of a text that follows another.

        A tokenizer that writes a space ahead of every text (SentencePiece) would write it into
        the middle of the conversation; there the text is tokenized with what is before it (or,
        if a token would span both, behind the end-of-text token), and those tokens are left out.

        Args:
            text: what to tokenize.
            before: what the model has read already.
        """
        context = before[-self.CONTEXT :]
        if not (self._start_matters and context):
            return self._encode(text)
        return self._behind(context, text) or self._behind(self._guard, text) or self._encode(text)

    def _behind(self, context: str, text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return the tokens of a text behind another, or None when a token spans both."""
        ids, offsets = self._encode(context + text)
        edge = len(context)
        first = next((i for i, (start, _) in enumerate(offsets) if start >= edge), len(ids))
        if first and offsets[first - 1][1] > edge:
            return None
        return ids[first:], [(start - edge, end - edge) for start, end in offsets[first:]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded: Mapping[str, Any] = self._tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=False, **self._quiet
        )
        offsets = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
        return [int(i) for i in encoded["input_ids"]], offsets


def _no_offsets(tokenizer: Tokenizer) -> str:
    return (
        f"The tokenizer {type(tokenizer).__name__} gives no character offsets, "
        "but labelling needs a fast tokenizer."
    )


def label_tokens(
    ids: Sequence[int], starts: Sequence[int], spans: Sequence[CharSpan]
) -> tuple[list[Span], list[int]]:
    """Give each token the span in which it starts.

    Args:
        ids: n token ids.
        starts: n character offsets, where each token starts.
        spans: character spans that tile the text.

    Returns:
        Token spans that tile the ids, and one index into them per token.
    """
    edges = [span.start for span in spans]
    token_spans: list[Span] = []
    index: list[int] = []
    current, latest = -1, 0
    for place, start in enumerate(starts):
        latest = max(latest, start)  # a token without text of its own says 0
        owner = max(bisect.bisect_right(edges, latest) - 1, 0)
        if owner != current:
            span = spans[owner]
            current = owner
            token_spans.append(
                Span(
                    span.message, span.region, place, place, span.source, span.ambiguous, span.note
                )
            )
        index.append(len(token_spans) - 1)
    return list(_closed(token_spans, len(ids))), index


def _closed(spans: Sequence[Span], count: int) -> Iterator[Span]:
    """Give each span its end, where the next one starts."""
    for place, span in enumerate(spans):
        end = spans[place + 1].start if place + 1 < len(spans) else count
        yield Span(
            span.message, span.region, span.start, end, span.source, span.ambiguous, span.note
        )


def rendered(
    ids: Sequence[int],
    starts: Sequence[int],
    spans: Sequence[CharSpan],
    *,
    text: str,
    notes: Sequence[str] = (),
    generation_prompt: int = 0,
) -> Rendered:
    """Put tokens and labelled characters together."""
    token_spans, index = label_tokens(ids, starts, spans)
    return Rendered(
        ids=list(ids),
        regions=[token_spans[i].region for i in index],
        span_index=index,
        spans=token_spans,
        notes=list(notes),
        generation_prompt=generation_prompt,
        text=text,
    )


def starts_by_decoding(
    encoder: Encoder, ids: Sequence[int], spans: Sequence[CharSpan]
) -> list[int]:
    """Return where generated tokens start, exact at the borders of the spans.

    Generated ids need not be the ids that tokenizing their text gives, so there are no offsets:
    for each border the first token is searched ahead of which the text up to the border is whole
    (a token may end inside a character).
    """
    text = encoder.decode(ids)
    starts = [0] * len(ids)
    for span in spans[1:]:
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if encoder.decode(ids[:middle]).startswith(text[: span.start]):
                high = middle
            else:
                low = middle + 1
        for place in range(low, len(ids)):
            starts[place] = span.start
    return starts
