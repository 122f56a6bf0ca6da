"""How numbers look on a terminal: colours of the regions, bars, marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {
    "system": "#3a66d6",
    "plan": "#9a63dd",
    "user": "#12a5b0",
    "tool_in": "#d9ab25",
    "tool_out": "#e8703a",
    "retrieval": "#4fa84a",
    "scratchpad": "#8f96a3",
}
_EIGHTHS = " ▏▎▍▌▋▊▉"


def colour(region: str) -> str:
    """Return the colour of a region, the same as on the page."""
    return _COLOURS.get(region, "#cf4f8c")


def fancy(console: Console) -> bool:
    """Whether the terminal can show more than ASCII."""
    return (console.encoding or "").lower().startswith("utf")


def titled(title: str) -> Table:
    """Return an empty table under a title, without lines."""
    return Table(title=title, title_justify="left", title_style="bold", box=None)


def bar(console: Console, region: str, value: int, seen: int, largest: int, width: int) -> Text:
    """Return a bar of `value` in front of a pale one of `seen`, with the numbers behind it."""
    scale = width / max(1, largest)
    text = Text()
    if fancy(console):
        whole, part = divmod(round(8 * value * scale), 8)
        solid = "█" * whole + (_EIGHTHS[part] if part else "")
        text.append(solid, style=colour(region))
        text.append("·" * max(0, round(seen * scale) - len(solid)), style="dim")
    else:
        solid = "#" * round(value * scale)
        text.append(solid + "." * max(0, round(seen * scale) - len(solid)))
    text.pad_right(max(0, width - len(text)))
    return text.append(f" {value}/{seen}", style="none" if value else "dim")


def mark(console: Console, correct: bool) -> Text:
    """Return a tick or a cross."""
    if fancy(console):
        return Text("✓ ", style="bold green") if correct else Text("✗ ", style="bold red")
    return Text("right ") if correct else Text("WRONG ")


def region_bars(console: Console, reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the tokens kept by region, a column of bars for every policy."""
    names = _in_order(reports)
    largest = max(
        (r["seen_by_region"].get(n, 0) for r in reports.values() for n in names), default=1
    )
    # Label, numbers and borders take about 12 + 12 a column; the bars share what is left.
    width = max(6, min(24, (console.width - 14) // max(1, len(reports)) - 13))
    table = titled("Kept tokens by region")
    table.add_column("region", no_wrap=True)
    for policy in reports:
        table.add_column(policy, no_wrap=True)
    for name in names:
        cells = [
            bar(
                console,
                name,
                report["kept_by_region"].get(name, 0),
                report["seen_by_region"].get(name, 0),
                largest,
                width,
            )
            for report in reports.values()
        ]
        table.add_row(Text(name, style=colour(name)), *cells)
    return table


def megabytes(size: int) -> str:
    """Return bytes as MB (10⁶ bytes), as on the page."""
    return f"{size / 1e6:.1f} MB"


def signed(value: float | None, digits: int = 3) -> str:
    """Return a change with its sign, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:+.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage, or a dash where nothing was measured."""
    return "-" if value is None else f"{100 * value:.1f}%"


def tiers(name: str, report: Mapping[str, Any], bits: int | None) -> Table:
    """Return a table of what is where at the end.

    Args:
        name: of the policy.
        report: its tiers, as in `Report.to_dict()`.
        bits: of those at fewer bits, None if none are.
    """
    came_back = report["came_back"]
    back = f"{came_back:,} page{'' if came_back == 1 else 's'} came back"
    table = titled(f"Where {name} has its tokens at the end, and the memory set aside; {back}")
    table.add_column("")
    for column in ("tokens", "memory"):
        table.add_column(column, justify="right")
    copies = report["tokens"]["copies"]
    names = {
        "resident": "in the cache, at full precision",
        "quantized": f"in the cache, at {bits} bits",
        "host": "outside, in memory",
        "disk": "outside, on disk",
        "summaries": "what they are found by",
        "scratch": "scratch, for one layer at full precision",
    }
    for key, label in names.items():
        size = report["bytes"][key]
        if size or key in ("resident", "host"):
            tokens = report["tokens"].get(key)
            table.add_row(label, "" if tokens is None else f"{tokens:,}", megabytes(size))
        if key == "disk" and copies:
            label = f"exact copies of those at {bits} bits, in memory too"
            table.add_row(label, f"{copies:,}", "(above)")
    return table


def _in_order(reports: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Return the regions that brought tokens in, the paper's seven first."""
    seen = [n for r in reports.values() for n, count in r["seen_by_region"].items() if count]
    own = dict.fromkeys(name for name in seen if name not in _COLOURS)
    return [*(name for name in _COLOURS if name in seen), *own]
