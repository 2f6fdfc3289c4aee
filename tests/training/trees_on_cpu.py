"""Run the tree's kernels under Triton's interpreter and print how far they are from the plain twin, as JSON.

A program of its own, because Triton decides when a kernel is defined whether it is interpreted:
``TRITON_INTERPRET=1 python trees_on_cpu.py``.
"""

import json

import torch
from torch import Tensor, nn

from nsr.data.tree import tree_task
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone
from nsr.training import adam_kernel
from nsr.training.replicas import Replicas, adam_rows
from nsr.training.tree_batches import sampled
from nsr.training.tree_fused import FusedParts
from nsr.training.tree_model import TreeModel, kind_of

DEPTH, LEAVES, PAIRS, SLOTS, SEEDS = 2, 4, 18, 5, (1, 2)


def results(backbone: Backbone, variant: Variant, width: int, fused: bool) -> list[Tensor]:
    """Loss, right answers, gradients, logits at rest and BatchNorm's statistics after one batch."""
    models = [
        graph_model(
            backbone,
            variant,
            lambda w: nn.Linear(2 * (LEAVES + 1), w),
            seed=seed,
            width=width,
            outputs=LEAVES,
            layers=DEPTH + 1,
            readout="root",
        )
        for seed in SEEDS
    ]
    replicas = Replicas(models)
    parts = FusedParts(kind_of(models[0]), replicas, DEPTH + 1) if fused else None
    model = TreeModel(models[0], DEPTH, SLOTS, PAIRS, parts=parts)
    permutations = torch.from_numpy(tree_task(DEPTH).permutations).expand(len(SEEDS), -1, -1)
    samples = torch.randint(SLOTS * LEAVES, (len(SEEDS), PAIRS), generator=torch.Generator().manual_seed(0))
    count = (torch.arange(PAIRS) < PAIRS - 3).float().expand(len(SEEDS), -1)
    batch = sampled(permutations, samples, count, SLOTS)
    losses, right = model.loss(replicas.parameters | replicas.buffers, batch)
    replicas.backward(losses)
    logits = model.logits(replicas.parameters | replicas.buffers, batch)
    return [losses.detach(), right, replicas.gradient, logits.detach(), *replicas.buffers.values()]


def error(backbone: Backbone, variant: Variant, width: int) -> float:
    """The largest difference, relative to the largest value of its kind."""
    both = zip(results(backbone, variant, width, True), results(backbone, variant, width, False), strict=True)
    return max(float((ours - plain).abs().max() / (plain.abs().max() + 1e-12)) for ours, plain in both)


def adam_error(rows: int, length: int, weight_decay: float) -> float:
    """How far three steps of the kernel are from the plain ones."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(rows, length, generator=generator) for _ in range(2)] + [torch.zeros(rows, length)] * 2
    ours = [tensor.clone() for tensor in plain]
    plain = [tensor.clone() for tensor in plain]
    rate = torch.linspace(0, 1e-2, rows)
    for step in range(1, 4):
        for adam, tensors in ((adam_kernel.adam_rows, ours), (adam_rows, plain)):
            adam(*tensors, torch.tensor(float(step)), rate, weight_decay, (0.9, 0.999), 1e-8)
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


if __name__ == "__main__":
    cases = [(b, v, 16) for b in ("gcn", "sage", "gin") for v in ("original", "nsr")] + [("gcn", "nsr", 32)]
    found = {f"{b} {v} {w}": error(b, v, w) for b, v, w in cases}
    found |= {f"adam {decay}": adam_error(3, 1100, decay) for decay in (0.0, 0.1)}
    print(json.dumps(found))
