"""Regions and profiles: defaults, files, comments, and every way to get them wrong."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memdecay.errors import MemDecayError, ProfileError
from memdecay.regions import REGIONS, Profile, RegionPolicy


def test_defaults_are_those_of_the_design() -> None:
    expected = {
        "system": (1.0, math.inf, True),
        "plan": (0.8, 120, False),
        "user": (0.7, 80, False),
        "tool_in": (0.4, 30, False),
        "tool_out": (0.5, 30, False),
        "retrieval": (0.5, 30, False),
        "scratchpad": (0.3, 15, False),
    }
    got = {
        name: (r.base_priority, pytest.approx(r.half_life), r.pinned)
        for name, r in Profile.default().regions.items()
    }
    assert got == expected
    assert Profile.default().names == REGIONS == tuple(expected)


def test_half_life_is_equation_7() -> None:
    region = RegionPolicy.from_half_life(1.0, 30)
    assert math.exp(-region.decay_rate * 30) == pytest.approx(0.5)
    assert region.half_life == pytest.approx(30)
    assert RegionPolicy(1, 0).half_life == math.inf
    assert RegionPolicy.from_half_life(1, math.inf).decay_rate == 0


def test_ids_and_names_are_inverse() -> None:
    profile = Profile.default().with_region("notes", RegionPolicy(0.6, 0.01))
    assert [profile.id(name) for name in profile.names] == list(range(8))
    assert [profile.name(i) for i in range(8)] == [*REGIONS, "notes"]
    for bad in (8, -1):
        with pytest.raises(ProfileError, match="0 to 7"):
            profile.name(bad)


def test_an_unknown_label_lists_the_known_ones_and_a_near_one() -> None:
    with pytest.raises(ProfileError) as caught:
        Profile.default().id("tool_output")
    message = str(caught.value)
    assert "'tool_output'" in message and "did you mean 'tool_out'?" in message
    assert all(name in message for name in REGIONS)
    with pytest.raises(ProfileError) as caught:
        Profile.default().id("xyzzy")
    assert "did you mean" not in str(caught.value)


def test_tensors_are_by_region_index_and_new_each_time() -> None:
    profile = Profile.default()
    base_priority, decay_rate, pinned = profile.tensors("cpu")
    assert base_priority.dtype == decay_rate.dtype == torch.float32 and pinned.dtype == torch.bool
    assert base_priority[profile.id("plan")].item() == pytest.approx(0.8)
    assert decay_rate[profile.id("scratchpad")].item() == pytest.approx(math.log(2) / 15)
    assert pinned.tolist() == [True] + [False] * 6
    base_priority.zero_()
    assert profile.tensors("cpu")[0][0] == 1.0


def test_a_profile_is_immutable_and_a_value() -> None:
    profile = Profile.default()
    other = profile.with_region("plan", RegionPolicy(2.0, 0.0, True))
    assert profile.regions["plan"].base_priority == 0.8
    assert other.regions["plan"].base_priority == 2.0 and other != profile
    with pytest.raises(TypeError):
        profile.regions["plan"] = RegionPolicy(1, 1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        profile.names = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        profile.regions["plan"].pinned = True  # type: ignore[misc]
    assert Profile.default() == profile and hash(Profile.default()) == hash(profile)
    assert copy.deepcopy(other) == pickle.loads(pickle.dumps(other)) == other
    stamped = profile.with_provenance({"traces": ["a"]})
    stamped.provenance["traces"].append("b")
    assert stamped.provenance == {"traces": ["a"]} and stamped != profile


def test_user_regions_keep_the_indices_of_the_seven(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("notes: {base_priority: 0.6, half_life: 40}\n")
    profile = Profile.load(tmp_path / "p.yaml")
    assert profile.names == (*REGIONS, "notes")
    assert profile.regions["plan"] == Profile.default().regions["plan"]


def test_one_line_a_region_and_back(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile = Profile.default().with_region("notes", RegionPolicy(0.25, 0.0123456789))
    profile.save(path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "system: {base_priority: 1.0, half_life: inf, pinned: true}"
    assert lines[1] == "plan: {base_priority: 0.8, half_life: 120}"
    assert len(lines) == 8
    assert Profile.load(path) == profile  # exactly, whichever way a rate is written
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.parametrize("rate", [0.0, 1e-12, 1 / 3, math.log(2) / 7.5, 123.456, 1e-320])
def test_every_rate_survives_a_file(tmp_path: Path, rate: float) -> None:
    profile = Profile.default().with_region("user", RegionPolicy(0.1 + 0.2, rate))
    profile.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == profile


@pytest.mark.parametrize("endless", ["inf", ".inf", "'inf'", ".Inf"])
def test_an_endless_half_life_has_any_spelling(tmp_path: Path, endless: str) -> None:
    (tmp_path / "p.yaml").write_text(f"user: {{base_priority: 1, half_life: {endless}}}\n")
    assert Profile.load(tmp_path / "p.yaml").regions["user"].decay_rate == 0


COMMENTED = """\
# fitted by hand, do not trust
system: {base_priority: 1.0, half_life: inf, pinned: true}  # never goes
# plans are long-lived here
plan: {base_priority: 0.80, decay_rate: 0.005}  # about 140 steps
user: {base_priority: 0.7, half_life: 80}
tool_in: {base_priority: 0.4, half_life: 30}
tool_out: {base_priority: 0.5, half_life: 30}

