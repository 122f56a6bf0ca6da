"""The plan of an eviction by head, against a literal loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memdecay.errors import BudgetError, PolicyError
from memdecay.policy import HeadPolicy, Policy, Tokens
from memdecay.policy.head_pages import plan_head_eviction
from memdecay.regions import Profile

SYSTEM = Profile.default().id("system")
USER = Profile.default().id("user")


@dataclass(frozen=True, eq=False)
class Given(HeadPolicy):
    """Scores and protection as the test says."""

    name: ClassVar[str] = "given"
    summary: ClassVar[str] = "for tests"
    needs: ClassVar[frozenset[str]] = frozenset({"labels"})

    by_head: Tensor
    protect: Tensor | None = None

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return self.by_head

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        return self.protect


def cache(held: Tensor, position: Tensor | None = None, region: Tensor | None = None) -> Tokens:
    size = held.shape[-1]
    return Tokens(
        position=torch.arange(size) if position is None else position,
        region=torch.full((size,), USER) if region is None else region,
        span=torch.zeros(size, dtype=torch.int64),
        inserted_at=torch.zeros(size),
        num_observed=torch.zeros(size, dtype=torch.int32),
        now=0.0,
        seq_len=size,
        held=held,
    )


def plan(tokens: Tokens, policy: Policy, excess: int, page_size: int, **changes: object) -> Tensor:
    page_index = (tokens.position // page_size).unique(return_inverse=True)[1]
    arguments: dict[str, object] = {
        "page_index": page_index,
        "num_pages": int(page_index.max()) + 1,
        "pinned": torch.zeros(tokens.kv_len, dtype=torch.bool),
        "open_page": None,
        **changes,
    }
    return plan_head_eviction(tokens, policy, Profile.default(), excess=excess, **arguments)


def literal(
    tokens: Tokens,
    score: Tensor,
    excess: int,
    page_index: Tensor,
    must_stay: set[int],
    preferred: set[int],
) -> Tensor | None:
    """Pages of heads, one after the other; None if there are too few."""
    held = tokens.held
    assert held is not None
    pages = []
    for layer in range(held.shape[0]):
        for head in range(held.shape[1]):
            for page in set(page_index.tolist()):
                mine = [
                    slot
                    for slot in range(tokens.kv_len)
                    if page_index[slot] == page and held[layer, head, slot]
                ]
                if mine and page not in must_stay:
                    mean = sum(float(score[layer, head, slot]) for slot in mine) / len(mine)
                    pages.append((page in preferred, mean, page, layer, head, mine))
    gone, freed = torch.zeros_like(held), 0
    for _, _, _, layer, head, mine in sorted(pages):
        if freed >= excess:
            break
        gone[layer, head, mine] = True
        freed += len(mine)
    return gone if freed >= excess else None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_the_literal_loop(data: st.DataObject) -> None:
    draw = data.draw
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size, page_size = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 4, 16]))
    bits = draw(st.lists(st.booleans(), min_size=layers * heads * size, max_size=None))
    held = torch.tensor(bits[: layers * heads * size]).view(layers, heads, size)
    held[0, 0] |= ~held.any(0).any(0)
    numbers = draw(st.lists(st.integers(0, 3), min_size=held.numel(), max_size=held.numel()))
    score = torch.tensor(numbers, dtype=torch.float32).view(held.shape)
    order = torch.tensor(draw(st.permutations(range(size))))
    position = order * draw(st.integers(1, 3))
    pinned = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))) & (
        torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    )
    region = torch.where(
        torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))) == 0,
        SYSTEM,
        USER,
    )
    protect = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    protect = draw(st.sampled_from([None, protect]))
    tokens = cache(held, position, region)
    page_index = (position // page_size).unique(return_inverse=True)[1]
    open_page = draw(st.sampled_from([None, int(page_index.max())]))
    excess = draw(st.integers(-1, int(held.sum()) + 1))
    stay = set(page_index[pinned | (region == SYSTEM)].tolist()) | {open_page}
    rather = set(page_index[protect].tolist()) if protect is not None else set()
    expected = literal(tokens, score, excess, page_index, stay, rather)
    policy = Given(score.masked_fill(~held, torch.inf), protect)
    arguments = {"pinned": pinned, "open_page": open_page}
    if expected is None:
        with pytest.raises(BudgetError, match="entries"):
            plan(tokens, policy, excess, page_size, **arguments)
    else:
        assert torch.equal(plan(tokens, policy, excess, page_size, **arguments), expected)


def test_ties_go_older_page_then_lower_layer_then_lower_head() -> None:
    tokens = cache(torch.ones(2, 2, 4, dtype=torch.bool))
    policy = Given(torch.zeros(2, 2, 4))
    seen: list[list[list[int]]] = []
    before = torch.zeros(2, 2, 4, dtype=torch.bool)
    for excess in range(2, 12, 2):
        gone = plan(tokens, policy, excess, 2)
        seen.append((gone & ~before).nonzero().tolist())
        before = gone
    assert seen == [
        [[0, 0, 0], [0, 0, 1]],
        [[0, 1, 0], [0, 1, 1]],
        [[1, 0, 0], [1, 0, 1]],
        [[1, 1, 0], [1, 1, 1]],
        [[0, 0, 2], [0, 0, 3]],
    ]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_not_finite_is_refused_only_where_it_counts(bad: float) -> None:
    held = torch.ones(2, 1, 4, dtype=torch.bool)
    held[1, 0, 2] = False
    score = torch.zeros(2, 1, 4)
    score[1, 0, 2] = bad
    assert int(plan(cache(held), Given(score), 3, 1).sum()) == 3
    score[0, 0, 3] = bad
    with pytest.raises(PolicyError, match="NaN or infinite"):
        plan(cache(held), Given(score), 3, 1)


def test_a_score_of_another_shape_or_type_is_refused() -> None:
    held = torch.ones(2, 1, 4, dtype=torch.bool)
    for score in (torch.zeros(4), torch.zeros(2, 1, 4, dtype=torch.float64)):
        with pytest.raises(PolicyError, match="score by head of shape"):
            plan(cache(held), Given(score), 3, 1)


def test_scores_by_head_need_heads() -> None:
    class Plain(Policy):
        name, summary = "plain", "for tests"

        def score(self, tokens: Tokens, profile: Profile) -> Tensor:
            return tokens.position.float()

    held = torch.ones(2, 3, 4, dtype=torch.bool)
    tokens = cache(held)
    assert Plain().head_score(tokens, Profile.default()).shape == held.shape
    assert plan(tokens, Plain(), 6, 1)[:, :, 0].all()
    with pytest.raises(PolicyError, match="all heads keep the same"):
        Plain().head_score(cache(held[0, 0]).__class__(**{**vars(tokens), "held": None}), None)


def test_the_score_of_a_token_is_the_mean_of_the_heads_that_hold_it() -> None:
    held = torch.tensor([[[True, True], [False, True]]])
    score = torch.tensor([[[1.0, 2.0], [torch.nan, 4.0]]])
    assert Given(score).score(cache(held), Profile.default()).tolist() == [1.0, 3.0]
