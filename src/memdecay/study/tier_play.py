"""One episode in sessions that hold their budget from the first token, then its questions.

Nothing is evicted at once here, as in the rest of the study: a session reads the episode stage by
stage within the budget, as an agent's would, and every question is asked of a copy of it. What the
assistant wrote is read as decode steps.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memdecay.engine import MemDecayCache, Session
from memdecay.errors import BudgetError
from memdecay.regions import Profile
from memdecay.study import answers
from memdecay.study.episode_rows import asked
from memdecay.study.keeping import budget_tokens, digest, unpinned
from memdecay.study.recording import Probe, Recording, question_mass, record
from memdecay.study.scenario import Episode, find_gold
from memdecay.study.settings import Setting
from memdecay.tiers import Tiers
from memdecay.tiers.memory import TieredMemory

CHUNK = 32
"""Assistant tokens that one forward reads, as in the study of traces."""
SEEDS = (0, 1, 2)
"""Of pages that are brought back at random."""
HEADS, RANDOM, ORACLE = "heads", "random", "oracle"

_ALL_CODED = {"quantized": None, "bits": 4}
"""Everything that is not at full precision stays in the cache, at 4 bits."""
_Order = Callable[[Tensor, Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class TierCondition:
    """One way to read an episode and to be asked about it.

    Args:
        name: the policy in rows.
        share: of the context's tokens that may be kept at full precision; 1 for all.
        policy: of the session.
        tiers: arguments of `Tiers`; None for a session without.
        choice: by what pages come back at the question: "heads" as in a session, "random", or
            "oracle" by what the question and its right answer attend to on the full cache. While
            the episode is read it is the heads for all of them.
        seed: of a random choice.
        pins: whether regions that the profile pins stay as they are.
        quantized: how many more of the context's tokens may be kept at fewer bits, as a share;
            None for what `tiers` says.
    """

    name: str
    share: float
    policy: str = "memdecay"
    tiers: Mapping[str, Any] | None = None
    choice: str = HEADS
    seed: int = 0
    pins: bool = True
    quantized: float | None = None

    def to_json(self) -> str:
        """Return all that decides, as JSON; what was added to it later only where it is used."""
        about = {**dataclasses.asdict(self), "score_chunk": CHUNK}
        del about["name"], about["share"]
        if self.pins:
            del about["pins"]
        if self.quantized is None:
            del about["quantized"]
        return json.dumps(about, sort_keys=True)

    def settings(self, seq_len: int) -> Tiers | None:
        """Return the tiers of a session that reads so many tokens, None for one without."""
        if self.tiers is None:
            return None
        if self.quantized is None:
            return Tiers(**self.tiers)
        return Tiers(**self.tiers, quantized=budget_tokens(self.quantized, seq_len))

    @property
    def reading(self) -> str:
        """What is equal for conditions that read an episode in one session."""
        decides = [self.policy, self.tiers, self.share, self.pins, self.quantized]
        return json.dumps(decides, sort_keys=True)


def tier_conditions(tier: str) -> tuple[TierCondition, ...]:
    """Return what is compared on a tier: the full cache, dropping, tiers, and their bounds.

    `memdecay-tiers` has two tiers, full precision and memory; the graded ones have 4 bits between
    them, and the last two have 4 bits for all that is not at full precision.
    """
    shares = (0.25, 0.125) if tier == "long" else (0.25,)
    chosen = [TierCondition("full", 1.0, policy="full")]
    for share in shares:
        chosen += [
            TierCondition("memdecay", share),
            TierCondition("memdecay-tiers", share, tiers={}),
            TierCondition("memdecay-tiers-oracle", share, tiers={}, choice=ORACLE),
        ]
        chosen += [
            TierCondition("memdecay-tiers-random", share, tiers={}, choice=RANDOM, seed=seed)
            for seed in SEEDS
        ]
    bits = {"bits": 4}
    chosen += [
        TierCondition("memdecay-tiers-graded", 0.25, tiers=bits, quantized=0.25),
        # Together a quarter of the bytes of the full cache or less. A group of which tokens have
        # left keeps its scales, so that a number at 4 bits took about 5.7 on the long tier, and 7
        # on the short one, which has few groups.
        TierCondition(
            "memdecay-tiers-graded-bytes",
            0.19,
            tiers=bits,
            quantized=0.13 if tier == "short" else 0.16,
        ),
    ]
    # An eighth of a short episode cannot hold its pins, so they may go to 4 bits there.
    pins = tier != "short"
    chosen += [
        TierCondition("memdecay-tiers-int4", 0.125, tiers={**_ALL_CODED, "host": 0}, pins=pins),
        TierCondition("memdecay-tiers-int4-recall", 0.125, tiers=_ALL_CODED, pins=pins),
    ]
    return tuple(chosen)


@dataclass(frozen=True)
class TierTask:
    """An episode that a worker is to read and to ask about.

    Args:
        setting: what is run.
        episode: on what.
        conditions: what to compare.
        profile: region policies and heads, as `Profile.to_dict`.
        provenance: what each row says of its making.
        kind: for progress.
    """

    setting: Setting
    episode: Episode
    conditions: tuple[TierCondition, ...]
    profile: Mapping[str, Any]
    provenance: Mapping[str, str] = field(default_factory=dict)
    kind: str = "tiers"


def do_tiers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TierTask,
    advance: Callable[[float], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Do a task; `advance` is told which share of it was done since the last time.

    Returns:
        One row a condition and probe; and, in words, what was left out because pins do not fit.
    """
    recording = record(model, tokenizer, task.episode, burst=task.setting.burst)
    profile = Profile.from_dict(task.profile)
    masses: dict[str, Tensor] = {}
    if any(one.choice == ORACLE for one in task.conditions):
        masses = {
            probe.fact.region: question_mass(model, recording, probe) for probe in recording.probes
        }
    alike: dict[str, list[TierCondition]] = {}
    for condition in task.conditions:
        alike.setdefault(condition.reading, []).append(condition)
    # Reading an episode takes about as long as asking its questions.
    steps = (len(alike) + len(task.conditions)) * len(recording.probes)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for conditions in alike.values():
        first, some = conditions[0], []
        try:
            with read(model, tokenizer, recording, first, profile, task.setting.burst) as session:
                advance(len(recording.probes) / steps)
                for condition in conditions:
                    for probe in recording.probes:
                        order = _order(condition, recording, probe, masses)
                        found = ask(session, recording, probe, condition, order)
                        about = _about(task, recording, probe, condition)
                        some.append({**about, **found, **task.provenance})
                        advance(1 / steps)
        except BudgetError as error:  # pins are more than the budget
            names = ", ".join(dict.fromkeys(one.name for one in conditions))
            notes.append(f"{task.episode.name} has no {names} at {first.share:.1%}: {error}")
            continue
        rows += some
    return rows, notes


