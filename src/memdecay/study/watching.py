"""Which heads foretell the facts of an episode: every head watched, and chosen from by scenario."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.calibration import recall
from memdecay.calibration.evidence import COUNTS, Watched, choose
from memdecay.calibration.measure import settings
from memdecay.errors import StudyError
from memdecay.evidence import EvidenceHead
from memdecay.study.recording import Probe, Recording, question_queries, record
from memdecay.study.rows import write_whole
from memdecay.study.scenario import Episode

SINKS = 4
"""First tokens that are not counted: all heads look at them."""
UNREAD = 24
"""Newest tokens that are not counted: hardly anything has read them yet."""
_NEVER_OUTSIDE = ("system",)
"""Regions that are pinned, so that nobody has to find what stands in them."""
_CLUSTER, _MADE = "cluster", "made"
_CLAIMS, _WANTED = "asked.claims.", "asked.wanted."
_WHAT = {"weights": "another model", "tokenizer": "another tokenizer", "text": "another text"}


def watch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    episode: Episode,
    *,
    burst: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Watched:
    """Read an episode and let the model repeat it, every head watched.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        episode: its facts are what will be needed.
        burst: greedy decode steps at the end.
        progress: is told how many tokens were read, or repeated, by each forward.
    """
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    recording = record(
        model, tokenizer, episode, burst=burst, heads=every, replay=True, progress=progress
    )
    assert recording.peaks is not None and recording.replay is not None
    length = recording.seq_len
    needed = torch.zeros(length, dtype=torch.bool)
    for probe in recording.probes:
        needed[slice(*probe.where)] = True
    counted = torch.ones(length, dtype=torch.bool)
    counted[:SINKS] = False
    counted[max(SINKS, length - UNREAD) :] = False
    read = recording.peaks.view(layers, heads, length)
    peaks = torch.stack([read, recording.replay]).half()
    asked = [
        _asked(model, recording, probe, counted)
        for probe in recording.probes
        if probe.fact.region not in _NEVER_OUTSIDE
    ]
    return Watched(episode.scenario, peaks, needed, counted, tuple(asked))


def _asked(
    model: PreTrainedModel, recording: Recording, probe: Probe, counted: Tensor
) -> recall.Asked:
    """Ask one question with everything kept."""
    counted = counted.clone()
    counted[slice(*probe.where)] = True
    keys = torch.stack([pool.keys(recording.seq_len)[0] for pool in recording.cache.pools]).cpu()
    order = recording.cache.main.index[0, : recording.seq_len].cpu().argsort()
    queries = question_queries(model, recording, probe)
    claimed = recall.claims(queries, keys[:, :, order], counted)
    page = recall.pages_of(counted)
    there = torch.zeros(recording.seq_len, dtype=torch.bool)
    there[slice(*probe.where)] = True
    wanted = torch.zeros(claimed.shape[2], dtype=torch.bool)
    wanted[page[there[counted]]] = True
    return recall.Asked(recording.episode.scenario, claimed.half(), wanted)


def watch_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Mapping[str, Episode],
    *,
    folder: Path,
    burst: int = 8,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Watched]:
    """Watch every head on each episode, and keep what was seen in a file each.

    An episode whose file is there already is not read again.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        episodes: what to read, by the name of its file.
        folder: where `<name>.safetensors` goes; made if it is missing.
        burst: greedy decode steps at the end of each.
        progress: is told how many tokens were read, or repeated, by each forward.

    Raises:
        StudyError: a file is damaged, or was made with another model, tokenizer, burst or text;
            nothing was read then.
    """
    chosen = settings(model, tokenizer, burst=burst)
    paths = {name: folder / f"{name}.safetensors" for name in episodes}
    made = {name: {**chosen, "text": _digest(episode)} for name, episode in episodes.items()}
    for name, path in paths.items():
        if path.exists():
            _check_made(path, made[name])
    watched = {}
    for name, episode in episodes.items():
        path = paths[name]
        if not path.exists():
            seen = watch(model, tokenizer, episode, burst=burst, progress=progress)
            content = to_bytes(seen, made[name])
            write_whole(path, lambda part, content=content: Path(part).write_bytes(content))
        watched[name] = from_file(path, episode.scenario)
    return watched


def _digest(episode: Episode) -> str:
    text = json.dumps(asdict(episode), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_made(path: Path, now: Mapping[str, Any]) -> None:
    """Refuse a file that was made otherwise.

    Raises:
        StudyError: naming the first difference.
    """
    try:
        with safe_open(path, "pt") as file:
            before = json.loads((file.metadata() or {})[_MADE])
        same = {name: before.get(name) == value for name, value in now.items() if name != "model"}
    except (OSError, SafetensorError, LookupError, ValueError, AttributeError):
        raise StudyError(
            f"'{path}' is not a file of watched heads; remove it, and it is made again."
        ) from None
    for name in (name for name, alike in same.items() if not alike):
        what = _WHAT.get(name) or f"{name} {before.get(name)}, not {now[name]}"
        raise StudyError(
            f"'{path}' was made with {what}; measure into another folder, or remove it."
        )


def to_bytes(watched: Watched, made: Mapping[str, Any] | None = None) -> bytes:
    """Return what `from_file` reads.

    Args:
        watched: what was seen.
        made: how; JSON values.
    """
    tensors = {"peaks": watched.peaks, "needed": watched.needed, "counted": watched.counted}
    for number, one in enumerate(watched.asked):
        tensors |= {f"{_CLAIMS}{number}": one.claims, f"{_WANTED}{number}": one.wanted}
    metadata = {_CLUSTER: watched.cluster}
    if made is not None:
        metadata[_MADE] = json.dumps(made, sort_keys=True)
    return save_tensors(tensors, metadata=metadata)


def from_file(path: Path, cluster: str) -> Watched:
    """Read what was watched of one episode."""
    tensors = load_tensors(path.read_bytes())
    asked: list[recall.Asked] = []
    while f"{_CLAIMS}{len(asked)}" in tensors:
        number = len(asked)
        claimed, wanted = (tensors.pop(f"{name}{number}") for name in (_CLAIMS, _WANTED))
        asked.append(recall.Asked(cluster, claimed, wanted))
    return Watched(cluster=cluster, **tensors, asked=tuple(asked))


def evidence_from(episodes: Sequence[Watched]) -> dict[str, tuple[EvidenceHead, ...]]:
    """Choose every set of heads."""
    chosen = {use: choose(episodes, use)[0] for use in COUNTS} if episodes else {}
    asked = [question for one in episodes for question in one.asked]
    return {**chosen, "recall": recall.choose(asked)} if asked else chosen
