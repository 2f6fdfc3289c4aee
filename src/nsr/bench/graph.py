"""``nsr bench graph``: one training step of a four-layer GCN with the branch, against every honest peer.

The arms of a graph are measured in turns: the plain GCN, eager and compiled, and GATv2; the branch as the paper words
it, eager and compiled; ``nsr.attach`` and nothing else; and the branch as the library trains it: compiled, on a GPU
captured in a CUDA graph in each precision of the gate's product, and as ten replicas. Products are fp32 unless an arm
says TF32 or bf16; bf16 alone is the gate's product, the others are then TF32, and with autocast every one is bf16. On a
GPU each arm has a process of its own. An arm that fails is recorded with its error; replicas, and what is both compiled
and captured, with their kernels. On a CPU models have one layer: a step of the literal form with four takes a minute.
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

from nsr.bench import graph_steps as steps
from nsr.bench.graph_cases import MINESWEEPER, QUICK, ROMAN_EMPIRE, TOLOKERS, GraphCase, edge_index
from nsr.bench.kernel_errors import kernel_errors
from nsr.bench.model_errors import model_errors
from nsr.bench.side_by_side import Measured, Model, measure_models
from nsr.experiments.record import Record, command_line, environment
from nsr.graph.models import GraphModel

WIDTH, REPLICAS = 128, 10
REFERENCE = "NSR as worded, eager"  # of every ratio
ERRORS = "errors"  # stands among the arms for what is not timed
MOST_IN_FP64 = 200_000  # members on a CPU, where more take a minute
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
        limit: On a GPU, seconds after which arms that are still being built are left out.
        keep: Called with the record so far: on a GPU before and after what is compiled, on a CPU after each graph.
    """
    begin = time.perf_counter()
    on_gpu = device.type == "cuda"
    everything = arms(on_gpu, quick)
    chosen = [name for name in everything if any(fnmatchcase(name, pattern) for pattern in only)]
    if not chosen:
        raise ValueError(f"only={list(only)} matches no arm; there are {list(everything)}.")
    metrics: dict[str, Any] = {}
    origins: dict[str, str] = {}
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

    stands = cases(device, quick)
    for together, names in _stages(stands, chosen, on_gpu):
        for case, found in _measure(together, device, quick, names, limit).items():
            task, origins[case.name] = task_of(case, torch.device("cpu"), quick)
            metrics.setdefault(f"{case.name}, {task.members:,} members", {}).update(found)
        for found in metrics.values():
            _compare(found, everything)
        keep(record())
    return record()


def _stages(
    stands: tuple[GraphCase, ...], names: list[str], on_gpu: bool
) -> list[tuple[tuple[GraphCase, ...], list[str]]]:
    """Which arms of which graphs are built together and measured in turns.

    On a GPU first what is ready in seconds, then what a compiler has to work on for minutes.
    """
    if not on_gpu:
        return [((case,), [ERRORS, *names]) for case in stands]
    compiled = [name for name in names if "compiled" in name]
    ready = [name for name in names if name not in compiled]
    return [(stands, [ERRORS, *ready]), *([(stands, compiled)] if compiled else [])]


def _compare(found: dict[str, Any], everything: dict[str, Arm]) -> None:
    """Add how many times faster than the reference each arm is, once both are measured."""
    reference = found.get(REFERENCE, {}).get("milliseconds")
    for name, arm in everything.items():
        if "milliseconds" in found.get(name, {}):
            ratio = reference and reference["median"] / found[name]["milliseconds"]["median"] * arm.replicas
            found[name]["speed_up"] = ratio


def task_of(case: GraphCase, device: torch.device, quick: bool) -> tuple[steps.Task, str]:
    """The graph of a case on its device, and where it comes from."""
    edges, origin = edge_index(case)
    torch.manual_seed(0)
    return steps.Task(edges, case.nodes, 16 if quick else WIDTH, layers(device, quick), device), origin


