"""One episode read with nothing evicted: its attention, its probes, the cache to branch from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.calibration.player import Listener, Observation, Player, Script, Tape
from memdecay.engine import MemDecayCache
from memdecay.prompt import Conversation
from memdecay.study.scenario import Episode, Fact, find_gold


@dataclass(frozen=True)
class Probe:
    """A question about one fact, as tokens.

    Args:
        fact: what is asked.
        question: ids that follow the context: what closes the open turn, the question, and what
            opens the answer.
        gold: ids of the right answer.
        where: (first, last + 1) position of the value in the context.
    """

    fact: Fact
    question: list[int]
    gold: list[int]
    where: tuple[int, int]


@dataclass(frozen=True)
class Recording:
    """An episode after its observation burst.

    Args:
        episode: what was read.
        tape: its tokens.
        observations: all of them, in order.
        probes: one for each fact.
        cache: one sequence, nothing evicted.
        ends: ids that end an answer.
        heads: (layer, query head) of each head that was watched while reading.
        peaks: (len(heads), seq_len) float32, the most attention that each token got in each.
        replay: (num_layers, num_heads, seq_len) float32, the most that each got while the model
            repeated the context; None if it did not.
    """

    episode: Episode
    tape: Tape
    observations: list[Observation]
    probes: list[Probe]
    cache: MemDecayCache
    ends: list[int]
    heads: tuple[tuple[int, int], ...] = ()
    peaks: Tensor | None = None
    replay: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the context, n."""
        return len(self.tape.ids)


def script_of(episode: Episode) -> Script:
    """Return what a player reads of an episode."""
    return Script(episode.name, episode.scenario, episode.stages, episode.closing)


def regions_of(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[str]:
    """Return the region of each token of an episode, its burst left out."""
    conversation = Conversation(tokenizer)
    regions = [name for stage in episode.stages for name in conversation.append(stage).regions]
    closing = tokenizer(episode.closing, add_special_tokens=False)["input_ids"]
    return [*regions, *conversation.generation_prompt().regions, *["scratchpad"] * len(closing)]


def record(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    episode: Episode,
    *,
    burst: int = 8,
    heads: Sequence[tuple[int, int]] = (),
    replay: bool = False,
    listen: Listener | None = None,
    progress: Callable[[int], None] | None = None,
) -> Recording:
    """Read an episode: its stages, the start of the last thought, and an observation burst.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        episode: what to read.
        burst: greedy decode steps at the end (section IV-A: 8 before an eviction).
        heads: (layer, query head) of each head to watch while reading.
        replay: let the model repeat the context after that, in idle time.
        listen: is told every observation too.
        progress: is told how many tokens were read, or repeated, by each forward.
    """
    observations: list[Observation] = []

    def hear(observation: Observation) -> None:
        kept = replace(observation, mass=observation.mass.cpu())
        observations.append(kept)
        if listen is not None:
            listen(kept)

    player = Player(model, tokenizer, script_of(episode), listen=hear, heads=heads)
    player.play(progress)
    player.burst(burst)
    player.conversation.record_generated(player.tape.ids[player.answer_from :])
    return Recording(
        episode=episode,
        tape=player.tape,
        observations=observations,
        probes=[_probe(player, tokenizer, fact) for fact in episode.facts],
        cache=player.cache,
        ends=player.ends,
        heads=tuple(heads),
        peaks=player.peaks.cpu(),
        replay=player.replay(progress).cpu() if replay else None,
    )


def _probe(player: Player, tokenizer: PreTrainedTokenizerBase, fact: Fact) -> Probe:
    conversation = player.conversation.copy()
    asked = conversation.append([{"role": "user", "content": fact.question}])
    opened = conversation.generation_prompt()
    gold = tokenizer(fact.value, add_special_tokens=False)["input_ids"]
    where = _find(tokenizer, player.tape.ids, fact.value)
    return Probe(fact, [*asked.ids, *opened.ids], list(gold), where)


def _find(tokenizer: PreTrainedTokenizerBase, ids: list[int], value: str) -> tuple[int, int]:
    """Return the shortest run of tokens whose text holds a value."""

    def holds(start: int, end: int) -> bool:
        return find_gold(str(tokenizer.decode(ids[start:end])), value) is not None

    low, high = 0, len(ids)
    while low < high:  # the fewest first tokens that hold it
        middle = (low + high) // 2
        low, high = (low, middle) if holds(0, middle) else (middle + 1, high)
    end = low
    low, high = 0, end - 1
    while low < high:  # the latest start that does
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle, end) else (low, middle - 1)
    return low, end


@torch.no_grad()
def question_queries(model: PreTrainedModel, recording: Recording, probe: Probe) -> Tensor:
    """Return (num_layers, num_heads, n, head_dim): what each head asks for at a question."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    cache = recording.cache.copy()
    heard: list[Tensor] = []
    cache.listen(
        [(layer, head) for layer in range(layers) for head in range(heads)],
        lambda row, queries: heard.append(queries.cpu()),
    )
    _read(model, cache, probe.question)
    return torch.cat(heard, 1).view(layers, heads, len(probe.question), -1)


@torch.no_grad()
def question_mass(model: PreTrainedModel, recording: Recording, probe: Probe) -> Tensor:
    """Return (seq_len,) float32: what the question and its right answer attend to, on average."""
    cache = recording.cache.copy()
    _read(model, cache, [*probe.question, *probe.gold])
    ledger = cache.ledgers[0]
    return ledger.queries[: recording.seq_len, : ledger.num_queries].mean(1).cpu()


def _read(model: PreTrainedModel, cache: MemDecayCache, ids: Sequence[int]) -> None:
    """Read the next tokens, as parts of a prompt."""
    place = torch.arange(cache.seen, cache.seen + len(ids), device=model.device)
    cache.prefilling = True
    model.get_decoder()(
        input_ids=torch.tensor([list(ids)], device=model.device),
        position_ids=place[None],
        cache=cache,
        use_cache=True,
    )
