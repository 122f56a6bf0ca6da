"""The options that several commands share, and the checks that come before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memdecay.errors import PolicyError, ProfileError
from memdecay.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from memdecay.policy.base import Policy
    from memdecay.regions import Profile
    from memdecay.tiers import Tiers

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

TiersFlag = Annotated[
    bool, typer.Option("--tiers", help="Keep what is evicted in memory, to recall.")
]
WITH_TIERS = "+tiers"
"""What the name of a policy ends with where its session has tiers."""


def policies(names: Sequence[str]) -> dict[str, Policy]:
    """Make the policies of these names, each once, in order.

    Raises:
        PolicyError: a name is unknown; the message suggests a near one.
    """
    from memdecay.policy.registry import get_policy

    return {name: get_policy(name) for name in dict.fromkeys(names)}


def check_tiers(policy: Policy) -> None:
    """Refuse a policy that cannot have tiers.

    Raises:
        PolicyError: it never evicts, or heads keep their own tokens by it.
    """
    if not policy.bounded or policy.per_head:
        why = "never evicts" if not policy.bounded else "lets heads keep their own tokens"
        raise PolicyError(
            f"--tiers is given, but policy {policy.name!r} {why}; choose one that evicts the same "
            f"tokens from all heads, such as {DEFAULT_POLICY}."
        )


def tiers_of(name: str) -> Tiers | None:
    """Return the tiers of a session by what it is called; memory without a limit, or none."""
    from memdecay.tiers import Tiers

    return Tiers() if name.endswith(WITH_TIERS) else None


def summary_of(name: str, policy: Policy) -> str:
    """Return one line on a session by what it is called."""
    return policy.summary + ("; what it evicts can come back" if name.endswith(WITH_TIERS) else "")


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
