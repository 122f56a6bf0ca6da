"""`memdecay study held-out`: the new policies on scenarios on which nothing was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memdecay.calibration.extras import require
from memdecay.cli import _options, _terminal
from memdecay.errors import MemDecayError

EXAMPLE = (
    "memdecay study held-out docs/results/runs --scenario bakery --scenario freight "
    "-o held-out.md --cells held-out.json"
)


def held_out(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of settings, or folders of such folders.")
    ],
    scenario: Annotated[
        list[str],
        typer.Option("--scenario", help="On which nothing was chosen; repeat for more."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The Markdown file of tables to write.")
    ],
    cells: Annotated[Path, typer.Option("--cells", help="The JSON file of cells to write.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", help="Only this setting; may be repeated."),
    ] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--traces", help="A folder that `study traces` wrote; may be repeated."),
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Write what the new policies reached on held-out scenarios: targets first, then tables.

    Only the rows of the named scenarios count. Each of the new policies is held against its
    target, against the full cache, and scenario by scenario against the best peer. Settings
    without rows of them are left out, which is said. The same rows give the same files, byte by
    byte.
    """
    require("pandas", "pyarrow", "scipy", "statsmodels", "matplotlib")
    _terminal.check_output(output, "--output")
    _terminal.check_output(cells, "--cells")
    if output.resolve() == cells.resolve():
        raise MemDecayError(f"--cells is '{cells}', but that is --output; they must be two files.")
    chosen = list(dict.fromkeys(scenario))
    with _terminal.results(as_json):
        from memdecay.study.held_out import cells_json, numbers, read
        from memdecay.study.held_out_report import document, gather_traces
        from memdecay.study.report import find_runs

        folders = find_runs(runs, setting)
        played = gather_traces(traces or ())
        with _terminal.progress() as bar:
            line = bar.add_task("reading rows", total=len(folders))
            found, left_out = read(folders, chosen, lambda: bar.advance(line))
            line = bar.add_task("comparing", total=None)
            said = document(found, left_out, chosen, played)
            lines = [one for part in found for one in numbers(part)]
            _terminal.write_file(output, said)
            _terminal.write_file(cells, cells_json(found))
    if as_json:
        files = [str(output), str(cells)]
        _terminal.print_json({"policies": lines, "left_out": left_out, "files": files})
        return
    _print(lines)
    for name in left_out:
        _terminal.out().print(
            f"Left out: {name} has no rows of the new policies in these scenarios.", soft_wrap=True
        )
    _terminal.out().print(f"Wrote {output}, {cells}", soft_wrap=True, markup=False)


def _print(lines: Sequence[dict[str, Any]]) -> None:
    from memdecay.study.document import interval, number
    from memdecay.study.trace_report import known

    if not lines:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("budget", "target", "share of full", "w/t/l"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        met = line["best"]
        value, low, high = (known(line[name]) for name in ("share", "low", "high"))
        table.add_row(
            line["setting"],
            line["policy"],
            f"{line['budget']:.0%}",
            number(known(line["target"])),
            interval(value, low, high),
            "/".join(str(met[name]) for name in ("won", "tied", "lost")) if met else "–",
        )
    out = _terminal.out()
    out.print("Outside the system region; w/t/l: scenarios won, tied, lost, best peer")
    out.print(table)
