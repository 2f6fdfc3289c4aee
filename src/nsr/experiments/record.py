"""One small JSON a run: what was run, with what, on what, and what came out. The report reads nothing else."""

import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nsr.training.whole_file import replacing

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """The result of one run.

    Attributes:
        experiment: Which table or figure, and the folder of the file.
        cell: Which cell of it, as names and values; they also name the file.
        metrics: Numbers, accuracies as fractions of one.
        config: Everything else that decides the outcome. A run whose record has the same is not run again.
        command: What repeats it.
        environment: See :func:`environment`.
        seconds: Wall time of the run; for replicas that ran together, of all of them.
        status: ``"done"``; ``"stopped"`` where a time limit ended the run before its own criterion did; ``"failed"``.
        error: Why it failed.
    """

    experiment: str
    cell: dict[str, Any]
    metrics: dict[str, Any]
    config: dict[str, Any]
    command: str
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)
    status: str = "done"
    error: str = ""
    schema: int = SCHEMA


def path_of(results: Path, experiment: str, cell: dict[str, Any]) -> Path:
    """``results/<experiment>/<value>-<value>-....json``."""
    return results / experiment / f"{'-'.join(str(value) for value in cell.values())}.json"


def write(results: Path, record: Record) -> Path:
    """Write a record as a whole or not at all; what was there before is replaced."""
    path = path_of(results, record.experiment, record.cell)
    content = {name: value for name, value in asdict(record).items() if name != "error" or value}
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    with replacing(path) as partial:
        partial.write_text(text + "\n")
    return path


def read(path: Path) -> Record:
    """One record.

    Raises:
        ValueError: The file is no record of this schema.
    """
    try:
        record = Record(**json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:  # bytes that are no text are a ValueError too
        raise ValueError(f"{path} is not a result ({error}). Delete it, or repeat the run with --force.") from error
    if record.schema != SCHEMA:
        raise ValueError(f"{path} has schema {record.schema}; this version reads {SCHEMA}.")
    for name, kind in (("experiment", str), ("status", str), ("cell", dict), ("metrics", dict), ("config", dict)):
        if not isinstance(getattr(record, name), kind):
            raise ValueError(f"{path} is not a result (`{name}` is of the wrong kind). Delete it, or use --force.")
    return record


def exists(
    results: Path, experiment: str, cell: dict[str, Any], config: dict[str, Any], limit: Sequence[str] = ()
) -> bool:
    """Whether this very run has been made: the same cell with the same configuration, and it did not fail.

    Entries of the configuration that only say when to stop, ``limit``, do not matter to a run that was done before.
    """
    path = path_of(results, experiment, cell)
    if not path.is_file():
        return False
    found = read(path)
    passed_over = limit if found.status == "done" else ()
    wanted, made = (
        {key: value for key, value in one.items() if key not in passed_over}
        for one in (json.loads(json.dumps(config)), found.config)
    )
    return found.status != "failed" and made == wanted


def has_result(results: Path, experiment: str, cell: dict[str, Any]) -> bool:
    """Whether the cell has a result of whatever configuration, whose place a failure must not take."""
    try:
        return read(path_of(results, experiment, cell)).status != "failed"
    except (FileNotFoundError, ValueError):
        return False


_noted: dict[str, Any] = {}  # see note


def note(**facts: Any) -> None:
    """Have every record of this process say something of it, such as what it shares its device with."""
    _noted.update(facts)


def environment(device: torch.device) -> dict[str, Any]:
    """Commit, versions and device of this process, and what was noted of it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "matmul": torch.get_float32_matmul_precision(),
        **_noted,
    }


def command_line() -> str:
    """What the user typed, with the program by its plain name, as a shell takes it."""
    return shlex.join(["nsr", *sys.argv[1:]])


@cache
def _commit() -> str:
    """The commit of the source tree, with a ``+`` where it has been changed; empty outside a repository.

    As it was when first asked for, ahead of a run: what runs has been read, whatever becomes of the tree meanwhile.
    """
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "src"],
            cwd=folder.parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _finite(value: Any) -> Any:
    """JSON knows no ``nan``: what is not a finite number is null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
