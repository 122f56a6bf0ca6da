"""`memdecay policies`: what can decide what is forgotten."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from memdecay.cli import _terminal

EXAMPLE = "memdecay policies --json"


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the installed eviction policies with what they need and their parameters.

    The default comes first.
    """
    with _terminal.results(as_json):
        found = _found()
    if as_json:
        _terminal.print_json({"policies": found, **_terminal.provenance()})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for policy in found:
        lines = Text(policy["summary"])
        if policy["needs"]:
            lines.append(f"\nneeds {' and '.join(policy['needs'])}", style="dim")
        if policy["bounded"]:
            tokens = "single tokens" if policy["page_size"] == 1 else "tokens"
            size = "" if policy["page_size"] == 1 else f"pages of {policy['page_size']} "
            lines.append(f"\nevicts {size}{tokens}", style="dim")
        for name, value in policy["parameters"].items():
            lines.append(f"\n{name} = {json.dumps(value)}", style="dim")
        name = Text(policy["name"])
        if policy["default"]:
            name.append("\ndefault", style="not bold dim")
        table.add_row(name, lines.append("\n"))
    _terminal.out().print(table)


def _found() -> list[dict[str, Any]]:
    from memdecay.policy.registry import DEFAULT_POLICY, available, policy_class

    found = []
    for name in sorted(available(), key=lambda name: (name != DEFAULT_POLICY, name)):
        cls = policy_class(name)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        found.append(
            {
                "name": name,
                "default": name == DEFAULT_POLICY,
                "needs": sorted(cls.needs),
                "bounded": cls.bounded,
                "page_size": cls.page_size,
                "summary": cls.summary,
                "parameters": {field.name: _default(field) for field in fields if field.init},
            }
        )
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return a parameter's default as JSON has it; None where a value must be given."""
    value = field.default
    if value is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return None
        value = field.default_factory()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else str(value)
