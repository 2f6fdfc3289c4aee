"""``nsr bench train``: steps a second of training a segmenter, full, merged, and merged with NSR.

A step is the forward pass under bf16 autocast (fp32 on a CPU), pixel-wise cross-entropy, the backward pass and AdamW,
on one batch that stays on the device. On a GPU every arm has a process of its own, and they are timed in turns; those
that are captured are recorded with their kernels. At the size of VOC's runs both merged models are also trained as the
experiments train them: as one stack, see :mod:`nsr.training.segmentation_stack`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsr.bench import token_models as models
from nsr.bench.side_by_side import Measured, Model, measure_models
from nsr.bench.tokens import Case, against_full
from nsr.experiments.record import Record, command_line, environment
from nsr.tokens import Segmenter
from nsr.training.capture import CapturedStep
from nsr.training.pixel_loss import pixel_cross_entropy
from nsr.training.segmentation import Precision, autocast
from nsr.training.segmentation_stack import SegmenterStack

VOC = Case((224, 224), 16)
CASES = (Case((512, 1024), 16), Case((512, 512), 32), VOC)
CPU_CASES = (Case((224, 224), 2),)
QUICK = (Case((64, 64), 2),)


def bench_train(
    device: torch.device,
    cases: tuple[Case, ...],
    *,
    machine: str,
    quick: bool = False,
    limit: float | None = None,
) -> Record:
    """Measure a training step of every arm in every case; arguments as in :func:`nsr.bench.tokens.bench_tokens`."""
    begin = time.perf_counter()
    rounds, seconds = (2, 0.02) if quick else (5, 0.1)
    stands = {str(case): _models(case, device) for case in cases}
    measured = measure_models(
        stands, device, rounds=rounds, seconds=seconds, limit=limit, profile=lambda name: "captured" in name
    )
    return Record(
        experiment="bench",
        cell={"bench": "train", "machine": machine},
        metrics={str(case): _metrics(measured[str(case)]) for case in cases},
        config={"reduction": models.REDUCTION, "precision": _precision(device), "quick": quick},
        command=command_line(),
        seconds=time.perf_counter() - begin,
        environment=environment(device) | {"threads": torch.get_num_threads()},
    )


def _precision(device: torch.device) -> Precision:
    return "bf16" if device.type == "cuda" else "fp32"


def _metrics(measured: dict[str, Measured]) -> dict[str, Any]:
    return {
        name: {"steps_per_second": 1e3 / measured[name].timing.median} | common
        for name, common in against_full(measured).items()
    }


def _models(case: Case, device: torch.device) -> list[Model]:
    captured = ("compiled and captured", "captured") if device.type == "cuda" else ("eager",)
    ways = {"full": (*captured, "eager")[:3], "merged + NSR": captured, "merged": captured}
    if case == VOC:
        ways["both merged, one stack"] = captured[-1:]  # it compiles its own parts
    # compiling takes so long that every way gets a process
    return [Model(_build, (case, name, way, device)) for name, those in ways.items() for way in dict.fromkeys(those)]


def _build(case: Case, name: str, way: str, device: torch.device) -> dict[str, Callable[[], object]]:
    builds: tuple[Callable[[tuple[int, int]], Segmenter], ...] = {
        "full": (models.full,),
        "merged": (models.merged,),
        "merged + NSR": (models.with_residual,),
        "both merged, one stack": (models.merged, models.with_residual),
    }[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    segmenters = [build(case.size).to(device).train() for build in builds]
    return {f"{name}, {way}": _step(segmenters, way, case, device)}


def _step(segmenters: list[Segmenter], way: str, case: Case, device: torch.device) -> Callable[[], None]:
    """One step of training, ready to be timed: compiled, warmed up and captured as ``way`` says."""
    run: Callable[[Tensor], Tensor]
    if len(segmenters) == 1:
        logits = models.PatchLogits(segmenters[0])
        run = torch.compile(logits, dynamic=False) if "compiled" in way else logits
        parameters = list(logits.parameters())
    else:
        stack = SegmenterStack(segmenters)
        run, parameters = stack.patch_logits, list(stack.weights.values())
    image = models.matched_inputs(case.batch, case.size, device, torch.float32)
    labels = torch.randint(0, models.CLASSES, (case.batch, *case.size), device=device)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=torch.tensor(1e-4, device=device),
        weight_decay=1e-4,
        fused=True,
        capturable=device.type == "cuda",
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, _precision(device)):
            output = run(image)
        pixel_cross_entropy(output, labels).sum().backward()
        optimizer.step()

    if "captured" not in way:
        return step
    captured = CapturedStep(step, device)
    for _ in range(4):
        captured()
    if captured.graph is None:
        raise RuntimeError(f"The step of a {way} arm could not be captured.")
    return captured
