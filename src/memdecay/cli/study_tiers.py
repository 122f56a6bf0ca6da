"""`memdecay study tiers` and `tiers-report`: a fixed budget of which what leaves can come back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from memdecay.calibration.extras import require
from memdecay.cli import _options, _terminal
from memdecay.cli.study import NAMED, chosen_setting, chosen_workers
from memdecay.errors import MemDecayError, StudyError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from memdecay.study.tier_play import TierCondition

EXAMPLE = "memdecay study tiers qwen0.5b-short --scenario bakery --out docs/results/runs"


def tiers(
    settings: Annotated[list[str], typer.Argument(metavar="SETTING...", help=f"{NAMED}.")],
    model: Annotated[
        str | None, typer.Option("--model", help="A folder, a GGUF file, a hub name, or smollm2.")
    ] = None,
    tier: Annotated[str | None, typer.Option("--tier", help="short or long.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", help="A scenario by name or YAML file; repeat for more."),
    ] = None,
    variant: Annotated[
        list[int] | None,
        typer.Option("--variant", help="0, 1 or 2; repeat for more. All if left out."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", help="Only these conditions, names with commas; all else."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of runs; each setting has its own in it.")
    ] = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Processes of one thread each; one a core if left out."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="Spread over this Ray cluster; 'local' starts one.")
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Read the study's episodes in sessions of a fixed budget, and ask about the facts in them.

    What leaves the budget is dropped, or can come back by heads, at random, or by an oracle; the
    full cache is read too. A setting needs the profiles of `memdecay study run`. Rows are written
    episode by episode: a run that was ended in any way goes on where it was.
    """
    require("pyarrow", "statsmodels", "scipy", "pandas")
    with _terminal.results(as_json):
        from memdecay.study.run import episodes_of
        from memdecay.study.tier_run import run_tiers

        named = [
            chosen_setting(name, model, tier, dtype, scenario, variant, None)
            for name in dict.fromkeys(settings)
        ]
        conditions = {one.name: _conditions(one.tier, policies) for one in named}
        counts = {one.name: len(episodes_of(one)) for one in named}
        if out.exists() and not out.is_dir():
            raise StudyError(f"--out is '{out}', but that is a file; it must be a folder of runs.")
        workers = chosen_workers(jobs, ray, max(counts.values()))
        said, notes = [], []
        with _terminal.progress() as bar:
            lines = {
                name: bar.add_task(f"{name}: reading and asking", total=count)
                for name, count in counts.items()
            }
            try:
                for one in named:
                    folder, left_out = run_tiers(
                        one,
                        out,
                        workers,
                        conditions=conditions[one.name],
                        advance=partial(_advance, bar, lines[one.name]),
                    )
                    notes += left_out
                    episodes = counts[one.name]
                    said.append({"setting": one.name, "folder": str(folder), "episodes": episodes})
            except KeyboardInterrupt:
                _terminal.err().print("What is done stays; the same command goes on from there.")
                raise
    if as_json:
        _terminal.print_json({"runs": said, "notes": notes})
        return
    console = _terminal.out()
    for note in notes:
        console.print(f"Note: {note}", soft_wrap=True, markup=False)
    for line in said:
        console.print(f"The rows are in {line['folder']}.", soft_wrap=True, markup=False)


def _advance(bar: Progress, line: TaskID, kind: str, share: float) -> None:
    bar.advance(line, share)


def _conditions(tier: str, policies: str | None) -> list[TierCondition]:
    """Return the conditions of a tier that are asked for.

    Raises:
        StudyError: one has no such name.
    """
    from memdecay.study.tier_play import tier_conditions

    known = tier_conditions(tier)
    if policies is None:
        return [*known]
    names = dict.fromkeys(one.name for one in known)
    wanted = [name.strip() for name in policies.split(",")]
    for name in wanted:
        if name not in names:
            raise StudyError(
                f"--policies is {policies!r}, but it must be names with commas between, of "
                f"{', '.join(names)}."
            )
    return [one for one in known if one.name in wanted]


REPORT_EXAMPLE = (
    "memdecay study tiers-report docs/results/runs -o docs/results/tiers.md "
    "--cells docs/results/tiers.json"
)


def tiers_report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of settings, or folders of such folders.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The Markdown file to write.")],
    cells: Annotated[Path, typer.Option("--cells", help="The JSON file of cells to write.")],
    setting: Annotated[
        list[str] | None, typer.Option("--setting", help="Only this setting; may be repeated.")
    ] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--traces", help="A folder that `study traces` wrote; may be repeated."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="What benchmarks/tiers.py --json wrote.")
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Write what tiers reached: targets first, then recall, differences and bytes by setting.

    Tiers are held against the full cache, against dropping, and against bounds of how well pages
    can be chosen. The same rows give the same files, byte by byte.
    """
    require("pandas", "pyarrow", "scipy", "statsmodels")
    _terminal.check_output(output, "--output")
    _terminal.check_output(cells, "--cells")
    if output.resolve() == cells.resolve():
        raise MemDecayError(f"--cells is '{cells}', but that is --output; they must be two files.")
    with _terminal.results(as_json):
        from memdecay.study.held_out_report import gather_traces
        from memdecay.study.report import find_runs
        from memdecay.study.tier_report import cells_json, document, goals, read, read_costs
        from memdecay.study.tier_run import FOLDER

        measured = read_costs(costs)
        found = read(find_runs(runs, setting, (FOLDER,), "tiers"))
        played = gather_traces(traces or ())
        met = goals(found, played, measured)
        _terminal.write_file(output, document(found, played, measured))
        _terminal.write_file(cells, cells_json(found))
    if as_json:
        files = [str(output), str(cells)]
        _terminal.print_json({"targets": [goal.to_dict() for goal in met], "files": files})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "where", "target", "found", "reached"):
        table.add_column(heading, overflow="fold")
    said = {True: "yes", False: "no", None: "-"}
    for goal in met:
        what = goal.what.replace("`", "")
        table.add_row(what, goal.where, goal.goal, goal.found, said[goal.reached])
    _terminal.out().print(table)
    _terminal.out().print(f"Wrote {output}, {cells}", soft_wrap=True, markup=False)
