"""Recorded traces under many policies and budgets: what is missing of a run, and its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from memdecay.calibration.player import Script
from memdecay.errors import StudyError
from memdecay.evidence import SETS
from memdecay.policy import Policy
from memdecay.policy.full import Full
from memdecay.study.rows import made_by, rows_of, write_rows
from memdecay.study.run import Advance, Workers, write_json
from memdecay.study.trace_play import TieredPolicy, TraceRun, TraceTask, config_of, digest

CONFIG = "traces.json"

TRACE_SCHEMA = pa.schema(
    [
        ("trace", pa.string()),
        ("trace_digest", pa.string()),
        ("model", pa.string()),
        ("weights", pa.string()),
        ("dtype", pa.string()),
        ("policy", pa.string()),
        ("policy_config", pa.string()),
        ("budget", pa.float64()),
        ("budget_tokens", pa.int64()),
        ("tokens", pa.int64()),
        ("past_trained", pa.int64()),
        ("scored_tokens", pa.int64()),
        ("nll", pa.float64()),
        ("full_nll", pa.float64()),
        ("delta_nll", pa.float64()),
        ("top1_agreement", pa.float64()),
        ("peak_resident_tokens", pa.int64()),
        ("evicted_tokens", pa.int64()),
        ("observations", pa.int64()),
        ("idle_s", pa.float64()),
        ("seconds", pa.float64()),
        ("score_chunk", pa.int64()),
        ("seed", pa.int64()),
        ("settings", pa.string()),
        ("refused", pa.string()),
        ("versions", pa.string()),
        ("commit", pa.string()),
        ("date", pa.string()),
    ]
)
"""Columns of a row: `docs/study.md` says what each means."""


def run_traces(
    run: TraceRun,
    scripts: Sequence[Script],
    policies: Sequence[Policy | TieredPolicy],
    budgets: Sequence[float],
    folder: Path,
    workers: Workers,
    *,
    advance: Advance = lambda kind, share: None,
    planned: Advance = lambda kind, total: None,
) -> list[str]:
    """Run what is missing of traces × policies × budgets, and return what was cut, in words.

    Every trace is read on the full cache too, which the others are compared with. Rows that are
    there already stay as they are; a trace's file is written whole after each new row.

    Args:
        run: what all rows have in common.
        scripts: the traces, a turn a stage; their names must differ.
        policies: what decides; one that never evicts is run once, without a budget. One with tiers
            below the cache needs a profile with heads.
        budgets: shares of a trace's tokens, above 0 and up to 1.
        folder: of the run.
        workers: who does it.
        advance: is told of progress, "size" in traces and "trace" in tokens.
        planned: is told how much of a kind there is to do.

    Raises:
        StudyError: an argument is not usable, or the folder holds a run of something else.
    """
    _check(run, scripts, policies, budgets)
    about = _claim(folder, run)
    sizes: dict[str, dict[str, Any]] = about["traces"]
    unknown = []
    for script in scripts:
        known = sizes.get(script.name)
        if known is None:
            unknown.append(TraceTask("size", run, script))
        elif known["digest"] != digest(asdict(script)):
            raise StudyError(
                f"{str(folder)!r} holds rows of another text of trace {script.name!r}; use another "
                f"--out, or remove it."
            )
    planned("size", len(unknown))
    for task, ends in workers.results(unknown, advance):
        sizes[task.script.name] = {"digest": digest(asdict(task.script)), "turn_ends": ends}
        advance("size", 1)
    cuts = [_cut(script, sizes[script.name]["turn_ends"], run.max_tokens) for script in scripts]
    write_json(folder / CONFIG, about)
    provenance = made_by()
    cells = [(policy, share) for policy in policies if policy.bounded for share in budgets]
    whole = [Full(), *(one for one in policies if not one.bounded and one != Full())]
    tasks = []
    for script, tokens, _ in cuts:
        done = {_key(row) for row in rows_of(_rows(folder, script.name), *_KEY)}
        tasks += [
            TraceTask("trace", run, script, policy, share, tokens, provenance)
            for policy, share in [*((one, 1.0) for one in whole), *cells]
            if (policy.name, config_of(policy), share) not in done
        ]
    planned("trace", sum(task.tokens for task in tasks))
    for task, row in workers.results(tasks, advance):
        # What was cut is part of the settings, so the digest is that of the whole trace.
        row["trace_digest"] = sizes[task.script.name]["digest"]
        path = _rows(folder, task.script.name)
        before = rows_of(path)
        # Another run into this folder may have made the same meanwhile.
        if _key(row) not in {_key(one) for one in before}:
            write_rows(path, [*before, row], TRACE_SCHEMA)
    return [note for _, _, note in cuts if note]


_KEY = ("policy", "policy_config", "budget")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def _rows(folder: Path, name: str) -> Path:
    return folder / "rows" / f"{name}.parquet"


def _check(
    run: TraceRun,
    scripts: Sequence[Script],
    policies: Sequence[Policy | TieredPolicy],
    budgets: Sequence[float],
) -> None:
    names = [script.name for script in scripts]
    for what, given in (("traces", names), ("policies", policies), ("budgets", budgets)):
        if not given:
            raise StudyError(f"{what} is empty, but a run needs at least one.")
    for name in names:
        if names.count(name) > 1:
            raise StudyError(f"Two traces are named {name!r}, but their names must differ.")
        if not name.strip(".") or "/" in name or "\\" in name:
            raise StudyError(f"A trace is named {name!r}, but it must be usable as a file name.")
    for share in budgets:
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not number or not 0 < share <= 1:
            raise StudyError(f"budget is {share!r}, but it must be a share above 0 and up to 1.")
    tiered = [one.name for one in policies if isinstance(one, TieredPolicy) and one.recalls]
    if tiered and not any(run.profile.evidence.get(name) for name in SETS):
        raise StudyError(
            f"policy is {tiered[0]!r}, but the profile has no evidence heads, by which tiers find "
            f"pages; give one with them, as memdecay calibrate writes it."
        )


def _claim(folder: Path, run: TraceRun) -> dict[str, Any]:
    """Return what this folder is a run of, after a check that it is one of this.

    Raises:
        StudyError: it is a run of something else, or its file is damaged.
    """
    path = folder / CONFIG
    now = {**run.settings(), "traces": {}}
    if not path.exists():
        return now
    try:
        before = json.loads(path.read_text("utf-8"))
        for one in before["traces"].values():
            _ = one["digest"], one["turn_ends"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise StudyError(f"{str(path)!r} is damaged; remove it, or use another --out.") from None
    for name, value in run.settings().items():
        if before.get(name) != value:
            raise StudyError(
                f"{str(folder)!r} holds a run with {name} {before.get(name)!r}, not {value!r}; use "
                f"another --out, or remove it."
            )
    return {**now, "traces": before["traces"]}


def _cut(script: Script, ends: Sequence[int], limit: int | None) -> tuple[Script, int, str | None]:
    """Leave out the turns that pass a number of tokens; returns the tokens, and a note too.

    Raises:
        StudyError: not even the first turn fits.
    """
    kept = sum(limit is None or end <= limit for end in ends)
    if not kept:
        raise StudyError(
            f"max_tokens is {limit}, but the first turn of {script.name!r} has {ends[0]:,} tokens; "
            f"leave that trace out, or allow more."
        )
    if kept == len(ends):
        return script, ends[-1], None
    note = f"{script.name}: only the first {kept} of {len(ends)} turns, {ends[kept - 1]:,} tokens."
    return replace(script, stages=script.stages[:kept], closing=""), ends[kept - 1], note
