"""Pages on two levels, and stores that are copied."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from memdecay.errors import MemDecayError
from memdecay.tiers import DiskStore, HostStore, Levels, TierWarning, quantize
from memdecay.tiers.packing import Layout, pack, unpack
from tiers.tier_pages import identical, page


def levels(folder: Path, host: int | None, disk: int | None, **settings: Any) -> Levels:
    made = Levels(
        None if host == 0 else HostStore(max_tokens=host),
        None if disk == 0 else DiskStore(folder, max_tokens=disk),
        **settings,
    )
    made.moves = []  # type: ignore[attr-defined]
    made.on_move = lambda *move: made.moves.append(move)  # type: ignore[attr-defined]
    return made


def test_the_oldest_goes_down_and_then_is_lost(tmp_path: Path) -> None:
    made: Any = levels(tmp_path, 10, 5)
    for number in range(4):
        assert made.put(number, page(5, seed=number))
    assert made.moves == [(0, "disk"), (0, "lost"), (1, "disk")]
    assert [*made] == [1, 2, 3] and len(made) == 3 and made.tokens == 15
    assert [made.tier_of(number) for number in range(4)] == [None, "disk", "host", "host"]
    assert made.moved_down == 2
    for number in (1, 2, 3):
        assert identical(made.get(number), page(5, seed=number))
        assert identical(made.pop(number), page(5, seed=number))
    assert made.tokens == made.bytes == len(made) == 0 and made.pop(0) is made.get(0) is None


def test_what_is_larger_than_memory_goes_to_disk_alone(tmp_path: Path) -> None:
    made: Any = levels(tmp_path, 6, 8)
    assert made.put(0, page(5)) and made.put(1, page(7))
    assert [made.tier_of(number) for number in (0, 1)] == ["host", "disk"]
    assert not made.put(2, page(9)), "larger than both"
    assert made.moves == [] and len(made) == 2
    with pytest.raises(MemDecayError, match="in the store already"):
        made.put(1, page(5))
    with pytest.raises(MemDecayError, match="need at least one"):
        Levels(None, None)


def of_region(number: int, region: int) -> Any:
    made = page(5, seed=number)
    made.columns["region"].fill_(0)[2] = region
    return made


def test_a_page_with_a_token_that_must_not_be_on_disk_stays_in_memory(tmp_path: Path) -> None:
    made: Any = levels(tmp_path, 10, None, not_on_disk=[8])
    for number, region in enumerate((8, 1, 1, 8, 1, 8)):
        made.put(number, of_region(number, region))
    assert made.moves == [(1, "disk"), (2, "disk"), (0, "lost"), (4, "disk")]
    assert [*made.host] == [3, 5] and [*made.disk] == [1, 2, 4]
    only_disk: Any = levels(tmp_path, 0, None, not_on_disk=[8])
    assert not only_disk.put(0, of_region(0, 8)) and only_disk.put(1, of_region(1, 1))


def test_a_disk_that_fails_loses_the_page_with_a_warning(tmp_path: Path) -> None:
    made: Any = levels(tmp_path, 5, None)
    made.put(0, page(5))
    made.disk.close()
    with pytest.warns(TierWarning, match="could not be kept"):
        assert made.put(1, page(5))
    assert made.moves == [(0, "lost")] and [*made] == [1] and made.moved_down == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_copies_share_bytes_and_go_their_own_way(kind: str, tmp_path: Path) -> None:
    store: Any = HostStore() if kind == "host" else DiskStore(tmp_path)
    expected: dict[Any, dict[int, int]] = {store: {}}
    rng = random.Random(3)
    for number in range(300):
        chosen = rng.choice([*expected])
        kept = expected[chosen]
        move = rng.choice(["put", "put", "pop", "copy"])
        if move == "put":
            assert chosen.put(number, page(4, seed=number))
            kept[number] = number
        elif move == "pop" and kept:
            gone = rng.choice([*kept])
            assert identical(chosen.pop(gone), page(4, seed=kept.pop(gone)))
        elif move == "copy" and len(expected) < 4:
            expected[chosen.copy()] = dict(kept)
        elif len(expected) > 1:
            del expected[chosen]
            if kind == "disk" and rng.random() < 0.5:
                chosen.close()
            del chosen
    for one, kept in expected.items():
        assert {*one} == {*kept} and one.tokens == 4 * len(kept)
        for at, seed in kept.items():
            assert identical(one.get(at), page(4, seed=seed))
    if kind == "disk":
        held = {number for kept in expected.values() for number in kept}
        file = store._shared
        assert len(file._held) == len(held)
        each = next(iter(expected)).bytes // max(1, len(next(iter(expected.values()))))
        assert file.end >= each * len(held)
        survivors = [*expected]
        for one in survivors:
            one.close()
            one.close()
        assert file.end == 0 and file.file.closed


def test_a_file_ends_with_its_last_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    file = store._shared.file
    copy = store.copy()
    store.close()
    assert not file.closed and copy.put(0, page())
    del copy, store
    assert file.closed


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_levels_are_told_and_restored(bits: int | None, tmp_path: Path) -> None:
    made: Any = levels(tmp_path, 10, None, not_on_disk=[8])
    given = {n: of_region(n, n % 2 * 8) for n in range(5)}
    if bits is not None:
        given = {number: quantize(one, bits) for number, one in given.items()}
    for number, one in given.items():
        made.put(number, one)
    plain, tensors = made.state()
    other: Any = levels(tmp_path, 10, None, not_on_disk=[8])
    assert other.restore(json.loads(json.dumps(plain)), tensors) == dict.fromkeys(made, 5)
    assert [*other] == [*made] and other.moved_down == made.moved_down
    assert other._staying == made._staying
    assert all(identical(other.get(number), given[number]) for number in made)
    buffer, layout = pack(given[0])
    told = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert told == layout and identical(unpack(buffer, told), given[0])
    assert buffer.dtype == torch.uint8
