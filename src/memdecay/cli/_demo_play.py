"""The demo's work: the episode under each policy, the answers, and the page about them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memdecay.cli import _look, _options, _terminal
from memdecay.cli._budget import Budget
from memdecay.cli._episode import Answer, Episode, load_episode
from memdecay.cli._page import (
    Page,
    PolicyView,
    TurnMark,
    build_page,
    footer,
    page_sizes,
    token_texts,
)
from memdecay.cli._replay import count_tokens, split_turns
from memdecay.cli._timeline import Timeline
from memdecay.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from rich.progress import Progress

    from memdecay.engine import Session
    from memdecay.policy.base import Policy
    from memdecay.tiers import Tiers

POLICIES = ("full", "memdecay-heads", DEFAULT_POLICY, "streaming")
"""What the demo compares."""
TIERED = ("full", f"{DEFAULT_POLICY}{_options.WITH_TIERS}", DEFAULT_POLICY)
"""What it compares with tiers."""

_ANSWER_TOKENS = 24
_CLOCK = "steps"


def play_demo(
    asked: Budget, name: str, chosen: dict[str, Policy], tiers: _options.AskedTiers | None = None
) -> tuple[dict[str, Any], str]:
    """Play the episode under every policy; return what `--json` prints, and the page.

    Args:
        asked: the budget of those that are bounded.
        name: of the model.
        chosen: name -> policy; one whose name says so has tiers.
        tiers: of that one, None if none has.

    Raises:
        MemDecayError: the model cannot be loaded, or the budget cannot hold the pins.
    """
    import torch

    from memdecay.engine import load_model

    torch.manual_seed(_terminal.SEED)
    episode = load_episode()
    started = time.perf_counter()
    with _terminal.progress() as progress:
        loading = progress.add_task(f"loading {name}", total=None)
        model, tokenizer = load_model(name)
        progress.remove_task(loading)
        ids = _read(tokenizer, episode)
        budget = asked.resolve(len(ids))
        settings = tiers.resolve(len(ids)) if tiers else None
        told = tiers.told(len(ids)) if tiers else {}
        played: list[_Played] = []
        seconds: dict[str, float] = {}
        with contextlib.ExitStack() as sessions:
            for name_of, policy in chosen.items():
                made = _session(model, tokenizer, name_of, policy, budget, episode, settings)
                with made as session:
                    session.check(episode.messages)
            for name_of, policy in chosen.items():
                began = time.perf_counter()
                session = _session(model, tokenizer, name_of, policy, budget, episode, settings)
                sessions.enter_context(session)
                played.append(_episode(session, name_of, policy, episode, len(ids), progress))
                seconds[name_of] = round(time.perf_counter() - began, 2)
            answers = [answer for one in played for answer in one.answers]
            asked_last = None
            if any(one.tiered for one in played):
                asked_last, ids = _ask_last(tokenizer, played, episode, ids)
            main = next((one.name for one in played if one.tiered), DEFAULT_POLICY)
            views = [_view(one, tiers, main=one.name == main) for one in played]
        marks = played[0].marks
    result = {
        "model": name,
        "episode": episode.id,
        "budget": asked.text,
        "clock": _CLOCK,
        "budget_tokens": budget,
        **told,
        "seen_tokens": views[0].report["seen_tokens"],
        "peak_resident_tokens": {v.policy: v.report["peak_resident_tokens"] for v in views},
        "peak_kv_bytes": {v.policy: v.report["peak_kv_bytes"] for v in views},
        "kept_by_region": {v.policy: dict(v.report["kept_by_region"]) for v in views},
        "seen_by_region": {v.policy: dict(v.report["seen_by_region"]) for v in views},
        "tiers": {v.policy: v.report.get("tiers") for v in views},
        "answers": [answer.to_dict() for answer in answers],
        "asked": asked_last,
        "seconds": {**seconds, "total": round(time.perf_counter() - started, 2)},
        **_terminal.provenance(),
    }
    return result, _page(result, views, marks, ids, tokenizer, tiers)


@dataclass
class _Played:
    """One session that has read the episode and answered the probes; `marks` may grow."""

    name: str
    policy: Policy
    session: Session
    marks: list[TurnMark]
    answers: list[Answer]

    @property
    def tiered(self) -> bool:
        """Whether it has tiers."""
        return self.name.endswith(_options.WITH_TIERS)


def _session(
    model: Any,
    tokenizer: Any,
    name: str,
    policy: Policy,
    budget: int,
    episode: Episode,
    tiers: Tiers | None,
) -> Session:
    from memdecay.engine import Session

    return Session(
        model,
        tokenizer,
        budget=budget if policy.bounded else None,
        policy=policy,
        clock=_CLOCK,
        retrievers=episode.retrievers,
        record_timeline=True,
        tiers=tiers if name.endswith(_options.WITH_TIERS) else None,
    )


def _episode(
    session: Session,
    name: str,
    policy: Policy,
    episode: Episode,
    total: int,
    progress: Progress,
) -> _Played:
    """Play the episode under one policy and ask every probe on a copy."""
    reading = progress.add_task(f"{name}: reading the episode", total=total)
    marks: list[TurnMark] = []
    for turn in split_turns(episode.messages):
        session.idle()  # as while a tool works, or the user types
        start = session.report().seen_tokens
        with count_tokens(session.model, lambda count: progress.advance(reading, count)):
            session.append(turn.messages, score=True)  # so that the steps are decode steps
        marks.append(TurnMark(turn.index, turn.label, start, session.report().seen_tokens))
    session.idle()
    progress.remove_task(reading)
    asking = progress.add_task(f"{name}: asking", total=len(episode.probes))
    answers = []
    for probe in episode.probes:
        text = session.ask(probe.question, max_new_tokens=_ANSWER_TOKENS).strip()
        answers.append(Answer(name, probe, text))
        progress.advance(asking)
    progress.remove_task(asking)
    return _Played(name, policy, session, marks, answers)


def _ask_last(
    tokenizer: Any, played: list[_Played], episode: Episode, ids: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """Ask every session itself for a fact, so that its timeline shows what comes back.

    It is one that was forgotten without tiers and known with them, if there is one; of several one
    that is not in the cache.

    Returns:
        The question, how many pages came back for it, whether the fact was among them, and where
        in the cache it was before and after: at "full" precision, "quantized", or None; and the
        ids with those of the question.
    """
    tiered = next(one for one in played if one.tiered)
    plain = next(one for one in played if one.policy is tiered.policy and one is not tiered)

    places = [_place(tiered.session, tokenizer, ids, probe.gold) for probe in episode.probes]

    def told(number: int) -> tuple[bool, bool, bool]:
        forgotten, known = not plain.answers[number].correct, tiered.answers[number].correct
        return forgotten and known, forgotten, places[number] is None

    chosen = max(range(len(episode.probes)), key=told)
    probe, place = episode.probes[chosen], places[chosen]
    message = {"role": "user", "content": probe.question}
    back = _came_back(tiered.session)
    for one in played:
        start = one.session.report().seen_tokens
        one.session.append([message])
        end = one.session.report().seen_tokens
        one.marks.append(TurnMark(len(one.marks), f"asked: {probe.short}", start, end))
    after = _place(tiered.session, tokenizer, ids, probe.gold)
    asked = {
        "question": probe.question,
        "gold": probe.gold,
        "came_back": _came_back(tiered.session) - back,
        "fact": place is None and after is not None,
        "in_cache": place,
        "in_cache_after": after,
    }
    return asked, _read(tokenizer, episode, message)


def _came_back(session: Session) -> int:
    tiers = session.report().tiers
    return 0 if tiers is None else tiers.came_back


def _place(session: Session, tokenizer: Any, ids: list[int], gold: str) -> str | None:
    """Return whether a text stands in what the cache keeps of these ids, and how.

    That is "full" where all of it is at full precision, "quantized" where some is at fewer bits,
    None where it is not there as a whole.
    """
    positions, coded = session.cache.ledgers[0]["position"].tolist(), session.cache.coded_tokens

    def holds(kept: set[int]) -> bool:
        runs = itertools.groupby(enumerate(ids), lambda at: at[0] in kept)
        texts = [tokenizer.decode([one for _, one in run]) for there, run in runs if there]
        return any(gold.casefold() in text.casefold() for text in texts)

    if holds(set(positions[coded:])):
        return "full"
    return "quantized" if coded and holds(set(positions)) else None


def _view(one: _Played, tiers: _options.AskedTiers | None, *, main: bool) -> PolicyView:
    return PolicyView(
        policy=one.name,
        summary=_options.summary_of(one.name, one.policy, tiers),
        bounded=one.policy.bounded,
        main=main,
        report=one.session.report().to_dict(),
        timeline=Timeline.parse(one.session.timeline()),
        answers=one.answers,
        bits=tiers.bits if tiers else None,
    )


def _read(tokenizer: Any, episode: Episode, *more: Mapping[str, Any]) -> list[int]:
    """Return the ids of the whole episode, which say how long it is and what each page holds."""
    from memdecay.prompt import Conversation

    conversation = Conversation(tokenizer, retrievers=episode.retrievers)
    ids: list[int] = []
    for turn in split_turns(episode.messages):
        ids += conversation.append(turn.messages).ids
    return ids + (conversation.append(more).ids if more else [])


def _page(
    result: dict[str, Any],
    views: list[PolicyView],
    marks: list[TurnMark],
    ids: list[int],
    tokenizer: Any,
    tiers: _options.AskedTiers | None,
) -> str:
    seen, budget = result["seen_tokens"], result["budget_tokens"]
    share = f"{100 * budget / seen:.0f}%"
    flags = tiers.flags() if tiers else ""
    exactly = " at full precision" if tiers and tiers.graded else ""
    return build_page(
        Page(
            title="memdecay demo",
            headline=f"One agent episode, {share} of the cache{exactly}",
            standfirst=_standfirst(result),
            facts=_facts(result, views),
            turns=marks,
            views=views,
            texts=token_texts(tokenizer, ids),
            clock=result["clock"],
            footer=footer(result, f"memdecay demo --budget {result['budget']}{flags}"),
        )
    )


def _standfirst(result: dict[str, Any]) -> str:
    """Say what happened, good or bad."""
    names = list(result["peak_resident_tokens"])
    right = {
        policy: sum(a["correct"] for a in result["answers"] if a["policy"] == policy)
        for policy in names
    }
    count = len(result["answers"]) // len(names)
    room = f"room for {result['budget_tokens']:,} of its {result['seen_tokens']:,} tokens"
    if result["asked"] is not None:
        return _tiered_standfirst(result, right, count, room)
    system = {a["policy"]: a["correct"] for a in result["answers"] if a["region"] == "system"}
    knowing = [policy for policy in POLICIES if system[policy]]
    knows = _listed(knowing) or "No policy"
    forgot = _listed([policy for policy in POLICIES if not system[policy]])
    return (
        f"{result['model']} reads the same conversation four times: with its full KV cache, and "
        f"three times with {room}. {DEFAULT_POLICY} pins the instructions and keeps the tokens "
        f"that attention "
        f"singled out; memdecay-heads does so in each attention head by itself, and repeats to "
        f"itself what it keeps while it waits; streaming keeps the latest. Asked afterwards about "
        f"{count} facts, the full cache answers {right['full']}, memdecay-heads "
        f"{right['memdecay-heads']}, {DEFAULT_POLICY} {right[DEFAULT_POLICY]} and streaming "
        f"{right['streaming']}. "
        f"{knows} still {'know' if len(knowing) > 1 else 'knows'} the fact in the system text"
        + (f"; {forgot} forgot it." if forgot else ".")
    )


def _tiered_standfirst(result: dict[str, Any], right: dict[str, int], count: int, room: str) -> str:
    full, tiered, plain = TIERED
    asked, bits, more = result["asked"], result["bits"], result["quantized_tokens"]
    if more is None:
        keeps = f"keeps it in the cache at {bits} bits"
    else:
        first = f"about {more:,} of it in the cache at {bits} bits, the rest" if bits else "it"
        keeps = (
            f"keeps {first} in memory, and brings back what a message asks for before it is read"
        )
    return (
        f"{result['model']} reads the same conversation three times: with its full KV cache, and "
        f"twice with {room}{' at full precision' if bits else ''}. {plain} drops what has no "
        f"place; {tiered} {keeps}: "
        f"{_places(result)}. Asked afterwards about {count} facts, "
        f"the full cache answers {right[full]}, {tiered} {right[tiered]} and {plain} "
        f"{right[plain]}. At the end each is asked: {asked['question']} {back_for(result)}"
    )


def _places(result: dict[str, Any]) -> str:
    """Say how many tokens are where with tiers at the end, in how many bytes."""
    full, tiered, _ = TIERED
    tokens, size = (result["tiers"][tiered][name] for name in ("tokens", "bytes"))
    named = {"resident": "at full precision", "quantized": f"at {result['bits']} bits"}
    copies = tokens["copies"]
    named["host"] = "in memory" + (f" with exact copies of {copies:,} of these" if copies else "")
    parts = [
        f"{tokens[name]:,} tokens {where} ({_look.megabytes(size[name])})"
        for name, where in named.items()
        if size[name] and (tokens[name] or copies)
    ]
    whole = _look.megabytes(result["peak_kv_bytes"][full])
    return f"{_listed(parts)} at the end, beside {whole} for the full cache"


def back_for(result: dict[str, Any]) -> str:
    """Say in one sentence what came back for the question at the end."""
    asked = result["asked"]
    back = f"{asked['came_back']:,} page{'' if asked['came_back'] == 1 else 's'} came back for it"
    if asked["in_cache"] is not None:
        bits = "full precision" if asked["in_cache"] == "full" else f"{result['bits']} bits"
        up = asked["in_cache"] != "full" and asked["in_cache_after"] == "full"
        exact = ", and it is at full precision again" if up else ""
        return f"With tiers the fact was in the cache, at {bits}; {back}{exact}."
    return f"With tiers {back}, {'the fact among them' if asked['fact'] else 'but not the fact'}."


def _listed(names: list[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _facts(result: dict[str, Any], views: list[PolicyView]) -> list[tuple[str, str]]:
    return [
        ("model", result["model"]),
        ("episode", result["episode"]),
        ("budget", f"{result['budget_tokens']:,} of {result['seen_tokens']:,} tokens"),
        ("page", page_sizes(views)),
        ("clock", result["clock"]),
        ("run time", f"{result['seconds']['total']:.0f} s"),
    ]
