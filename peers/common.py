"""What the scripts of all peers share: episodes in, rows out.

Nothing here imports memdecay: a peer lives in an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

NEW_TOKENS = 16
"""Tokens of an answer (section IV-A)."""

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
"""One row is one probe under one condition, as in memdecay's own rows."""


class PeerError(Exception):
    """The caller is at fault; the message is one sentence for them."""


@dataclass(frozen=True)
class Probe:
    """A question about a planted fact.

    Args:
        region: where the fact stands.
        fact_kind: "code" or "natural".
        question_ids: what follows the context: the end of the open turn, the user's question, and
            what opens the answer.
        gold: the value that the answer must contain.
        gold_ids: its tokens.
    """

    region: str
    fact_kind: str
    question_ids: tuple[int, ...]
    gold: str
    gold_ids: tuple[int, ...]


@dataclass(frozen=True)
class Episode:
    """A context, and what is asked after it was compressed.

    Args:
        setting: such as "smollm2-short".
        model: short name of the model.
        tier: "short" or "long".
        dtype: of the model, such as "bfloat16".
        scenario: statistics cluster by it.
        variant: of the scenario.
        context_ids: the whole episode with its observation burst.
        budgets: fraction -> tokens that may stay.
        probes: the questions.
        end_ids: tokens that end an answer.
    """

    setting: str
    model: str
    tier: str
    dtype: str
    scenario: str
    variant: int
    context_ids: tuple[int, ...]
    budgets: Mapping[float, int]
    probes: tuple[Probe, ...]
    end_ids: frozenset[int]

    @property
    def name(self) -> str:
        """Scenario and variant, such as `bakery-1`."""
        return f"{self.scenario}-{self.variant}"

    @property
    def digest(self) -> str:
        """Changes when the context, a question or a gold value does."""
        read = [self.context_ids, [(probe.question_ids, probe.gold) for probe in self.probes]]
        return hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]