def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recording: Recording,
    condition: TierCondition,
    profile: Profile,
    burst: int,
) -> Session:
    """Return a session that has read an episode within its budget, one append a stage.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        recording: the episode.
        condition: how it is read.
        profile: region policies and heads.
        burst: tokens at the end of the recording that the model wrote itself.

    Raises:
        BudgetError: the budget cannot hold the pins.
    """
    budget = None
    if condition.share < 1:
        budget = budget_tokens(condition.share, recording.seq_len)
    session = Session(
        model,
        tokenizer,
        budget=budget,
        policy=condition.policy,
        profile=profile if condition.pins else unpinned(profile),
        tiers=condition.settings(recording.seq_len),
    )
    try:
        for stage in recording.episode.stages:
            session.append(list(stage), score=True, score_chunk=CHUNK)
        # The last thought is one message here, with what the model wrote of it.
        written = tokenizer.decode(recording.tape.ids[-burst:], skip_special_tokens=True)
        thought = {"role": "assistant", "content": f"{recording.episode.closing}{written}"}
        session.append([thought], score=True, score_chunk=CHUNK)
    except BaseException:
        session.close()
        raise
    return session


def ask(
    session: Session,
    recording: Recording,
    probe: Probe,
    condition: TierCondition,
    order: _Order | None,
) -> dict[str, Any]:
    """Return what a copy of a session answers, and what it keeps of the context meanwhile.

    The question and its answer come on top of the budget, so that the context has all of that.
    """
    question = [{"role": "user", "content": probe.fact.question}]
    after = session.conversation.copy()
    new = len(after.append(question)) + len(after.generation_prompt())
    new += max(answers.MAX_NEW_TOKENS, len(probe.gold))
    most = budget_tokens(condition.share, recording.seq_len)
    full = every = new
    while True:
        fork = session.fork()
        try:
            _widen(fork.cache, full, every)
            _choose_by(fork, order)
            fork.append(question)
            kept = _kept(fork.cache, recording.seq_len)
            over = len(kept) - most
            if over > 0:  # what came back took room that was meant for the answer
                full, every = full - over, every - over
                continue
            if condition.quantized is not None:
                coded = budget_tokens(condition.quantized, recording.seq_len)
                over += _coded(fork.cache, recording.seq_len) - coded
                if over > 0:  # likewise, at fewer bits
                    every -= over
                    continue
            logprob = _gold_logprob(fork, probe.gold)
            told = _told(fork, kept, recording.seq_len)
            text = fork.generate(max_new_tokens=answers.MAX_NEW_TOKENS).text
        finally:
            fork.close()
        return {
            **told,
            "kept_tokens": len(kept),
            "recall": find_gold(text, probe.fact.value) is not None,
            "answer": text,
            "gold_logprob": logprob,
            "keep_digest": digest(kept),
        }


