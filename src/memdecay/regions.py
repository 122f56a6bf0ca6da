"""Regions of an agent's context, and how fast each of them is forgotten.

A region is a label that the orchestrator gives to a part of the prompt (section III-A of the
paper). Each region has a base priority, a decay rate and possibly a pin (section III-B); a
`Profile` holds them for all regions and is kept as a YAML file with one line a region::

    system: {base_priority: 1.0, half_life: inf, pinned: true}
    plan: {base_priority: 0.8, half_life: 120}
"""

from __future__ import annotations

import copy
import difflib
import io
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from torch import Tensor

from memdecay.errors import ProfileError
from memdecay.evidence import Evidence, EvidenceHead, check_evidence

REGIONS = ("system", "plan", "user", "tool_in", "tool_out", "retrieval", "scratchpad")
"""The seven regions of the paper; every profile has them, at these indices."""

_FIELDS = ("base_priority", "half_life", "decay_rate", "pinned")
_PROVENANCE = "provenance"
_EVIDENCE = "evidence"
_RESERVED = (_PROVENANCE, _EVIDENCE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LARGEST = torch.finfo(torch.float32).max
_HALF_LIFE = "a number of steps above 0, or inf for no decay"
_HEADER = (
    "half_life is in steps, inf means no decay; decay_rate = ln 2 / half_life may be given instead"
)


@dataclass(frozen=True)
class RegionPolicy:
    """How one region is valued and forgotten (section III-B).

    Args:
        base_priority: b_r, the value of a token of this region when it arrives; at least 0.
        decay_rate: λ_r in 1/step, how fast that value expires; 0 means never.
        pinned: whether tokens of this region are never evicted.

    Raises:
        ProfileError: a value is not a number, not finite, negative, or `pinned` is not a boolean.
    """

    base_priority: float
    decay_rate: float
    pinned: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside the paper's ranges."""
        for field in ("base_priority", "decay_rate"):
            object.__setattr__(self, field, _number(field, getattr(self, field)))
        if not isinstance(self.pinned, bool):
            raise ProfileError(f"pinned is {self.pinned!r}, but it must be true or false.")

    @classmethod
    def from_half_life(
        cls, base_priority: float, half_life: float, pinned: bool = False
    ) -> RegionPolicy:
        """Make a region policy from a half-life in steps, equation (7).

        Args:
            base_priority: b_r, at least 0.
            half_life: steps after which the prior has halved; above 0, `inf` for no decay.
            pinned: whether tokens of this region are never evicted.

        Raises:
            ProfileError: as for `RegionPolicy`, or `half_life` is not above 0.
        """
        steps = _number("half_life", half_life, allowed=_HALF_LIFE, infinite=True)
        if steps == 0 or math.log(2) / steps > _LARGEST:
            raise ProfileError(f"half_life is {half_life!r}, but it must be {_HALF_LIFE}.")
        return cls(base_priority, math.log(2) / steps, pinned)

    @property
    def half_life(self) -> float:
        """Steps after which the prior has halved, equation (7); `inf` when it never decays."""
        return math.log(2) / self.decay_rate if self.decay_rate else math.inf


class Profile:
    """The region policies that one cache uses: the seven of the paper and any the user adds.

    A profile is immutable. The seven regions always exist and keep their indices, so labels made
    with one profile mean the same in another; a region that is not given keeps its default.

    Args:
        regions: region name -> policy; names of letters, digits, `_`, `-` and `.`.
        provenance: where the numbers came from (calibration writes it); plain YAML values.
        evidence: attention heads of the model that foretell what will be needed (calibration
            finds them). None leaves them to the cache, which takes those that the package knows
            for its model; an empty mapping is no heads, whatever is known.

    Raises:
        ProfileError: a name or a value is not valid.
    """

    __slots__ = (
        "_evidence",
        "_evidence_given",
        "_names",
        "_policies",
        "_provenance",
        "_source",
        "_tensors",
    )

    def __init__(
        self,
        regions: Mapping[str, RegionPolicy],
        *,
        provenance: Mapping[str, Any] | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        """Check the regions and complete them with the defaults."""
        for name, policy in regions.items():
            _check_name(name)
            if not isinstance(policy, RegionPolicy):
                raise ProfileError(f"Region {name!r} is {policy!r}, but it must be a RegionPolicy.")
        merged = {**_DEFAULTS, **regions}
        self._names = tuple(merged)
        self._policies = tuple(merged.values())
        self._provenance = _plain({} if provenance is None else provenance, _PROVENANCE)
        self._evidence_given = evidence is not None
        self._evidence = check_evidence({} if evidence is None else evidence)
        self._source: str | None = None
        self._tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def default(cls) -> Profile:
        """Return the default profile; docs/notation.md says where its numbers come from."""
        return cls({})

    @property
    def names(self) -> tuple[str, ...]:
        """The region names, by index."""
        return self._names

    @property
    def regions(self) -> Mapping[str, RegionPolicy]:
        """Region name -> policy, read-only, by index."""
        return MappingProxyType(dict(zip(self._names, self._policies, strict=True)))

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the numbers came from; a copy, empty when nobody said."""
        return copy.deepcopy(self._provenance)

    @property
    def evidence(self) -> Mapping[str, tuple[EvidenceHead, ...]]:
        """Heads that foretell what will be needed: the set for reading, and that with replay."""
        return MappingProxyType(self._evidence)

    @property
    def evidence_given(self) -> bool:
        """Whether the profile says which heads there are, be it none; else a cache looks."""
        return self._evidence_given

    @property
    def base_priority(self) -> tuple[float, ...]:
        """b_r by region index."""
        return tuple(policy.base_priority for policy in self._policies)

    @property
    def decay_rate(self) -> tuple[float, ...]:
        """λ_r in 1/step by region index."""
        return tuple(policy.decay_rate for policy in self._policies)

    @property
    def pinned(self) -> tuple[bool, ...]:
        """Whether the region is pinned, by region index."""
        return tuple(policy.pinned for policy in self._policies)

    def id(self, name: str) -> int:
        """Return the index of a region.

        Raises:
            ProfileError: no region has that name; the message lists the known ones.
        """
        if isinstance(name, str) and name in self._names:
            return self._names.index(name)
        near = difflib.get_close_matches(str(name), self._names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ProfileError(f"region is {name!r}{hint}, but it must be one of {_list(self._names)}.")

    def name(self, region: int) -> str:
        """Return the name of the region with this index.

        Raises:
            ProfileError: the index is not in `range(len(names))`.
        """
        if not 0 <= region < len(self._names):
            raise ProfileError(
                f"region index is {region!r}, but it must be from 0 to {len(self._names) - 1}."
            )
        return self._names[region]

    def tensors(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Return base priorities, decay rates and pins by region index, as new tensors.

        Returns:
            base_priority (num_regions,) float32; decay_rate (num_regions,) float32, in 1/step;
            pinned (num_regions,) bool.
        """
        key = str(device)  # copying is a tenth of building, and evictions ask often
        if key not in self._tensors:
            with torch.inference_mode(False):
                self._tensors[key] = (
                    torch.tensor(self.base_priority, dtype=torch.float32, device=device),
                    torch.tensor(self.decay_rate, dtype=torch.float32, device=device),
                    torch.tensor(self.pinned, dtype=torch.bool, device=device),
                )
        base_priority, decay_rate, pinned = self._tensors[key]
        return base_priority.clone(), decay_rate.clone(), pinned.clone()

    def with_region(self, name: str, policy: RegionPolicy) -> Profile:
        """Return a profile in which one region is replaced or added; this one is unchanged.

        Raises:
            ProfileError: the name or the policy is not valid.
        """
        return self._changed(regions={**self.regions, name: policy})

    def with_provenance(self, provenance: Mapping[str, Any]) -> Profile:
        """Return a profile that says where its numbers came from; this one is unchanged."""
        return self._changed(provenance=provenance)

    def with_evidence(self, evidence: Evidence) -> Profile:
        """Return a profile with these evidence heads; this one is unchanged.

        An empty mapping means no heads, not even those that the package knows for the model. What
        the provenance says of the heads before is left out.
        """
        about = {key: value for key, value in self._provenance.items() if key != _EVIDENCE}
        return self._changed(evidence=evidence, provenance=about)

    def _changed(
        self,
        *,
        regions: Mapping[str, RegionPolicy] | None = None,
        provenance: Mapping[str, Any] | None = None,
        evidence: Evidence | None = None,
    ) -> Profile:
        changed = Profile(
            self.regions if regions is None else regions,
            provenance=self._provenance if provenance is None else provenance,
            evidence=self._said() if evidence is None else evidence,
        )
        changed._source = self._source
        return changed

    def _said(self) -> Evidence | None:
        return self._evidence if self._evidence_given else None

    def to_dict(self) -> dict[str, Any]:
        """Return what the YAML file holds: region -> fields, `evidence` and `provenance` if given.

        An endless half-life is written as the string "inf", so the result is valid JSON.
        """
        data: dict[str, Any] = {name: _to_fields(policy) for name, policy in self.regions.items()}
        if self._evidence_given:
            data[_EVIDENCE] = {
                name: [head.to_dict() for head in heads] for name, heads in self._evidence.items()
            }
        if self._provenance:
            data[_PROVENANCE] = self.provenance
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Make a profile from what `to_dict` returns or a YAML file holds.

        Args:
            data: region -> {base_priority, half_life or decay_rate, pinned}; regions that are
                left out keep their defaults. A half-life may be the string "inf". `evidence` may
                be {} for no heads; left out or empty it says nothing of them.

        Raises:
            ProfileError: unknown or missing field, wrong type, or value out of range.
        """
        if not isinstance(data, Mapping):
            raise ProfileError(
                f"A profile must be a mapping of region to fields, not {_kind(data)}."
            )
        regions = {
            name: _from_fields(name, fields)
            for name, fields in data.items()
            if name not in _RESERVED
        }
        return cls(regions, provenance=data.get(_PROVENANCE), evidence=data.get(_EVIDENCE))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile from a YAML file.

        Raises:
            ProfileError: the file is missing, unreadable, empty, not YAML, or not a profile.
        """
        try:
            source = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ProfileError(f"Profile file {str(path)!r} does not exist.") from None
        except UnicodeDecodeError:
            raise ProfileError(f"Profile {str(path)!r} is not a UTF-8 text file.") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ProfileError(f"Profile {str(path)!r} cannot be read: {reason}.") from None
        try:
            data = _parse(source)
            if data is None:
                raise ProfileError("the file is empty, but it must name at least one region.")
            profile = cls.from_dict(data)
        except ProfileError as error:
            raise ProfileError(f"Profile {str(path)!r}: {error}") from None
        profile._source = source
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as YAML, one line a region; a file that is there is replaced at once.

        The comments of the file that this profile was loaded from are kept.

        Raises:
            ProfileError: the file cannot be written; what was there before is untouched.
        """
        text = self._to_yaml()
        target = Path(path).resolve()
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            reason = error.strerror or str(error)
            raise ProfileError(f"Profile {str(path)!r} cannot be written: {reason}.") from None

    def _to_yaml(self) -> str:
        document = _parse(self._source) if self._source else None
        if document is None:
            document = CommentedMap()
            document.yaml_set_start_comment(_HEADER)
        for name, policy in self.regions.items():
            fields = _to_fields(policy)
            if name not in document:
                document[name] = _one_line(fields)
            elif _from_fields(name, document[name]) != policy:
                # In place and only where they differ, so that spelling and comments survive.
                line = document[name]
                for field in [field for field in line if field not in fields]:
                    del line[field]
                line.update({k: v for k, v in fields.items() if line.get(k) != v})
        said = document.get(_EVIDENCE)
        if self._said() != (None if said is None else check_evidence(said)):
            document[_EVIDENCE] = {
                name: [_one_line(head.to_dict()) for head in heads]
                for name, heads in self._evidence.items()
            }
        if self._provenance != _plain(document.get(_PROVENANCE) or {}, _PROVENANCE):
            document[_PROVENANCE] = self.provenance
        stream = io.StringIO()
        _yaml().dump(document, stream)
        return stream.getvalue()

    def __eq__(self, other: object) -> bool:
        """Profiles are equal when all they say is; comments do not count."""
        if not isinstance(other, Profile):
            return NotImplemented
        return (self._names, self._policies, self._said(), self._provenance) == (
            other._names,
            other._policies,
            other._said(),
            other._provenance,
        )

    def __hash__(self) -> int:
        """Hash the regions."""
        return hash((self._names, self._policies))

    def __repr__(self) -> str:
        """Show the regions."""
        return f"Profile({dict(self.regions)!r})"


def _number(
    field: str, value: object, *, allowed: str = "a number of at least 0", infinite: bool = False
) -> float:
    """Return `value` as a float that is at least 0, or refuse it in one sentence."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) or not number >= 0 or (number > _LARGEST and not infinite):
        raise ProfileError(f"{field} is {reprlib.repr(value)}, but it must be {allowed}.")
    return number


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise ProfileError(
            f"Region name is {name!r}, but it must be a word of letters, digits, '_', '-' and '.' "
            f"other than {' and '.join(map(repr, _RESERVED))}."
        )


def _from_fields(name: object, fields: object) -> RegionPolicy:
    """Read one region of a YAML file: b, a half-life or a decay rate, and perhaps a pin."""
    _check_name(name)
    where = f"in region {name!r}"
    if not isinstance(fields, Mapping):
        raise ProfileError(
            f"Region {name!r} must be a mapping with {_list(_FIELDS)}, not {_kind(fields)}."
        )
    for field in fields:
        if field not in _FIELDS:
            near = difflib.get_close_matches(str(field), _FIELDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ProfileError(
                f"Unknown field {field!r}{hint} {where}: allowed are {_list(_FIELDS)}."
            )
    if "base_priority" not in fields:
        raise ProfileError(f"Field 'base_priority' is missing {where}.")
    if ("half_life" in fields) == ("decay_rate" in fields):
        raise ProfileError(f"Exactly one of half_life and decay_rate must be given {where}.")
    base, pinned = fields["base_priority"], fields.get("pinned", False)
    try:
        if "decay_rate" in fields:
            return RegionPolicy(base, fields["decay_rate"], pinned)
        half_life = fields["half_life"]
        return RegionPolicy.from_half_life(
            base, math.inf if half_life == "inf" else half_life, pinned
        )
    except ProfileError as error:
        raise ProfileError(f"{str(error).rstrip('.')} ({where}).") from None


def _to_fields(policy: RegionPolicy) -> dict[str, Any]:
    """Write one region: a half-life where it gives back exactly the same rate, else the rate."""
    fields: dict[str, Any] = {"base_priority": policy.base_priority}
    half_life = float(f"{policy.half_life:.12g}")
    if math.isinf(half_life) and policy.decay_rate == 0:
        fields["half_life"] = "inf"
    elif math.log(2) / half_life == policy.decay_rate:
        fields["half_life"] = int(half_life) if half_life.is_integer() else half_life
    else:
        fields["decay_rate"] = policy.decay_rate
    if policy.pinned:
        fields["pinned"] = True
    return fields


def _plain(value: object, where: str) -> Any:
    """Copy YAML values into plain Python ones, refusing anything that is not a YAML value."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if where == _PROVENANCE:
        raise ProfileError(f"provenance must be a mapping, not {_kind(value)}.")
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise ProfileError(f"{where} is {value!r}, but it must be a plain YAML value.")


def _one_line(fields: Mapping[str, Any]) -> CommentedMap:
    line = CommentedMap(fields)
    line.fa.set_flow_style()
    return line


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.width = 1_000_000  # one line a region, however long
    yaml.default_flow_style = False
    yaml.preserve_quotes = True
    return yaml


def _parse(source: str) -> Any:
    try:
        return _yaml().load(source)
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "(.*?)"', str(error))
        mark = error.problem_mark
        raise ProfileError(
            f"{key.group(1) if key else 'a key'!r} is given twice"
            f" (line {mark.line + 1}), but each region and field may stand only once."
        ) from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ProfileError(f"the file is not valid YAML: {problem}{place}.") from None


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _kind(value: object) -> str:
    if value is None:
        return "empty"
    return "a list" if isinstance(value, list) else f"{type(value).__name__} {value!r}"


_DEFAULTS = {
    "system": RegionPolicy(1.0, 0.0, pinned=True),
    "plan": RegionPolicy.from_half_life(0.8, 120),
    "user": RegionPolicy.from_half_life(0.7, 80),
    "tool_in": RegionPolicy.from_half_life(0.4, 30),
    "tool_out": RegionPolicy.from_half_life(0.5, 30),
    "retrieval": RegionPolicy.from_half_life(0.5, 30),
    "scratchpad": RegionPolicy.from_half_life(0.3, 15),
}
