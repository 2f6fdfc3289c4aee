"""Read a folder of results; what cannot be used is kept with the reason, never dropped."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from nsr.experiments.record import SCHEMA

REPLICATES = ("seed", "split")  # the keys of a cell over which runs are averaged
COUNTED = ("done", "stopped")  # a run that a time limit stopped has its numbers, and says so

Cell = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One result file: a cell of an experiment, measured once."""

    path: Path
    experiment: str
    status: str
    cell: Cell
    metrics: dict[str, Any]
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def counts(self) -> bool:
        """Whether it has come to numbers."""
        return self.status in COUNTED

    @property
    def replicate(self) -> str:
        """Which split or seed of its configuration this run is."""
        return ", ".join(f"{key} {self.cell[key]}" for key in REPLICATES if key in self.cell)


@dataclass(frozen=True)
class Problem:
    """A file that does not count, why, and the cell it would have filled as far as that can be told."""

    path: Path
    reason: str
    experiment: str
    cell: Cell | None


def read_folder(folder: Path) -> tuple[list[Run], list[Problem]]:
    """Every ``<folder>/<experiment>/<name>.json``, in the order of their names.

    Args:
        folder: The results; a folder that does not exist is an error, an empty one is not.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the folder with results by --results")
    runs: list[Run] = []
    problems: list[Problem] = []
    seen: dict[tuple[str, frozenset[tuple[str, str]]], Path] = {}
    for path in sorted(folder.glob("*/*.json")):
        outcome = read_file(path)
        if isinstance(outcome, Run):
            key = (outcome.experiment, cell_key(outcome.cell, ()))
            if key in seen:
                reason = f"the same cell as {seen[key].name}, which is shown"
                outcome = Problem(path, reason, outcome.experiment, outcome.cell)
            else:
                seen[key] = path
        if isinstance(outcome, Problem):
            problems.append(outcome)
            continue
        runs.append(outcome)
        # what came out as no finite number is written as null: the run's other numbers count
        empty = [name for name, value in outcome.metrics.items() if value is None]
        if empty:
            reason = f"not a finite number: {', '.join(empty[:3])}"
            problems.append(Problem(path, reason, outcome.experiment, outcome.cell))
    return runs, problems


def read_file(path: Path) -> Run | Problem:
    """One result file as a run, or the reason why it is none."""
    text, experiment = "", path.parent.name
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
        return _run(path, document)
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) or "Unterminated" in error.msg
        reason = "truncated" if ends_early else f"no valid JSON (line {error.lineno}: {error.msg})"
        return Problem(path, reason, experiment, _cell_in(text))
    except (OSError, UnicodeDecodeError) as error:
        return Problem(path, f"cannot be read ({type(error).__name__})", experiment, None)
    except RecursionError:
        return Problem(path, "no result: nested too deeply", experiment, None)
    except ValueError as error:
        return Problem(path, str(error), experiment, _cell_in(text))


def _run(path: Path, document: Any) -> Run:
    if not isinstance(document, dict):
        raise ValueError("no result: the file holds no JSON object")
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(f"schema {schema} is newer than this nsr reads ({SCHEMA}): upgrade nsr")
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r} is unknown; {SCHEMA} is expected")
    for name, kind in (("experiment", str), ("status", str), ("cell", dict), ("metrics", dict)):
        if not isinstance(document.get(name), kind):
            raise ValueError(f"`{name}` is missing or of the wrong kind")
    broken = [name for name, value in _numbers(document["metrics"]) if not isfinite(value)]
    if broken:
        raise ValueError(f"not a finite number: {', '.join(broken[:3])}")
    environment = document.get("environment")
    config = document.get("config")
    seconds = document.get("seconds")
    return Run(
        path=path,
        experiment=document["experiment"],
        status=document["status"],
        cell=document["cell"],
        metrics=document["metrics"],
        command=str(document.get("command") or ""),
        environment={str(k): str(v) for k, v in environment.items()} if isinstance(environment, dict) else {},
        config=config if isinstance(config, dict) else {},
        seconds=float(seconds) if isinstance(seconds, int | float) and isfinite(seconds) else 0.0,
        error=str(document.get("error") or document.get("reason") or ""),
    )


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number below ``value`` with the dotted name it goes by."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, float):
        yield name, value
    elif isinstance(value, int):
        yield name, value if abs(value) < 2**1023 else inf  # JSON has integers that no float can hold


def _cell_in(text: str) -> Cell | None:
    """The cell of a document that does not parse: it stands before the metrics, so it often survives."""
    found = re.search(r'"cell"\s*:\s*(\{[^{}]*\})', text)
    try:
        return json.loads(found.group(1)) if found else None
    except ValueError:
        return None


def cell_key(cell: Mapping[str, Any], without: tuple[str, ...] = REPLICATES) -> frozenset[tuple[str, str]]:
    """A cell as a key that leaves the replicate out and compares ``4`` with ``"4"`` and ``a_b`` with ``a-b`` equal."""
    return frozenset((key, str(value).replace("_", "-")) for key, value in cell.items() if key not in without)
