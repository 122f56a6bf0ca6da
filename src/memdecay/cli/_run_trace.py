"""The work of `memdecay run`: the trace under each policy, what that cost, and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from memdecay.cli import _options, _terminal
from memdecay.cli._budget import Budget
from memdecay.cli._page import (
    Page,
    PolicyView,
    TurnMark,
    build_page,
    footer,
    page_sizes,
    token_texts,
)
from memdecay.cli._replay import Play, Turn, compare, count_tokens, play, split_turns
from memdecay.cli._timeline import Timeline
from memdecay.errors import MemDecayError

if TYPE_CHECKING:
    from memdecay.engine import Session
    from memdecay.policy.base import Policy
    from memdecay.prompt import Conversation, Trace
    from memdecay.regions import Profile


@dataclass(frozen=True)
class Request:
    """What was asked for, checked before any work.

    Args:
        trace: the recorded conversation.
        model: what `load_model` takes.
        budget: of every policy that is bounded.
        policies: name -> policy; the first is the one asked for, the others are compared. One
            whose name says so has tiers.
        profile: the region policies.
        retrievers: names of the tools whose outputs are documents.
        clock: "steps" or "tokens".
        max_tokens: stop before a turn goes past this, None for never.
        max_turns: stop after so many turns, None for never.
        tiers: of the one that has them, None if none has.
    """

    trace: Trace
    model: str
    budget: Budget
    policies: Mapping[str, Policy]
    profile: Profile
    retrievers: Sequence[str]
    clock: str
    max_tokens: int | None
    max_turns: int | None
    tiers: _options.AskedTiers | None = None


@dataclass(frozen=True)
class _Done:
    """One policy's session at its end."""

    play: Play
    report: Mapping[str, Any]
    timeline: Timeline
    seconds: float


def run_trace(request: Request, *, want_page: bool) -> tuple[dict[str, Any], str]:
    """Replay the trace under every policy and with the full cache.

    Returns:
        What `--json` prints, and the page, empty unless wanted.

    Raises:
        MemDecayError: the model cannot be loaded, the profile is of another tokenizer, the trace
            cannot be rendered, or the budget cannot hold the pins.
    """
    import torch

    from memdecay.calibration.profile import check_profile
    from memdecay.engine import load_model

    torch.manual_seed(_terminal.SEED)
    with _terminal.progress() as progress:
        loading = progress.add_task(f"loading {request.model}", total=None)
        model, tokenizer = load_model(request.model)
        check_profile(request.profile, tokenizer)
        progress.remove_task(loading)
        turns, ids = _cut(request, tokenizer)
        messages = [message for turn in turns for message in turn.messages]
        budget = request.budget.resolve(len(ids))
        for name in request.policies:
            with _session(model, tokenizer, request, name, budget, len(ids)) as session:
                session.check(messages)
        done = {
            name: _replay(model, tokenizer, request, name, budget, turns, ids, progress)
            for name in dict.fromkeys([*request.policies, "full"])
        }
    template = _conversation(request, tokenizer).append(messages).notes
    notes = _notes(request, model, done["full"].play, len(ids), template)
    notes += _blind(done)
    reference = done["full"].play
    per_policy = {
        name: _result(name, request.policies[name], done[name], reference, budget)
        for name in request.policies
    }
    first = next(iter(per_policy))
    result = {
        "model": request.model,
        "trace": request.trace.id,
        "budget": request.budget.text,
        "clock": request.clock,
        **(request.tiers.told(len(ids)) if request.tiers else {}),
        **per_policy[first],
        "compare": {name: per_policy[name] for name in per_policy if name != first},
        "full": {
            "peak_resident_tokens": done["full"].report["peak_resident_tokens"],
            "nll_per_token": _mean_nll(reference),
            "scored_tokens": sum(len(turn.nll) for turn in reference.turns),
        },
        "notes": notes,
        **_terminal.provenance(),
    }
    page = _page(request, result, done, per_policy, ids, tokenizer) if want_page else ""
    return result, page


def _conversation(request: Request, tokenizer: Any) -> Conversation:
    from memdecay.prompt import Conversation

    return Conversation(
        tokenizer,
        retrievers=request.retrievers,
        tools=request.trace.tools or None,
        profile=request.profile,
    )


def _cut(request: Request, tokenizer: Any) -> tuple[list[Turn], list[int]]:
    """Return the turns to replay and their ids.

    Raises:
        MemDecayError: not even the first turn fits `max_tokens`, or the trace is malformed.
    """
    conversation = _conversation(request, tokenizer)
    turns: list[Turn] = []
    ids: list[int] = []
    for turn in split_turns(request.trace.messages)[: request.max_turns]:
        new = conversation.append(turn.messages).ids
        limit = request.max_tokens
        if limit is not None and len(ids) + len(new) > limit:
            if not turns:
                raise MemDecayError(
                    f"--max-tokens is {limit}, but the first turn of '{request.trace.id}' "
                    f"has {len(new):,} tokens."
                )
            break
        turns.append(turn)
        ids += new
    return turns, ids


