"""The vectorised policy against the literal loops of `paper_loops`."""

from __future__ import annotations

import dataclasses

import numpy as np
import paper_loops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memdecay.errors import BudgetError
from memdecay.policy import Tokens, get_policy, retention
from memdecay.policy.pages import page_scores, plan_eviction, select
from memdecay.policy.retention import Scaled
from memdecay.regions import Profile, RegionPolicy

SEEDED = settings(derandomize=True, deadline=None, database=None, max_examples=100)

masses = st.floats(0, 1, width=32)
rates = st.floats(0, 0.9990234375, width=32)
steps = st.integers(0, 2000)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@SEEDED
@given(st.lists(st.tuples(masses, masses, st.booleans()), min_size=1, max_size=40), rates)
def test_importance_is_equation_2(rows: list[tuple[float, float, bool]], rho: float) -> None:
    a, mass, first = map(list, zip(*rows, strict=True))
    literal = [paper_loops.importance(x, m, rho) for x, m in zip(a, mass, strict=True)]
    got = retention.importance(tensor(a), tensor(mass), rho)
    np.testing.assert_allclose(got.numpy(), literal, rtol=1e-5, atol=1e-7)
    started = [m if new else x for x, m, new in zip(literal, mass, first, strict=True)]
    got = retention.importance(tensor(a), tensor(mass), rho, torch.tensor(first))
    np.testing.assert_allclose(got.numpy(), started, rtol=1e-5, atol=1e-7)


@SEEDED
@given(
    st.lists(steps, min_size=1, max_size=12),
    st.lists(st.lists(masses, min_size=12, max_size=12), min_size=1, max_size=6),
    st.one_of(masses, st.floats(0, 8).map(Scaled)),
)
def test_refresh_is_equation_3(
    inserted_at: list[int], history: list[list[float]], tau: float | Scaled
) -> None:
    size = len(inserted_at)
    level = tau.scale / size if isinstance(tau, Scaled) else tau
    assert retention.threshold(tau, size) == level
    level = float(np.float32(level))  # masses are float32, so the comparison is too
    got = tensor([float(t) for t in inserted_at])
    moments = [2000.0 + 3 * i for i in range(len(history))]
    for now, mass in zip(moments, history, strict=True):
        got = retention.refresh(got, tensor(mass[:size]), level, now)
    for i in range(size):
        seen = [(now, mass[i]) for now, mass in zip(moments, history, strict=True)]
        assert got[i] == paper_loops.refreshed_at(inserted_at[i], seen, [level] * len(seen))


def test_attention_equal_to_the_threshold_refreshes() -> None:
    """The boundary of (3) is inside, also for uniform attention and Scaled(1)."""
    mass = torch.full((7,), 1 / 7)
    tau = retention.threshold(Scaled(1.0), 7)
    assert retention.refresh(torch.zeros(7), mass, tau, 5.0).tolist() == [5.0] * 7


@SEEDED
@given(
    st.lists(st.tuples(st.floats(0, 4), st.floats(0, 2), steps, masses), min_size=1, max_size=40),
    st.floats(0, 4),
)
def test_score_is_equation_4(rows: list[tuple[float, float, int, float]], alpha: float) -> None:
    b, lam, age, a = map(list, zip(*rows, strict=True))
    literal = [paper_loops.score(*row[:3], alpha, row[3]) for row in rows]
    prior = retention.decayed_prior(tensor(b), tensor(lam), tensor([float(t) for t in age]))
    got = retention.score(prior, tensor(a), alpha)
    # float32 rounds the exponent λΔt, up to 87 before exp underflows: 87 * 2^-24 of the result.
    np.testing.assert_allclose(got.numpy(), literal, rtol=2e-5, atol=1e-6)


@SEEDED
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=30
    ),
    st.integers(-2, 90),
)
def test_select_is_the_heap_of_algorithm_1(pages: list[tuple[int, int, bool]], excess: int) -> None:
    """Few distinct scores, so that ties are everywhere."""
    scores, sizes, protected = map(list, zip(*pages, strict=True))
    arguments = (torch.tensor(scores) / 4, torch.tensor(sizes), torch.tensor(protected), excess)
    free = {p: scores[p] / 4 for p in range(len(pages)) if not protected[p]}
    if sum(sizes[p] for p in free) < excess:
        with pytest.raises(BudgetError):
            select(*arguments)
        return
    gone = paper_loops.evict(free, dict(enumerate(sizes)), sum(sizes), sum(sizes) - excess)
    assert torch.nonzero(select(*arguments)).flatten().tolist() == sorted(gone)


@SEEDED
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-9, 9, width=32)), min_size=1, max_size=40))
def test_page_scores_are_equation_5(rows: list[tuple[int, float]]) -> None:
    raw, scores = map(list, zip(*rows, strict=True))
    numbers = sorted(set(raw))
    index = torch.tensor([numbers.index(page) for page in raw])
    got = page_scores(tensor(scores), index, len(numbers))
    for dense, page in enumerate(numbers):
        literal = paper_loops.page_score([s for p, s in rows if p == page])
        assert got[dense].item() == pytest.approx(literal, rel=1e-12, abs=1e-12)


