"""The command line: its commands, and how it fails."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from memdecay.cli import (
    calibrate,
    demo,
    doctor,
    label,
    policies,
    run,
    study,
    study_held_out,
    study_report,
    study_tiers,
    study_traces,
)
from memdecay.errors import MemDecayError
from memdecay.provenance import versions

app = typer.Typer(
    name="memdecay",
    help="Run an LLM agent in a fixed KV cache: pin its instructions, forget what is least needed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(
    help="Run the paper's study, check its scenarios, and report it.", no_args_is_help=True
)


def _add(to: typer.Typer, function: Callable[..., None], example: str) -> None:
    # The lines of a docstring are as long as the source likes; help is as wide as the terminal.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    words = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    name = function.__name__.replace("_", "-")
    to.command(name, help=words, epilog=f"Example: {example}")(function)


for command in (demo, run, calibrate):
    _add(app, getattr(command, command.__name__.rpartition(".")[2]), command.EXAMPLE)
_add(study_app, study.run, study.RUN_EXAMPLE)
_add(study_app, study_report.report, study_report.EXAMPLE)
_add(study_app, study_held_out.held_out, study_held_out.EXAMPLE)
_add(study_app, study_tiers.tiers, study_tiers.EXAMPLE)
_add(study_app, study_tiers.tiers_report, study_tiers.REPORT_EXAMPLE)
_add(study_app, study.episodes, study.EPISODES_EXAMPLE)
_add(study_app, study.export, study.EXPORT_EXAMPLE)
_add(study_app, study_traces.traces, study_traces.EXAMPLE)
_add(study_app, study_traces.traces_report, study_traces.REPORT_EXAMPLE)
app.add_typer(study_app, name="study")
for command in (label, policies, doctor):
    _add(app, getattr(command, command.__name__.rpartition(".")[2]), command.EXAMPLE)

# Newer typers carry their own copy of click; the base of their usage errors is found, not imported.
_UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        print(f"memdecay {versions()['memdecay']}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Nothing of its own: the commands do the work."""


def run_app(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user's mistake becomes one sentence on stderr and code 2, an interrupt code 130 with every
    file that was finished left in place. Anything else is our mistake and is not caught.
    """
    try:
        code = app(args=args, prog_name="memdecay", standalone_mode=False)
    except MemDecayError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("memdecay: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `memdecay policies | head`: the reader has gone, and flushing at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if isinstance(error, _UsageError):
            return _fail(str(error.format_message()))  # type: ignore[attr-defined]
        raise
    if code == 130:
        print("memdecay: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Be the console script."""
    # A terminal that cannot show a character gets another one, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run_app())


def _fail(message: str) -> int:
    sentence = " ".join(message.split())
    if sentence:  # a bare `memdecay` has printed its help, and there is nothing to add
        print(f"memdecay: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
