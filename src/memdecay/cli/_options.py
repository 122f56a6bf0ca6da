"""The options that several commands share, and the checks that come before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memdecay.cli._budget import Budget, parse_budget
from memdecay.errors import BudgetError, MemDecayError, PolicyError, ProfileError
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
QuantizedText = Annotated[
    str | None,
    typer.Option(
        "--quantized",
        help="With --tiers: so many tokens more stay in the cache at fewer bits, written as "
        "--budget is; 0 for none, all for no limit.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option("--bits", help="Bits a number of them takes: 4 or 8.", show_default="4"),
]
WITH_TIERS = "+tiers"
"""What the name of a policy ends with where its session has tiers."""
_MANY = 10**6
"""Tokens of a conversation of which any share is some."""


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


@dataclass(frozen=True)
class AskedTiers:
    """Tiers as they were asked for: memory without a limit, and perhaps fewer bits before it.

    Args:
        text: how many tokens at fewer bits, as it was asked for.
        quantized: the same as tokens or a share; None for any number of them, 0 for none.
        bits: 4 or 8.
    """

    text: str = "0"
    quantized: Budget | int | None = 0
    bits: int = 4

    @property
    def graded(self) -> bool:
        """Whether some tokens are at fewer bits."""
        return self.quantized != 0

    def resolve(self, total: int) -> Tiers:
        """Return the settings for a conversation of `total` tokens.

        Raises:
            BudgetError: the share of this conversation is less than one token.
        """
        from memdecay.tiers import Tiers

        asked = self.quantized
        tokens = asked.resolve(total) if isinstance(asked, Budget) else asked
        return Tiers(quantized=tokens, bits=self.bits)

    def told(self, total: int) -> dict[str, Any]:
        """Return what `--json` says of it for a conversation of `total` tokens."""
        return {
            "quantized": self.text,
            "quantized_tokens": self.resolve(total).quantized,
            "bits": self.bits if self.graded else None,
        }

    def flags(self) -> str:
        """Return the options that ask for the same."""
        return f" --tiers --quantized {self.text}" + (f" --bits {self.bits}" if self.graded else "")


def asked_tiers(
    tiers: bool, quantized: str | None, bits: int | None, *, otherwise: str = "0"
) -> AskedTiers | None:
    """Read `--tiers`, `--quantized` and `--bits`; None without tiers.

    Args:
        tiers: whether it was given.
        quantized: likewise, None if it was not.
        bits: likewise.
        otherwise: what `quantized` is if it was not.

    Raises:
        BudgetError, MemDecayError: one is not usable, or has no effect without another.
    """
    for option, value in (("--quantized", quantized), ("--bits", bits)):
        if value is not None and not tiers:
            raise MemDecayError(f"{option} is {value!r}, but --tiers is not given; add it.")
    if not tiers:
        return None
    if bits not in (None, 4, 8):
        raise MemDecayError(f"--bits is {bits}, but must be 4 or 8.")
    text = (otherwise if quantized is None else quantized).strip()
    if text == "0" and bits is not None:
        raise MemDecayError(
            f"--bits is {bits}, but no token is at fewer bits; give --quantized a number of "
            f"tokens, such as 1024 or 25%, or all."
        )
    if text in ("0", "all"):
        return AskedTiers(text, 0 if text == "0" else None, bits or 4)
    try:
        asked = parse_budget(text)
    except BudgetError:
        raise BudgetError(
            f"--quantized is {text!r}, but must be a whole number of tokens, such as 1024, a share "
            f"above 0% and up to 100%, such as 25%, 0 for none, or all."
        ) from None
    return AskedTiers(text, dataclasses.replace(asked, option="--quantized"), bits or 4)


def check_precision(asked: AskedTiers | None, budget: Budget, policy: Policy) -> None:
    """Refuse a budget in tokens that is too small for others to be at fewer bits.

    Raises:
        BudgetError: it is.
    """
    if asked is not None and asked.graded and budget.tokens is not None:
        asked.resolve(_MANY).cache_settings(budget.tokens, policy, None)


def summary_of(name: str, policy: Policy, asked: AskedTiers | None) -> str:
    """Return one line on a session by what it is called."""
    if asked is None or not name.endswith(WITH_TIERS):
        return policy.summary
    lower = f"; what loses its place goes to {asked.bits} bits first" if asked.graded else ""
    return f"{policy.summary}{lower}; what it evicts can come back"


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
