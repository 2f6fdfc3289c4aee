"""``nsr bench graph``: one training step of a four-layer GCN with the branch, against every honest peer.

The arms of a graph are measured in turns: the plain GCN, eager and compiled, and GATv2; the branch as the paper words
it, eager and compiled; ``nsr.attach`` and nothing else; and the branch as the library trains it: compiled, on a GPU
captured in a CUDA graph in each precision of the gate's product, and as ten replicas. Products are fp32 unless an arm
says TF32 or bf16, and in the last arm every product is bf16. On a GPU each arm has a process of its own. An arm that
fails is recorded with its error, a captured one with its kernels. On a CPU models have one layer: a step of the literal
form with four takes a minute.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsr.bench import graph_steps as steps
from nsr.bench.graph_cases import MINESWEEPER, QUICK, ROMAN_EMPIRE, TOLOKERS, GraphCase, edge_index
from nsr.bench.kernel_errors import kernel_errors
from nsr.bench.kernel_times import kernel_times
from nsr.bench.model_errors import model_errors
from nsr.bench.side_by_side import Measured, Model, measure_models
from nsr.experiments.record import Record, command_line, environment

WIDTH, REPLICAS = 128, 10
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
    """

    build: Build
    precision: str = "highest"
    replicas: int = 1


def cases(device: torch.device, quick: bool) -> tuple[GraphCase, ...]:
    """What is measured where."""
    if quick:
        return (QUICK,)
    return (TOLOKERS, ROMAN_EMPIRE) if device.type == "cuda" else (TOLOKERS, MINESWEEPER)


def layers(device: torch.device, quick: bool) -> int:
    """Of every model."""
    return 2 if quick else 4 if device.type == "cuda" else 1


