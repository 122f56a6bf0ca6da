"""Rows of tensors that grow and shrink by pages, so that all pages are worked on at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GROWTH = 1.2
"""Room for rows to come, when there is none: a compromise of copying with unused memory."""
DEAD = 0.2
"""Share of the rows in use that may be of pages that are gone, before the holes are closed."""


class Runs:
    """A run of rows for each page, one after the other, in tensors allocated beforehand.

    Adding and removing cost what the page costs, all in all: the tensors grow by a factor, and
    holes are closed when there are many. Not for several threads at once.

    Args:
        columns: by name a tensor (groups, 0, ...) of the type and shape that its rows have.
    """

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns
        self._used = 0
        self._dead = 0
        self._number: dict[int, int] = {}  # page -> its run
        self._lengths: list[int] = []
        self._segments: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._number

    def __getitem__(self, column: str) -> Tensor:
        """Return (groups, used, ...), a view; some of its rows are of pages that are gone."""
        return self._columns[column][:, : self._used]

    @property
    def pages(self) -> list[int]:
        """The pages that are there, in the order in which `at` and `total` have them."""
        return [*self._number]

    @property
    def bytes(self) -> int:
        """All that is allocated."""
        return sum(column.nbytes for column in self._columns.values())

    def add(self, page_id: int, **rows: Tensor) -> None:
        """Add a page that is not there (mutates).

        Args:
            page_id: its number.
            rows: for each column (groups, n, ...), n at least 1.
        """
        count = next(iter(rows.values())).shape[1]
        end = self._used + count
        if end > next(iter(self._columns.values())).shape[1]:
            self._move(slice(0, self._used), int(end * GROWTH))
        for name, row in rows.items():
            self._columns[name][:, self._used : end] = row
        self._number[page_id] = len(self._lengths)
        self._lengths.append(count)
        self._used, self._segments = end, None

    def remove(self, page_id: int) -> None:
        """Remove a page that is there (mutates)."""
        self._dead += self._lengths[self._number.pop(page_id)]
        self._segments = None
        if self._dead > self._used * DEAD:
            lengths, live = self._by_page()
            kept = torch.zeros(len(lengths), dtype=torch.bool).index_fill_(0, live, True)
            rows = torch.repeat_interleave(kept, lengths).nonzero().flatten()
            self._move(rows, int(len(rows) * GROWTH))
            self._used, self._dead = len(rows), 0
            self._lengths = lengths[live].tolist()
            self._number = {page: number for number, page in enumerate(self._number)}
            self._segments = None

    def at(self) -> Tensor:
        """Return (num_pages,) int64: which of the runs each page is, in the order of `pages`."""
        return self._by_page()[1]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all that is kept, as plain JSON values and as tensors; for `restore`."""
        plain = {"runs": [*self._number.items()], "lengths": self._lengths, "dead": self._dead}
        return plain, {name: self[name].contiguous() for name in self._columns}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep what others of the same columns kept (mutates).

        Args:
            plain: of `state`.
            tensors: likewise; they are taken over.
        """
        self._columns = {name: tensors[name] for name in self._columns}
        self._number = {page: number for page, number in plain["runs"]}
        self._lengths, self._dead = list(plain["lengths"]), plain["dead"]
        self._used, self._segments = sum(self._lengths), None

    def total(self, values: Tensor) -> Tensor:
        """Return (num_pages,), the sum over each page's rows.

        Args:
            values: (used,) float32.
        """
        lengths, live = self._by_page()
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)[live]

    def _by_page(self) -> tuple[Tensor, Tensor]:
        """Return the length of each run, and the runs of pages that are there."""
        if self._segments is None:
            live = torch.tensor([*self._number.values()], dtype=torch.int64)
            self._segments = torch.tensor(self._lengths, dtype=torch.int64), live
        return self._segments

    def _move(self, rows: Tensor | slice, capacity: int) -> None:
        """Put some of the rows into new tensors of this capacity (mutates)."""
        for name, column in self._columns.items():
            kept = column[:, rows]
            moved = column.new_empty(column.shape[0], capacity, *column.shape[2:])
            moved[:, : kept.shape[1]] = kept
            self._columns[name] = moved
