"""Work beside the thread that asks for it, so that it need not wait for a disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

THREADS = 2
"""As many jobs are under way at once, so that a slow one does not hold up all others."""


class Job:
    """Something to be done on another thread.

    Args:
        work: is called once, with nothing held. At the end of the process it may be cut off
            wherever it lets other threads run, so it should not be inside of compiled code that
            does not expect that; what Python itself reads files by does.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._over = threading.Event()
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether it is done or has failed."""
        return self._over.is_set()

    def run(self) -> None:
        """Do it; an error is kept for who waits."""
        try:
            self._work()
        except Exception as error:
            self._error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            Exception: whatever the work raised.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error


class Background:
    """Jobs in the order in which they come, on threads that end when no job is left.

    The threads are daemons, so that a disk that hangs does not keep the process from its end.
    Where no thread can be started jobs stay untouched, and whoever needs one takes it back.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._threads = 0
        self._lock = threading.Lock()

    def begin(self, job: Job) -> None:
        """Have a job done."""
        with self._lock:
            self._jobs.append(job)
            if self._threads == THREADS:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="memdecay-disk", daemon=True).start()
        except RuntimeError:  # there are too many, or this is the end of the process
            with self._lock:
                self._threads -= 1

    def take_back(self, job: Job) -> bool:
        """Have a job not done; False if it has begun already."""
        with self._lock:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            job.run()
            del job  # what it holds is not kept while this waits for the lock
