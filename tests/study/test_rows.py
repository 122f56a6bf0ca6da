"""Files of rows: whole or not there, read back in a fixed order, and refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memdecay.errors import StudyError
from memdecay.study.rows import SCHEMA, read_rows, write_rows, write_whole
from study.study_rows import condition_rows, ours


def rows(**options: Any) -> list[dict[str, Any]]:
    return condition_rows("memdecay-paper", ours, scenarios=("mill",), **options).to_dict("records")


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    written = rows()
    write_rows(tmp_path / "rows" / "mill-0.parquet", written)
    found = read_rows(tmp_path)
    assert list(found.columns) == SCHEMA.names
    key = ["variant", "budget", "region"]
    expected = pd.DataFrame(written)[SCHEMA.names]
    pd.testing.assert_frame_equal(
        found.sort_values(key, ignore_index=True), expected.sort_values(key, ignore_index=True)
    )


def test_the_order_does_not_depend_on_the_files(tmp_path: Path) -> None:
    made = rows(seeds=(0, 1))
    write_rows(tmp_path / "one" / "rows" / "a.parquet", made)
    for number in range(3):
        part = made[::-1][number::3]
        write_rows(tmp_path / "many" / "rows" / f"{9 - number}.parquet", part)
    pd.testing.assert_frame_equal(read_rows(tmp_path / "one"), read_rows(tmp_path / "many"))
    found = read_rows(tmp_path / "one")
    assert found["budget"].head(8).tolist() == [0.5] * 4 + [0.25] * 4
    assert found["seed"].is_monotonic_increasing or found["variant"].is_monotonic_increasing


def test_peers_are_read_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "mill-0.parquet", rows())
    write_rows(tmp_path / "peers" / "mill-0.parquet", rows(group="peer"))
    assert set(read_rows(tmp_path)["group"]) == {"paper", "peer"}


@pytest.mark.parametrize("old", [None, b"before"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "deep" / "x.bin"
    if old is not None:
        path.parent.mkdir()
        path.write_bytes(old)

    def write(partial: str) -> None:
        Path(partial).write_bytes(b"half of ")
        assert Path(partial).parent == path.parent and not partial.endswith(".bin")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, write)
    assert os.listdir(path.parent) == ([] if old is None else ["x.bin"])
    assert old is None or path.read_bytes() == old
    write_whole(path, lambda partial: Path(partial).write_bytes(b"after"))
    assert path.read_bytes() == b"after" and os.listdir(path.parent) == ["x.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StudyError, match=r"^'a.parquet' cannot be written: .*directory|exists"):
        write_rows(tmp_path / "runs" / "rows" / "a.parquet", rows())


class TestMistakes:
    def read(self, folder: Path) -> str:
        with pytest.raises(StudyError) as caught:
            read_rows(folder)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
        return str(caught.value)

    def test_no_rows(self, tmp_path: Path) -> None:
        assert "but there are no rows under it" in self.read(tmp_path / "none")

    def test_no_parquet(self, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "x.parquet").write_text("no")
        assert self.read(tmp_path) == "'x.parquet' is not a parquet file of rows."

    def test_a_column_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        table = pa.Table.from_pylist(rows()).drop_columns(["gold"])
        pq.write_table(table, tmp_path / "rows" / "x.parquet")
        assert self.read(tmp_path) == "'x.parquet' is not a file of rows: it has no 'gold'."

    def test_a_column_of_another_type(self, tmp_path: Path) -> None:
        (tmp_path / "peers").mkdir()
        made = [{**row, "kept_tokens": "many"} for row in rows()]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / "peers" / "x.parquet")
        assert self.read(tmp_path).startswith("'x.parquet' is not a file of rows: ")

    def test_narrow_types_of_peers_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "peers").mkdir()
        table = pa.Table.from_pylist(rows(group="peer"))
        for name, kind in (("budget", pa.float32()), ("kept_tokens", pa.int32())):
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast(kind))
        pq.write_table(
            table.add_column(0, "extra", pa.array([1] * len(table))),
            tmp_path / "peers" / "x.parquet",
        )
        assert read_rows(tmp_path).dtypes["kept_tokens"] == "int64"
