"""What a condition keeps of a recording is what the engine keeps that runs it token by token."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from engine.sessions import assistant, system, tiny, user, words
from memdecay.calibration.player import Observation, Player, Script, Tape
from memdecay.engine import MemDecayCache
from memdecay.errors import BudgetError
from memdecay.evidence import READ, REPLAY, EvidenceHead
from memdecay.policy import get_policy
from memdecay.policy.registry import policy_class
from memdecay.regions import Profile, RegionPolicy
from memdecay.study import keeping
from memdecay.study.conditions import Condition, conditions
from memdecay.study.keeping import (
    Seen,
    budget_tokens,
    digest,
    keep_sets,
    ledger_after,
    noisy,
    oracle,
    runs,
    unpinned,
)

STAGES = (
    (
        system(9),
        user(9, 3),
        {"role": "assistant", "content": words(5, 4), "region": "plan"},
    ),
    (
        {"role": "assistant", "content": words(4, 5), "region": "scratchpad"},
        {"role": "tool", "name": "t", "content": words(14, 6), "region": "tool_out"},
    ),
    (user(6, 7),),
    ({"role": "tool", "name": "t", "content": words(14, 8), "region": "retrieval"},),
    (assistant(4, 9), user(4, 10)),
)


@dataclass(frozen=True)
class Played:
    """A recording without its questions."""

    tape: Tape
    observations: list[Observation]

    def keeps(self, condition: Condition, budgets: list[int] | None = None) -> list[list[int]]:
        found = keep_sets(self.tape, self.observations, condition, PROFILE, budgets or self.budgets)
        return [kept.tolist() for kept in found]

    @property
    def budgets(self) -> list[int]:
        return [budget_tokens(share, len(self.tape.ids)) for share in (0.5, 0.25)]


def _profile() -> Profile:
    """Rates that matter over so few steps, and priorities as small as a token's attention."""
    made = Profile.default()
    lives = {"user": 9, "plan": 20, "tool_out": 6, "retrieval": 40, "scratchpad": 3}
    for name, steps in lives.items():
        priority = made.regions[name].base_priority / 50
        made = made.with_region(name, RegionPolicy.from_half_life(priority, steps))
    # Without its pin it would go soon.
    return made.with_region("system", RegionPolicy(0.001, 0.01, pinned=True))


PROFILE = _profile()


@functools.cache
def played() -> Played:
    model, tokenizer = tiny("llama_one_layer")
    seen: list[Observation] = []
    player = Player(model, tokenizer, Script("t", "t", STAGES, "So far"), listen=seen.append)
    player.play()
    player.burst(8)
    return Played(player.tape, [replace(one, mass=one.mass.clone()) for one in seen])


def run_tape(model: PreTrainedModel, cache: MemDecayCache, tape: Tape) -> None:
    """Run recorded tokens: parts of prompts as they came, decode steps one by one."""
    decoded = [
        number > 0 and arrival > tape.inserted_at[number - 1]
        for number, arrival in enumerate(tape.inserted_at)
    ]
    start = 0
    for end in range(1, len(decoded) + 1):
        if end < len(decoded) and not decoded[end] and not decoded[start]:
            continue
        cache.prefilling = not decoded[start]
        ids = torch.tensor([tape.ids[start:end]])
        model(input_ids=ids, position_ids=torch.arange(start, end)[None], cache=cache)
        start = end


@torch.no_grad()
def engine_keeps(
    condition: Condition, regions: list[str] | None = None, profile: Profile = PROFILE
) -> list[list[int]]:
    """Run the recorded tokens one decode step at a time, then evict once."""
    model, _ = tiny("llama_one_layer")
    tape = played().tape
    regions = regions or tape.regions
    if condition.pinned is False:
        system = profile.regions["system"]
        profile = profile.with_region(
            "system", RegionPolicy(system.base_priority, system.decay_rate, pinned=False)
        )
    cache = MemDecayCache(
        model,
        budget=None,
        policy=get_policy(condition.policy, **condition.params),
        profile=profile,
        page_size=condition.page_size,
        align=condition.align,
        clock=condition.clock,
        observe_every=condition.observe_every,
    )
    for number, name in enumerate(regions):
        pinned = condition.pinned is True and name == "system"
        cache.label([name], spans=[tape.spans[number]], pinned=pinned)
    run_tape(model, cache, tape)
    assert cache.steps == played().observations[-1].now > 25
    kept = []
    for budget in played().budgets:
        copy = cache.copy()
        copy.shrink(budget)
        kept.append(sorted(copy.ledgers[0]["position"].tolist()))
    return kept


