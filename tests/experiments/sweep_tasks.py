"""What the sweep's tests run: tiny runs that note that they were made, importable by name in another process."""

import os
import signal
from pathlib import Path

from nsr.experiments import record
from nsr.experiments.attempt import attempt
from nsr.experiments.record import Record
from nsr.experiments.sweep import Task


def tasks(folder: Path, count: int, kind: str = "note") -> list[Task]:
    return [Task(f"run-{number}", (kind, str(folder), str(number))) for number in range(count)]


def make(task: Task) -> int:
    """``note``: append a line and write a record; ``once``: die at the first attempt; ``fail``, ``die``: always."""
    kind, folder, number = task.arguments
    path = Path(folder)
    if kind == "fail":
        return 3
    if kind == "die" or (kind == "once" and _first(path / f"{task.name}.died")):
        os.kill(os.getpid(), signal.SIGKILL)
    planned = Record("tree", {"seed": int(number)}, {}, {"epochs": 1}, "nsr run", 0.0)
    with attempt(path / "results", [planned]):
        with (path / f"{task.name}.made").open("a") as file:
            file.write(f"{os.getpid()}\n")
        record.write(path / "results", planned)
    return 0


def visible(task: Task) -> int:
    """Write down which GPUs the process sees."""
    Path(task.arguments[0]).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return 0


def _first(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
