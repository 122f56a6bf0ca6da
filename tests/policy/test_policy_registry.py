"""Policies by name: entry points, parameters, configs, and a third party's policy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
from importlib import metadata

import pytest
import torch

from memdecay import MemDecayCache, Session
from memdecay.cli._demo_play import POLICIES
from memdecay.cli.run import run
from memdecay.errors import PolicyError
from memdecay.policy import (
    DEFAULT_POLICY,
    Policy,
    available,
    from_config,
    get_policy,
    policy_config,
)
from memdecay.policy.memdecay_paper import MemDecayPaper
from memdecay.policy.registry import GROUP, policy_class
from memdecay.policy.retention import Scaled
from memdecay.policy.testing import CHECKS

BUILT_IN = {
    "full",
    "h2o",
    "memdecay",
    "memdecay-heads",
    "memdecay-paper",
    "memdecay-replay",
    "observation_masking",
    "random",
    "snapkv",
    "streaming",
    "tova",
}


def entry(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name=name, value=value, group=GROUP)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> object:
    """Install entry points beside the real ones, as a package of a third party would."""
    real = metadata.entry_points

    def install(*extra: metadata.EntryPoint) -> None:
        def entry_points(**params: str) -> list[metadata.EntryPoint]:
            assert params == {"group": GROUP}
            return [*real(**params), *extra]

        monkeypatch.setattr(metadata, "entry_points", entry_points)

    return install


@pytest.fixture
def newest_first(monkeypatch: pytest.MonkeyPatch) -> type[Policy]:
    """A third party's module with one policy in it."""

    @dataclasses.dataclass(frozen=True)
    class NewestFirst(Policy):
        name = "newest_first"
        summary = "forgets the newest"
        scale: float = 1.0

        def score(self, tokens: object, profile: object) -> torch.Tensor:
            return -tokens.position.to(torch.float32) * self.scale  # type: ignore[attr-defined]

    module = types.ModuleType("third_party")
    module.NewestFirst = NewestFirst  # type: ignore[attr-defined]
    module.Thawed = type("Thawed", (Policy,), {})  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "third_party", module)
    return NewestFirst


def test_built_in_policies_are_entry_points_of_this_package() -> None:
    ours = {e.name: e for e in metadata.entry_points(group=GROUP) if e.dist.name == "memdecay"}
    assert set(ours) == BUILT_IN <= set(available())
    assert available() == sorted(available())
    for name in BUILT_IN:
        cls = policy_class(name)
        assert cls.name == name and cls.__module__.startswith("memdecay.policy.")
        assert cls().bounded == (name != "full")


def test_the_default_policy_is_installed_and_is_the_default_everywhere() -> None:
    assert DEFAULT_POLICY in BUILT_IN
    for takes_a_policy in (MemDecayCache, Session, run):
        assert inspect.signature(takes_a_policy).parameters["policy"].default == DEFAULT_POLICY
    assert policy_class(DEFAULT_POLICY).page_size == 1 and DEFAULT_POLICY in POLICIES


def test_a_policy_of_a_third_party_works(install: object, newest_first: type[Policy]) -> None:
    assert "newest_first" not in available()
    install(entry("newest_first", "third_party:NewestFirst"))  # type: ignore[operator]
    assert set(available()) == BUILT_IN | {"newest_first"}
    policy = get_policy("newest_first", scale=2.0)
    assert policy == newest_first(scale=2.0)
    assert policy_config(policy) == {"name": "newest_first", "scale": 2.0}
    for check in CHECKS:
        check(policy)


def test_names_are_not_imported_until_asked(install: object) -> None:
    install(entry("broken", "no.such.module:Policy"))  # type: ignore[operator]
    assert "broken" in available()
    get_policy("memdecay-paper")
    with pytest.raises(PolicyError, match=r"'broken' cannot be imported from 'no.such.module"):
        get_policy("broken")


