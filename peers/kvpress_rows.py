"""Runs the presses of kvpress on the episodes of a setting and writes their rows.

`python peers/kvpress_rows.py --episodes FILE --model FOLDER --out RUN/peers`; peers/README.md
says what is equal for all, and what is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from asking import Answer, Kept, ask
from common import (
    Episode,
    Maker,
    PeerError,
    Task,
    open_tasks,
    progress,
    read_episodes,
    run,
    write_rows,
)
from presses import NONE, Key, chosen, compress, condition
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()
MAKER = Maker("kvpress", ("kvpress", "transformers", "tokenizers", "torch"))
app = typer.Typer(add_completion=False)


@app.command()
def main(
    episodes: Annotated[Path, typer.Option(help="What `memdecay study export` wrote.")],
    model: Annotated[Path, typer.Option(help="A folder with the model, as transformers saves it.")],
    out: Annotated[Path, typer.Option(help="Folder for the rows, one file an episode and press.")],
    press: Annotated[str, typer.Option(help="Presses, separated by commas; all if empty.")] = "",
    budgets: Annotated[str, typer.Option(help="Fractions, separated by commas.")] = "0.5,0.25",
    only_scenario: Annotated[str, typer.Option(help="Scenarios, separated by commas.")] = "",
) -> None:
    """Run the presses of kvpress; what is written already is not run again."""
    run(lambda: _run(episodes, model, out, press, budgets, only_scenario))


def _run(
    episodes: Path, folder: Path, out: Path, press: str, budgets: str, only_scenario: str
) -> None:
    names = chosen(press)
    only = [name.strip() for name in only_scenario.split(",") if name.strip()]
    tasks = open_tasks(
        read_episodes(episodes, only), [f"kvpress:{name}" for name in names], budgets, out
    )
    if not tasks:
        print("Nothing to do: every row is written already.")
        return
    model, tokenizer = load(folder, tasks[0].episode.dtype)
    check_tokenizer(tokenizer, tasks[0].episode)
    with progress() as shown:
        line = shown.add_task(tasks[0].episode.setting, total=sum(len(t.policies) for t in tasks))
        for task in tasks:
            for policy, rows in rows_of(model, tokenizer, task):
                write_rows(task.file(out, policy), rows)
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


def check_tokenizer(tokenizer: Any, episode: Episode) -> None:
    """Check that the episodes were written with this tokenizer.

    Raises:
        PeerError: a gold answer's tokens read otherwise.
    """
    for probe in episode.probes:
        read = tokenizer.decode(list(probe.gold_ids))
        if read.split() != probe.gold.split():
            raise PeerError(
                f"The episodes were written with another model's tokenizer: the gold answer "
                f"{probe.gold!r} of {episode.name} reads {read!r} here."
            )


def rows_of(
    model: PreTrainedModel, tokenizer: Any, task: Task
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run what is open of an episode and yield policy and rows."""
    episode = task.episode
    names = [policy.split(":")[1] for policy in task.policies]
    found = compress(model, tokenizer, names, episode.context_ids, task.budgets)
    answers = answered(model, episode, found)
    for name in names:
        yield (
            f"kvpress:{name}",
            [
                MAKER.row(
                    episode,
                    probe,
                    policy=f"kvpress:{name}",
                    condition=condition(name),
                    budget=budget,
                    kept=found[name, budget].tokens,
                    answer=tokenizer.decode(answer.ids, skip_special_tokens=True),
                    gold_logprob=answer.gold_logprob,
                )
                for budget in ([1.0] if name == NONE else task.budgets)
                for probe, answer in zip(episode.probes, answers[name, budget], strict=True)
            ],
        )


def answered(
    model: PreTrainedModel, episode: Episode, found: Mapping[Key, Kept]
) -> dict[Key, list[Answer]]:
    """Ask the probes of all that was kept; what has one width is one batch."""
    groups: dict[int, list[Key]] = {}
    for key, kept in found.items():
        groups.setdefault(kept.width, []).append(key)
    answers = {}
    for keys in groups.values():
        given = ask(
            model,
            [found[key] for key in keys],
            episode.probes,
            seq_len=len(episode.context_ids),
            ends=episode.end_ids,
        )
        answers.update(zip(keys, given, strict=True))
    return answers


if __name__ == "__main__":
    app()
