"""How far a whole model is from fp64 in each precision that is timed: its logits, and the gradient of its loss."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.bench import graph_steps as steps


def model_errors(task: steps.Task, modes: dict[str, tuple[str, bool]]) -> dict[str, dict[str, float]]:
    """Relative errors without dropout, on the very graph that is timed.

    Args:
        task: The graph.
        modes: By name, what ``torch.set_float32_matmul_precision`` is told and whether bf16 autocast is on.
    """
    model = steps.trained(task).eval()
    exact = _logits_and_gradient(copy.deepcopy(model).double(), task, "highest", False)
    found = {}
    for name, (told, autocast) in modes.items():
        ours = _logits_and_gradient(model, task, told, autocast)
        found[name] = {
            what: float((a.double() - b).norm() / b.norm())
            for what, a, b in zip(("logits", "gradient"), ours, exact, strict=True)
        }
    return found


def _logits_and_gradient(model: nn.Module, task: steps.Task, told: str, autocast: bool) -> tuple[Tensor, Tensor]:
    parameters = list(model.parameters())
    with steps.matmul_precision(told):
        with torch.autocast(task.device.type, torch.bfloat16, enabled=autocast):
            logits = model(task.x.to(parameters[0].dtype), task.edge_index)
        gradient = torch.autograd.grad(F.cross_entropy(logits, task.labels), parameters)
    return logits.detach(), torch.cat([g.flatten() for g in gradient])
