"""What the study compares: policies, bounds, controls, and the paper's policy turned every way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memdecay.policy.registry import available, policy_class

PAPER = ("full", "random", "streaming", "h2o", "memdecay-paper")
"""The policies of the paper's study (section IV-C)."""
GROUPS = ("paper", "policy", "control", "ablation", "sweep", "noise", "terms")
BUDGETS = (0.5, 0.25)
"""Shares of the episode's tokens that are kept (section IV-A)."""
RANDOM_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Condition:
    """One way to choose what is kept.

    Args:
        name: how tables call it.
        group: one of `GROUPS`.
        policy: name of a registered policy; "oracle" for the one that sees the question.
        params: its parameters.
        page_size: tokens a page. The baselines keep single tokens, as in the paper.
        align: "region" for pages that end at region boundaries.
        clock: "steps" or "tokens".
        observe_every: k.
        rates: "calibrated" on the other scenarios, or "default".
        pinned: whether the profile's pinned regions are held; None as the policy does by itself.
        labels: "true", "shuffled" among the spans, or "noise".
        noise: share of spans that get a wrong label.
        last: only the last so many decode steps are observed, and no prompt; all if None.
        seed: of what is random.
    """

    name: str
    group: str
    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)
    page_size: int = 1
    align: str | None = None
    clock: str = "steps"
    observe_every: int = 1
    rates: str = "calibrated"
    pinned: bool | None = None
    labels: str = "true"
    noise: float = 0.0
    seed: int = 0
    last: int | None = None

    def to_json(self) -> str:
        """Return everything but name and group, as canonical JSON; `last` only if it is set."""
        fields = {key: value for key, value in vars(self).items() if key not in ("name", "group")}
        if self.last is None:  # rows of earlier runs do not have it
            del fields["last"]
        return json.dumps({**fields, "params": dict(self.params)}, sort_keys=True)

    @property
    def needs(self) -> frozenset[str]:
        """What its policy asks for."""
        return frozenset() if self.policy == "oracle" else policy_class(self.policy).needs

    @property
    def budgets(self) -> tuple[float, ...]:
        """The shares of tokens at which it is asked."""
        return (1.0,) if self.policy == "full" else BUDGETS


def conditions(groups: tuple[str, ...] = GROUPS) -> list[Condition]:
    """Return the conditions of a study, those of the paper first."""
    made = [*_paper(), *_policies(), *_controls(), *_ablation(), *_sweeps(), *_noise(), *_terms()]
    return [condition for condition in made if condition.group in groups]


def _memdecay_paper(name: str, group: str, **changes: Any) -> Condition:
    """The paper's setting: pages of 16, calibrated rates, system pinned."""
    return Condition(name, group, "memdecay-paper", **{"page_size": 16, **changes})


def _paper() -> list[Condition]:
    return [
        Condition("full", "paper", "full"),
        *(
            Condition("random", "paper", "random", {"seed": seed}, seed=seed)
            for seed in RANDOM_SEEDS
        ),
        Condition("streaming", "paper", "streaming"),
        Condition("h2o", "paper", "h2o"),
        _memdecay_paper("memdecay-paper", "paper"),
    ]


def _policies() -> list[Condition]:
    """Every other policy that is installed, third parties' too."""
    others = [name for name in available() if name not in PAPER]
    made = [Condition(name, "policy", name, page_size=_page_size(name)) for name in others]
    return [*made, _memdecay_paper("memdecay-paper[rates=default]", "policy", rates="default")]


def _page_size(name: str) -> int:
    """Return what a policy prefers if it is ours or kin to it, scoring labelled tokens; else 1."""
    cls = policy_class(name)
    return cls.page_size if {"labels", "attention"} <= cls.needs else 1


def _controls() -> list[Condition]:
    return [
        *(
            _memdecay_paper("shuffled", "control", labels="shuffled", seed=seed)
            for seed in RANDOM_SEEDS
        ),
        Condition("oracle", "control", "oracle"),
        # What pins alone do: the same baselines with the same protected pages.
        Condition("streaming+pins", "control", "streaming", page_size=16, pinned=True),
        Condition("h2o+pins", "control", "h2o", page_size=16, pinned=True),
        # The paper's baselines and policy saw a burst of 8 steps before the eviction, no more.
        Condition("h2o[observed=burst]", "control", "h2o", last=8),
        _memdecay_paper("memdecay-paper[observed=burst]", "control", last=8),
    ]


def _ablation() -> list[Condition]:
    """Section IV-D: α and pinning, everything else fixed; α = 0.5 with pins is `memdecay-paper`."""
    return [
        _memdecay_paper(
            "memdecay-paper[attention_weight=0.2]", "ablation", params={"attention_weight": 0.2}
        ),
        _memdecay_paper(
            "memdecay-paper[attention_weight=0.8]", "ablation", params={"attention_weight": 0.8}
        ),
        _memdecay_paper("memdecay-paper[pinned=no]", "ablation", pinned=False),
    ]


def _sweeps() -> list[Condition]:
    def swept(parameter: str, value: Any, **changes: Any) -> Condition:
        return _memdecay_paper(f"memdecay-paper[{parameter}={value}]", "sweep", **changes)

    def param(parameter: str, shown: Any, value: Any) -> Condition:
        return swept(parameter, shown, params={parameter: value})

    return [
        *(param("refresh_threshold", f"{c:g}x", {"scale": c}) for c in (0.5, 1.0, 4.0, 8.0)),
        param("refresh_threshold", "never", 2.0),  # no share of attention reaches 2
        *(swept("observe_every", k, observe_every=k) for k in (2, 4, 8, 16)),
        *(param("smoothing", value, value) for value in (0.0, 0.5, 0.99)),
        *(swept("page_size", size, page_size=size) for size in (1, 4, 8, 32)),
        swept("align", "region", align="region"),
        swept("clock", "tokens", clock="tokens"),
    ]


def _noise() -> list[Condition]:
    return [
        _memdecay_paper(
            f"memdecay-paper[label_noise={share:g}]",
            "noise",
            labels="noise",
            noise=share,
            seed=seed,
        )
        for share in (0.05, 0.2, 0.5)
        for seed in RANDOM_SEEDS
    ]


def _terms() -> list[Condition]:
    """What each term of `memdecay` does: the policy without it, everything else fixed."""

    def without(what: str, **changes: Any) -> Condition:
        settings = {"page_size": 1, **changes}
        return Condition(f"memdecay[{what}]", "terms", "memdecay", **settings)

    return [
        without("no evidence", rates="default"),  # the default profile knows no heads
        without("no usage", params={"usage_offset": 99.0}),
        without("usage_offset=0", params={"usage_offset": 0.0}),
        without("usage_offset=1", params={"usage_offset": 1.0}),
        without("lead=0", params={"lead": 0}),
        without("no prior", params={"prior_weight": 0.0}),
        without("no sinks", params={"sinks": 0}),
        without("no recent", params={"recent": 0, "recent_share": 0.0}),
        without("recent_share=0", params={"recent_share": 0.0}),
        without("calls_share=0.125", params={"calls_share": 0.125}),
        without("recent=32", params={"recent": 32}),
        without("pinned=no", pinned=False),
        without("page_size=4", page_size=4),
        without("page_size=16", page_size=16),
        without("shuffled", labels="shuffled"),
    ]
