"""Page scores, selection and the plan: the cases that the contract does not reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from memdecay.errors import BudgetError, PolicyError
from memdecay.policy import Policy, Tokens
from memdecay.policy.pages import page_scores, pages_of, plan_eviction, select
from memdecay.regions import Profile


@dataclass(frozen=True)
class Given(Policy):
    """Score and protection as the test says; not installed."""

    name: ClassVar[str] = "given"
    summary: ClassVar[str] = "for tests"

    how: Callable[[Tokens], Tensor]
    protect: Callable[[Tokens], Tensor] | None = None

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return self.how(tokens)

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        return self.protect(tokens) if self.protect else None


class Labelled(Given):
    needs = frozenset({"labels"})


def cache(size: int, region: int = 2) -> Tokens:
    return Tokens(
        position=torch.arange(size),
        region=torch.full((size,), region),
        span=torch.zeros(size, dtype=torch.int64),
        inserted_at=torch.zeros(size),
        num_observed=torch.zeros(size, dtype=torch.int32),
        now=0.0,
        seq_len=size,
    )


def flat(tokens: Tokens) -> Tensor:
    return torch.ones(tokens.kv_len)


def plan(tokens: Tokens, policy: Policy, excess: int, **changes: object) -> list[int]:
    """Return the evicted pages of four tokens each."""
    page_index = tokens.position // 4
    arguments: dict[str, object] = {
        "page_index": page_index,
        "num_pages": int(page_index.max()) + 1,
        "pinned": torch.zeros(tokens.kv_len, dtype=torch.bool),
        "excess": excess,
        "open_page": None,
        **changes,
    }
    gone = plan_eviction(tokens, policy, Profile.default(), **arguments)  # type: ignore[arg-type]
    return sorted(set(page_index[gone].tolist()))


def test_equal_scores_go_oldest_first() -> None:
    assert plan(cache(40), Given(flat), 12) == [0, 1, 2]


def test_only_as_many_as_needed_and_whole_pages() -> None:
    tokens = cache(40)
    assert plan(tokens, Given(flat), 1) == [0]
    assert plan(tokens, Given(flat), 5) == [0, 1]
    assert plan(tokens, Given(flat), 40) == list(range(10))


def test_a_page_is_judged_by_its_mean_not_its_sum() -> None:
    """A short page of good tokens outlives a full page of poor ones."""
    tokens = cache(10)  # pages of 4, 4 and 2
    score = Given(lambda t: torch.where(t.position >= 8, 1.5, 1.0))
    assert plan(tokens, score, 1) == [0]
    means = page_scores(score.score(tokens, Profile.default()), tokens.position // 4, 3)
    assert means.tolist() == [1.0, 1.0, 1.5]


def test_a_pinned_token_holds_its_page_and_only_that() -> None:
    pinned = torch.zeros(40, dtype=torch.bool)
    pinned[5] = True
    assert plan(cache(40), Given(flat), 8, pinned=pinned) == [0, 2]


def test_the_open_page_stays_however_bad() -> None:
    newest_is_worst = Given(lambda t: -t.position.to(torch.float32))
    assert plan(cache(40), newest_is_worst, 4, open_page=9) == [8]
    assert plan(cache(40), newest_is_worst, 4, open_page=None) == [9]


def test_region_pins_hold_only_for_a_policy_that_has_labels() -> None:
    tokens = dataclasses.replace(cache(40), region=torch.where(torch.arange(40) < 9, 0, 2))
    assert plan(tokens, Labelled(flat), 4) == [3]  # the page that straddles is held as well
    assert plan(tokens, Given(flat), 4) == [0]


def test_a_protected_window_tied_with_the_best_score_stays() -> None:
    """Protection is no number: a score that ties with or beats the window's changes nothing."""
    window = Given(flat, lambda t: t.latest(8))
    assert plan(cache(40), window, 32) == list(range(8))
    huge = Given(
        lambda t: torch.where(t.position < 32, torch.finfo(torch.float32).max, -1.0),
        lambda t: t.latest(8),
    )
    assert plan(cache(40), huge, 32) == list(range(8))


def test_what_a_policy_protects_goes_last_but_goes() -> None:
    """A preference yields to the budget, lowest score first; pins and the open page do not."""
    pinned = torch.zeros(40, dtype=torch.bool)
    pinned[0] = True
    policy = Given(lambda t: -t.position.to(torch.float32), lambda t: t.latest(16))
    free = [1, 2, 3, 4, 5]
    assert plan(cache(40), policy, 20, pinned=pinned, open_page=9) == free
    assert plan(cache(40), policy, 21, pinned=pinned, open_page=9) == [*free, 8]
    assert plan(cache(40), policy, 32, pinned=pinned, open_page=9) == [*free, 6, 7, 8]
    with pytest.raises(BudgetError, match="too small by 1 tokens: 33 must be freed, but only 32"):
        plan(cache(40), policy, 33, pinned=pinned, open_page=9)


def test_everything_pinned_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match="too small by 4 tokens"):
        plan(cache(8), Given(flat), 4, pinned=torch.ones(8, dtype=torch.bool))
    with pytest.raises(BudgetError):
        plan(cache(1), Given(flat), 1, open_page=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 21, 39])
def test_a_score_that_is_not_finite_is_refused(bad: float, where: int) -> None:
    broken = Given(lambda t: torch.where(t.position == where, bad, 1.0))
    with pytest.raises(PolicyError, match="'given'"):
        plan(cache(40), broken, 1)


def test_both_infinities_in_one_page_are_refused() -> None:
    broken = Given(lambda t: torch.where(t.position % 2 == 0, torch.inf, -torch.inf))
    with pytest.raises(PolicyError, match="finite"):
        plan(cache(40), broken, 1)


def test_large_finite_scores_do_not_overflow() -> None:
    huge = Given(lambda t: torch.full((t.kv_len,), torch.finfo(torch.float32).max))
    assert plan(cache(40), huge, 1) == [0]


def test_an_empty_cache_and_a_binding_budget() -> None:
    assert (
        plan_eviction(
            cache(0),
            Given(flat),
            Profile.default(),
            page_index=torch.zeros(0, dtype=torch.int64),
            num_pages=0,
            pinned=torch.zeros(0, dtype=torch.bool),
            excess=0,
            open_page=None,
        ).tolist()
        == []
    )
    with pytest.raises(BudgetError):
        select(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).bool(), 1)


def test_a_page_larger_than_the_excess_still_goes_whole() -> None:
    sizes = torch.tensor([16, 1, 16])
    gone = select(torch.tensor([2.0, 3.0, 1.0]), sizes, torch.zeros(3).bool(), 2)
    assert gone.tolist() == [False, False, True]


def test_pages_of_very_different_sizes_are_still_taken_in_order() -> None:
    """The shortcut that sorts only some pages must not skip small, poor ones."""
    score = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0])
    sizes = torch.tensor([16, 1, 1, 1, 16])
    gone = select(score, sizes, torch.zeros(5).bool(), 4)
    assert gone.tolist() == [False, True, True, True, True]


def test_single_tokens_in_any_order_of_slots_are_as_pages_that_count() -> None:
    size = 40
    slots = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    score = torch.randn(size, generator=torch.Generator().manual_seed(4))
    chosen = score > 0.3
    assert page_scores(score, slots, size).tolist() == [
        float(score[slots == page]) for page in range(size)
    ]
    assert pages_of(chosen, slots, size).tolist() == [
        bool(chosen[slots == page]) for page in range(size)
    ]
