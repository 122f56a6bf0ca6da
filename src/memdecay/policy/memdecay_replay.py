"""MemDecay with replay: the model repeats what is kept while it waits, and that tells more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.evidence import READ
from memdecay.policy import evidence
from memdecay.policy.base import Tokens
from memdecay.policy.memdecay import MemDecay, peak_columns
from memdecay.regions import Profile


@dataclass(frozen=True)
class MemDecayReplay(MemDecay):
    """`memdecay`, with heads that are watched while the model repeats the context as well.

    To repeat a token the model must look at it, and some heads look at what cannot be guessed.
    Replay runs in idle time (`Session.idle`); tokens that were not repeated yet are judged by
    what was seen while reading. The arguments and errors are those of `memdecay`.
    """

    name: ClassVar[str] = "memdecay-replay"
    summary: ClassVar[str] = "memdecay that also repeats what it keeps, in idle time"
    needs: ClassVar[frozenset[str]] = MemDecay.needs | {"replay"}
    most_heads: ClassVar[int] = 20
    columns: ClassVar[Mapping[str, float]] = peak_columns(most_heads)
    use: ClassVar[str] = "replay"

    def on_replay(
        self, tokens: Tokens, attention: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Remember the highest attention in each head that is watched at replay."""
        return {
            f"peak_{number}": evidence.peak(
                tokens.state[f"peak_{number}"], attention[one.layer, one.head]
            )
            for number, one in enumerate(self.evidence_heads(profile))
            if one.when != READ
        }

    def said(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        """Return what the heads say; of what was not repeated yet, those that are for reading."""
        everything = super().said(tokens, profile)
        if everything is None or bool(tokens.replayed.all()):
            return everything
        watched = {
            (one.layer, one.head): number
            for number, one in enumerate(self.evidence_heads(profile))
            if one.when == READ
        }
        alone = profile.evidence.get(MemDecay.use, ())
        if not alone or not {(one.layer, one.head) for one in alone} <= set(watched):
            alone = tuple(one for one in self.evidence_heads(profile) if one.when == READ)
        if not alone:
            return everything
        peaks = [tokens.state[f"peak_{watched[one.layer, one.head]}"] for one in alone]
        return torch.where(tokens.replayed, everything, evidence.evidence(peaks, alone))
