"""Models of a benchmark in processes of their own: all compile at once, then one conductor lets them measure in turn.

Compiling takes most of a benchmark's time and one core a model; measuring takes seconds and the whole GPU. So every
model is built by a process of its own. When all have theirs, the conductor asks one arm after the other for a few
calls, round after round. Nobody else works meanwhile, also where two benchmarks are started at the same time: who
builds holds a shared lock, who measures an exclusive one.
"""

import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsr.bench.interleaved import Timing, clock, peak_memory, take_turns
from nsr.bench.kernel_times import Kernels, kernel_times

Arms = dict[str, Callable[[], object]]

_PATIENCE = 15.0  # seconds that a process has to end by itself


class Model(NamedTuple):
    """What one process builds.

    Attributes:
        build: A function of a module; it returns the model's arms by name.
        arguments: Its arguments.
    """

    build: Callable[..., Arms]
    arguments: tuple[Any, ...]


class Measured(NamedTuple):
    """What became of an arm.

    Attributes:
        timing: Of one call.
        peak_bytes: Memory that a call holds at its peak on a GPU, weights included; where it replays a CUDA graph, all
            that its graph keeps.
        kernels: Of one call on a GPU, where they were asked for.
    """

    timing: Timing
    peak_bytes: int | None
    kernels: Kernels | None = None


def measure_models(
    cases: Mapping[str, list[Model]],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    limit: float | None = None,
    profile: Callable[[str], bool] = lambda name: False,
) -> dict[str, dict[str, Measured]]:
    """Measure the arms of the models of each case side by side.

    Args:
        cases: Models by the name of their case; the names of arms differ within one.
        device: On a GPU each model gets a process of its own; elsewhere they share this one.
        rounds: Measurements of each arm.
        seconds: About how long one measurement lasts.
        limit: Seconds after which a model that is not built is given up, with a warning.
        profile: Says by its name which arm's kernels are wanted; on a GPU, after all have been timed.
    """
    if device.type != "cuda":
        return {case: _measure_here(models, device, rounds, seconds) for case, models in cases.items()}
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of a process: there are many
    hosts = {case: [_Host(model, device) for model in models] for case, models in cases.items()}
    everyone = [host for those in hosts.values() for host in those]
    try:
        with _locked(fcntl.LOCK_SH):
            _build(everyone, os.cpu_count() or 1, limit)
        with _locked(fcntl.LOCK_EX):
            return {case: _in_turn(those, rounds, seconds, profile) for case, those in hosts.items()}
    finally:
        for host in everyone:
            host.dismiss()
        for host in everyone:
            host.close()


def _measure_here(models: list[Model], device: torch.device, rounds: int, seconds: float) -> dict[str, Measured]:
    arms = {name: arm for model in models for name, arm in model.build(*model.arguments).items()}
    times = take_turns({name: clock(arm, device) for name, arm in arms.items()}, rounds=rounds, seconds=seconds)
    return {name: Measured(timing, None) for name, timing in times.items()}


def _in_turn(hosts: list["_Host"], rounds: int, seconds: float, profile: Callable[[str], bool]) -> dict[str, Measured]:
    keeper = {name: host for host in hosts for name in host.peaks}
    times = take_turns({name: host.clock(name) for name, host in keeper.items()}, rounds=rounds, seconds=seconds)
    return {
        name: Measured(timing, keeper[name].peaks[name], keeper[name].kernels(name) if profile(name) else None)
        for name, timing in times.items()
    }


class _Host:
    """A process that builds a model and keeps its arms."""

    def __init__(self, model: Model, device: torch.device) -> None:
        processes = multiprocessing.get_context("spawn")
        self.connection, self._theirs = processes.Pipe()
        self.model = model
        self.peaks: dict[str, int | None] = {}
        # no daemon: the compiler has processes of its own
        self._process = processes.Process(target=_serve, args=(self._theirs, model, device))

    def start(self) -> None:
        """Begin to build."""
        self._process.start()
        self._theirs.close()

    def receive(self) -> None:
        """Take what the process has to say about its arms."""
        try:
            self.peaks = self.connection.recv()
        except EOFError:  # its error is on the terminal
            warnings.warn(f"{self._name()} could not be built and is left out.", stacklevel=2)

    def give_up(self, limit: float | None) -> None:
        """End a process that took too long."""
        warnings.warn(f"{self._name()} was not built after {limit} s and is left out.", stacklevel=2)
        self.dismiss()

    def clock(self, name: str) -> Callable[[int], float]:
        """Milliseconds of some calls of one of its arms."""

        def ask(calls: int) -> float:
            self.connection.send((name, calls))
            return self.connection.recv()

        return ask

    def kernels(self, name: str) -> Kernels:
        """The kernels of one call of one of its arms."""
        self.connection.send((name, None))
        return self.connection.recv()

    def dismiss(self) -> None:
        """Let it end, with time to clean up: what it shares with other processes outlives one that is killed."""
        if self._process.is_alive():
            if self.peaks:
                self.connection.send(None)
            else:
                self._process.terminate()

    def close(self) -> None:
        """End it, if it was started, at the latest now."""
        if self._process.pid is not None:
            self._process.join(_PATIENCE)
            self._process.kill()
            self._process.join()

    def _name(self) -> str:
        return ", ".join(map(str, self.model.arguments))


def _build(hosts: list[_Host], at_once: int, limit: float | None) -> None:
    """Let every process build its model, the first ones first, for as long as ``limit`` says."""
    waiting = list(hosts)
    building: dict[Connection, _Host] = {}
    end = None if limit is None else time.monotonic() + limit
    while waiting or building:
        while waiting and len(building) < at_once:
            host = waiting.pop(0)
            host.start()
            building[host.connection] = host
        ready = wait(list(building), None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            for host in (*building.values(), *waiting):
                host.give_up(limit)
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            building.pop(connection).receive()


def _serve(connection: Connection, model: Model, device: torch.device) -> None:
    """Build the arms and say so; then time calls of an arm, or name its kernels, for as long as somebody asks."""
    signal.signal(signal.SIGTERM, _leave)
    arms = model.build(*model.arguments)
    connection.send({name: _held_memory(name, arm, device) for name, arm in arms.items()})
    clocks = {name: clock(arm, device) for name, arm in arms.items()}
    while (request := connection.recv()) is not None:
        name, calls = request
        connection.send(kernel_times(arms[name], device) if calls is None else clocks[name](calls))


def _leave(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    sys.exit()


def _held_memory(name: str, arm: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a call; a captured arm's includes the memory of its graph that lies between allocations."""
    peak = peak_memory(arm, device)
    if peak is None or "captured" not in name:
        return peak
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return peak + sum(part["total_size"] - part["allocated_size"] for part in pools)


@contextmanager
def _locked(kind: int) -> Iterator[None]:
    with Path(tempfile.gettempdir(), "nsr-bench.lock").open("w") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
