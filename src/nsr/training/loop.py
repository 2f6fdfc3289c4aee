"""The outer loop that every task shares: epochs, looks, checkpoints, the end. What an epoch is, the task says.

Replicas stop at different epochs, and one that has stopped costs as much as one that trains. So a stack is narrowed to
those that go on, and the trainer that it came from keeps the state of all.

A run pauses after each epoch, so that several can take turns on one GPU: a captured step of a small model leaves most
of it idle, and steps on different streams fill it.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from nsr.training import interruption
from nsr.training.checkpoint import Keeper
from nsr.training.plateau import Plateau
from nsr.training.progress import Progress, Watch

SAVE_EVERY = 60.0  # seconds between two checkpoints
NARROW_BELOW = 0.75  # the share of a stack still training at which building a smaller one pays

T = TypeVar("T")
P = ParamSpec("P")
Run = Generator[None, None, T]
"""A run that pauses after each epoch; what it returns is its outcome."""


class Trainer(Protocol):
    """The state of a run and its epoch.

    Attributes:
        plateau: Schedule and stopping of each replica.
        latest: The monitored metric at the latest evaluation, ``[R]``.
    """

    plateau: Plateau
    latest: Tensor

    def epoch(self, number: int) -> None:
        """Train epoch ``number``, counted from 0; evaluate where it is time to."""

    def state(self) -> dict[str, Tensor]:
        """Every tensor that an epoch changes, each ``[R, ...]`` or a scalar that all replicas share."""

    def narrowed(self, replicas: Sequence[int]) -> "Trainer":
        """A new trainer of some of the replicas, made as this one was; its state is given to it afterwards."""


def train(
    trainer: Trainer,
    epochs: int,
    look_every: int,
    watch: Watch,
    save_to: Path | None = None,
    configuration: dict[str, Any] | None = None,
    max_seconds: float | None = None,
) -> Run[tuple[int, float]]:
    """Train until every replica has stopped, the epochs are done, or the time is up; pause after each epoch.

    Args:
        trainer: What to train.
        epochs: At most so many.
        look_every: Epochs between two looks at the device; between them nothing is read back from it.
        watch: Told where the run stands at each look.
        save_to: Where to keep a checkpoint, about once a minute; a run that finds one goes on from it. It stays there:
            whoever has written down the result removes it.
        configuration: What makes a checkpoint that of this run.
        max_seconds: Stop after the first epoch that ends later than this.

    Returns:
        Epochs done, and the seconds they took, over all parts of a run that was interrupted.
    """
    keeper = Keeper(save_to, configuration or {}, SAVE_EVERY)
    stack = _Stack(trainer)
    done, found = 0, keeper.resume()
    if found:
        done = found.epoch
        for name, tensor in trainer.state().items():
            tensor.data.copy_(found.state[name])
    began, first = time.monotonic(), done
    end = math.inf if max_seconds is None else began + max_seconds
    while done < epochs:
        stack.epoch(done)
        done += 1
        up = time.monotonic() >= end  # an epoch may be long: time is no matter of looks
        if done % look_every and done < epochs and not up and not interruption.requested():
            yield
            continue
        stack.give_back()
        plateau = trainer.plateau
        active = int(plateau.active.sum())  # waits for the device
        seconds = max(time.monotonic() - began, 1e-9)
        best, rate, pace = plateau.best.tolist(), plateau.rate.tolist(), (done - first) / seconds
        over = not active or began + seconds >= end
        left = 0.0 if over else min((epochs - done) / pace, end - began - seconds)
        watch(Progress(done, epochs, trainer.latest.tolist(), best, rate, active, seconds, pace, left))
        _refuse_nan(trainer, done)
        if not over or active:  # of a run that time has stopped, for one that has more of it
            keeper.keep(trainer.state, done, stopped=over)
        if over:
            break
        if done < epochs:
            stack.narrow()
        yield
    return done, keeper.earlier + time.monotonic() - began


class _Stack:
    """The replicas of a trainer that go on, as a smaller trainer once enough others have stopped."""

    def __init__(self, whole: Trainer) -> None:
        self.whole = self.now = whole
        self.rows = torch.arange(len(whole.latest), device=whole.latest.device)

    def epoch(self, number: int) -> None:
        self.now.epoch(number)

    def give_back(self) -> None:
        """Bring the state of all replicas up to date."""
        if self.now is self.whole:
            return
        state = self.whole.state()
        for name, tensor in self.now.state().items():
            if tensor.dim():
                state[name].data[self.rows] = tensor.data
            else:
                state[name].data.copy_(tensor)
        self.whole.latest[self.rows] = self.now.latest

    def narrow(self) -> None:
        """Go on without the replicas that have stopped, where they are enough; the whole is up to date."""
        active = self.whole.plateau.active
        if int(active.sum()) > NARROW_BELOW * len(self.rows):
            return
        self.rows = active.nonzero().squeeze(1)
        self.now = self.whole.narrowed(self.rows.tolist())
        state = self.whole.state()
        for name, tensor in self.now.state().items():
            tensor.data.copy_(state[name][self.rows] if tensor.dim() else state[name])


def at_once(run: Callable[P, Run[T]]) -> Callable[P, T]:
    """The function that makes a run without a pause and returns its outcome."""

    @wraps(run)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        return take_turns([run(*args, **kwargs)], torch.device("cpu"))[0]

    return whole


def take_turns(runs: Sequence[Run[T]], device: torch.device) -> list[T]:
    """Make runs side by side, an epoch of each in turn, on a GPU each on a stream of its own; their outcomes."""
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in runs]
    outcomes: dict[int, T] = {}
    while len(outcomes) < len(runs):
        stopping = interruption.requested()  # each run then ends this round with a checkpoint
        for number, (run, stream) in enumerate(zip(runs, streams, strict=True)):
            if number in outcomes:
                continue
            with torch.cuda.stream(stream):  # of no effect where there is none
                try:
                    next(run)
                except StopIteration as end:
                    outcomes[number] = end.value
        if stopping and len(outcomes) < len(runs):
            interruption.leave_if_requested()
    return [outcomes[number] for number in range(len(runs))]


def _refuse_nan(trainer: Trainer, done: int) -> None:
    if bool(torch.stack([tensor.isnan().any() for tensor in trainer.state().values()]).any()):
        raise ValueError(
            f"After {done} epochs the weights are no longer numbers: training diverged. After tf32 or bf16 try "
            "--precision fp32; to find the seed or split that did, train fewer together."
        )


def named(**parts: dict[str, Tensor] | list[Tensor]) -> dict[str, Tensor]:
    """The states of the parts of a trainer as one: ``part.name`` for each tensor."""
    return {
        f"{part}.{name}": tensor
        for part, state in parts.items()
        for name, tensor in (state.items() if isinstance(state, dict) else enumerate(state))
    }
