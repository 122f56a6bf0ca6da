"""Profiles from fits: only rates change, and they say where they are from and whose they are."""

from __future__ import annotations

import math

import pytest

from engine.sessions import tiny
from memdecay.calibration.fit import Fit, half_life
from memdecay.calibration.profile import calibrated, check_profile
from memdecay.engine.saving import tokenizer_digest
from memdecay.errors import ProfileError
from memdecay.regions import Profile, RegionPolicy


def fitted(region, rate, status="measured"):
    life = half_life(rate)
    return Fit(region, True, rate, life, life / 2, life * 2, 0.9, -4.0, -rate, 1000, 20, 8, status)


def missing(region):
    return Fit(region, False, *(math.nan,) * 7, 12, 1, 1, f"{region} has only 12 observations")


FITS = {
    "system": fitted("system", 0.0041234567),
    "user": fitted("user", 0.0, "it does not decay"),
    "tool_out": fitted("tool_out", math.log(2) / 40),
    "plan": missing("plan"),
}


def test_only_the_rates_of_measured_regions_change():
    base, made = Profile.default(), calibrated(FITS)
    for name, policy in base.regions.items():
        now = made.regions[name]
        assert (now.base_priority, now.pinned) == (policy.base_priority, policy.pinned)
        if name not in ("system", "user", "tool_out"):
            assert now == policy
    assert made.regions["system"].pinned
    assert made.regions["system"].decay_rate == pytest.approx(0.0041234567, rel=1e-3)
    assert made.regions["tool_out"].half_life == pytest.approx(40, rel=1e-3)
    assert made.regions["user"].half_life == math.inf


def test_a_base_profile_keeps_its_own_regions_and_rates():
    base = Profile.default().with_region("notes", RegionPolicy(0.6, 0.5, pinned=True))
    made = calibrated(FITS, base=base.with_region("tool_out", RegionPolicy(0.9, 0.1)))
    assert made.regions["notes"] == RegionPolicy(0.6, 0.5, pinned=True)
    assert made.regions["tool_out"].base_priority == 0.9
    assert made.regions["tool_out"].half_life == pytest.approx(40)
    assert made.provenance["regions"]["notes"]["why"] == "notes was not among what was measured"


def test_a_file_says_where_each_number_is_from(tmp_path):
    made = calibrated(FITS, provenance={"model": "m", "burst": 48, "seed": 3})
    made.save(tmp_path / "p.yaml")
    again = Profile.load(tmp_path / "p.yaml")
    assert again == made
    origin = again.provenance
    assert (origin["model"], origin["burst"], origin["seed"]) == ("m", 48, 3)
    assert origin["regions"]["plan"] == {
        "source": "default",
        "why": "plan has only 12 observations",
    }
    assert origin["regions"]["user"]["why"] == "it does not decay"
    tool_out = origin["regions"]["tool_out"]
    assert tool_out == {
        "source": "measured",
        "half_life": 40.0,
        "low": 20.0,
        "high": 80.0,
        "r2": 0.9,
        "observations": 1000,
        "buckets": 20,
        "clusters": 8,
    }
    assert origin["regions"]["scratchpad"]["source"] == "default"
    text = (tmp_path / "p.yaml").read_text()
    assert "tool_out: {base_priority: 0.5, half_life: 40}" in text
    assert "system: {base_priority: 1.0, half_life: 168.1, pinned: true}" in text


def test_a_profile_of_another_tokenizer_is_refused():
    tokenizer, other = tiny()[1], tiny()[1]
    other.add_tokens(["<new>"])
    mine = {"model": "small-model", "tokenizer": tokenizer_digest(tokenizer)}
    made = calibrated(FITS, provenance=mine)
    check_profile(made, tokenizer)
    check_profile(Profile.default(), other)
    check_profile(calibrated(FITS, provenance={"model": "m"}), other)
    with pytest.raises(
        ProfileError, match="another tokenizer, that of 'small-model', than"
    ) as caught:
        check_profile(made, other)
    assert f"{len(other)} tokens" in str(caught.value)
