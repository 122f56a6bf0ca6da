"""MemDecay with replay: the model repeats what is kept while it waits, and that tells more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memdecay.evidence import READ, EvidenceHead
from memdecay.policy import evidence
from memdecay.policy.base import Tokens
from memdecay.policy.memdecay import MemDecay
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
    use: ClassVar[str] = "replay"

    usage_offset: float = 2.0

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

    def said(self, tokens: Tokens, heads: Sequence[EvidenceHead]) -> Tensor | None:
        """Return what the heads say, those of the replay only of what has been repeated."""
        everything = super().said(tokens, heads)
        reading = [(n, one) for n, one in enumerate(heads) if one.when == READ]
        if everything is None or not reading or bool(tokens.replayed.all()):
            return everything
        peaks = [tokens.state[f"peak_{number}"] for number, _ in reading]
        only_read = evidence.evidence(peaks, [one for _, one in reading])
        return torch.where(tokens.replayed, everything, only_read)
