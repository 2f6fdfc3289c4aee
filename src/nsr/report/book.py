"""All results of one folder, ready to be asked for by cell; remembers what nobody asked for."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsr.report.read import Problem, Run, cell_key, read_folder

Environment = tuple[str, str]  # commit, device


class Book:
    """The runs of a results folder by experiment and cell.

    Args:
        runs: What was read.
        problems: What could not be.
    """

    def __init__(self, runs: list[Run], problems: list[Problem]) -> None:
        self.runs = runs
        self.problems = problems
        self._asked: set[Path] = set()
        self._runs: dict[tuple[str, frozenset[tuple[str, str]]], list[Run]] = defaultdict(list)
        for run in runs:
            self._runs[run.experiment, cell_key(run.cell)].append(run)
        self._problems: dict[tuple[str, frozenset[tuple[str, str]]], list[Problem]] = defaultdict(list)
        for problem in problems:
            if problem.cell is not None:
                self._problems[problem.experiment, cell_key(problem.cell)].append(problem)
        counted = Counter(environment_of(run) for run in runs if run.counts)
        self.environments: list[Environment] = [environment for environment, _ in counted.most_common()]

    @classmethod
    def read(cls, folder: Path) -> "Book":
        """Read every result under ``folder``."""
        return cls(*read_folder(folder))

    def counted(self, experiment: str, where: Mapping[str, Any]) -> list[Run]:
        """The runs of one configuration that have come to numbers, one a seed or split."""
        return [run for run in self._take(experiment, where) if run.counts]

    def unfinished(self, experiment: str, where: Mapping[str, Any]) -> list[Run]:
        """Runs of this configuration that failed, were interrupted, were stopped, or still go on."""
        return [run for run in self._take(experiment, where) if run.status != "done"]

    def unusable(self, experiment: str, where: Mapping[str, Any]) -> list[Problem]:
        """Files of this configuration that do not count."""
        return self._problems.get((experiment, cell_key(where)), [])

    def experiment(self, name: str) -> list[Run]:
        """Every run of an experiment that has come to numbers."""
        found = [run for run in self.runs if run.experiment == name and run.counts]
        self._asked.update(run.path for run in found)
        return found

    def mark(self, run: Run) -> str:
        """Empty for the environment that most runs come from, else the letter of another one."""
        position = self.environments.index(environment_of(run))
        return "" if position == 0 else letter(position)

    def count(self, environment: Environment) -> int:
        """How many runs that count come from this commit and device."""
        return sum(run.counts and environment_of(run) == environment for run in self.runs)

    def not_asked_for(self) -> list[Run]:
        """Runs that no table and no figure has used so far."""
        return [run for run in self.runs if run.path not in self._asked]

    def _take(self, experiment: str, where: Mapping[str, Any]) -> list[Run]:
        found = self._runs.get((experiment, cell_key(where)), [])
        self._asked.update(run.path for run in found)
        return found


def environment_of(run: Run) -> Environment:
    """The commit and the device that a run names; a ``+`` after a commit says that the tree had been changed."""
    commit = run.environment.get("commit", "")
    return commit[:10] + "+" * commit.endswith("+"), run.environment.get("device", "")


def letter(position: int) -> str:
    """``a``, ``b``, ... ``z``, ``aa``: the mark of an environment.

    >>> letter(1), letter(26), letter(27)
    ('a', 'z', 'aa')
    """
    name = ""
    while position > 0:
        position, digit = divmod(position - 1, 26)
        name = chr(ord("a") + digit) + name
    return name
