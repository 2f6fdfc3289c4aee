"""The loop of the graph tasks: stopped runs leave checkpoints, all of them; diverged ones say so."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsr.training import checkpoint, interruption, loop
from nsr.training.plateau import Plateau, PlateauRule
from nsr.training.progress import Progress, nobody

CPU = torch.device("cpu")


class Counting:
    """Counts its epochs; at some epoch something happens."""

    def __init__(self, at: int = 0, event: Callable[["Counting"], None] = lambda _: None) -> None:
        self.plateau = Plateau(PlateauRule("max", rate=1.0, patience=100, stop_after=100), 1, CPU)
        self.latest, self.count = torch.zeros(1), torch.zeros(1)
        self.at, self.event = at, event

    def epoch(self, number: int) -> None:
        self.count += 1
        if number + 1 == self.at:
            self.event(self)

    def state(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}


def test_a_request_to_stop_is_answered_by_every_run(tmp_path: Path) -> None:
    def stop(_: Counting) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    trainers = [Counting(), Counting(at=3, event=stop), Counting()]

    def runs() -> list[loop.Run[tuple[int, float]]]:
        return [
            loop.train(trainer, 20, 10, nobody, tmp_path / str(number), {"run": number})
            for number, trainer in enumerate(trainers)
        ]

    with interruption.noticed(), pytest.raises(SystemExit) as left:
        loop.take_turns(runs(), CPU)
    assert left.value.code == 143
    for number, trainer in enumerate(trainers):
        epoch = checkpoint.load(tmp_path / str(number), {"run": number}).epoch  # type: ignore[union-attr]
        assert epoch == int(trainer.count)
        assert epoch < 6  # long before the next look
    trainers = [Counting() for _ in trainers]
    assert [done for done, _ in loop.take_turns(runs(), CPU)] == [20, 20, 20]
    assert [int(trainer.count) for trainer in trainers] == [20, 20, 20]


def test_a_request_in_the_last_epoch_loses_nothing(tmp_path: Path) -> None:
    run = loop.train(Counting(), 1, 10, nobody, tmp_path / "run")
    with interruption.noticed():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(SystemExit):
            loop.take_turns([run], CPU)
    trainer = Counting(at=1, event=lambda _: pytest.fail("the epoch was done already"))
    ((done, _),) = loop.take_turns([loop.train(trainer, 1, 10, nobody, tmp_path / "run")], CPU)
    assert (done, int(trainer.count)) == (1, 1)


def test_weights_that_are_no_numbers_end_the_run() -> None:
    def diverge(trainer: Counting) -> None:
        trainer.count.fill_(float("nan"))

    with pytest.raises(ValueError, match=r"After 10 epochs the weights are no longer numbers.*--precision fp32"):
        loop.take_turns([loop.train(Counting(at=4, event=diverge), 20, 10, nobody)], CPU)


def test_the_time_ends_a_run_between_two_looks() -> None:
    seen: list[Progress] = []
    trainer = Counting(at=3, event=lambda _: time.sleep(0.3))
    ((done, seconds),) = loop.take_turns([loop.train(trainer, 10**6, 10**5, seen.append, max_seconds=0.2)], CPU)
    assert done == int(trainer.count) < 10**5
    assert seconds >= 0.2
    assert [(progress.epoch, progress.left) for progress in seen] == [(done, 0.0)]


def test_a_run_that_time_has_stopped_goes_on_with_more_of_it(tmp_path: Path) -> None:
    def run(trainer: Counting, max_seconds: float) -> int:
        made = loop.train(trainer, 50, 10, nobody, tmp_path / "run", max_seconds=max_seconds)
        return loop.take_turns([made], CPU)[0][0]

    stopped = run(Counting(at=3, event=lambda _: time.sleep(0.3)), 0.2)
    assert stopped < 50
    trainer = Counting(at=stopped, event=lambda _: pytest.fail("the epoch was done already"))
    assert run(trainer, 60) == int(trainer.count) == 50


def test_seconds_are_those_of_all_parts_of_a_run(tmp_path: Path) -> None:
    def run(slow: float, max_seconds: float) -> float:
        trainer = Counting(at=2, event=lambda _: time.sleep(slow))
        made = loop.train(trainer, 50, 10, nobody, tmp_path / "run", max_seconds=max_seconds)
        return loop.take_turns([made], CPU)[0][1]

    first = run(0.5, 0.4)
    assert first >= 0.5
    begin = time.monotonic()
    whole = run(0.5, 60)  # the slow epoch was done before
    assert 0.5 <= whole <= first + time.monotonic() - begin


def test_what_is_left_is_told() -> None:
    seen: list[Progress] = []

    def run(epochs: int, max_seconds: float | None = None) -> None:
        trainer = Counting(at=2, event=lambda _: time.sleep(0.05))
        loop.take_turns([loop.train(trainer, epochs, 2, seen.append, max_seconds=max_seconds)], CPU)

    run(4)
    first, last = seen
    assert first.left == pytest.approx(2 / first.pace)
    assert 0.05 <= first.seconds == pytest.approx(2 / first.pace)
    assert last.left == 0
    seen.clear()
    run(10**9, max_seconds=0.2)
    assert all(progress.left <= 0.2 - progress.seconds + 1e-6 for progress in seen[:-1])
    assert seen[-1].left == 0
