"""``nsr bench tokens``: images a second of merged ViTs, with and without NSR, against every honest peer.

All arms are DeiT-Tiny/16 segmenters up to their logits on the patch grid (upsampling them costs every arm the same), in
bf16 on a GPU and fp32 on a CPU, timed interleaved in one process:

* the full model, eager, compiled, and compiled and captured in a CUDA graph (the reference of every ratio);
* the limit: the same schedule of token counts with tokens dropped for free;
* ToMe as its publication words it;
* ToMe of this library, and the same with NSR.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nsr.bench import token_models as models
from nsr.bench.interleaved import interleaved, peak_memory
from nsr.bench.side_by_side import building, measure_cases, measuring
from nsr.bench.token_stages import captured_stages
from nsr.experiments.record import Record, command_line, environment
from nsr.tokens import Segmenter
from nsr.tokens.optimize import optimize

Arm = tuple[str, Callable[[tuple[int, int]], Segmenter], list[str]]

REFERENCE = "full, compiled and captured"
CPU_REFERENCE = "full, eager"


@dataclass(frozen=True)
class Case:
    """Images of one size in batches of one size."""

    size: tuple[int, int]
    batch: int

    def __str__(self) -> str:
        """As results name it."""
        return f"{self.size[0]}x{self.size[1]} batch {self.batch}"


CASES = (Case((224, 224), 256), Case((512, 512), 32), Case((512, 1024), 16))
LATENCY = (Case((224, 224), 1), Case((512, 512), 1), Case((512, 1024), 1))
CPU_CASES = (Case((512, 512), 2),)
QUICK = (Case((64, 64), 2),)


def bench_tokens(device: torch.device, cases: tuple[Case, ...], *, machine: str, quick: bool = False) -> Record:
    """Measure every arm in every case.

    Args:
        device: Where.
        cases: Sizes and batches.
        machine: Name of the machine, the cell of the record.
        quick: A few calls of what needs no compilation: shows that everything runs.
    """
    begin = time.perf_counter()
    results = measure_cases(_measure, _compile_arm, _compiled_arms, cases, device, quick)
    metrics = {str(case): result for case, result in zip(cases, results, strict=True)}
    return Record(
        experiment="bench",
        cell={"bench": "tokens", "machine": machine},
        metrics=metrics,
        config={"reduction": models.REDUCTION, "precision": str(_dtype(device)), "quick": quick},
        command=command_line(),
        seconds=time.perf_counter() - begin,
        environment=environment(device) | {"threads": torch.get_num_threads()},
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _measure(case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    torch.compiler.reset()  # one model more in the compiler's cache of a function and it would fall back to eager
    dtype = _dtype(device)
    image = models.matched_inputs(case.batch, case.size, device, dtype)
    arms: dict[str, Callable[[], object]] = {}
    memory: dict[str, int | None] = {}
    on_gpu = device.type == "cuda"
    with building():
        for name, build, ways in _arms(case, on_gpu, quick):
            model = _model(build, case, device)
            for way in ways:
                arms[f"{name}, {way}"] = arm = _prepare(model, way, case, image)
                memory[f"{name}, {way}"] = peak_memory(arm, device)
        stages = captured_stages(case.size, case.batch, device, dtype) if on_gpu else {}
    with measuring():
        times = interleaved(arms, device, rounds=2 if quick else 5, seconds=0.02 if quick else 0.06)
        stage_times = interleaved(stages, device, rounds=5, seconds=0.02)
    reference = times[REFERENCE if REFERENCE in times else CPU_REFERENCE].median
    result: dict[str, Any] = {
        name: {
            "images_per_second": case.batch / timing.median * 1e3,
            "speed_up": reference / timing.median,
            "peak_bytes": memory[name],
            "milliseconds": asdict(timing),
        }
        for name, timing in times.items()
    }
    if on_gpu:
        result["stages"] = {
            "matching": stage_times["match"].median,
            "merging": stage_times["merge"].median,
            "nsr": stage_times["merge_with_branch"].median - stage_times["merge"].median,
        }
    return result


def _arms(case: Case, on_gpu: bool, quick: bool) -> list[Arm]:
    best = ["compiled and captured"] if on_gpu else [] if quick else ["compiled"]
    plain = ["eager"]
    arms: list[Arm] = [
        ("full", models.full, plain + (["compiled"] if on_gpu else []) + best),
        ("free drop", models.FreeDrop, best or plain),
        ("literal ToMe", models.LiteralToMe, plain),
        ("merged", models.merged, plain + best),
        ("merged + NSR", models.with_residual, plain + best),
    ]
    # the latency of one image is compared with the full model's, not with a limit
    return [arm for arm in arms if case.batch > 1 or arm[0] != "free drop"]


def _compiled_arms(case: Case) -> list[str]:
    return [name for name, _, ways in _arms(case, on_gpu=True, quick=False) if any("compiled" in way for way in ways)]


def _compile_arm(case: Case, name: str, device: torch.device) -> None:
    (build,) = (build for arm, build, _ in _arms(case, on_gpu=True, quick=False) if arm == name)
    image = models.matched_inputs(case.batch, case.size, device, _dtype(device))
    optimize(_model(build, case, device), case.batch, case.size, capture=False)(image)


def _model(build: Callable[[tuple[int, int]], Segmenter], case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return models.PatchLogits(build(case.size)).to(device, _dtype(device)).eval().requires_grad_(False)


def _prepare(model: nn.Module, way: str, case: Case, image: Tensor) -> Callable[[], Tensor]:
    fast = optimize(model, case.batch, case.size, compiled="compiled" in way, capture="captured" in way)
    return lambda: fast(image)
