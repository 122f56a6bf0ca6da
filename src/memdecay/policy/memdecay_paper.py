"""The paper's MemDecay: region priors that decay, reset by attention (section III of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from memdecay.errors import PolicyError
from memdecay.policy import retention
from memdecay.policy.base import Policy, Tokens, check_choice, check_parameter
from memdecay.policy.retention import Scaled
from memdecay.regions import Profile

_TWICE_UNIFORM = Scaled(2.0)


@dataclass(frozen=True)
class MemDecayPaper(Policy):
    """The paper's policy: Algorithm 1 with the score of equation (4).

    Args:
        smoothing: ρ in [0, 1), of equation (2).
        attention_weight: α, at least 0, of equation (4).
        refresh_threshold: τ of equation (3), a share of one query's attention, or `Scaled(c)`
            for c / |K_t|; `{"scale": c}` means the same.
        init: "first" starts a token's importance at its first observed mass; "zero" starts it
            at 0, the letter of equation (2).

    Raises:
        PolicyError: a parameter is outside its range.
    """

    name: ClassVar[str] = "memdecay-paper"
    summary: ClassVar[str] = "region priors that decay, refreshed by attention; the paper"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "labels"})
    columns: ClassVar[Mapping[str, float]] = {"importance": 0.0, "refreshed_at": 0.0}

    smoothing: float = 0.9
    attention_weight: float = 0.5
    refresh_threshold: float | Scaled = _TWICE_UNIFORM
    init: str = "first"

    def __post_init__(self) -> None:
        """Refuse parameters outside the paper's ranges."""
        check_parameter(self, "smoothing", below=1)
        check_parameter(self, "attention_weight")
        check_choice(self, "init", ("first", "zero"))
        object.__setattr__(self, "refresh_threshold", _threshold(self.refresh_threshold))

    def on_insert(self, tokens: Tokens) -> Mapping[str, Tensor]:
        """Start the decay clock at the insertion step, the second case of equation (3)."""
        return {"refreshed_at": tokens.inserted_at}

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Update importance and decay clocks, lines 1 and 2 of Algorithm 1."""
        first = tokens.num_observed == 0 if self.init == "first" else None
        tau = retention.threshold(self.refresh_threshold, tokens.kv_len)
        return {
            "importance": retention.importance(
                tokens.state["importance"], attention_mass, self.smoothing, first
            ),
            "refreshed_at": retention.refresh(
                tokens.state["refreshed_at"], attention_mass, tau, tokens.now
            ),
        }

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the retention score, equation (4), (kv_len,) float32."""
        base_priority, decay_rate, _ = profile.tensors(tokens.region.device)
        prior = retention.decayed_prior(
            base_priority.index_select(0, tokens.region),
            decay_rate.index_select(0, tokens.region),
            tokens.now - tokens.state["refreshed_at"],
        )
        return retention.score(prior, tokens.state["importance"], self.attention_weight)


def _threshold(value: Any) -> float | Scaled:
    """Accept τ as a number, as `Scaled`, or as the mapping that `policy_config` makes of it."""
    if isinstance(value, Mapping) and set(value) == {"scale"}:
        value = Scaled(value["scale"])
    number = value.scale if isinstance(value, Scaled) else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < math.inf:
        raise PolicyError(
            f"refresh_threshold of policy {MemDecayPaper.name!r} is {value!r}, but it must be a "
            f"finite number of at least 0, or Scaled(c) with such a number."
        )
    return value if isinstance(value, Scaled) else float(number)
