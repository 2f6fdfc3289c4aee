"""How far the tree's fast paths are from plain operators; as a program, its kernels under Triton's interpreter.

A program of its own, because Triton decides when a kernel is defined whether it is interpreted:
``TRITON_INTERPRET=1 python trees_compared.py``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from nsr.data.tree import tree_task
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone, GraphModel
from nsr.training import adam_kernel, adam_native, tree
from nsr.training.plateau import PlateauRule
from nsr.training.replicas import Replicas, adam_rows
from nsr.training.tree_batches import grouped, sampled
from nsr.training.tree_fused import FusedParts
from nsr.training.tree_model import TreeModel, kind_of
from nsr.training.tree_native import NativeTreeModel, tree_library

SEEDS = (1, 2)

Make = Callable[[GraphModel, int, int, int, Replicas], TreeModel]  # from model, depth, trees, pairs and weights


def plain(model: GraphModel, depth: int, trees: int, pairs: int, replicas: Replicas) -> TreeModel:
    """Plain operators."""
    return TreeModel(model, depth, trees, pairs, replicas.rows.device)


def kernels(model: GraphModel, depth: int, trees: int, pairs: int, replicas: Replicas) -> TreeModel:
    """Triton's kernels."""
    parts = FusedParts(kind_of(model), replicas, len(model.layers))
    return TreeModel(model, depth, trees, pairs, replicas.rows.device, parts)


def native(model: GraphModel, depth: int, trees: int, pairs: int, replicas: Replicas) -> TreeModel:
    """C++."""
    library = tree_library(model.head.in_features)
    assert library is not None
    return NativeTreeModel(model, depth, trees, pairs, replicas, library)


@dataclass(frozen=True)
class Case:
    """A batch of ``trees`` different trees: single samples, or the trees with all of their queries."""

    backbone: Backbone
    variant: Variant
    width: int = 16
    depth: int = 2
    trees: int = 5
    whole_trees: bool = False


CASES = {
    "gcn": Case("gcn", "original"),
    "gcn + nsr": Case("gcn", "nsr"),
    "sage": Case("sage", "original"),
    "sage + nsr": Case("sage", "nsr"),
    "gin": Case("gin", "original"),
    "gin + nsr": Case("gin", "nsr"),
    "gcn + nsr, deep, whole trees": Case("gcn", "nsr", depth=5, trees=1, whole_trees=True),
    "gin + nsr, whole trees": Case("gin", "nsr", trees=3, whole_trees=True),
}


def models_of(case: Case, dtype: torch.dtype = torch.float32) -> list[GraphModel]:
    """One model a seed."""
    leaves = 2**case.depth
    return [
        graph_model(
            case.backbone,
            case.variant,
            lambda w: nn.Linear(2 * (leaves + 1), w),
            seed=seed,
            width=case.width,
            outputs=leaves,
            layers=case.depth + 1,
            readout="root",
        ).to(dtype)
        for seed in SEEDS
    ]


