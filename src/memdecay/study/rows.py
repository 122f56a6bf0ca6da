"""The rows of a study, one a probe and condition, in files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from memdecay.errors import StudyError
from memdecay.provenance import commit, versions

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = pa.schema(
    [
        ("setting", pa.string()),
        ("model", pa.string()),
        ("tier", pa.string()),
        ("dtype", pa.string()),
        ("scenario", pa.string()),
        ("variant", pa.int64()),
        ("region", pa.string()),
        ("fact_kind", pa.string()),
        ("group", pa.string()),
        ("policy", pa.string()),
        ("condition", pa.string()),
        ("seed", pa.int64()),
        ("budget", pa.float64()),
        ("budget_tokens", pa.int64()),
        ("seq_len", pa.int64()),
        ("kept_tokens", pa.int64()),
        ("recall", pa.bool_()),
        ("answer", pa.string()),
        ("gold", pa.string()),
        ("gold_logprob", pa.float64()),
        ("gold_tokens", pa.int64()),
        ("keep_digest", pa.string()),
        ("engine", pa.string()),
        ("versions", pa.string()),
        ("commit", pa.string()),
        ("date", pa.string()),
    ]
)
"""Columns of a row: `docs/study.md` says what each means."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema = SCHEMA) -> None:
    """Write rows to a file that is either complete or not there.

    Raises:
        StudyError: the folder cannot be written.
    """
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    write_whole(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def write_whole(path: Path, write: Any) -> None:
    """Let `write(partial_path)` make a file, and put it in its place in one step.

    Raises:
        StudyError: the folder cannot be written.
    """
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        os.close(handle)
        write(partial)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except OSError as error:
        raise StudyError(f"{path.name!r} cannot be written: {error.strerror or error}.") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def rows_of(path: Path, *columns: str) -> list[dict[str, Any]]:
    """Return the rows of one file, none if there is no file yet.

    Raises:
        StudyError: it is damaged.
    """
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(columns) or None).to_pylist()
    except (pa.ArrowException, OSError):
        raise StudyError(f"{str(path)!r} is damaged; remove it, and it is made again.") from None
    return rows


def made_by() -> dict[str, str]:
    """Return what each row says of its making: versions, commit, date."""
    return {
        "versions": json.dumps(versions("tokenizers"), sort_keys=True),
        "commit": commit() or "",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def read_rows(
    folder: Path, kinds: Sequence[str] = ("rows", "peers"), schema: pa.Schema = SCHEMA
) -> pd.DataFrame:
    """Return all rows of a run, those of peers too, in a fixed order.

    Args:
        folder: of the run.
        kinds: the folders in it that hold rows.
        schema: columns to return; those that are not in `SCHEMA` are empty where a file has none.

    Raises:
        StudyError: there are none, or a file is not one of rows.
    """
    files = [file for kind in kinds for file in sorted(folder.glob(f"{kind}/*.parquet"))]
    if not files:
        raise StudyError(f"runs is {str(folder)!r}, but there are no rows under it.")
    tables = []
    for file in files:
        try:
            table = pq.read_table(file)
        except (pa.ArrowInvalid, OSError):
            raise StudyError(f"{file.name!r} is not a parquet file of rows.") from None
        missing = [name for name in SCHEMA.names if name not in table.column_names]
        if missing:
            raise StudyError(f"{file.name!r} is not a file of rows: it has no {missing[0]!r}.")
        for column in schema:
            if column.name not in table.column_names:
                table = table.append_column(column, pa.nulls(len(table), column.type))
        try:
            tables.append(table.select(schema.names).cast(schema))
        except pa.ArrowException as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise StudyError(f"{file.name!r} is not a file of rows: {reason}.") from None
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
    _check_values(frame, folder)
    key = ["scenario", "variant", "group", "policy", "condition", "seed", "budget", "region"]
    frame = frame.sort_values(key, ascending=[True] * 6 + [False, True], kind="stable")
    return frame.reset_index(drop=True)


def _check_values(frame: pd.DataFrame, folder: Path) -> None:
    """Refuse values that no study writes.

    Raises:
        StudyError: naming the column.
    """
    for name in SCHEMA.names:
        if name not in ("gold_logprob", "gold_tokens") and bool(frame[name].isna().any()):
            raise StudyError(f"The rows under {str(folder)!r} have an empty {name!r}.")
    if bool((frame["seq_len"] < 1).any()) or bool((frame["budget"] <= 0).any()):
        raise StudyError(
            f"The rows under {str(folder)!r} have a seq_len or budget that is not above 0."
        )
    if bool(frame["gold_logprob"].abs().eq(float("inf")).any()):
        raise StudyError(f"The rows under {str(folder)!r} have a gold_logprob that is not finite.")
