"""Attention by region and age: what one trace's decode steps looked at, summed as they come.

The sums of a trace are two small arrays, (regions, buckets), however long it is: a bucket holds
`bucket` consecutive ages, and there are only as many as the oldest token needs. Age is in decode
steps since a token arrived. The query's own token, at age 0, is left out: a token always attends
to itself, whatever it is, and no policy is asked to evict it while it is being written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memdecay.errors import StudyError
from memdecay.regions import REGIONS

if TYPE_CHECKING:
    from memdecay.calibration.player import Observation, Tape

BUCKET = 4
"""Ages in one bucket, in decode steps, as in the paper's Fig. 3."""

_META = b"memdecay"
_FORMAT = 1


class Curves:
    """Sums of attention mass by region and age over the decode steps of one trace.

    Bucket j holds the ages from `1 + j * bucket` to `(j + 1) * bucket`.

    Args:
        name: of the trace.
        cluster: what it is not independent of; intervals are over clusters.
        regions: region names, by index.
        bucket: ages in one bucket, in decode steps.
        meta: how it was measured; JSON values.

    Attributes:
        total: (regions, buckets) float64, attention mass summed over tokens and steps.
        count: (regions, buckets) int64, how many were summed.
        steps: decode steps observed.
    """

    def __init__(
        self,
        name: str,
        cluster: str,
        *,
        regions: Sequence[str] = REGIONS,
        bucket: int = BUCKET,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1:
            raise StudyError(f"bucket is {bucket!r}, but it must be an integer of at least 1.")
        self.name, self.cluster, self.bucket = name, cluster, bucket
        self.regions = tuple(regions)
        self.meta: dict[str, Any] = dict(meta or {})
        self.total: NDArray[np.float64] = np.zeros((len(self.regions), 0))
        self.count: NDArray[np.int64] = np.zeros((len(self.regions), 0), np.int64)
        self.steps = 0

    def add(
        self,
        region: NDArray[np.int64],
        age: NDArray[np.int64],
        mass: NDArray[np.float32] | NDArray[np.float64],
    ) -> None:
        """Count one decode step (mutates).

        Args:
            region: (seq_len,) index into `regions`.
            age: (seq_len,) decode steps since each token arrived; those of age 0 do not count.
            mass: (seq_len,) share of the step's attention that each token got.
        """
        self.steps += 1
        place = (age - 1) // self.bucket
        counted = age >= 1
        need = int(place.max(initial=-1)) + 1
        if need > self.total.shape[1]:
            # By half more: a trace grows by a bucket every few steps.
            more = ((0, 0), (0, max(need, self.total.shape[1] * 3 // 2) - self.total.shape[1]))
            self.total, self.count = np.pad(self.total, more), np.pad(self.count, more)
        width = self.total.shape[1]
        cell = (region * width + place)[counted]
        size = self.total.size
        self.total += np.bincount(cell, mass[counted], size).reshape(self.total.shape)
        self.count += np.bincount(cell, minlength=size).reshape(self.count.shape)

    @property
    def ages(self) -> NDArray[np.float64]:
        """(buckets,) the middle of each bucket, in decode steps."""
        return bucket_ages(self.total.shape[1], self.bucket)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the nonempty cells as a parquet file, which appears whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        region, place = np.nonzero(self.count)
        table = pa.table(
            {
                "region": pa.array([self.regions[index] for index in region], pa.string()),
                "bucket": pa.array(place, pa.int32()),
                "age": pa.array(self.ages[place], pa.float64()),
                "mass": pa.array(self.total[region, place], pa.float64()),
                "count": pa.array(self.count[region, place], pa.int64()),
            }
        )
        about = {
            "format": _FORMAT,
            "name": self.name,
            "cluster": self.cluster,
            "regions": self.regions,
            "bucket": self.bucket,
            "steps": self.steps,
            "meta": self.meta,
        }
        table = table.replace_schema_metadata({_META: json.dumps(about, sort_keys=True)})
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            pq.write_table(table, draft)
            os.replace(draft, target)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StudyError(f"The curves '{target}' cannot be written: {reason}.") from None
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Curves:
        """Read what `save` wrote.

        Raises:
            StudyError: there is no such file, or it is another kind of file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            about = json.loads((table.schema.metadata or {})[_META])
            if about["format"] != _FORMAT:
                raise ValueError
            made = cls(
                about["name"],
                about["cluster"],
                regions=about["regions"],
                bucket=about["bucket"],
                meta=about["meta"],
            )
            made.steps = about["steps"]
            place = table["bucket"].to_numpy()
            index = {name: row for row, name in enumerate(made.regions)}
            region = np.array([index[name] for name in table["region"].to_pylist()], np.int64)
            shape = (len(made.regions), int(place.max(initial=-1)) + 1)
            made.total, made.count = np.zeros(shape), np.zeros(shape, np.int64)
            made.total[region, place] = table["mass"].to_numpy()
            made.count[region, place] = table["count"].to_numpy()
        except FileNotFoundError:
            raise StudyError(f"The curves '{os.fspath(path)}' do not exist.") from None
        except (OSError, pa.ArrowException, LookupError, ValueError, TypeError):
            raise StudyError(
                f"'{os.fspath(path)}' is not a file of measured curves; measure again without it."
            ) from None
        return made


class CurveListener:
    """Adds every decode step that a `Player` tells of to the curves of its trace.

    Use it as `Player(..., listen=lambda seen: listener(seen, player.tape))`.

    Args:
        curves: what to add to.
    """

    def __init__(self, curves: Curves) -> None:
        self.curves = curves
        self._index = {name: row for row, name in enumerate(curves.regions)}
        self._known = 0
        self._region: NDArray[np.int64] = np.zeros(256, np.int64)
        self._arrival: NDArray[np.int64] = np.zeros(256, np.int64)

    def __call__(self, observation: Observation, tape: Tape) -> None:
        """Count an observation, if it is of a decode step.

        Args:
            observation: what was seen.
            tape: the tokens read so far; the first `len(observation.mass)` of them were seen.
        """
        if not observation.decoding:
            return
        self._read(tape)
        mass = observation.mass.cpu().numpy()
        count = len(mass)
        self.curves.add(self._region[:count], observation.now - self._arrival[:count], mass)

    def _read(self, tape: Tape) -> None:
        """Take in the tokens that are new on the tape."""
        known, count = self._known, len(tape.ids)
        if count > len(self._region):
            more = (0, max(count, 2 * len(self._region)) - len(self._region))
            self._region, self._arrival = np.pad(self._region, more), np.pad(self._arrival, more)
        self._region[known:count] = [self._index[name] for name in tape.regions[known:]]
        self._arrival[known:count] = tape.inserted_at[known:]
        self._known = count


def bucket_ages(buckets: int, bucket: int) -> NDArray[np.float64]:
    """Return the (buckets,) middle ages of the first buckets, in decode steps."""
    return 1 + (bucket - 1) / 2 + bucket * np.arange(buckets, dtype=np.float64)


def load_curves(folder: str | os.PathLike[str]) -> list[Curves]:
    """Read the curves of all traces in a folder, by name of file.

    Raises:
        StudyError: there is none, or a file is another kind of file.
    """
    found = sorted(Path(folder).glob("*.parquet"))
    if not found:
        raise StudyError(f"There are no measured curves (*.parquet) in '{os.fspath(folder)}'.")
    return [Curves.load(path) for path in found]


def stack(
    curves: Sequence[Curves],
) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.int64]]:
    """Return region names, and the sums of several traces as (traces, regions, buckets) arrays.

    Returns:
        The names in the order in which they occur; mass summed; how many were summed.

    Raises:
        StudyError: there are none, or their buckets are not alike.
    """
    widths = {one.bucket for one in curves}
    if len(widths) != 1:
        found = " and ".join(map(str, sorted(widths))) or "none"
        raise StudyError(
            f"The buckets of the curves have widths of {found} steps, but they must be alike, and "
            f"there must be at least one curve."
        )
    names = tuple(dict.fromkeys(name for one in curves for name in one.regions))
    shape = (len(curves), len(names), max(one.total.shape[1] for one in curves))
    total, count = np.zeros(shape), np.zeros(shape, np.int64)
    for row, one in enumerate(curves):
        index = [names.index(name) for name in one.regions]
        total[row, index, : one.total.shape[1]] = one.total
        count[row, index, : one.count.shape[1]] = one.count
    return names, total, count
