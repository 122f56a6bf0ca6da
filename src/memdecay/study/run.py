"""Runs a setting: measure, fit, evict, ask; every episode's file is written once and whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from memdecay.calibration.curves import load_curves
from memdecay.calibration.fit import fit
from memdecay.calibration.profile import calibrated
from memdecay.errors import StudyError
from memdecay.regions import Profile
from memdecay.study.conditions import Condition, conditions
from memdecay.study.rows import made_by, rows_of, write_rows, write_whole
from memdecay.study.scenario import Episode, load_episodes
from memdecay.study.settings import Setting
from memdecay.study.watching import evidence_from, from_file

_CONFIG = "setting.json"
_ALSO = "heads_also_of"


@dataclass(frozen=True)
class Task:
    """A piece of work that needs the model; it knows all that a worker elsewhere needs.

    Args:
        kind: "measure", "watch", "ask", "export", "straddle" or "overhead".
        setting: what is run.
        episode: on what; "straddle" looks at all of the setting.
        conditions: what to compare ("ask").
        profiles: region policies, as `Profile.to_dict` ("ask").
        provenance: what each row says of its making ("ask").
    """

    kind: str
    setting: Setting
    episode: Episode
    conditions: tuple[Condition, ...] = ()
    profiles: Mapping[str, Any] | None = None
    provenance: Mapping[str, str] | None = None


Advance = Callable[[str, float], None]
"""Is told of which kind of task how much was done, in episodes."""


class Work(Protocol):
    """What workers can do: a `Task`, or one of another study."""

    @property
    def kind(self) -> str:
        """What is to be done."""


AnyWork = TypeVar("AnyWork", bound=Work)


class Workers(Protocol):
    """Whoever does tasks, in whatever order, here or elsewhere."""

    def results(self, tasks: Sequence[AnyWork], advance: Advance) -> Iterator[tuple[AnyWork, Any]]:
        """Yield each task with its result as it is done."""


def episodes_of(setting: Setting) -> list[Episode]:
    """Return the episodes of a setting, the first variant of every scenario first.

    Raises:
        StudyError: a scenario is not usable.
    """
    episodes = load_episodes(setting.tier, setting.scenarios)
    chosen = [episode for episode in episodes if episode.variant in setting.variants]
    # A run that is stopped early then has as many scenarios as possible.
    return sorted(chosen, key=lambda episode: episode.variant)


def run_setting(
    setting: Setting, runs: Path, workers: Workers, *, advance: Advance = lambda kind, share: None
) -> Path:
    """Run what is missing of a setting, and return its folder.

    Rows that are there already stay as they are: a run that was killed goes on where it was, and
    one with more conditions adds theirs.

    Args:
        setting: what to run.
        runs: the folder of all runs; this one goes to `runs / setting.name`.
        workers: who does it.
        advance: is told of progress.

    Raises:
        StudyError: the folder holds a run of something else, or cannot be written.
    """
    folder = runs / setting.name
    episodes = episodes_of(setting)
    chosen = conditions(setting.groups)
    claim(folder, setting, episodes)
    measured = {path.stem for path in folder.glob("curves/*.parquet")}
    tasks = [
        Task("measure", setting, episode) for episode in episodes if episode.name not in measured
    ]
    if tasks and any(folder.glob("rows/*.parquet")):
        raise StudyError(
            f"{str(folder)!r} holds rows whose rates were measured without "
            f"{tasks[0].episode.name!r}; use another --out for more episodes, or remove it."
        )
    advance("measure", len(episodes) - len(tasks))
    for task, made in workers.results(tasks, advance):
        write_whole(folder / "curves" / f"{task.episode.name}.parquet", _writer(made))
    _check_curves(folder)
    wanted = any("heads" in condition.needs for condition in chosen)
    if wanted:
        _watch(folder, setting, episodes, workers, advance)
    else:
        advance("watch", len(episodes))
    scenarios = [episode.scenario for episode in episodes]
    profiles = leave_one_out(folder, setting, scenarios, heads=wanted)
    provenance = made_by()
    tasks = []
    for episode in episodes:
        done = _done(_rows(folder, episode))
        missing = [one for one in chosen if _key(one) not in done]
        if missing:
            own = {"calibrated": profiles[episode.scenario], "default": Profile.default()}
            plain = {name: profile.to_dict() for name, profile in own.items()}
            tasks.append(Task("ask", setting, episode, tuple(missing), plain, provenance))
    advance("ask", len(episodes) - len(tasks))
    for task, made in workers.results(tasks, advance):
        path = _rows(folder, task.episode)
        before = rows_of(path)
        # Another run into this folder may have asked the same meanwhile.
        there = {(row["policy"], row["condition"]) for row in before}
        new = [row for row in made if (row["policy"], row["condition"]) not in there]
        write_rows(path, [*before, *new])
    about = json.loads((folder / _CONFIG).read_text("utf-8"))
    if "straddle_share" not in about:
        for _, share in workers.results([Task("straddle", setting, episodes[0])], advance):
            write_json(folder / _CONFIG, {**about, "straddle_share": share})
    overhead = folder / "overhead.json"
    if not overhead.exists():
        for _, made in workers.results([Task("overhead", setting, episodes[0])], advance):
            write_json(overhead, made)
    advance("overhead", 1)
    return folder


def _watch(
    folder: Path,
    setting: Setting,
    episodes: Sequence[Episode],
    workers: Workers,
    advance: Advance,
) -> None:
    """Watch every head on each episode, unless the folder's profiles say what came of that.

    What was watched is too much to hand on with a run, so it may be missing where the profiles
    that were made of it are there. A scenario without such a profile needs all the others' files.

    Raises:
        StudyError: one has no heads, and others of the run that are not asked for no files.
    """
    asked = {episode.scenario for episode in episodes}
    without = [name for name in sorted(asked) if not _evidence_in(profile_path(folder, name))]
    if not without:
        advance("watch", len(episodes))
        return
    watched = {path.stem for path in folder.glob("heads/*.safetensors")}
    lost = _measured(folder) - asked - {_scenario(name) for name in watched}
    if lost:
        raise StudyError(
            f"The heads for {', '.join(without)} are chosen on all other scenarios of "
            f"{str(folder)!r}, but it has no heads/*.safetensors of {', '.join(sorted(lost))}; ask "
            f"for these scenarios too, or put the files back."
        )
    tasks = [Task("watch", setting, episode) for episode in episodes if episode.name not in watched]
    advance("watch", len(episodes) - len(tasks))
    for task, made in workers.results(tasks, advance):
        write_whole(folder / "heads" / f"{task.episode.name}.safetensors", _writer(made))


def _measured(folder: Path) -> set[str]:
    """Return the scenarios of all episodes that were measured into a folder."""
    return {_scenario(path.stem) for path in folder.glob("curves/*.parquet")}


def _scenario(episode: str) -> str:
    return episode.rpartition("-")[0]


def profile_path(folder: Path, scenario: str) -> Path:
    """Return the file of the profile that was measured on all scenarios but one."""
    return folder / "profiles" / f"{scenario}.yaml"


def _evidence_in(path: Path) -> Mapping[str, Any]:
    return Profile.load(path).evidence if path.exists() else {}


def export(
    setting: Setting, workers: Workers, *, advance: Advance = lambda kind, share: None
) -> list[dict[str, Any]]:
    """Return what peers need to be asked the same: one object an episode, in order."""
    episodes = episodes_of(setting)
    tasks = [Task("export", setting, episode) for episode in episodes]
    made = {task.episode.name: one for task, one in workers.results(tasks, advance)}
    return [made[episode.name] for episode in episodes]


def leave_one_out(
    folder: Path, setting: Setting, scenarios: Iterable[str], *, heads: bool = True
) -> dict[str, Profile]:
    """Return for each scenario the profile measured on the others, and write them down.

    With a single scenario there is nothing left to measure on, and the defaults stay. Heads are
    chosen on more episodes if the folder beside holds a run of the same model on the other tier,
    with what was watched there.

    Args:
        folder: of the run.
        setting: of the run.
        scenarios: which to leave out, one at a time.
        heads: choose heads for a profile that has none, where what was watched is there for every
            other scenario. Those that a profile has stay, as rows may have been made with them.
    """
    curves = load_curves(folder / "curves")
    files = sorted(folder.glob("heads/*.safetensors")) if heads else []
    watched = [from_file(path, _scenario(path.stem)) for path in files]
    beside = _beside(folder, setting) if files else []
    paths = [path for other in beside for path in sorted(other.glob("heads/*.safetensors"))]
    more = [from_file(path, _scenario(path.stem)) for path in paths]
    everyone = _measured(folder)
    profiles = {}
    for scenario in dict.fromkeys(scenarios):
        others = [one for one in curves if one.cluster != scenario]
        fits = fit(others, resamples=200) if others else {}
        about = {
            "model": setting.model_name,
            "tier": setting.tier,
            "left_out": scenario,
            "traces": len(others),
            "burst": setting.calibration_burst,
        }
        path = profile_path(folder, scenario)
        seen = [one for one in watched if one.cluster != scenario]
        whole = everyone - {scenario} <= {one.cluster for one in seen}
        before = Profile.load(path) if path.exists() else Profile.default()
        evidence, also = before.evidence, before.provenance.get(_ALSO)
        if seen and whole and not evidence:
            evidence = evidence_from([*seen, *(one for one in more if one.cluster != scenario)])
            also = [other.name for other in beside]
        if also:
            about[_ALSO] = also
        profile = calibrated(fits, provenance=about)
        if evidence:
            profile = profile.with_evidence(evidence)
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
        profiles[scenario] = profile
    return profiles


def _beside(folder: Path, setting: Setting) -> list[Path]:
    """Return the runs next to this one that measured the same weights on the other tier."""

    def measured(run: Path) -> list[Any]:
        told = load_curves(run / "curves")[0].meta.get("settings", {})
        return [told.get(name) for name in ("weights", "dtype", "tokenizer")]

    found, folder = [], folder.resolve()
    for other in sorted(path.parent for path in folder.parent.glob("*/heads")):
        with contextlib.suppress(StudyError, OSError, ValueError):
            about = json.loads((other / _CONFIG).read_text("utf-8"))
            if about.get("tier", setting.tier) != setting.tier and measured(other) == measured(
                folder
            ):
                found.append(other)
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file that is either complete or not there."""
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    write_whole(path, lambda partial: Path(partial).write_text(text, encoding="utf-8"))


