"""Evidence heads in a profile: kept whole through files and changes, refused where they are bad."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from memdecay.errors import MemDecayError, ProfileError
from memdecay.evidence import ASK, READ, REPLAY, SETS, EvidenceHead, check_evidence
from memdecay.regions import Profile, RegionPolicy
from test_regions import COMMENTED, one_sentence

ONE = EvidenceHead(3, 1, READ, weight=2.0, mean=-4.25, std=1.5)
TWO = EvidenceHead(0, 7, READ, weight=1.0, mean=-6.1234, std=0.0123)
AGAIN = EvidenceHead(5, 0, REPLAY, weight=3.0, mean=0.0, std=1e-3)
ASKED = EvidenceHead(1, 1, ASK)
EVIDENCE = {"read": (ONE, TWO), "replay": (AGAIN, ONE), "recall": (ASKED,)}


def test_no_heads_by_default() -> None:
    assert Profile.default().evidence == {} and "evidence" not in Profile.default().to_dict()
    assert Profile.default().with_evidence({"read": (), "replay": []}).evidence == {}


def test_saying_that_there_are_none_is_not_saying_nothing(tmp_path: Path) -> None:
    nothing, none = Profile.default(), Profile.default().with_evidence({})
    assert (nothing.evidence_given, none.evidence_given) == (False, True)
    assert nothing != none == Profile({}, evidence={"read": ()})
    assert none.to_dict()["evidence"] == {}
    for profile in (nothing, none):
        for again in (
            Profile.from_dict(profile.to_dict()),
            copy.deepcopy(profile),
            pickle.loads(pickle.dumps(profile)),
            profile.with_provenance({"a": 1}).with_provenance({}),
            profile.with_region("user", profile.regions["user"]),
        ):
            assert again == profile and again.evidence_given == profile.evidence_given
        profile.save(tmp_path / "p.yaml")
        assert Profile.load(tmp_path / "p.yaml") == profile
        assert ("evidence" in (tmp_path / "p.yaml").read_text()) == profile.evidence_given


def test_a_file_that_says_nothing_can_be_told_none(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(COMMENTED)
    assert not Profile.load(path).evidence_given
    Profile.load(path).with_evidence({}).save(path)
    assert path.read_text() == COMMENTED + "evidence: {}\n"


def test_new_heads_leave_out_what_was_said_of_the_old(tmp_path: Path) -> None:
    about = {"model": "m", "evidence": {"known_for": "m"}}
    profile = Profile.default().with_evidence(EVIDENCE).with_provenance(about)
    assert profile.with_region("plan", RegionPolicy(2.0, 0.0)).provenance == about
    assert profile.with_evidence({"read": (ONE,)}).provenance == {"model": "m"}


def test_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile = Profile.default().with_evidence(EVIDENCE).with_provenance({"traces": 3})
    profile.save(path)
    again = Profile.load(path)
    assert again == profile and dict(again.evidence) == EVIDENCE
    assert tuple(again.evidence["replay"]) == (AGAIN, ONE)  # in their order
    lines = path.read_text().splitlines()
    assert "  - {layer: 3, head: 1, when: read, weight: 2.0, mean: -4.25, std: 1.5}" in [
        line.replace("- {", "  - {", 1) if line.startswith("- {") else line for line in lines
    ]
    text = path.read_text()
    again.save(path)
    assert path.read_text() == text
    plain = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(plain) == profile
    for name in SETS:
        assert [set(head) for head in plain["evidence"][name]] == [
            {"layer", "head", "when", "weight", "mean", "std"}
        ] * len(EVIDENCE[name])


def test_a_profile_keeps_its_heads_when_something_else_changes() -> None:
    profile = Profile.default().with_evidence(EVIDENCE)
    for changed in (
        profile.with_region("plan", RegionPolicy(2.0, 0.0)),
        profile.with_region("notes", RegionPolicy(0.5, 0.1)),
        profile.with_provenance({"model": "m"}),
    ):
        assert changed != profile and dict(changed.evidence) == EVIDENCE
    assert dict(profile.with_evidence({"read": [TWO]}).evidence) == {"read": (TWO,)}
    assert dict(profile.evidence) == EVIDENCE
    about = profile.with_provenance({"model": "m"})
    assert about.with_evidence({}).provenance == {"model": "m"}
    assert about.with_evidence({}).evidence == {}


def test_profiles_with_other_heads_are_not_equal() -> None:
    profile = Profile.default().with_evidence(EVIDENCE)
    assert profile == Profile.default().with_evidence(copy.deepcopy(EVIDENCE))
    assert profile == Profile({}, evidence=EVIDENCE)
    assert copy.deepcopy(profile) == pickle.loads(pickle.dumps(profile)) == profile
    louder = EvidenceHead(3, 1, READ, weight=2.5, mean=-4.25, std=1.5)
    for other in (
        {},
        {"read": (ONE, TWO)},
        {"read": (TWO, ONE), "replay": (AGAIN, ONE)},
        {"read": (louder, TWO), "replay": (AGAIN, ONE)},
    ):
        assert profile != Profile.default().with_evidence(other)


def test_the_heads_cannot_be_changed_in_place() -> None:
    given: dict[str, Any] = {"read": [ONE]}
    profile = Profile.default().with_evidence(given)
    given["read"].append(TWO)
    given["replay"] = [AGAIN]
    assert dict(profile.evidence) == {"read": (ONE,)}
    with pytest.raises(TypeError):
        profile.evidence["read"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        profile.evidence["read"][0].weight = 9.0  # type: ignore[misc]


def test_comments_survive_new_heads(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(COMMENTED)
    Profile.load(path).with_evidence({"read": (ONE,)}).save(path)
    assert path.read_text().startswith(COMMENTED)
    assert path.read_text() == COMMENTED + (
        "evidence:\n"
        "  read:\n"
        "  - {layer: 3, head: 1, when: read, weight: 2.0, mean: -4.25, std: 1.5}\n"
    )
    none = Profile.load(path).with_evidence({})
    none.save(path)
    assert path.read_text().startswith(COMMENTED) and Profile.load(path) == none


def test_comments_among_the_heads_survive_what_does_not_change_them(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    written = COMMENTED + (
        "evidence:  # chosen on our own traces\n"
        "  read:\n"
        "  # the best one by far\n"
        "  - {layer: 3, head: 1, when: read, weight: 2, mean: -4.250, std: 1.5}  # twice\n"
    )
    path.write_text(written)
    profile = Profile.load(path)
    assert dict(profile.evidence) == {"read": (ONE,)}
    profile.save(path)
    assert path.read_text() == written
    profile.with_region("retrieval", RegionPolicy.from_half_life(0.5, 300)).save(path)
    assert path.read_text() == written.replace(
        "retrieval: {base_priority: 0.5, half_life: 30}",
        "retrieval: {base_priority: 0.5, half_life: 300}",
    )


HEAD = {"layer": 3, "head": 1, "when": "read", "weight": 2.0, "mean": -4.25, "std": 1.5}


def test_that_head_is_fine() -> None:
    """Else the bad ones below could be bad for another reason."""
    assert check_evidence({"read": [HEAD]}) == {"read": (ONE,)}
    assert EvidenceHead(0, 0, READ, 1, 0, 2) == EvidenceHead(0, 0, READ, 1.0, 0.0, 2.0)
    assert EvidenceHead(0, 0, READ, -1).weight == -1.0


INTEGER = "it must be an integer of at least 0"
ABOVE = "it must be a finite number above 0"
BAD_HEADS = [
    *((name, value, INTEGER) for name in ("layer", "head") for value in (-1, 1.0, True, "1", None)),
    *(
        (name, value, allowed)
        for name, allowed in (("weight", "it must be a finite number other than 0"), ("std", ABOVE))
        for value in (0, 0.0, float("nan"), float("inf"), True, "1", None, [1], 10**400, 1e39)
    ),
    ("std", -1, ABOVE),
    ("weight", -1e39, "it must be a finite number other than 0"),
    *(
        ("mean", value, "it must be a finite number.")
        for value in (float("nan"), -float("inf"), False, "-4", None, 10**400, -1e39)
    ),
    *(
        ("when", value, "it must be read, replay or ask")
        for value in ("later", "", None, 1, ["read"])
    ),
]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    BAD_HEADS,
    ids=[f"{name}-{n}" for n, (name, *_) in enumerate(BAD_HEADS)],
)
def test_a_bad_field_is_one_sentence(field: str, value: object, allowed: str) -> None:
    fields = {**HEAD, field: value}
    for make in (
        lambda: EvidenceHead(**fields),  # type: ignore[arg-type]
        lambda: Profile.from_dict({"evidence": {"replay": [fields]}}),
    ):
        with pytest.raises(ProfileError) as caught:
            make()
        message = str(caught.value)
        assert f"{field} of an evidence head is {value!r}" in message and allowed in message
        assert "\n" not in message and message.endswith(".")
        assert isinstance(caught.value, MemDecayError)


BAD_SETS = {
    "a list": ([HEAD], "must be a mapping of read, replay, recall to heads"),
    "a number": (3, "evidence is 3"),
    "zero": (0, "evidence is 0"),
    "false": (False, "evidence is False"),
    "an empty list": ([], "evidence is []"),
    "an empty text": ("", "evidence is ''"),
    "another set": ({"reed": [HEAD]}, "must be a mapping of read, replay, recall to heads"),
    "a set with another one": ({"read": [HEAD], "idle": []}, "must be a mapping of"),
    "a head in the place of a list": ({"read": HEAD}, "must be a list of heads"),
    "no list": ({"read": None}, "evidence.read is None"),
    "text": ({"replay": "3.1"}, "evidence.replay is '3.1'"),
    "a number as a head": ({"read": [3]}, "A head of evidence.read has 3"),
    "nothing as a head": ({"read": [{}]}, "A head of evidence.read has nothing"),
    "a field too few": (
        {"read": [{name: value for name, value in HEAD.items() if name != "std"}]},
        "has layer, head, when, weight, mean, but it must have layer, head, when, weight, mean, "
        "std.",
    ),
    "a field too many": ({"read": [{**HEAD, "name": "x"}]}, "std, name, but it must have"),
    "a head of replay for reading": (
        {"read": [HEAD, {**HEAD, "when": "replay"}]},
        "evidence.read has a head for replay, but it is for reading alone.",
    ),
}


@pytest.mark.parametrize("case", BAD_SETS)
def test_a_bad_set_is_one_sentence(tmp_path: Path, case: str) -> None:
    data, expected = BAD_SETS[case]
    with pytest.raises(ProfileError) as caught:
        Profile.from_dict({"evidence": data})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    path = tmp_path / "p.yaml"
    path.write_text(f"evidence: {json.dumps(data)}\n")
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    assert "p.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_read_set_of_objects_is_held_to_the_same() -> None:
    with pytest.raises(ProfileError, match=r"evidence\.read has a head for replay") as caught:
        Profile.default().with_evidence({"read": (ONE, AGAIN)})
    one_sentence(str(caught.value).replace("evidence.read", "evidence"))
    Profile.default().with_evidence({"replay": (ONE, AGAIN)})


def test_an_empty_entry_of_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("evidence:\nuser: {base_priority: 1, half_life: 3}\n")
    profile = Profile.load(tmp_path / "p.yaml")
    assert profile.evidence == {} and not profile.evidence_given


def test_evidence_is_no_name_for_a_region() -> None:
    with pytest.raises(ProfileError, match="Region name is 'evidence'") as caught:
        Profile.default().with_region("evidence", RegionPolicy(1, 0))
    one_sentence(str(caught.value))
