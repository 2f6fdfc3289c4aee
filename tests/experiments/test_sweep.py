"""Sweeps: every run once, each in its own process; what is lost is started again, what fails is not."""

import resource
from pathlib import Path

import pytest

from experiments import sweep_tasks
from nsr.experiments.local_engine import local_engine
from nsr.experiments.ray_engine import ray_engine
from nsr.experiments.record import read
from nsr.experiments.sweep import Task, run_sweep


def check(folder: Path, count: int) -> set[str]:
    """All present, none doubled; the processes that made them."""
    assert len(list((folder / "results" / "tree").iterdir())) == count
    makers = []
    for number in range(count):
        assert read(folder / "results" / "tree" / f"{number}.json").status == "done"
        makers += (folder / f"run-{number}.made").read_text().split()
    assert len(makers) == count
    return set(makers)


def soak(folder: Path, count: int) -> None:
    engine = local_engine(4, preload=["nsr.experiments.attempt"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB
    ended = run_sweep(sweep_tasks.tasks(folder, count), engine, sweep_tasks.make, lambda _: None)
    assert [(one.code, one.attempts) for one in ended] == [(0, 1)] * count
    assert len(check(folder, count)) == count  # a process each
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_soak_of_twenty(tmp_path: Path) -> None:
    soak(tmp_path, 20)


@pytest.mark.slow
def test_soak_of_two_hundred(tmp_path: Path) -> None:
    soak(tmp_path, 200)


def test_lost_runs_are_started_again_and_failed_ones_are_not(tmp_path: Path) -> None:
    tasks = [
        Task("run-0", ("once", str(tmp_path), "0")),
        Task("run-1", ("fail", str(tmp_path), "1")),
        Task("run-2", ("die", str(tmp_path), "2")),
        Task("run-3", ("note", str(tmp_path), "3")),
    ]
    said: list[str] = []
    ended = run_sweep(tasks, local_engine(2, retries=2), sweep_tasks.make, said.append)
    assert [(one.code, one.attempts) for one in ended] == [(0, 2), (3, 1), (-9, 3), (0, 1)]
    assert any(line.startswith("run-0: done at attempt 2") for line in said)
    assert any(line.startswith("run-1: failed with code 3") for line in said)


def test_a_name_stands_for_one_run(tmp_path: Path) -> None:
    twice = sweep_tasks.tasks(tmp_path, 1) * 2
    with pytest.raises(ValueError, match="more than once: run-0"):
        run_sweep(twice, local_engine(1), sweep_tasks.make, print)
    with pytest.raises(ValueError, match="workers=0"):
        local_engine(0)


def test_gpus_are_dealt_out(tmp_path: Path) -> None:
    tasks = [Task(f"run-{number}", (str(tmp_path / str(number)),)) for number in range(4)]
    run_sweep(tasks, local_engine(4, gpus=["0", "3"]), sweep_tasks.visible, lambda _: None)
    assert sorted((tmp_path / str(number)).read_text() for number in range(4)) == ["0", "0", "3", "3"]


@pytest.mark.slow
def test_a_worker_killed_on_a_real_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # its workers are new processes
    tasks = [Task(f"run-{number}", (kind, str(tmp_path), str(number))) for number, kind in enumerate(("note", "once"))]
    tasks.append(Task("run-2", ("fail", str(tmp_path), "2")))
    ended = run_sweep(tasks, ray_engine(workers=2), sweep_tasks.make, lambda _: None)
    assert [(one.code, one.attempts) for one in ended] == [(0, 1), (0, 2), (3, 1)]
    check(tmp_path, 2)
