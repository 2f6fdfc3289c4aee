"""``nsr bench graph``: one training step of a four-layer GCN with the branch, against every honest peer.

All arms of a graph run interleaved in one process: the plain GCN and GATv2, eager and compiled; the branch as the
paper words it, eager and compiled; ``nsr.attach`` and nothing else; and the branch as the library trains it, on a GPU
captured in a CUDA graph, in each precision of the gate's product, compiled too, and as ten replicas.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nsr.bench import graph_steps as steps
from nsr.bench.graph_cases import MINESWEEPER, QUICK, ROMAN_EMPIRE, TOLOKERS, GraphCase, edge_index
from nsr.bench.interleaved import interleaved
from nsr.bench.kernel_errors import kernel_errors
from nsr.experiments.record import Record, command_line, environment

LAYERS, WIDTH, REPLICAS = 4, 128, 10
REFERENCE = "NSR as worded, eager"  # of every ratio

Build = Callable[[steps.Task], Callable[[], None]]


@dataclass(frozen=True)
class Arm:
    """One way to make a training step.

    Attributes:
        build: Makes the step.
        precision: What ``torch.set_float32_matmul_precision`` is set to while it is made and first run.
        replicas: How many models it trains.
    """

    build: Build
    precision: str = "highest"
    replicas: int = 1


def cases(device: torch.device, quick: bool) -> tuple[GraphCase, ...]:
    """What is measured where."""
    if quick:
        return (QUICK,)
    return (TOLOKERS, ROMAN_EMPIRE) if device.type == "cuda" else (TOLOKERS, MINESWEEPER)


def bench_graph(device: torch.device, *, machine: str, quick: bool = False) -> Record:
    """Measure every arm on every graph.

    Args:
        device: Where.
        machine: Name of the machine, the cell of the record.
        quick: A few steps on a tiny graph of what needs no compilation: shows that everything runs.
    """
    begin = time.perf_counter()
    metrics: dict[str, Any] = {}
    origins = {}
    for case in cases(device, quick):
        edges, origins[case.name] = edge_index(case)
        torch.manual_seed(0)
        width, layers = (16, 2) if quick else (WIDTH, LAYERS)
        task = steps.Task(edges, case.nodes, width, layers, device)
        metrics[f"{case.name}, {task.members:,} members"] = _measure(task, quick)
    return Record(
        experiment="bench",
        cell={"bench": "graph", "machine": machine},
        metrics=metrics,
        config={"layers": LAYERS, "width": WIDTH, "graphs": origins, "quick": quick},
        command=command_line(),
        seconds=time.perf_counter() - begin,
        environment=environment(device) | {"threads": torch.get_num_threads()},
    )


def _measure(task: steps.Task, quick: bool) -> dict[str, Any]:
    on_gpu = task.device.type == "cuda"
    result: dict[str, Any] = {"kernel errors": kernel_errors(task.normalised[0], task.nodes, task.width)}
    arms = _arms(on_gpu, quick)
    built: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int | None] = {}
    for name, arm in arms.items():
        with _matmul_precision(arm.precision):
            built[name], peaks[name] = _build(arm, task)
    times = interleaved(built, task.device, rounds=2 if quick else 7 if on_gpu else 3, seconds=0.2 if on_gpu else 0.0)
    for name, timing in times.items():
        result[name] = {
            "milliseconds": asdict(timing),
            "speed_up": times[REFERENCE].median / timing.median * arms[name].replicas,
            "peak_bytes": peaks[name],
        }
    return result


def _arms(on_gpu: bool, quick: bool) -> dict[str, Arm]:
    ways = {"eager": {}} if quick else {"eager": {}, "compiled": {"compiled": True}}
    peers = {"GCN": steps.plain, "GATv2": steps.attention, "NSR as worded": steps.literal}
    arms = {f"{name}, {way}": Arm(_step(model, **how)) for name, model in peers.items() for way, how in ways.items()}
    arms["NSR, attached, eager"] = Arm(_step(steps.attached))
    arms["NSR, eager"] = Arm(_step(steps.trained))
    if on_gpu:
        for precision, told in (("fp32", "highest"), ("TF32", "high"), ("bf16", "medium")):
            arms[f"NSR, captured, {precision}"] = Arm(_step(steps.trained, captured=True), told)
            if not quick:
                both = _step(steps.trained, captured=True, compiled=True)
                arms[f"NSR, compiled and captured, {precision}"] = Arm(both, told)
    arms["NSR, one replica"] = Arm(_replicas(1))
    arms["NSR, ten replicas"] = Arm(_replicas(REPLICAS), replicas=REPLICAS)
    return arms


def _step(model: Callable[[steps.Task], nn.Module], **how: bool) -> Build:
    return lambda task: steps.step(model(task), task, **how)


def _replicas(count: int) -> Build:
    return lambda task: steps.replicas_step([steps.trained(task) for _ in range(count)], task)


def _build(arm: Arm, task: steps.Task) -> tuple[Callable[[], None], int | None]:
    """The step after its first calls (compilation, capture), and the bytes that it holds at its peak."""
    if task.device.type != "cuda":
        step = arm.build(task)
        step()
        return step, None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(task.device)
    torch.cuda.reset_peak_memory_stats(task.device)
    step = arm.build(task)
    for _ in range(5):  # three eager calls and the capture, where there is one
        step()
    torch.cuda.synchronize(task.device)
    return step, torch.cuda.max_memory_allocated(task.device) - before


@contextmanager
def _matmul_precision(told: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(told)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
