"""Runs transformers' QuantizedCache on the episodes of a setting and writes their rows.

`python peers/quantized_rows.py --episodes FILE --model FOLDER --out RUN/tiers`; the rows are for
`memdecay study tiers-report`. Nothing is evicted: the whole context is kept at four bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
import typer
from common import (
    NEW_TOKENS,
    SCHEMA,
    Episode,
    Maker,
    PeerError,
    Probe,
    open_tasks,
    progress,
    read_episodes,
    run,
    write_rows,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, QuantizedCache
from transformers.utils import logging

logging.disable_progress_bar()
POLICY = "quantized-cache"
BITS = 4
PACKAGES = {"hqq": "hqq", "quanto": "optimum-quanto"}
"""The backends, and what pip calls them. All else is at its defaults: groups of 64 elements along
the first axis, and the newest 128 tokens at full precision, which are the question's here."""
TIER_SCHEMA = pa.schema([*SCHEMA, ("resident_bytes", pa.int64())])
app = typer.Typer(add_completion=False)


@app.command()
def main(
    episodes: Annotated[Path, typer.Option(help="What `memdecay study export` wrote.")],
    model: Annotated[Path, typer.Option(help="A folder with the model, as transformers saves it.")],
    out: Annotated[Path, typer.Option(help="Folder for the rows, one file an episode.")],
    backend: Annotated[str, typer.Option(help="hqq or quanto.")] = "hqq",
    only_scenario: Annotated[str, typer.Option(help="Scenarios, separated by commas.")] = "",
) -> None:
    """Ask the episodes of a cache at four bits; what is written already is not run again."""
    run(lambda: _run(episodes, model, out, backend, only_scenario))


def _run(episodes: Path, folder: Path, out: Path, backend: str, only_scenario: str) -> None:
    if backend not in PACKAGES:
        raise PeerError(f"--backend is {backend!r}, but it must be one of {', '.join(PACKAGES)}.")
    only = [name.strip() for name in only_scenario.split(",") if name.strip()]
    tasks = open_tasks(read_episodes(episodes, only), [POLICY], "0.25", out)
    if not tasks:
        print("Nothing to do: every row is written already.")
        return
    model, tokenizer = load(folder, tasks[0].episode.dtype)
    maker = Maker("transformers", ("transformers", "tokenizers", "torch", PACKAGES[backend]))
    with progress() as shown:
        line = shown.add_task(tasks[0].episode.setting, total=len(tasks))
        for task in tasks:
            rows = list(rows_of(model, tokenizer, task.episode, backend, maker))
            write_rows(task.file(out, POLICY), rows, TIER_SCHEMA)
            shown.advance(line)


def load(folder: Path, dtype: str) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer.

    Raises:
        PeerError: the folder holds no model, or there is no such dtype.
    """
    if not (folder / "config.json").is_file():
        raise PeerError(
            f"--model is {str(folder)!r}, but it must be a folder with a model as transformers "
            f"saves it."
        )
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise PeerError(f"The episodes' dtype is {dtype!r}, but it must be one such as 'bfloat16'.")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Args:
        ids: greedy tokens, without the one that ends the answer.
        gold_logprob: sum of the log-probabilities of the gold answer's tokens, in nats.
    """

    ids: list[int]
    gold_logprob: float


@torch.no_grad()
def rows_of(
    model: PreTrainedModel, tokenizer: Any, episode: Episode, backend: str, maker: Maker
) -> Iterator[dict[str, Any]]:
    """Read an episode, at full precision within the one forward, and yield a row a probe."""
    cache = QuantizedCache(backend, model.config, nbits=BITS)
    _forward(model, cache, list(episode.context_ids), 0)
    length, size = len(episode.context_ids), held(cache)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * length
    condition = {
        "cache": "QuantizedCache",
        "backend": backend,
        "nbits": BITS,
        "bits_per_element": round(8 * size / elements, 2),
    }
    for probe in episode.probes:
        found = ask(model, cache, probe, length, episode.end_ids)
        row = maker.row(
            episode,
            probe,
            policy=POLICY,
            condition=condition,
            budget=1.0,
            kept=length,
            answer=tokenizer.decode(found.ids, skip_special_tokens=True),
            gold_logprob=found.gold_logprob,
        )
        yield {**row, "resident_bytes": size}


def ask(
    model: PreTrainedModel, cache: QuantizedCache, probe: Probe, seq_len: int, ends: frozenset[int]
) -> Answer:
    """Ask a probe of a copy of the cache, at its true positions."""
    golds = len(probe.gold_ids)
    given = [*probe.question_ids, *probe.gold_ids]
    logits = _forward(model, _copied(cache), given, seq_len)[-golds - 1 : -1]
    gold = logits.log_softmax(-1)[torch.arange(golds), torch.tensor(probe.gold_ids)]
    mine, written = _copied(cache), []
    new, place = list(probe.question_ids), seq_len
    while len(written) < NEW_TOKENS:
        token = int(_forward(model, mine, new, place)[-1].argmax())
        if token in ends:
            break
        written.append(token)
        place += len(new)
        new = [token]
    return Answer(written, float(gold.sum()))


def _copied(cache: QuantizedCache) -> QuantizedCache:
    """Return a copy that may be read on: layers put new tensors in place of their old ones."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def _forward(model: PreTrainedModel, cache: QuantizedCache, ids: list[int], first: int) -> Tensor:
    """Read ids into the cache, and return their logits, (n, vocabulary) float32."""
    places = torch.arange(first, first + len(ids))[None]
    out = model(input_ids=torch.tensor([ids]), position_ids=places, cache=cache, use_cache=True)
    logits: Tensor = out.logits[0].float()
    return logits


def held(cache: QuantizedCache) -> int:
    """Return the bytes that a cache holds: codes, scales and zeros, and what is not quantized."""
    parts: list[Any] = []
    for layer in cache.layers:
        parts += [layer.keys, layer.values, layer._quantized_keys, layer._quantized_values]
    return sum(_bytes(part) for part in parts)


def _bytes(part: Any) -> int:
    if isinstance(part, (tuple, list)):
        return sum(map(_bytes, part))
    if isinstance(part, dict):
        return sum(map(_bytes, part.values()))
    inner = [getattr(part, name, None) for name in ("_data", "_scale", "_shift")]
    if any(one is not None for one in inner):  # of quanto
        return sum(_bytes(one) for one in inner)
    return part.numel() * part.element_size() if isinstance(part, Tensor) else 0


if __name__ == "__main__":
    app()
