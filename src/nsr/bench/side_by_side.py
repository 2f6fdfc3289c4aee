"""Cases of a benchmark in processes of their own: all compile at once, each is measured while nothing else runs.

Compiling the models of a case takes most of a benchmark's time and one core; measuring takes seconds and the whole GPU.
Who builds holds a shared lock, who measures an exclusive one, so that no measurement sees another process at work, also
where two benchmarks are started at the same time.
"""

import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

Case = TypeVar("Case")


def measure_cases(
    measure: Callable[[Case, torch.device, bool], dict[str, Any]],
    cases: Sequence[Case],
    device: torch.device,
    quick: bool,
) -> list[dict[str, Any]]:
    """``measure(case, device, quick)`` of every case, in order; on a GPU each in a process of its own.

    ``measure`` is a function of a module, which wraps its two halves in :func:`building` and :func:`measuring`.
    """
    if device.type != "cuda" or quick or len(cases) == 1:
        return [measure(case, device, quick) for case in cases]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // len(cases))))
    with ProcessPoolExecutor(len(cases), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, cases, [device] * len(cases), [quick] * len(cases)))


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
