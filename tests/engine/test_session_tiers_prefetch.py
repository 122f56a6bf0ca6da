"""Sessions whose pages on disk are read ahead: nobody waits, and everything is as exact as ever."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.helpers import kept
from engine.interrupted import interrupt_at
from engine.sessions import NEVER, system, user
from engine.tiered import (
    Watched,
    equal,
    held,
    outside,
    outside_positions,
    tiered,
    turns,
)
from memdecay import Session
from memdecay.tiers import TierWarning
from tiers.slow_disk import SlowDisk, eventually


def on_disk(folder: Path, **tiers: Any) -> Session:
    """A session whose pages of one token are all on disk, so that none is read to be joined."""
    settings = {"page_size": 1, "host": 0, "disk": None, "disk_folder": folder, "every": 8}
    made = tiered(policy="streaming", page_size=1, tiers={**settings, **tiers})
    made.append([system(4), user(90)])
    return made


def steps(made: Session, count: int, at: dict[int, Any]) -> list[int]:
    """Write an answer; returns how many pages had come back when each step began.

    What is in `at` is called before the step of that number.
    """
    seen: list[int] = []

    def before(*_: Any) -> None:
        at.get(len(seen), lambda: None)()
        seen.append(outside(made).came_back)

    handle = made.model.register_forward_pre_hook(before)
    made.generate(max_new_tokens=count, eos_token_id=NEVER)
    handle.remove()
    return seen


def test_steps_go_on_and_pages_come_back_at_the_next_after_they_arrive(tmp_path: Path) -> None:
    made = on_disk(tmp_path)
    disk = SlowDisk(outside(made).store.disk)

    def arrive() -> None:
        disk.go.set()
        disk.rest()

    start = len(made.conversation.generation_prompt()) > 0  # read before the first step
    begun: list[int] = []
    came = steps(made, 20, {start + 5: lambda: begun.append(disk.begun), start + 12: arrive})
    first, changes = came[0], [at for at in range(1, 20) if came[at] != came[at - 1]]
    assert begun == [2], "what is needed is fetched some steps before"
    assert changes[0] == start + 13, "8 steps, an exchange, 4 more, and then it arrived"
    assert came[changes[0]] - first == 4
    assert disk.at_once == 0 and disk.ahead > 0
    tiers = made.report().tiers
    assert tiers is not None
    assert tiers.bytes["fetched"] == outside(made).store.fetched_bytes <= 8 * tiers.bytes["disk"]
    made.append([user(3, 5)])
    tiers = made.report().tiers
    assert tiers is not None and tiers.bytes["fetched"] == 0 and tiers.lost == 0


def test_what_is_asked_to_wait_waits(tmp_path: Path) -> None:
    made = on_disk(tmp_path, wait=True)
    disk = SlowDisk(outside(made).store.disk, lambda: time.sleep(0.01))
    came = steps(made, 12, {})
    start = len(made.conversation.generation_prompt()) > 0
    changes = [at for at in range(1, 12) if came[at] != came[at - 1]]
    assert changes == [start + 9] and came[-1] - came[0] == 4 and disk.ahead >= 2


def test_what_waits_is_to_the_bit_what_reads_nothing_ahead(tmp_path: Path) -> None:
    tiers = {"host": 20, "disk": None, "disk_folder": tmp_path, "wait": True}
    made, twin = tiered(tiers=tiers), tiered(tiers=tiers)
    naps = random.Random(2)
    disk = SlowDisk(outside(made).store.disk, lambda: time.sleep(naps.choice([0, 0, 0.002])))
    outside(twin).store.fetch = lambda pages: None
    for one in (made, twin):
        turns(one, 3, 4)
    same_now(made, twin)
    assert disk.ahead > 20


def same_now(made: Session, twin: Session) -> None:
    assert made._ids == twin._ids and equal(held(made), held(twin))
    assert torch.equal(made._last_logits, twin._last_logits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "host"), [("llama", 24), ("gemma3", 0)])
def test_any_turns_on_a_slow_disk_equal_a_forward_that_hides_what_is_outside(
    name: str, host: int, tmp_path: Path
) -> None:
    made = tiered(name, tiers={"host": host, "disk": None, "disk_folder": tmp_path})
    made.append([system(4)])
    watched = Watched(made)
    naps = random.Random(2)
    disk = SlowDisk(
        outside(made).store.disk, lambda: time.sleep(naps.choice([0, 0.002, 0.01, 0.05]))
    )
    memory: Any = made._memory
    bring, late = memory._bring_late, [0]

    def counted(count: int) -> None:
        before = outside(made).came_back
        bring(count)
        late[0] += bool(memory._steps) * (outside(made).came_back - before)

    memory._bring_late = counted
    turns(made, 4, 5)
    for seed in range(40):  # how late pages are is up to the machine
        if late[0] and disk.ahead > 20:
            break
        turns(made, seed, 1)
    assert watched.worst() < 1e-4 and watched.returns >= 20
    assert made.cache.peak_tokens <= 64
    assert disk.ahead > 20 and late[0] > 0
    tiers = made.report().tiers
    assert tiers is not None and tiers.lost == 0
    assert {*kept(made.cache)} | {*outside_positions(made)} == set(range(made.cache.seen))


def in_flight(made: Session) -> SlowDisk:
    """Leave pages of a session in flight, between two turns."""
    disk = SlowDisk(outside(made).store.disk)
    steps(made, 12, {})
    assert outside(made).store.fetched_bytes > 0 and disk.begun == 2 and disk.ahead == 0
    return disk


def test_a_copy_made_while_pages_are_read_goes_its_own_way(tmp_path: Path) -> None:
    made = on_disk(tmp_path)
    disk = in_flight(made)
    copy = made.fork()
    assert outside(copy).store.fetched_bytes == 0
    disk.go.set()  # before the store is looked at: that waits for what is being read
    before = held(made)
    assert equal(before, held(copy))
    for one in (made, copy):
        memory: Any = one._memory
        memory.wait = True
        turns(one, 7, 2)
    same_now(made, copy)
    copy.close()
    del copy, memory, one
    assert not equal(before, held(made))
    disk.rest()
    assert {*disk.file._held.values()} == {1} and len(disk.file._held) == len(outside(made).store)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_session_that_is_freed_while_pages_are_read(how: str, tmp_path: Path) -> None:
    made = on_disk(tmp_path, wait=True)
    memory: Any = made._memory
    memory.wait = False
    disk, store = in_flight(made), outside(made).store
    getattr(made, how)()
    assert store.fetched_bytes == store.bytes == 0
    if how == "reset":
        twin = on_disk(tmp_path, wait=True)
        disk.go.set()
        memory.wait = True
        made.append([system(4), user(90)])
        for one in (made, twin):
            turns(one, 7, 1)
        same_now(made, twin)
        made.close()
    disk.go.set()
    eventually(lambda: disk.file.file.closed)


def test_a_disk_that_fails_in_the_background_loses_pages(tmp_path: Path) -> None:
    made = on_disk(tmp_path)

    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = SlowDisk(outside(made).store.disk, fails)
    with pytest.warns(TierWarning, match="is lost and is dropped: Input/output error"):
        made.generate(max_new_tokens=30, eos_token_id=NEVER)
    assert disk.begun > 0
    tiers = made.report().tiers
    assert tiers is not None and tiers.lost > 0
    outside(made).store.fetch(())  # what failed and is not needed is not lost
    assert len(outside_positions(made)) + tiers.lost + made.cache.kept() == made.cache.seen


def test_an_interrupt_at_any_line_leaves_nothing_held(tmp_path: Path) -> None:
    tiers = {"host": 0, "disk": None, "disk_folder": tmp_path}
    made = tiered(budget=48, prefill_chunk=16, tiers=tiers)
    turns(made, 5, 3)
    disk = SlowDisk(outside(made).store.disk, lambda: None)
    pages = len(disk.file._held)

    def turn_and_answer(one: Session) -> None:
        one.append([user(6, 3)])
        one.generate(max_new_tokens=7, eos_token_id=NEVER)

    interrupted = 0
    for at in range(100, 10**9, 4507):
        copy = made.fork()
        seen = copy.cache.seen
        before = {*kept(copy.cache), *outside_positions(copy)}
        passed, _ = interrupt_at(at, lambda copy=copy: turn_and_answer(copy), ("engine", "tiers"))
        interrupted += passed and copy.cache.seen == seen
        after = {*kept(copy.cache), *outside_positions(copy)}
        assert before <= after == set(range(copy.cache.seen))
        turn_and_answer(copy)
        copy.close()
        disk.rest()
        assert len(disk.file._held) == pages and {*disk.file._held.values()} == {1}
        assert disk.file._users == 1
        if not passed:
            break
    assert interrupted > 1 and disk.ahead > 0
    made.close()
    assert disk.file.file.closed
