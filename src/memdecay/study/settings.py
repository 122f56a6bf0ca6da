"""The settings that a study runs in: a model, a tier, and what is compared."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memdecay.errors import StudyError
from memdecay.study.conditions import GROUPS
from memdecay.study.scenario import TIERS

DTYPES = ("bfloat16", "float32")

_QWEN = "~/.cache/memdecay/models/qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
_PAPER_GROUPS = tuple(group for group in GROUPS if group != "terms")
_LARGE_GROUPS = ("paper", "policy", "control")


@dataclass(frozen=True)
class Setting:
    """What is run.

    Args:
        name: of the setting, and of its folder and result files.
        model: what `load_model` takes.
        model_name: how tables call it.
        tier: "short" or "long".
        dtype: "bfloat16" or "float32".
        groups: which conditions are run, see `memdecay.study.conditions`.
        scenarios: names or files; all of the package's if None.
        variants: which variants of each.
        burst: decode steps before an eviction.
        calibration_burst: decode steps of the measurement.

    Raises:
        StudyError: a value is not one of those allowed.
    """

    name: str
    model: str
    model_name: str
    tier: str
    dtype: str = "bfloat16"
    groups: tuple[str, ...] = _PAPER_GROUPS
    scenarios: tuple[str, ...] | None = None
    variants: tuple[int, ...] = (0, 1, 2)
    burst: int = 8
    calibration_burst: int = 48

    def __post_init__(self) -> None:
        """Refuse a tier, groups, a dtype and variants that there are not."""
        if self.tier not in TIERS:
            raise StudyError(f"tier is {self.tier!r}, but it must be one of {', '.join(TIERS)}.")
        for group in self.groups:
            if group not in GROUPS:
                raise StudyError(f"group is {group!r}, but it must be one of {', '.join(GROUPS)}.")
        if not self.groups:
            raise StudyError(f"groups is empty, but it must name some of {', '.join(GROUPS)}.")
        if self.dtype not in DTYPES:
            raise StudyError(f"dtype is {self.dtype!r}, but it must be {' or '.join(DTYPES)}.")
        if not self.variants:
            raise StudyError("variants is empty, but it must name some of 0, 1 and 2.")
        for variant in self.variants:
            if variant not in (0, 1, 2):
                raise StudyError(f"variant is {variant!r}, but it must be 0, 1 or 2.")


def _preset(size: str, tier: str, groups: tuple[str, ...] = _PAPER_GROUPS) -> Setting:
    return Setting(
        name=f"qwen{size}-{tier}",
        model=_QWEN.format(size=size),
        model_name=f"qwen2.5-coder-{size}",
        tier=tier,
        groups=groups,
    )


_ALL = (
    Setting("quick", "smollm2", "smollm2-135m", "short", variants=(0,), groups=_LARGE_GROUPS),
    Setting("smollm2-short", "smollm2", "smollm2-135m", "short"),
    Setting("smollm2-long", "smollm2", "smollm2-135m", "long"),
    _preset("0.5b", "short"),
    _preset("0.5b", "long"),
    _preset("1.5b", "short", _LARGE_GROUPS),
    _preset("1.5b", "long", _LARGE_GROUPS),
)
SETTINGS: Mapping[str, Setting] = MappingProxyType({setting.name: setting for setting in _ALL})
"""The settings that have a name: those of docs/results, and `quick` for a first look."""


def get_setting(name: str) -> Setting:
    """Return a named setting.

    Raises:
        StudyError: there is no such setting; the message suggests near names.
    """
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise StudyError(
            f"setting is {name!r}, but it must be one of {', '.join(SETTINGS)}, "
            f"or a name of your own with --model and --tier.{hint}"
        )
    return SETTINGS[name]
