"""A session whose tokens lose precision before they lose their place, with and without recall."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from engine.graded_tiers import Followed, graded
from engine.sessions import NEVER, assistant, system, user
from engine.tiered import (
    outside,
    turns,
)
from memdecay import BudgetError

SETTINGS: list[dict[str, Any]] = [
    {},
    {"tiers": {"bits": 8, "host": 30, "disk": 40, "every": 1}, "clock": "tokens"},
    {"tiers": {"host": 0, "quantized": 40}, "policy": "memdecay-paper", "align": "region"},
    {"tiers": {"host": 0, "quantized": None}},
    {"tiers": {"quantized": 20, "full_regions": ["user"]}},
    {"tiers": {"quantized": None, "full_regions": ["user"], "pages": 3}, "policy": "streaming"},
    {"tiers": {"quantized": 40, "exact": False}, "policy": "streaming"},
    {"tiers": {"quantized": 40}, "policy": "streaming"},
    {"tiers": {"quantized": None}},
    {"tiers": {"quantized": 40, "host": 60, "disk": 60}},
]


@pytest.mark.parametrize(
    ("name", "setting"), [*(("llama", number) for number in range(10)), ("gpt2", 0), ("gpt2", 4)]
)
def test_any_turns_equal_a_forward_that_quantizes_and_hides_the_same(
    name: str, setting: int
) -> None:
    made = graded(name, **SETTINGS[setting])
    followed = Followed(made, name)
    with followed.checked():
        made.append([system(4), user(60)])
        turns(made, setting, 12)
    tiers = SETTINGS[setting].get("tiers", {})
    quantized = tiers.get("quantized", 64)
    assert made.cache.budget == (None if quantized is None else 64 + quantized)
    assert made.cache.full_precision == 64 and followed.lowered > 20
    report = made.report()
    assert report.tiers is not None and report.budget_tokens == 64
    goes_out = quantized is not None or "full_regions" in tiers
    assert (report.evicted_tokens > 0) == goes_out
    if setting == 6:
        assert followed.coded_returns > 40, "what went out as codes must come back too"
    exact = tiers.get("host", None) != 0 and tiers.get("exact", True)
    assert followed.exact_returns > 20 or setting not in (0, 7, 8)
    assert followed.exact_returns == 0 or exact
    recalls = (goes_out or exact) and tiers.get("host", None) != 0
    assert (followed.returns > 0) == (report.tiers.came_back > 0) == recalls


def test_tokens_of_a_full_region_are_never_codes_and_go_out_exactly() -> None:
    made = graded(tiers={"quantized": None, "full_regions": ["user"]})
    followed = Followed(made)
    with followed.checked():
        made.append([system(4)])
        for seed in range(8):
            made.append([user(20, seed), assistant(12, seed)])
            ledger = made.cache.ledgers[0]
            low = ledger["region"][: made.cache.coded_tokens].tolist()
            assert made.cache.profile.id("user") not in low and low
    assert outside(made).tokens == made.report().evicted_tokens > 40
    for page in outside(made).pages:
        moved = outside(made).store.get(page)
        users = moved.columns["region"] == made.cache.profile.id("user")
        where = moved.positions[users]
        assert not followed.coded & set(where.tolist())
        if not len(where):  # copies of codes
            continue
        for number, layer in enumerate(followed.theirs.layers):
            assert (
                float((layer.keys[0][:, where] - moved.keys[number][:, users]).abs().max()) < 1e-4
            )


def test_what_comes_back_is_at_full_precision_and_is_what_its_codes_stood_for() -> None:
    made = graded(tiers={"every": 0, "exact": False}, policy="streaming")
    followed = Followed(made)
    with followed.checked():
        made.append([system(4), user(200)])
        low = followed.coded & followed.hidden
        pages = [p for p, n in outside(made).pages.items() if n == 4 and {4 * p, 4 * p + 1} <= low]
        page = pages[0]
        moved = outside(made).store.get(page)
        back = outside(made).recall([page], room=40)
        assert len(back) and page not in outside(made).pages
        position = made.cache.ledgers[0]["position"].tolist()
        slots = torch.tensor([position.index(at) for at in moved.positions.tolist()])
        assert int(slots.min()) >= made.cache.coded_tokens
        for number, pool in enumerate(made.cache.pools):
            assert torch.equal(pool.take(slots)[0], moved.keys[number])
        assert made.cache.full_tokens <= 64 - 40, "room is left at full precision too"
        assert made.cache.kept() <= 128 - 40
        turns(made, 2, 3)


def test_pins_must_fit_at_full_precision() -> None:
    made = graded(tiers={"quantized": None}, prefill_chunk=64)
    followed = Followed(made)
    made.append([system(4)])
    with pytest.raises(BudgetError, match=r"^budget is 64 tokens, but \d+ tokens are pinned"):
        made.append([user(70, 4)], pin=True)
    with followed.checked():
        for count in (9, 5, 3, 2, 1, 1, 1):
            with contextlib.suppress(BudgetError):
                made.append([user(count, 4)], pin=True)
        assert 0 < made.cache.full_room() < 16  # type: ignore[operator]
        made.append([user(20, 4)])
        made.generate(max_new_tokens=8, eos_token_id=NEVER)


def test_what_is_repeated_when_idle_fits_at_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graded(policy="memdecay-replay", tiers={"quantized": None, "exact": False})
    turns(made, 3, 4)
    cache: Any = made.cache
    for seed in range(60):
        if cache.full_tokens > 59:
            break
        made.append([user(1, seed)])
    assert cache.full_tokens > 59
    found: list[int] = []
    replay = cache.replay

    def replayed(ids: Any, positions: Any, prompt: Any) -> Any:
        found.append(cache.full_tokens + -(-(len(ids) + len(prompt)) // 4))
        return replay(ids, positions, prompt)

    monkeypatch.setattr(cache, "replay", replayed)
    kept_before = cache.kept()
    done = made.idle()
    assert done.replayed == cache.kept() == kept_before and done.left == 0
    assert found and max(found) <= 64
