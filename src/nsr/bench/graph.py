"""``nsr bench graph``: one training step of a four-layer GCN with the branch, against every honest peer.

All arms of a graph run interleaved in one process: the plain GCN and GATv2, eager and compiled; the branch as the
paper words it, eager and compiled; ``nsr.attach`` and nothing else; and the branch as the library trains it, on a GPU
captured in a CUDA graph, in each precision of the gate's product, compiled too, and as ten replicas. Products are fp32
unless an arm says TF32 or bf16. An arm that fails is recorded with its error, a captured one with its kernels.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from nsr.bench import graph_steps as steps
from nsr.bench.graph_cases import MINESWEEPER, QUICK, ROMAN_EMPIRE, TOLOKERS, GraphCase, edge_index
from nsr.bench.interleaved import interleaved
from nsr.bench.kernel_errors import kernel_errors
from nsr.bench.kernel_times import kernel_times
from nsr.bench.model_errors import model_errors
from nsr.experiments.record import Record, command_line, environment

LAYERS, WIDTH, REPLICAS = 4, 128, 10
REFERENCE = "NSR as worded, eager"  # of every ratio

# What each precision means: what torch.set_float32_matmul_precision is told, and whether bf16 autocast is on.
MODES = {
    "fp32": ("highest", False),
    "TF32": ("high", False),
    "bf16": ("medium", False),
    "bf16 autocast": ("medium", True),
}

Build = Callable[[steps.Task], Callable[[], None]]


@dataclass(frozen=True)
class Arm:
    """One way to make a training step.

    Attributes:
        build: Makes the step.
        precision: What ``torch.set_float32_matmul_precision`` is set to while it is made and run.
        replicas: How many models it trains.
        compiled: Whether ``torch.compile`` is part of it.
    """

    build: Build
    precision: str = "highest"
    replicas: int = 1
    compiled: bool = False


def cases(device: torch.device, quick: bool) -> tuple[GraphCase, ...]:
    """What is measured where."""
    if quick:
        return (QUICK,)
    return (TOLOKERS, ROMAN_EMPIRE) if device.type == "cuda" else (TOLOKERS, MINESWEEPER)


def bench_graph(
    device: torch.device,
    *,
    machine: str,
    quick: bool = False,
    only: Sequence[str] = ("*",),
    keep: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Measure every arm on every graph.

    Args:
        device: Where.
        machine: Name of the machine, the cell of the record.
        quick: A few steps on a tiny graph of what needs no compilation: shows that everything runs.
        only: Names of the arms to measure, as patterns.
        keep: Called with the record so far, after each graph.
    """
    begin = time.perf_counter()
    metrics: dict[str, Any] = {}
    origins: dict[str, str] = {}
    arms = {
        name: arm
        for name, arm in _arms(device.type == "cuda", quick).items()
        if any(fnmatchcase(name, pattern) for pattern in only)
    }
    if not arms:
        raise ValueError(f"only={list(only)} matches no arm; there are {list(_arms(device.type == 'cuda', quick))}.")
    if device.type == "cuda":
        _compile_beforehand(device, [name for name, arm in arms.items() if arm.compiled])

    def record() -> Record:
        return Record(
            experiment="bench",
            cell={"bench": "graph", "machine": machine},
            metrics=metrics,
            config={"layers": LAYERS, "width": WIDTH, "graphs": origins, "quick": quick, "only": list(only)},
            command=command_line(),
            seconds=time.perf_counter() - begin,
            environment=environment(device) | {"threads": torch.get_num_threads()},
        )

    for case in cases(device, quick):
        task, origins[case.name] = _task(case, device, quick)
        metrics[f"{case.name}, {task.members:,} members"] = _measure(task, arms, quick)
        keep(record())
    return record()


def _task(case: GraphCase, device: torch.device, quick: bool) -> tuple[steps.Task, str]:
    """The graph of a case on its device, and where it comes from."""
    edges, origin = edge_index(case)
    torch.manual_seed(0)
    width, layers = (16, 2) if quick else (WIDTH, LAYERS)
    return steps.Task(edges, case.nodes, width, layers, device), origin