def results(case: Case, make: Make, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Loss, right answers, each gradient, logits at rest and BatchNorm's statistics after one batch."""
    leaves = 2**case.depth
    models = models_of(case, dtype)
    replicas = Replicas(models, device)
    generator = torch.Generator().manual_seed(0)
    permutations = torch.from_numpy(tree_task(case.depth).permutations).expand(len(SEEDS), -1, -1).to(device)
    if case.whole_trees:
        trees = torch.stack([torch.randperm(permutations.shape[1], generator=generator)[: case.trees] for _ in SEEDS])
        samples = (trees.unsqueeze(2) * leaves + torch.arange(leaves)).flatten(1).to(device)
    else:
        samples = torch.randint(case.trees * leaves, (len(SEEDS), 18), generator=generator).to(device)
    count = (torch.rand(samples.shape, generator=generator) < 0.8).float().to(device)
    if case.whole_trees:
        batch = grouped(permutations, samples, count)
    else:
        batch = sampled(permutations, samples, count, case.trees)
    model = make(models[0], case.depth, case.trees, samples.shape[1], replicas)
    losses, right = model.loss(replicas.parameters | replicas.buffers, batch)
    replicas.backward(losses)
    logits = model.logits(replicas.parameters | replicas.buffers, batch)
    gradients = {name: replicas._gradients[name] for name in replicas.parameters}
    return {"loss": losses.detach(), "right": right, "logits": logits.detach(), **gradients, **replicas.buffers}


def apart(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of any result, relative to its largest value; 1e-6 of anything is nothing."""
    assert ours.keys() == right.keys()
    return max(float((ours[name] - right[name]).abs().max() / (right[name].abs().max() + 1e-2)) for name in right)


def error(case: Case) -> float:
    """How far the kernels are from plain operators, on a CPU."""
    return apart(results(case, kernels, "cpu"), results(case, plain, "cpu"))


def adam_error(fast_adam: Callable[..., None], rows: int, length: int, weight_decay: float) -> float:
    """How far three steps of a fast path are from the plain ones."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(rows, length, generator=generator) for _ in range(2)] + [torch.zeros(rows, length)] * 2
    ours = [tensor.clone() for tensor in plain]
    plain = [tensor.clone() for tensor in plain]
    rate = torch.linspace(0, 1e-2, rows)
    for step in range(1, 4):
        for adam, tensors in ((fast_adam, ours), (adam_rows, plain)):
            adam(*tensors, torch.tensor(float(step)), rate, weight_decay, (0.9, 0.999), 1e-8)
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


def trained(case: Case, make: Make, epochs: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All that training changes after some epochs on five trees, the accuracy of each epoch, and the answers at rest.

    With batches of three trees, or of eight samples, the last one of an epoch is filled up.
    """
    leaves = 2**case.depth
    tasks = []
    for seed in SEEDS:
        task = tree_task(case.depth, seed)
        own = [samples[samples < 5 * leaves] for samples in (task.train, task.test)]
        tasks.append(replace(task, permutations=task.permutations[:5], train=own[0][: 3 * leaves + 1], test=own[1]))
    rule = PlateauRule("max", rate=1e-2, patience=1, stop_after=100, perfect=1.0)

    adams = {kernels: adam_kernel.adam_rows, native: adam_native.adam_rows, plain: adam_rows}
    with (
        patch.object(tree, "_tree_model", make),
        patch.object(Replicas, "_adam_rows", lambda _: adams[make]),
        patch.dict(tree.BATCH, {case.depth: 8}),
    ):
        whole_trees = 3 if case.whole_trees else None
        trainer = tree._Trainer(models_of(case, dtype), tasks, rule, whole_trees, torch.device("cpu"))
        accuracies = []
        for number in range(epochs):
            trainer.epoch(number)
            accuracies.append(trainer.latest.clone())
        answers = trainer.correct_answers(trainer.permutations)
    own = {f"weight {name}": values.detach() for name, values in trainer.replicas.parameters.items()}
    state = {name: values for name, values in trainer.state().items() if not name.startswith("best")}
    return own | state | {"accuracy": torch.stack(accuracies), "answers": answers.double()}


def training_error(case: Case, make: Make, epochs: int) -> float:
    """How far training by a fast path is from training by plain operators in double precision."""
    ours, right = trained(case, make, epochs), trained(case, plain, epochs, torch.float64)
    return apart(*({name: values.double() for name, values in found.items()} for found in (ours, right)))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # what a kernel has not written is not a number
    found = {name: error(case) for name, case in CASES.items()}
    found |= {f"adam {decay}": adam_error(adam_kernel.adam_rows, 3, 1100, decay) for decay in (0.0, 0.1)}
    found["training"] = training_error(Case("gcn", "nsr", whole_trees=True), kernels, 4)
    found["training, single samples"] = training_error(Case("gcn", "nsr"), kernels, 2)
    print(json.dumps(found))
