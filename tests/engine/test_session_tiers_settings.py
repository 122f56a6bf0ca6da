"""Where pages go by the settings of tiers, what is told of it, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.helpers import kept
from engine.sessions import (
    NEVER,
    failing,
    saying,
    session,
    system,
    user,
)
from engine.tiered import (
    goes_on,
    outside,
    outside_positions,
    tiered,
    turns,
)
from memdecay import (
    BudgetError,
    MemDecayError,
    Profile,
    ProfileError,
    Session,
    SessionError,
    Tiers,
)


def test_memory_then_disk_then_nothing(tmp_path: Path) -> None:
    made = tiered(tiers={"host": 24, "disk": 12, "disk_folder": tmp_path, "every": 0})
    made.append([user(100)])
    report = made.report().tiers
    assert report is not None
    pages = sorted(outside(made).pages)
    levels = outside(made).store
    assert [*levels.disk, *levels.host] == pages, "what went last is in memory"
    assert report.tokens == {
        "resident": made.cache.kept(),
        "quantized": 0,
        "host": 24,
        "disk": 12,
        "copies": 0,
    }
    assert report.bytes["disk"] == 12 * report.bytes["host"] // 24 == levels.disk.bytes
    gone = report.lost
    assert gone > 0
    missing = set(range(made.cache.seen)) - {*kept(made.cache), *outside_positions(made)}
    assert len(missing) == 4 * gone


def test_a_region_that_must_not_be_written_stays_in_memory(tmp_path: Path) -> None:
    tiers = {"host": 12, "disk": None, "disk_folder": tmp_path, "every": 0}
    made = tiered(tiers={**tiers, "no_disk": ["plan"]}, align="region", policy="streaming")
    made.append([user(6, region="plan"), user(120, 4)])
    plan = made.cache.profile.id("plan")
    levels = outside(made).store
    regions = [levels.disk.get(page).columns["region"] for page in levels.disk]
    assert len(regions) > 5 and not bool((torch.cat(regions) == plan).any())
    in_memory = [levels.host.get(page).columns["region"] for page in levels.host]
    assert bool((torch.cat(in_memory) == plan).any())
    no_memory = tiered(
        tiers={**tiers, "host": 0, "no_disk": ["plan"]}, align="region", policy="streaming"
    )
    no_memory.append([user(6, region="plan"), user(120, 4)])
    report = no_memory.report()
    assert report.tiers is not None and report.tiers.lost > 0
    assert report.kept_by_region["plan"] + 4 * report.tiers.lost >= report.seen_by_region["plan"]


def test_a_thousand_turns_leave_nothing_behind(tmp_path: Path) -> None:
    made = tiered(tiers={"host": 60, "disk": 60, "disk_folder": tmp_path})
    made.append([system(4), user(150)])
    memory, levels = outside(made), outside(made).store
    rng, nbytes = random.Random(2), made.cache.nbytes
    for _ in range(1000):
        memory.recall(rng.sample([*memory.pages], 2), room=rng.choice([0, 4]))
        assert made.cache.kept() <= 64
        assert levels.host.tokens <= 60 and levels.disk.tokens <= 60
    assert memory.tokens == levels.tokens == sum(memory.pages.values())
    assert levels.disk.file_bytes <= 4 * levels.disk.bytes
    assert made.cache.nbytes == nbytes and made.cache.peak_tokens <= 64
    assert memory.summary_bytes <= 4 * memory.tokens * 3 * (16 + 4) + 3 * 16 * 8


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": -1}, "host is -1, but it must be a number of tokens of at least 0, a size such"),
        ({"host": "many"}, "host is 'many', but it must be"),
        ({"disk": 2.5}, "disk is 2.5, but it must be"),
        ({"disk": True}, "disk is True, but it must be"),
        ({"disk": "0MB"}, "disk is '0MB', but it must be"),
        ({"host": 0}, "host and disk are both 0, but at least one"),
        ({"disk_folder": "/tmp"}, "disk_folder is '/tmp', but disk is 0"),
        ({"disk": 9, "disk_folder": 3}, "disk_folder is 3, but it must be the path"),
        ({"page_size": 0}, "page_size is 0, but it must be an integer of at least 1"),
        ({"pages": 0}, "pages is 0, but it must be an integer of at least 1, or None"),
        ({"every": -1}, "every is -1, but"),
        ({"no_disk": "plan"}, "no_disk is 'plan', but it must be a list"),
        ({"no_disk": [1]}, r"no_disk is \[1\], but it must hold only names"),
        ({"words": 1}, "words is 1, but"),
        ({"wait": 1}, "wait is 1, but it must be True or False"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(MemDecayError, match=says):
        Tiers(**settings)


def test_sizes_are_read() -> None:
    made = tiered(tiers={"host": "1.5KiB", "disk": "2 mb"})
    levels = outside(made).store
    assert levels.host.max_bytes == 1536 and levels.disk.max_bytes == 2_000_000
    assert levels.host.max_tokens is None


def test_what_tiers_do_not_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"tiers is 5, but it must be memdecay\.Tiers"):
        session(budget=64, tiers=5)
    with pytest.raises(SessionError, match=r"must be memdecay\.Tiers"):
        session(budget=64, tiers=Tiers)
    with pytest.raises(MemDecayError, match="'memdecay-heads', by which heads keep their own"):
        tiered(policy="memdecay-heads")
    with pytest.raises(MemDecayError, match="none are known for this model"):
        tiered(profile=Profile.default(), tiers={"words": False})
    with pytest.raises(ProfileError, match="nonsense"):
        tiered(tiers={"no_disk": ["nonsense"]})
    with pytest.raises(MemDecayError, match="no file can be made there"):
        tiered(tiers={"disk": 9, "disk_folder": tmp_path / "missing"})
    made = tiered()
    made.append([user(9)])
    with pytest.raises(MemDecayError, match="but tiers are for a cache that is new"):
        Tiers().open(made.cache)


def test_pins_that_leave_no_room_are_refused_and_nothing_comes_back() -> None:
    made = tiered(budget=48)
    made.append([user(60)])
    made.append([user(10, 3)], pin=True)
    with pytest.raises(BudgetError):
        made.append([user(40, 4)], pin=True)
    made.append([user(10, 5)])
    made.generate(max_new_tokens=9, eos_token_id=NEVER)
    assert made.cache.peak_tokens <= 48


def test_without_a_budget_nothing_goes_out() -> None:
    made = tiered(budget=None)
    turns(made, 2, 3)
    made.generate(**saying(made, "the boat"))
    report = made.report().tiers
    assert report is not None and report.moved_down == 0 and report.tokens["host"] == 0


def where(made: Session) -> dict[int, str]:
    """The tier of the first token of each page of the cache, by the stores themselves."""
    memory, levels = outside(made), outside(made).store
    here = set(made.cache.ledgers[0]["page"].tolist())
    found = {}
    for page in range(-(-made.cache.seen // made.cache.page_size)):
        number = page * made.cache.page_size // memory.page_size
        tier = levels.tier_of(number)
        found[page] = "resident" if page in here else tier or "lost"
    return found


@pytest.mark.parametrize("size", [1, 4])
def test_the_timeline_tells_where_every_page_is_and_was(size: int, tmp_path: Path) -> None:
    tiers = {"host": 60, "disk": 40, "disk_folder": tmp_path}
    made = tiered(record_timeline=True, page_size=size, tiers=tiers)
    told: list[tuple[int, dict[int, str]]] = []
    for turn in range(6):
        turns(made, turn, 1)
        told.append((len(made.timeline()["events"]), where(made)))
    with failing(made.model, 9, RuntimeError), pytest.raises(RuntimeError):
        made.append([user(60, 8)])
    told.append((len(made.timeline()["events"]), where(made)))
    turns(made, 9, 2)
    timeline = made.timeline()
    lives = {life["page"]: life for life in timeline["pages"]}
    told.append((len(timeline["events"]), where(made)))
    for count, expected in told:
        for page, tier in expected.items():
            moves = [move for move in lives[page]["moves"] if move[0] < count]
            assert tier == (moves[-1][1] if moves else "resident")
    kinds = [event["kind"] for event in timeline["events"]]
    seen = set()
    for life in lives.values():
        events = [event for event, _ in life["moves"]]
        assert events == sorted(set(events)) and all(event < len(kinds) for event in events)
        before = "resident"
        for _, tier in life["moves"]:
            assert tier != before
            before = tier
            seen.add(tier)
        assert (life["evicted"] is None) == (before == "resident")
        assert life["evicted"] is None or life["evicted"] in events
    assert seen == {"resident", "host", "disk", "lost"} and "recall" in kinds
    assert all("moves" not in life for life in session_timeline()["pages"])


def session_timeline() -> dict[str, Any]:
    made = session(budget=64, record_timeline=True)
    made.append([user(80)])
    return made.timeline()


def test_a_timeline_changes_nothing_of_what_moves() -> None:
    plain, told = tiered(), tiered(record_timeline=True)
    goes_on(plain, told)
    assert plain.report() == told.report()
