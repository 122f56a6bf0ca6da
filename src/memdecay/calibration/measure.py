"""Plays traces and keeps the curves of each in a file, so that a run that was ended goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.calibration.curves import BUCKET, CurveListener, Curves
from memdecay.calibration.player import Player, Script
from memdecay.engine.saving import fingerprint, tokenizer_digest
from memdecay.engine.support import check_supported
from memdecay.errors import StudyError
from memdecay.prompt import Conversation, label_messages, validate_messages

BURST = 48
"""Decode steps at the end of a trace, as in section IV-A."""

STEP_WORK = 8
"""A decode step takes about as long as reading so many tokens of a prompt."""

_PIECE = 8


def settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    burst: int = BURST,
    bucket: int = BUCKET,
) -> dict[str, Any]:
    """Return what curves depend on beside their trace; JSON values."""
    shape = fingerprint(model)
    return {
        "model": str(model.config.name_or_path or type(model).__name__),
        "weights": hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest(),
        "dtype": shape["dtype"].removeprefix("torch."),
        "tokenizer": tokenizer_digest(tokenizer),
        "burst": burst,
        "bucket": bucket,
        "clock": "steps",
    }


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scripts: Sequence[Script],
    *,
    folder: str | Path,
    burst: int = BURST,
    bucket: int = BUCKET,
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Curves]:
    """Play every script with a final burst, and return its curves, read back from its file.

    A script whose file is there already is not played again.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        scripts: what to play; names must differ.
        folder: where `<name>.parquet` goes; made if it is missing.
        burst: decode steps at the end of each.
        bucket: ages in one bucket, in steps.
        provenance: what else each file is to say; JSON values.
        progress: is told work done, of what `work` counts.

    Raises:
        StudyError: a file was measured with another model, tokenizer, burst or trace (the message
            says which), or a trace is longer than the window of a model whose layers all slide.
            It is raised before anything is played.
        TraceError: a message is malformed, or the chat template refuses it.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(f"folder is '{place}', but it cannot be made: {reason}.") from None
    report = progress or (lambda done: None)
    chosen = settings(model, tokenizer, burst=burst, bucket=bucket)
    _check_window(model, tokenizer, scripts, burst)
    done = {script.name: _measured(place, script, chosen) for script in scripts}
    curves = []
    for script in scripts:
        found = done[script.name]
        if found is not None:
            report(work(tokenizer, script, burst))
        else:
            meta = {"settings": chosen, "script": _digest(script), **(provenance or {})}
            made = Curves(script.name, script.cluster, bucket=bucket, meta=meta)
            play(model, tokenizer, script, made, burst=burst, progress=report)
            made.save(_file(place, script))
            # Read back, so that a run in one go and a run that was resumed see the same.
            found = Curves.load(_file(place, script))
        curves.append(found)
    return curves


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    script: Script,
    curves: Curves,
    *,
    burst: int = BURST,
    progress: Callable[[int], None] | None = None,
) -> Player:
    """Play one script with a final burst into its curves (mutates them); return the player."""
    listener = CurveListener(curves)
    player = Player(model, tokenizer, script, listen=lambda seen: listener(seen, player.tape))
    report = progress or (lambda done: None)
    player.play(report)
    for start in range(0, burst, _PIECE):
        steps = min(_PIECE, burst - start)
        player.burst(steps)
        report(steps * STEP_WORK)
    return player


def work(tokenizer: PreTrainedTokenizerBase, script: Script, burst: int = BURST) -> int:
    """Return how much work a script is, in tokens read: its own, and what the burst amounts to.

    Raises:
        TraceError: a message is malformed, or the chat template refuses it.
    """
    return count_tokens(tokenizer, script) + burst * STEP_WORK


def count_tokens(tokenizer: PreTrainedTokenizerBase, script: Script) -> int:
    """Return the tokens of a script, what opens the last answer included.

    Raises:
        TraceError: a message is malformed, or the chat template refuses it.
    """
    conversation = Conversation(
        tokenizer, retrievers=script.retrievers, tools=list(script.tools) or None
    )
    count = sum(len(conversation.append(stage)) for stage in script.stages)
    count += len(conversation.generation_prompt())
    if script.closing:
        count += len(tokenizer(script.closing, add_special_tokens=False)["input_ids"])
    return count


def check_labels(script: Script, burst: int = BURST) -> None:
    """Refuse a script that has nothing to compare: one region only, or no decode step.

    Raises:
        StudyError: the message says what is missing.
        TraceError: a message is malformed.
    """
    messages = validate_messages([message for stage in script.stages for message in stage])
    pieces = label_messages(messages, retrievers=script.retrievers)
    regions = dict.fromkeys(piece.region for found in pieces for piece in found)
    if len(regions) < 2:
        raise StudyError(
            f"The trace {script.name!r} has no labels: all of its text is of the region "
            f"{next(iter(regions), 'none')}, but lifetimes are measured by region; it needs "
            f'messages of several roles, or a "region" on them.'
        )
    if not burst and not script.closing and all(m["role"] != "assistant" for m in messages):
        raise StudyError(
            f"The trace {script.name!r} has no assistant message and burst is 0, so nothing is "
            f"decoded and no attention to measure; a burst of at least 1 would do."
        )


def _check_window(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scripts: Sequence[Script],
    burst: int,
) -> None:
    """Refuse traces of which a model forgets the start: no layer of it could attend to that.

    Raises:
        StudyError: the message says which trace, and the window.
    """
    window = check_supported(model).table_windows[0]
    if window is None:
        return
    for script in scripts:
        count = count_tokens(tokenizer, script) + burst
        if count > window:
            raise StudyError(
                f"The trace {script.name!r} has {count:,} tokens with its burst, but this "
                f"model's cache holds the last {window:,} only, as all of its layers slide."
            )


def _file(folder: Path, script: Script) -> Path:
    return folder / f"{script.name}.parquet"


def _digest(script: Script) -> str:
    text = json.dumps(asdict(script), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _measured(folder: Path, script: Script, chosen: Mapping[str, Any]) -> Curves | None:
    """Return the curves of a script if they are there already.

    Raises:
        StudyError: they were measured otherwise, or the file is damaged.
    """
    path = _file(folder, script)
    if not path.exists():
        return None
    found = Curves.load(path)
    before = {**found.meta.get("settings", {}), "trace": found.meta.get("script")}
    now = {**chosen, "trace": _digest(script)}
    for name, value in now.items():
        # A model may be called by another path; its weights tell.
        if name == "model" or before.get(name) == value:
            continue
        if name in ("weights", "tokenizer", "trace"):
            what = f"another {'model' if name == 'weights' else name}"
        else:
            what = f"{name} {before.get(name)}, not {value}"
        raise StudyError(
            f"'{path}' was measured with {what}; measure into another folder, or remove it."
        )
    return found
