"""Being asked to stop: SIGTERM and Ctrl-C let a run reach the end of its epoch, write a checkpoint and leave."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from nsr.training.distributed import Group

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_requested: int | None = None


class Interrupted(SystemExit):
    """A run has stopped because it was asked to; the process leaves with 143 after SIGTERM and 130 after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextmanager
def noticed() -> Iterator[None]:
    """Within this block a first SIGTERM or Ctrl-C is a request, see :func:`requested`; a second one ends the process.

    Python delivers signals to the main thread alone: elsewhere the block changes nothing.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, _: FrameType | None) -> None:
        global _requested
        _requested = number
        for each, handler in before.items():
            signal.signal(each, handler)

    _requested = None
    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _requested = None


def requested() -> bool:
    """Whether this process has been asked to stop."""
    return _requested is not None


def share(group: Group) -> None:
    """Let a request to one process of a group be one to all, so that they leave at the same place."""
    global _requested
    if group.size > 1 and int(group.sum(torch.tensor(int(requested()), device=group.device))) and not requested():
        _requested = signal.SIGTERM


def leave_if_requested() -> None:
    """To be called where nothing is lost by leaving.

    Raises:
        Interrupted: The process has been asked to stop.
    """
    if _requested is not None:
        raise Interrupted(_requested)