@settings(SEEDED, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    page_size=st.sampled_from([1, 2, 4, 16]),
    rho=st.sampled_from([0.0, 0.5, 0.9]),
    alpha=st.sampled_from([0.0, 0.5, 40.0]),
    scale=st.sampled_from([0.5, 2.0, 8.0]),
    init=st.sampled_from(["first", "zero"]),
)
def test_an_episode_keeps_what_the_loops_keep(
    seed: int, page_size: int, rho: float, alpha: float, scale: float, init: str
) -> None:
    """Append, observe, evict, over and over, in slots that never lie in order of position."""
    dice = np.random.default_rng(seed)
    profile = Profile.default().with_region("note", RegionPolicy(0.6, 0.05))
    policy = get_policy(
        "memdecay-paper",
        smoothing=rho,
        attention_weight=alpha,
        refresh_threshold=Scaled(scale),
        init=init,
    )
    loops = paper_loops.Episode(
        [float(np.float32(b)) for b in profile.base_priority],
        [float(np.float32(rate)) for rate in profile.decay_rate],
        list(profile.pinned),
        page_size=page_size,
        budget=64,
        rho=rho,
        alpha=alpha,
        scale=scale,
        init=init,
    )
    tokens = empty()
    evictions = 0
    for turn in range(9):
        step = float(turn * 7)
        region = 0 if turn == 0 else int(dice.integers(1, 8))
        new = int(dice.integers(1, 12 if turn == 0 else 40))
        for position in range(tokens.seq_len, tokens.seq_len + new):
            loops.append(position, region, step)
        tokens = append(tokens, policy, new, region, step, dice)

        mass = {i: float(np.float32(dice.random() ** 6)) for i in loops.cache}
        total = sum(mass.values())
        mass = {i: float(np.float32(m / total)) for i, m in mass.items()}
        loops.observe(step + 1, mass)
        tokens = dataclasses.replace(tokens, now=step + 1)
        attention_mass = tensor([mass[i] for i in tokens.position.tolist()])
        state = {**tokens.state, **policy.observe(tokens, attention_mass, profile)}
        tokens = dataclasses.replace(tokens, state=state, num_observed=tokens.num_observed + 1)

        gap = loops.evict(step + 1)
        numbers, index = torch.unique(tokens.position // page_size, return_inverse=True)
        gone = plan_eviction(
            tokens,
            policy,
            profile,
            page_index=index,
            num_pages=len(numbers),
            pinned=torch.zeros(tokens.kv_len, dtype=torch.bool),
            excess=tokens.kv_len - loops.budget,
            open_page=len(numbers) - 1,
        )
        if 0 < gap < 1e-6:
            return  # float32 and the loops' float64 may order these two pages differently
        evictions += bool(gone.any())
        tokens = take(tokens, torch.nonzero(~gone).flatten())
        assert sorted(tokens.position.tolist()) == sorted(loops.cache)
        literal = [loops.token_score(i, step + 1) for i in tokens.position.tolist()]
        got = policy.score(tokens, profile)
        np.testing.assert_allclose(got.numpy(), literal, rtol=1e-4, atol=1e-6)
    assert evictions or tokens.seq_len <= loops.budget, "the example evicted nothing"


def empty() -> Tokens:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Tokens(
        position=nothing,
        region=nothing,
        span=nothing,
        inserted_at=nothing.float(),
        num_observed=nothing.int(),
        now=0.0,
        seq_len=0,
        state={"importance": nothing.float(), "refreshed_at": nothing.float()},
    )


def append(
    tokens: Tokens, policy: object, new: int, region: int, step: float, dice: np.random.Generator
) -> Tokens:
    fresh = Tokens(
        position=torch.arange(tokens.seq_len, tokens.seq_len + new),
        region=torch.full((new,), region),
        span=torch.full((new,), int(step)),
        inserted_at=torch.full((new,), step),
        num_observed=torch.zeros(new, dtype=torch.int32),
        now=step,
        seq_len=tokens.seq_len + new,
        state={name: torch.full((new,), value) for name, value in policy.columns.items()},
    )
    state = {**fresh.state, **policy.on_insert(fresh)}
    both = {
        name: torch.cat([getattr(tokens, name), getattr(fresh, name)])
        for name in ("position", "region", "span", "inserted_at", "num_observed")
    }
    state = {name: torch.cat([tokens.state[name], state[name]]) for name in state}
    joined = dataclasses.replace(fresh, **both, state=state)
    return take(joined, torch.from_numpy(dice.permutation(joined.kv_len)))


def take(tokens: Tokens, slots: torch.Tensor) -> Tokens:
    columns = {
        name: getattr(tokens, name)[slots]
        for name in ("position", "region", "span", "inserted_at", "num_observed")
    }
    state = {name: column[slots] for name, column in tokens.state.items()}
    return dataclasses.replace(tokens, **columns, state=state)
