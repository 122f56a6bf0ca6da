"""Models whose evidence heads were measured and come with the package."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from memdecay.evidence import Evidence
from memdecay.regions import Profile

_SHAPE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def shape_of(config: Any) -> dict[str, Any]:
    """Return what tells models of one family and size from others."""
    return {name: getattr(config, name, None) for name in _SHAPE}


@functools.cache
def known_profiles() -> dict[str, Profile]:
    """Return the profiles of the package, by the name of the model they were measured on."""
    folder = resources.files("memdecay") / "profiles"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        if file.name.endswith(".yaml"):
            with resources.as_file(file) as path:
                found[file.name.removesuffix(".yaml")] = Profile.load(path)
    return found


def known_evidence(config: Any) -> Evidence:
    """Return the evidence heads of a model; no sets if it is not known.

    A model is known by its shape, so that one fine-tuned from a known one is taken for it.
    """
    shape = shape_of(config)
    for profile in known_profiles().values():
        if profile.provenance.get("shape") == shape:
            return profile.evidence
    return {}
