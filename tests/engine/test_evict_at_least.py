"""A policy's pages and how much it frees at once: at least so much, within budget and pins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.families import make, oracle, tokens
from engine.helpers import Record, close, kept
from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.errors import BudgetError
from memdecay.policy import Policy, Tokens, get_policy
from memdecay.policy.memdecay import MemDecay
from memdecay.regions import Profile

MODEL = make("llama")


@dataclass(frozen=True)
class Oldest(Policy):
    """Evicts the oldest tokens, several at once."""

    name: ClassVar[str] = "oldest"
    summary: ClassVar[str] = "for this test"
    page_size: ClassVar[int] = 1
    evict_at_least: ClassVar[int] = 10

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.position.float()


@dataclass(frozen=True)
class Guarded(Oldest):
    """Would rather keep its newest tokens."""

    name: ClassVar[str] = "guarded"

    recent: int = 17

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return -tokens.position.float()

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.latest(self.recent)


def run(cache: MemDecayCache, count: int, chunk: int = 1) -> list[Evicted]:
    """Read so many tokens, and return what was evicted, forward by forward."""
    gone: list[Evicted] = []
    cache.on_evict = gone.append
    ids = tokens(400)
    start = cache.seen
    with torch.no_grad():
        for at in range(start, start + count, chunk):
            MODEL(input_ids=ids[:, at : min(at + chunk, start + count)], cache=cache)
            assert cache.budget is None or cache.kept() <= cache.budget
    return gone


class TestPageSize:
    def test_it_is_the_policys_where_nobody_says(self) -> None:
        assert MemDecayCache(MODEL, budget=40, policy=Oldest()).page_size == 1
        assert MemDecayCache(MODEL, budget=40, policy=Oldest(), page_size=4).page_size == 4
        for name in ("memdecay-paper", "memdecay", "streaming"):
            cache = MemDecayCache(MODEL, budget=40, policy=name)
            assert cache.page_size == get_policy(name).page_size
            run(cache, 45)
            assert cache.ledgers[0].page_size == cache.page_size

    def test_a_budget_below_the_policys_page_is_refused(self) -> None:
        size = get_policy("memdecay-paper").page_size
        with pytest.raises(BudgetError, match=f"at least one page of {size} tokens"):
            MemDecayCache(MODEL, budget=size - 1, policy="memdecay-paper")
        MemDecayCache(MODEL, budget=1, policy=Oldest())


class TestAtLeast:
    def test_so_many_go_at_once_and_the_lowest_of_them(self) -> None:
        gone = run(MemDecayCache(MODEL, budget=30, policy=Oldest()), 80)
        assert [one.position.tolist() for one in gone] == [
            list(range(start, start + 10)) for start in range(0, 50, 10)
        ]

    def test_pages_are_whole(self) -> None:
        gone = run(MemDecayCache(MODEL, budget=32, policy=Oldest(), page_size=4), 80)
        assert {len(one.position) for one in gone} == {12}  # three pages hold ten tokens

    def test_a_forward_that_needs_more_gets_just_that(self) -> None:
        cache = MemDecayCache(MODEL, budget=30, policy=Oldest())
        run(cache, 30, 30)
        assert [len(one.position) for one in run(cache, 17, 17)] == [17]
        assert [len(one.position) for one in run(cache, 5, 5)] == [10]
        assert cache.kept() == 25

    def test_one_token_at_a_time_where_the_policy_asks_for_no_more(self) -> None:
        gone = run(MemDecayCache(MODEL, budget=20, policy="streaming", page_size=1), 30)
        assert [len(one.position) for one in gone] == [1] * 10

    @torch.no_grad()
    def test_the_logits_are_those_of_the_oracle(self) -> None:
        cache = MemDecayCache(MODEL, budget=30, policy=MemDecay(sinks=2, recent=4))
        record = Record(MODEL, cache)
        ids = tokens(90)
        for at in range(0, 90, 6):
            MODEL(input_ids=ids[:, at : at + 6], cache=cache)
            assert cache.kept() <= 30
        assert cache.evicted_tokens >= 60 and len(record.events[0]) < 10
        expected = oracle(MODEL, ids, record.events[0])
        said = torch.stack([one for _, one in record.logits[0]])
        assert close(said, expected[5::6])

    def test_pins_are_never_broken_and_less_goes_where_less_is_free(self) -> None:
        cache = MemDecayCache(MODEL, budget=30, policy=Oldest())
        cache.label(["user"] * 25, pinned=True)
        gone = run(cache, 60)
        assert kept(cache)[:25] == list(range(25))
        # Five slots are left beside the pins; all of them are freed, not ten.
        assert [len(one.position) for one in gone][:3] == [5, 5, 5]
        full = MemDecayCache(MODEL, budget=30, policy=Oldest())
        full.label(["user"] * 30, pinned=True)
        run(full, 30)
        with pytest.raises(BudgetError):
            run(full, 1)
        assert kept(full) == list(range(30))

    def test_the_page_being_filled_stays(self) -> None:
        cache = MemDecayCache(MODEL, budget=12, policy=Oldest(), page_size=8)
        gone = run(cache, 13)
        assert [one.position.tolist() for one in gone] == [list(range(8))]
        assert kept(cache) == [8, 9, 10, 11, 12]

    def test_what_is_preferred_goes_only_when_it_must(self) -> None:
        """Nobody needs ten tokens, so what the policy would rather keep is not given for them."""
        cache = MemDecayCache(MODEL, budget=20, policy=Guarded())
        gone = run(cache, 26)
        for one, seen in zip(gone, (20, 23), strict=True):
            assert len(one.position) == 3 and int(one.position.max()) < seen - 17
        forced = run(cache, 8, 8)
        assert [len(one.position) for one in forced] == [8]

    def test_each_row_of_a_batch_frees_its_own(self) -> None:
        cache = MemDecayCache(MODEL, budget=30, policy=Oldest())
        ids = tokens(60, rows=2)
        mask = torch.ones_like(ids)
        mask[0, :8] = 0
        gone: list[Evicted] = []
        cache.on_evict = gone.append
        with torch.no_grad():
            for at in range(60):
                end = at + 1
                MODEL(
                    input_ids=ids[:, at:end],
                    attention_mask=mask[:, :end],
                    position_ids=(mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, -1:],
                    cache=cache,
                )
                assert all(ledger.length <= 30 for ledger in cache.ledgers)
        for row, seen in ((0, 52), (1, 60)):
            own = [one.position.tolist() for one in gone if one.row == row]
            assert own == [list(range(n, n + 10)) for n in range(0, 10 * -(-(seen - 30) // 10), 10)]


class TestExact:
    def test_shrinking_and_plans_free_no_more_than_asked(self) -> None:
        cache = MemDecayCache(MODEL, budget=40, policy=Oldest())
        run(cache, 40, 40)
        ledger = cache.ledgers[0]
        for excess in (1, 3, 9, 10, 11):
            assert int(ledger.plan(excess, 40.0).sum()) == excess
        for budget in (39, 36, 20):
            cache.shrink(budget)
            assert cache.kept() == budget
        assert kept(cache) == list(range(20, 40))
        cache.evict([25])
        assert cache.kept() == 19

    @pytest.mark.parametrize("name", ["memdecay", "memdecay-replay"])
    def test_that_of_the_evidence_policies_too(self, name: str) -> None:
        cache = MemDecayCache(MODEL, budget=None, policy=name)
        run(cache, 60, 20)
        for budget in (59, 57, 31):
            cache.shrink(budget)
            assert cache.kept() == budget
