"""The contract is not vacuous: for each check there is a policy that breaks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from memdecay.errors import PolicyError
from memdecay.policy import Policy, Tokens, get_policy, testing
from memdecay.regions import Profile


@dataclass(frozen=True)
class Good(Policy):
    name: ClassVar[str] = "streaming"  # an installed name, so that its config is found
    summary: ClassVar[str] = "recency"

    sinks: int = 4

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.position.to(torch.float32)


class WrongShape(Good):
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.zeros(tokens.kv_len + 1)


class WrongDtype(Good):
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.position


class Infinite(Good):
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.where(tokens.position < 4, torch.inf, 0.0)


class Mutating(Good):
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.inserted_at.add_(1)


@dataclass(frozen=True)
class Stateful(Good):
    calls: list[int] = field(default_factory=list)

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        self.calls.append(1)
        return tokens.position.to(torch.float32) + len(self.calls)


class SlotOrder(Good):
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.arange(tokens.kv_len, dtype=torch.float32)


class Undeclared(Good):
    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"importance": attention_mass}


class UndeclaredReplay(Good):
    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"importance": attention.amax((0, 1))}


class ReplayOfAnotherShape(Good):
    columns: ClassVar[Mapping[str, float]] = {"importance": 0.0}

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"importance": attention}


class ReplayMutating(Good):
    columns: ClassVar[Mapping[str, float]] = {"importance": 0.0}

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"importance": attention.mul_(2).amax((0, 1))}


@dataclass(frozen=True)
class Heads(Good):
    needs = frozenset({"heads"})
    columns: ClassVar[Mapping[str, float]] = {"importance": 0.0}

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        return [(0, 0), (1, 1)]


class UndeclaredHeads(Heads):
    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        return {"other": peak.amax(0)}


class HeadsOfAnotherShape(Heads):
    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        return {"importance": peak}


class HeadsMutating(Heads):
    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        return {"importance": peak.mul_(2).amax(0)}


class SurprisalMutating(Good):
    needs = frozenset({"surprisal"})

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.surprisal.mul_(2)


class ProtectsBadly(Good):
    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        return (tokens.position < 4).float()


class ProtectsAll(Good):
    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        return torch.ones(tokens.kv_len, dtype=torch.bool)


class HidesNaN(Good):
    needs = frozenset({"attention"})
    columns: ClassVar[Mapping[str, float]] = {"mass": 0.0}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        return {"mass": torch.nan_to_num(attention_mass)}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        return tokens.state["mass"]


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        ("check_identity", Good),  # it is not what its config makes
        ("check_score", WrongShape),
        ("check_score", WrongDtype),
        ("check_score", Infinite),
        ("check_pure", Mutating),
        ("check_pure", Stateful),
        ("check_deterministic", Stateful),
        ("check_permutation", SlotOrder),
        ("check_columns", Undeclared),
        ("check_columns", UndeclaredReplay),
        ("check_columns", ReplayOfAnotherShape),
        ("check_pure", ReplayMutating),
        ("check_columns", UndeclaredHeads),
        ("check_columns", HeadsOfAnotherShape),
        ("check_pure", HeadsMutating),
        ("check_pure", SurprisalMutating),
        ("check_protected", ProtectsBadly),
        ("check_protected", ProtectsAll),
        ("check_nan", HidesNaN),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_policy_is_caught(check: str, broken: type[Policy]) -> None:
    with pytest.raises((AssertionError, TypeError)):
        getattr(testing, check)(broken())


@pytest.mark.parametrize("broken", [WrongShape, WrongDtype, Infinite])
def test_selection_refuses_a_broken_score(broken: type[Policy]) -> None:
    with pytest.raises(PolicyError, match="streaming"):
        testing.sample(broken()).plan(broken(), 1)


def test_a_broken_selection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the shared selection fail when it evicts nothing, everything or backwards."""
    streaming = get_policy("streaming")
    failing: dict[str, set[str]] = {}
    for label, plan in {
        "nothing": lambda tokens, *args, **kw: torch.zeros(tokens.kv_len, dtype=torch.bool),
        "everything": lambda tokens, *args, **kw: torch.ones(tokens.kv_len, dtype=torch.bool),
        "newest": lambda tokens, *args, **kw: (
            tokens.position >= tokens.position.sort().values[-max(kw["excess"], 1)]
        ),
    }.items():
        monkeypatch.setattr(testing, "plan_eviction", plan)
        failing[label] = set()
        for check in testing.CHECKS:
            try:
                check(streaming)
            except AssertionError:
                failing[label].add(check.__name__)
    assert failing["nothing"] >= {"check_budget", "check_pins", "check_one_page"}
    assert failing["everything"] >= {"check_budget", "check_pins", "check_unbound"}
    assert failing["newest"] >= {"check_unbound", "check_protected", "check_pins", "check_ties"}