def test_a_name_declared_twice_is_rejected(install: object, newest_first: type[Policy]) -> None:
    install(entry("h2o", "third_party:NewestFirst"))  # type: ignore[operator]
    for ask in (available, lambda: get_policy("h2o"), lambda: get_policy("memdecay-paper")):
        with pytest.raises(PolicyError, match="'h2o' is declared twice") as caught:
            ask()
        assert "third_party:NewestFirst" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("number", "third_party:number", "not a subclass"),
        ("thawed", "third_party:Thawed", "not a frozen dataclass"),
        ("other", "third_party:NewestFirst", "its name is 'newest_first'"),
        ("gone", "third_party:Gone", "cannot be imported"),
    ],
)
def test_what_is_not_a_policy_is_refused(
    install: object, newest_first: type[Policy], name: str, value: str, expected: str
) -> None:
    install(entry(name, value))  # type: ignore[operator]
    with pytest.raises(PolicyError, match=expected) as caught:
        get_policy(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_parameter_without_a_default_must_be_given(
    install: object, monkeypatch: pytest.MonkeyPatch, newest_first: type[Policy]
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Keyed(newest_first):  # type: ignore[misc, valid-type]
        name = "keyed"
        key: int = dataclasses.field(kw_only=True)

    monkeypatch.setattr(sys.modules["third_party"], "Keyed", Keyed, raising=False)
    install(entry("keyed", "third_party:Keyed"))  # type: ignore[operator]
    assert get_policy("keyed", key=3) == Keyed(key=3)
    with pytest.raises(PolicyError, match="'key' of policy 'keyed' must be given"):
        get_policy("keyed")


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [("needs", frozenset({"gradients"}), "gradients"), ("summary", None, "no summary")],
)
def test_a_policy_that_breaks_its_declaration_is_refused(
    install: object,
    newest_first: type[Policy],
    monkeypatch: pytest.MonkeyPatch,
    attribute: str,
    value: object,
    expected: str,
) -> None:
    monkeypatch.setattr(newest_first, attribute, value, raising=False)
    install(entry("newest_first", "third_party:NewestFirst"))  # type: ignore[operator]
    with pytest.raises(PolicyError, match=expected):
        get_policy("newest_first")


def test_an_unknown_name_lists_the_known_ones_and_a_near_one() -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy("memdecay-papre")
    message = str(caught.value)
    assert "'memdecay-papre'" in message and "did you mean 'memdecay-paper'?" in message
    assert all(name in message for name in BUILT_IN) and "\n" not in message


def test_an_unknown_parameter_lists_the_allowed_ones() -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy("memdecay-paper", smothing=0.5)
    message = str(caught.value)
    assert "'smothing'" in message and "did you mean 'smoothing'?" in message
    assert "attention_weight" in message and "\n" not in message
    with pytest.raises(PolicyError, match="allowed are none"):
        get_policy("tova", sinks=4)
    with pytest.raises(PolicyError, match="'name'"):
        get_policy("tova", name="h2o")  # a class variable is not a parameter


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_config_makes_the_policy_again(name: str) -> None:
    policy = get_policy(name)
    config = json.loads(json.dumps(policy_config(policy)))
    assert config["name"] == name and from_config(config) == policy
    assert hash(policy) == hash(get_policy(name))


def test_a_config_keeps_every_parameter() -> None:
    for tau in (0.25, Scaled(3.0), Scaled(0.0)):
        policy = get_policy(
            "memdecay-paper", smoothing=0, attention_weight=2, refresh_threshold=tau, init="zero"
        )
        assert from_config(json.loads(json.dumps(policy_config(policy)))) == policy
    assert get_policy("memdecay-paper", refresh_threshold={"scale": 3}) == MemDecayPaper(
        refresh_threshold=Scaled(3)
    )


@pytest.mark.parametrize(
    "config", [None, [], {}, {"name": 3}, {"smoothing": 0.5}, "memdecay-paper"]
)
def test_a_config_without_a_name_is_refused(config: object) -> None:
    with pytest.raises(PolicyError, match="'name'"):
        from_config(config)  # type: ignore[arg-type]


BAD_PARAMETERS = [
    ("memdecay-paper", "smoothing", 1.0, "at least 0 and below 1"),
    ("memdecay-paper", "smoothing", -0.1, "at least 0"),
    ("memdecay-paper", "smoothing", float("nan"), "at least 0"),
    ("memdecay-paper", "smoothing", True, "a finite number"),
    ("memdecay-paper", "smoothing", "0.5", "a finite number"),
    ("memdecay-paper", "attention_weight", -1, "at least 0"),
    ("memdecay-paper", "attention_weight", float("inf"), "a finite number"),
    ("memdecay-paper", "refresh_threshold", -1, "at least 0"),
    ("memdecay-paper", "refresh_threshold", float("nan"), "at least 0"),
    ("memdecay-paper", "refresh_threshold", "2/K", "at least 0"),
    ("memdecay-paper", "refresh_threshold", Scaled(-2.0), "at least 0"),
    ("memdecay-paper", "refresh_threshold", Scaled(True), "at least 0"),
    ("memdecay-paper", "refresh_threshold", {"scale": None}, "at least 0"),
    ("memdecay-paper", "refresh_threshold", {"c": 2}, "at least 0"),
    ("memdecay-paper", "init", "last", "first, zero"),
    ("memdecay-paper", "init", [], "first, zero"),
    ("streaming", "sinks", -1, "at least 0"),
    ("streaming", "sinks", 4.0, "an integer"),
    ("streaming", "sinks", True, "an integer"),
    ("random", "seed", -1, "at least 0"),
    ("random", "seed", 2**32, "below 4294967296"),
    ("random", "recent", None, "an integer"),
    ("h2o", "recent", 1.5, "an integer"),
    ("snapkv", "kernel_size", 4, "odd"),
    ("snapkv", "kernel_size", 0, "at least 1"),
    ("snapkv", "window", 0, "at least 1"),
    ("snapkv", "pooling", "median", "max, avg"),
    ("observation_masking", "keep_newest", -1, "at least 0"),
    *(
        (name, parameter, value, expected)
        for name in ("memdecay", "memdecay-replay")
        for parameter, value, expected in (
            ("usage_offset", -0.5, "at least 0"),
            ("calls_share", 1.0, "at least 0 and below 1"),
            ("usage_offset", float("nan"), "a finite number"),
            ("prior_weight", float("inf"), "a finite number"),
            ("prior_weight", "0.1", "a finite number"),
            ("sinks", 4.0, "an integer"),
            ("recent", True, "an integer"),
        )
    ),
]


@pytest.mark.parametrize(("name", "parameter", "value", "expected"), BAD_PARAMETERS)
def test_a_bad_parameter_is_one_sentence(
    name: str, parameter: str, value: object, expected: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy(name, **{parameter: value})
    message = str(caught.value)
    assert parameter in message and repr(name) in message and expected in message
    assert "\n" not in message and message.endswith(".")
