"""An agent's conversation with one model, its memory held under a fixed budget."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from memdecay.engine.cache import MemDecayCache
from memdecay.engine.interrupts import HeldInterrupts
from memdecay.engine.known import describe
from memdecay.engine.memory import Memory, OpensMemory, cache_settings, open_memory
from memdecay.engine.pins import check_pins
from memdecay.engine.replay import repeat_next, repeat_prompts
from memdecay.engine.report import AppendResult, Generated, Idle, Report, Scores
from memdecay.engine.scoring import Frame, Scorer, targets
from memdecay.engine.streaming import Cancel, DroppedError, stream
from memdecay.engine.timeline import TimelineRecorder
from memdecay.engine.undo import Checkpoint
from memdecay.errors import BudgetError, SessionError, TraceError
from memdecay.policy import DEFAULT_POLICY, Policy, policy_config
from memdecay.prompt import Conversation, Message, Rendered
from memdecay.regions import Profile

_OURS = (
    "generation_config",
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
    "cache",
    "use_cache",
    "tokenizer",
    "stop_strings",
    "return_dict_in_generate",
)
_ROWS = ("num_beams", "num_return_sequences")
_LOOKED_AT = 512
"""Tokens of a turn that are looked at for what they ask, before it is read: its last ones."""


class Session:
    """A labelled conversation whose KV cache never exceeds its budget.

        session = Session(model, tokenizer, budget=512)
        session.append([{"role": "system", "content": "..."}, {"role": "user", "content": "..."}])
        print(session.generate(max_new_tokens=64).text)

    Every message becomes labelled tokens through the model's own chat template. Prompts are read
    in chunks, so a prompt of any length runs in the budget. Sessions are independent: several may
    take turns on one model, also in threads (one thread a session). It is a context manager.

    Args:
        model: a causal language model of a supported family.
        tokenizer: its fast tokenizer, with a chat template.
        budget: tokens to keep, None for no limit.
        policy: what to forget first; a name or a policy.
        profile: region policies, the defaults if None.
        page_size: tokens a page, only whole pages are evicted; what the policy prefers if None.
        align: "region" to open a fresh page at every region boundary.
        clock: "steps" (decode steps) or "tokens" (every token is a step).
        observe_every: k, observe attention every k decode steps; 0 for never.
        window: queries that an observation at the end of a prompt averages over.
        retrievers: names of the tools whose outputs are documents (region `retrieval`).
        tools: tool schemas for the chat template.
        prefill_chunk: tokens of a prompt to read at once; a quarter of the budget if that is less.
        record_timeline: record the life of every page, for `timeline`.
        surprisal_vocabulary: for a policy that needs surprisal, see `MemDecayCache`.
        tiers: where what is evicted goes, such as `memdecay.Tiers()`, to come back for messages
            that ask for it; None to drop it. With `Tiers(quantized=...)` the budget is how many
            tokens are kept at full precision, and more are kept beside them.

    Raises:
        MemDecayError: an argument is not usable; the sentence says which.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        budget: int | None,
        policy: Policy | str = DEFAULT_POLICY,
        profile: Profile | None = None,
        page_size: int | None = None,
        align: str | None = None,
        clock: str = "steps",
        observe_every: int = 1,
        window: int = 16,
        retrievers: Collection[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        prefill_chunk: int = 256,
        record_timeline: bool = False,
        surprisal_vocabulary: int | None = 8192,
        tiers: OpensMemory | None = None,
    ) -> None:
        if isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int):
            raise SessionError(f"prefill_chunk is {prefill_chunk!r}, but it must be an integer.")
        if prefill_chunk < 1:
            raise SessionError(f"prefill_chunk is {prefill_chunk}, but it must be at least 1.")
        self.model = model
        self.tokenizer = tokenizer
        self.budget = budget
        self.cache = MemDecayCache(
            model,
            **cache_settings(tiers, budget, policy, page_size),
            policy=policy,
            profile=profile,
            page_size=page_size,
            align=align,
            clock=clock,
            observe_every=observe_every,
            window=window,
            surprisal_vocabulary=surprisal_vocabulary,
        )
        self.tiers = tiers
        self._memory: Memory | None = open_memory(tiers, self.cache)
        self.conversation = Conversation(
            tokenizer, retrievers=retrievers, tools=tools, profile=self.cache.profile
        )
        self._empty = self.conversation.state_dict()
        self.prefill_chunk = prefill_chunk
        self._record_timeline = record_timeline
        self._lock = threading.Lock()
        self._writing: Cancel | None = None
        self._frame: Frame | None = None
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []  # of what was run; those about to be are here before they are
        if self._memory is not None:
            self._memory.ids = self._ids
        self._seen_by_region = dict.fromkeys(self.cache.profile.names, 0)
        self._next_span = 1
        self._spans_of: dict[int, tuple[int, ...]] = {}
        self._pinned_regions: set[str] = set()
        self._peak_bytes = 0
        self._last_logits: Tensor | None = None
        self._recorder = (
            TimelineRecorder(self.cache, self._memory) if self._record_timeline else None
        )

    # The conversation

    @torch.no_grad()
    def append(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        pin: bool = False,
        score: bool = False,
        score_chunk: int = 1,
    ) -> AppendResult:
        """Read messages: label their tokens and run them through the model, within the budget.

        Args:
            messages: OpenAI chat messages; a `region` on one or on a content part is its label.
            pin: never evict them, until `release`.
            score: say how well the model foresees the assistant's tokens (teacher forcing): those
                after what the template opens an answer with, up to the one that ends it. They are
                read one by one, as decode steps.
            score_chunk: how many of those to read by one forward. Above 1 this approximates the
                order of events, for every policy alike: room is made before the whole chunk, then
                the clock advances by as many decode steps (each token arrives at its own), and
                what its last `window` queries attended to is one observation.

        Raises:
            SessionError: `score_chunk` is not an integer of at least 1.
            TraceError: a message is malformed, or the chat template refuses it.
            BudgetError: the pinned tokens do not fit the budget.
            In these cases nothing has changed. After any other exception the session is as it was
            too, except that what was evicted stays evicted.
        """
        if isinstance(score_chunk, bool) or not isinstance(score_chunk, int) or score_chunk < 1:
            raise SessionError(
                f"score_chunk is {score_chunk!r}, but it must be an integer of at least 1."
            )
        score_chunk = score_chunk if score else 0
        with self._alone(), self._undo() as undo:
            first = len(self.conversation.messages)
            rendered = self.conversation.append(messages)
            scores = self._read(rendered, undo, first=first, pin=pin, score_chunk=score_chunk)
        return AppendResult(len(rendered), rendered.spans, rendered.notes, scores)

    def check(self, messages: Sequence[Mapping[str, Any]], *, pin: bool = False) -> None:
        """Refuse messages that `append` would refuse; nothing is run and nothing changes.

        Raises:
            TraceError, BudgetError: as `append`.
        """
        conversation = self.conversation.copy()
        rendered = conversation.append(messages)
        first = len(self.conversation.messages)
        check_pins(self.cache, rendered.regions, self._pins(rendered, first=first, pin=pin))

    def generate(
        self, *, max_new_tokens: int = 256, stop: str | Sequence[str] | None = None, **options: Any
    ) -> Generated:
        """Let the model answer, and add the answer to the conversation.

        Args:
            max_new_tokens: at most so many tokens.
            stop: stop after any of these strings.
            options: passed on to transformers' `generate` (greedy unless `do_sample=True`).

        Raises:
            SessionError: an option belongs to the session, or asks for several sequences.
            TraceError: there is no message to answer.
            BudgetError: the pinned tokens leave no room for an answer.
            After an exception the session is as it was; what was evicted stays evicted.
        """
        self._check_options(max_new_tokens, stop, options)
        return self._generate(max_new_tokens, stop, options, Cancel())

    def stream(
        self, *, max_new_tokens: int = 256, stop: str | Sequence[str] | None = None, **options: Any
    ) -> Iterator[str]:
        """Let the model answer, piece by piece; the arguments and errors are those of `generate`.

        Closing the iterator early ends the answer there, and keeps what was written. Until the
        iterator is exhausted or closed, the session can do nothing else.
        """
        self._check_options(max_new_tokens, stop, options)
        if "streamer" in options:
            raise SessionError("streamer is set by stream itself; to choose it, use generate.")

        def write(streamer: TextIteratorStreamer, cancel: Cancel) -> None:
            self._generate(max_new_tokens, stop, {**options, "streamer": streamer}, cancel)

        return stream(self.tokenizer, write)

    def ask(self, text: str, *, max_new_tokens: int = 64) -> str:
        """Return the greedy answer to a question; the session is as if it had not been asked."""
        with self.fork() as copy:
            copy.append([{"role": "user", "content": text}])
            return copy.generate(max_new_tokens=max_new_tokens).text

    @torch.no_grad()
    def idle(
        self,
        *,
        seconds: float | None = None,
        stop: threading.Event | None = None,
        progress: Callable[[Idle], None] | None = None,
    ) -> Idle:
        """Use idle time: let the model repeat what is kept, so that the policy knows what matters.

        Each kept token is repeated once, oldest first, in pieces of at most 256; a later call goes
        on where this one stopped, and takes in what has come since. Nothing of it is stored, and
        what the session says and counts does not change, except that a page is evicted if there
        is no room at all to repeat in. It does nothing unless the policy needs "replay", so an
        agent may call it whenever it waits.

        Args:
            seconds: start no piece that would end later than this, going by the piece before it.
            stop: set it from another thread to stop before the next piece.
            progress: called after each piece with what was done so far.

        Raises:
            SessionError: `seconds` is negative or no number.
            A Ctrl-C undoes the piece it interrupts; the pieces before it count.
        """
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0
        ):
            raise SessionError(f"seconds is {seconds!r}, but it must be at least 0, or None.")
        start = time.monotonic()

        def over(last: float) -> bool:
            late = seconds is not None and time.monotonic() - start + last >= seconds
            return late or (stop is not None and stop.is_set())

        def done(replayed: int, interrupted: bool = False) -> Idle:
            left = len(self.cache.unreplayed())
            return Idle(replayed, left, interrupted, time.monotonic() - start)

        with self._alone():
            replayed, last, interrupted = 0, 0.0, False
            while len(self.cache.unreplayed()) and not interrupted:
                before = time.monotonic()
                interrupted = over(last)
                count = 0 if interrupted else self._repeat()
                if not count:
                    break
                replayed, last = replayed + count, time.monotonic() - before
                if progress is not None:
                    progress(done(replayed))
            return done(replayed, interrupted)

    def _repeat(self) -> int:
        """Let the model repeat the next kept tokens; returns how many, 0 if there is no room."""
        return repeat_next(self.cache, repeat_prompts(self.tokenizer), self._ids)[0]

    # Pins

    def pin(self, *, region: str | None = None, message: int | None = None) -> int:
        """Never evict a region, now and in messages to come, or one message; until `release`.

        Args:
            region: a region of the profile.
            message: index of a message of the conversation.

        Returns:
            How many kept tokens are now pinned by this.

        Raises:
            SessionError: not exactly one of the two is given, or there is no such message.
            ProfileError: there is no such region.
            BudgetError: what is pinned would not fit the budget; nothing has changed.
        """
        with self._alone():
            chosen = self._chosen(region, message)
            before = self.cache.ledgers[0]["pinned"].clone() if self.cache.ledgers else None
            count = self._set_pinned(chosen, True)
            try:
                check_pins(self.cache)
            except BudgetError:
                assert before is not None
                self.cache.ledgers[0]["pinned"].copy_(before)
                raise
            if region is not None:
                self._pinned_regions.add(region)
        return count

    def release(self, *, region: str | None = None, message: int | None = None) -> int:
        """Undo `pin`; the arguments, result and errors are alike.

        A token that was pinned with its region and with its message is released by either. What
        the profile pins stays pinned.
        """
        with self._alone():
            chosen = self._chosen(region, message)
            if region is not None:
                self._pinned_regions.discard(region)
            return self._set_pinned(chosen, False)

    # State

    def report(self) -> Report:
        """Return what the session holds and did."""
        with self._alone():
            return self._report()

    def _report(self) -> Report:
        cache = self.cache
        names = cache.profile.names
        kept = dict.fromkeys(names, 0)
        pinned = 0
        if cache.ledgers:
            kept = dict(zip(names, cache.ledgers[0].kept_by_region(), strict=True))
            pinned = cache.ledgers[0].stuck()[0]
        return Report(
            model=str(self.model.config.name_or_path or type(self.model).__name__),
            policy=policy_config(cache.policy),
            budget_tokens=self.budget,
            seen_tokens=cache.seen,
            kept_tokens=cache.kept(),
            kept_entries=cache.kept_entries(),
            peak_resident_tokens=cache.peak_tokens,
            kept_by_region=kept,
            seen_by_region=dict(self._seen_by_region),
            pinned_tokens=pinned,
            evicted_tokens=cache.evicted_tokens,
            evicted_pages=cache.evicted_pages,
            kv_bytes=cache.nbytes,
            peak_kv_bytes=max(self._peak_bytes, cache.peak_nbytes),
            page_size=cache.page_size,
            clock=cache.clock,
            steps=cache.steps,
            observations=cache.observations,
            evidence=describe(cache.profile) if "heads" in cache.policy.needs else None,
            notes=self._notes(),
            tiers=self._memory.report() if self._memory is not None else None,
        )

    def timeline(self) -> dict[str, Any]:
        """Return the life of every page, as plain JSON values.

        With tiers each page has its `moves` too: [index of the event, where it went then], which is
        "host", "disk", "lost", "quantized" when at least half of it went to fewer bits, or
        "resident" when it came back.

        Raises:
            SessionError: the session was made without `record_timeline=True`, or was loaded.
        """
        with self._alone():
            if self._recorder is None:
                raise SessionError(
                    "The timeline was not recorded; make the session with record_timeline=True."
                )
            return self._recorder.to_dict()

    def fork(self) -> Session:
        """Return an independent copy on the same model; it records no timeline."""
        with self._alone():
            other = Session.__new__(Session)
            other.__dict__.update(self.__dict__)
            other.cache = self.cache.copy()
            other._ids = [*self._ids]
            if self._memory is not None:
                other._memory = self._memory.copy(other.cache)
                other._memory.ids = other._ids
            other.conversation = self.conversation.copy()
            other._seen_by_region = dict(self._seen_by_region)
            other._spans_of = dict(self._spans_of)
            other._pinned_regions = set(self._pinned_regions)
            other._recorder, other._record_timeline = None, False
            other._lock, other._writing = threading.Lock(), None
            return other

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the session to a folder, as JSON and safetensors; see `load`.

        Raises:
            SessionError: the folder cannot be written, or holds something else. What was saved
                there before is intact then.
        """
        from memdecay.engine.saving import save_session

        with self._alone():
            save_session(self, folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Session:
        """Return the session that `save` wrote; it goes on exactly as the saved one would.

        A timeline is not saved.

        Raises:
            SessionError: it is missing, damaged, or belongs to another model or tokenizer.
        """
        from memdecay.engine.saving import load_session

        return load_session(folder, model, tokenizer)

    def reset(self) -> None:
        """Forget the conversation and free the cache; the settings stay."""
        with self._alone():
            self._reset()

    def _reset(self) -> None:
        self.cache.reset()
        if self._memory is not None:
            self._memory.clear()
        self.conversation = self._conversation(self._empty)
        self._clear()

    def close(self) -> None:
        """Free the cache, ending a stream that is still open.

        The model was never changed, so nothing else is left to undo.
        """
        writing = self._writing
        if writing is not None:
            writing.set()
        with self._lock:
            self._reset()
            if self._memory is not None:
                self._memory.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading

    def _read(
        self, rendered: Rendered, undo: _Undo, *, first: int, pin: bool, score_chunk: int
    ) -> Scores | None:
        """Run labelled tokens; `first` is the index of the first new message.

        `score_chunk` is 0 if nothing is to be scored.
        """
        if not rendered.ids:
            return None
        pins = self._pins(rendered, first=first, pin=pin)
        check_pins(self.cache, rendered.regions, pins)
        undo.watch(len(rendered))
        wanted = {}
        if score_chunk:
            roles = {
                index: message["role"]
                for index, message in enumerate(self.conversation.messages)
                if index >= first
            }
            wanted = targets(rendered, roles, self._framing(), self._ends())
        scorer = Scorer(rendered.ids, wanted, self.cache.seen, chunk=score_chunk)
        for part in self._parts(rendered, first):
            if self._memory is not None and part.ahead is not None:
                self._bring_back(self._memory, rendered, pins, part)
            self._label(rendered, pins, part.start, part.stop)
            self._run(rendered.ids[: part.stop], scorer, start=part.start)
        for name in rendered.regions:
            self._seen_by_region[name] += 1
        self._number(rendered)
        return scorer.result()

    def _parts(self, rendered: Rendered, first: int) -> list[_Part]:
        """Cut new tokens where an answer of a new assistant message begins or ends.

        What an assistant wrote asks for nothing before it is read: whoever foresees it must not
        have looked at it.
        """
        end = len(rendered)
        if self._memory is None:
            return [_Part(0, end, None)]
        messages = self.conversation.messages
        parts: list[_Part] = []
        for span in rendered.spans:
            written = span.message >= first and messages[span.message]["role"] == "assistant"
            if parts and (parts[-1].ahead is None) == written:
                parts[-1] = replace(parts[-1], stop=span.end)
            else:
                parts.append(_Part(span.start, span.end, None if written else 0))
        for number, part in enumerate(parts[:-1]):
            if part.ahead is not None:
                answer = rendered.ids[part.stop : parts[number + 1].stop]
                parts[number] = replace(part, ahead=self._framing().opening(answer))
        return parts

    def _label(self, rendered: Rendered, pins: Sequence[bool], start: int, stop: int) -> None:
        """Say of some of the new tokens what they are, before they are run."""
        spans = [self._next_span + index for index in rendered.span_index]
        for end in range(start + 1, stop + 1):
            if end == stop or pins[end] != pins[start]:
                self.cache.label(
                    rendered.regions[start:end], spans=spans[start:end], pinned=pins[start]
                )
                start = end

    def _bring_back(
        self, memory: Memory, rendered: Rendered, pins: Sequence[bool], part: _Part
    ) -> None:
        """Let what part of the new tokens asks for come back, before it is read.

        Its end is read for that and taken back, with what opens the answer to it, as that asks
        most; and again with what has come back, as then it asks better. Where the memory finds
        things by ids alone, nothing is read for it.
        """
        if not memory.wants(part.stop - part.start):
            return
        stop = part.stop + (part.ahead or 0)
        begin = max(part.start, part.stop - _LOOKED_AT)
        opening = self._opening(rendered, pins) if part.stop == len(rendered) else None
        ids = [*rendered.ids[begin:stop], *(opening.ids if opening is not None else ())]

        def run() -> None:
            self._label(rendered, pins, begin, stop)
            if opening is not None:
                first = self._next_span + len(rendered.spans)
                self.cache.label(
                    opening.regions, spans=[first + index for index in opening.span_index]
                )
            self._run(ids)

        known, logits = len(self._ids), self._last_logits
        room = part.stop - part.start + len(ids) - (part.stop - begin)
        if not memory.looks:
            memory.exchange(None, ids=ids, room=room)
        for number in range(memory.looks):
            mark = self._recorder.mark() if self._recorder is not None else None
            try:
                queries = memory.look(run, len(ids))
            finally:
                del self._ids[known:]
                self._last_logits = logits
                if self._recorder is not None and mark is not None:
                    self._recorder.back_to(mark)
            memory.exchange(queries, ids=ids, room=room, again=number > 0)

    def _opening(self, rendered: Rendered, pins: Sequence[bool]) -> Rendered | None:
        """Return what the template opens an answer to new tokens with, if it can and it fits."""
        try:
            opening = self.conversation.generation_prompt()
            regions = [*rendered.regions, *opening.regions]
            check_pins(self.cache, regions, [*pins, *[False] * len(opening)])
        except (TraceError, BudgetError):
            return None
        return opening

    def _pins(self, rendered: Rendered, *, first: int, pin: bool) -> list[bool]:
        """Return which tokens are pinned by hand, if messages from `first` on are (`pin`)."""
        return [
            name in self._pinned_regions or (pin and rendered.spans[index].message >= first)
            for name, index in zip(rendered.regions, rendered.span_index, strict=True)
        ]

    def _run(self, ids: Sequence[int], scorer: Scorer | None = None, *, start: int = 0) -> None:
        """Run ids from `start` on through the model: prompts by chunks, scored as decode steps.

        A scored token was once written by a model, so the clock and the policy treat it as such,
        and several of one forward as so many decode steps. A policy that never evicts learns
        nothing from that, and reads everything by chunks.
        """
        device = self.model.device
        decode = scorer is not None and self.cache.policy.bounded
        if scorer is not None and not start and self._last_logits is not None:
            scorer.add(self._last_logits[None], [0])
        offset = start
        try:
            while offset < len(ids):
                count = min(self._chunk(), len(ids) - offset)
                if scorer is not None and decode:
                    count = min(count, scorer.next_target(offset) - offset) or min(
                        count, scorer.targets_from(offset)
                    )
                    self.cache.stepping = scorer.is_target(offset)
                    self.cache.prefilling = not self.cache.stepping
                else:
                    self.cache.prefilling = True
                rows = scorer.rows(offset, count) if scorer is not None else [count - 1]
                first = self.cache.seen
                positions = torch.arange(first, first + count, device=device)
                self._ids.extend(ids[offset : offset + count])
                out = self.model(
                    input_ids=torch.tensor([ids[offset : offset + count]], device=device),
                    position_ids=positions[None],
                    cache=self.cache,
                    use_cache=True,
                    logits_to_keep=torch.tensor(rows, device=device),
                )
                logits = out.logits[0].float()
                self._last_logits = logits[-1].clone()
                if scorer is not None:
                    scorer.add(logits, [offset + row + 1 for row in rows])
                offset += count
                if self._recorder is not None and self.cache.prefilling:
                    self._recorder.prefilled()
        finally:
            self.cache.prefilling = self.cache.stepping = False

    def _chunk(self) -> int:
        """Return how many tokens of a prompt to read next."""
        cache = self.cache
        if self.budget is None:
            return self.prefill_chunk
        chunk = max(1, min(self.prefill_chunk, self.budget // 4))
        if cache.ledgers and cache.budget is not None:
            held, still_open = cache.ledgers[0].stuck()
            chunk = max(1, min(chunk, cache.budget - held - still_open))
        room = cache.full_room()
        if room is not None:
            chunk = max(1, min(chunk, room))
        beyond = (cache.seen + chunk) % cache.page_size
        return chunk - beyond if chunk > beyond else chunk

    def _number(self, rendered: Rendered) -> None:
        """Give the spans of new tokens their numbers."""
        for number, span in enumerate(rendered.spans, self._next_span):
            self._spans_of[span.message] = (*self._spans_of.get(span.message, ()), number)
        self._next_span += len(rendered.spans)

    def _framing(self) -> Frame:
        if self._frame is None:
            self._frame = Frame(lambda: self._conversation(self._empty), self.tokenizer)
        return self._frame

    def _ends(self) -> list[int]:
        """Return the ids that end a turn."""
        ends = {self.tokenizer.eos_token_id, *self._framing().ends}
        configured = self.model.generation_config.eos_token_id
        ends |= set(configured) if isinstance(configured, list) else {configured}
        return sorted(int(end) for end in ends if end is not None)

    # Writing

    @staticmethod
    def _check_options(
        max_new_tokens: int, stop: str | Sequence[str] | None, options: Mapping[str, Any]
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise SessionError(f"max_new_tokens is {max_new_tokens!r}, but it must be an integer.")
        if max_new_tokens < 1:
            raise SessionError(f"max_new_tokens is {max_new_tokens}, but it must be at least 1.")
        stops = [stop] if isinstance(stop, str) else stop or []
        if not all(isinstance(text, str) and text for text in stops):
            raise SessionError(f"stop is {stop!r}, but it must be a text or several, none empty.")
        for name in _OURS:
            if name in options:
                raise SessionError(
                    f"{name} is set by the session itself; to choose it, pass a MemDecayCache to "
                    f"model.generate."
                )
        for name in _ROWS:
            if options.get(name) not in (None, 1):
                raise SessionError(
                    f"{name} is {options[name]!r}, but a session holds one sequence, so it must "
                    f"be 1; for more, pass a MemDecayCache to model.generate."
                )

    @torch.no_grad()
    def _generate(
        self,
        max_new_tokens: int,
        stop: str | Sequence[str] | None,
        options: Mapping[str, Any],
        cancel: Cancel,
    ) -> Generated:
        stops = [stop] if isinstance(stop, str) else [*(stop or ())]
        with self._alone(), self._undo() as undo:
            self._writing = cancel
            start = self.cache.seen
            prompt = self.conversation.generation_prompt()
            check_pins(self.cache, prompt.regions, [False] * len(prompt))
            undo.watch(len(prompt) + max_new_tokens, again=not prompt.ids)
            if prompt.ids:
                spans = [self._next_span + index for index in prompt.span_index]
                self.cache.label(prompt.regions, spans=spans)
                self._run(prompt.ids[:-1])
                self._ids.append(prompt.ids[-1])
            else:
                self._take_back()
            ids = [*self._ids]
            self._last_logits = None
            settings = self._settings(options, stops, cancel)
            inputs = torch.tensor([ids], device=self.model.device)
            out = self.model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                cache=self.cache,
                max_new_tokens=max_new_tokens,
                **settings,
            )
            sequence = out.tolist()[0]
            if cancel.forget:
                raise DroppedError
            self._finish(sequence)
            written = sequence[len(ids) :]
            message = self._record(prompt, written, start)
        text = str(self.tokenizer.decode(written, skip_special_tokens=True))
        ended = written[-1] in settings["eos_token_id"] or any(end in text for end in stops)
        reason = "stop" if ended or len(written) < max_new_tokens else "length"
        return Generated(text, written, message, "cancelled" if cancel.is_set() else reason)

    def _settings(
        self, options: Mapping[str, Any], stops: Sequence[str], cancel: Cancel
    ) -> dict[str, Any]:
        """Return what `model.generate` is to do, beside its inputs."""
        settings: dict[str, Any] = {"do_sample": False, **options}
        ends = settings.get("eos_token_id")
        ends = self._ends() if ends is None else [ends] if isinstance(ends, int) else [*ends]
        settings["eos_token_id"] = ends
        settings.setdefault("pad_token_id", ends[0] if ends else 0)
        criteria = [*(settings.get("stopping_criteria") or ()), cancel]
        if self._memory is not None:
            criteria.append(_Written(self))
        settings["stopping_criteria"] = StoppingCriteriaList(criteria)
        if stops:
            settings |= {"stop_strings": [*stops], "tokenizer": self.tokenizer}
        return settings

    def _take_back(self) -> None:
        """Forget the last token, to be run again: its logits start the answer.

        Only for templates that write nothing between a message and its answer.
        """
        if not self.cache.seen:
            raise SessionError("There is nothing to answer: the chat template wrote no text yet.")
        ledger = self.cache.ledgers[0]
        newest = int(ledger["position"].argmax())
        region, span = int(ledger["region"][newest]), int(ledger["span"][newest])
        pinned = bool(ledger["pinned"][newest])
        self.cache.prefilling = True  # or this would count as a decode step
        self.cache.crop(-1)
        self.cache.prefilling = False
        self.cache.label([self.cache.profile.name(region)], spans=[span], pinned=pinned)

    def _finish(self, sequence: list[int]) -> None:
        """Run the last tokens that the model wrote but has not read."""
        self._ids[:] = sequence
        for token in sequence[self.cache.seen :]:
            out = self.model(
                input_ids=torch.tensor([[token]], device=self.model.device),
                position_ids=torch.tensor([[self.cache.seen]], device=self.model.device),
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._last_logits = out.logits[0, -1].float()

    def _record(self, prompt: Rendered, written: Sequence[int], start: int) -> Message:
        """Add an answer to the conversation, and say of its tokens what they turned out to be.

        Args:
            prompt: what opened the answer.
            written: the ids of the answer.
            start: position of the first token of the two.
        """
        index = len(self.conversation.messages)
        recorded = self.conversation.record_generated(written)
        answer = recorded.rendered
        regions = [
            answer.regions[0] if prompt.spans[span].message >= index else region
            for region, span in zip(prompt.regions, prompt.span_index, strict=True)
        ]
        regions += answer.regions
        spans = [self._next_span + number for number in prompt.span_index]
        self._number(prompt)
        spans += [self._next_span + number for number in answer.span_index]
        self._number(answer)
        profile, ledger = self.cache.profile, self.cache.ledgers[0]
        known = {name: profile.id(name) for name in set(regions)}
        offset = ledger["position"] - start
        mine = (offset >= 0) & (offset < len(regions))
        offset = offset[mine]
        columns = (
            ("region", [known[name] for name in regions]),
            ("span", spans),
            ("pinned", [name in self._pinned_regions for name in regions]),
        )
        for name, values in columns:
            ledger[name][mine] = torch.tensor(values, device=ledger.device)[offset]
        for name in regions:
            self._seen_by_region[name] += 1
        return recorded.message

    # Pins

    def _chosen(self, region: str | None, message: int | None) -> Tensor:
        if (region is None) == (message is None):
            raise SessionError(
                f"region is {region!r} and message is {message!r}, but exactly one must be given."
            )
        ledger = self.cache.ledgers[0] if self.cache.ledgers else self.cache.new_ledger()
        if region is not None:
            return ledger["region"] == self.cache.profile.id(region)
        count = len(self.conversation.messages)
        if isinstance(message, bool) or not isinstance(message, int) or not 0 <= message < count:
            raise SessionError(
                f"message is {message!r}, but it must be the index of one of the {count} messages."
            )
        spans = torch.tensor(self._spans_of.get(message, ()), device=ledger.device)
        return torch.isin(ledger["span"], spans)

    def _set_pinned(self, chosen: Tensor, pinned: bool) -> int:
        if not self.cache.ledgers:
            return 0
        return self.cache.pin(lambda ledger: chosen, pinned)

    # All or nothing

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second use of the session while there is one."""
        with HeldInterrupts() as held:
            if not self._lock.acquire(blocking=False):
                raise SessionError(
                    "The session is in use; exhaust or close its stream first, and use it in one "
                    "thread at a time."
                )
            try:
                with held.delivered():
                    yield
            finally:
                self._writing = None
                self._lock.release()

    @contextlib.contextmanager
    def _undo(self) -> Iterator[_Undo]:
        """Make what follows change everything or nothing."""
        undo = _Undo(self)
        if self._memory is not None:
            self._memory.begin()
        try:
            yield undo
        except BaseException:
            undo.restore()
            raise
        finally:
            used = self.cache.peak_nbytes + undo.nbytes
            self._peak_bytes = max(self._peak_bytes, used)
        if self._recorder is not None:
            self._recorder.turn += 1

    def _conversation(self, state: Mapping[str, Any]) -> Conversation:
        return Conversation.from_state(self.tokenizer, state, profile=self.cache.profile)

    def _notes(self) -> list[str]:
        notes = [*self.conversation.notes]
        if self._memory is not None:
            notes += self._memory.notes
        coded, bits = self.cache.coded_tokens, self.cache.bits_an_element
        if coded and bits is not None:
            notes.append(
                f"{coded} of the {self.cache.kept()} tokens kept are attended to at "
                f"{self.cache.bits} bits, {bits:.2f} a number with its scales."
            )
        trained = self.cache.layout.trained_positions
        if trained is not None and self.cache.seen > trained:
            notes.append(
                f"{self.cache.seen} tokens were seen, but the model was trained for positions up "
                f"to {trained}; what it says beyond them is not reliable."
            )
        return notes


