"""Make a run once, and leave a record whatever becomes of it."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsr.experiments import record
from nsr.experiments.lock import Taken, locked
from nsr.experiments.record import Record
from nsr.training import interruption


@contextmanager
def attempt(results: Path, planned: Sequence[Record], *, again: bool = False) -> Iterator[None]:
    """Hold the results of runs that are made together; if they fail, write down that they did and why.

    A failure is written down where there is no result: numbers that were obtained stay, of whatever configuration.

    Requests to stop are noticed within: see :mod:`nsr.training.interruption`. A stopped run leaves no record, because
    its checkpoint goes on where it was.

    Args:
        results: Where records go.
        planned: What each run will be recorded as, but for metrics, seconds and status.
        again: Whether runs that have been made already may be made again.

    Raises:
        Taken: Another process is at one of the runs, or has just made it.
        ValueError: The disk is full, or a file is gone.
    """
    begin = time.perf_counter()
    with ExitStack() as held:
        for one in planned:
            path = record.path_of(results, one.experiment, one.cell)
            held.enter_context(locked(path))
            if not again and record.exists(results, one.experiment, one.cell, one.config):
                raise Taken(f"{path} has been made by another process in the meantime.")
        held.enter_context(interruption.noticed())
        try:
            yield
        except Exception as error:
            cause = _explained(error)
            for one in planned:
                if not record.has_result(results, one.experiment, one.cell):
                    seconds = time.perf_counter() - begin
                    record.write(
                        results,
                        replace(one, status="failed", error=str(cause) or type(cause).__name__, seconds=seconds),
                    )
            if cause is error:
                raise
            raise cause from error


def say_what_is_replaced(
    results: Path, experiment: str, cells: Sequence[dict[str, Any]], say: Callable[[str], None]
) -> None:
    """Ahead of runs whose results will take the place of others, such as those of another precision.

    Args:
        results: Where records go.
        experiment: Of the runs.
        cells: Of those that will be made.
        say: Told a line, where there is such a result.
    """
    there = [cell for cell in cells if record.has_result(results, experiment, cell)]
    if there:
        who = f"{record.path_of(results, experiment, there[0])}"
        who += f" and {len(there) - 1} more have results" if len(there) > 1 else " has a result"
        say(f"{who} of another configuration or time limit, which will be replaced; --results takes another folder")


def _explained(error: Exception) -> Exception:
    """What is no mistake of the program, in words that say what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ValueError(f"The disk is full ({error}). Free some room and start the run again: it goes on from there.")
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{error.filename} is gone. Put it back and start the run again.")
    return error
