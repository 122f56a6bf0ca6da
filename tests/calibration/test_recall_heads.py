"""Heads that find what a question asks for: claims by literal loops, choice, honest measure."""

from __future__ import annotations

import pytest
import torch

from memdecay.calibration.recall import (
    Asked,
    choose,
    claims,
    measured,
    pages_of,
    reciprocal_rank,
    told,
)
from memdecay.errors import StudyError
from memdecay.evidence import ASK
from memdecay.policy.recall import contrast, strength

LAYERS, HEADS, KV_HEADS, PAGES = 3, 8, 4, 20


def question(cluster: str, good: dict[tuple[int, int], float], seed: int) -> Asked:
    """Claims at random, but some heads favour the wanted page."""
    generator = torch.Generator().manual_seed(seed)
    claimed = torch.randn(LAYERS, HEADS, PAGES, generator=generator)
    wanted = torch.zeros(PAGES, dtype=torch.bool)
    wanted[seed % PAGES] = True
    for head, much in good.items():
        claimed[(*head, wanted)] += much
    return Asked(cluster, claimed, wanted)


def test_claims_are_the_literal_loop_over_the_tokens_that_count() -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(LAYERS, HEADS, 3, 8, generator=generator)
    keys = torch.randn(LAYERS, KV_HEADS, 23, 8, generator=generator)
    counted = torch.rand(23, generator=generator) > 0.4
    counted[8:12] = False  # a page of which nothing counts
    got = claims(queries, keys, counted, page=4)
    pages = [p for p in range(6) if bool(counted[4 * p : 4 * p + 4].any())]
    assert got.shape == (LAYERS, HEADS, len(pages))
    assert 2 not in pages
    for layer in range(LAYERS):
        for head in range(HEADS):
            products = torch.tensor(
                [
                    [
                        max(
                            float(query @ keys[layer, head // 2, t])
                            for t in range(4 * p, min(23, 4 * p + 4))
                            if counted[t]
                        )
                        for p in pages
                    ]
                    for query in queries[layer, head]
                ]
            )
            expected = strength(products) + contrast(products)
            assert got[layer, head].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    numbers = [pages.index(t // 4) for t in range(23) if counted[t]]
    assert pages_of(counted, 4).tolist() == numbers


def test_the_rank_of_equals_is_the_last() -> None:
    wanted = torch.tensor([False, True, False, True])
    claimed = torch.tensor([[1.0, 3.0, 2.0, 0.0], [3.0, 3.0, 4.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert reciprocal_rank(claimed, wanted).tolist() == pytest.approx([1, 1 / 3, 1 / 3])


def test_heads_that_place_the_answer_first_are_chosen_in_order() -> None:
    asked = [question("mill", {(1, 2): 9.0, (0, 3): 2.0}, seed) for seed in range(12)]
    first, second = choose(asked, 2)
    assert (first.layer, first.head, first.when) == (1, 2, ASK)
    assert (second.layer, second.head) == (0, 3)
    assert told(asked[0], [first]) == 1
    assert len(choose(asked, 99)) == LAYERS * HEADS


def test_left_out_questions_are_told_by_the_heads_of_others() -> None:
    clusters = {"mill": (0, 0), "farm": (0, 0), "port": (1, 3)}
    asked = [
        question(name, {head: 9.0}, seed + 12 * at)
        for at, (name, head) in enumerate(clusters.items())
        for seed in range(12)
    ]
    heads, reached, apart = measured(asked)
    assert (heads[0].layer, heads[0].head) == (0, 0)
    assert apart is not None and apart < reached
    alone = measured([one for one in asked if one.cluster == "mill"])
    assert alone[2] is None and alone[1] > 0.7


def test_no_question_is_refused() -> None:
    with pytest.raises(StudyError, match="no question"):
        choose([])
