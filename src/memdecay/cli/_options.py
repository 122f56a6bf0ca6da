"""The options that several commands share, and the checks that come before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memdecay.errors import PolicyError, ProfileError

if TYPE_CHECKING:
    from memdecay.policy.base import Policy
    from memdecay.regions import Profile

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A local directory, a GGUF file, a hub name, or smollm2."),
]
BudgetText = Annotated[
    str, typer.Option("--budget", "-b", help="Tokens (1024), or a share of the conversation (25%).")
]
Retrievers = Annotated[
    list[str] | None,
    typer.Option("--retriever", help="A tool whose outputs are documents; may be repeated."),
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="A region profile in YAML instead of the default.")
]


def policies(names: Sequence[str]) -> dict[str, Policy]:
    """Make the policies of these names, each once, in order.

    Raises:
        PolicyError: a name is unknown; the message suggests a near one.
    """
    from memdecay.policy.registry import get_policy

    return {name: get_policy(name) for name in dict.fromkeys(names)}


def names(text: str | None, option: str = "--compare") -> list[str]:
    """Read `h2o,streaming`.

    Raises:
        PolicyError: there is an empty name in the list.
    """
    if text is None:
        return []
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise PolicyError(
            f"{option} is {text!r}, but must be policy names with commas between, "
            f"such as full,streaming."
        )
    return found


def profile(path: Path | None) -> Profile:
    """Load the profile of this path, or the default one.

    Raises:
        ProfileError: there is no such file, or it is not a profile.
    """
    from memdecay.regions import Profile

    if path is None:
        return Profile.default()
    if not path.is_file():
        raise ProfileError(f"--profile is '{path}', but there is no such file.")
    return Profile.load(path)
