"""Which heads foretell the facts of an episode: every head watched, and chosen from by scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.calibration.evidence import COUNTS, Watched, choose
from memdecay.evidence import EvidenceHead
from memdecay.study.recording import record
from memdecay.study.scenario import Episode

SINKS = 4
"""First tokens that are not counted: all heads look at them."""
UNREAD = 24
"""Newest tokens that are not counted: hardly anything has read them yet."""


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
        progress: is told how many tokens were read by each forward.
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
    return Watched(episode.scenario, torch.stack([read, recording.replay]).half(), needed, counted)


def to_bytes(watched: Watched) -> bytes:
    """Return what `from_file` reads."""
    tensors = {"peaks": watched.peaks, "needed": watched.needed, "counted": watched.counted}
    return save_tensors(tensors, metadata={"cluster": watched.cluster})


def from_file(path: Path, cluster: str) -> Watched:
    """Read what was watched of one episode."""
    return Watched(cluster=cluster, **load_tensors(path.read_bytes()))


def evidence_from(episodes: Sequence[Watched]) -> dict[str, tuple[EvidenceHead, ...]]:
    """Choose both sets of heads."""
    return {use: choose(episodes, use)[0] for use in COUNTS} if episodes else {}
