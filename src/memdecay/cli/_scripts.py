"""What `memdecay calibrate` plays: trace files, folders of them, scenarios, built-in episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memdecay.cli._replay import split_turns
from memdecay.errors import MemDecayError, StudyError, TraceError

if TYPE_CHECKING:
    from memdecay.calibration.player import Script
    from memdecay.study.scenario import Episode

_TRACES = (".json", ".jsonl", ".traj")
_SCENARIOS = (".yaml", ".yml")


def scripts(sources: Sequence[str], retrievers: Sequence[str]) -> tuple[list[Script], list[str]]:
    """Return what to play, and notes on what was left out.

    Args:
        sources: `short`, `long`, scenario files (.yaml), trace files, folders of trace files.
        retrievers: names of the tools whose outputs are documents.

    Raises:
        StudyError: two have one name, a folder has no trace, or a scenario is not usable.
        TraceError: a trace cannot be read.
    """
    from memdecay.study.scenario import TIERS, load_episodes, load_scenario

    found: list[Script] = []
    notes: list[str] = []
    for source in sources:
        path = Path(source).expanduser()
        if source in TIERS:
            found += [_episode(episode) for episode in load_episodes(source)]
        elif path.is_dir():
            made, left_out = _folder(path, retrievers)
            found += made
            notes += left_out
        elif path.suffix in _SCENARIOS:
            found += [_episode(episode) for episode in load_scenario(path)]
        elif not path.exists():
            raise StudyError(
                f"trace is {source!r}, but there is no such file or folder; it must be one, or "
                f"{' or '.join(TIERS)} for the built-in episodes."
            )
        else:
            script, remarks = _trace(path, retrievers)
            found.append(script)
            notes += remarks
    names = [script.name for script in found]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise StudyError(f"Two traces are named {twice!r}, but their names must differ.")
    return found, notes


def episodes(sources: Sequence[str]) -> dict[str, Episode]:
    """Return the episodes among the sources, whose answers are known, by the name of their script.

    Args:
        sources: as for `scripts`, which refuses what is wrong with them.
    """
    from memdecay.study.scenario import TIERS, load_episodes, load_scenario

    found: list[Episode] = []
    for source in sources:
        path = Path(source).expanduser()
        if source in TIERS:
            found += load_episodes(source)
        elif path.suffix in _SCENARIOS and not path.is_dir():
            found += load_scenario(path)
    return {_episode(episode).name: episode for episode in found}


def cut(script: Script, limit: int | None, tokenizer: Any) -> tuple[Script, str | None]:
    """Leave out the turns of a script that pass a number of tokens.

    Returns:
        The script, and a note if something was left out.

    Raises:
        MemDecayError: not even its first turn fits.
        TraceError: a message is malformed, or the chat template refuses it.
    """
    if limit is None:
        return script, None
    from memdecay.prompt import Conversation

    conversation = Conversation(
        tokenizer, retrievers=script.retrievers, tools=list(script.tools) or None
    )
    count, kept = 0, 0
    for stage in script.stages:
        count += len(conversation.append(stage))
        if count > limit:
            break
        kept += 1
    if kept == len(script.stages):
        return script, None
    if not kept:
        raise MemDecayError(
            f"--max-tokens is {limit}, but the first turn of {script.name!r} has {count:,} tokens."
        )
    total = len(script.stages)
    note = f"{script.name}: only the first {kept} of {total} turns, {limit:,} tokens at most."
    return replace(script, stages=script.stages[:kept], closing=""), note


def _episode(episode: Episode) -> Script:
    from memdecay.calibration.player import Script

    name = f"{episode.tier}-{episode.name}"
    return Script(name, episode.scenario, episode.stages, episode.closing)


def _trace(path: Path, retrievers: Sequence[str]) -> tuple[Script, list[str]]:
    """Return the script of a trace file: a turn a stage, and a cluster of its own."""
    from memdecay.calibration.player import Script
    from memdecay.prompt import load_trace

    trace = load_trace(path)
    name = path.name.split(".")[0] or path.name
    stages = tuple(tuple(map(dict, turn.messages)) for turn in split_turns(trace.messages))
    script = Script(
        name=name,
        cluster=name,
        stages=stages,
        retrievers=tuple(retrievers),
        tools=tuple(trace.tools),
    )
    return script, [f"{name}: {note}" for note in trace.notes]


def _folder(path: Path, retrievers: Sequence[str]) -> tuple[list[Script], list[str]]:
    """Return the scripts of the trace files in a folder; a file that is none is left out."""
    found: list[Script] = []
    notes: list[str] = []
    for file in sorted(file for file in path.iterdir() if file.suffix in _TRACES):
        try:
            script, remarks = _trace(file, retrievers)
        except TraceError as error:
            notes.append(f"Left out, as it is no trace: {error}")
            continue
        found.append(script)
        notes += remarks
    if not found:
        why = f": {notes[0]}" if notes else f" (no {', '.join(_TRACES)} file)."
        raise StudyError(f"The folder '{path}' has no trace{why}")
    return found, notes
