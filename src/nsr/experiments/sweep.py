"""Many runs, one task each: on this machine or over a Ray cluster, the same commands and the same results.

A task runs in a process of its own, so that nothing but its result outlives it. A task whose process is lost (killed,
out of memory, a machine gone) is started again and goes on from its checkpoint; a task that ends with an error of its
own is not: its record says why.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One run to make.

    Attributes:
        name: What to call it.
        arguments: The command line after ``nsr``.
    """

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """What became of a task.

    Attributes:
        task: Which.
        code: The exit code of its last attempt, negative for a signal; 0 is a result.
        attempts: How often it was started.
    """

    task: Task
    code: int
    attempts: int


Make = Callable[[Task], int]
"""Makes a run in the process that it is called in, and returns its exit code; picklable by its name."""

Engine = Callable[[Sequence[Task], Make], Iterable[Ended]]
"""Makes runs, each in a process of its own, and yields them as they end."""


def is_loss(code: int) -> bool:
    """Whether an attempt's process was taken from it (by a signal, SIGTERM included), rather than that it failed."""
    return code < 0 or code == 143


def run_sweep(tasks: Sequence[Task], engine: Engine, make: Make, say: Callable[[str], None]) -> list[Ended]:
    """Make every run.

    Args:
        tasks: With names of their own.
        engine: Where: see :func:`nsr.experiments.local_engine.local_engine` and
            :func:`nsr.experiments.ray_engine.ray_engine`.
        make: How.
        say: Told a line for each task.

    Returns:
        How each task ended, in the order of ``tasks``.
    """
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"These runs are in the sweep more than once: {', '.join(twice)}.")
    begin = time.perf_counter()
    ended: dict[str, Ended] = {}
    for one in engine(tasks, make):
        ended[one.task.name] = one
        state = "done" if one.code == 0 else f"failed with code {one.code}"
        again = f" at attempt {one.attempts}" if one.attempts > 1 else ""
        say(f"{one.task.name}: {state}{again} ({len(ended)}/{len(tasks)}, {time.perf_counter() - begin:.0f} s)")
    return [ended[name] for name in names]
