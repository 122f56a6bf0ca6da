"""Models whose evidence heads were measured beforehand; they come with the package."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from memdecay.evidence import SETS, Evidence
from memdecay.regions import Profile

_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Known:
    """A model whose heads are known.

    Args:
        name: of the model.
        evidence: its heads.
        about: how they were measured, its shape (`shape_of`) among it.
    """

    name: str
    evidence: Evidence
    about: Mapping[str, Any]


def shape_of(config: Any) -> dict[str, Any]:
    """Return what tells models of one family, size and generation from others.

    Models that were trained further from one another have one shape, and share their heads as far
    as training left them.

    Args:
        config: of a transformers model.
    """
    shape = {name: getattr(config, name, None) for name in _SHAPE}
    shape["rope_theta"] = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return shape


@functools.cache
def known_models() -> tuple[Known, ...]:
    """Return the models of the package, by name; none if their folder is not there."""
    folder = resources.files("memdecay") / "profiles"
    if not folder.is_dir():
        return ()
    found = []
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        if file.name.endswith(_SUFFIX):
            with resources.as_file(file) as path:
                profile = Profile.load(path)
            name = file.name.removesuffix(_SUFFIX)
            found.append(Known(name, profile.evidence, profile.provenance))
    return tuple(found)


def known_for(config: Any) -> Known | None:
    """Return the known model of this shape.

    Args:
        config: of a transformers model.
    """
    shape = shape_of(config)
    return next((one for one in known_models() if one.about["shape"] == shape), None)


def with_known(profile: Profile, config: Any) -> Profile:
    """Return a profile that says which evidence heads there are.

    Its own if it says so, else those known for the model, else none. What is known for is in its
    provenance, and so is how it was measured.

    Args:
        profile: region policies, perhaps with heads.
        config: of the transformers model that it is used with.
    """
    if profile.evidence_given:
        return profile
    known = known_for(config)
    if known is None:
        return profile.with_evidence({})
    about = {"known_for": known.name, **known.about}
    found = profile.with_evidence(known.evidence)
    return found.with_provenance({**found.provenance, "evidence": about})


def describe(profile: Profile) -> str:
    """Say which evidence heads a profile has and whose they are, such as for a report."""
    counts = [
        f"{len(profile.evidence[name])} for {name}" for name in SETS if profile.evidence.get(name)
    ]
    if not counts:
        return "none; memdecay calibrate measures them"
    about = profile.provenance.get("evidence")
    name = about.get("known_for") if isinstance(about, Mapping) else None
    whose = f"known for {name}" if name else "of the profile"
    return f"{', '.join(counts)}, {whose}"
