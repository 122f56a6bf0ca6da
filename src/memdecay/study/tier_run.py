"""The study of tiers: what is missing of a run, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from memdecay.errors import StudyError
from memdecay.regions import Profile
from memdecay.study.rows import SCHEMA, made_by, rows_of, write_rows
from memdecay.study.run import Advance, Workers, claim, episodes_of, profile_path
from memdecay.study.settings import Setting
from memdecay.study.tier_play import TierCondition, TierTask, tier_conditions

TIER_SCHEMA = pa.schema(
    [
        *SCHEMA,
        ("resident_bytes", pa.int64()),
        ("coded_tokens", pa.int64()),
        ("outside_tokens", pa.int64()),
        ("outside_bytes", pa.int64()),
        ("summary_bytes", pa.int64()),
        ("came_back", pa.int64()),
    ]
)
"""Columns of a row: `docs/study.md` says what each means."""
FOLDER = "tiers"
"""Of the rows, in the folder of a setting."""


def run_tiers(
    setting: Setting,
    runs: Path,
    workers: Workers,
    *,
    conditions: Sequence[TierCondition] | None = None,
    advance: Advance = lambda kind, share: None,
) -> tuple[Path, list[str]]:
    """Run what is missing of the study of tiers on one setting.

    Rows that are there already stay as they are: a run that was killed goes on where it was, and
    one with more conditions adds theirs.

    Args:
        setting: what to run.
        runs: the folder of all runs; this one goes to `runs / setting.name / "tiers"`.
        workers: who does it.
        conditions: what to compare; all that the tier has if None.
        advance: is told of progress, in episodes.

    Returns:
        The folder of the rows, and in words what was left out because pins do not fit.

    Raises:
        StudyError: the folder has no profiles with heads to find pages by, holds a run of
            something else, or cannot be written.
    """
    folder = runs / setting.name
    episodes = episodes_of(setting)
    chosen = tier_conditions(setting.tier) if conditions is None else tuple(conditions)
    scenarios = dict.fromkeys(episode.scenario for episode in episodes)
    profiles = {name: _profile(folder, setting, name).to_dict() for name in scenarios}
    claim(folder, setting, episodes)
    provenance = made_by()
    tasks = []
    for episode in episodes:
        done = {_key(row) for row in rows_of(rows_path(folder, episode.name), *_KEY)}
        missing = [one for one in chosen if (one.name, one.to_json(), one.share) not in done]
        if missing:
            profile = profiles[episode.scenario]
            tasks.append(TierTask(setting, episode, tuple(missing), profile, provenance))
    advance("tiers", len(episodes) - len(tasks))
    notes: list[str] = []
    for task, (made, left_out) in workers.results(tasks, advance):
        notes += left_out
        path = rows_path(folder, task.episode.name)
        before = rows_of(path)
        # Another run into this folder may have asked the same meanwhile.
        there = {_key(row) for row in before}
        new = [row for row in made if _key(row) not in there]
        if new:
            write_rows(path, [*before, *new], TIER_SCHEMA)
    return folder / FOLDER, notes


def rows_path(folder: Path, episode: str) -> Path:
    """Return the file of an episode's rows in the folder of a setting."""
    return folder / FOLDER / f"{episode}.parquet"


_KEY = ("policy", "condition", "budget")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def _profile(folder: Path, setting: Setting, scenario: str) -> Profile:
    """Return the profile that was measured on all other scenarios.

    Raises:
        StudyError: there is none, or no heads in it.
    """
    path = profile_path(folder, scenario)
    if not path.is_file():
        raise StudyError(
            f"{str(path)!r} is missing, but tiers need a profile that was measured on the other "
            f"scenarios; memdecay study run --setting {setting.name} --out {folder.parent} makes "
            f"it."
        )
    profile = Profile.load(path)
    if not profile.evidence.get("recall"):
        raise StudyError(
            f"{str(path)!r} has no evidence heads for recall, but tiers find pages by them; "
            f"memdecay study run --setting {setting.name} --out {folder.parent} chooses them."
        )
    return profile
