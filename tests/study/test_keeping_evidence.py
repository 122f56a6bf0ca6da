"""What evidence heads saw of a recording keeps what a cache that watched them itself keeps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from engine.sessions import tiny
from memdecay.calibration.player import Observation, Player, Script
from memdecay.engine import MemDecayCache
from memdecay.engine.replay import repeat_next, repeat_prompts
from memdecay.evidence import FLOOR, READ, REPLAY, EvidenceHead
from memdecay.policy import get_policy
from memdecay.regions import Profile
from memdecay.study.conditions import Condition
from memdecay.study.keeping import Seen, budget_tokens, keep_sets, kept_count
from study.test_keeping import PROFILE, STAGES, run_tape

WATCHED = ((0, 1), (1, 3), (2, 0), (3, 2))
REPEATED = ((1, 2), (3, 1))
CONDITIONS = [
    Condition("memdecay", "policy", "memdecay"),
    Condition("memdecay-replay", "policy", "memdecay-replay"),
    Condition("coarse", "policy", "memdecay", {"prior_weight": 0.0}, page_size=4),
    Condition("coarse-replay", "policy", "memdecay-replay", {"usage_offset": 3.0}, page_size=4),
]


@dataclass(frozen=True)
class Episode:
    """A recording, and a profile whose heads were scaled by it."""

    player: Player
    observations: list[Observation]
    seen: Seen
    profile: Profile

    @property
    def budgets(self) -> list[int]:
        return [budget_tokens(share, len(self.player.tape.ids)) for share in (0.6, 0.4)]

    def keeps(self, condition: Condition, seen: Seen | None = None) -> list[list[int]]:
        found = keep_sets(
            self.player.tape, self.observations, condition, self.profile, self.budgets, seen
        )
        return [kept.tolist() for kept in found]


def scaled(place: tuple[int, int], when: str, peaks: torch.Tensor, weight: float) -> EvidenceHead:
    logs = (peaks + FLOOR).log()
    return EvidenceHead(*place, when, weight, float(logs.mean()), float(logs.std()))


@functools.cache
def played() -> Episode:
    model, tokenizer = tiny("llama")
    heard: list[Observation] = []
    player = Player(
        model, tokenizer, Script("t", "t", STAGES, "So far"), listen=heard.append, heads=WATCHED
    )
    player.play()
    player.burst(8)
    seen = Seen(WATCHED, player.peaks.clone(), player.replay())
    read = [
        scaled(place, READ, seen.peaks[number], 1.0 + number)
        for number, place in enumerate(WATCHED)
    ]
    again = [scaled(place, REPLAY, seen.replay[place], 3.0) for place in REPEATED]
    # Sets of other heads in another order than they were watched in.
    profile = PROFILE.with_evidence(
        {"read": (read[3], read[0]), "replay": (again[0], read[2], again[1], read[1])}
    )
    observations = [replace(one, mass=one.mass.clone()) for one in heard]
    return Episode(player, observations, seen, profile)


@torch.no_grad()
def ran(condition: Condition) -> MemDecayCache:
    """Run the recorded tokens one decode step at a time, then repeat them."""
    model, tokenizer = tiny("llama")
    tape = played().player.tape
    cache = MemDecayCache(
        model,
        budget=None,
        policy=get_policy(condition.policy, **condition.params),
        profile=played().profile,
        page_size=condition.page_size,
    )
    for number, name in enumerate(tape.regions):
        cache.label([name], spans=[tape.spans[number]])
    run_tape(model, cache, tape)
    prompts = repeat_prompts(tokenizer)
    while len(cache.unreplayed()):
        count, attention = repeat_next(cache, prompts, tape.ids)
        assert count and attention is not None
    assert bool(cache.ledgers[0].tokens(0.0).replayed.all()) == ("replay" in condition.needs)
    return cache


def engine_keeps(condition: Condition) -> list[list[int]]:
    """What such a cache keeps when it evicts once."""
    cache, kept = ran(condition), []
    for budget in played().budgets:
        copy = cache.copy()
        copy.shrink(budget)
        kept.append(sorted(copy.ledgers[0]["position"].tolist()))
    return kept


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda one: one.name)
def test_it_is_what_a_cache_keeps_that_watched_and_repeated(condition: Condition) -> None:
    found = played().keeps(condition, played().seen)
    assert found == engine_keeps(condition)
    for kept, budget in zip(found, played().budgets, strict=True):
        assert 0 < len(kept) <= budget


@pytest.mark.parametrize("params", [{}, {"evidence_weight": 0.0}, {"usage_offset": 9.0}], ids=str)
def test_each_head_keeps_what_it_keeps_in_a_cache_by_head(params: dict[str, float]) -> None:
    condition = Condition("memdecay-heads", "policy", "memdecay-heads", params)
    cache = ran(condition)
    layout = cache.layout
    shape = (len(layout.windows), layout.num_kv_heads)
    found = keep_sets(
        played().player.tape,
        played().observations,
        condition,
        played().profile,
        played().budgets,
        replace(played().seen, shape=shape),
    )
    for kept, budget in zip(found, played().budgets, strict=True):
        assert kept.shape[:2] == shape and kept_count(kept) <= budget
        copy = cache.copy()
        copy.shrink(budget)
        by_head = [[head.nonzero().flatten().tolist() for head in layer] for layer in kept]
        assert by_head == [[head.tolist() for head in layer] for layer in copy.kept_by_head()]
        assert len({str(head) for layer in by_head for head in layer}) > 1


def test_what_was_seen_matters() -> None:
    """Else the comparison could not notice that it was left out."""
    seen = played().seen
    louder = replace(seen, peaks=seen.peaks.flip(1))
    other = replace(seen, replay=seen.replay.flip(2))
    for condition in CONDITIONS[:2]:
        keeps = played().keeps(condition, seen)
        assert keeps != played().keeps(condition, None)
        assert keeps != played().keeps(condition, louder)
        changed = keeps != played().keeps(condition, other)
        assert changed == ("replay" in condition.needs)
    one, another = (played().keeps(condition, seen) for condition in CONDITIONS[:2])
    assert one != another


def test_the_heads_are_found_in_any_order() -> None:
    seen = played().seen
    order = [2, 0, 3, 1]
    moved = Seen(tuple(WATCHED[n] for n in order), seen.peaks[order], seen.replay)
    for condition in CONDITIONS:
        assert played().keeps(condition, moved) == played().keeps(condition, seen)


def test_a_policy_that_asks_for_no_heads_keeps_what_it_kept() -> None:
    for name in ("memdecay-paper", "h2o", "streaming"):
        condition = Condition(name, "policy", name)
        assert played().keeps(condition, played().seen) == played().keeps(condition)


def test_shuffled_labels_leave_the_heads_their_say() -> None:
    condition = replace(CONDITIONS[0], labels="shuffled")
    assert played().keeps(condition, played().seen) != played().keeps(condition)
