"""`memdecay demo`: one agent episode in a quarter of its memory, beside what others forget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from memdecay.cli import _look, _options, _terminal
from memdecay.cli._budget import parse_budget
from memdecay.cli._demo_play import POLICIES, TIERED, back_for, play_demo
from memdecay.policy import DEFAULT_POLICY

EXAMPLE = "memdecay demo --budget 25% --html demo.html"


def demo(
    budget: _options.BudgetText = "25%",
    model: _options.Model = "smollm2",
    html: Annotated[Path, typer.Option("--html", help="Where the page goes.")] = Path("demo.html"),
    tiers: _options.TiersFlag = False,
    quantized: _options.QuantizedText = None,
    bits: _options.Bits = None,
    as_json: _options.Json = False,
) -> None:
    """Play a built-in agent episode with the full cache, memdecay-heads, memdecay and streaming.

    Facts are planted in the system text, a user turn, a tool output and a retrieved document;
    afterwards the model is asked for each. Shows every answer, right or wrong, what is kept of
    each region and the peak of the KV cache, and writes a self-contained page.

    With --tiers it is the full cache, memdecay with tiers and memdecay: what loses its place among
    the tokens of the budget stays in the cache at 4 bits, as many tokens again unless --quantized
    says otherwise; what loses that place too goes to memory, and comes back when it is asked for.
    At the end each is asked for a fact that memdecay forgot, so that the page shows what comes
    back. For example: memdecay demo --tiers --html tiers.html
    """
    asked = parse_budget(budget)
    wanted = _options.asked_tiers(tiers, quantized, bits, otherwise=asked.text)
    _terminal.check_output(html, "--html")
    names = TIERED if tiers else POLICIES
    made = _options.policies([name.removesuffix(_options.WITH_TIERS) for name in names])
    chosen = {name: made[name.removesuffix(_options.WITH_TIERS)] for name in names}
    _options.check_precision(wanted, asked, made[DEFAULT_POLICY])
    with _terminal.results(as_json):
        result, page = play_demo(asked, model, chosen, wanted)
        _terminal.write_file(html, page)
    result["html"] = str(html)
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    console = _terminal.out()
    share = f"{100 * result['budget_tokens'] / result['seen_tokens']:.0f}%"
    console.print(
        f"\n[bold]memdecay demo[/]: {escape(result['model'])} on the episode {result['episode']}, "
        f"{result['seen_tokens']:,} tokens; budget {result['budget_tokens']:,} ({share})\n"
    )
    policies = list(result["peak_resident_tokens"])
    table = _look.titled("Answers")
    table.add_column("fact planted in", ratio=3)
    for policy in policies:
        table.add_column(policy, ratio=4)
    for where in dict.fromkeys(answer["where"] for answer in result["answers"]):
        row = [answer for answer in result["answers"] if answer["where"] == where]
        asked = Text(where).append(f"\n{row[0]['question']}", style="dim")
        asked.append(f"\n({row[0]['gold']})\n", style="dim")
        cells = [
            _look.mark(console, a["correct"]).append(_short(a["answer"]), style="none") for a in row
        ]
        table.add_row(asked, *cells)
    console.print(table)
    reports = {
        policy: {key: result[key][policy] for key in ("kept_by_region", "seen_by_region")}
        for policy in policies
    }
    console.print()
    console.print(_look.region_bars(console, reports))
    console.print()
    peaks = _look.titled("Peak KV cache")
    for column in ("policy", "tokens", "memory", "right"):
        peaks.add_column(column, justify="left" if column == "policy" else "right")
    for policy in policies:
        answers = [a for a in result["answers"] if a["policy"] == policy]
        peaks.add_row(
            policy,
            f"{result['peak_resident_tokens'][policy]:,}",
            _look.megabytes(result["peak_kv_bytes"][policy]),
            f"{sum(a['correct'] for a in answers)} of {len(answers)}",
        )
    console.print(peaks)
    for policy, report in result["tiers"].items():
        if report is not None:
            console.print()
            console.print(_look.tiers(policy, report, result["bits"]))
    if result["asked"] is not None:
        question = result["asked"]["question"]
        console.print(f"\nAsked at the end: {escape(question)} {back_for(result)}")
    console.print(f"\nThe cache over time is in [bold]{escape(result['html'])}[/].")


def _short(answer: str) -> str:
    """Cut an answer to what a table can hold; the page and the JSON have all of it."""
    line = " ".join(answer.split())
    return line if len(line) <= 140 else line[:139].rstrip() + "…"
