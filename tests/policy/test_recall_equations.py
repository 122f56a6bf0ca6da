"""What makes a page worth bringing back, against literal loops."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memdecay.policy.recall import among_pages, claim, contrast, strength


def z(values: list[float]) -> list[float]:
    deviation = max(1e-3, statistics.pstdev(values))
    return [(value - statistics.fmean(values)) / deviation for value in values]


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(
    heads=st.integers(1, 3), queries=st.integers(1, 4), pages=st.integers(1, 6), seed=st.integers()
)
def test_claims_are_the_literal_loop(heads: int, queries: int, pages: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    products = torch.randn(heads, queries, pages, generator=generator) * 9
    total = [0.0] * pages
    for head in products.tolist():
        strong = z([max(query[page] for query in head) for page in range(pages)])
        each = [z(query) for query in head]
        special = z(
            [
                max(query[page] for query in each) - statistics.fmean(query[page] for query in each)
                for page in range(pages)
            ]
        )
        total = [
            value + (one + other) / heads
            for value, one, other in zip(total, strong, special, strict=True)
        ]
    assert claim(products).tolist() == pytest.approx(total, abs=1e-3)


def test_the_page_that_one_query_asks_for_beats_one_that_all_are_drawn_to() -> None:
    products = torch.ones(4, 8).index_fill_(1, torch.tensor([2]), 6.0)
    products[3, 5] = 6.0
    assert int(contrast(products).argmax()) == 5
    assert strength(products)[2] == strength(products)[5]
    assert int(claim(products[None]).argmax()) == 5


def test_one_query_has_nothing_to_compare_with_and_like_pages_are_alike() -> None:
    products = torch.tensor([[1.0, 5.0, 2.0]])
    assert contrast(products).tolist() == [0.0, 0.0, 0.0]
    assert claim(products[None]).tolist() == strength(products).tolist()
    assert among_pages(torch.full((2, 3), 7.0)).tolist() == [[0.0] * 3] * 2


def test_a_sample_stands_for_all_pages() -> None:
    products = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))
    got = claim(products, slice(30))
    whole = claim(products[..., :30])
    assert torch.allclose(got[:30], whole, atol=1e-5)
    # What is standardised by the sample does not depend on the pages beside it.
    assert torch.allclose(claim(products[..., [*range(30), 37]], slice(30))[-1], got[37], atol=1e-5)
