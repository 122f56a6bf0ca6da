"""`memdecay study report`: tables, intervals and pictures of recorded runs."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from memdecay.cli import _options, _terminal
from memdecay.errors import MemDecayError

if TYPE_CHECKING:
    from memdecay.study.findings import Findings

EXAMPLE = "memdecay study report docs/results/runs -o docs/results"


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of settings, or folders of such folders.")
    ],
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", help="Only this setting; may be repeated."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder that the report goes to.")
    ] = Path("report"),
    as_json: _options.Json = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in a browser.")
    ] = False,
) -> None:
    """Write the report of recorded runs: Markdown and JSON for each setting, one page for all.

    Recall has intervals over scenarios, differences are paired, and only those whose interval
    leaves 0 out are called a win or a loss. The same rows give the same files, byte by byte.
    """
    from memdecay.calibration.extras import require

    require("pandas", "pyarrow", "scipy", "statsmodels", "matplotlib")
    _check_folder(output)
    with _terminal.results(as_json):
        from memdecay.study.report import PAGE, build, find_runs

        settings, files = build(find_runs(runs, setting))
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _terminal.write_file(output / name, text)
    written = [str(output / name) for name in files]
    if as_json:
        _terminal.print_json({"settings": _numbers(settings), "files": written})
    else:
        _print(settings)
        _terminal.out().print(f"Wrote {', '.join(written)}", soft_wrap=True, markup=False)
    if open_page:
        webbrowser.open((output / PAGE).resolve().as_uri())


def _check_folder(output: Path) -> None:
    """Refuse an output that cannot be a folder of new files, before any work is done.

    Raises:
        MemDecayError: it is a file, or its nearest folder cannot be written to.
    """
    nearest = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise MemDecayError(f"--output is '{output}', but '{nearest}' is a file, not a directory.")
    if not os.access(nearest, os.W_OK):
        raise MemDecayError(f"--output is '{output}', but '{nearest}' cannot be written to.")


def _numbers(settings: Sequence[Findings]) -> list[dict[str, Any]]:
    """Return a line for each setting and budget."""
    from memdecay.study.statistics import BASE, NON_SYSTEM
    from memdecay.study.verdict import score

    lines: list[dict[str, Any]] = []
    for one in settings:
        for budget in one.budgets:
            line: dict[str, Any] = {"setting": one.name, "model": one.model, "budget": budget}
            for region in (NON_SYSTEM, "system"):
                for policy in ("full", BASE):
                    cell = one.cell(policy, budget, region)
                    line[f"{policy}_{region}"] = float(cell["recall"]) if cell else None
                counts = score(one, budget, region)
                line[f"peers_{region}"] = counts
            lines.append(line)
    return lines


def _print(settings: Sequence[Findings]) -> None:
    from memdecay.study.document import number
    from memdecay.study.statistics import BASE

    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    ours = BASE.replace("-", "-\n")  # in one line the table would not fit 80 columns
    for heading in ("budget", "full", ours, "peers", "full", ours, "peers"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in _numbers(settings):
        cells = [line["setting"], f"{line['budget']:.0%}"]
        for region in ("non_system", "system"):
            for policy in ("full", BASE):
                value = line[f"{policy}_{region}"]
                cells.append("-" if value is None else number(value))
            counts = line[f"peers_{region}"]
            cells.append("/".join(str(counts[name]) for name in ("win", "tie", "loss")))
        table.add_row(*cells)
    out = _terminal.out()
    out.print("Recall outside the system region, then in it; peers: won/tied/lost against")
    out.print(table)
