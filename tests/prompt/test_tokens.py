"""From characters to tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_models import make_tokenizer

from memdecay.prompt.tokens import Encoder, label_tokens, starts_by_decoding
from memdecay.prompt.types import CharSpan


def spans_of(*edges):
    return [CharSpan(a, b, i, f"r{i}", "role") for i, (a, b) in enumerate(edges)]


def test_a_token_across_a_border_belongs_to_the_span_where_it_starts():
    spans, index = label_tokens([7, 8, 9], [0, 3, 6], spans_of((0, 4), (4, 9)))
    assert index == [0, 0, 1]
    assert [(s.message, s.start, s.end) for s in spans] == [(0, 0, 2), (1, 2, 3)]


def test_a_span_inside_one_token_has_no_token():
    spans, index = label_tokens([7, 8], [0, 6], spans_of((0, 2), (2, 3), (3, 9)))
    assert [(s.message, s.start, s.end) for s in spans] == [(0, 0, 1), (2, 1, 2)]
    assert index == [0, 1]


def test_tokens_without_text_stay_with_the_token_before_them():
    _, index = label_tokens([7, 8, 9], [0, 5, 0], spans_of((0, 4), (4, 9)))
    assert index == [0, 1, 1]


def test_no_tokens():
    assert label_tokens([], [], []) == ([], [])


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_texts_encoded_one_after_the_other_decode_to_the_whole(kind):
    encoder = Encoder(make_tokenizer("chatml", kind))
    alphabet = "ab \n.é日[INST]</s>😀"

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=4))
    def run(texts):
        ids, before = [], ""
        for text in texts:
            new, offsets = encoder.encode(text, before)
            assert len(new) == len(offsets)
            assert all(0 <= a <= b <= len(text) for a, b in offsets)
            ids += new
            before += text
        assert encoder.decode(ids) == encoder.decode(encoder.encode(before)[0])

    run()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text("ab é日😀", max_size=8), st.text("ab é日😀", max_size=8))
def test_borders_of_generated_ids(left, right):
    """Ids one character at a time: borders inside of characters never split one."""
    tokenizer = make_tokenizer("chatml")
    encoder = Encoder(tokenizer)
    ids = [i for c in left + right for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    spans = spans_of((0, len(left)), (len(left), len(left + right)))
    starts = starts_by_decoding(encoder, ids, spans)
    cut = starts.index(len(left)) if left and right else len(ids) if left else 0
    assert tokenizer.decode(ids[:cut]) == left
