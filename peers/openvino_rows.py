"""Runs OpenVINO GenAI's cache eviction on the episodes of a setting and writes their rows.

`python peers/openvino_rows.py --episodes FILE --model FILE.gguf --out RUN/peers`. Not the same
protocol: it evicts only after the whole prompt, so the question is in the prompt and is seen
(peers/README.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import typer
from common import (
    NEW_TOKENS,
    Episode,
    Maker,
    PeerError,
    Probe,
    Task,
    open_tasks,
    progress,
    read_episodes,
    run,
    write_rows,
)

MAKER = Maker("openvino", ("openvino-genai", "openvino"))
NONE = "openvino:none"
SEEN = "openvino:question_seen"
POLICIES = (NONE, SEEN)
BLOCK = 32
"""Tokens of a block of its cache on a CPU; all sizes must be multiples of it."""
CONDITIONS: dict[str, dict[str, Any]] = {
    NONE: {"eviction": "none"},
    SEEN: {
        "eviction": "blocks by attention, after the whole prompt, question included",
        "start_size": BLOCK,
        "recent_size": BLOCK,
        "max_cache_size": "budget and question, in whole blocks",
        "aggregation_mode": "NORM_SUM",
        "apply_rotation": False,
        "snapkv_window_size": 8,
    },
}
app = typer.Typer(add_completion=False)


@app.command()
def main(
    episodes: Annotated[Path, typer.Option(help="What `memdecay study export` wrote.")],
    model: Annotated[Path, typer.Option(help="The GGUF file of the model.")],
    out: Annotated[Path, typer.Option(help="Folder for the rows, one file an episode and policy.")],
    budgets: Annotated[str, typer.Option(help="Fractions, separated by commas.")] = "0.5,0.25",
    only_scenario: Annotated[str, typer.Option(help="Scenarios, separated by commas.")] = "",
) -> None:
    """Run OpenVINO GenAI; what is written already is not run again."""
    run(lambda: _run(episodes, model, out, budgets, only_scenario))


def _run(episodes: Path, model: Path, out: Path, budgets: str, only_scenario: str) -> None:
    if not model.is_file():
        raise PeerError(f"--model is {str(model)!r}, but it must be a GGUF file.")
    only = [name.strip() for name in only_scenario.split(",") if name.strip()]
    tasks = open_tasks(read_episodes(episodes, only), POLICIES, budgets, out)
    if not tasks:
        print("Nothing to do: every row is written already.")
        return
    engines = Engines(model)
    with progress() as shown:
        line = shown.add_task(tasks[0].episode.setting, total=sum(len(t.policies) for t in tasks))
        for task in tasks:
            for policy in task.policies:
                write_rows(task.file(out, policy), _rows(engines, task, policy))
                shown.advance(line)


class Engines:
    """One pipeline a cache size: a pipeline's eviction is fixed when it is made.

    Args:
        model: a GGUF file.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._made: dict[int, Any] = {}

    def pipeline(self, size: int) -> Any:
        """Return the pipeline that evicts down to so many tokens, 0 for never.

        Raises:
            PeerError: OpenVINO cannot read the model.
        """
        if size not in self._made:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1  # GB
            scheduler.enable_prefix_caching = False
            scheduler.use_cache_eviction = size > 0
            if size:
                scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                    start_size=BLOCK,
                    recent_size=BLOCK,
                    max_cache_size=size,
                    aggregation_mode=genai.AggregationMode.NORM_SUM,
                )
            try:
                made = genai.ContinuousBatchingPipeline(str(self._model), scheduler, "CPU")
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise PeerError(
                    f"--model is {str(self._model)!r}, but OpenVINO cannot read it: {reason}."
                ) from None
            self._made[size] = made
        return self._made[size]

    def answers(self, size: int, episode: Episode, probes: Sequence[Probe]) -> list[str]:
        """Answer the probes of an episode, each with the whole prompt before it."""
        pipeline = self.pipeline(size)
        settings = genai.GenerationConfig()
        settings.max_new_tokens = NEW_TOKENS
        settings.do_sample = False
        settings.stop_token_ids = set(episode.end_ids)
        prompts = [
            ov.Tensor(np.array([[*episode.context_ids, *probe.question_ids]], dtype=np.int64))
            for probe in probes
        ]
        found = pipeline.generate(prompts, [settings] * len(prompts))
        tokenizer = pipeline.get_tokenizer()
        return [tokenizer.decode(one.m_generation_ids[0]) for one in found]


def cache_size(tokens: int, question: int) -> int:
    """Return the cache size in which so many tokens of context may stay beside a question.

    Args:
        tokens: the budget; a question is not part of it for the other peers.
        question: tokens of the question, which is never evicted.

    Raises:
        PeerError: the budget has no room for the first block, the last one, and one between.
    """
    size = (tokens + question) // BLOCK * BLOCK
    if size < 3 * BLOCK:
        raise PeerError(
            f"A budget is {tokens} tokens, but OpenVINO needs at least {3 * BLOCK - question} here."
        )
    return size


def _rows(engines: Engines, task: Task, policy: str) -> list[dict[str, Any]]:
    """Ask; probes with one cache size share a batch."""
    rows = []
    length = len(task.episode.context_ids)
    for budget, tokens in {1.0: length}.items() if policy == NONE else task.budgets.items():
        groups: dict[int, list[Probe]] = {}
        for probe in task.episode.probes:
            size = 0 if policy == NONE else cache_size(tokens, len(probe.question_ids))
            groups.setdefault(size, []).append(probe)
        for size, probes in groups.items():
            answers = engines.answers(size, task.episode, probes)
            for probe, answer in zip(probes, answers, strict=True):
                kept = size - len(probe.question_ids) if size else length
                rows.append(
                    MAKER.row(
                        task.episode,
                        probe,
                        policy=policy,
                        condition=CONDITIONS[policy],
                        budget=budget,
                        kept=kept,
                        answer=answer,
                        gold_logprob=float("nan"),
                        dtype="q4 weights, u8 cache",
                    )
                )
    return rows


if __name__ == "__main__":
    app()
