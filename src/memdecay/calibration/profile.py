"""From fits to a region profile that says where its numbers came from, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from memdecay.calibration.fit import Fit
from memdecay.engine.saving import tokenizer_digest
from memdecay.errors import ProfileError
from memdecay.regions import Profile, RegionPolicy

_DIGITS = 4
"""Significant digits in the file: far more than the intervals allow, and a person can read them."""


def calibrated(
    fits: Mapping[str, Fit],
    *,
    base: Profile | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Profile:
    """Return a profile with the measured decay rates; everything else is the base profile's.

    Priorities and pins stay: attention says how fast a region is forgotten, not what it is worth.
    A pinned region gets its rate too, which counts once pinning is off.

    Args:
        fits: region -> fit; regions that are not measured keep the base profile's rate.
        base: the profile to start from, the default one if None.
        provenance: what else is to be known of the measurement, such as `about` returns.
    """
    base = base or Profile.default()
    profile = base
    regions = {}
    for name, policy in base.regions.items():
        one = fits.get(name)
        if one is None or not one.measured:
            why = one.status if one else f"{name} was not among what was measured"
            regions[name] = {"source": "default", "why": why}
            continue
        steps = _short(one.half_life)
        changed = RegionPolicy.from_half_life(policy.base_priority, steps, policy.pinned)
        profile = profile.with_region(name, changed)
        numbers = one.to_dict()
        wanted = ("half_life", "low", "high", "r2", "observations", "buckets", "clusters")
        regions[name] = {
            "source": "measured",
            **({} if one.status == "measured" else {"why": one.status}),
            **{key: _short(numbers[key]) for key in wanted},
        }
    return profile.with_provenance({**(provenance or {}), "regions": regions})


def check_profile(profile: Profile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a measured profile that belongs to another tokenizer.

    Its lifetimes are counted in that tokenizer's steps. A profile that does not say whose it is
    passes.

    Raises:
        ProfileError: it says so and it is another one.
    """
    whose = profile.provenance.get("tokenizer")
    if whose is not None and whose != tokenizer_digest(tokenizer):
        model = profile.provenance.get("model", "an unknown model")
        raise ProfileError(
            f"The profile was measured with another tokenizer, that of {model!r}, than the one it "
            f"is used with ({type(tokenizer).__name__}, {len(tokenizer)} tokens); measure one with "
            f"memdecay calibrate."
        )


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
