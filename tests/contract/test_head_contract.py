"""The contract of policies by head: kept by good ones, and not vacuous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.head_helpers import ByChance, Looked
from memdecay.policy import Policy, Tokens, testing
from memdecay.regions import Profile


class NotForLost(Looked):
    """NaN where a head holds nothing, which no one may look at."""

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return super().head_score(tokens, profile).where(tokens.held, torch.nan)


@pytest.mark.parametrize("policy", [ByChance(), Looked(), NotForLost()], ids=repr)
@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_good_policies_pass(check: Callable[[Policy], None], policy: Policy) -> None:
    if check is not testing.check_identity:  # these are not installed
        check(policy)


class WrongShape(ByChance):
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return super().head_score(tokens, profile)[:1]


class WrongDtype(ByChance):
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return super().head_score(tokens, profile).double()


class Infinite(ByChance):
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return super().head_score(tokens, profile) / (tokens.position > 8)


class SlotOrder(ByChance):
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.arange(tokens.held.numel()).view(tokens.held.shape).float()


class Mutating(Looked):
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.head_state["share"].mul_(0.5)


@pytest.mark.parametrize("broken", [WrongShape, WrongDtype, Infinite, SlotOrder, Mutating])
def test_a_broken_score_is_caught(broken: type[Policy]) -> None:
    with pytest.raises(AssertionError):
        testing.check_heads(broken())


class Undeclared(Looked):
    head_columns: ClassVar[Mapping[str, float]] = {"share": 0.5}


class Flat(Looked):
    def on_insert(self, tokens: Tokens) -> Mapping[str, Tensor]:
        return {"born": tokens.position.float()}


class TwoOfOneName(Looked):
    columns: ClassVar[Mapping[str, float]] = {"mass": 0.0, "share": 0.0}


@pytest.mark.parametrize("broken", [Undeclared, Flat, TwoOfOneName])
def test_broken_columns_are_caught(broken: type[Policy]) -> None:
    with pytest.raises(AssertionError):
        testing.check_columns(broken())
