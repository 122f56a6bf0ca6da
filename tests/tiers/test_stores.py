"""Stores: what comes out is what went in, within limits, whatever happens to the disk."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memdecay.errors import MemDecayError
from memdecay.tiers import DiskStore, HostStore, Store, TierWarning, nbytes, quantize
from memdecay.tiers.extents import Extents
from tiers.tier_pages import identical, page

EACH = pytest.mark.parametrize("make", [HostStore, DiskStore])
Make = Callable[..., Store[Any]]


@pytest.fixture(autouse=True)
def files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a directory of their own are made where the test can see them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_come_back_to_the_bit(make: Make, dtype: torch.dtype) -> None:
    odd = page(7, dtype=dtype)
    odd.keys[0, 0, 0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    pages = [odd, quantize(page(7, dtype=dtype), 4), quantize(page(3, dtype=dtype), 8)]
    store = make()
    assert all(store.put(number, one) for number, one in enumerate(pages))
    assert [*store] == [0, 1, 2]
    assert store.bytes == sum(map(nbytes, pages))
    for number, one in enumerate(pages):
        assert identical(store.get(number), one)
    assert identical(pages[1].restore(), store.get(1).restore())
    for number, one in enumerate(pages):
        assert identical(store.pop(number), one)
        assert store.get(number) is None and store.pop(number) is None
    assert (len(store), store.tokens, store.bytes) == (0, 0, 0)


@EACH
def test_a_page_is_copied(make: Make) -> None:
    store, whole = make(), page(32)
    part = page(32)
    part = type(part)(
        positions=whole.positions[8:16],
        keys=whole.keys[:, :, 8:16],
        values=whole.values[:, :, 8:16],
        columns={name: column[8:16] for name, column in whole.columns.items()},
    )
    store.put(3, part)
    whole.keys.zero_()
    back = store.get(3)
    assert torch.equal(back.keys, page(32).keys[:, :, 8:16])
    assert back.keys.untyped_storage().nbytes() == nbytes(part) == store.bytes


@EACH
def test_limits_hold(make: Make) -> None:
    store = make(max_tokens=12)
    assert store.put(0, page(5)) and store.put(1, page(7))
    assert not store.put(2, page(1)) and 2 not in store
    store.discard(0)
    store.discard(0)
    assert store.put(2, page(5)) and store.tokens == 12
    size = nbytes(page(5))
    store = make(max_bytes=2 * size - 1)
    assert store.put(0, page(5)) and not store.put(1, page(5))
    assert store.put(1, page(4)) and store.bytes == size + nbytes(page(4))


@EACH
def test_what_is_no_page_of_its_own_is_refused(make: Make) -> None:
    store = make()
    store.put(4, page())
    with pytest.raises(MemDecayError, match="page_id is 4, but that page is in the store already"):
        store.put(4, page(seed=1))
    assert identical(store.get(4), page())
    with pytest.raises(MemDecayError, match="Page 5 has no tokens"):
        store.put(5, page(0))


@EACH
@pytest.mark.parametrize("limit", [-1, 1.5, True, "8"])
@pytest.mark.parametrize("name", ["max_tokens", "max_bytes"])
def test_limits_that_are_none_are_refused(make: Make, name: str, limit: object) -> None:
    with pytest.raises(MemDecayError, match=f"{name} is {limit!r}, but it must be an integer"):
        make(**{name: limit})


class Moves(RuleBasedStateMachine):
    """Random moves, beside a dictionary."""

    make: Make = HostStore
    limit = 40

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make(max_tokens=self.limit)
        self.there: dict[int, Any] = {}

    def teardown(self) -> None:
        if isinstance(self.store, DiskStore):
            self.store.close()

    @rule(count=st.integers(1, 9), seed=st.integers(0, 99), bits=st.sampled_from([0, 4, 8]))
    def put(self, count: int, seed: int, bits: int) -> None:
        number = max(self.there, default=-1) + 1
        one = page(count, seed=seed, dtype=torch.bfloat16, shape=(1, 2, 4))
        one = quantize(one, bits) if bits else one
        room = sum(len(each.positions) for each in self.there.values()) + count <= self.limit
        assert self.store.put(number, one) == room
        if room:
            self.there[number] = one

    @precondition(lambda self: self.there)
    @rule(data=st.data(), how=st.sampled_from(["get", "pop", "discard"]))
    def out(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        got = getattr(self.store, how)(number)
        assert got is None if how == "discard" else identical(got, self.there[number])
        if how != "get":
            del self.there[number]

    @invariant()
    def same(self) -> None:
        assert [*self.store] == [*self.there] and len(self.store) == len(self.there)
        assert self.store.tokens == sum(len(one.positions) for one in self.there.values())
        assert self.store.bytes == sum(map(nbytes, self.there.values()))
        if isinstance(self.store, DiskStore):
            length = os.fstat(self.store._shared.file.fileno()).st_size
            assert self.store.bytes <= self.store.file_bytes == length
            assert self.there or length == 0


class DiskMoves(Moves):
    make = DiskStore


SEEDED = settings(
    derandomize=True, deadline=None, database=None, max_examples=12, stateful_step_count=20
)


@pytest.mark.parametrize("moves", [Moves, DiskMoves])
def test_random_moves(moves: type[Moves]) -> None:
    moves.TestCase.settings = SEEDED
    moves.TestCase("runTest").runTest()


def test_gaps_are_merged_and_used_again() -> None:
    extents = Extents()
    first, second, third, last = (extents.take(size) for size in (10, 20, 30, 5))
    assert (first, second, third, last, extents.end) == (0, 10, 30, 60, 65)
    extents.give_back(first, 10)
    extents.give_back(third, 30)
    extents.give_back(second, 20)
    assert extents.take(60) == 0
    extents.give_back(last, 5)
    assert extents.end == 60
    extents.give_back(0, 60)
    assert extents.end == 0 and extents.take(3) == 0


@EACH
def test_a_thousand_cycles_leave_nothing(make: Make) -> None:
    store, one = make(), page(2, shape=(1, 1, 2))
    for number in range(1000):
        store.put(number, one)
        if number >= 3:
            assert store.pop(number - 3) is not None
        if isinstance(store, DiskStore):
            assert store.file_bytes <= 4 * nbytes(one)
    assert (len(store), store.bytes) == (3, 3 * nbytes(one))


@EACH
def test_one_thread_reads_while_another_writes(make: Make) -> None:
    store, wrong = make(), []
    pages = [page(1 + number % 4, seed=number, shape=(1, 1, 2)) for number in range(8)]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in store:
                got = store.get(number)
                if got is not None and not identical(got, pages[number % 8]):
                    wrong.append(number)

    reader = threading.Thread(target=read)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reader.start()
        for number in range(200):
            store.put(number, pages[number % 8])
            if number >= 5:
                wrong += [] if store.pop(number - 5) is not None else [number]
        done.set()
        reader.join()
    assert not wrong and not said


# The disk


def test_the_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    stores = [DiskStore(tmp_path), DiskStore(tmp_path)]
    for number, store in enumerate(stores):
        store.put(0, page(seed=number))
        if os.name == "posix":
            about = os.fstat(store._shared.file.fileno())
            assert stat.S_IMODE(about.st_mode) == 0o600 and about.st_nlink == 0
            assert not [*tmp_path.iterdir()]
    for number, store in enumerate(stores):
        assert identical(store.get(0), page(seed=number))
        store.close()


def test_a_closed_store_keeps_nothing_more(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(0, page())
    store.close()
    assert store.get(0) is None and (len(store), store.bytes, store.file_bytes) == (0, 0, 0)
    with pytest.warns(TierWarning, match="could not be kept and is dropped: the store is closed"):
        assert not store.put(1, page())


@pytest.mark.parametrize("damage", ["changed", "cut off"])
def test_a_page_that_changed_is_dropped_and_never_returned(damage: str) -> None:
    store = DiskStore()
    for number in range(3):
        store.put(number, page(seed=number))
    size = store.bytes // 3
    if damage == "changed":
        store._shared.file.seek(size + size // 2)
        byte = store._shared.file.read(1)
        store._shared.file.seek(size + size // 2)
        store._shared.file.write(bytes([byte[0] ^ 1]))
    else:
        store._shared.file.truncate(size + 3)
    with pytest.warns(TierWarning, match="is lost and is dropped: what is read is not what was"):
        assert store.get(1) is None
    assert 1 not in store and store.bytes == 2 * size
    assert identical(store.get(0), page())
    if damage == "changed":
        assert identical(store.pop(2), page(seed=2))
    else:
        with pytest.warns(TierWarning):
            assert store.pop(2) is None
    assert store.put(1, page(seed=5)) and identical(store.get(1), page(seed=5))


class Failing:
    """A file on a disk that is full after some bytes, or that cannot be read."""

    def __init__(self, file: Any, free: int) -> None:
        self.file, self.free = file, free

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: memoryview) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.file.write(content[: self.free])
        self.free -= count
        return count

    def fileno(self) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    readinto = fileno


def test_a_full_disk_drops_the_page_and_goes_on() -> None:
    store = DiskStore()
    store.put(0, page())
    file, size = store._shared.file, store.file_bytes
    store._shared.file = Failing(file, free=nbytes(page()) // 2)
    with pytest.warns(TierWarning, match="could not be kept and is dropped: No space left"):
        assert not store.put(1, page(seed=1))
    assert 1 not in store and store.file_bytes == size == os.fstat(file.fileno()).st_size
    store._shared.file = file
    assert identical(store.get(0), page())
    assert store.put(1, page(seed=1)) and identical(store.get(1), page(seed=1))


def test_a_disk_that_cannot_be_read_loses_the_page() -> None:
    store = DiskStore()
    store.put(0, page())
    store._shared.file = Failing(store._shared.file, free=0)
    with pytest.warns(TierWarning, match="is lost and is dropped: Input/output error"):
        assert store.get(0) is None
    assert len(store) == 0


def test_an_interrupted_write_leaves_no_trace() -> None:
    store = DiskStore()
    file = store._shared.file

    class Interrupted(Failing):
        def write(self, content: memoryview) -> int:
            raise KeyboardInterrupt

    store._shared.file = Interrupted(file, free=0)
    with pytest.raises(KeyboardInterrupt):
        store.put(0, page())
    store._shared.file = file
    assert (len(store), store.bytes, store.file_bytes) == (0, 0, 0)
    assert store.put(0, page()) and identical(store.get(0), page())


@pytest.mark.parametrize("directory", ["missing", "file", 3.5, "a\0b"])
def test_a_directory_that_cannot_be_used_is_refused(directory: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = directory if directory in (3.5, "a\0b") else str(tmp_path / str(directory))
    with pytest.raises(MemDecayError, match=r"disk_folder is .*, but no file can be made there: "):
        DiskStore(given)  # type: ignore[arg-type]


CHILD = """
import itertools, resource, sys, warnings
warnings.simplefilter("ignore")
from memdecay.tiers import DiskStore, nbytes
from tiers.tier_pages import identical, page
store, one = DiskStore(sys.argv[1]), page(64)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * nbytes(one) // 2, hard))
print([store.put(number, one) for number in range(4)], identical(store.get(0), one), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for number in itertools.count(2):
    store.put(number, one)
    if number == 9:
        print("writing", flush=True)
    if number > 20:
        store.pop(number - 20)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits and signals of POSIX systems")
def test_a_process_with_no_room_that_is_killed_in_a_write_leaves_no_file(tmp_path: Path) -> None:
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        beside = DiskStore(tmp_path)
        beside.put(0, page())
        assert process.stdout is not None
        assert process.stdout.readline() == "[True, True, False, False] True\n"
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert not [*tmp_path.iterdir()]
    assert identical(beside.get(0), page())
    after = DiskStore(tmp_path)
    assert after.put(0, page(seed=1)) and identical(after.get(0), page(seed=1))
