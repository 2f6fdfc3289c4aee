"""The loop of the graph tasks: stopped runs leave checkpoints, all of them; diverged ones say so."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsr.training import checkpoint, interruption, loop
from nsr.training.plateau import Plateau, PlateauRule
from nsr.training.progress import nobody

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
        _, epoch = checkpoint.load(tmp_path / str(number), {"run": number})  # type: ignore[misc]
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