def _widen(cache: MemDecayCache, full: int, every: int) -> None:
    """Let a cache hold more tokens: at full precision, and of every precision together."""
    if cache.full_precision is not None:
        cache.full_precision += full
    if cache.budget is not None:
        cache.budget += every


def _kept(cache: MemDecayCache, seq_len: int) -> Tensor:
    """Return (n,) int64, ascending: the tokens of the context that are kept at full precision."""
    position = cache.ledgers[0]["position"][cache.coded_tokens :]
    return position[position < seq_len].sort().values.cpu()


def _coded(cache: MemDecayCache, seq_len: int) -> int:
    """Return how many tokens of the context are kept at fewer bits."""
    return int((cache.ledgers[0]["position"][: cache.coded_tokens] < seq_len).sum())


def _told(fork: Session, kept: Tensor, seq_len: int) -> dict[str, Any]:
    """Return what the context takes, in tokens and bytes."""
    cache, tiers = fork.cache, fork.report().tiers
    coded = _coded(cache, seq_len)
    elements = sum(pool.kv.shape[2] * pool.kv.shape[4] for pool in cache.pools) * 2
    bits = 8.0 * len(kept) * cache.pools[0].kv.element_size()
    bits += coded * (cache.bits_an_element or 0)
    below = {} if tiers is None else {name: tiers.bytes[name] for name in ("host", "disk")}
    return {
        "resident_bytes": round(elements * bits / 8),
        "coded_tokens": coded,
        "outside_bytes": sum(below.values()),
        "summary_bytes": 0 if tiers is None else tiers.bytes["summaries"],
        "outside_tokens": 0 if tiers is None else tiers.tokens["host"] + tiers.tokens["disk"],
        "came_back": 0 if tiers is None else tiers.came_back,
    }


@torch.no_grad()
def _gold_logprob(fork: Session, gold: Sequence[int]) -> float:
    """Return the log-probability of the right answer right after the question, in nats."""
    opening = fork.conversation.copy().generation_prompt().ids
    cache, ids = fork.cache.copy(), [*opening, *gold]
    place = torch.arange(cache.seen, cache.seen + len(ids), device=fork.model.device)
    cache.prefilling = True
    out = fork.model(
        input_ids=torch.tensor([ids], device=fork.model.device),
        position_ids=place[None],
        cache=cache,
        use_cache=True,
        logits_to_keep=len(gold) + 1,
    )
    logits = out.logits[0, :-1].float()
    target = torch.tensor(list(gold), device=logits.device)
    return -float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))


def _choose_by(fork: Session, order: _Order | None) -> None:
    memory = fork._memory
    if isinstance(memory, TieredMemory):
        memory.outside.order = order


def _order(
    condition: TierCondition, recording: Recording, probe: Probe, masses: Mapping[str, Tensor]
) -> _Order | None:
    """Return how pages are ordered at a question, None for by the heads."""
    if condition.choice == HEADS:
        return None
    size = Tiers(**(condition.tiers or {})).page_size
    if condition.choice == ORACLE:
        mass = masses[probe.fact.region].double()
        worth = [float(part.sum()) for part in mass.split(size)]
    else:
        # A page has its place for good, however often one asks.
        own = f"{condition.seed} {recording.episode.name} {probe.fact.region}"
        draw = random.Random(own)
        worth = [draw.random() for _ in range(0, recording.seq_len, size)]

    def order(queries: Tensor, pages: Sequence[int]) -> list[int]:
        known = {page: worth[page] if page < len(worth) else -1.0 for page in pages}
        return sorted(known, key=lambda page: (-known[page], page))

    return order


def _about(
    task: TierTask, recording: Recording, probe: Probe, condition: TierCondition
) -> dict[str, Any]:
    return {
        **asked(task.setting, task.episode, probe),
        "group": "tiers",
        "policy": condition.name,
        "condition": condition.to_json(),
        "seed": condition.seed,
        "budget": condition.share,
        "budget_tokens": budget_tokens(condition.share, recording.seq_len),
        "seq_len": recording.seq_len,
        "gold": probe.fact.value,
        "gold_tokens": len(probe.gold),
        "engine": "memdecay",
    }
