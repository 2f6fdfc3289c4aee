"""Cases of a benchmark in processes of their own: all compile at once, each is measured while nothing else runs.

Compiling takes most of a benchmark's time and one core a model; measuring takes seconds and the whole GPU. So every
model is compiled once in a process of its own, which fills the compiler's cache, and the processes that measure find it
there. Who builds holds a shared lock, who measures an exclusive one: no measurement sees another process at work, also
where two benchmarks are started at the same time.
"""

import fcntl
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

Case = TypeVar("Case")


def measure_cases(
    measure: Callable[[Case, torch.device, bool], dict[str, Any]],
    compile_arm: Callable[[Case, str, torch.device], None],
    compiled_arms: Callable[[Case], list[str]],
    cases: Sequence[Case],
    device: torch.device,
    quick: bool,
) -> list[dict[str, Any]]:
    """``measure(case, device, quick)`` of every case, in order; on a GPU each in a process of its own.

    Args:
        measure: A function of a module, which wraps its two halves in :func:`building` and :func:`measuring`.
        compile_arm: Builds one arm of a case, by name, as ``measure`` will: a function of a module, too.
        compiled_arms: Names of the arms of a case that are worth it.
        cases: What to measure.
        device: Where.
        quick: Passed on; then everything runs in this process.
    """
    if device.type != "cuda" or quick:
        return [measure(case, device, quick) for case in cases]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of a process: there are as many as cores
    processes = multiprocessing.get_context("spawn")
    jobs = [(case, name) for case in cases for name in compiled_arms(case)]
    with building(), ProcessPoolExecutor(os.cpu_count(), mp_context=processes) as pool:
        wait([pool.submit(compile_arm, case, name, device) for case, name in jobs])  # what fails here fails again below
    with ProcessPoolExecutor(len(cases), mp_context=processes) as pool:
        measured = [pool.submit(measure, case, device, quick) for case in cases]
        wait(measured)
    return [_result(case, future) for case, future in zip(cases, measured, strict=True)]


def _result(case: object, future: Future[dict[str, Any]]) -> dict[str, Any]:
    """What was measured; of a case that failed its error, so that the others are not lost with it."""
    error = future.exception()
    if error is None:
        return future.result()
    warnings.warn(f"{case} could not be measured: {error}", stacklevel=2)
    return {"failed": f"{type(error).__name__}: {error}"}


@contextmanager
def building() -> Iterator[None]:
    """While models are made and compiled: nobody measures."""
    with _locked(fcntl.LOCK_SH):
        yield


@contextmanager
def measuring() -> Iterator[None]:
    """While times are taken: nobody else builds or measures."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(kind: int) -> Iterator[None]:
    with Path(tempfile.gettempdir(), "nsr-bench.lock").open("w") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
