"""`memdecay run`: replay a recorded trace under a budget and measure what eviction cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memdecay.cli import _look, _options, _terminal
from memdecay.cli._budget import parse_budget
from memdecay.cli._run_trace import Request, run_trace
from memdecay.errors import MemDecayError
from memdecay.policy import DEFAULT_POLICY

EXAMPLE = "memdecay run trace.json --model smollm2 --budget 25% --html run.html"


def run(
    trace: Annotated[Path, typer.Argument(help="Messages JSON or JSONL, .traj, or tau-bench.")],
    model: _options.Model = "smollm2",
    budget: _options.BudgetText = "25%",
    policy: Annotated[str, typer.Option("--policy", "-p", help="What decides.")] = DEFAULT_POLICY,
    compare_with: Annotated[
        str, typer.Option("--compare", help="Policies beside it, with commas between; or none.")
    ] = "memdecay-paper,streaming",
    html: Annotated[Path | None, typer.Option("--html", help="Write the page here too.")] = None,
    retriever: _options.Retrievers = None,
    profile: _options.ProfilePath = None,
    clock: Annotated[
        str, typer.Option(help="What ages a token: decode steps, or tokens (every token seen).")
    ] = "steps",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop before the turn that passes this many tokens.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many turns.")
    ] = None,
    tiers: _options.TiersFlag = False,
    quantized: _options.QuantizedText = None,
    bits: _options.Bits = None,
    as_json: _options.Json = False,
) -> None:
    """Replay a trace turn by turn under a budget, the recorded assistant turns teacher-forced.

    Reports what is kept of each region after every turn, and what eviction cost on the
    assistant's tokens against the full cache: the change in negative log-likelihood per token
    and how often the most likely token stays the same. The assistant's tokens are read one by
    one, as decode steps, as if the model were writing them.

    With --tiers the policy is also replayed with tiers: what it evicts stays in memory and comes
    back for what asks for it, in the same budget. With --quantized so many tokens more stay in the
    cache at 4 bits before they go to memory; the budget is then of those at full precision. For
    example: memdecay run trace.json --tiers --quantized 25% --html run.html
    """
    from memdecay.prompt import load_trace

    asked = parse_budget(budget)
    wanted = _options.asked_tiers(tiers, quantized, bits)
    if clock not in ("steps", "tokens"):
        raise MemDecayError(f"--clock is {clock!r}, but must be steps or tokens.")
    _terminal.check_output(html, "--html")
    others = [] if compare_with == "none" else _options.names(compare_with)
    policies = _options.policies([policy, *others])
    if tiers:
        _options.check_tiers(policies[policy])
        _options.check_precision(wanted, asked, policies[policy])
        policies = {f"{policy}{_options.WITH_TIERS}": policies[policy], **policies}
    request = Request(
        trace=load_trace(trace),
        model=model,
        budget=asked,
        policies=policies,
        profile=_options.profile(profile),
        retrievers=retriever or (),
        clock=clock,
        max_tokens=max_tokens,
        max_turns=max_turns,
        tiers=wanted,
    )
    with _terminal.results(as_json):
        result, page = run_trace(request, want_page=html is not None)
        if html is not None:
            _terminal.write_file(html, page)
            result["html"] = str(html)
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


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
    if result["tiers"] is not None:
        console.print()
        console.print(_look.tiers(result["policy"], result["tiers"], result["bits"]))
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
