"""What every command shares: where words, numbers, progress and files go."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from memdecay.errors import MemDecayError
from memdecay.provenance import commit, versions

SEED = 0
"""The seed of everything random in a command; the models themselves decode greedily."""


def out() -> Console:
    """Return the console of stdout, as it is now: tests and redirections replace it."""
    return Console(highlight=False)


def err() -> Console:
    """Return the console of stderr, where progress and remarks go."""
    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def results(as_json: bool) -> Iterator[None]:
    """Keep stdout for the one JSON object: whatever a library prints meanwhile goes to stderr."""
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout; ASCII, so that no terminal encoding can break it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def progress() -> Progress:
    """Return a progress display on stderr that leaves nothing behind, and needs a terminal."""
    console = err()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]left[/]"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def check_output(path: Path | None, option: str) -> None:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        MemDecayError: its directory is missing or read-only, or it is a directory itself.
    """
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise MemDecayError(f"{option} is '{path}', but there is no directory '{folder}'.")
    if path.is_dir():
        raise MemDecayError(f"{option} is '{path}', but that is a directory, not a file.")
    if not os.access(folder, os.W_OK):
        raise MemDecayError(f"{option} is '{path}', but '{folder}' cannot be written to.")


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then into its place."""
    handle, partial = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".partial", text=False
    )
    try:
        # mkstemp makes a private file; a page is meant to be read like any other one.
        if hasattr(os, "fchmod"):
            os.fchmod(handle, 0o666 & ~_umask())
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def provenance() -> dict[str, Any]:
    """Return what made a result: versions, seed and, in a checkout, the commit."""
    return {"versions": versions(), "seed": SEED, "commit": commit()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
