"""What a report is made of: sections of sentences, tables and pictures, as Markdown or HTML.

Text may hold `code` between backticks and **bold** between double stars; everything else is shown
as it is.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_MARKS = {"win": "▲ ", "loss": "▼ "}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it says.
        value: what a column is sorted by; the text if None.
        mark: "win", "loss" or nothing; shown as ▲ and ▼.
    """

    text: str
    value: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its title and, in a sentence, what to know to read it.

    Args:
        title: what it shows.
        columns: headings; one that starts with `#` (not shown) is a column of numbers.
        rows: cells, as many a row as there are columns.
        note: below the title.
        strong: the rows that are set in bold, by index.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A picture, for the page only.

    Args:
        title: what it shows.
        svg: one svg element.
        note: below it.
    """

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it.

    A block that is a string is a paragraph, or a list if each of its lines starts with a dash.
    """

    title: str
    blocks: Sequence[str | Table | Picture] = field(default_factory=tuple)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Return a document as Markdown; its pictures are left to the page."""
    lines = [f"# {title}", ""]
    for section in sections:
        blocks = [block for block in section.blocks if not isinstance(block, Picture)]
        if blocks:
            lines += [f"## {section.title}", ""]
        for block in blocks:
            lines += [block, ""] if isinstance(block, str) else _markdown_table(block)
    return "\n".join(lines).rstrip() + "\n"


def html_sections(sections: Sequence[Section], prefix: str) -> str:
    """Return sections as HTML.

    Args:
        sections: what to show.
        prefix: goes before the ids of the headings, so that several documents fit on one page.
    """
    parts = []
    for section in sections:
        parts.append(
            f'<section id="{prefix}-{slug(section.title)}"><h3>{inline(section.title)}</h3>'
        )
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(html_text(block))
            elif isinstance(block, Table):
                parts.append(_html_table(block))
            else:
                note = f"<small>{inline(block.note)}</small>" if block.note else ""
                caption = f"<figcaption><b>{inline(block.title)}</b>{note}</figcaption>"
                parts.append(f"<figure>{caption}{block.svg}</figure>")
        parts.append("</section>")
    return "\n".join(parts)


def html_text(text: str) -> str:
    """Return a paragraph or a list as HTML."""
    if not text.startswith("- "):
        return f"<p>{inline(text)}</p>"
    items = (f"<li>{inline(line.removeprefix('- '))}</li>" for line in text.splitlines())
    return f"<ul>{''.join(items)}</ul>"


def inline(text: str) -> str:
    """Return a line of text as HTML."""
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe)


def slug(text: str) -> str:
    """Return text as an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def number(value: float, digits: int = 2, *, signed: bool = False) -> str:
    """Return a number for people, a dash where it is not known; a true minus sign."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def interval(
    value: float, low: float, high: float, digits: int = 2, *, signed: bool = False
) -> str:
    """Return a number and its interval: `0.36 [0.20, 0.51]`."""
    text = number(value, digits, signed=signed)
    if math.isnan(low) or math.isnan(high):
        return text
    if low * high > 0 and 0 in (round(low, digits), round(high, digits)):
        digits += 1  # an end that is not 0 should not look like it
    ends = (number(end, digits, signed=signed) for end in (low, high))
    return f"{text} [{', '.join(ends)}]"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def plural(count: int, noun: str) -> str:
    """Return `1 probe` or `1,248 probes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _heading(column: str) -> tuple[str, bool]:
    return (column[1:], True) if column.startswith("#") else (column, False)


def _markdown_table(table: Table) -> list[str]:
    headings = [_heading(column) for column in table.columns]
    lines = [f"**{table.title}**", ""]
    if table.note:
        lines += [table.note, ""]
    lines.append("| " + " | ".join(name for name, _ in headings) + " |")
    lines.append("|" + "|".join(" ---: " if right else " --- " for _, right in headings) + "|")
    for index, row in enumerate(table.rows):
        texts = [_MARKS.get(c.mark, "") + c.text if isinstance(c, Cell) else c for c in row]
        texts = [text.replace("|", "\\|") for text in texts]
        if index in table.strong:
            texts = [f"**{text}**" if text else text for text in texts]
        lines.append("| " + " | ".join(texts) + " |")
    return [*lines, ""]


def _html_table(table: Table) -> str:
    headings = [_heading(column) for column in table.columns]
    head = "".join(
        f'<th scope="col"{_class("n" * right)}><button type="button">{inline(name)}</button></th>'
        for name, right in headings
    )
    body = []
    for index, row in enumerate(table.rows):
        cells = []
        for place, (cell, (_, right)) in enumerate(zip(row, headings, strict=True)):
            cell = Cell(cell) if isinstance(cell, str) else cell
            value = "" if cell.value is None else f' data-v="{_sortable(cell.value)}"'
            kind = _class(" ".join(filter(None, ("n" * right, cell.mark))))
            tag, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
            cells.append(f"<{tag}{scope}{kind}{value}>{inline(cell.text)}</{tag}>")
        body.append(f"<tr{_class('strong' * (index in table.strong))}>{''.join(cells)}</tr>")
    note = f"<small>{inline(table.note)}</small>" if table.note else ""
    return (
        f'<div class="tab"><div class="cap"><b>{inline(table.title)}</b>{note}</div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></div>"
    )


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _sortable(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
