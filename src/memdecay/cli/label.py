"""`memdecay label`: which region every part of a trace gets, and where that is doubtful."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memdecay.cli import _look, _options, _terminal

EXAMPLE = "memdecay label trace.json --model smollm2 --retriever search_manual"

_HEADER = re.compile(r"^(?:<\|[^>]*\|>\s*)+(?:system|user|assistant|tool)?\s+")
"""How many templates open a message; the role has a column of its own."""


def label(
    trace: Annotated[Path, typer.Argument(help="Messages JSON or JSONL, .traj, or tau-bench.")],
    model: _options.Model = "smollm2",
    retriever: _options.Retrievers = None,
    profile: _options.ProfilePath = None,
    as_json: _options.Json = False,
) -> None:
    """Label a trace with the model's own chat template: every span, and the share of each region.

    Spans whose region is a guess are flagged. A "region" on a message or on a content part, or a
    --retriever, decides them.
    """
    from memdecay.prompt import label_trace, load_trace

    loaded = load_trace(trace)
    regions = _options.profile(profile)
    with _terminal.results(as_json):
        from memdecay.engine import load_model

        with _terminal.progress() as progress:
            progress.add_task(f"loading {escape(model)}", total=None)
            _, tokenizer = load_model(model)
        report = label_trace(loaded, tokenizer, retrievers=retriever or (), profile=regions)
    result = {"model": model, **report.to_dict(), **_terminal.provenance()}
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


def _show(result: Mapping[str, Any]) -> None:
    console = _terminal.out()
    console.print(
        f"\n[bold]memdecay label[/]: {escape(result['trace'])}, {result['messages']} messages, "
        f"{result['total']:,} tokens\n"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("message", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("region", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True)
    # The text takes what the other columns leave; it is the only one that may be cut.
    width = max(12, console.width - 58)
    table.add_column("text", width=width, no_wrap=True, overflow="ellipsis")
    for span in result["spans"]:
        doubt = Text(" ?", style="bold yellow") if span["ambiguous"] else Text("")
        table.add_row(
            str(span["message"]),
            span["role"],
            Text(span["region"], style=_look.colour(span["region"])),
            f"{span['tokens']:,}",
            Text(span["source"]).append_text(doubt),
            Text(_HEADER.sub("", span["preview"]), style="dim"),
        )
    console.print(table)
    console.print()
    total = max(1, result["total"])
    shares = _look.titled("Tokens by region")
    for column in ("region", "tokens", "share"):
        shares.add_column(column, justify="left" if column == "region" else "right")
    shares.add_column("")
    for region, tokens in result["tokens"].items():
        if tokens:
            width = round(30 * tokens / total)
            block = ("█" if _look.fancy(console) else "#") * max(1, width)
            name = Text(region, style=_look.colour(region))
            share = f"{100 * tokens / total:.1f}%"
            shares.add_row(name, f"{tokens:,}", share, Text(block, style=_look.colour(region)))
    console.print(shares)
    doubtful = [span for span in result["spans"] if span["ambiguous"]]
    if doubtful:
        console.print(f"\n[bold yellow]{len(doubtful)} to check[/]")
        for span in doubtful:
            console.print(Text(f"  message {span['message']}, {span['region']}: {span['note']}"))
    for note in result["notes"]:
        console.print(Text(f"\nNote: {note}", style="yellow"))
