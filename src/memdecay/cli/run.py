"""`memdecay run`: replay a recorded trace under a budget and measure what eviction cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memdecay.cli import _look, _options, _terminal
from memdecay.cli._budget import parse_budget
from memdecay.cli._page import Page, PolicyView, TurnMark, build_page
from memdecay.cli._replay import Play, Turn, compare, count_tokens, play, split_turns
from memdecay.cli._timeline import Timeline
from memdecay.cli.demo import footer
from memdecay.errors import MemDecayError

if TYPE_CHECKING:
    from rich.progress import Progress

    from memdecay.policy.base import Policy
    from memdecay.prompt import Trace
    from memdecay.regions import Profile

EXAMPLE = "memdecay run trace.json --model smollm2 --budget 25% --compare streaming"


@dataclass(frozen=True)
class _Request:
    """What was asked for, checked before any work."""

    trace: Trace
    model: str
    policies: Mapping[str, Policy]
    profile: Profile
    retrievers: Sequence[str]
    clock: str


@dataclass(frozen=True)
class _Done:
    """One policy's session at its end."""

    play: Play
    report: Mapping[str, Any]
    timeline: Timeline
    seconds: float


def run(
    trace: Annotated[Path, typer.Argument(help="Messages JSON or JSONL, .traj, or tau-bench.")],
    model: _options.Model = "smollm2",
    budget: _options.BudgetText = "25%",
    policy: Annotated[str, typer.Option("--policy", "-p", help="What decides.")] = "memdecay",
    compare_with: Annotated[
        str | None, typer.Option("--compare", help="More policies, such as streaming,h2o.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the page here too.")] = None,
    retriever: _options.Retrievers = None,
    profile: _options.ProfilePath = None,
    clock: Annotated[
        str, typer.Option(help="What ages a token: every token read, or decode steps only.")
    ] = "tokens",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop before the turn that passes this many tokens.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many turns.")
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Replay a trace turn by turn under a budget, the recorded assistant turns teacher-forced.

    Reports what is kept of each region after every turn, and what eviction cost on the
    assistant's tokens against the full cache: the change in negative log-likelihood per token
    and how often the most likely token stays the same. Recorded turns are read, not written, so
    no decode steps pass in a replay: with --clock steps nothing decays.
    """
    from memdecay.prompt import load_trace

    asked = parse_budget(budget)
    if clock not in ("steps", "tokens"):
        raise MemDecayError(f"--clock is {clock!r}, but must be steps or tokens.")
    _terminal.check_output(html, "--html")
    policies = _options.policies([policy, *_options.names(compare_with)])
    request = _Request(
        trace=load_trace(trace),
        model=model,
        policies=policies,
        profile=_options.profile(profile),
        retrievers=retriever or (),
        clock=clock,
    )
    with _terminal.results(as_json):
        result, page = _run(request, asked.text, max_tokens, max_turns, want_page=html is not None)
        if html is not None:
            _terminal.write_file(html, page)
            result["html"] = str(html)
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


def _run(
    request: _Request,
    budget_text: str,
    max_tokens: int | None,
    max_turns: int | None,
    want_page: bool,
) -> tuple[dict[str, Any], str]:
    import torch

    from memdecay.engine import load_model

    torch.manual_seed(_terminal.SEED)
    with _terminal.progress() as progress:
        loading = progress.add_task(f"loading {request.model}", total=None)
        model, tokenizer = load_model(request.model)
        progress.remove_task(loading)
        turns, ids = _cut(request, tokenizer, max_tokens, max_turns)
        budget = parse_budget(budget_text).resolve(len(ids))
        # The reference comes last: a budget that cannot hold the pins is found out before it.
        full = _options.policies(["full"])["full"]
        done = {
            policy.name: _replay(model, tokenizer, request, policy, budget, turns, ids, progress)
            for policy in {**request.policies, "full": full}.values()
        }
    notes = _notes(request, model, done, len(ids))
    reference = done["full"].play
    per_policy = {
        name: _result(name, request.policies[name], done[name], reference, budget)
        for name in request.policies
    }
    first = next(iter(per_policy))
    result = {
        "model": request.model,
        "trace": request.trace.id,
        "budget": budget_text.strip(),
        "clock": request.clock,
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


def _cut(
    request: _Request, tokenizer: Any, max_tokens: int | None, max_turns: int | None
) -> tuple[list[Turn], list[int]]:
    """Return the turns to replay and their ids.

    Raises:
        MemDecayError: not even the first turn fits `max_tokens`.
    """
    from memdecay.prompt import Conversation

    conversation = Conversation(
        tokenizer,
        retrievers=request.retrievers,
        tools=request.trace.tools or None,
        profile=request.profile,
    )
    turns: list[Turn] = []
    ids: list[int] = []
    for turn in split_turns(request.trace.messages)[:max_turns]:
        new = conversation.append(turn.messages).ids
        if max_tokens is not None and len(ids) + len(new) > max_tokens:
            if not turns:
                raise MemDecayError(
                    f"--max-tokens is {max_tokens}, but the first turn of '{request.trace.id}' "
                    f"has {len(new):,} tokens."
                )
            break
        turns.append(turn)
        ids += new
    return turns, ids


def _replay(
    model: Any,
    tokenizer: Any,
    request: _Request,
    policy: Policy,
    budget: int,
    turns: Sequence[Turn],
    ids: Sequence[int],
    progress: Progress,
) -> _Done:
    from memdecay.engine import Session

    began = time.perf_counter()
    task = progress.add_task(f"{policy.name}: {len(turns)} turns", total=len(ids))
    with Session(
        model,
        tokenizer,
        budget=budget if policy.bounded else None,
        policy=policy,
        profile=request.profile,
        clock=request.clock,
        retrievers=request.retrievers,
        tools=request.trace.tools or None,
        record_timeline=True,
    ) as session:
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
        "budget_tokens": budget if policy.bounded else None,
        "seen_tokens": report["seen_tokens"],
        "kept_tokens": report["kept_tokens"],
        "peak_resident_tokens": report["peak_resident_tokens"],
        "peak_kv_bytes": report["peak_kv_bytes"],
        "kept_by_region": report["kept_by_region"],
        "seen_by_region": report["seen_by_region"],
        **cost.total,
        "cost_by_region": cost.regions,
        "turns": cost.turns,
        "seconds": round(done.seconds, 2),
    }


def _mean_nll(play: Play) -> float | None:
    values = [value for turn in play.turns for value in turn.nll]
    return sum(values) / len(values) if values else None


def _notes(request: _Request, model: Any, done: Mapping[str, _Done], seen: int) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    notes: list[str] = []
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is not None and seen > trained:
        notes.append(
            f"{seen - trained:,} of {seen:,} positions are past the {trained:,} that "
            f"{request.model} was trained for: what it predicts there is not to be trusted, with "
            f"or without eviction."
        )
    if not any(len(turn.nll) for turn in done["full"].play.turns):
        notes.append("The trace has no assistant tokens to score, so the cost is not known.")
    notes += request.trace.notes
    for one in done.values():
        notes += one.play.notes
    return list(dict.fromkeys(notes))


def _page(
    request: _Request,
    result: Mapping[str, Any],
    done: Mapping[str, _Done],
    per_policy: Mapping[str, Mapping[str, Any]],
    ids: Sequence[int],
    tokenizer: Any,
) -> str:
    first = result["policy"]
    budget = result["budget_tokens"]
    size = done[first].timeline.page_size
    share = f"{100 * min(1, budget / len(ids)):.0f}% of the cache" if budget else "the full cache"
    views = [
        PolicyView(
            policy=name,
            summary=policy.summary,
            bounded=policy.bounded,
            main=name == first,
            report=done[name].report,
            timeline=done[name].timeline,
            cost=per_policy[name],
        )
        for name, policy in request.policies.items()
    ]
    options = f"--model {request.model} --budget {result['budget']} --policy {first}"
    if result["compare"]:
        options += f" --compare {','.join(result['compare'])}"
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
                ("page", f"{size} tokens"),
                ("clock", request.clock),
                ("scored", f"{result['scored_tokens']:,} tokens"),
            ],
            turns=[
                TurnMark(turn.turn.index, turn.turn.label, turn.start, turn.end)
                for turn in done[first].play.turns
            ],
            views=views,
            notes=result["notes"],
            texts=[tokenizer.decode(ids[i : i + size]) for i in range(0, len(ids), size)],
            clock=request.clock,
            footer=footer(dict(result), f"memdecay run {request.trace.id} {options}"),
        )
    )


def _show(result: Mapping[str, Any]) -> None:
    console = _terminal.out()
    budget = result["budget_tokens"]
    console.print(
        f"\n[bold]memdecay run[/]: {escape(result['model'])} on {escape(str(result['trace']))}, "
        f"{result['seen_tokens']:,} tokens in {len(result['turns'])} turns; "
        f"budget {f'{budget:,} tokens' if budget else 'none'}, clock {result['clock']}\n"
    )
    everyone = [result, *result["compare"].values()]
    for one in everyone:
        console.print(_turn_table(one))
        console.print()
    console.print(_look.region_bars(console, {one["policy"]: one for one in everyone}))
    console.print()
    table = _look.titled("Against the full cache")
    for column in ("policy", "peak tokens", "peak KV", "Δ NLL / token", "same top token", "time"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for one in everyone:
        table.add_row(
            one["policy"],
            f"{one['peak_resident_tokens']:,}",
            _look.megabytes(one["peak_kv_bytes"]),
            _look.signed(one["delta_nll_per_token"]),
            _look.percent(one["top1_agreement"]),
            f"{one['seconds']:.0f} s",
        )
    console.print(table)
    for note in result["notes"]:
        console.print(Text(f"\nNote: {note}", style="yellow"))
    if "html" in result:
        console.print(f"\nThe cache over time is in [bold]{escape(result['html'])}[/].")


def _turn_table(one: Mapping[str, Any]) -> Table:
    """Return the turns of one policy: kept tokens by region, and the cost."""
    regions = [name for name, seen in one["seen_by_region"].items() if seen]
    table = _look.titled(one["policy"])
    table.add_column("turn", justify="right")
    table.add_column("seen", justify="right")
    table.add_column("kept", justify="right")
    for name in regions:
        table.add_column(Text(name, style=_look.colour(name)), justify="right", overflow="fold")
    table.add_column("Δ NLL", justify="right", no_wrap=True)
    table.add_column("same top", justify="right", no_wrap=True)
    for turn in one["turns"]:
        table.add_row(
            str(turn["index"] + 1),
            str(turn["seen_tokens"]),
            str(turn["kept_total"]),
            *(str(turn["kept_tokens"].get(name, 0)) for name in regions),
            _look.signed(turn["delta_nll_per_token"]),
            _look.percent(turn["top1_agreement"]),
        )
    return table
