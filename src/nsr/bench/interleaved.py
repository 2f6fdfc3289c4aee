"""Timing several arms side by side: every round runs each arm once, so that drift hits all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over the rounds.

    Attributes:
        median: The middle one.
        low: First quartile.
        high: Third quartile.
    """

    median: float
    low: float
    high: float


def interleaved(
    arms: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, Timing]:
    """Time every arm in each of ``rounds`` rounds.

    Args:
        arms: What to call, by name; each call leaves the device with work that ends by itself.
        device: On a GPU, time is read from events on its stream; on a CPU, from the clock.
        rounds: Measurements of each arm.
        seconds: About how long one measurement lasts: as many calls as fit, at least one. 0 is one call, and none
            before it to find that out.
    """
    return take_turns({name: clock(arm, device) for name, arm in arms.items()}, rounds=rounds, seconds=seconds)


def take_turns(clocks: Mapping[str, Callable[[int], float]], *, rounds: int, seconds: float) -> dict[str, Timing]:
    """The same of clocks: each gives the milliseconds of as many calls as it is asked for."""
    calls = dict.fromkeys(clocks, 1)
    if seconds:
        for name, elapsed in clocks.items():
            elapsed(1)
            calls[name] = max(1, int(seconds * 1e3 / max(elapsed(1), 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(rounds):
        for name, elapsed in clocks.items():
            times[name].append(elapsed(calls[name]) / calls[name])
    return {name: _summary(values) for name, values in times.items()}


def clock(arm: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """The clock of an arm: milliseconds of some calls."""
    return partial(_gpu_clock if device.type == "cuda" else _cpu_clock, arm)


def peak_memory(arm: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that one call holds at its peak on a GPU, weights included; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    arm()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _gpu_clock(arm: Callable[[], object], calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        arm()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _cpu_clock(arm: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        arm()
    return (time.perf_counter() - begin) * 1e3


def _summary(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(statistics.median(values), low, high)
