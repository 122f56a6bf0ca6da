"""Ranking pages outside, by queries and by words, against literal loops; rows by pages."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memdecay.engine.known import known_models
from memdecay.errors import MemDecayError
from memdecay.tiers import Summaries, Words, rank, rank_by_words, summaries
from memdecay.tiers.runs import Runs
from tiers.tier_pages import page

SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=20)
HEADS = ((1, 4), (0, 0), (1, 5))  # two of them share a KV head
SHAPE = (2, 3, 8)

seeds = st.integers(0, 2**16)
moves = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=25)
"""Of each move the tokens of a page that comes, and how many pages go before."""


def made(**others: Any) -> Summaries:
    return Summaries(HEADS, **{"heads_per_kv": 2, "head_dim": SHAPE[2], **others})


def z(values: list[float]) -> list[float]:
    deviation = max(1e-3, statistics.pstdev(values))
    return [(value - statistics.fmean(values)) / deviation for value in values]


def looped(queries: Tensor, pages: list[Tensor]) -> list[float]:
    """The rank of each page by exact keys, one product at a time."""
    total = [0.0] * len(pages)
    for (layer, head), asked in zip(HEADS, queries.tolist(), strict=True):
        best = [
            [max(_dot(query, key) for key in one[layer, head // 2].tolist()) for one in pages]
            for query in asked
        ]
        strength = z([max(column) for column in zip(*best, strict=True)])
        columns = [*zip(*map(z, best), strict=True)]
        contrast = z([max(column) - statistics.fmean(column) for column in columns])
        for number in range(len(pages)):
            total[number] += (strength[number] + contrast[number]) / len(HEADS)
    return total


def _dot(one: list[float], other: list[float]) -> float:
    return sum(left * right for left, right in zip(one, other, strict=True))


@SEEDED
@given(
    moves=moves, queries=st.integers(1, 4), seed=st.integers(0, 2**16), at_once=st.integers(1, 9)
)
def test_ranks_are_the_literal_loop_after_any_moves(
    moves: list[tuple[int, int]], queries: int, seed: int, at_once: int
) -> None:
    rng = random.Random(seed)
    kept, keys = made(), {}
    for number, (count, gone) in enumerate(moves):
        for _ in range(min(gone, len(keys))):
            out = rng.choice([*keys])
            del keys[out]
            kept.remove(out)
        keys[number] = page(count, seed=seed + number, shape=SHAPE).keys
        kept.add(number, keys[number])
        assert sorted(kept.pages) == sorted(keys) and len(kept) == len(keys)
        assert number in kept and number + 1 not in kept
    asked = torch.randn(3, queries, 8, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summaries, "_AT_ONCE", at_once)
        got = rank(asked, kept)
    assert (got.shape, got.dtype) == ((len(keys),), torch.float32)
    # Codes of 8 bits are within 1/254 of the page's greatest; a product of 8 channels a few times
    # that. Where a query finds all pages about alike, its z is of small differences.
    assert got.tolist() == pytest.approx(looped(asked, [keys[one] for one in kept.pages]), abs=0.3)


def test_of_many_pages_those_left_are_ranked_as_if_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = made()
    for number in range(70):
        kept.add(number, page(2 + 14 * (number % 3 != 0), seed=number, shape=SHAPE).keys)
    for number in (5, 30, 31):
        kept.remove(number)
    asked = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    exact = rank(asked, kept)
    assert torch.equal(rank(asked, kept, 1), exact)
    # Every page is of the sample, so the statistics are those of all.
    for name, value in (("_ALL_UP_TO", 0), ("_LEFT", 16), ("_SAMPLE", 40)):
        monkeypatch.setattr(summaries, name, value)
    for best, left in ((1, 16), (3, 24), (4, 67)):
        got = rank(asked, kept, best)
        there = got.isfinite()
        assert got.shape == exact.shape and int(there.sum()) == left
        assert got[there].tolist() == pytest.approx(exact[there].tolist(), abs=1e-4)
        assert bool((got[~there] == -torch.inf).all())
    # The first head leaves out first: what is left is the best third of it, of that by two heads.
    first, two = _by_heads(asked, kept, 1), _by_heads(asked, kept, 2)
    third = first.topk(67 // 3).indices
    chosen = third[two[third].topk(16).indices]
    assert sorted(chosen.tolist()) == rank(asked, kept, 1).isfinite().nonzero().flatten().tolist()


def _by_heads(asked: Tensor, kept: Summaries, count: int) -> Tensor:
    return summaries._Asked(asked, kept).claims(range(count))


def test_of_many_pages_the_first_stays_first() -> None:
    kept = Summaries(((0, 0), (0, 1), (1, 0)), heads_per_kv=1, head_dim=16)
    order = torch.Generator().manual_seed(0)
    pages = torch.randn(2200, 2, 2, 4, 16, generator=order)
    queries = torch.randn(3, 9, 16, generator=order)
    for number, head in enumerate(((0, 0), (0, 1), (1, 0))):
        pages[1234, head[0], head[1], 2] = 2 * queries[number, 5]
    for number, keys in enumerate(pages):
        kept.add(number, keys)
    exact, got = rank(queries, kept), rank(queries, kept, 8)
    assert int(exact.argmax()) == int(got.argmax()) == 1234
    assert int(got.isfinite().sum()) == 256
    left = got.isfinite()
    assert float((got - exact)[left].abs().mean()) < 0.15


def test_the_page_that_a_query_looks_at_is_first() -> None:
    kept = made()
    for number in range(50):
        keys = page(16, seed=number, shape=SHAPE, dtype=torch.bfloat16).keys
        if number == 31:
            keys[:, :, 5] *= 4
            needle = keys[:, :, 5:6].float()
        kept.add(number, keys)
    queries = torch.stack([needle[layer, head // 2] for layer, head in HEADS])
    assert int(rank(queries, kept).argmax()) == 31
    # How large a head's queries are does not decide, as its pages are standardised.
    scaled = rank(queries * torch.tensor([1e-4, 1.0, 1e4]).view(3, 1, 1), kept)
    assert torch.allclose(scaled, rank(queries, kept), atol=0.02)


def test_a_channel_far_off_does_not_take_the_codes_of_the_others() -> None:
    kept, keys = made(), {}
    for number in range(40):
        keys[number] = page(4, seed=number, shape=SHAPE).keys
        keys[number][:, :, :, 3] += 200
        kept.add(number, keys[number])
    asked = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    assert rank(asked, kept).tolist() == pytest.approx(looped(asked, [*keys.values()]), abs=0.1)


def test_nothing_outside_is_no_ranks_and_one_page_is_ordinary() -> None:
    kept, queries = made(), torch.ones(3, 2, 8)
    assert rank(queries, kept).shape == (0,)
    kept.add(7, torch.zeros(2, 3, 4, 8))
    assert rank(queries, kept).tolist() == [0.0]
    kept.remove(7)
    assert rank(queries, kept).shape == (0,) and kept.bytes == 2 * 2 * 8 * 4


def test_no_heads_are_refused() -> None:
    with pytest.raises(MemDecayError, match="heads is empty"):
        Summaries((), heads_per_kv=2, head_dim=8)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "bound"),
    [
        ("smollm2-135m", 3, 64, 0.06),
        ("qwen2.5-coder-0.5b", 2, 64, 0.08),
        ("qwen2.5-coder-1.5b", 2, 128, 0.08),
    ],
)
@pytest.mark.parametrize("use", ["read", "recall"])
def test_summaries_take_little_of_what_they_stand_for(
    name: str, kv_heads: int, head_dim: int, bound: float, use: str
) -> None:
    known = next(one for one in known_models() if one.name == name)
    shape = known.about["shape"]
    layers = shape["num_hidden_layers"]
    kept = Summaries(
        [(one.layer, one.head) for one in known.evidence[use]],
        heads_per_kv=shape["num_attention_heads"] // kv_heads,
        head_dim=head_dim,
    )
    assert shape["num_key_value_heads"] == kv_heads
    keys = torch.zeros(layers, kv_heads, 16, head_dim, dtype=torch.bfloat16)
    stands_for = 2 * keys.nbytes
    assert len(kept.kv_heads) * 16 * (head_dim + 4) <= 0.06 * stands_for
    worst = 0.0
    for number in range(60):
        kept.add(number, keys)
        if number < 3:
            continue  # what does not grow, 8 bytes a channel, is still most of it
        worst = max(worst, kept.bytes / (number + 1) / stands_for)
    for number in range(45):
        kept.remove(number)
        worst = max(worst, kept.bytes / (59 - number) / stands_for)
    assert worst <= bound


@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 4, 7), (3, 0, 8)])
def test_queries_of_other_heads_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MemDecayError, match=r"queries has shape .* must be \(3, n, 8\) with n"):
        rank(torch.zeros(shape), made())


# Words


def test_words_are_the_literal_loop() -> None:
    rng = random.Random(3)
    ids = [min(int(rng.expovariate(0.1)), 60) for _ in range(16 * 20 + 5)]
    words, start = Words(), 0
    while start < len(ids):
        step = rng.randrange(1, 40)
        words.see(ids[start : start + step])
        start += step
    documents = [{*ids[start : start + 16]} for start in range(0, 16 * 20, 16)]
    pages = {number: ids[5 * number : 5 * number + 1 + number % 5] for number in range(30)}
    for number, one in pages.items():
        words.add(number, one)
    for number in (3, 29, 0):
        del pages[number]
        words.remove(number)
    asked = [*rng.sample(ids, 12), 59, 10_000]
    shared = [
        sum(
            math.log(21 / (1 + sum(one in document for document in documents)))
            for one in {*asked} & {*page_ids}
        )
        for page_ids in pages.values()
    ]
    assert words.pages == [*pages] and len(words) == 27 and 3 not in words
    assert rank_by_words(asked, words).tolist() == pytest.approx(z(shared), abs=1e-4)


def test_a_shared_rare_word_outweighs_shared_common_ones() -> None:
    words = Words()
    for number in range(20):
        ids = [1, 2, 3, 4, *range(10 * number + 10, 10 * number + 20), 5, 6]
        words.see(ids)
        words.add(number, [10 * number + 10, 9] if number == 7 else ids)
    assert int(rank_by_words([1, 2, 3, 4, 5, 6, 80], words).argmax()) == 7


def test_words_take_no_more_however_much_is_read() -> None:
    words = Words()
    for number in range(300):
        words.see([*range(number % 7, number % 7 + 16)])
        words.add(number, [5, 5, 9])
        if number >= 4:
            words.remove(number - 4)
    assert words.bytes <= 4 * 23 + 4 * 4 * 2 * 2
    assert rank_by_words([], words).tolist() == [0.0] * 4
    assert rank_by_words([3], Words()).shape == (0,)


# Rows by pages


@SEEDED
@given(moves=moves, seed=seeds)
def test_rows_stay_with_their_page(moves: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    runs = Runs(one=torch.empty(2, 0), other=torch.empty(2, 0, 3, dtype=torch.int8))
    there: dict[int, Tensor] = {}
    for number, (count, gone) in enumerate(moves):
        there[number] = torch.rand(2, count)
        runs.add(number, one=there[number], other=torch.full((2, count, 3), number % 100))
        for _ in range(min(gone, len(there))):
            out = rng.choice([*there])
            del there[out]
            runs.remove(out)
        live = sum(one.shape[1] for one in there.values())
        assert runs.pages == [*there]
        assert runs["one"].shape[1] * 0.8 <= live
        assert runs.bytes <= (2 * 4 + 2 * 3) * 1.25 * (max(live, 1) / 0.8 + 6)
        if there:
            total = torch.stack([one.sum(1) for one in there.values()], 1)
            assert torch.allclose(runs.total(runs["one"][1]), total[1])
            counts = torch.tensor([one.shape[1] for one in there.values()])
            numbers = runs.total(runs["other"][1, :, 1].float()) / counts
            assert numbers.tolist() == pytest.approx([number % 100 for number in there])
            if all(one.shape[1] == 1 for one in there.values()):
                assert torch.equal(runs["one"][0, runs.at()], torch.cat([*there.values()], 1)[0])
