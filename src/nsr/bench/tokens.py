"""``nsr bench tokens``: images a second of merged ViTs, with and without NSR, against every honest peer.

All arms are DeiT-Tiny/16 segmenters up to their logits on the patch grid (upsampling them costs every arm the same), in
bf16 on a GPU and fp32 on a CPU, timed in turns; those that are captured are recorded with their kernels:

* the full model, eager, compiled, and compiled and captured in a CUDA graph (the reference of every ratio);
* the limit: the same schedule of token counts with tokens dropped for free, on the compiler's layers and on ours;
* ToMe as its publication words it;
* ToMe of this library, and the same with NSR.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsr.bench import token_models as models
from nsr.bench.side_by_side import Measured, Model, measure_models
from nsr.bench.token_stages import STAGES, captured_stages
from nsr.experiments.record import Record, command_line, environment
from nsr.tokens import Segmenter
from nsr.tokens.fixed_shape import optimize

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


def bench_tokens(
    device: torch.device,
    cases: tuple[Case, ...],
    *,
    machine: str,
    quick: bool = False,
    limit: float | None = None,
) -> Record:
    """Measure every arm in every case.

    Args:
        device: Where.
        cases: Sizes and batches.
        machine: Name of the machine, the cell of the record.
        quick: A few calls of what needs no compilation: shows that everything runs.
        limit: Seconds after which models that are still being compiled are left out.
    """
    begin = time.perf_counter()
    rounds, seconds = (2, 0.02) if quick else (5, 0.06)
    stands = {str(case): _models(case, device, quick) for case in cases}
    measured = measure_models(
        stands, device, rounds=rounds, seconds=seconds, limit=limit, profile=lambda name: "captured" in name
    )
    return Record(
        experiment="bench",
        cell={"bench": "tokens", "machine": machine},
        metrics={str(case): _metrics(measured[str(case)], case) for case in cases},
        config={"reduction": models.REDUCTION, "precision": str(_dtype(device)), "quick": quick},
        command=command_line(),
        seconds=time.perf_counter() - begin,
        environment=environment(device) | {"threads": torch.get_num_threads()},
    )


def _metrics(measured: dict[str, Measured], case: Case) -> dict[str, Any]:
    """Of one case, as they are written: every arm, and the stages of a merge event."""
    stages = {name: arm.timing.median for name, arm in measured.items() if name in STAGES}
    arms = {name: arm for name, arm in measured.items() if name not in STAGES}
    metrics: dict[str, Any] = {
        name: {"images_per_second": case.batch / arms[name].timing.median * 1e3} | common
        for name, common in against_full(arms).items()
    }
    if stages:
        match, merge, merge_with_branch = (stages[name] for name in STAGES)
        metrics["stages"] = {"matching": match, "merging": merge, "nsr": merge_with_branch - merge}
    return metrics


def against_full(arms: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """Time and memory of each arm, and how much faster it is than the best form of the full model."""
    reference = next((arms[name].timing.median for name in (REFERENCE, CPU_REFERENCE) if name in arms), None)
    return {
        name: {
            "speed_up": None if reference is None else reference / arm.timing.median,
            "peak_bytes": arm.peak_bytes,
            "milliseconds": asdict(arm.timing),
            **({"kernels": arm.kernels} if arm.kernels else {}),
        }
        for name, arm in arms.items()
    }


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _models(case: Case, device: torch.device, quick: bool) -> list[Model]:
    on_gpu = device.type == "cuda"
    best = ("compiled and captured",) if on_gpu else () if quick else ("compiled",)
    plain = ("eager",)
    ways = {
        "merged + NSR": plain + best,
        "merged": plain + best,
        "free drop": best or plain,
        **({"free drop, own layers": best} if on_gpu else {}),
        "full": plain + (("compiled",) if on_gpu else ()) + best,
        "literal ToMe": plain,
    }
    if case.batch == 1:  # the latency of one image is compared with the full model's, not with a limit
        ways = {name: those for name, those in ways.items() if not name.startswith("free drop")}
    stands = [Model(_build, (case, name, those, device)) for name, those in ways.items()]
    return stands + ([Model(captured_stages, (case.size, case.batch, device, _dtype(device)))] if on_gpu else [])


def _build(case: Case, name: str, ways: tuple[str, ...], device: torch.device) -> dict[str, Callable[[], object]]:
    """The arms of one model: as it is, compiled, captured, as ``ways`` says."""
    builds: dict[str, Callable[[tuple[int, int]], Segmenter]] = {
        "full": models.full,
        "free drop": models.FreeDrop,
        "free drop, own layers": partial(models.FreeDrop, own_layers=True),
        "literal ToMe": models.LiteralToMe,
        "merged": models.merged,
        "merged + NSR": models.with_residual,
    }
    torch.compiler.reset()  # one model more in the compiler's cache of a function and it would fall back to eager
    torch.manual_seed(0)
    image = models.matched_inputs(case.batch, case.size, device, _dtype(device))
    model = models.PatchLogits(builds[name](case.size)).to(device, _dtype(device)).eval().requires_grad_(False)
    return {f"{name}, {way}": _prepare(model, way, case, image) for way in ways}


def _prepare(model: nn.Module, way: str, case: Case, image: Tensor) -> Callable[[], Tensor]:
    fast = optimize(model, case.batch, case.size, compiled="compiled" in way, capture="captured" in way)
    return lambda: fast(image)
