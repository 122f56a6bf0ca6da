"""Heads whose attention foretells which tokens a later question needs, measured by calibration.

Most of a model's attention says little about what an old token will be worth. A few heads tell:
what they have looked at, later text asks for. Calibration finds them by how well the most
attention that a token got there ranks the facts of its episodes above all other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from memdecay.errors import ProfileError

FLOOR = 1e-4
"""ε, a share of one query's attention below which there is no difference."""
READ, REPLAY, ASK = "read", "replay", "ask"
"""When a head is watched: while tokens are read, while the model repeats them, or at a question."""
SETS = ("read", "replay", "recall")
"""What a set of heads is for: a policy that only reads, one that may also replay, or finding what
was evicted when it is asked for."""
_LARGEST = 3.4028234663852886e38  # of float32, which scores are worked out in
_ALLOWED = {"weight": " other than 0", "std": " above 0"}


@dataclass(frozen=True)
class EvidenceHead:
    """One attention head, and how to read what it says.

    Args:
        layer: its layer.
        head: the query head in that layer.
        when: "read" or "replay"; "ask" for one that is watched at a question.
        weight: its share in the evidence, not 0; below 0 if it looks at what will not be needed.
        mean: of log(ε + peak) over the tokens of the calibration's episodes; not used at a
            question, whose claims are compared among the pages that there are.
        std: likewise, above 0.

    Raises:
        ProfileError: a value is out of range.
    """

    layer: int
    head: int
    when: str
    weight: float = 1.0
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no calibration writes."""
        for name in ("layer", "head"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ProfileError(
                    f"{name} of an evidence head is {value!r}, but it must be an integer of at "
                    f"least 0."
                )
        if self.when not in (READ, REPLAY, ASK):
            raise ProfileError(
                f"when of an evidence head is {self.when!r}, but it must be {READ}, {REPLAY} or "
                f"{ASK}."
            )
        for name in ("weight", "mean", "std"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            in_range = number and -_LARGEST <= value <= _LARGEST  # false for NaN
            refused = {"weight": value == 0, "std": number and value <= 0}.get(name, False)
            if not in_range or refused:
                allowed = f"a finite number{_ALLOWED.get(name, '')}"
                raise ProfileError(
                    f"{name} of an evidence head is {value!r}, but it must be {allowed}."
                )
            object.__setattr__(self, name, float(value))

    def to_dict(self) -> dict[str, Any]:
        """Return its fields, as plain values."""
        return asdict(self)


Evidence = Mapping[str, tuple[EvidenceHead, ...]]
"""For each of `SETS` its heads."""


def check_evidence(data: object) -> dict[str, tuple[EvidenceHead, ...]]:
    """Read sets of heads, as objects or as a profile file holds them; empty sets are left out.

    Raises:
        ProfileError: it is not a mapping of sets to lists of heads with exactly the fields of
            `EvidenceHead`, or a set has a head that is watched when the set cannot use it.
    """
    if not isinstance(data, Mapping) or not set(data) <= set(SETS):
        raise ProfileError(
            f"evidence is {data!r}, but it must be a mapping of {', '.join(SETS)} to heads."
        )
    made = {}
    for name, heads in data.items():
        if not isinstance(heads, Sequence) or isinstance(heads, str):
            raise ProfileError(f"evidence.{name} is {heads!r}, but it must be a list of heads.")
        made[str(name)] = tuple(
            one if isinstance(one, EvidenceHead) else _head(one, str(name)) for one in heads
        )
    if any(head.when == REPLAY for head in made.get("read", ())):
        raise ProfileError("evidence.read has a head for replay, but it is for reading alone.")
    for name, heads in made.items():
        if any((head.when == ASK) != (name == "recall") for head in heads):
            raise ProfileError(
                f"evidence.{name} has a head for {', '.join({h.when for h in heads})}, but heads "
                f"for {ASK} are those of evidence.recall, and no others are."
            )
    return {name: heads for name, heads in made.items() if heads}


def _head(data: object, name: str) -> EvidenceHead:
    allowed = [field.name for field in fields(EvidenceHead)]
    if not isinstance(data, Mapping) or set(data) != set(allowed):
        given = ", ".join(map(str, data)) if isinstance(data, Mapping) else repr(data)
        raise ProfileError(
            f"A head of evidence.{name} has {given or 'nothing'}, but it must have "
            f"{', '.join(allowed)}."
        )
    return EvidenceHead(**{str(key): value for key, value in data.items()})
