"""What a condition keeps of a recorded episode: the engine's own bookkeeping, run over its tape."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memdecay.calibration.player import Observation, Tape
from memdecay.engine.heads import HeadLedger
from memdecay.engine.ledger import Labels, Ledger
from memdecay.errors import BudgetError
from memdecay.policy import get_policy
from memdecay.regions import Profile, RegionPolicy
from memdecay.study.conditions import Condition

_TRIES = 100
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Seen:
    """What heads were seen to attend to in one episode.

    Args:
        heads: (layer, query head) of each head that was watched while reading.
        peaks: (len(heads), seq_len) float32, the most attention that each token got in each.
        replay: (num_layers, num_heads, seq_len) float32, the same while the model repeated the
            context; None if it did not.
        shape: layers of the model and KV heads of a layer; needed where heads keep their own.
    """

    heads: tuple[tuple[int, int], ...]
    peaks: Tensor
    replay: Tensor | None = None
    shape: tuple[int, int] | None = None

    def tell(self, ledger: Ledger, now: float) -> None:
        """Let the policy of a ledger that holds all tokens learn what it asks for (mutates)."""
        policy, profile = ledger.policy, ledger.profile
        if "heads" in policy.needs and (asked := policy.heads(profile)):
            ledger.observe_heads(self.peaks[[self.heads.index(head) for head in asked]], now)
        if "replay" in policy.needs:
            assert self.replay is not None
            ledger.replayed(torch.arange(ledger.length), self.replay, now)


def budget_tokens(share: float, seq_len: int) -> int:
    """Return B = ⌊share · n⌋ (section IV-A)."""
    return int(share * seq_len)


def keep_sets(
    tape: Tape,
    observations: Sequence[Observation],
    condition: Condition,
    profile: Profile,
    budgets: Sequence[int],
    evidence: Seen | None = None,
) -> list[Tensor]:
    """Return what is kept when a policy that watched the episode evicts once, at its end.

    Args:
        tape: the episode's tokens.
        observations: its attention.
        condition: the policy and how it is run; not the oracle.
        profile: the region policies that it uses.
        budgets: tokens to keep at most, each on its own.
        evidence: what heads were seen to attend to, for a policy that asks for it.

    Returns:
        For each budget the (n,) int64 positions kept, ascending; for a policy whose keep set
        differs by head, (num_layers, num_kv_heads, seq_len) bool, what each head keeps.

    Raises:
        BudgetError: what is pinned does not fit.
    """
    if condition.policy == "full":
        return [torch.arange(len(tape.ids)) for _ in budgets]
    if condition.labels == "shuffled":
        return _shuffled(tape, observations, condition, profile, budgets, evidence)
    regions = tape.regions
    if condition.labels == "noise":
        regions = noisy(tape, condition.noise, profile, condition.seed)
    ledger = ledger_after(tape, observations, condition, profile, regions, evidence)
    return [_kept(ledger, budget, observations[-1].now, condition) for budget in budgets]


def ledger_after(
    tape: Tape,
    observations: Sequence[Observation],
    condition: Condition,
    profile: Profile,
    regions: Sequence[str],
    evidence: Seen | None = None,
) -> Ledger:
    """Return the ledger of a policy that saw these tokens and this attention, nothing evicted."""
    policy = get_policy(condition.policy, **condition.params)
    if condition.pinned is False:
        profile = unpinned(profile)
    names = {name: profile.id(name) for name in set(regions)}
    region = torch.tensor([names[name] for name in regions])
    span = torch.tensor(tape.spans)
    pins = torch.zeros(len(regions), dtype=torch.bool)
    if condition.pinned:  # for a policy that does not ask for labels
        pins = profile.tensors()[2][region]
    kind: type[Ledger] | functools.partial[HeadLedger] = Ledger
    if policy.per_head:
        assert evidence is not None and evidence.shape is not None
        layers, kv_heads = evidence.shape
        kind = functools.partial(HeadLedger, layers=layers, heads=kv_heads)
    ledger = kind(
        policy,
        profile,
        capacity=len(regions),
        page_size=condition.page_size,
        align=condition.align,
        window=1,
        device=_CPU,
    )

    def enter(until: int) -> None:
        while ledger.seen < until:
            start = ledger.seen
            end = start + 1
            while end < until and (tape.inserted_at[end], bool(pins[end])) == (
                tape.inserted_at[start],
                bool(pins[start]),
            ):
                end += 1
            labels = Labels(region[start:end], span[start:end], bool(pins[start]))
            now = float(tape.inserted_at[start] if condition.clock == "steps" else start)
            arrival: Tensor | float = now
            if condition.clock == "tokens":
                arrival = torch.arange(start, end, dtype=torch.float32)
            ledger.append(labels, now, arrival)

    if not policy.needs & {"attention"}:
        observations = observations[-1:]
    if condition.last is not None:
        steps = [observation for observation in observations if observation.decoding]
        observations = steps[-condition.last :]
    for observation in observations:
        enter(len(observation.mass))
        skipped = observation.decoding and observation.now % condition.observe_every
        if "attention" in policy.needs and not skipped:
            ledger.observe(observation.mass, _clock(ledger, observation.now, condition))
    enter(len(regions))
    if evidence is not None:
        evidence.tell(ledger, _clock(ledger, observations[-1].now, condition))
    return ledger


def _clock(ledger: Ledger, steps: int, condition: Condition) -> float:
    return float(steps if condition.clock == "steps" else ledger.seen)


def _kept(ledger: Ledger, budget: int, steps: int, condition: Condition) -> Tensor:
    gone = ledger.plan(ledger.over(budget), _clock(ledger, steps, condition))
    return ~gone if ledger.policy.per_head else ledger["position"][~gone].clone()


def kept_count(kept: Tensor) -> int:
    """Return how many tokens a keep set takes the room of, rounded up."""
    if kept.dim() == 1:
        return len(kept)
    layers, heads, _ = kept.shape
    return -(-int(kept.sum()) // (layers * heads))


def unpinned(profile: Profile) -> Profile:
    """Return the profile with no region pinned."""
    for name, region in profile.regions.items():
        if region.pinned:
            loose = RegionPolicy(region.base_priority, region.decay_rate, pinned=False)
            profile = profile.with_region(name, loose)
    return profile


# Labels that are wrong on purpose


def runs(regions: Sequence[str]) -> list[tuple[int, int]]:
    """Return (start, end) of every run of tokens of one region."""
    starts = [n for n in range(len(regions)) if n == 0 or regions[n] != regions[n - 1]]
    return list(zip(starts, [*starts[1:], len(regions)], strict=True))


def noisy(tape: Tape, share: float, profile: Profile, seed: int) -> list[str]:
    """Return the labels with a share of the spans mislabelled, drawn anew for each span.

    A wrong label is one of the unpinned regions: a span may lose its pin, and none gains one,
    as pins beyond the budget would be refused by the engine.
    """
    wrong = [name for name, region in profile.regions.items() if not region.pinned]
    draw = _random(seed, share, tape)
    regions = [*tape.regions]
    for start, end in runs(tape.regions):
        hit, other = draw.random() < share, draw.choice(wrong)
        while other == tape.regions[start]:
            other = draw.choice(wrong)
        if hit:
            regions[start:end] = [other] * (end - start)
    return regions


def _shuffled(
    tape: Tape,
    observations: Sequence[Observation],
    condition: Condition,
    profile: Profile,
    budgets: Sequence[int],
    evidence: Seen | None,
) -> list[Tensor]:
    """Deal the spans' labels out anew, until what is pinned fits."""
    draw = _random(condition.seed, "shuffled", tape)
    spans = runs(tape.regions)
    problem: BudgetError | None = None
    for _ in range(_TRIES):
        dealt = [tape.regions[start] for start, _ in spans]
        draw.shuffle(dealt)
        regions = [
            name for name, (start, end) in zip(dealt, spans, strict=True) for _ in range(start, end)
        ]
        ledger = ledger_after(tape, observations, condition, profile, regions, evidence)
        try:
            return [_kept(ledger, budget, observations[-1].now, condition) for budget in budgets]
        except BudgetError as error:
            problem = error
    assert problem is not None
    raise problem


def _random(seed: int, use: object, tape: Tape) -> random.Random:
    """Return numbers that depend on the episode, so that all do not get the same luck."""
    digest = hashlib.sha256(repr((seed, use, tape.ids)).encode()).hexdigest()
    return random.Random(digest)


def oracle(mass: Tensor, where: tuple[int, int], budget: int, around: int = 16) -> Tensor:
    """Return what one keeps who knows the question: the fact, and what the question attends to.

    Args:
        mass: (seq_len,) what question and right answer attended to.
        where: (first, last + 1) position of the asked value.
        budget: tokens to keep.
        around: tokens kept on each side of the value.

    Returns:
        (budget,) int64 positions, ascending.
    """
    score = mass.double().clone()
    most = score.sum() + 1
    score[max(0, where[0] - around) : where[1] + around] += most
    score[where[0] : where[1]] += most  # first of all, should the budget be tiny
    return torch.topk(score, min(budget, len(score))).indices.sort().values


def digest(kept: Tensor) -> str:
    """Return a short name of a keep set."""
    return hashlib.sha256(
        (kept if kept.dim() > 1 else kept.to(torch.int64)).numpy().tobytes()
    ).hexdigest()[:16]