@dataclass(frozen=True)
class _Part:
    """Some of the new tokens, by their offsets.

    Args:
        start: of the first.
        stop: one past the last.
        ahead: how many more, that only open an answer, they are looked at with; None for what an
            assistant wrote.
    """

    start: int
    stop: int
    ahead: int | None


class _Written(StoppingCriteria):
    """Stops nothing: notes the ids of an answer while it is written, before they are run."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return for each row whether to stop."""
        # What was only guessed, and then taken back, is not in the cache any more.
        seen = self._session.cache.seen
        self._session._ids[seen:] = input_ids[0, seen:].tolist()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _Undo:
    """What a session was before an operation."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._checkpoint: Checkpoint | None = None
        self._ids = len(session._ids)
        self._mark = session._recorder.mark() if session._recorder is not None else None
        self._outside = session._memory.mark() if session._memory is not None else None
        self._fields = {
            "conversation": session.conversation,
            "_seen_by_region": session._seen_by_region,
            "_next_span": session._next_span,
            "_spans_of": session._spans_of,
            "_last_logits": session._last_logits,
        }
        session.conversation = session.conversation.copy()
        session._seen_by_region = dict(session._seen_by_region)
        session._spans_of = dict(session._spans_of)

    def watch(self, new: int, *, again: bool = False) -> None:
        """Say that the cache will change now; the arguments are those of `Checkpoint`."""
        self._checkpoint = Checkpoint(self._session.cache, new, again=again)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are held to undo."""
        return self._checkpoint.nbytes if self._checkpoint is not None else 0

    def restore(self) -> None:
        """Make the session what it was."""
        session = self._session
        if self._checkpoint is not None:
            self._checkpoint.restore()
        if session._memory is not None:
            session._memory.back_to(self._outside)
        session.__dict__.update(self._fields)
        del session._ids[self._ids :]
        if session._recorder is not None and self._mark is not None:
            session._recorder.back_to(self._mark)
