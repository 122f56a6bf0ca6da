"""Plays a recorded conversation through a model with a full cache, and reports its attention.

What the assistant wrote was once written token by token, so each of its tokens is a decode step:
the clock advances and the step is one observation. With nothing evicted the steps of one turn can
be computed in one forward, as each query's attention is the same; the order of events and the
clock are those of `Session.append(score=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.engine import MemDecayCache
from memdecay.engine.replay import repeat_next, repeat_prompts
from memdecay.engine.scoring import Frame, targets
from memdecay.errors import StudyError
from memdecay.policy import Policy, Tokens
from memdecay.prompt import Conversation, Message, Rendered
from memdecay.regions import Profile

_CHUNK = 128


@dataclass(frozen=True)
class Script:
    """A conversation to play.

    Args:
        name: of the episode or trace.
        cluster: what it is not independent of; intervals are over clusters.
        stages: messages, in the parts in which they arrived.
        closing: how the last answer begins; the burst continues it.
        retrievers: names of the tools whose outputs are documents.
        tools: tool schemas for the chat template.
    """

    name: str
    cluster: str
    stages: tuple[tuple[Message, ...], ...]
    closing: str = ""
    retrievers: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Observation:
    """One observation of attention.

    Args:
        now: the clock, in decode steps.
        mass: (seq_len,) float32, share of one query's attention that each token got, averaged
            over heads and layers, and over the window if it is the end of a prompt.
        decoding: whether a decode step was observed, not the end of a prompt.
    """

    now: int
    mass: Tensor
    decoding: bool


Listener = Callable[[Observation], None]


@dataclass
class Tape:
    """What is known of the tokens read so far, one entry each.

    Args:
        ids: token ids.
        regions: region names.
        spans: the message part each comes from, increasing with time.
        inserted_at: the clock at its arrival, in decode steps.
    """

    ids: list[int] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    inserted_at: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Watch(Policy):
    """Keeps everything and asks for attention."""

    name: ClassVar[str] = "watch"
    summary: ClassVar[str] = "observes only"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "heads", "replay"})

    watched: tuple[tuple[int, int], ...] = ()

    def heads(self, profile: Profile) -> Sequence[tuple[int, int]]:
        """Return the heads that whoever plays wants to watch."""
        return self.watched

    def score(self, tokens: Tokens, profile: Profile) -> Tensor:
        """Return zeros: nothing is evicted."""
        return torch.zeros(tokens.kv_len, device=tokens.position.device)


class Player:
    """Reads a script stage by stage with nothing evicted.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        script: what to read.
        window: queries that an observation at the end of a prompt averages over.
        listen: is told every observation, in order.
        max_tokens: read no more than this many tokens; the rest of the script is left out.
        heads: (layer, query head) of each head to watch at every query.

    Attributes:
        cache: the full cache.
        conversation: the messages so far.
        tape: what is known of the tokens so far.
        now: the clock, in decode steps.
        peaks: (len(heads), seq_len) float32, the most attention that each token got in each.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        script: Script,
        *,
        window: int = 16,
        listen: Listener | None = None,
        max_tokens: int | None = None,
        heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.model, self.tokenizer, self.script = model, tokenizer, script
        self.window = window
        self.tape = Tape()
        self.now = 0
        self.truncated = False
        self.conversation = self._conversation()
        watch = _Watch(tuple(heads))
        # What is measured must not depend on which heads are known already.
        profile = Profile.default().with_evidence({})
        self.cache = MemDecayCache(model, budget=None, policy=watch, profile=profile, window=_CHUNK)
        self.peaks = torch.zeros(len(heads), 0, device=model.device)
        self.cache.on_heads = self._hear_heads
        self._listen = listen or (lambda observation: None)
        self._max_tokens = max_tokens
        self._held: list[Tensor] = []
        self._next_span = 1
        self._logits: Tensor | None = None
        self._decoder = model.get_decoder()
        self._frame = Frame(self._conversation, tokenizer)
        self.ends = self._ends()

    def _conversation(self) -> Conversation:
        script = self.script
        return Conversation(
            self.tokenizer, retrievers=script.retrievers, tools=list(script.tools) or None
        )

    def play(self, progress: Callable[[int], None] | None = None) -> None:
        """Read all stages and the start of the last answer.

        Args:
            progress: is told how many tokens were read by each forward.

        Raises:
            TraceError: a message is malformed, or the chat template refuses it.
        """
        report = progress or (lambda count: None)
        for stage in self.script.stages:
            if self.truncated:
                break
            self._read_stage(stage, report)
        prompt = self.conversation.generation_prompt()
        self._read(prompt.ids, prompt.regions, self._spans(prompt), set(), report)
        self.answer_from = len(self.tape.ids)
        if self.script.closing:
            ids = self.tokenizer(self.script.closing, add_special_tokens=False)["input_ids"]
            span = [self._next_span] * len(ids)
            self._read(ids, ["scratchpad"] * len(ids), span, set(range(len(ids))), report)

    @torch.no_grad()
    def burst(self, steps: int) -> list[int]:
        """Decode greedily for so many steps, each an observation, and return the new ids.

        No token that ends a turn is chosen, so that a burst always has its length. The tokens
        belong to the region `scratchpad`.
        """
        self._end_prompt()
        cache, written = self.cache, []
        cache.on_observe = lambda row, mass, refreshed: self._say(mass.clone(), decoding=True)
        try:
            for _ in range(steps):
                if self._logits is None:
                    self._logits = self._last_logits()
                logits = self._logits.clone()
                logits[self.ends] = -torch.inf
                token = int(logits.argmax())
                self.now += 1
                self._enter([token], ["scratchpad"], [self._next_span], [self.now])
                place = torch.tensor([[cache.seen]], device=self.model.device)
                out = self.model(
                    input_ids=torch.tensor([[token]], device=self.model.device),
                    position_ids=place,
                    cache=cache,
                    use_cache=True,
                )
                self._logits = out.logits[0, -1].float()
                written.append(token)
        finally:
            cache.on_observe = None
        return written

    def replay(self, progress: Callable[[int], None] | None = None) -> Tensor:
        """Let the model repeat all that was read, as `Session.idle` does.

        Returns:
            (num_layers, num_heads, seq_len) float32, the most attention that each token got.

        Raises:
            StudyError: the model has no positions left to repeat it at.
        """
        prompts, most = repeat_prompts(self.tokenizer), None
        while len(self.cache.unreplayed()):
            count, attention = repeat_next(self.cache, prompts, self.tape.ids)
            if attention is None:
                raise StudyError(
                    f"The model cannot repeat {self.script.name!r}, as it has no positions beyond "
                    f"the {len(self.tape.ids):,} tokens of it; evidence heads need that."
                )
            most = attention if most is None else torch.maximum(most, attention)
            if progress is not None:
                progress(count)
        assert most is not None
        return most

    # Reading

    def _hear_heads(self, row: int, peak: Tensor) -> None:
        grown = peak.clone()
        grown[:, : self.peaks.shape[1]] = torch.maximum(grown[:, : self.peaks.shape[1]], self.peaks)
        self.peaks = grown

    def _read_stage(self, messages: Sequence[Message], report: Callable[[int], None]) -> None:
        first = len(self.conversation.messages)
        rendered = self.conversation.append(messages)
        roles = {
            index: message["role"]
            for index, message in enumerate(self.conversation.messages)
            if index >= first
        }
        wanted = set(targets(rendered, roles, self._frame, self.ends))
        spans = self._spans(rendered)
        count = len(rendered)
        if self._max_tokens is not None and len(self.tape.ids) + count > self._max_tokens:
            count = self._max_tokens - len(self.tape.ids)
            self.truncated = True
        self._read(rendered.ids[:count], rendered.regions[:count], spans[:count], wanted, report)

    def _spans(self, rendered: Rendered) -> list[int]:
        spans = [self._next_span + index for index in rendered.span_index]
        self._next_span += len(rendered.spans)
        return spans

    def _read(
        self,
        ids: Sequence[int],
        regions: Sequence[str],
        spans: Sequence[int],
        decoded: set[int],
        report: Callable[[int], None],
    ) -> None:
        """Read tokens; those at the offsets `decoded` are decode steps."""
        start = 0
        for end in range(1, len(ids) + 1):
            full = end - start == _CHUNK
            if end < len(ids) and not full and (end in decoded) == (start in decoded):
                continue
            decoding = start in decoded
            count = end - start
            if decoding:
                self._end_prompt()
            arrivals = [self.now + 1 + n if decoding else self.now for n in range(count)]
            self._enter(ids[start:end], regions[start:end], spans[start:end], arrivals)
            masses = self._forward(ids[start:end])
            if decoding:
                length = len(self.tape.ids) - count
                for n in range(count):
                    self.now += 1
                    self._say(masses[: length + n + 1, n].clone(), decoding=True)
            else:
                self._hold(masses)
            report(count)
            start = end

    @torch.no_grad()
    def _forward(self, ids: Sequence[int]) -> Tensor:
        """Run tokens, and return what each attended to, (kv_len, len(ids)) float32."""
        cache, device = self.cache, self.model.device
        cache.prefilling = True
        try:
            first = cache.seen
            positions = torch.arange(first, first + len(ids), device=device)
            self._decoder(
                input_ids=torch.tensor([list(ids)], device=device),
                position_ids=positions[None],
                cache=cache,
                use_cache=True,
            )
        finally:
            cache.prefilling = False
        self._logits = None
        ledger = cache.ledgers[0]
        masses = ledger.queries[: ledger.length, : ledger.num_queries][:, -len(ids) :].clone()
        ledger.num_queries = 0
        return masses

    def _last_logits(self) -> Tensor:
        """Return the logits after the last token read, by reading it again: heads may scale."""
        cache = self.cache
        cache.crop(-1)
        cache.prefilling = True
        try:
            out = self.model(
                input_ids=torch.tensor([[self.tape.ids[-1]]], device=self.model.device),
                position_ids=torch.tensor([[cache.seen]], device=self.model.device),
                cache=cache,
                use_cache=True,
            )
        finally:
            cache.prefilling = False
        cache.ledgers[0].num_queries = 0
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def _enter(
        self,
        ids: Sequence[int],
        regions: Sequence[str],
        spans: Sequence[int],
        arrivals: Sequence[int],
    ) -> None:
        self.tape.ids.extend(ids)
        self.tape.regions.extend(regions)
        self.tape.spans.extend(spans)
        self.tape.inserted_at.extend(arrivals)

    # Observations

    def _hold(self, masses: Tensor) -> None:
        """Keep what the last queries of a prompt attended to, until the prompt ends."""
        self._held = [*self._held, *masses.t()[-self.window :].clone()][-self.window :]

    def _end_prompt(self) -> None:
        if not self._held:
            return
        mass = torch.zeros(len(self.tape.ids), device=self.model.device)
        for one in self._held:
            mass[: len(one)] += one / len(self._held)
        self._held = []
        self._say(mass, decoding=False)

    def _say(self, mass: Tensor, *, decoding: bool) -> None:
        self._listen(Observation(self.now, mass, decoding))

    def _ends(self) -> list[int]:
        """Return the ids that end a turn."""
        ends = {self.tokenizer.eos_token_id, *self._frame.ends}
        configured = self.model.generation_config.eos_token_id
        ends |= set(configured) if isinstance(configured, list) else {configured}
        return sorted(int(end) for end in ends if end is not None)