# documents
retrieval: {base_priority: 0.5, half_life: 30}
scratchpad: {base_priority: 0.3, half_life: 15}
"""


def test_comments_survive_load_change_save(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(COMMENTED)
    Profile.load(path).save(path)
    assert path.read_text() == COMMENTED  # what did not change keeps its spelling
    changed = Profile.load(path).with_region("retrieval", RegionPolicy.from_half_life(0.5, 300))
    changed = changed.with_provenance({"traces": 12})
    changed.save(path)
    assert (
        path.read_text()
        == COMMENTED.replace(
            "retrieval: {base_priority: 0.5, half_life: 30}",
            "retrieval: {base_priority: 0.5, half_life: 300}",
        )
        + "provenance:\n  traces: 12\n"
    )
    assert Profile.load(path) == changed
    again = Profile.load(path).with_region("user", RegionPolicy(0.7, 0.0))
    again.save(path)
    assert "# about 140 steps" in path.read_text() and again.provenance == {"traces": 12}


def test_a_comment_on_a_changed_line_survives(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(COMMENTED)
    Profile.load(path).with_region("plan", RegionPolicy.from_half_life(0.9, 60)).save(path)
    # The comment stays in its column.
    assert path.read_text() == COMMENTED.replace(
        "plan: {base_priority: 0.80, decay_rate: 0.005}",
        "plan: {base_priority: 0.9, half_life: 60}     ",
    )


def test_comments_inside_a_region_survive(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("user:\n  base_priority: 0.7  # measured\n  half_life: 80\nprovenance:\n")
    Profile.load(path).with_region("user", RegionPolicy.from_half_life(0.7, 90)).save(path)
    start = "user:\n  base_priority: 0.7  # measured\n  half_life: 90\n"
    assert path.read_text().startswith(start)


BAD_FILES = {
    "unknown field": ("user: {base_priority: 1, half_life: 2, halflife: 3}", "'halflife'"),
    "near field": ("user: {base_priority: 1, halflife: 3}", "did you mean 'half_life'?"),
    "negative": ("user: {base_priority: -1, half_life: 2}", "base_priority is -1"),
    "negative rate": ("user: {base_priority: 1, decay_rate: -0.5}", "decay_rate is -0.5"),
    "negative half-life": (
        "user: {base_priority: 1, half_life: -3}",
        "half_life is -3, but it must be a number of steps above 0",
    ),
    "zero half-life": ("user: {base_priority: 1, half_life: 0}", "above 0"),
    "tiny half-life": ("user: {base_priority: 1, half_life: 1e-310}", "above 0"),
    "nan": ("user: {base_priority: .nan, half_life: 2}", "base_priority is nan"),
    "nan half-life": ("user: {base_priority: 1, half_life: .nan}", "half_life is nan"),
    "infinite base": ("user: {base_priority: .inf, half_life: 2}", "base_priority is inf"),
    "infinite rate": ("user: {base_priority: 1, decay_rate: .inf}", "decay_rate is inf"),
    "huge": (f"user: {{base_priority: 1{'0' * 400}, half_life: 2}}", "base_priority"),
    "beyond float32": ("user: {base_priority: 1.0e+39, half_life: 2}", "base_priority is 1e+39"),
    "half-life beyond float32": ("user: {base_priority: 1, half_life: 1e-39}", "above 0"),
    "bool number": ("user: {base_priority: true, half_life: 2}", "base_priority is True"),
    "text number": ("user: {base_priority: high, half_life: 2}", "base_priority is 'high'"),
    "null number": ("user: {base_priority: , half_life: 2}", "base_priority is None"),
    "list number": ("user: {base_priority: [1], half_life: 2}", "base_priority is [1]"),
    "pinned number": ("user: {base_priority: 1, half_life: 2, pinned: 1}", "pinned is 1"),
    "pinned text": ("user: {base_priority: 1, half_life: 2, pinned: 'yes'}", "pinned is 'yes'"),
    "no base": ("user: {half_life: 2}", "'base_priority' is missing"),
    "no rate": ("user: {base_priority: 1}", "one of half_life and decay_rate"),
    "both rates": ("user: {base_priority: 1, half_life: 2, decay_rate: 1}", "one of"),
    "region is a number": ("user: 3", "Region 'user' must be a mapping"),
    "region is empty": ("user:", "not empty"),
    "region is a list": ("user: [1, 2]", "Region 'user' must be a mapping"),
    "duplicate region": (
        "user: {base_priority: 1, half_life: 2}\nuser: {base_priority: 1, half_life: 3}",
        "'user' is given twice (line 2)",
    ),
    "duplicate field": ("user: {base_priority: 1, base_priority: 2}", "'base_priority' is given"),
    "number as name": ("3: {base_priority: 1, half_life: 2}", "Region name is 3"),
    "name with spaces": ("'a b': {base_priority: 1, half_life: 2}", "Region name is 'a b'"),
    "empty name": ("'': {base_priority: 1, half_life: 2}", "Region name is ''"),
    "list": ("- user\n- system", "not a list"),
    "text": ("hello", "must be a mapping"),
    "empty": ("", "empty"),
    "comment only": ("# nothing\n", "empty"),
    "not yaml": ("user: {base_priority: 1", "not valid YAML"),
    "tabs": ("user:\n\t- x", "not valid YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not valid YAML"),
    "provenance": ("provenance: 3", "provenance must be a mapping"),
    "false provenance": ("provenance: false", "provenance must be a mapping"),
    "odd provenance": ("provenance: {when: 2020-01-01}", "provenance.when"),
    "python tag": ("user: !!python/object:os.system {}", "base_priority"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_sentence(tmp_path: Path, case: str) -> None:
    source, expected = BAD_FILES[case]
    path = tmp_path / "p.yaml"
    path.write_text(source)
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    one_sentence(str(caught.value))
    assert expected in str(caught.value)
    assert "p.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"user: \xff\xfe")
    (tmp_path / "zero.yaml").write_bytes(b"user: \x00")
    for name, expected in {
        "missing.yaml": "does not exist",
        "": "cannot be read",
        "latin.yaml": "UTF-8",
        "zero.yaml": "not valid YAML",
    }.items():
        with pytest.raises(ProfileError, match=expected) as caught:
            Profile.load(tmp_path / name)
        one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: RegionPolicy(-1, 0), "base_priority is -1"),
        (lambda: RegionPolicy(1, math.nan), "decay_rate is nan"),
        (lambda: RegionPolicy(True, 0), "base_priority is True"),
        (lambda: RegionPolicy("1", 0), "base_priority is '1'"),  # type: ignore[arg-type]
        (lambda: RegionPolicy(1, 0, 1), "pinned is 1"),  # type: ignore[arg-type]
        (lambda: RegionPolicy.from_half_life(1, 0), "half_life is 0"),
        (lambda: RegionPolicy.from_half_life(1, True), "half_life is True"),
        (lambda: Profile({"a b": RegionPolicy(1, 0)}), "Region name is 'a b'"),
        (lambda: Profile({"provenance": RegionPolicy(1, 0)}), "Region name is 'provenance'"),
        (lambda: Profile({"user": 0.5}), "must be a RegionPolicy"),  # type: ignore[dict-item]
        (lambda: Profile.from_dict([]), "not a list"),  # type: ignore[arg-type]
        (lambda: Profile.default().id(None), "region is None"),  # type: ignore[arg-type]
        (lambda: Profile({}, provenance={"x": object()}), "provenance.x"),
    ],
)
def test_bad_values_in_code_are_one_sentence(make: object, expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        make()  # type: ignore[operator]
    one_sentence(str(caught.value))
    assert expected in str(caught.value)
    assert isinstance(caught.value, MemDecayError) and isinstance(caught.value, ValueError)


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    Profile.default().save(path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ProfileError, match="No space left") as caught:
        Profile.default().with_region("user", RegionPolicy(9, 9)).save(path)
    one_sentence(str(caught.value))
    assert path.read_text() == before and os.listdir(tmp_path) == ["p.yaml"]


def test_a_save_into_nowhere_is_one_sentence(tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "p.yaml", tmp_path):
        with pytest.raises(ProfileError, match="cannot be written") as caught:
            Profile.default().save(target)
        one_sentence(str(caught.value))
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(COMMENTED)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    Profile.default().save(tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert Profile.load(tmp_path / "real.yaml") == Profile.default()


def test_policies_and_regions_do_not_import_transformers() -> None:
    code = (
        "import sys, memdecay, memdecay.regions, memdecay.policy as p; "
        "[p.get_policy(n) for n in p.available()]; print('transformers' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


def one_sentence(message: str) -> None:
    """One line that ends with the only full stop that is followed by the end or a capital."""
    assert "\n" not in message and message.endswith("."), message
    assert ". " not in message[:-1].replace(".yaml'", ""), message