def read_episodes(path: Path, only: Sequence[str] = ()) -> list[Episode]:
    """Read what `memdecay study export` wrote, one episode a line.

    Args:
        path: a JSON Lines file.
        only: scenarios to keep, all if empty.

    Raises:
        PeerError: the file cannot be read, a line is no episode, or nothing is left.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PeerError(f"--episodes is {str(path)!r}, but it cannot be read: {reason}.") from None
    episodes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            episodes.append(_episode(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(
                f"Line {number} of {str(path)!r} is not an episode as `memdecay study export` "
                f"writes it: {type(error).__name__}: {error}."
            ) from None
    names = {episode.scenario for episode in episodes}
    unknown = sorted(set(only) - names)
    if unknown:
        raise PeerError(
            f"--only-scenario is {unknown[0]!r}, but the file has {', '.join(sorted(names))}."
        )
    episodes = [episode for episode in episodes if not only or episode.scenario in only]
    if not episodes:
        raise PeerError(f"--episodes is {str(path)!r}, but there is no episode in it.")
    return episodes


def _episode(data: Mapping[str, Any]) -> Episode:
    context = tuple(map(int, data["context_ids"]))
    budgets = {float(key): int(value) for key, value in data["budgets"].items()}
    if not all(0 < tokens <= len(context) for tokens in budgets.values()):
        raise ValueError(f"budgets {budgets} of a context of {len(context)} tokens")
    probes = tuple(
        Probe(
            region=probe["region"],
            fact_kind=probe["fact_kind"],
            question_ids=tuple(map(int, probe["question_ids"])),
            gold=probe["gold"],
            gold_ids=tuple(map(int, probe["gold_ids"])),
        )
        for probe in data["probes"]
    )
    if not probes or not all(probe.question_ids and probe.gold_ids for probe in probes):
        raise ValueError("a probe without a question or a gold value")
    return Episode(
        setting=data["setting"],
        model=data["model"],
        tier=data["tier"],
        dtype=data["dtype"],
        scenario=data["scenario"],
        variant=int(data["variant"]),
        context_ids=context,
        budgets=budgets,
        probes=probes,
        end_ids=frozenset(map(int, data["end_ids"])),
    )


def find_gold(answer: str, gold: str) -> tuple[int, int] | None:
    """Return where `gold` stands in `answer` as whole words, or None: memdecay's own rule.

    It is written again because memdecay cannot be imported here; a test holds the two together.
    """
    words = r"\s+".join(re.escape(word) for word in gold.split())
    found = re.search(rf"(?<!\w)(?<!\d[.,]){words}(?!\w)(?![.,]\d)", answer, re.IGNORECASE)
    return found.span() if found else None


# Rows


@dataclass(frozen=True)
class Maker:
    """What made the rows.

    Args:
        engine: "kvpress", "openvino" or "transformers".
        packages: whose versions the rows carry.
    """

    engine: str
    packages: tuple[str, ...]

    def row(
        self,
        episode: Episode,
        probe: Probe,
        *,
        policy: str,
        condition: Mapping[str, Any],
        budget: float,
        kept: float,
        answer: str,
        gold_logprob: float,
        dtype: str | None = None,
    ) -> dict[str, Any]:
        """Return one row.

        Args:
            episode: where the probe belongs.
            probe: what was asked.
            policy: the name in tables, such as "kvpress:snapkv".
            condition: every parameter that was set.
            budget: 1.0 if nothing was to go.
            kept: tokens that stayed, a mean over layers and heads.
            answer: the decoded text.
            gold_logprob: in nats, NaN if it cannot be had.
            dtype: of weights and cache, if not the episode's.
        """
        length = len(episode.context_ids)
        return {
            "setting": episode.setting,
            "model": episode.model,
            "tier": episode.tier,
            "dtype": dtype or episode.dtype,
            "scenario": episode.scenario,
            "variant": episode.variant,
            "region": probe.region,
            "fact_kind": probe.fact_kind,
            "group": "peer",
            "policy": policy,
            "condition": json.dumps(condition, sort_keys=True),
            "seed": 0,
            "budget": budget,
            "budget_tokens": episode.budgets.get(budget, length),
            "seq_len": length,
            "kept_tokens": round(kept),
            "recall": find_gold(answer, probe.gold) is not None,
            "answer": answer,
            "gold": probe.gold,
            "gold_logprob": gold_logprob,
            "gold_tokens": len(probe.gold_ids),
            "keep_digest": "",
            "engine": self.engine,
            "versions": json.dumps(
                {
                    "episode": episode.digest,
                    "python": ".".join(map(str, sys.version_info[:3])),
                    **{package: metadata.version(package) for package in self.packages},
                }
            ),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def commit() -> str:
    """Return the commit of the checkout that this file is in, or nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema = SCHEMA) -> None:
    """Write rows so that the file is complete or not there at all."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp lets only its owner read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# Commands


@dataclass(frozen=True)
class Task:
    """What is still to be run of an episode.

    Args:
        episode: which.
        policies: such as "kvpress:snapkv".
        budgets: fraction -> tokens that may stay.
    """

    episode: Episode
    policies: tuple[str, ...]
    budgets: Mapping[float, int]

    def file(self, out: Path, policy: str) -> Path:
        """Return the file of the rows under a policy."""
        return out / f"{self.episode.name}.{policy.replace(':', '-')}.parquet"


def open_tasks(
    episodes: Sequence[Episode], policies: Sequence[str], budgets: str, out: Path
) -> list[Task]:
    """Return what is not written yet, so that a run that was killed goes on.

    Rows of an episode that reads otherwise by now, or of fewer budgets, count as not written.

    Args:
        episodes: all that are wanted.
        policies: all that are wanted.
        budgets: fractions, separated by commas.
        out: folder of the rows.

    Raises:
        PeerError: a budget is no number, or the episodes do not have it.
    """
    tasks = []
    for episode in episodes:
        task = Task(episode, tuple(policies), _budgets(budgets, episode))
        left = tuple(p for p in policies if not _written(task.file(out, p), task))
        if left:
            tasks.append(Task(episode, left, task.budgets))
    return tasks


def _budgets(text: str, episode: Episode) -> dict[float, int]:
    try:
        wanted = [float(part) for part in text.split(",")]
    except ValueError:
        raise PeerError(
            f"--budgets is {text!r}, but it must be numbers such as 0.5,0.25."
        ) from None
    for budget in wanted:
        if budget not in episode.budgets:
            raise PeerError(
                f"--budgets has {budget:g}, but the episodes have "
                f"{', '.join(f'{b:g}' for b in sorted(episode.budgets))}."
            )
    return {budget: episode.budgets[budget] for budget in wanted}


def _written(path: Path, task: Task) -> bool:
    if not path.is_file():
        return False
    found = pq.read_table(path, columns=["budget", "versions"]).to_pylist()
    digests = {json.loads(row["versions"])["episode"] for row in found}
    budgets = {row["budget"] for row in found}
    return digests == {task.episode.digest} and (budgets == {1.0} or budgets >= set(task.budgets))


def progress() -> Progress:
    """Return a progress display on stderr that knows the time left."""
    console = Console(stderr=True, highlight=False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]left[/]"),
        console=console,
        disable=not console.is_terminal,
    )


def run(command: Callable[[], None]) -> None:
    """Run a command; what the caller did wrong is one sentence and exit code 2."""
    try:
        command()
    except PeerError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