PLAIN = [
    one
    for one in conditions()
    if one.policy not in ("full", "oracle")
    and one.labels == "true"
    and one.last is None
    # Keep sets by head are compared in test_keeping_evidence.
    and not policy_class(one.policy).per_head
]
MIXED = [
    replace(PLAIN[-1], align="region", page_size=8, observe_every=3),
    replace(PLAIN[-1], name="h2o", policy="h2o", page_size=4, pinned=True, align="region"),
    replace(PLAIN[-1], name="tova", policy="tova", observe_every=2, clock="tokens"),
]


@pytest.mark.parametrize("condition", [*PLAIN, *MIXED], ids=lambda one: f"{one.name}-{one.seed}")
def test_it_is_what_the_engine_keeps(condition: Condition) -> None:
    found = played().keeps(condition)
    assert found == engine_keeps(condition)
    for kept, budget in zip(found, played().budgets, strict=True):
        assert 0 < len(kept) <= budget and kept == sorted(set(kept))


def test_every_parameter_matters() -> None:
    """Else the comparison with the engine could not notice that one is left out."""
    numbers = torch.Generator().manual_seed(0)
    sharp = []
    for one in played().observations:
        mass = torch.rand(len(one.mass), generator=numbers) ** 12
        sharp.append(replace(one, mass=mass / mass.sum()))
    count = len(played().tape.ids)
    looks = torch.rand(3, count, generator=numbers) ** 8  # two heads watched, one at replay too
    seen = Seen(((0, 0), (0, 1)), looks[:2], looks[None])
    head = EvidenceHead(0, 0, READ, weight=1.0, mean=-7.0, std=4.0)
    profile = PROFILE.with_evidence(
        {
            "read": (head, replace(head, head=1)),
            "replay": (head, replace(head, head=2, when=REPLAY, weight=2.0)),
        }
    )
    found: dict[str, list[str]] = {}
    for one in PLAIN:
        if one.group == "terms":  # on noise, a term may well change nothing
            continue
        # Large pages leave too few choices to tell conditions apart.
        if one.page_size == 16 and one.align is None:
            one = replace(one, page_size=2)
        if one.rates == "calibrated":
            kept = keep_sets(played().tape, sharp, one, profile, [90, 60], seen)
            found.setdefault(str([part.tolist() for part in kept]), []).append(one.name)
    assert [names for names in found.values() if len(names) > 1] == []


def test_all_of_it_for_the_full_cache() -> None:
    [full] = conditions(("paper",))[:1]
    assert played().keeps(full, [5]) == [list(range(len(played().tape.ids)))]


def test_a_budget_that_does_not_bind_keeps_all() -> None:
    count = len(played().tape.ids)
    for one in PLAIN:
        assert played().keeps(one, [count, count + 7]) == [list(range(count))] * 2


def test_the_budget_is_the_papers() -> None:
    assert [budget_tokens(0.25, n) for n in (405, 507, 1656)] == [101, 126, 414]
    assert budget_tokens(0.5, 407) == 203 and budget_tokens(1.0, 407) == 407


