"""Heads whose attention foretells which tokens a later question needs, measured by calibration.

Most of a model's attention says little about what an old token will be worth. A few heads tell:
what they have once looked at, later text asks for. Calibration finds them, each on its own, by how
well the most attention that a token got there ranks the facts of an episode above the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memdecay.errors import ProfileError

FLOOR = 1e-4
"""ε, a share of one query's attention below which there is no difference."""
READ, REPLAY = "read", "replay"
"""When a head was watched: while the tokens were read, or while the model repeats them."""
_INTEGERS = ("layer", "head")


@dataclass(frozen=True)
class EvidenceHead:
    """One attention head, and how to read what it says.

    Args:
        layer: its layer.
        head: the query head in that layer.
        when: "read" or "replay".
        auc: chance that it ranks a token that was asked for above one that was not.
        mean: of log(ε + peak) over the tokens of the calibration's episodes.
        std: likewise, above 0.

    Raises:
        ProfileError: a value is out of range.
    """

    layer: int
    head: int
    when: str
    auc: float
    mean: float
    std: float

    def __post_init__(self) -> None:
        """Refuse what no calibration writes."""
        for name in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ProfileError(
                    f"{name} of an evidence head is {value!r}, but it must be an integer of at "
                    f"least 0."
                )
        if self.when not in (READ, REPLAY):
            raise ProfileError(
                f"when of an evidence head is {self.when!r}, but it must be {READ} or {REPLAY}."
            )
        for name in ("auc", "mean", "std"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise ProfileError(
                    f"{name} of an evidence head is {value!r}, but it must be a finite number."
                )
            object.__setattr__(self, name, float(value))
        if self.std <= 0:
            raise ProfileError(f"std of an evidence head is {self.std}, but it must be above 0.")

    def to_dict(self) -> dict[str, Any]:
        """Return its fields, as plain values."""
        return asdict(self)


def strongest(
    heads: Sequence[EvidenceHead], count: int, *, when: Sequence[str]
) -> tuple[EvidenceHead, ...]:
    """Return the `count` heads with the highest AUC among those watched at the times `when`."""
    fit = [head for head in heads if head.when in when]
    return tuple(sorted(fit, key=lambda head: -head.auc)[:count])


def heads_from(data: object) -> tuple[EvidenceHead, ...]:
    """Read a list of heads as a profile file holds them.

    Raises:
        ProfileError: it is not a list of mappings with exactly the fields of `EvidenceHead`.
    """
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ProfileError(f"evidence is {data!r}, but it must be a list of heads.")
    fields = set(EvidenceHead.__dataclass_fields__)
    heads = []
    for item in data:
        if not isinstance(item, Mapping) or set(item) != fields:
            given = ", ".join(map(str, item)) if isinstance(item, Mapping) else repr(item)
            raise ProfileError(
                f"A head of evidence has {given or 'nothing'}, but it must have "
                f"{', '.join(EvidenceHead.__dataclass_fields__)}."
            )
        heads.append(EvidenceHead(**{str(key): value for key, value in item.items()}))
    return tuple(heads)
