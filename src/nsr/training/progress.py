"""What a training loop tells whoever watches it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a run stands; told only every few epochs, because looking costs a synchronisation.

    Attributes:
        epoch: Epochs done.
        epochs: At most so many.
        metric: The monitored metric of each replica at its latest evaluation.
        best: The best of each replica.
        rate: The learning rate of each replica.
        active: How many replicas are still training.
        seconds: Since the run began, or was resumed.
        pace: Epochs a second in that time.
        left: Seconds at most until the epochs are done or the time is up; 0 where a run ends with this look.
    """

    epoch: int
    epochs: int
    metric: list[float]
    best: list[float]
    rate: list[float]
    active: int
    seconds: float
    pace: float
    left: float


Watch = Callable[[Progress], None]


def nobody(_: Progress) -> None:
    """Watch without a word."""
