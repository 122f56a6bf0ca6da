"""An agent's conversation with one model, its memory held under a fixed budget."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from memdecay.engine.report import AppendResult, Generated, Report, Scores
from memdecay.engine.timeline import TimelineRecorder
from memdecay.errors import BudgetError, SessionError
from memdecay.policy import Policy, policy_config
from memdecay.prompt import Conversation, Rendered
from memdecay.regions import Profile

_OURS = ("input_ids", "inputs_embeds", "attention_mask", "past_key_values", "cache", "use_cache")
_ROWS = ("num_beams", "num_return_sequences")


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
        page_size: tokens a page; only whole pages are evicted.
        align: "region" to open a fresh page at every region boundary.
        clock: "steps" (decode steps) or "tokens" (every token is a step).
        observe_every: k, observe attention every k decode steps; 0 for never.
        window: queries that an observation at the end of a prompt averages over.
        retrievers: names of the tools whose outputs are documents (region `retrieval`).
        tools: tool schemas for the chat template.
        prefill_chunk: tokens of a prompt to read at once; a quarter of the budget if that is less.
        record_timeline: record the life of every page, for `timeline`.

    Raises:
        MemDecayError: an argument is not usable; the sentence says which.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        budget: int | None,
        policy: Policy | str = "memdecay",
        profile: Profile | None = None,
        page_size: int = 16,
        align: str | None = None,
        clock: str = "steps",
        observe_every: int = 1,
        window: int = 16,
        retrievers: Collection[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        prefill_chunk: int = 256,
        record_timeline: bool = False,
    ) -> None:
        if isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int):
            raise SessionError(f"prefill_chunk is {prefill_chunk!r}, but it must be an integer.")
        if prefill_chunk < 1:
            raise SessionError(f"prefill_chunk is {prefill_chunk}, but it must be at least 1.")
        self.model = model
        self.tokenizer = tokenizer
        self.cache = MemDecayCache(
            model,
            budget=budget,
            policy=policy,
            profile=profile,
            page_size=page_size,
            align=align,
            clock=clock,
            observe_every=observe_every,
            window=window,
        )
        self.conversation = Conversation(
            tokenizer, retrievers=retrievers, tools=tools, profile=self.cache.profile
        )
        self._empty = self.conversation.state_dict()
        self.prefill_chunk = prefill_chunk
        self._record_timeline = record_timeline
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._seen_by_region = dict.fromkeys(self.cache.profile.names, 0)
        self._next_span = 1
        self._spans_of: dict[int, list[int]] = {}
        self._pinned_regions: set[str] = set()
        self._peak_bytes = 0
        self._last_logits: Tensor | None = None
        self._recorder = TimelineRecorder(self.cache) if self._record_timeline else None

    # The conversation

    @torch.no_grad()
    def append(
        self, messages: Sequence[Mapping[str, Any]], *, pin: bool = False, score: bool = False
    ) -> AppendResult:
        """Read messages: label their tokens and run them through the model, within the budget.

        Args:
            messages: OpenAI chat messages; a `region` on one or on a content part is its label.
            pin: never evict them, until `release`.
            score: say how well the model foresees the assistant's tokens (teacher forcing).

        Raises:
            TraceError: a message is malformed, or the chat template refuses it.
            BudgetError: the pinned tokens do not fit the budget.
            In both cases nothing has changed.
        """
        before = self.conversation.state_dict()
        try:
            rendered = self.conversation.append(messages)
            scores = self._read(rendered, pin=pin, score=score)
        except BaseException:
            self._restore(before)
            raise
        if self._recorder is not None:
            self._recorder.turn += 1
        return AppendResult(len(rendered), rendered.spans, rendered.notes, scores)

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
            After an exception the conversation is as it was; what was evicted stays evicted.
        """
        self._check_options(max_new_tokens, options)
        return self._generate(max_new_tokens, stop, options, None, threading.Event())

    def stream(
        self, *, max_new_tokens: int = 256, stop: str | Sequence[str] | None = None, **options: Any
    ) -> Iterator[str]:
        """Let the model answer, piece by piece; the arguments and errors are those of `generate`.

        Closing the iterator early ends the answer there. The session must not be used until the
        iterator is exhausted or closed.
        """
        self._check_options(max_new_tokens, options)
        return self._stream(max_new_tokens, stop, options)

    def ask(self, text: str, *, max_new_tokens: int = 64) -> str:
        """Return the greedy answer to a question; the session is as if it had not been asked."""
        with self.fork() as copy:
            copy.append([{"role": "user", "content": text}])
            return copy.generate(max_new_tokens=max_new_tokens).text

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
            BudgetError: what is pinned would not fit the budget.
        """
        chosen = self._chosen(region, message)
        if self.cache.ledgers and self.cache.budget is not None:
            ledger = self.cache.ledgers[0]
            pinned = ledger["pinned"] | chosen
            pages = ledger["page"]
            held = int((torch.isin(pages, pages[pinned]) | ledger.held()).sum())
            self._check_fits(int((pinned | ledger.held()).sum()), held)
        if region is not None:
            self._pinned_regions.add(region)
        return self._set_pinned(chosen, True)

    def release(self, *, region: str | None = None, message: int | None = None) -> int:
        """Undo `pin`; the arguments, result and errors are alike. The profile's pins stay."""
        chosen = self._chosen(region, message)
        if region is not None:
            self._pinned_regions.discard(region)
        return self._set_pinned(chosen, False)

    # State

    def report(self) -> Report:
        """Return what the session holds and did."""
        cache = self.cache
        names = cache.profile.names
        kept = dict.fromkeys(names, 0)
        pinned = 0
        if cache.ledgers:
            counts = torch.bincount(cache.ledgers[0]["region"], minlength=len(names)).tolist()
            kept = dict(zip(names, counts, strict=True))
            pinned = int(cache.ledgers[0].held().sum())
        return Report(
            model=str(self.model.config.name_or_path or type(self.model).__name__),
            policy=policy_config(cache.policy),
            budget_tokens=cache.budget,
            seen_tokens=cache.seen,
            kept_tokens=cache.kept(),
            peak_resident_tokens=cache.peak_tokens,
            kept_by_region=kept,
            seen_by_region=dict(self._seen_by_region),
            pinned_tokens=pinned,
            evicted_tokens=cache.evicted_tokens,
            evicted_pages=cache.evicted_pages,
            kv_bytes=cache.nbytes,
            peak_kv_bytes=max(self._peak_bytes, cache.nbytes),
            page_size=cache.page_size,
            clock=cache.clock,
            steps=cache.steps,
            observations=cache.observations,
            notes=self._notes(),
        )

    def timeline(self) -> dict[str, Any]:
        """Return the life of every page, as plain JSON values.

        Raises:
            SessionError: the session was made without `record_timeline=True`.
        """
        if self._recorder is None:
            raise SessionError(
                "The timeline was not recorded; make the session with record_timeline=True."
            )
        return self._recorder.to_dict()

    def fork(self) -> Session:
        """Return an independent copy on the same model; it records no timeline."""
        other = Session.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.cache = self.cache.copy()
        other.conversation = self._conversation(self.conversation.state_dict())
        other._ids = [*self._ids]
        other._seen_by_region = dict(self._seen_by_region)
        other._spans_of = dict(self._spans_of)
        other._pinned_regions = set(self._pinned_regions)
        other._recorder, other._record_timeline = None, False
        return other

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the session to a folder, as JSON and safetensors; see `load`.

        Raises:
            SessionError: the folder cannot be written, or holds something else.
        """
        from memdecay.engine.saving import save_session

        save_session(self, folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Session:
        """Return the session that `save` wrote; it goes on exactly as the saved one would.

        Raises:
            SessionError: it is missing, damaged, or belongs to another model or tokenizer.
        """
        from memdecay.engine.saving import load_session

        return load_session(folder, model, tokenizer)

    def reset(self) -> None:
        """Forget the conversation and free the cache; the settings stay."""
        self.cache.reset()
        self.conversation = self._conversation(self._empty)
        self._clear()

    def close(self) -> None:
        """Free the cache. The model was never changed, so nothing else is left to undo."""
        self.reset()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading

    def _read(self, rendered: Rendered, *, pin: bool, score: bool) -> Scores | None:
        """Run labelled tokens; if this raises, the cache has forgotten those it had run."""
        if not rendered.ids:
            return None
        pinned = [pin or name in self._pinned_regions for name in rendered.regions]
        self._check_pins(rendered.regions, pinned)
        spans = [self._next_span + index for index in rendered.span_index]
        first = 0
        for end in range(1, len(pinned) + 1):
            if end == len(pinned) or pinned[end] != pinned[first]:
                self.cache.label(
                    rendered.regions[first:end], spans=spans[first:end], pinned=pinned[first]
                )
                first = end
        start = self.cache.seen
        targets = self._targets(rendered) if score else {}
        try:
            scores = self._run(rendered.ids, targets, start)
        except BaseException:
            self._rewind(start)
            raise
        for name in rendered.regions:
            self._seen_by_region[name] += 1
        for number, span in enumerate(rendered.spans):
            self._spans_of.setdefault(span.message, []).append(self._next_span + number)
        self._next_span += len(rendered.spans)
        self._peak_bytes = max(self._peak_bytes, self.cache.nbytes)
        return scores

    def _run(self, ids: Sequence[int], targets: Mapping[int, int], start: int) -> Scores | None:
        """Run tokens through the model by chunks, and score those in `targets`.

        Args:
            ids: the tokens.
            targets: offset in `ids` -> message, of the tokens to score.
            start: position of the first token.
        """
        device = self.model.device
        found: list[tuple[int, int, int, float, int]] = []
        if 0 in targets and self._last_logits is not None:
            found += self._score(self._last_logits[None], [0], ids, targets, start)
        offset = 0
        self.cache.prefilling = True
        try:
            while offset < len(ids):
                count = min(self._chunk(), len(ids) - offset)
                rows = [
                    row for row in range(count) if offset + row + 1 in targets or row == count - 1
                ]
                chunk = torch.tensor([ids[offset : offset + count]], device=device)
                positions = torch.arange(start + offset, start + offset + count, device=device)
                out = self.model(
                    input_ids=chunk,
                    position_ids=positions[None],
                    cache=self.cache,
                    use_cache=True,
                    logits_to_keep=torch.tensor(rows, device=device),
                )
                logits = out.logits[0].float()
                self._last_logits = logits[-1].clone()
                wanted = [number for number, row in enumerate(rows) if offset + row + 1 in targets]
                if wanted:
                    places = [offset + rows[number] + 1 for number in wanted]
                    found += self._score(logits[wanted], places, ids, targets, start)
                self._ids.extend(ids[offset : offset + count])
                offset += count
                if self._recorder is not None:
                    self._recorder.prefilled()
        finally:
            self.cache.prefilling = False
        if not found:
            return None
        position, message, target, nll, top1 = zip(*found, strict=True)
        return Scores(
            torch.tensor(position),
            torch.tensor(message),
            torch.tensor(target),
            torch.tensor(nll),
            torch.tensor(top1),
        )

    @staticmethod
    def _score(
        logits: Tensor,
        places: Sequence[int],
        ids: Sequence[int],
        targets: Mapping[int, int],
        start: int,
    ) -> list[tuple[int, int, int, float, int]]:
        wanted = torch.tensor([ids[place] for place in places], device=logits.device)
        nll = torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
        top1 = logits.argmax(-1).tolist()
        return [
            (start + place, targets[place], ids[place], nll[number], top1[number])
            for number, place in enumerate(places)
        ]

    def _chunk(self) -> int:
        """Return how many tokens of a prompt to read next."""
        cache = self.cache
        if cache.budget is None:
            return self.prefill_chunk
        chunk = max(1, min(self.prefill_chunk, cache.budget // 4))
        if cache.ledgers:
            ledger = cache.ledgers[0]
            stays = ledger.held()
            if ledger.open_page is not None:
                stays = stays | (ledger["page_index"] == ledger.open_page)
            chunk = max(1, min(chunk, cache.budget - int(stays.sum())))
        beyond = (cache.seen + chunk) % cache.page_size
        return chunk - beyond if chunk > beyond else chunk

    def _targets(self, rendered: Rendered) -> dict[int, int]:
        """Return offset -> message of the assistant's tokens: after the header, up to the end."""
        header = self._header()
        ends = self._end_ids()
        messages = self.conversation.messages
        targets: dict[int, int] = {}
        for index in sorted({span.message for span in rendered.spans}):
            if index >= len(messages) or messages[index]["role"] != "assistant":
                continue
            mine = [span for span in rendered.spans if span.message == index]
            first, last = mine[0].start, mine[-1].end
            if rendered.ids[first : first + len(header)] == header:
                first += len(header)
            marks = [place for place in range(first, last) if rendered.ids[place] in ends]
            if marks:
                last = marks[-1] + 1
            targets.update(dict.fromkeys(range(first, last), index))
        return targets

    def _header(self) -> list[int]:
        """Return the ids that open an assistant message, as the template writes them."""
        fork = self._conversation(self._empty)
        fork.append([{"role": "user", "content": "x"}])
        return fork.generation_prompt().ids

    def _end_ids(self) -> set[int]:
        """Return the ids that end a turn."""
        ends = {self.tokenizer.eos_token_id}
        configured = self.model.generation_config.eos_token_id
        ends |= set(configured) if isinstance(configured, list) else {configured}
        return {int(end) for end in ends if end is not None}

    # Writing

    def _check_options(self, max_new_tokens: int, options: Mapping[str, Any]) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise SessionError(f"max_new_tokens is {max_new_tokens!r}, but it must be an integer.")
        if max_new_tokens < 1:
            raise SessionError(f"max_new_tokens is {max_new_tokens}, but it must be at least 1.")
        for name in _OURS:
            if name in options:
                raise SessionError(
                    f"{name} is set by the session itself; to choose it, pass a MemDecayCache to "
                    f"model.generate."
                )
        for name in _ROWS:
            if options.get(name, 1) != 1:
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
        streamer: TextIteratorStreamer | None,
        cancel: threading.Event,
    ) -> Generated:
        before = self.conversation.state_dict()
        start, last = self.cache.seen, None
        try:
            prompt = self.conversation.generation_prompt()
            self._check_pins(prompt.regions, [False] * len(prompt.ids))
            span = self._next_span
            if prompt.ids:
                self.cache.label(prompt.regions, spans=[span] * len(prompt.ids))
                self._run(prompt.ids[:-1], {}, start)
            last = prompt.ids[-1] if prompt.ids else self._take_back()
            ids = [*self._ids, last]
            extra = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
            ends = sorted(self._end_ids())
            inputs = torch.tensor([ids], device=self.model.device)
            out = self.model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                cache=self.cache,
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_Cancelled(cancel)]),
                **{
                    "do_sample": False,
                    "eos_token_id": ends,
                    "pad_token_id": ends[0],
                    **extra,
                    **options,
                },
            )
            sequence = out.tolist()[0]
            written = sequence[len(ids) :]
            self._ids = sequence[: self.cache.seen]
            self._finish(sequence[self.cache.seen :])
            recorded = self.conversation.record_generated(written)
        except BaseException:
            self._rewind(start)
            if self.cache.seen < start and last is not None:
                self._run([last], {}, start - 1)
            self._restore(before)
            raise
        regions = [*[recorded.rendered.regions[0]] * len(prompt.ids), *recorded.rendered.regions]
        self._relabel(start, regions)
        self._spans_of.setdefault(len(self.conversation.messages) - 1, []).append(span)
        self._next_span += 1
        self._peak_bytes = max(self._peak_bytes, self.cache.nbytes)
        if self._recorder is not None:
            self._recorder.turn += 1
        text = str(self.tokenizer.decode(written, skip_special_tokens=True))
        ended = written[-1] in ends or len(written) < max_new_tokens
        reason = "cancelled" if cancel.is_set() else "stop" if ended else "length"
        return Generated(text, written, recorded.message, reason)

    def _take_back(self) -> int:
        """Forget the last token and return it, to be run again: its logits start the answer.

        Only for templates that write nothing between a message and its answer.
        """
        ledger = self.cache.ledgers[0]
        newest = int(ledger["position"].argmax())
        region, span = int(ledger["region"][newest]), int(ledger["span"][newest])
        pinned = bool(ledger["pinned"][newest])
        self.cache.crop(-1)
        self.cache.label([self.cache.profile.name(region)], spans=[span], pinned=pinned)
        return self._ids.pop()

    def _finish(self, ids: Sequence[int]) -> None:
        """Run the last tokens that the model wrote but has not read."""
        for token in ids:
            self.model(
                input_ids=torch.tensor([[token]], device=self.model.device),
                position_ids=torch.tensor([[self.cache.seen]], device=self.model.device),
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._ids.append(token)
        self._last_logits = None

    def _stream(
        self, max_new_tokens: int, stop: str | Sequence[str] | None, options: Mapping[str, Any]
    ) -> Iterator[str]:
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        cancel = threading.Event()
        failures: queue.Queue[BaseException] = queue.Queue()

        def work() -> None:
            try:
                self._generate(max_new_tokens, stop, options, pieces, cancel)
            except BaseException as error:
                failures.put(error)
                pieces.end()

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            for piece in pieces:
                if piece:
                    yield piece
        finally:
            cancel.set()
            worker.join()
        if not failures.empty():
            raise failures.get()

    def _relabel(self, start: int, regions: Sequence[str]) -> None:
        """Give tokens from `start` on their regions, now that it is known what they are."""
        profile = self.cache.profile
        for name in regions:
            self._seen_by_region[name] += 1
        ledger = self.cache.ledgers[0]
        ids = torch.tensor([profile.id(name) for name in regions], device=ledger.device)
        offset = ledger["position"] - start
        mine = (offset >= 0) & (offset < len(ids))
        ledger["region"][mine] = ids[offset[mine]]
        pinned = torch.tensor([name in self._pinned_regions for name in regions]).to(ledger.device)
        ledger["pinned"][mine] |= pinned[offset[mine]]

    # Pins

    def _check_pins(self, regions: Sequence[str], pinned: Sequence[bool]) -> None:
        """Refuse tokens with whose pins the budget could not be held, before anything runs."""
        if self.cache.budget is None or not regions:
            return
        ledger = self.cache.ledgers[0] if self.cache.ledgers else self.cache.new_ledger()
        ids = torch.tensor([self.cache.profile.id(name) for name in regions])
        self._check_fits(*ledger.held_with(ids, torch.tensor(pinned)))

    def _check_fits(self, pinned: int, held: int) -> None:
        budget = self.cache.budget
        need = held + self.cache.page_size
        if budget is not None and pinned and need > budget:
            raise BudgetError(
                f"budget is {budget} tokens, but {pinned} tokens are pinned ({held} with the pages "
                f"they share), which needs a budget of at least {need}."
            )

    def _chosen(self, region: str | None, message: int | None) -> Tensor:
        if (region is None) == (message is None):
            raise SessionError(
                f"region is {region!r} and message is {message!r}, but exactly one must be given."
            )
        if region is not None:
            number = self.cache.profile.id(region)
            if not self.cache.ledgers:
                return torch.zeros(0, dtype=torch.bool)
            return self.cache.ledgers[0]["region"] == number
        if message not in self._spans_of:
            count = len(self.conversation.messages)
            raise SessionError(
                f"message is {message!r}, but it must be the index of one of the {count} messages."
            )
        ledger = self.cache.ledgers[0]
        spans = torch.tensor(self._spans_of[message], device=ledger.device)
        return torch.isin(ledger["span"], spans)

    def _set_pinned(self, chosen: Tensor, pinned: bool) -> int:
        if not self.cache.ledgers:
            return 0
        return self.cache.pin(lambda ledger: chosen, pinned)

    # Undoing

    def _conversation(self, state: Mapping[str, Any]) -> Conversation:
        return Conversation.from_state(self.tokenizer, state, profile=self.cache.profile)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.conversation = self._conversation(state)

    def _rewind(self, start: int) -> None:
        """Forget the tokens seen from `start` on; what was evicted for them stays evicted."""
        steps = self.cache.steps
        self.cache.forget_labels()
        self.cache.crop(min(0, start - self.cache.seen))
        self.cache.steps = steps
        del self._ids[start:]
        self._last_logits = None

    def _notes(self) -> list[str]:
        notes = [*self.conversation.notes]
        trained = self.cache.layout.trained_positions
        if trained is not None and self.cache.seen > trained:
            notes.append(
                f"{self.cache.seen} tokens were seen, but the model was trained for positions up "
                f"to {trained}; what it says beyond them is not reliable."
            )
        return notes


class _Cancelled(StoppingCriteria):
    """Stops when the reader of a stream has gone."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._event.is_set(), device=input_ids.device)
