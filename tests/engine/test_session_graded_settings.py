"""Sessions with tokens at fewer bits: what they report, saved, copied, failed, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.graded_tiers import Followed, graded
from engine.helpers import kept
from engine.sessions import NEVER, assistant, failing, session, user
from engine.tiered import (
    equal,
    goes_on,
    held,
    outside_positions,
    turns,
)
from memdecay import BudgetError, MemDecayError, ModelError, Profile, ProfileError, Session, Tiers


@pytest.mark.parametrize("bits", [4, 8])
def test_the_report_counts_the_bytes(bits: int) -> None:
    made = graded(tiers={"bits": bits})
    turns(made, 3, 6)
    report, cache = made.report(), made.cache
    tiers = report.tiers
    assert tiers is not None
    assert tiers.tokens["resident"] == cache.full_tokens <= 64  # type: ignore[attr-defined]
    assert tiers.tokens["quantized"] == cache.coded_tokens > 0
    assert tiers.tokens["copies"] == cache.coded_tokens
    assert sum(tiers.tokens.values()) - tiers.tokens["copies"] == report.seen_tokens
    pools: Any = cache.pools
    assert tiers.bytes["resident"] == sum(pool.kv.nbytes for pool in pools)
    parts = ("codes", "key_scales", "value_scales")
    codes = sum(getattr(pool, part).nbytes for pool in pools for part in parts)
    assert tiers.bytes["quantized"] == codes
    inside = sum(tiers.bytes[name] for name in ("resident", "quantized", "scratch"))
    assert inside == report.kv_bytes
    coded, groups = cache.coded_tokens, len(cache.graded.sizes)  # type: ignore[attr-defined]
    # keys: two bfloat16 a channel and group; values: two a token, of 16 channels
    number = bits + (32 * groups / coded + 32 / 16) / 2
    (note,) = (note for note in report.notes if "bits" in note)
    assert note == (
        f"{coded} of the {cache.kept()} tokens kept are attended to at {bits} bits, {number:.2f} "
        f"a number with its scales."
    )


def test_without_other_tiers_what_leaves_is_lost_and_no_heads_are_needed() -> None:
    made = graded(tiers={"host": 0}, profile=Profile.default())
    assert made.cache.on_forget is None
    turns(made, 3, 6)
    report = made.report()
    assert report.tiers is not None
    assert report.tiers.lost == report.evicted_pages > 0 == report.tiers.came_back
    copy = made.fork()
    copy.append([user(50, 3)])
    assert made.report() == report != copy.report()
    assert made.ask("where is the boat", max_new_tokens=5)
    assert made.report() == report
    other = graded(tiers={"host": 0}, record_timeline=True)
    turns(other, 3, 6)
    moves = [page["moves"] for page in other.timeline()["pages"] if page["moves"]]
    assert {tier for page in moves for _, tier in page} == {"quantized", "lost"}
    made.reset()
    report = made.report()
    assert report.tiers is not None and {*report.tiers.tokens.values()} == {0}
    made.close()


@pytest.mark.parametrize("tiers", [{}, {"host": 0, "bits": 8}, {"host": 30, "disk": None}])
def test_a_saved_session_goes_on_as_if_it_never_was(tiers: dict[str, Any], tmp_path: Path) -> None:
    made = graded(tiers={**tiers, "full_regions": ["plan"]})
    turns(made, 3, 8)
    assert made.cache.coded_tokens
    made.save(tmp_path / "saved")
    assert '"format": 3' in (tmp_path / "saved" / "session.json").read_text()
    loaded = Session.load(tmp_path / "saved", made.model, made.tokenizer)
    assert loaded.tiers == made.tiers and loaded.budget == made.budget == 64
    assert (loaded.cache.budget, loaded.cache.full_precision) == (128, 64)
    assert loaded.cache.full_regions == made.cache.full_regions
    assert equal(held(made), held(loaded))
    assert made.report().tiers.tokens == loaded.report().tiers.tokens  # type: ignore[union-attr]
    assert made.report().notes == loaded.report().notes
    goes_on(made, loaded)


def test_a_copy_and_a_question_leave_the_session_as_it_was() -> None:
    made, twin = graded(), graded()
    for one in (made, twin):
        turns(one, 3, 6)
    before = held(made), made.report()
    assert made.ask("where is the boat", max_new_tokens=9)
    copy = made.fork()
    copy.append([user(60, 8)])
    assert equal(before[0], held(made)) and made.report() == before[1]
    goes_on(made, twin)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tiers", [{}, {"host": 0}])
def test_a_failure_in_any_forward_never_happened(
    tiers: dict[str, Any], error: type[BaseException]
) -> None:
    made = graded(tiers={"quantized": 40, **tiers})
    followed = Followed(made)
    with followed.checked():
        turns(made, 5, 4)
        runs = [
            lambda: made.append([user(20, 3), assistant(12, 3)], score=True),
            lambda: made.generate(max_new_tokens=30, eos_token_id=NEVER),
        ]
        for at in (0, 3, 6, 11, 17):
            for run in runs:
                ids, logits = [*made._ids], made._last_logits
                there = {*kept(made.cache)}
                everything = there if tiers else there | {*outside_positions(made)}
                with failing(made.model, at, error), pytest.raises(error, match="on purpose"):
                    run()
                assert made._ids == ids and torch.equal(made._last_logits, logits)  # type: ignore[arg-type]
                after = {*kept(made.cache)}
                assert after <= there
                assert tiers or after | {*outside_positions(made)} == everything
                followed.check()
        turns(made, 6, 3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantized": -1}, "quantized is -1, but it must be an integer of at least 0, or None"),
        ({"quantized": "many"}, "quantized is 'many', but"),
        ({"quantized": True}, "quantized is True, but"),
        ({"quantized": 9, "bits": 5}, "bits is 5, but it must be 4 or 8"),
        ({"quantized": 9, "full_regions": "user"}, "full_regions is 'user', but it must be a list"),
        ({"full_regions": ["user"]}, r"full_regions is \['user'\], but quantized is 0"),
        ({"host": 0}, "both 0, but at least one of them must hold pages, unless quantized"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(MemDecayError, match=says):
        Tiers(**settings)


def test_sessions_that_cannot_have_it_are_refused() -> None:
    with pytest.raises(BudgetError, match="quantized is 64, but budget is None"):
        graded(budget=None)
    with pytest.raises(BudgetError, match=r"budget is 35 tokens .* at least 36: a page of 4"):
        graded(budget=35)
    assert graded(budget=36).cache.full_precision == 36
    with pytest.raises(MemDecayError, match="'memdecay-heads', by which heads keep their own"):
        graded(policy="memdecay-heads")
    with pytest.raises(BudgetError, match="policy 'full' has no order"):
        graded(policy="full", budget=64)
    with pytest.raises(ModelError, match=r"Layer 0 .* sliding window .*quantized"):
        graded("gemma3")
    with pytest.raises(ProfileError, match="nonsense"):
        graded(tiers={"full_regions": ["nonsense"]})
    with pytest.raises(MemDecayError, match="none are known for this model"):
        graded(profile=Profile.default(), tiers={"words": False})
    with pytest.raises(
        MemDecayError, match="quantized is 9, but the cache has full_precision=None"
    ):
        Tiers(quantized=9).open(session(budget=64).cache)