def _check_curves(folder: Path) -> None:
    """Refuse a folder in which two models were measured, whatever they are called.

    Raises:
        StudyError: weights, precision or tokenizer of two episodes differ.
    """
    first: dict[str, Any] = {}
    for one in load_curves(folder / "curves"):
        told = one.meta.get("settings", {})
        now = {name: told.get(name) for name in ("weights", "dtype", "tokenizer")}
        if first and now != first:
            raise StudyError(
                f"{str(folder)!r} holds curves of two models or tokenizers ({one.name!r} differs "
                f"from the first); use another --out, or remove it."
            )
        first = now


def claim(folder: Path, setting: Setting, episodes: Sequence[Episode]) -> None:
    """Write down what this folder is a run of, or check that it is one of this.

    Raises:
        StudyError: it is a run of something else.
    """
    now = _config(setting, episodes)
    path = folder / _CONFIG
    begun = any(any(folder.glob(f"{one}/*.parquet")) for one in ("curves", "rows", "tiers"))
    if not path.exists() or not begun:
        write_json(path, now)
        return
    try:
        before = json.loads(path.read_text("utf-8"))
        texts = dict(before["episodes"])
    except (OSError, ValueError, LookupError, TypeError):
        raise StudyError(f"{str(path)!r} is damaged; remove it, or use another --out.") from None
    for name in ("model", "dtype", "tier", "burst", "calibration_burst"):
        if before.get(name) != now[name]:
            raise StudyError(
                f"{str(folder)!r} holds a run with {name} {before.get(name)!r}, not "
                f"{now[name]!r}; use another --out, or remove it."
            )
    for name, text in now["episodes"].items():
        if texts.get(name, text) != text:
            raise StudyError(
                f"{str(folder)!r} holds a run of another text of episode {name!r}; use another "
                f"--out, or remove it."
            )
    write_json(path, {**before, **now, "episodes": {**texts, **now["episodes"]}})


def _config(setting: Setting, episodes: Sequence[Episode]) -> dict[str, Any]:
    return {
        "name": setting.name,
        "model": setting.model_name,
        "dtype": setting.dtype,
        "tier": setting.tier,
        "burst": setting.burst,
        "calibration_burst": setting.calibration_burst,
        "episodes": {
            episode.name: hashlib.sha256(
                json.dumps(asdict(episode), sort_keys=True).encode()
            ).hexdigest()[:16]
            for episode in episodes
        },
    }


def _rows(folder: Path, episode: Episode) -> Path:
    return folder / "rows" / f"{episode.name}.parquet"


def _key(condition: Condition) -> tuple[str, str]:
    return condition.name, condition.to_json()


def _done(path: Path) -> set[tuple[str, str]]:
    return {(row["policy"], row["condition"]) for row in rows_of(path, "policy", "condition")}


def _writer(content: bytes) -> Callable[[str], Any]:
    return lambda partial: Path(partial).write_bytes(content)


def with_changes(setting: Setting, **changes: Any) -> Setting:
    """Return a setting with what is not None changed."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(setting, **given)
