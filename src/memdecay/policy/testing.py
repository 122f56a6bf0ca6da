"""The contract of a policy as checks that any package can run on its own.

In a test of yours::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(MyPolicy())
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memdecay.errors import BudgetError, PolicyError
from memdecay.evidence import READ, REPLAY, EvidenceHead
from memdecay.policy.base import Policy, Tokens
from memdecay.policy.head_pages import plan_head_eviction
from memdecay.policy.pages import leaving, page_scores, plan_eviction
from memdecay.policy.registry import from_config, policy_config
from memdecay.regions import REGIONS, Profile, RegionPolicy

_LAYERS, _HEADS = 3, 2


@dataclass(frozen=True)
class Sample:
    """A cache as an engine would hand it to a policy: with holes, and slots out of order.

    Args:
        tokens: the kept tokens, their columns as after several observations.
        page_index: (kv_len,) int64.
        num_pages: number of pages.
        pinned: (kv_len,) bool, tokens pinned by span.
        open_page: the page being filled.
        profile: the region policies.
    """

    tokens: Tokens
    page_index: Tensor
    num_pages: int
    pinned: Tensor
    open_page: int
    profile: Profile

    def plan(self, policy: Policy, excess: int) -> Tensor:
        """Return (kv_len,) bool, the tokens that the policy evicts to free `excess`."""
        return self._planned(plan_eviction, policy, excess)

    def plan_heads(self, policy: Policy, excess: int) -> Tensor:
        """Return (num_layers, num_kv_heads, kv_len) bool, the entries that the policy evicts."""
        return self._planned(plan_head_eviction, policy, excess)

    def _planned(self, planner: Callable[..., Tensor], policy: Policy, excess: int) -> Tensor:
        return planner(
            self.tokens,
            policy,
            self.profile,
            page_index=self.page_index,
            num_pages=self.num_pages,
            pinned=self.pinned,
            excess=excess,
            open_page=self.open_page,
        )

    def take(self, slots: Tensor) -> Sample:
        """Return the same cache with its slots in another order."""
        columns = {
            field.name: getattr(self.tokens, field.name)[..., slots]
            for field in dataclasses.fields(Tokens)
            if isinstance(getattr(self.tokens, field.name), Tensor)
        }
        state = {name: column[slots] for name, column in self.tokens.state.items()}
        by_head = {name: column[..., slots] for name, column in self.tokens.head_state.items()}
        return dataclasses.replace(
            self,
            tokens=dataclasses.replace(self.tokens, **columns, state=state, head_state=by_head),
            page_index=self.page_index[slots],
            pinned=self.pinned[slots],
        )


def sample(
    policy: Policy, *, kept_pages: int = 24, page_size: int = 4, seed: int = 0, pin: bool = True
) -> Sample:
    """Make a cache in which a third of the pages is gone and the policy has observed attention.

    For a `per_head` policy it has 3 layers of 2 KV heads, which lack some of the tokens each.

    Args:
        policy: its columns are filled by its own `on_insert`, `observe`, `observe_heads` and
            `on_replay`; one that needs "heads" gets a profile with evidence heads.
        kept_pages: number of pages; the last one is half full.
        page_size: tokens a page.
        seed: which cache.
        pin: whether two tokens are pinned by span.
    """
    dice = torch.Generator().manual_seed(seed)
    pages = torch.randperm(kept_pages * 3 // 2 + 1, generator=dice)[:kept_pages]
    position = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    seq_len = int(position.max()) + 1 - page_size // 2
    position = position[position < seq_len]
    position = position[torch.randperm(len(position), generator=dice)]

    span = position // (2 * page_size + 1)
    region_of_span = torch.randint(len(REGIONS), (seq_len,), generator=dice)
    region_of_span[0] = 0  # a conversation starts with its system text
    inserted_at = (span * 2).to(torch.float32)
    now = float(inserted_at.max()) + 3
    tokens = Tokens(
        position=position,
        region=region_of_span[span],
        span=span,
        inserted_at=inserted_at,
        num_observed=torch.zeros(len(position), dtype=torch.int32),
        now=now,
        seq_len=seq_len,
        state={name: torch.full_like(inserted_at, value) for name, value in policy.columns.items()},
        page_size=page_size,
    )
    if policy.per_head:
        held = torch.rand(_LAYERS, _HEADS, len(position), generator=dice) < 0.7
        held[0, 0] |= ~held.any(0).any(0)
        by_head = {
            name: torch.full(held.shape, value) for name, value in policy.head_columns.items()
        }
        tokens = dataclasses.replace(tokens, held=held, head_state=by_head)
    luck = torch.Generator().manual_seed(seed)
    if "surprisal" in policy.needs:
        surprisal = -torch.rand(len(position), generator=luck).log()
        tokens = dataclasses.replace(tokens, surprisal=surprisal.masked_fill(position == 0, 0))
    profile = Profile.default()
    if "heads" in policy.needs:
        profile = profile.with_evidence(_EVIDENCE)
    tokens = _with(tokens, policy, policy.on_insert(tokens))
    for _ in range(3):
        mass = torch.rand(len(position), generator=dice) ** 4
        columns = policy.observe(tokens, mass / mass.sum(), profile)
        tokens = dataclasses.replace(
            _with(tokens, policy, columns), num_observed=tokens.num_observed + 1
        )
    for _ in range(2 if "heads" in policy.needs else 0):
        columns = policy.observe_heads(tokens, _peaks(policy, tokens, profile, luck), profile)
        tokens = _with(tokens, policy, columns)
    for part in range(2 if "replay" in policy.needs else 0):
        columns = policy.on_replay(tokens, _replay(tokens, luck), profile)
        tokens = dataclasses.replace(
            _with(tokens, policy, columns), replayed=tokens.replayed | (position % 3 == part)
        )
    numbers, page_index = torch.unique(position // page_size, return_inverse=True)
    pinned = torch.zeros(len(position), dtype=torch.bool)
    pinned[:2] = pin
    return Sample(tokens, page_index, len(numbers), pinned, len(numbers) - 1, profile)


def check_identity(policy: Policy) -> None:
    """The policy survives its config, which is JSON, and says what it is in one line."""
    again = from_config(json.loads(json.dumps(policy_config(policy))))
    assert again == policy, f"{again} is not {policy}"
    assert policy.summary and "\n" not in policy.summary, "summary must be one line"


def check_score(policy: Policy) -> None:
    """The score is one finite float32 per token, for one token and for many."""
    for size in (24, 1):
        for page_size in (4, 1):
            case = sample(policy, kept_pages=size, page_size=page_size)
            score = policy.score(case.tokens, case.profile)
            assert score.shape == case.tokens.position.shape, f"score has shape {score.shape}"
            assert score.dtype == torch.float32, f"score is {score.dtype}"
            assert bool(torch.isfinite(score).all()), "score is not finite"


def check_columns(policy: Policy) -> None:
    """What hooks return are declared columns, one float32 a token, or one a token and head."""
    case = sample(policy)
    mass = torch.full_like(case.tokens.inserted_at, 1 / case.tokens.kv_len)
    inserted = policy.on_insert(case.tokens)
    observed = policy.observe(case.tokens, mass, case.profile)
    peaks = _peaks(policy, case.tokens, case.profile)
    watched = policy.observe_heads(case.tokens, peaks, case.profile)
    replayed = policy.on_replay(case.tokens, _replay(case.tokens), case.profile)
    for columns in (inserted, observed, watched, replayed):
        declared = {*policy.columns, *policy.head_columns}
        assert set(columns) <= declared, f"{set(columns)} were not declared"
        for name, column in columns.items():
            lead = (_LAYERS, _HEADS) if name in policy.head_columns else ()
            assert column.shape == (*lead, *mass.shape) and column.dtype == torch.float32, name
    assert policy.per_head or not policy.head_columns, "columns by head need per_head"
    assert not {*policy.columns} & {*policy.head_columns}, "two columns have one name"


def check_protected(policy: Policy) -> None:
    """`protected` is None or one boolean per token, and holds while other pages suffice."""
    case = sample(policy)
    protected = policy.protected(case.tokens, case.profile)
    if protected is None:
        return
    assert protected.shape == case.tokens.position.shape and protected.dtype == torch.bool
    excess, before = 0, -1
    while excess != before:  # what is protected may depend on how much is to stay
        before = excess
        pins = int(_held(policy, case).sum())
        left = leaving(case.tokens, case.tokens.kv_len - excess - pins)
        protected = policy.protected(left, case.profile)
        assert protected is not None
        pages = torch.zeros(case.num_pages, dtype=torch.bool)
        pages[case.page_index[protected | _held(policy, case)]] = True
        pages[case.open_page] = True
        excess = int((~pages[case.page_index]).sum())
    assert excess > 0, "everything is protected"
    if policy.bounded:
        evicted = case.plan(policy, excess)
        assert torch.equal(evicted, ~pages[case.page_index]), "a protected token was evicted"


def check_pure(policy: Policy) -> None:
    """Nothing that a policy is given is changed."""
    case = sample(policy)
    mass = torch.rand(case.tokens.kv_len, generator=torch.Generator().manual_seed(1))
    attention = _replay(case.tokens)
    peaks = _peaks(policy, case.tokens, case.profile)
    inputs = [mass, attention, peaks, case.page_index, case.pinned, *case.tokens.state.values()]
    inputs += case.tokens.head_state.values()
    inputs += [value for value in vars(case.tokens).values() if isinstance(value, Tensor)]
    before = [value.clone() for value in inputs]
    config = json.dumps(policy_config(policy))
    policy.on_insert(case.tokens)
    policy.observe(case.tokens, mass, case.profile)
    policy.observe_heads(case.tokens, peaks, case.profile)
    policy.on_replay(case.tokens, attention, case.profile)
    policy.score(case.tokens, case.profile)
    policy.protected(case.tokens, case.profile)
    if policy.bounded:
        case.plan(policy, 5)
    assert all(map(torch.equal, inputs, before)), "an input was mutated"
    assert json.dumps(policy_config(policy)) == config, "the policy changed itself"


def check_deterministic(policy: Policy) -> None:
    """The same cache gives the same score, also after the policy has seen another one."""
    case = sample(policy)
    first = policy.score(case.tokens, case.profile)
    other = sample(policy, seed=7)
    policy.score(other.tokens, other.profile)
    assert torch.equal(policy.score(case.tokens, case.profile), first), "the score changed"


def check_budget(policy: Policy) -> None:
    """Enough is freed, in whole pages, and no page more than needed."""
    for page_size in (1, 4):
        case = sample(policy, page_size=page_size)
        if not policy.bounded:
            _refused(functools.partial(case.plan, policy, 1), PolicyError)
            continue
        sizes = torch.bincount(case.page_index)
        for excess in (1, page_size, page_size + 1, 7 * page_size):
            evicted = case.plan(policy, excess)
            freed = torch.bincount(case.page_index[evicted], minlength=case.num_pages)
            assert int(evicted.sum()) >= excess, "the budget is not held"
            assert bool(((freed == 0) | (freed == sizes)).all()), "a page was split"
            assert int(evicted.sum()) - page_size < excess, "more went than needed"


def check_unbound(policy: Policy) -> None:
    """Nothing is evicted when the budget does not bind."""
    case = sample(policy)
    for excess in (0, -3):
        assert not bool(case.plan(policy, excess).any()), "evicted without need"


def check_pins(policy: Policy) -> None:
    """Pinned tokens, pinned regions if labels are needed, and the open page are never evicted."""
    if not policy.bounded:
        return
    case = sample(policy)
    pages = torch.zeros(case.num_pages, dtype=torch.bool)
    pages[case.page_index[_held(policy, case)]] = True
    pages[case.open_page] = True
    excess = int((~pages[case.page_index]).sum())
    assert 0 < excess < case.tokens.kv_len
    evicted = case.plan(policy, excess)
    assert torch.equal(evicted, ~pages[case.page_index]), "a pin was evicted"
    _refused(lambda: case.plan(policy, excess + 1), BudgetError)
    everything = dataclasses.replace(case, pinned=torch.ones_like(case.pinned))
    _refused(lambda: everything.plan(policy, 1), BudgetError)


def check_one_page(policy: Policy) -> None:
    """A budget of one page leaves the page being filled."""
    if not policy.bounded:
        return
    for page_size in (1, 4):
        case = sample(policy, page_size=page_size, pin=False)
        case = dataclasses.replace(case, profile=_without_pins(case.profile))
        evicted = case.plan(policy, case.tokens.kv_len - page_size)
        assert torch.equal(~evicted, case.page_index == case.open_page)


def check_permutation(policy: Policy) -> None:
    """The order of the slots means nothing: the same positions go."""
    if not policy.bounded:
        return
    case = sample(policy)
    for seed in range(3):
        order = torch.randperm(case.tokens.kv_len, generator=torch.Generator().manual_seed(seed))
        shuffled = case.take(order)
        for excess in (1, 20, 40):
            assert torch.equal(shuffled.plan(policy, excess), case.plan(policy, excess)[order])


def check_ties(policy: Policy) -> None:
    """Of pages with equal scores the older goes first (seen where the policy scores equally)."""
    if not policy.bounded:
        return
    case = sample(policy, pin=False)
    case = dataclasses.replace(case, profile=_without_pins(case.profile))
    means = page_scores(policy.score(case.tokens, case.profile), case.page_index, case.num_pages)
    gone = torch.zeros(case.num_pages, dtype=torch.bool)
    gone[case.page_index[case.plan(policy, 20)]] = True
    pins = int(_held(policy, case).sum())
    left = leaving(case.tokens, case.tokens.kv_len - 20 - pins)
    preferred = policy.protected(left, case.profile)
    free = torch.ones(case.num_pages, dtype=torch.bool)
    free[case.open_page] = False
    if preferred is not None:
        free[case.page_index[preferred]] = False
    for page in torch.nonzero(gone).flatten().tolist():
        better = (means < means[page]) | ((means == means[page]) & (torch.arange(len(gone)) < page))
        assert bool(gone[better & free].all()), "a page went before a lower or an older one"


def check_nan(policy: Policy) -> None:
    """NaN attention is refused before anything is evicted."""
    if "attention" not in policy.needs or not policy.bounded:
        return
    case = sample(policy)
    mass = torch.full_like(case.tokens.inserted_at, 1 / case.tokens.kv_len)
    mass[3] = torch.nan
    seen = _with(case.tokens, policy, policy.observe(case.tokens, mass, case.profile))
    broken = dataclasses.replace(case, tokens=seen)
    _refused(lambda: broken.plan(policy, 1), PolicyError)


def check_heads(policy: Policy) -> None:
    """Scores by head are finite where a head holds a token, and enough is freed by head."""
    if not policy.per_head:
        return
    for page_size in (1, 4):
        case = sample(policy, page_size=page_size)
        held = case.tokens.held
        assert held is not None
        inputs = [held, *case.tokens.head_state.values()]
        before = [value.clone() for value in inputs]
        score = policy.head_score(case.tokens, case.profile)
        assert score.shape == held.shape, f"the score by head has shape {tuple(score.shape)}"
        assert score.dtype == torch.float32, f"the score by head is {score.dtype}"
        assert bool(torch.isfinite(score[held]).all()), "a score by head is not finite"
        again = policy.head_score(case.tokens, case.profile)
        assert torch.equal(again[held], score[held]), "the score changed"
        order = torch.randperm(case.tokens.kv_len, generator=torch.Generator().manual_seed(2))
        for excess in (1, 20):
            gone = case.plan_heads(policy, excess)
            assert excess <= int(gone.sum()) < excess + page_size, "too little or too much went"
            assert not bool((gone & ~held).any()), "an entry went that no head held"
            shuffled = case.take(order).plan_heads(policy, excess)
            assert torch.equal(shuffled, gone[..., order]), "the order of slots decided"
        assert all(map(torch.equal, inputs, before)), "an input was mutated"


CHECKS: tuple[Callable[[Policy], None], ...] = (
    check_identity,
    check_score,
    check_columns,
    check_protected,
    check_pure,
    check_deterministic,
    check_budget,
    check_unbound,
    check_pins,
    check_one_page,
    check_permutation,
    check_ties,
    check_nan,
    check_heads,
)
"""Every check; each takes a policy and raises AssertionError when the contract is broken."""


def _with(tokens: Tokens, policy: Policy, columns: Mapping[str, Tensor]) -> Tokens:
    """Return the tokens with what the policy returned in their columns."""
    by_head = {name: columns[name] for name in columns if name in policy.head_columns}
    by_token = {name: columns[name] for name in columns if name not in by_head}
    return dataclasses.replace(
        tokens,
        state={**tokens.state, **by_token},
        head_state={**tokens.head_state, **by_head},
    )


_READ_HEADS = (
    EvidenceHead(0, 1, READ, weight=2.0, mean=-4.0, std=1.5),
    EvidenceHead(1, 2, READ, weight=1.0, mean=-5.0, std=2.0),
)
_EVIDENCE = {
    "read": _READ_HEADS,
    "replay": (EvidenceHead(1, 0, REPLAY, weight=3.0, mean=-3.0, std=1.0), *_READ_HEADS),
}
"""Heads of the model of two layers of three heads that `_replay` is of."""


def _peaks(
    policy: Policy, tokens: Tokens, profile: Profile, dice: torch.Generator | None = None
) -> Tensor:
    """Return (number of heads, kv_len), what the watched heads may have given."""
    dice = torch.Generator().manual_seed(3) if dice is None else dice
    count = len(policy.heads(profile)) if "heads" in policy.needs else 1
    return torch.rand(count, tokens.kv_len, generator=dice) ** 4


def _replay(tokens: Tokens, dice: torch.Generator | None = None) -> Tensor:
    """Return (num_layers, num_heads, kv_len), what a replay may have observed by query head."""
    dice = torch.Generator().manual_seed(2) if dice is None else dice
    most = torch.rand(_LAYERS, 2 * _HEADS, tokens.kv_len, generator=dice) ** 4
    return most if tokens.held is None else most * tokens.held.repeat_interleave(2, 1)


def _held(policy: Policy, case: Sample) -> Tensor:
    if "labels" not in policy.needs:
        return case.pinned
    return case.pinned | torch.tensor(case.profile.pinned)[case.tokens.region]


def _without_pins(profile: Profile) -> Profile:
    for name, region in profile.regions.items():
        profile = profile.with_region(name, RegionPolicy(region.base_priority, region.decay_rate))
    return profile


def _refused(action: Callable[[], object], error: type[Exception]) -> None:
    try:
        action()
    except error as raised:
        assert str(raised).count("\n") == 0, "an error is one sentence"
        return
    raise AssertionError(f"{error.__name__} was not raised")