def bench_graph(
    device: torch.device,
    *,
    machine: str,
    quick: bool = False,
    only: Sequence[str] = ("*",),
    limit: float | None = None,
    keep: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Measure every arm on every graph.

    Args:
        device: Where.
        machine: Name of the machine, the cell of the record.
        quick: A few steps on a tiny graph of what needs no compilation: shows that everything runs.
        only: Names of the arms to measure, as patterns.
        limit: On a GPU, seconds for each graph after which arms that are still being compiled are left out.
        keep: Called with the record so far, after each graph.
    """
    begin = time.perf_counter()
    metrics: dict[str, Any] = {}
    origins: dict[str, str] = {}
    everything = arms(device.type == "cuda", quick)
    chosen = [name for name in everything if any(fnmatchcase(name, pattern) for pattern in only)]
    if not chosen:
        raise ValueError(f"only={list(only)} matches no arm; there are {list(everything)}.")
    config = {"layers": layers(device, quick), "width": WIDTH, "graphs": origins, "quick": quick, "only": list(only)}

    def record() -> Record:
        return Record(
            experiment="bench",
            cell={"bench": "graph", "machine": machine},
            metrics=metrics,
            config=config,
            command=command_line(),
            seconds=time.perf_counter() - begin,
            environment=environment(device) | {"threads": torch.get_num_threads()},
        )

    for case in cases(device, quick):
        task, origins[case.name] = task_of(case, device, quick)
        title = f"{case.name}, {task.members:,} members"
        metrics[title] = _errors(task) | _measure(case, device, quick, chosen, limit)
        keep(record())
    return record()


def task_of(case: GraphCase, device: torch.device, quick: bool) -> tuple[steps.Task, str]:
    """The graph of a case on its device, and where it comes from."""
    edges, origin = edge_index(case)
    torch.manual_seed(0)
    return steps.Task(edges, case.nodes, 16 if quick else WIDTH, layers(device, quick), device), origin


def _errors(task: steps.Task) -> dict[str, Any]:
    """How exact what is timed is."""
    return {
        "kernel errors": kernel_errors(task.normalised[0], task.nodes, task.width),
        "model errors": model_errors(task, MODES if task.device.type == "cuda" else {"fp32": MODES["fp32"]}),
    }


def _measure(
    case: GraphCase, device: torch.device, quick: bool, names: list[str], limit: float | None
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        models = [Model(_build, (case, name, device, quick, folder)) for name in names]
        rounds, seconds = (2, 0.0) if quick or not on_gpu else (5, 0.05)
        times = measure_models({case.name: models}, device, rounds=rounds, seconds=seconds, limit=limit)[case.name]
        known = {name: _facts(folder, name) for name in names}
    return {name: known[name] | _result(name, times, on_gpu, quick) for name in names}


def _result(name: str, times: dict[str, Measured], on_gpu: bool, quick: bool) -> dict[str, Any]:
    if name not in times:
        return {}
    median = times[name].timing.median
    replicas = arms(on_gpu, quick)[name].replicas
    speed_up = times[REFERENCE].timing.median / median * replicas if REFERENCE in times else None
    return {"milliseconds": asdict(times[name].timing), "speed_up": speed_up}


def arms(on_gpu: bool, quick: bool) -> dict[str, Arm]:
    """Every arm by name."""
    ways = {"eager": False} if quick else {"eager": False, "compiled": True}
    found = {
        f"{name}, {way}": Arm(_step(model, compiled=compiled))
        for name, model in {"GCN": steps.plain, "NSR as worded": steps.literal}.items()
        for way, compiled in ways.items()
    }
    found["GATv2, eager"] = Arm(_step(steps.attention))
    found["NSR, attached, eager"] = Arm(_step(steps.attached))
    found["NSR, eager"] = Arm(_step(steps.trained))
    if on_gpu:
        if not quick:
            found["GCN, compiled, TF32"] = Arm(_step(steps.plain, compiled=True), "high")
        ways = {"captured": False} if quick else {"captured": False, "compiled and captured": True}
        for precision, (told, autocast) in MODES.items():
            for way, compiled in ways.items():
                step = _step(steps.trained, captured=True, compiled=compiled, autocast=autocast)
                found[f"NSR, {way}, {precision}"] = Arm(step, told)
    elif not quick:
        found["NSR, compiled"] = Arm(_step(steps.trained, compiled=True))
    if on_gpu or quick:
        found["NSR, one replica"] = Arm(_replicas(1))
        found["NSR, ten replicas"] = Arm(_replicas(REPLICAS), replicas=REPLICAS)
    return found


def _step(model: Callable[[steps.Task], nn.Module], **how: bool) -> Build:
    return lambda task: steps.step(model(task), task, **how)


def _replicas(count: int) -> Build:
    return lambda task: steps.replicas_step([steps.trained(task) for _ in range(count)], task)


def _build(
    case: GraphCase, name: str, device: torch.device, quick: bool, folder: str
) -> dict[str, Callable[[], object]]:
    """An arm, ready to be timed; what else there is to know of it goes into the folder."""
    torch.compiler.reset()  # one model more in the compiler's cache of a function and it would fall back to eager
    try:
        step, peak = build_step(arms(device.type == "cuda", quick)[name], task_of(case, device, quick)[0])
    except Exception as error:  # a peer that cannot run is a result too, and the others are still to be measured
        _note(folder, name, error=f"{type(error).__name__}: {error}"[:500])
        return {}
    _note(folder, name, peak_bytes=peak)
    return {name: _Profiled(step, name, device, folder) if device.type == "cuda" and "captured" in name else step}


def build_step(arm: Arm, task: steps.Task) -> tuple[Callable[[], None], int | None]:
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


class _Profiled:
    """A step that notes its kernels in its second call: the first one that has the GPU to itself, and is not timed."""

    def __init__(self, step: Callable[[], None], name: str, device: torch.device, folder: str) -> None:
        self.step, self.name, self.device, self.folder = step, name, device, folder
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 2:
            _note(self.folder, self.name, kernels=kernel_times(self.step, self.device))
        self.step()


def _note(folder: str, name: str, **facts: Any) -> None:
    """Keep what a process knows of its arm beside its time."""
    (Path(folder) / f"{name}.json").write_text(json.dumps(_facts(folder, name) | facts))


def _facts(folder: str, name: str) -> dict[str, Any]:
    file = Path(folder) / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}
