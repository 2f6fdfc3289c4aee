"""``nsr bench train``: steps a second of training a segmenter, full, merged, and merged with NSR.

A step is the forward pass under bf16 autocast (fp32 on a CPU), pixel-wise cross-entropy, the backward pass and AdamW,
on one batch that stays on the device. Arms are timed interleaved in one process.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from nsr.bench import token_models as models
from nsr.bench.interleaved import interleaved, peak_memory
from nsr.bench.side_by_side import building, measure_cases, measuring
from nsr.bench.tokens import Case
from nsr.experiments.record import Record, command_line, environment
from nsr.tokens import Segmenter
from nsr.training.capture import CapturedStep
from nsr.training.pixel_loss import pixel_cross_entropy
from nsr.training.segmentation import autocast

REFERENCE = "full, compiled and captured"
CPU_REFERENCE = "full, eager"

CASES = (Case((512, 512), 32), Case((512, 1024), 16))
CPU_CASES = (Case((224, 224), 2),)
QUICK = (Case((64, 64), 2),)


def bench_train(device: torch.device, cases: tuple[Case, ...], *, machine: str, quick: bool = False) -> Record:
    """Measure a training step of every arm in every case; arguments as in :func:`nsr.bench.tokens.bench_tokens`."""
    begin = time.perf_counter()
    results = measure_cases(_measure, _compile_arm, _compiled_arms, cases, device, quick)
    metrics = {str(case): result for case, result in zip(cases, results, strict=True)}
    return Record(
        experiment="bench",
        cell={"bench": "train", "machine": machine},
        metrics=metrics,
        config={"reduction": models.REDUCTION, "precision": _precision(device), "quick": quick},
        command=command_line(),
        seconds=time.perf_counter() - begin,
        environment=environment(device) | {"threads": torch.get_num_threads()},
    )


def _precision(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def _measure(case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    torch.compiler.reset()
    arms: dict[str, Callable[[], None]] = {}
    memory: dict[str, int | None] = {}
    with building():
        for name, build, ways in _arms(device.type == "cuda"):
            for way in ways:
                arm = _step(build, way, case, device)
                memory[f"{name}, {way}"] = peak_memory(arm, device)
                arms[f"{name}, {way}"] = arm
    with measuring():
        times = interleaved(arms, device, rounds=2 if quick else 5, seconds=0.02 if quick else 0.1)
    reference = times[REFERENCE if REFERENCE in times else CPU_REFERENCE].median
    return {
        name: {
            "steps_per_second": 1e3 / timing.median,
            "speed_up": reference / timing.median,
            "peak_bytes": memory[name],
            "milliseconds": asdict(timing),
        }
        for name, timing in times.items()
    }


def _arms(on_gpu: bool) -> list[tuple[str, Callable[[tuple[int, int]], Segmenter], list[str]]]:
    captured = ["captured", "compiled and captured"] if on_gpu else ["eager"]
    return [
        ("full", models.full, (["eager"] if on_gpu else []) + captured),
        ("merged", models.merged, captured),
        ("merged + NSR", models.with_residual, captured),
    ]


def _compiled_arms(case: Case) -> list[str]:
    return [name for name, _, ways in _arms(on_gpu=True) if "compiled and captured" in ways]


def _compile_arm(case: Case, name: str, device: torch.device) -> None:
    (build,) = (build for arm, build, _ in _arms(on_gpu=True) if arm == name)
    _step(build, "compiled", case, device)()


def _step(
    build: Callable[[tuple[int, int]], Segmenter], way: str, case: Case, device: torch.device
) -> Callable[[], None]:
    """One step of training, ready to be timed: compiled, warmed up and captured as ``way`` says."""
    torch.manual_seed(0)
    model = build(case.size).to(device).train()
    logits: nn.Module = models.PatchLogits(model)
    run = torch.compile(logits, dynamic=False) if "compiled" in way else logits
    image = models.matched_inputs(case.batch, case.size, device, torch.float32)
    labels = torch.randint(0, models.CLASSES, (case.batch, *case.size), device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(1e-4, device=device),
        weight_decay=1e-4,
        fused=True,
        capturable=device.type == "cuda",
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, "bf16" if device.type == "cuda" else "fp32"):
            output = run(image)
        pixel_cross_entropy(output, labels).backward()
        optimizer.step()

    if "captured" not in way:
        return step
    captured = CapturedStep(step, device)
    for _ in range(4):
        captured()
    if captured.graph is None:
        raise RuntimeError(f"The step of a {way} arm could not be captured.")
    return captured
