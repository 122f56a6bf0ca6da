"""The demo's work: the episode under each policy, the answers, and the page about them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from memdecay.cli import _terminal
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

POLICIES = ("full", "memdecay-heads", DEFAULT_POLICY, "streaming")
"""What the demo compares."""

_ANSWER_TOKENS = 24
_CLOCK = "steps"


def play_demo(asked: Budget, name: str, chosen: dict[str, Policy]) -> tuple[dict[str, Any], str]:
    """Play the episode under every policy; return what `--json` prints, and the page.

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
        for policy in chosen.values():
            with _session(model, tokenizer, policy, budget, episode) as session:
                session.check(episode.messages)
        views: list[PolicyView] = []
        marks: list[TurnMark] = []
        seconds: dict[str, float] = {}
        for policy in chosen.values():
            began = time.perf_counter()
            view, marks = _episode(model, tokenizer, policy, budget, episode, len(ids), progress)
            views.append(view)
            seconds[policy.name] = round(time.perf_counter() - began, 2)
    result = {
        "model": name,
        "episode": episode.id,
        "budget": asked.text,
        "clock": _CLOCK,
        "budget_tokens": budget,
        "seen_tokens": len(ids),
        "peak_resident_tokens": {v.policy: v.report["peak_resident_tokens"] for v in views},
        "peak_kv_bytes": {v.policy: v.report["peak_kv_bytes"] for v in views},
        "kept_by_region": {v.policy: dict(v.report["kept_by_region"]) for v in views},
        "seen_by_region": {v.policy: dict(v.report["seen_by_region"]) for v in views},
        "answers": [answer.to_dict() for view in views for answer in view.answers],
        "seconds": {**seconds, "total": round(time.perf_counter() - started, 2)},
        **_terminal.provenance(),
    }
    return result, _page(result, views, marks, ids, tokenizer)


def _session(model: Any, tokenizer: Any, policy: Policy, budget: int, episode: Episode) -> Session:
    from memdecay.engine import Session

    return Session(
        model,
        tokenizer,
        budget=budget if policy.bounded else None,
        policy=policy,
        clock=_CLOCK,
        retrievers=episode.retrievers,
        record_timeline=True,
    )


def _episode(
    model: Any,
    tokenizer: Any,
    policy: Policy,
    budget: int,
    episode: Episode,
    total: int,
    progress: Progress,
) -> tuple[PolicyView, list[TurnMark]]:
    """Play the episode under one policy and ask every probe on a copy."""
    reading = progress.add_task(f"{policy.name}: reading the episode", total=total)
    marks: list[TurnMark] = []
    with _session(model, tokenizer, policy, budget, episode) as session:
        for turn in split_turns(episode.messages):
            session.idle()  # as while a tool works, or the user types
            start = session.report().seen_tokens
            with count_tokens(model, lambda count: progress.advance(reading, count)):
                session.append(turn.messages, score=True)  # so that the steps are decode steps
            end = session.report().seen_tokens
            marks.append(TurnMark(turn.index, turn.label, start, end))
        session.idle()
        progress.remove_task(reading)
        asking = progress.add_task(f"{policy.name}: asking", total=len(episode.probes))
        answers = []
        for probe in episode.probes:
            text = session.ask(probe.question, max_new_tokens=_ANSWER_TOKENS).strip()
            answers.append(Answer(policy.name, probe, text))
            progress.advance(asking)
        progress.remove_task(asking)
        view = PolicyView(
            policy=policy.name,
            summary=policy.summary,
            bounded=policy.bounded,
            main=policy.name == DEFAULT_POLICY,
            report=session.report().to_dict(),
            timeline=Timeline.parse(session.timeline()),
            answers=answers,
        )
    return view, marks


def _read(tokenizer: Any, episode: Episode) -> list[int]:
    """Return the ids of the whole episode, which say how long it is and what each page holds."""
    from memdecay.prompt import Conversation

    conversation = Conversation(tokenizer, retrievers=episode.retrievers)
    ids: list[int] = []
    for turn in split_turns(episode.messages):
        ids += conversation.append(turn.messages).ids
    return ids


def _page(
    result: dict[str, Any],
    views: list[PolicyView],
    marks: list[TurnMark],
    ids: list[int],
    tokenizer: Any,
) -> str:
    seen, budget = result["seen_tokens"], result["budget_tokens"]
    share = f"{100 * budget / seen:.0f}%"
    return build_page(
        Page(
            title="memdecay demo",
            headline=f"One agent episode, {share} of the cache",
            standfirst=_standfirst(result),
            facts=_facts(result, views),
            turns=marks,
            views=views,
            texts=token_texts(tokenizer, ids),
            clock=result["clock"],
            footer=footer(result, "memdecay demo --budget " + result["budget"]),
        )
    )


def _standfirst(result: dict[str, Any]) -> str:
    """Say what happened, good or bad."""
    right = {
        policy: sum(a["correct"] for a in result["answers"] if a["policy"] == policy)
        for policy in POLICIES
    }
    system = {a["policy"]: a["correct"] for a in result["answers"] if a["region"] == "system"}
    count = len(result["answers"]) // len(POLICIES)
    knowing = [policy for policy in POLICIES if system[policy]]
    knows = _listed(knowing) or "No policy"
    forgot = _listed([policy for policy in POLICIES if not system[policy]])
    return (
        f"{result['model']} reads the same conversation four times: with its full KV cache, and "
        f"three times with room for {result['budget_tokens']:,} of its {result['seen_tokens']:,} "
        f"tokens. {DEFAULT_POLICY} pins the instructions and keeps the tokens that attention "
        f"singled out; memdecay-heads does so in each attention head by itself, and repeats to "
        f"itself what it keeps while it waits; streaming keeps the latest. Asked afterwards about "
        f"{count} facts, the full cache answers {right['full']}, memdecay-heads "
        f"{right['memdecay-heads']}, {DEFAULT_POLICY} {right[DEFAULT_POLICY]} and streaming "
        f"{right['streaming']}. "
        f"{knows} still {'know' if len(knowing) > 1 else 'knows'} the fact in the system text"
        + (f"; {forgot} forgot it." if forgot else ".")
    )


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
