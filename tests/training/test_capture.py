"""What a step does that a CUDA graph refuses, with the CUDA of a stand-in; captures themselves are GPU tests."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from nsr.training.capture import CapturedStep


class _Graph:
    def replay(self) -> None:
        """The step of a captured graph runs on the device; nothing is to be seen of it here."""


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the next captures fail with."""
    to_come: list[str] = []

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        yield
        if to_come:
            raise RuntimeError(to_come.pop())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(CapturedStep, "_on_side_stream", lambda self: self.step())
    monkeypatch.setattr("nsr.training.capture.one_capture", nullcontext)
    return to_come


def made(calls: int) -> tuple[CapturedStep, int]:
    """A step after so many calls, and how often it ran outside of a graph, attempts at capturing included."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    captured = CapturedStep(step, torch.device("cuda"))
    for _ in range(calls):
        captured()
    return captured, count


def test_a_capture_that_fails_is_tried_again(refusals: list[str]) -> None:
    refusals += ["a kernel was loaded"]
    captured, count = made(calls=12)
    assert captured.graph is not None
    assert count == 3 + (1 + 1) + 3 + 1  # eager, the failed capture and its step, eager, the capture


def test_one_that_fails_twice_is_left_with_a_warning(refusals: list[str]) -> None:
    refusals += ["again", "a kernel was loaded"]
    with pytest.warns(UserWarning, match="runs eagerly: again"):
        captured, count = made(calls=12)
    assert captured.graph is None
    assert count == 12 + 2  # every call, and the two attempts
