"""Pages that are read ahead: the same bytes, whatever becomes of page, store and disk meanwhile."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from memdecay.tiers import DiskStore, HostStore, Levels, TierWarning, nbytes
from memdecay.tiers.prefetch import THREADS
from tiers.slow_disk import SlowDisk, eventually
from tiers.tier_pages import identical, page

SIZE = nbytes(page())


def filled(folder: Path, count: int = 6, **settings: Any) -> tuple[DiskStore, SlowDisk]:
    store = DiskStore(folder, **settings)
    for number in range(count):
        assert store.put(number, page(seed=number))
    return store, SlowDisk(store)


def test_what_was_fetched_is_not_read_again(tmp_path: Path) -> None:
    store, disk = filled(tmp_path)
    disk.go.set()
    store.fetch([4, 1, 99])
    store.fetch([1, 4])
    assert store.fetched_bytes == 2 * SIZE
    disk.rest()
    assert [store.arrived(number) for number in (1, 4, 2, 99)] == [True, True, False, False]
    assert identical(store.pop(4), page(seed=4)) and identical(store.get(1), page(seed=1))
    assert (disk.ahead, disk.at_once, store.fetched_bytes) == (2, 0, 0)
    assert identical(store.pop(1), page(seed=1)) and disk.at_once == 1
    assert (len(store), store.bytes) == (4, 4 * SIZE) and not store._shared._held.keys() - {
        place.start for _, place in store._pages.values()
    }
    eventually(lambda: all(one.name != "memdecay-disk" for one in threading.enumerate()))


def test_only_the_one_being_read_is_waited_for(tmp_path: Path) -> None:
    store, disk = filled(tmp_path)
    store.fetch(range(6))
    disk.reading(THREADS)
    assert identical(store.pop(THREADS), page(seed=THREADS)), "those not begun are read at once"
    assert disk.at_once == 1 and disk.ahead == 0
    threading.Timer(0.05, disk.go.set).start()
    assert identical(store.pop(0), page()) and disk.ahead > 0 and disk.at_once == 1


def test_what_is_not_asked_for_any_more_is_dropped(tmp_path: Path) -> None:
    store, disk = filled(tmp_path)
    store.fetch([0, 1, 2, 3])
    disk.reading(THREADS)
    store.fetch([3])
    assert store.fetched_bytes == SIZE and len(store._shared._background._jobs) == 1
    store.fetch([])
    assert store.fetched_bytes == 0 and not store._shared._background._jobs
    disk.go.set()
    disk.rest()
    assert disk.begun == THREADS and {*store._shared._held.values()} == {1}
    for number in range(6):
        assert identical(store.pop(number), page(seed=number))
    assert store.file_bytes == 0


def test_bytes_being_read_are_not_written_over(tmp_path: Path) -> None:
    store, disk = filled(tmp_path, 2)
    places = [place for _, place in store._pages.values()]
    store.fetch([0, 1])
    disk.reading(2)
    readings = [*store._fetched_pages.values()]
    store.discard(0)
    store.discard(1)
    assert (len(store), store.bytes, store.fetched_bytes) == (0, 0, 0)
    assert store.put(0, page(seed=8)) and store.put(1, page(seed=9))
    assert {place.start for _, place in store._pages.values()}.isdisjoint(
        place.start for place in places
    )
    disk.go.set()
    disk.rest()
    for reading in readings:
        reading.job.wait()  # by its checksum it is what was there
    for number in (0, 1):
        assert identical(store.pop(number), page(seed=8 + number))
    assert store.file_bytes == 0


def test_a_copy_has_fetched_nothing_and_reads_on_its_own(tmp_path: Path) -> None:
    store, disk = filled(tmp_path)
    store.fetch([0, 1])
    disk.reading(2)
    copy = store.copy()
    assert copy.fetched_bytes == 0 and not copy.arrived(0)
    assert identical(copy.pop(0), page()) and disk.at_once == 1
    store.close()
    assert not disk.file.file.closed and identical(copy.pop(1), page(seed=1))
    disk.go.set()
    disk.rest()
    assert identical(copy.get(5), page(seed=5))
    copy.close()
    assert disk.file.file.closed


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_store_that_ends_while_pages_are_read(how: str, tmp_path: Path) -> None:
    store, disk = filled(tmp_path)
    store.fetch(range(6))
    disk.reading(THREADS)
    if how == "closed":
        store.close()
        assert not disk.file._background._jobs and not disk.file.file.closed
    del store
    disk.go.set()
    eventually(lambda: disk.file.file.closed)
    disk.rest()


def test_a_page_that_cannot_be_read_is_lost_where_it_is_taken_out(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for number in range(3):
        store.put(number, page(seed=number))

    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = SlowDisk(store, fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.fetch([0, 1])
        disk.rest()
        assert store.arrived(0) and len(store) == 3
        store.fetch([0])
    with pytest.warns(TierWarning, match="is lost and is dropped: Input/output error"):
        assert store.pop(0) is None
    assert identical(store.pop(1), page(seed=1)), "not so what nobody wanted any more"
    assert [*store] == [2] and store.file_bytes == 3 * SIZE


def test_where_no_thread_can_be_started_pages_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store, disk = filled(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    store.fetch([0, 1])
    assert not store.arrived(0) and identical(store.pop(0), page()) and disk.at_once == 1
    monkeypatch.undo()
    disk.go.set()
    store.fetch([1, 2])
    disk.rest()
    assert store.arrived(1) and store.arrived(2)


def test_levels_fetch_what_is_on_disk(tmp_path: Path) -> None:
    made = Levels(HostStore(max_tokens=10), DiskStore(tmp_path))
    for number in range(4):
        made.put(number, page(5, seed=number))
    assert made.disk is not None and [*made.disk] == [0, 1]
    disk = SlowDisk(made.disk)
    made.fetch(range(9))
    assert [made.at_hand(number) for number in (0, 1, 2, 3, 9)] == [False, False, True, True, True]
    assert made.fetched_bytes == 2 * SIZE and made.bytes == 4 * SIZE
    disk.go.set()
    disk.rest()
    assert made.at_hand(0) and identical(made.pop(0), page(seed=0))
    assert made.copy().fetched_bytes == 0 and made.fetched_bytes == SIZE
    made.close()
    assert made.fetched_bytes == 0 and disk.file.file.closed
    alone = Levels(HostStore(), None)
    alone.fetch([0])
    assert alone.at_hand(0) and alone.fetched_bytes == 0


def test_random_moves_while_pages_are_read(tmp_path: Path) -> None:
    rng, naps = random.Random(4), random.Random(5)
    store = DiskStore(tmp_path)
    disk = SlowDisk(store, lambda: time.sleep(naps.choice([0, 0, 0.0005])))
    expected: dict[Any, dict[int, int]] = {store: {}}
    del store
    for number in range(1500):
        chosen = rng.choice([*expected])
        kept = expected[chosen]
        move = rng.choice(["put", "put", "pop", "fetch", "fetch", "discard", "get", "copy"])
        page_id = rng.choice([*kept, -1])
        if move == "put":
            assert chosen.put(number, page(1 + number % 4, seed=number, shape=(1, 2, 8)))
            kept[number] = number
        elif move == "fetch":
            chosen.fetch(rng.sample([*kept], min(len(kept), 4)))
        elif move == "discard":
            chosen.discard(page_id)
            kept.pop(page_id, None)
        elif move == "copy" and len(expected) < 4:
            expected[chosen.copy()] = dict(kept)
        elif move == "copy":
            del expected[chosen]
            if number % 2:
                chosen.close()
            del chosen
        elif page_id in kept:
            seed = kept[page_id] if move == "get" else kept.pop(page_id)
            got = getattr(chosen, move)(page_id)
            assert identical(got, page(1 + seed % 4, seed=seed, shape=(1, 2, 8)))
    assert disk.ahead > 100
    disk.rest()
    survivors = [*expected]
    for one in survivors:
        one.fetch([])
    assert {*disk.file._held} == {
        place.start for one in survivors for _, place in one._pages.values()
    }
    for one in survivors:
        one.close()
    assert disk.file.end == 0 and disk.file.file.closed


CHILD = """
import sys, time
from memdecay.tiers import DiskStore
from tiers.slow_disk import SlowDisk
from tiers.tier_pages import page
store = DiskStore(sys.argv[1])
for number in range(5):
    store.put(number, page(64, seed=number))
disk = SlowDisk(store, lambda: time.sleep(600))
store.fetch(range(5))
disk.reading(2)
print("reading", flush=True)
if sys.argv[2] == "killed":
    time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")
def test_a_process_ends_while_pages_are_read(tmp_path: Path) -> None:
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    ends = ("exit", "killed")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for end in ends
    ]
    try:
        for end, process in zip(ends, started, strict=True):
            assert process.stdout is not None and process.stdout.readline() == "reading\n"
            if end == "killed":
                process.send_signal(signal.SIGKILL)
            _, said = process.communicate(timeout=60)
            assert process.returncode == (0 if end == "exit" else -signal.SIGKILL) and not said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert not [*tmp_path.iterdir()]
