"""Find policies by name: every one, ours too, is an entry point of the group below."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from memdecay.errors import PolicyError
from memdecay.policy.base import NEEDS, Policy

GROUP = "memdecay.policies"
"""The entry point group; `name = "module:Class"` in a package's metadata adds a policy."""
DEFAULT_POLICY = "memdecay"
"""What decides when nobody says what should: in sessions, caches and commands."""


def available() -> list[str]:
    """Return the names of all installed policies, sorted; none of them is imported.

    Raises:
        PolicyError: two installed packages declare the same name.
    """
    return sorted(_entry_points())


def policy_class(name: str) -> type[Policy]:
    """Import the policy of this name and return its class.

    Raises:
        PolicyError: the name is unknown, or what is installed under it is not a policy.
    """
    found = _entry_points()
    if name not in found:
        raise PolicyError(
            f"policy is {name!r}{_hint(str(name), found)}, but it must be one of "
            f"{', '.join(sorted(found))}."
        )
    entry = found[name]
    try:
        loaded = entry.load()
    except Exception as error:
        raise PolicyError(
            f"Policy {name!r} cannot be imported from {entry.value!r} "
            f"({type(error).__name__}: {error})."
        ) from error
    problem = _problem(name, loaded)
    if problem:
        raise PolicyError(f"Policy {name!r} from {entry.value!r} cannot be used: {problem}.")
    cls: type[Policy] = loaded
    return cls


def get_policy(name: str, /, **params: Any) -> Policy:
    """Make the policy of this name.

    Args:
        name: one of `available()`.
        params: its parameters, the fields of its dataclass; those left out keep their defaults.

    Raises:
        PolicyError: the name or a parameter is unknown, or a value is not allowed.
    """
    cls = policy_class(name)
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    allowed = [field.name for field in fields]
    for param in params:
        if param not in allowed:
            raise PolicyError(
                f"Unknown parameter {param!r}{_hint(param, allowed)} of policy {name!r}: "
                f"allowed are {', '.join(allowed) or 'none'}."
            )
    for field in fields:
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if no_default and field.name not in params:
            raise PolicyError(f"Parameter {field.name!r} of policy {name!r} must be given.")
    return cls(**params)


def policy_config(policy: Policy) -> dict[str, Any]:
    """Return what makes this policy again, JSON-able: its name and every parameter."""
    return {"name": policy.name, **dataclasses.asdict(policy)}  # type: ignore[call-overload]


def from_config(config: Mapping[str, Any]) -> Policy:
    """Make a policy from what `policy_config` returned.

    Raises:
        PolicyError: the config has no name, or as `get_policy`.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
        raise PolicyError(f"A policy config must be a mapping with a 'name', not {config!r}.")
    return get_policy(config["name"], **{k: v for k, v in config.items() if k != "name"})


def _entry_points() -> dict[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        if entry.name in found:
            raise PolicyError(
                f"Policy {entry.name!r} is declared twice, by {_source(found[entry.name])} and "
                f"{_source(entry)}: uninstall one of them."
            )
        found[entry.name] = entry
    return found


def _source(entry: metadata.EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.value!r}{package}"


def _problem(name: str, loaded: object) -> str | None:
    """Say why an entry point is not a policy, or return None."""
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        return "it is not a subclass of memdecay.policy.Policy"
    params = getattr(loaded, "__dataclass_params__", None)
    if params is None or not params.frozen:
        return "it is not a frozen dataclass"
    if getattr(loaded, "name", None) != name:
        return f"its name is {getattr(loaded, 'name', None)!r}"
    if not isinstance(getattr(loaded, "summary", None), str):
        return "it has no summary"
    if not set(loaded.needs) <= NEEDS:
        return f"its needs {sorted(loaded.needs)} go beyond {sorted(NEEDS)}"
    return None


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
