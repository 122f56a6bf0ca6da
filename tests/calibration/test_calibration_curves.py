"""Curves: sums as they come are the sums of a literal loop, and files hold them whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memdecay.calibration.curves import CurveListener, Curves, bucket_ages, load_curves, stack
from memdecay.calibration.player import Observation, Tape
from memdecay.errors import StudyError
from memdecay.regions import REGIONS


def random_steps(seed, steps=40, most=60):
    """Tapes that grow and what their steps saw: (tape, observations)."""
    rng = np.random.default_rng(seed)
    tape, seen, now = Tape(), [], 0
    for _ in range(steps):
        for _ in range(int(rng.integers(0, most // 10))):  # a prompt part
            arrive(tape, rng, now)
        if rng.random() < 0.2:
            mass = torch.from_numpy(rng.random(len(tape.ids)).astype(np.float32))
            seen.append(Observation(now, mass, decoding=False))
        now += int(rng.integers(1, 3))
        arrive(tape, rng, now)
        mass = torch.from_numpy(rng.random(len(tape.ids)).astype(np.float32))
        seen.append(Observation(now, mass, decoding=True))
    return tape, seen


def arrive(tape, rng, now):
    tape.ids.append(0)
    tape.regions.append(REGIONS[rng.integers(len(REGIONS))])
    tape.spans.append(1)
    tape.inserted_at.append(now)


def loop(tape, seen, bucket):
    """The sums, token by token: (region, bucket) -> [mass, count]."""
    cells = {}
    for one in seen:
        if not one.decoding:
            continue
        for i, mass in enumerate(one.mass.tolist()):
            age = one.now - tape.inserted_at[i]
            if age == 0:
                continue
            j = 0
            while not 1 + j * bucket <= age <= (j + 1) * bucket:
                j += 1
            cell = cells.setdefault((tape.regions[i], j), [0.0, 0])
            cell[0] += mass
            cell[1] += 1
    return cells


@pytest.mark.parametrize("bucket", [1, 3, 4, 50])
@pytest.mark.parametrize("seed", range(3))
def test_streaming_sums_are_those_of_a_loop(seed, bucket):
    tape, seen = random_steps(seed)
    curves = Curves("t", "c", bucket=bucket)
    listener = CurveListener(curves)
    for one in seen:
        listener(one, tape)  # the whole tape is known already, as after a chunk
    cells = loop(tape, seen, bucket)
    assert int((curves.count > 0).sum()) == len(cells) > 5
    for (region, j), (mass, count) in cells.items():
        row = REGIONS.index(region)
        assert curves.count[row, j] == count
        assert curves.total[row, j] == pytest.approx(mass, rel=1e-6)
    assert curves.steps == 40


def test_a_tape_that_grows_gives_the_same():
    tape, seen = random_steps(5)
    whole, growing = Curves("t", "c"), Curves("t", "c")
    late, early = CurveListener(whole), CurveListener(growing)
    for one in seen:
        late(one, tape)
        count = len(one.mass)
        early(one, Tape(tape.ids[:count], tape.regions[:count], tape.spans[:count],
                        tape.inserted_at[:count]))  # fmt: skip
    assert np.array_equal(whole.total, growing.total)
    assert np.array_equal(whole.count, growing.count)


def test_bucket_borders_and_middles():
    curves = Curves("t", "c", bucket=4)
    ages = np.arange(0, 10)
    curves.add(np.zeros(10, np.int64), ages, np.ones(10))
    assert curves.count[0, :3].tolist() == [4, 4, 1]  # age 0 is the query's own token
    assert curves.ages[:3].tolist() == [2.5, 6.5, 10.5]
    assert bucket_ages(2, 1).tolist() == [1, 2]


def test_memory_is_bound_by_the_oldest_age_not_by_steps():
    curves = Curves("t", "c", bucket=4)
    region, age = np.zeros(50, np.int64), np.arange(50)
    for _ in range(500):
        curves.add(region, age, np.ones(50))
    assert curves.total.shape[1] <= 20 and curves.count.sum() == 500 * 49


def measured(name="t", cluster="c", seed=0, **options):
    tape, seen = random_steps(seed)
    curves = Curves(name, cluster, **options)
    listener = CurveListener(curves)
    for one in seen:
        listener(one, tape)
    return curves


def test_a_file_holds_them_whole(tmp_path):
    curves = measured(meta={"model": "m", "nested": {"burst": 48}})
    curves.save(tmp_path / "t.parquet")
    again = Curves.load(tmp_path / "t.parquet")
    width = again.total.shape[1]
    assert np.array_equal(again.total, curves.total[:, :width])
    assert np.array_equal(again.count, curves.count[:, :width])
    assert not curves.count[:, width:].any()
    names = ("name", "cluster", "regions", "bucket", "steps", "meta")
    assert [getattr(again, n) for n in names] == [getattr(curves, n) for n in names]
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


def test_the_same_curves_are_the_same_file(tmp_path):
    measured().save(tmp_path / "a")
    measured().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saving_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    import pyarrow.parquet

    measured().save(tmp_path / "t.parquet")
    before = (tmp_path / "t.parquet").read_bytes()

    def full(table, where, **options):
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(StudyError, match="cannot be written: No space left on device"):
        measured(seed=1).save(tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


def test_other_files_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "junk.parquet").write_bytes(b"junk")
    pq.write_table(pa.table({"region": ["user"]}), tmp_path / "other.parquet")
    for name in ("junk", "other"):
        with pytest.raises(StudyError, match=f"{name}.parquet' is not a file of measured curves"):
            Curves.load(tmp_path / f"{name}.parquet")
    with pytest.raises(StudyError, match="do not exist"):
        Curves.load(tmp_path / "none.parquet")


def test_a_folder_is_read_by_name(tmp_path):
    for name in ("b", "a"):
        measured(name).save(tmp_path / f"{name}.parquet")
    assert [one.name for one in load_curves(tmp_path)] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(StudyError, match=r"no measured curves \(\*.parquet\)"):
        load_curves(tmp_path / "empty")


def test_stacking_puts_regions_and_ages_together():
    one, other = Curves("a", "c"), Curves("b", "c", regions=("notes", "user"))
    one.add(np.array([2, 2]), np.array([1, 9]), np.array([0.5, 0.25]))
    other.add(np.array([0, 1]), np.array([2, 1]), np.array([0.125, 1.0]))
    names, total, count = stack([one, other])
    assert names == (*REGIONS, "notes")
    assert total.shape == count.shape == (2, 8, 3)
    assert total[0, 2].tolist() == [0.5, 0, 0.25] and total[1, 2].tolist() == [1.0, 0, 0]
    assert total[1, 7].tolist() == [0.125, 0, 0] and count.sum() == 4
    with pytest.raises(StudyError, match="widths of 2 and 4 steps"):
        stack([one, Curves("b", "c", bucket=2)])
    with pytest.raises(StudyError, match="at least one curve"):
        stack([])


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True])
def test_a_bucket_has_a_whole_number_of_steps(bucket):
    with pytest.raises(StudyError, match=f"bucket is {bucket!r}, but it must be an integer"):
        Curves("t", "c", bucket=bucket)
