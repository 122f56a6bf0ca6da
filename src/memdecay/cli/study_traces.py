"""`memdecay study traces` and `traces-report`: what eviction costs on recorded agent traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from memdecay.calibration.extras import require
from memdecay.cli import _options, _terminal
from memdecay.errors import StudyError
from memdecay.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from memdecay.policy.base import Policy
    from memdecay.study.trace_play import TieredPolicy, TraceRun

EXAMPLE = (
    "memdecay study traces traces/ --policies streaming,h2o --budgets 0.5 --out runs/traces/smollm2"
)
_UNITS = {"size": "counting tokens", "trace": "reading traces"}


def traces(
    traces: Annotated[
        list[str], typer.Argument(help="Trace files, folders of them, or short and long.")
    ],
    model: _options.Model = "smollm2",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Names with commas, -tiers, -tiers-graded or -tiers-int4 after one for tiers; "
            "the full cache is always read.",
        ),
    ] = f"{DEFAULT_POLICY},streaming,h2o",
    budgets: Annotated[
        str, typer.Option("--budgets", help="Shares of a trace's tokens, with commas.")
    ] = "0.5,0.25",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cut each trace before the turn that passes this many tokens."),
    ] = None,
    score_chunk: Annotated[
        int,
        typer.Option(
            "--score-chunk",
            min=1,
            help="Assistant tokens read by one forward: 1 is exact decode steps, more is faster.",
        ),
    ] = 32,
    retriever: _options.Retrievers = None,
    profile: _options.ProfilePath = None,
    out: Annotated[Path, typer.Option("--out", help="The folder of this run.")] = Path(
        "runs/traces"
    ),
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Processes of one thread each; one a core if left out."),
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Replay traces under every policy and budget, and compare each with the full cache.

    The recorded assistant tokens are teacher-forced; a row a trace, policy and budget says how much
    likelier the full cache found them, and how often the most likely token stayed the same. Rows
    hold numbers and the trace's name, no text. A run that was ended in any way goes on where it
    was. `memdecay study traces-report` sums up.
    """
    require("pyarrow", "statsmodels", "scipy", "pandas")
    from memdecay.cli._scripts import scripts

    chosen = _policies(_options.names(policies, "--policies"))
    shares = _shares(budgets)
    base = _options.profile(profile)
    found, notes = scripts(traces, retriever or ())
    if out.exists() and not out.is_dir():
        raise StudyError(f"--out is '{out}', but that is a file; it must be the folder of a run.")
    with _terminal.results(as_json):
        from memdecay.study.trace_play import TraceRun
        from memdecay.study.traces import run_traces
        from memdecay.study.workers import Here, Processes, check_jobs, default_jobs

        if jobs is None:
            jobs = default_jobs(len(found))
        check_jobs(jobs)
        run = TraceRun(
            model=model,
            model_name=_model_name(model),
            dtype=dtype,
            profile=base,
            score_chunk=score_chunk,
            max_tokens=max_tokens,
            seed=_terminal.SEED,
        )
        with _terminal.progress() as bar:
            lines = {kind: bar.add_task(text, total=None) for kind, text in _UNITS.items()}
            try:
                notes += run_traces(
                    run,
                    found,
                    chosen,
                    shares,
                    out,
                    Here() if jobs == 1 else Processes(jobs),
                    advance=lambda kind, count: bar.advance(lines[kind], count),
                    planned=lambda kind, total: bar.update(lines[kind], total=total),
                )
            except KeyboardInterrupt:
                _terminal.err().print("What is done stays; the same command goes on from there.")
                raise
    _say(run, out, len(found), notes, as_json=as_json)


def _policies(names: Sequence[str]) -> list[Policy | TieredPolicy]:
    """Make the policies of these names, each once, with tiers where the name ends with that.

    Raises:
        PolicyError: a name is unknown; the message suggests a near one.
        StudyError: a policy cannot have tiers.
    """
    from memdecay.policy.registry import available
    from memdecay.study.trace_play import plain_name, with_tiers

    found: list[Policy | TieredPolicy] = []
    for name in dict.fromkeys(names):
        plain = name if name in available() else plain_name(name)
        policy = _options.policies([plain])[plain]
        found.append(policy if plain == name else with_tiers(policy, name.removeprefix(plain)))
    return found


def _say(run: TraceRun, out: Path, count: int, notes: list[str], *, as_json: bool) -> None:
    from memdecay.study.trace_report import cells, gather

    rows = gather(out)
    if as_json:
        numbers = {"run": out.name, "folder": str(out), "traces": count, **run.settings()}
        _terminal.print_json({**numbers, "cells": cells(rows), "notes": notes})
        return
    console = _terminal.out()
    for note in notes:
        console.print(f"Note: {note}", soft_wrap=True, markup=False)
    _show(cells(rows))
    console.print(
        f"The rows are in {out}. Next: memdecay study traces-report {out} -o {out.name}",
        soft_wrap=True,
        markup=False,
    )


REPORT_EXAMPLE = "memdecay study traces-report runs/traces/smollm2 -o docs/results/traces-smollm2"


def traces_report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run of `study traces`.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="What to write: NAME becomes NAME.md, NAME.json.")
    ],
    as_json: _options.Json = False,
) -> None:
    """Write what a run of traces says: Markdown for people, JSON cells for scripts.

    Numbers are means over traces with 95% bootstrap intervals over them; policies are compared
    trace by trace. The same rows give the same files, byte by byte.
    """
    require("pandas", "pyarrow", "scipy")
    _terminal.check_output(output, "--output")
    with _terminal.results(as_json):
        from memdecay.study.trace_report import cells, cells_json, document, gather

        rows = gather(folder)
        files = {".md": document(folder.resolve().name, rows), ".json": cells_json(rows)}
        written = [output.with_name(output.name + ending) for ending in files]
        for path, text in zip(written, files.values(), strict=True):
            _terminal.write_file(path, text)
    if as_json:
        _terminal.print_json({"cells": cells(rows), "files": [str(path) for path in written]})
        return
    _show(cells(rows))
    _terminal.out().print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True, markup=False)


def _show(found: list[dict[str, Any]]) -> None:
    from memdecay.study.document import interval
    from memdecay.study.trace_report import known

    table = Table(box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("budget", "traces", "Δ NLL / token", "same top token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in found:
        delta, low, high = (known(cell[name]) for name in ("delta_nll", "low", "high"))
        same = [100 * known(cell[f"agreement{end}"]) for end in ("", "_low", "_high")]
        table.add_row(
            cell["policy"],
            f"{cell['budget']:.0%}",
            str(cell["n"]),
            interval(delta, low, high, 3, signed=True),
            interval(same[0], same[1], same[2], 1),
        )
    _terminal.out().print(table)


def _shares(text: str) -> list[float]:
    """Read `0.5,0.25`.

    Raises:
        StudyError: an entry is not a share above 0 and up to 1.
    """
    shares = []
    for entry in text.split(","):
        try:
            share = float(entry)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise StudyError(
                f"--budgets is {text!r}, but it must be shares above 0 and up to 1 with commas "
                f"between, such as 0.5,0.25."
            )
        shares.append(share)
    return list(dict.fromkeys(shares))


def _model_name(model: str) -> str:
    """Return how rows call a model: by the study's own name if it has one, never by a path."""
    from memdecay.study.settings import SETTINGS

    for one in SETTINGS.values():
        if Path(one.model).name == Path(model).name:
            return one.model_name
    return Path(model).name