class TestPins:
    def test_the_system_survives_where_it_is_pinned_and_only_there(self) -> None:
        regions = played().tape.regions
        system = {number for number, name in enumerate(regions) if name == "system"}
        for one in PLAIN:
            half, quarter = (set(kept) for kept in played().keeps(one))
            needs = get_policy(one.policy, **one.params).needs
            if one.pinned is not False and ("labels" in needs or one.pinned):
                assert system <= half and system <= quarter, one.name
        [loose] = [one for one in PLAIN if one.pinned is False and one.group == "ablation"]
        fast = unpinned(PROFILE).with_region("system", RegionPolicy(0.0, 0.0))
        [kept] = keep_sets(
            played().tape, played().observations,
            replace(loose, params={"attention_weight": 0.0}), fast, [played().budgets[0]],
        )  # fmt: skip
        assert not system & set(kept[kept >= 16].tolist())

    def test_without_pins_everything_else_of_a_profile_stays(self) -> None:
        loose = unpinned(PROFILE)
        assert not any(loose.pinned) and any(PROFILE.pinned)
        assert loose.base_priority == PROFILE.base_priority
        assert loose.decay_rate == PROFILE.decay_rate and loose.names == PROFILE.names

    def test_what_does_not_fit_is_refused(self) -> None:
        [ours] = [one for one in PLAIN if one.name == "memdecay-paper"]
        with pytest.raises(BudgetError):
            played().keeps(ours, [20])


class TestNoise:
    @pytest.mark.parametrize("condition", conditions(("noise",))[::2], ids=lambda one: one.name)
    def test_it_is_what_the_engine_keeps_with_these_labels(self, condition: Condition) -> None:
        tape = played().tape
        labels = noisy(tape, condition.noise, PROFILE, condition.seed)
        assert played().keeps(condition) == engine_keeps(condition, labels)

    def test_none_is_the_truth_and_all_leaves_nothing_true(self) -> None:
        tape = played().tape
        assert noisy(tape, 0.0, PROFILE, 0) == tape.regions
        wrong = noisy(tape, 1.0, PROFILE, 0)
        assert all(one != other for one, other in zip(wrong, tape.regions, strict=True))

    def test_spans_change_as_a_whole_and_none_gains_a_pin(self) -> None:
        tape = played().tape
        before = [*tape.regions]
        for seed in range(40):
            labels = noisy(tape, 0.5, PROFILE, seed)
            for start, end in runs(tape.regions):
                assert len(set(labels[start:end])) == 1
                if labels[start] == "system":
                    assert tape.regions[start] == "system"
        assert tape.regions == before

    @pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
    def test_the_share_is_right_in_the_mean(self, share: float) -> None:
        tape = played().tape
        starts = [start for start, _ in runs(tape.regions)]
        hits = [
            noisy(tape, share, PROFILE, seed)[start] != tape.regions[start]
            for seed in range(200)
            for start in starts
        ]
        error = (share * (1 - share) / len(hits)) ** 0.5
        assert sum(hits) / len(hits) == pytest.approx(share, abs=4 * error)

    def test_wrong_labels_are_of_every_unpinned_region(self) -> None:
        tape = played().tape
        seen = {noisy(tape, 1.0, PROFILE, seed)[0] for seed in range(60)}
        assert seen == set(PROFILE.names) - {"system"}

    def test_it_is_the_seeds_and_the_episodes(self) -> None:
        tape = played().tape
        other = replace(tape, ids=[*tape.ids[:-1], 7])
        assert noisy(tape, 0.5, PROFILE, 1) == noisy(tape, 0.5, PROFILE, 1)
        assert noisy(tape, 0.5, PROFILE, 1) != noisy(tape, 0.5, PROFILE, 2)
        assert noisy(tape, 0.5, PROFILE, 1) != noisy(other, 0.5, PROFILE, 1)


SHUFFLED = [one for one in conditions(("control",)) if one.labels == "shuffled"]


