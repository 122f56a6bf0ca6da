"""What a policy is: a pure function from the kept tokens to a score per token."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.errors import PolicyError
from memdecay.regions import Profile

NEEDS = frozenset({"attention", "heads", "labels", "replay", "surprisal"})
"""What a policy may ask for; see `Policy.needs`."""


@dataclass(frozen=True)
class Tokens:
    """The kept tokens of one sequence, in slot order, which is not the order of positions.

    Args:
        position: (kv_len,) int64, true position in the sequence; no two are equal.
        region: (kv_len,) int64, index into the profile.
        span: (kv_len,) int64, the message part a token came from, increasing with time.
        inserted_at: (kv_len,) float32, clock reading at arrival, in steps.
        num_observed: (kv_len,) int32, observations that have covered the token so far.
        now: clock reading, in steps.
        seq_len: tokens seen so far, kept or not.
        state: the policy's own columns, name -> (kv_len,) float32.
        head_state: its own columns by head, name -> (num_layers, num_kv_heads, kv_len) float32.
        held: (num_layers, num_kv_heads, kv_len) bool, which heads keep the token; each token is
            kept by one at least. None where all heads keep the same tokens.
        surprisal: (kv_len,) float32, -log p of the token in nats, given what was kept when it was
            read; 0 where that is unknown (the first token, a token that is just arriving, input
            embeddings) and for a policy that does not need "surprisal".
        replayed: (kv_len,) bool, whether the token has been repeated to the model (`on_replay`).
        room: how many of these tokens the eviction that is planned leaves beside pinned ones, about
            what the budget has for them; kv_len if none is planned. By head it is their mean.
    """

    position: Tensor
    region: Tensor
    span: Tensor
    inserted_at: Tensor
    num_observed: Tensor
    now: float
    seq_len: int
    state: Mapping[str, Tensor] = field(default_factory=dict)
    head_state: Mapping[str, Tensor] = field(default_factory=dict)
    held: Tensor | None = None
    surprisal: Tensor = field(default=None)  # type: ignore[assignment]
    replayed: Tensor = field(default=None)  # type: ignore[assignment]
    room: int = -1
    pinned: Tensor = field(default=None)  # type: ignore[assignment]
    page_size: int = 1

    def __post_init__(self) -> None:
        """Say "unknown", "no" and "all" where nothing is said."""
        zero = self.position.new_zeros((), dtype=torch.float32).expand(self.position.shape)
        if self.surprisal is None:
            object.__setattr__(self, "surprisal", zero)
        if self.replayed is None:
            object.__setattr__(self, "replayed", zero > 0)
        if self.pinned is None:
            object.__setattr__(self, "pinned", zero > 0)
        if self.room < 0:
            object.__setattr__(self, "room", self.kv_len)

    @property
    def kv_len(self) -> int:
        """The number of kept tokens."""
        return self.position.shape[0]

    def first(self, count: int) -> Tensor:
        """Return (kv_len,) bool: the first `count` positions of the sequence (the sinks)."""
        return self.position < count

    def latest(self, count: int) -> Tensor:
        """Return (kv_len,) bool: the last `count` positions of the sequence (the window)."""
        return self.position >= self.seq_len - count


class Policy(abc.ABC):
    """What to forget first: a score for every kept token; higher stays.

    A policy is a frozen dataclass whose fields are its parameters, checked when it is made. It
    holds no state, changes none of its inputs and selects nothing: what it remembers of a token
    is in the columns it declares, and pages, pins and the budget are `memdecay.policy.pages`.
    One instance may serve any number of sessions.
    """

    name: ClassVar[str]
    """The name of its entry point."""
    summary: ClassVar[str]
    """One line, for `memdecay policies` and the docs."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Of "attention" (then `observe` is called), "labels" (then pinned regions are held),
    "surprisal" (then `Tokens.surprisal` is filled), "heads" (then `observe_heads` is called) and
    "replay" (then `on_replay` is called)."""
    bounded: ClassVar[bool] = True
    """False for a policy that never evicts and so runs without a budget."""
    page_size: ClassVar[int] = 16
    """Tokens a page, where nobody says otherwise."""
    evict_at_least: ClassVar[int] = 1
    """Tokens to free at once when there is no room, so that small pages do not go one by one."""
    columns: ClassVar[Mapping[str, float]] = {}
    """Per-token state: column name -> its value for a token that has just arrived."""
    per_head: ClassVar[bool] = False
    """True if each KV head of each layer keeps its own tokens, by `head_score` (`HeadPolicy`)."""
    head_columns: ClassVar[Mapping[str, float]] = {}
    """State of each token in each head, in `Tokens.head_state`; only where `per_head` is True."""

    def on_insert(self, tokens: Tokens) -> Mapping[str, Tensor]:
        """Return the columns of tokens that have just arrived, where they are not the constant.

        Args:
            tokens: only the new tokens, their columns at the constants.

        Returns:
            column name -> (new tokens,) float32, or (num_layers, num_kv_heads, new tokens) for a
            column by head; columns left out keep their constant. It may be an argument itself, so
            the caller copies.
        """
        return {}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Return the columns after an observation of attention; nothing is mutated.

        Args:
            tokens: all kept tokens; `num_observed` does not count this observation yet.
            attention_mass: (kv_len,) float32, share of one query's attention, averaged over
                heads, layers and the query window.
            profile: the region policies.

        Returns:
            column name -> (kv_len,) float32, or (num_layers, num_kv_heads, kv_len) for a column
            by head; columns left out stay as they are. It may be an argument itself, so the
            caller copies.
        """
        return {}

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        """Return the (layer, query head) to watch at every query; asked if it needs "heads"."""
        return ()

    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        """Return the columns after a forward in which the heads were watched; nothing is mutated.

        Args:
            tokens: all kept tokens, those of this forward too.
            peak: (len(heads), kv_len) float32, the most attention that a query of this forward,
                other than the token's own, gave to each token in each watched head.
            profile: the region policies.

        Returns:
            column name -> (kv_len,) float32, or (num_layers, num_kv_heads, kv_len) for a column
            by head; columns left out stay as they are. It may be an argument itself, so the
            caller copies.
        """
        return {}

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Return the columns after some kept tokens were repeated; nothing is mutated.

        In idle time the model repeats what is kept, piece by piece, and what it looks at to do so
        is what it would miss. This is called once a piece, with the attention of that piece alone:
        combine it with a column of your own, such as `torch.maximum(tokens.state["seen"], ...)`.

        Args:
            tokens: all kept tokens; `replayed` does not count this piece yet.
            attention: (num_layers, num_heads, kv_len) float32, the most attention that a query of
                the piece gave to each kept token in each query head. The queries also see their
                own piece, so a query's shares of the kept sum to below 1. A layer or head that
                does not hold a token gives it 0.
            profile: the region policies.

        Returns:
            column name -> (kv_len,) float32, or (num_layers, num_kv_heads, kv_len) for a column
            by head, for which the query heads of a KV head are next to each other:
            `attention.unflatten(1, (num_kv_heads, -1)).amax(2)`. Columns left out stay as they
            are. It may be an argument itself, so the caller copies.
        """
        return {}

    @abc.abstractmethod
    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return (kv_len,) float32, finite: how much each token deserves to stay; no mutation."""

    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return (num_layers, num_kv_heads, kv_len) float32: what each head would rather keep.

        All heads of all layers share one budget, so scores are compared between heads. Those of
        tokens that a head does not hold are ignored; the others are finite. No mutation. Where
        this is not overridden all heads agree.
        """
        if tokens.held is None:
            raise PolicyError(
                f"Policy {self.name!r} was asked for scores by head, but all heads keep the same "
                f"tokens here."
            )
        return self.score(tokens, profile).expand(tokens.held.shape)

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        """Return (kv_len,) bool, tokens to evict only when nothing else is left, or None.

        Sinks and recent windows go here. A protection is never a big number in the score.
        """
        return None


class HeadPolicy(Policy):
    """A policy whose keep set differs by layer and KV head; it overrides `head_score`."""

    per_head: ClassVar[bool] = True

    @abc.abstractmethod
    def head_score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return (num_layers, num_kv_heads, kv_len) float32; see `Policy.head_score`."""

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return (kv_len,) float32, the mean over the heads that hold a token (for pictures)."""
        score = self.head_score(tokens, profile)
        if tokens.held is None:
            return score.mean((0, 1))
        return score.where(tokens.held, 0).sum((0, 1)) / tokens.held.sum((0, 1))


def check_parameter(
    policy: Policy,
    parameter: str,
    *,
    minimum: float = 0,
    below: float = math.inf,
    integer: bool = False,
) -> None:
    """Refuse a parameter of a policy that is not a number in `minimum <= value < below`.

    Raises:
        PolicyError: one sentence with the policy, the parameter, its value and what is allowed.
    """
    value = getattr(policy, parameter)
    allowed = f"{'an integer' if integer else 'a finite number'} of at least {minimum}"
    if below < math.inf:
        allowed += f" and below {below}"
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not minimum <= value < below:
        raise PolicyError(
            f"{parameter} of policy {policy.name!r} is {value!r}, but it must be {allowed}."
        )


def check_choice(policy: Policy, parameter: str, choices: tuple[str, ...]) -> None:
    """Refuse a parameter of a policy that is not one of `choices`.

    Raises:
        PolicyError: one sentence with the policy, the parameter, its value and what is allowed.
    """
    value = getattr(policy, parameter)
    if value not in choices:
        raise PolicyError(
            f"{parameter} of policy {policy.name!r} is {value!r}, "
            f"but it must be one of {', '.join(choices)}."
        )
