"""Random: the paper's lower bound, a uniform sample of the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.policy.base import Policy, Tokens, check_parameter
from memdecay.regions import Profile

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Policy):
    """Keep sinks, a recent window, and a uniform sample of the rest (section IV-C).

    A token's score is a hash of the seed and its position, so a run repeats exactly and a token
    does not get a new chance at every eviction.

    Args:
        seed: which sample.
        sinks: tokens at the start of the sequence that stay.
        recent: most recent tokens that stay.

    Raises:
        PolicyError: a parameter is not an integer of at least 0.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "sinks, the most recent tokens and a uniform sample; the lower bound"

    seed: int = 0
    sinks: int = 4
    recent: int = 16

    def __post_init__(self) -> None:
        """Refuse parameters that are not integers of at least 0."""
        check_parameter(self, "seed", integer=True, below=2**32)
        check_parameter(self, "sinks", integer=True)
        check_parameter(self, "recent", integer=True)

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return a number in [0, 1) that looks uniform, (kv_len,) float32."""
        mixed = _mix(_mix(tokens.position + 1) ^ _mix(torch.full_like(tokens.position, self.seed)))
        # 24 bits, because a float32 holds no more exactly.
        return (mixed >> 8).to(torch.float32) / 2**24

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return sinks and recent window, (kv_len,) bool."""
        return tokens.first(self.sinks) | tokens.latest(self.recent)


def _mix(value: Tensor) -> Tensor:
    """Scramble integers into 32 bits (Wellons' `lowbias32`), exactly alike on every device."""
    value = value & _MASK
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)
