"""MemDecay: what was looked at in a few telling heads stays, however long ago that was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from memdecay.evidence import READ, EvidenceHead
from memdecay.policy import evidence
from memdecay.policy.base import Policy, Tokens, check_parameter
from memdecay.regions import Profile

CALLS = "tool_in"
"""The region of tool calls."""


def peak_columns(count: int) -> dict[str, float]:
    """Return the columns of so many evidence heads, and that of usage."""
    return {"usage": 0.0, **{f"peak_{number}": 0.0 for number in range(count)}}


@dataclass(frozen=True)
class MemDecay(Policy):
    """Keep what evidence heads looked at, and what all heads use; pin instructions.

    The score of a token is the greater of two claims, both about 0 for an ordinary token, and a
    little of the paper's prior (`memdecay.policy.evidence` has the equations):

    - evidence: the highest attention it ever got in the evidence heads of the profile, weighed,
      shared with its neighbours and carried to the words before it. These are facts that may be
      asked for, however long ago they came;
    - usage: all attention that its passage of 16 tokens got on the average of all heads, less an
      offset. This is text that the model goes on from, such as its own calls and answers, which
      it repeats by following it token by token; no question asks for it.

    Neither fades, which is what the paper loses by: its prior forgets an old fact that nobody
    happened to look at lately. Without evidence heads, as for a model that was never calibrated,
    usage and the prior are all there is.

    Evicted last, whatever they score, are sinks, the newest tokens and, if `calls_share` is not 0,
    the most used tokens of tool calls. An agent goes on from the form of its calls, unless pinned
    instructions say it as well.

    Args:
        usage_offset: standard deviations that usage must exceed evidence by.
        lead: positions before evidence that have a part in it; a question finds it by them.
        prior_weight: γ, of the region's log prior log b_r - λ_r Δt, Δt since insertion.
        sinks: first tokens that stay, as idle attention rests on them.
        recent: newest tokens that stay; nothing has read them yet, so nothing speaks for them.
        recent_share: more of them stay if this share of what pins leave of the budget is more.
        calls_share: share of what pins leave that is for the most used tokens of tool calls; pinned
            calls do not count, and of pages of P tokens a P-th as many tokens keep theirs.

    Raises:
        PolicyError: a parameter is outside its range.
    """

    name: ClassVar[str] = "memdecay"
    summary: ClassVar[str] = "what a few telling heads once looked at stays, and what all use"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "heads", "labels"})
    most_heads: ClassVar[int] = 12
    """Evidence heads that it goes by at most, the first of the profile's."""
    columns: ClassVar[Mapping[str, float]] = peak_columns(most_heads)
    page_size: ClassVar[int] = 1
    evict_at_least: ClassVar[int] = 16
    use: ClassVar[str] = "read"
    """Which set of evidence heads it goes by."""

    usage_offset: float = 0.5
    lead: int = 5
    prior_weight: float = 0.1
    sinks: int = 4
    recent: int = 8
    recent_share: float = 0.125
    calls_share: float = 0.0

    def __post_init__(self) -> None:
        """Refuse parameters outside their ranges."""
        check_parameter(self, "usage_offset")
        check_parameter(self, "lead", integer=True)
        check_parameter(self, "prior_weight")
        check_parameter(self, "sinks", integer=True)
        check_parameter(self, "recent", integer=True)
        check_parameter(self, "recent_share", below=1)
        check_parameter(self, "calls_share", below=1)

    def evidence_heads(self, profile: Profile) -> tuple[EvidenceHead, ...]:
        """Return the heads it goes by, as many as it has columns for."""
        return profile.evidence.get(self.use, ())[: self.most_heads]

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        """Return those of them that are watched while tokens are read."""
        return [(one.layer, one.head) for one in self.evidence_heads(profile) if one.when == READ]

    def observe_heads(self, tokens: Tokens, peak: Tensor, profile: Profile) -> Mapping[str, Tensor]:
        """Remember the highest attention in each watched head."""
        watched = [n for n, one in enumerate(self.evidence_heads(profile)) if one.when == READ]
        return {
            f"peak_{number}": evidence.peak(tokens.state[f"peak_{number}"], now)
            for number, now in zip(watched, peak, strict=True)
        }

    def observe(
        self, tokens: Tokens, attention_mass: Tensor, profile: Profile
    ) -> Mapping[str, Tensor]:
        """Add the attention on the average of all heads."""
        return {"usage": evidence.accumulated(tokens.state["usage"], attention_mass)}

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return the retention score, (kv_len,) float32."""
        base_priority, decay_rate, _ = profile.tensors(tokens.region.device)
        prior = evidence.log_prior(
            base_priority.index_select(0, tokens.region),
            decay_rate.index_select(0, tokens.region),
            tokens.now - tokens.inserted_at,
        )
        usage = evidence.passage(tokens.state["usage"], tokens.position)
        usage = evidence.standardised(evidence.log_usage(usage))
        said = self.said(tokens, profile)
        if said is None:
            return evidence.score(usage, usage, prior, self.prior_weight)
        said = evidence.standardised(evidence.shared(said, tokens.position))
        said = evidence.carried(said, tokens.position, self.lead)
        return evidence.score(said, usage - self.usage_offset, prior, self.prior_weight)

    def said(self, tokens: Tokens, profile: Profile) -> Tensor | None:
        """Return what the evidence heads say of each token, (kv_len,) float32; None without any."""
        heads = self.evidence_heads(profile)
        peaks = [tokens.state[f"peak_{number}"] for number in range(len(heads))]
        return evidence.evidence(peaks, heads) if heads else None

    def protected(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return sinks, the newest tokens and what `calls_share` keeps, (kv_len,) bool."""
        newest = max(self.recent, int(self.recent_share * tokens.room))
        protected = tokens.first(self.sinks) | tokens.latest(newest)
        # A page stays for one token of it, so that the share holds if each is in a page of its own.
        count = int(self.calls_share * tokens.room) // tokens.page_size
        if count and not profile.regions[CALLS].pinned:
            calls = (tokens.region == profile.id(CALLS)) & ~tokens.pinned
            protected |= evidence.most_used(tokens.state["usage"], tokens.position, calls, count)
        return protected