def _measure(
    together: tuple[GraphCase, ...], device: torch.device, quick: bool, names: list[str], limit: float | None
) -> dict[GraphCase, dict[str, Any]]:
    """What is found out about each arm of each case."""
    with tempfile.TemporaryDirectory() as folder:
        notes = {case: Path(folder, case.name) for case in together}
        models = {
            case.name: [Model(_build, (case, name, device, quick, notes[case])) for name in names] for case in together
        }
        for place in notes.values():
            place.mkdir()
        rounds, seconds = (2, 0.0) if quick else (5, 0.05) if device.type == "cuda" else (3, 0.0)
        times = measure_models(models, device, rounds=rounds, seconds=seconds, limit=limit, profile=_is_profiled)
        return {case: _found(notes[case], names, times[case.name]) for case in together}


def _is_profiled(name: str) -> bool:
    return "compiled and captured" in name or "replica" in name


def _found(notes: Path, names: list[str], times: dict[str, Measured]) -> dict[str, Any]:
    """Notes and times of the arms of one case, and its errors."""
    found = {name: _noted(notes, name) for name in names}
    for name, arm in times.items():
        found[name] |= {"milliseconds": asdict(arm.timing)} | ({"kernels": arm.kernels} if arm.kernels else {})
    return found.pop(ERRORS, {}) | found


def arms(on_gpu: bool, quick: bool) -> dict[str, Arm]:
    """Every arm by name."""
    ways = {"eager": False} if quick else {"eager": False, "compiled": True}
    found = {
        f"{name}, {way}": Arm(_step(model, compiled=compiled))
        for name, model in {"GCN": steps.plain, "NSR as worded": steps.literal}.items()
        for way, compiled in ways.items()
    }
    found["GATv2, eager"] = Arm(_step(steps.attention))
    if on_gpu or quick:
        found["NSR, attached, eager"] = Arm(_step(steps.attached))
    found["NSR, eager"] = Arm(_step(steps.trained))
    if on_gpu:
        for precision, (told, autocast) in MODES.items():
            if not autocast:
                found[f"NSR, captured, {precision}"] = Arm(_step(steps.trained, captured=True), told)
            if not quick:
                step = _step(steps.trained, captured=True, compiled=True, autocast=autocast)
                found[f"NSR, compiled and captured, {precision}"] = Arm(step, told)
        if not quick:
            found["GCN, compiled and captured, TF32"] = Arm(_step(steps.plain, compiled=True, captured=True), "high")
    elif not quick:
        found["NSR, compiled"] = Arm(_step(steps.trained, compiled=True))
    if on_gpu or quick:
        for precision in ("TF32", "bf16"):
            told, _ = MODES[precision]
            found[f"NSR, one replica, {precision}"] = Arm(_replicas(1), told)
            found[f"NSR, ten replicas, {precision}"] = Arm(_replicas(REPLICAS), told, replicas=REPLICAS)
    return found


def _step(model: Callable[[steps.Task], GraphModel], **how: bool) -> Build:
    return lambda task: steps.step(model(task), task, **how)


def _replicas(count: int) -> Build:
    return lambda task: steps.replicas_step([steps.trained(task) for _ in range(count)], task)


def _build(
    case: GraphCase, name: str, device: torch.device, quick: bool, notes: Path
) -> dict[str, Callable[[], object]]:
    """An arm, ready to be timed; what else there is to know of it is noted."""
    task = task_of(case, device, quick)[0]
    if name == ERRORS:
        _note(notes, name, **_errors(task))
        return {}
    try:
        step, peak = build_step(arms(device.type == "cuda", quick)[name], task)
    except Exception as error:  # a peer that cannot run is a result too, and the others are still to be measured
        _note(notes, name, error=f"{type(error).__name__}: {error}"[:500])
        return {}
    _note(notes, name, peak_bytes=peak)
    return {name: step}


def _errors(task: steps.Task) -> dict[str, Any]:
    """How exact what is timed is."""
    on_gpu = task.device.type == "cuda"
    if not on_gpu and task.members > MOST_IN_FP64:
        return {}
    return {
        "kernel errors": kernel_errors(task.normalised[0], task.nodes, task.width),
        "model errors": model_errors(task, MODES if on_gpu else {"fp32": MODES["fp32"]}),
    }


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


def _note(notes: Path, name: str, **facts: Any) -> None:
    """Keep what a process knows of its arm beside its time."""
    (notes / f"{name}.json").write_text(json.dumps(_noted(notes, name) | facts))


def _noted(notes: Path, name: str) -> dict[str, Any]:
    file = notes / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}
