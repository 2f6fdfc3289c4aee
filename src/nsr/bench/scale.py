"""``nsr bench scale``: how a training step of one layer grows from ten thousand to a hundred million members.

Random graphs with twenty members a node and log-normal degrees, width 64. The plain GCN and the branch as the paper
words it stand beside it as far as their ``[E, D]`` tensors go: an arm that runs out of memory is recorded with its
error. Steps are eager; on a GPU, where the smallest are nothing but launches, the branch is captured too.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from nsr.bench import graph_steps as steps
from nsr.bench.graph_cases import random_edges
from nsr.bench.interleaved import interleaved
from nsr.experiments.record import Record, command_line, environment

WIDTH, DEGREE, SKEW = 64, 20, 0.8
GPU_MEMBERS = (10**4, 10**5, 10**6, 10**7, 10**8)
CPU_MEMBERS = (10**4, 10**5, 10**6)
QUICK_MEMBERS = (10**3,)
# Beyond these an arm is not tried: with ten times as many members peers fill a GPU, and launches cost nothing.
MOST = {"NSR, captured": 10**7, "GCN": 10**7, "NSR as worded": 10**7}


def bench_scale(
    device: torch.device,
    *,
    machine: str,
    quick: bool = False,
    keep: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Measure a step at every size.

    Args:
        device: Where.
        machine: Name of the machine, the cell of the record.
        quick: The smallest size alone.
        keep: Called with the record so far, after each size.
    """
    begin = time.perf_counter()
    sizes = QUICK_MEMBERS if quick else GPU_MEMBERS if device.type == "cuda" else CPU_MEMBERS
    metrics: dict[str, Any] = {}

    def record() -> Record:
        return Record(
            experiment="bench",
            cell={"bench": "scale", "machine": machine},
            metrics=metrics,
            config={"width": WIDTH, "layers": 1, "degree": DEGREE, "skew": SKEW, "quick": quick},
            command=command_line(),
            seconds=time.perf_counter() - begin,
            environment=environment(device) | {"threads": torch.get_num_threads()},
        )

    for members in sizes:
        metrics[f"{members:,} members"] = _measure(members, device, quick)
        keep(record())
    return record()


def _measure(members: int, device: torch.device, quick: bool) -> dict[str, Any]:
    nodes = members // DEGREE
    # both directions and the self-loops make the members
    edges = random_edges(nodes, (members - nodes) // 2, SKEW, device)
    torch.manual_seed(0)
    task = steps.Task(edges, nodes, WIDTH, layers=1, device=device)
    del edges
    result: dict[str, Any] = {}
    arms: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int | None] = {}
    for name, build in _arms(task).items():
        if members > MOST.get(name, members):
            continue
        try:
            step = build()
            peaks[name] = _peak(step, device)
            arms[name] = step
        except torch.OutOfMemoryError as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    times = interleaved(arms, device, rounds=2 if quick else 3, seconds=0.1 if device.type == "cuda" else 0.0)
    for name, timing in times.items():
        result[name] = {
            "milliseconds": asdict(timing),
            "nanoseconds_per_member": timing.median * 1e6 / task.members,
            "peak_bytes": peaks[name],
        }
    return result


def _arms(task: steps.Task) -> dict[str, Callable[[], Callable[[], None]]]:
    arms = {"NSR": lambda: steps.step(steps.trained(task), task)}
    if task.device.type == "cuda":
        arms["NSR, captured"] = lambda: steps.step(steps.trained(task), task, captured=True)
    arms["GCN"] = lambda: steps.step(steps.plain(task), task)
    arms["NSR as worded"] = lambda: steps.step(steps.literal(task), task)
    return arms


def _peak(step: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a step holds at its peak, less what was there before it; ``None`` on a CPU."""
    step()  # the sort, the optimiser's state
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
