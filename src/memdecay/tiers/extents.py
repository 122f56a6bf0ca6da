"""Which bytes of a file are taken."""

from __future__ import annotations

import bisect


class Extents:
    """Runs of bytes in a file, handed out and taken back; what is free is always merged.

    `end` is where the last taken byte ends, so the file never has to be longer.
    """

    def __init__(self) -> None:
        self.end = 0
        self._gaps: list[tuple[int, int]] = []  # start and size, ascending, none at the end

    def take(self, size: int) -> int:
        """Return where `size` bytes are free from now on taken: the first gap, or the end."""
        for number, (start, free) in enumerate(self._gaps):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._gaps[number : number + 1] = rest
                return start
        start = self.end
        self.end += size
        return start

    def give_back(self, start: int, size: int) -> None:
        """Take back a run that `take` handed out."""
        gaps, stop = self._gaps, start + size
        number = bisect.bisect(gaps, (start, size))
        if number < len(gaps) and gaps[number][0] == stop:
            stop += gaps.pop(number)[1]
        if number and sum(gaps[number - 1]) == start:
            number -= 1
            start = gaps.pop(number)[0]
        if stop == self.end:
            self.end = start
        else:
            gaps.insert(number, (start, stop - start))