class TestShuffled:
    @pytest.fixture
    def dealt(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """The labels of every try."""
        tries: list[list[str]] = []

        def noted(tape, observations, condition, profile, regions, evidence):
            tries.append([*regions])
            return ledger_after(tape, observations, condition, profile, regions, evidence)

        monkeypatch.setattr(keeping, "ledger_after", noted)
        return tries

    @pytest.mark.parametrize("condition", SHUFFLED, ids=lambda one: str(one.seed))
    def test_the_spans_keep_their_bounds_and_share_the_same_labels(
        self, condition: Condition, dealt: list[list[str]]
    ) -> None:
        found = played().keeps(condition)
        tape = played().tape
        spans = runs(tape.regions)
        labels = dealt[-1]
        assert labels != tape.regions
        assert all(len(set(labels[start:end])) == 1 for start, end in spans)
        assert Counter(labels[start] for start, _ in spans) == Counter(
            tape.regions[start] for start, _ in spans
        )
        assert found == engine_keeps(condition, labels)
        for kept, budget in zip(found, played().budgets, strict=True):
            assert len(kept) <= budget

    def test_it_is_dealt_again_until_the_pins_fit(self, dealt: list[list[str]]) -> None:
        tries = []
        for seed in range(6):
            dealt.clear()
            [kept] = played().keeps(replace(SHUFFLED[0], seed=seed), [44])
            assert len(kept) <= 44
            tries.append(len(dealt))
            pinned = sum(name == "system" for name in dealt[-1])
            assert pinned <= 44
            for refused in dealt[:-1]:
                with pytest.raises(BudgetError):
                    ledger_after(
                        played().tape, played().observations, SHUFFLED[0], PROFILE, refused
                    ).plan(len(refused) - 44, 99.0)
        assert max(tries) > 1

    def test_pins_that_can_never_fit_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keeping, "_TRIES", 3)
        with pytest.raises(BudgetError):
            played().keeps(SHUFFLED[0], [1])

    def test_it_is_the_seeds(self, dealt: list[list[str]]) -> None:
        one, other = (replace(SHUFFLED[0], seed=seed) for seed in (3, 4))
        assert played().keeps(one) == played().keeps(one)
        assert dealt[0] == dealt[len(dealt) // 2]
        assert played().keeps(one) != played().keeps(other)


class TestOracle:
    MASS = torch.rand(100, generator=torch.Generator().manual_seed(3)) + 0.01

    @pytest.mark.parametrize("where", [(0, 3), (50, 55), (96, 100)])
    def test_the_fact_its_neighbours_and_the_best_of_the_rest(self, where: tuple[int, int]) -> None:
        kept = oracle(self.MASS, where, 50).tolist()
        near = set(range(max(0, where[0] - 16), min(100, where[1] + 16)))
        assert near < set(kept) and len(kept) == 50 and kept == sorted(set(kept))
        chosen = set(kept) - near
        worst = min(float(self.MASS[n]) for n in chosen)
        left = [float(self.MASS[n]) for n in range(100) if n not in kept]
        assert worst >= max(left)

    def test_the_mass_is_left_alone_and_a_large_budget_keeps_all(self) -> None:
        before = self.MASS.clone()
        assert oracle(self.MASS, (3, 5), 500).tolist() == list(range(100))
        assert torch.equal(before, self.MASS)

    def test_the_fact_comes_first_in_a_budget_that_its_neighbours_fill(self) -> None:
        mass = torch.ones(100)
        mass[50:55] = 0.0
        assert set(range(50, 55)) <= set(oracle(mass, (50, 55), 20).tolist())


def test_runs_and_digests() -> None:
    assert runs(["a"]) == [(0, 1)]
    assert runs(["a", "a", "b", "a"]) == [(0, 2), (2, 3), (3, 4)]
    one = torch.tensor([1, 2, 300])
    assert digest(one) == digest(one.to(torch.int32)) and len(digest(one)) == 16
    assert digest(one) != digest(torch.tensor([1, 2, 301])) != digest(torch.tensor([1, 2]))


def test_a_burst_alone_is_what_the_last_steps_say() -> None:
    """The heaviest hitters of the last steps, as a literal sum of them says."""
    one = played()
    condition = Condition("h2o", "control", "h2o", {"recent": 2}, last=3)
    steps = [seen.mass for seen in one.observations if seen.decoding][-3:]
    count = len(one.tape.ids)
    total = torch.zeros(count)
    for mass in steps:
        total[: len(mass)] += mass
    total[-2:] += 10
    (kept,) = one.keeps(condition, [count // 3])
    assert kept == torch.topk(total, count // 3).indices.sort().values.tolist()
    assert [kept] != one.keeps(replace(condition, last=None), [count // 3])
