"""Who does the tasks of a study: this process, several, or a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from memdecay.calibration.measure import measure
from memdecay.engine import load_model
from memdecay.errors import StudyError
from memdecay.evidence import READ
from memdecay.regions import Profile
from memdecay.study.episode_rows import episode_rows, exported, straddle_share
from memdecay.study.recording import record, regions_of, script_of
from memdecay.study.run import Advance, AnyWork, Task, Work
from memdecay.study.scenario import load_episodes
from memdecay.study.tier_play import TierTask, do_tiers
from memdecay.study.trace_play import TraceTask, do_trace
from memdecay.study.watching import to_bytes, watch

_models: dict[tuple[str, str, str], Any] = {}


def do(task: Work, advance: Callable[[float], None] = lambda share: None) -> Any:
    """Do a task in this process; the model stays loaded for the next one.

    Returns:
        "measure": the bytes of a file of curves; "watch": the bytes of what every head said;
        "ask": rows; "export": what peers need;
        "straddle": the mean share of pages that straddle regions; "overhead": what
        `measure_overhead` says. For a `TraceTask` what `do_trace` returns, for a `TierTask`
        what `do_tiers` does.
    """
    if isinstance(task, TraceTask):
        model, tokenizer = _model(task.run.model, task.run.dtype)
        return do_trace(model, tokenizer, task, advance)
    if isinstance(task, TierTask):
        model, tokenizer = _model(task.setting.model, task.setting.dtype)
        return do_tiers(model, tokenizer, task, advance)
    assert isinstance(task, Task)
    setting, episode = task.setting, task.episode
    model, tokenizer = _model(setting.model, setting.dtype)
    if task.kind == "measure":
        with tempfile.TemporaryDirectory() as folder:
            measure(
                model,
                tokenizer,
                [script_of(episode)],
                folder=folder,
                burst=setting.calibration_burst,
            )
            content = (Path(folder) / f"{episode.name}.parquet").read_bytes()
        advance(1)
        return content
    if task.kind == "straddle":
        shares = [
            straddle_share(regions_of(tokenizer, one))
            for one in load_episodes(setting.tier, setting.scenarios)
        ]
        return round(sum(shares) / len(shares), 4)
    if task.kind == "watch":
        watched = watch(model, tokenizer, episode, burst=setting.burst)
        advance(1)
        return to_bytes(watched)
    profiles = {name: Profile.from_dict(plain) for name, plain in (task.profiles or {}).items()}
    heads = {
        (head.layer, head.head)
        for profile in profiles.values()
        for one in profile.evidence.values()
        for head in one
        if head.when == READ
    }
    recording = record(
        model,
        tokenizer,
        episode,
        burst=setting.burst,
        heads=sorted(heads),
        replay=any("replay" in one.needs for one in task.conditions),
    )
    if task.kind == "export":
        advance(1)
        return exported(recording, setting)
    if task.kind == "overhead":
        from memdecay.study.overhead import measure_overhead

        return measure_overhead(model, tokenizer, recording)
    assert task.kind == "ask" and task.profiles is not None and task.provenance is not None
    return episode_rows(
        model,
        tokenizer,
        recording,
        task.conditions,
        profiles,
        setting,
        task.provenance,
        advance=advance,
    )


def _model(name: str, dtype: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    key = (name, dtype, device)
    if key not in _models:
        _models.clear()
        _models[key] = load_model(name, dtype, device=device)
    return _models[key]


class Here:
    """Does one task after the other in this process."""

    def results(self, tasks: Sequence[AnyWork], advance: Advance) -> Iterator[tuple[AnyWork, Any]]:
        """Yield each task with its result."""
        for task in tasks:
            yield task, do(task, lambda share, kind=task.kind: advance(kind, share))  # type: ignore[misc]


class Processes:
    """Does tasks in several processes of one thread each.

    Args:
        jobs: how many.

    Raises:
        StudyError: `jobs` is not at least 1; later, a process was ended from outside.
    """

    def __init__(self, jobs: int) -> None:
        check_jobs(jobs)
        self.jobs = jobs

    def results(self, tasks: Sequence[AnyWork], advance: Advance) -> Iterator[tuple[AnyWork, Any]]:
        """Yield each task with its result, as they are done; told of progress meanwhile."""
        if not tasks:
            return
        context = multiprocessing.get_context("spawn")
        told = context.Queue()
        pool = ProcessPoolExecutor(
            min(self.jobs, len(tasks)), context, initializer=_start, initargs=(told,)
        )
        try:
            waiting: dict[Future[Any], AnyWork] = {
                pool.submit(_do_told, task): task for task in tasks
            }
            while waiting:
                done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                with contextlib.suppress(queue.Empty):
                    while True:
                        advance(*told.get_nowait())
                for future in done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise StudyError(
                f"A process of the study was ended, as happens when memory is short; what is done "
                f"is kept, so run it again, perhaps with fewer --jobs than {self.jobs}."
            ) from None
        finally:
            for process in (pool._processes or {}).values():
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


_told: Any = None


def _start(told: Any) -> None:
    global _told
    _told = told
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """End with the process that started this one, even if that was killed."""
    parent.join()
    os._exit(1)


def _do_told(task: Work) -> Any:
    return do(task, lambda share: _told.put((task.kind, share)))


class Ray:
    """Does tasks on a Ray cluster; models are loaded on its machines from the same path.

    Args:
        address: of the cluster, as `ray.init` takes it; "local" starts one here.
        cpus: cores of one task.
        gpus: GPUs of one task, may be a fraction.

    Raises:
        StudyError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, *, cpus: int = 1, gpus: float = 0) -> None:
        try:
            import ray
        except ImportError:
            raise StudyError(
                "ray is needed to spread a study over machines; pip install 'memdecay[ray]' "
                "brings it."
            ) from None
        try:
            ray.init(
                address=None if address == "local" else address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise StudyError(
                f"ray is {address!r}, but there is no such cluster: {reason}."
            ) from None
        self._ray = ray
        self._do = ray.remote(num_cpus=cpus, num_gpus=gpus)(do)

    def results(self, tasks: Sequence[AnyWork], advance: Advance) -> Iterator[tuple[AnyWork, Any]]:
        """Yield each task with its result, as they are done."""
        waiting = {self._do.remote(task): task for task in tasks}
        try:
            while waiting:
                done, _ = self._ray.wait(list(waiting))
                for reference in done:
                    task = waiting.pop(reference)
                    yield task, self._ray.get(reference)
                    advance(task.kind, 1)
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)


def check_jobs(jobs: int) -> None:
    """Refuse a number of processes that is not at least 1.

    Raises:
        StudyError: it is not.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise StudyError(f"jobs is {jobs!r}, but it must be at least 1.")


def default_jobs(tasks: int) -> int:
    """Return how many processes to start: one a core, none on a machine with a GPU."""
    if torch.cuda.is_available():
        return 1
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(1, min(cores, tasks))
