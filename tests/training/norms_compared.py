"""How far fused norms are from plain operators; as a program, printed as JSON: ``python norms_compared.py DEVICE``.

A program of its own, because Triton decides when a kernel is defined whether it is interpreted: on a CPU it needs
``TRITON_INTERPRET=1``.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from nsr.training import fused_norms
from nsr.training.batch_norm import row_weights
from nsr.training.fused_norms import FinishedBatchNorm, FinishedLayerNorm
from nsr.training.noise import SeededDropout

REPLICAS = 3


def dropout(p: float) -> nn.Module:
    return SeededDropout(p, seed=5, site=2) if p else nn.Identity()


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, bool]] = {  # module, rows, width, rows with weights
    "layer, gelu, dropout": (lambda: FinishedLayerNorm(nn.LayerNorm(24), 1, dropout(0.4)), 300, 24, False),
    "layer, nothing else": (lambda: FinishedLayerNorm(nn.LayerNorm(16), 0, dropout(0.0)), 7, 16, False),
    "batch, dropout": (lambda: FinishedBatchNorm(nn.BatchNorm1d(24), dropout(0.4)), 300, 24, False),
    "batch, weights": (lambda: FinishedBatchNorm(nn.BatchNorm1d(16), dropout(0.0)), 700, 16, True),
}


def results(case: str, device: str) -> dict[str, Tensor]:
    """Output, gradients and buffers of replicas after one pass in training, and the output at rest."""
    make, rows, width, weighted = CASES[case]
    generator = torch.Generator().manual_seed(0)
    module = make().to(device)
    x = (3 + torch.randn(REPLICAS, rows, width, generator=generator)).to(device).requires_grad_()
    toward = torch.randn(REPLICAS, rows, width, generator=generator).to(device)
    weights = {
        name: torch.randn(REPLICAS, *p.shape, generator=generator).to(device).requires_grad_()
        for name, p in module.named_parameters()
    }
    buffers = {name: torch.stack([b] * REPLICAS) for name, b in module.named_buffers()}
    if "dropout.seed" in buffers:
        buffers["dropout.seed"] += torch.arange(REPLICAS, device=device, dtype=torch.int32)
    counts = torch.randint(0, 4, (rows,), generator=generator).float().to(device) if weighted else None

    def outputs() -> Tensor:
        with row_weights(module, counts):
            return vmap(lambda w, b, x: functional_call(module, (w, b), (x,)))(weights, buffers, x)

    y = outputs()
    gradients = torch.autograd.grad((y * toward).sum(), [x, *weights.values()])
    module.eval()
    names = ("x", *weights)
    found = {"y": y, "rest": outputs(), **{f"d {n}": g for n, g in zip(names, gradients, strict=True)}, **buffers}
    return {name: value.detach().cpu().double() for name, value in found.items()}


def error(case: str, device: str) -> float:
    """The largest difference of any result, relative to its largest value."""
    fused = results(case, device)
    obstacle = fused_norms.device_obstacle
    fused_norms.device_obstacle = lambda x: "asked for"
    plain = results(case, device)
    fused_norms.device_obstacle = obstacle
    assert fused.keys() == plain.keys()
    return max(float((fused[n] - plain[n]).abs().max() / (plain[n].abs().max() + 1e-6)) for n in plain)


if __name__ == "__main__":
    print(json.dumps({case: error(case, sys.argv[1]) for case in CASES}))