def _compile_beforehand(device: torch.device, names: list[str]) -> None:
    """Fill the compilers' caches on disk, an arm a process: one after the other takes many minutes."""
    jobs = [(case, name) for case in cases(device, quick=False) for name in names]
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        wait([pool.submit(_compile, case, name, device) for case, name in jobs])  # what fails here fails below, loudly


def _compile(case: GraphCase, name: str, device: torch.device) -> None:
    torch._inductor.config.compile_threads = 1  # the processes are many already
    _build(_arms(True, False)[name], _task(case, device, quick=False)[0])


def _measure(task: steps.Task, arms: dict[str, Arm], quick: bool) -> dict[str, Any]:
    on_gpu = task.device.type == "cuda"
    result: dict[str, Any] = {
        "kernel errors": kernel_errors(task.normalised[0], task.nodes, task.width),
        "model errors": model_errors(task, MODES if on_gpu else {"fp32": MODES["fp32"]}),
    }
    built: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int | None] = {}
    for name, arm in arms.items():
        try:
            built[name], peaks[name] = _build(arm, task)
        except Exception as error:  # a peer that cannot run is a result too, and the others are still to be measured
            result[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    times = interleaved(built, task.device, rounds=2 if quick else 7 if on_gpu else 3, seconds=0.05 if on_gpu else 0.0)
    reference = times[REFERENCE].median if REFERENCE in times else None
    for name, timing in times.items():
        result[name] = {
            "milliseconds": asdict(timing),
            "speed_up": reference and reference / timing.median * arms[name].replicas,
            "peak_bytes": peaks[name],
        }
        if on_gpu and "captured" in name:
            result[name]["kernels"] = kernel_times(built[name], task.device)
    return result


def _arms(on_gpu: bool, quick: bool) -> dict[str, Arm]:
    ways = {"eager": False} if quick else {"eager": False, "compiled": True}
    peers = {"GCN": steps.plain, "GATv2": steps.attention, "NSR as worded": steps.literal}
    arms = {
        f"{name}, {way}": Arm(_step(model, compiled=compiled), compiled=compiled)
        for name, model in peers.items()
        for way, compiled in ways.items()
    }
    arms["NSR, attached, eager"] = Arm(_step(steps.attached))
    arms["NSR, eager"] = Arm(_step(steps.trained))
    if on_gpu:
        if not quick:
            arms["GCN, compiled, TF32"] = Arm(_step(steps.plain, compiled=True), "high", compiled=True)
        for precision, told in (("fp32", "highest"), ("TF32", "high"), ("bf16", "medium")):
            arms[f"NSR, captured, {precision}"] = Arm(_step(steps.trained, captured=True), told)
            if not quick:
                both = _step(steps.trained, captured=True, compiled=True)
                arms[f"NSR, compiled and captured, {precision}"] = Arm(both, told, compiled=True)
        if not quick:
            every = _step(steps.trained, captured=True, compiled=True, autocast=True)
            arms["NSR, compiled and captured, bf16 autocast"] = Arm(every, "medium", compiled=True)
    arms["NSR, one replica"] = Arm(_replicas(1))
    arms["NSR, ten replicas"] = Arm(_replicas(REPLICAS), replicas=REPLICAS)
    return arms


def _step(model: Callable[[steps.Task], nn.Module], **how: bool) -> Build:
    return lambda task: steps.step(model(task), task, **how)


def _replicas(count: int) -> Build:
    return lambda task: steps.replicas_step([steps.trained(task) for _ in range(count)], task)


def _build(arm: Arm, task: steps.Task) -> tuple[Callable[[], None], int | None]:
    """The step after its first calls (compilation, capture), and the bytes that it holds at its peak."""
    on_gpu = task.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(task.device)
        torch.cuda.reset_peak_memory_stats(task.device)
    with steps.matmul_precision(arm.precision):
        step = arm.build(task)

    def call() -> None:
        with steps.matmul_precision(arm.precision):
            step()

    for _ in range(5 if on_gpu else 1):  # on a GPU three eager calls and the capture, where there is one
        call()
    if not on_gpu:
        return call, None
    torch.cuda.synchronize(task.device)
    return call, torch.cuda.max_memory_allocated(task.device) - before
