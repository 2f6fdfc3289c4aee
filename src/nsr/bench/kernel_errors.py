"""How far the operator that is timed is from its plain twin in fp64, on the very graph that is timed."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels import gated_residual_sum, path_for

NAMES = ("messages", "source_gate", "target_gate", "mean", "mean_gate", "weight", "bias")
PRECISIONS = ("fp32", "tf32", "bf16")


def kernel_errors(edge_index: Tensor, nodes: int, width: int) -> dict[str, dict[str, float] | str]:
    """Relative errors of the result and of each gradient in every precision, and the path that was taken."""
    device = edge_index.device
    source, target = edge_index
    shapes = [(nodes, width)] * 4 + [(nodes, 1, width), (width, width), (width,)]
    tables = [torch.randn(*shape, device=device) for shape in shapes]
    tables[5] /= width**0.5
    t = torch.rand(source.shape[0], 1, device=device)
    weights = torch.randn(nodes, width, device=device)

    def run(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in tables]
        m, a, b, u, c, weight, bias = inputs
        out = gated_residual_sum(m, a, b, u, c, weight, bias, source, target, t.to(dtype), **options)
        return [out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), inputs)]

    exact = run(torch.float64, fused=False)
    found: dict[str, dict[str, float] | str] = {"path": path_for(tables[0], t)}
    for precision in PRECISIONS if device.type == "cuda" else PRECISIONS[:1]:
        ours = run(torch.float32, precision=precision)
        found[precision] = {
            name: float((a.double() - b).norm() / b.norm())
            for name, a, b in zip(("out", *NAMES), ours, exact, strict=True)
        }
    return found