def _session(
    model: Any, tokenizer: Any, request: Request, name: str, budget: int, total: int
) -> Session:
    from memdecay.engine import Session

    policy = request.policies.get(name) or _options.policies([name])[name]
    return Session(
        model,
        tokenizer,
        budget=budget if policy.bounded else None,
        policy=policy,
        profile=request.profile,
        clock=request.clock,
        retrievers=request.retrievers,
        tools=request.trace.tools or None,
        record_timeline=True,
        tiers=request.tiers.resolve(total)
        if request.tiers and name.endswith(_options.WITH_TIERS)
        else None,
    )


def _replay(
    model: Any,
    tokenizer: Any,
    request: Request,
    name: str,
    budget: int,
    turns: Sequence[Turn],
    ids: Sequence[int],
    progress: Progress,
) -> _Done:
    began = time.perf_counter()
    task = progress.add_task(f"{name}: {len(turns)} turns", total=len(ids))
    with _session(model, tokenizer, request, name, budget, len(ids)) as session:
        with count_tokens(model, lambda count: progress.advance(task, count)):
            played = play(session, turns, done=lambda seen: progress.update(task, completed=seen))
        report = session.report().to_dict()
        timeline = Timeline.parse(session.timeline())
    progress.remove_task(task)
    return _Done(played, report, timeline, time.perf_counter() - began)


def _result(name: str, policy: Policy, done: _Done, reference: Play, budget: int) -> dict[str, Any]:
    cost = compare(done.play, reference)
    report = done.report
    return {
        "policy": name,
        "policy_config": report["policy"],
        "evidence": report["evidence"],
        "budget_tokens": budget if policy.bounded else None,
        "seen_tokens": report["seen_tokens"],
        "kept_tokens": report["kept_tokens"],
        "peak_resident_tokens": report["peak_resident_tokens"],
        "peak_kv_bytes": report["peak_kv_bytes"],
        "kept_by_region": report["kept_by_region"],
        "seen_by_region": report["seen_by_region"],
        "tiers": report.get("tiers"),
        **cost.total,
        "cost_by_region": cost.regions,
        "turns": cost.turns,
        "seconds": round(done.seconds, 2),
    }


def _mean_nll(play: Play) -> float | None:
    values = [value for turn in play.turns for value in turn.nll]
    return sum(values) / len(values) if values else None


def _notes(
    request: Request, model: Any, reference: Play, seen: int, template: Sequence[str]
) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    notes: list[str] = []
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is not None and seen > trained:
        notes.append(
            f"{seen - trained:,} of {seen:,} positions are past the {trained:,} that "
            f"{request.model} was trained for: what it predicts there is not to be trusted, with "
            f"or without eviction."
        )
    if not any(len(turn.nll) for turn in reference.turns):
        notes.append("The trace has no assistant tokens to score, so the cost is not known.")
    return list(dict.fromkeys([*notes, *request.trace.notes, *template]))


def _blind(done: Mapping[str, _Done]) -> list[str]:
    """Say which policies would go by evidence heads and have none."""
    return [
        f"{name} goes by evidence heads, and there are none for this model; memdecay calibrate "
        f"measures them."
        for name, one in done.items()
        if (one.report["evidence"] or "").startswith("none")
    ]


def _page(
    request: Request,
    result: Mapping[str, Any],
    done: Mapping[str, _Done],
    per_policy: Mapping[str, Mapping[str, Any]],
    ids: Sequence[int],
    tokenizer: Any,
) -> str:
    first = result["policy"]
    budget = result["budget_tokens"]
    exact = " at full precision" if request.tiers and request.tiers.graded else ""
    share = (
        f"{100 * min(1, budget / len(ids)):.0f}% of the cache{exact}"
        if budget
        else "the full cache"
    )
    views = [
        PolicyView(
            policy=name,
            summary=_options.summary_of(name, policy, request.tiers),
            bounded=policy.bounded,
            main=name == first,
            report=done[name].report,
            timeline=done[name].timeline,
            cost=per_policy[name],
            bits=request.tiers.bits if request.tiers else None,
        )
        for name, policy in request.policies.items()
    ]
    asked, others = first.removesuffix(_options.WITH_TIERS), [*result["compare"]]
    options = f"--model {request.model} --budget {result['budget']} --policy {asked}"
    options += f" --compare {','.join(name for name in others if name != asked) or 'none'}"
    options += request.tiers.flags() if request.tiers else ""
    return build_page(
        Page(
            title=f"memdecay run: {request.trace.id}",
            headline=f"{request.trace.id}, in {share}",
            standfirst=(
                f"A recorded agent trace of {len(ids):,} tokens in {len(result['turns'])} turns, "
                f"replayed by {request.model}. Every assistant token of the record is predicted "
                f"under each policy and with the full cache, so the cost of forgetting is "
                f"measured on the same tokens."
            ),
            facts=[
                ("model", request.model),
                ("budget", f"{budget:,} of {len(ids):,} tokens" if budget else "none"),
                ("page", page_sizes(views)),
                ("clock", request.clock),
                ("scored", f"{result['scored_tokens']:,} tokens"),
            ],
            turns=[
                TurnMark(turn.turn.index, turn.turn.label, turn.start, turn.end)
                for turn in done[first].play.turns
            ],
            views=views,
            notes=result["notes"],
            texts=token_texts(tokenizer, ids),
            clock=request.clock,
            footer=footer(dict(result), f"memdecay run {request.trace.id} {options}"),
        )
    )
