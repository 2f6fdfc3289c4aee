"""A graph model with root readout on batches of complete binary trees, by the plans of ``tree_plan.py``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv, GINConv, SAGEConv

from nsr.graph.host import CHILD
from nsr.graph.models import Backbone, GraphModel
from nsr.training.tree_batches import Queries
from nsr.training.tree_layer import LayerKind, Weights, affine, tree_layer
from nsr.training.tree_plan import LayerPlan, layer_plans

Layers = Callable[[int, Weights, Tensor, LayerPlan, Tensor | None], Tensor]


class TreeModel:
    """What a :class:`nsr.graph.models.GraphModel` computes on trees; logits and gradients are the same, to rounding.

    Args:
        model: The model; its weights are given with each call.
        depth: ``d``.
        trees: ``S``, the most different trees in a batch.
        pairs: ``B``, the number of (tree, query) pairs in a batch.
        device: Where it runs.
        layers: Computes the layer of a number; by default the plain :func:`nsr.training.tree_layer.tree_layer`.
    """

    def __init__(
        self,
        model: GraphModel,
        depth: int,
        trees: int,
        pairs: int,
        device: torch.device | str = "cpu",
        layers: Layers | None = None,
    ) -> None:
        if len(model.layers) != depth + 1:
            raise ValueError(f"A tree of depth {depth} takes {depth + 1} layers; the model has {len(model.layers)}.")
        self.kind, self.layers = kind_of(model), layers
        self.trees, self.pairs, self.leaves = trees, pairs, 2**depth
        self.plans = layer_plans(self.kind.backbone, depth, trees, pairs, device, model.head.weight.dtype)

    def __call__(self, weights: Weights, batch: Queries, training: bool) -> Tensor:
        """Logits of the roots, ``[R, B, L]``.

        Args:
            weights: Parameters and buffers of the model by name, each ``[R, ...]``.
            batch: The pairs.
            training: Whether BatchNorm uses the statistics of the batch, and updates its own.
        """
        rows = _encode(weights, batch, self.leaves)
        counts: Sequence[Tensor | None] = [None] * len(self.plans)
        if training and self.kind.backbone == "gin":
            counts = _counts(batch, self.plans, self.trees, self.leaves)
        for number, (plan, count) in enumerate(zip(self.plans, counts, strict=True)):
            prefix = f"layers.{number}."
            own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            if len(plan.copied):
                rows = torch.cat([rows, _copies(rows, plan, batch)], dim=1)
            if self.layers is None:
                rows = tree_layer(self.kind, own, rows, plan, count)
            else:
                rows = self.layers(number, own, rows, plan, count)
        return affine(rows[:, -self.pairs :], weights["head.weight"], weights["head.bias"])


def kind_of(model: GraphModel) -> LayerKind:
    """The kind of the layers of a model, all of which are alike."""
    layer = model.layers[0]
    backbones: dict[type, Backbone] = {GCNConv: "gcn", SAGEConv: "sage", GINConv: "gin"}
    backbone = next(name for conv, name in backbones.items() if isinstance(layer.conv, conv))
    branch = getattr(layer, CHILD, None)
    return LayerKind(backbone, None if branch is None else branch.source)


def _encode(weights: Weights, batch: Queries, leaves: int) -> Tensor:
    """Leaves, blank and roots before the first layer: one-hot key and value through a linear layer, entry 0 blank."""
    encoder = weights["encoder.weight"].transpose(1, 2)  # shape: [R, 2 (L + 1), D]
    key, value = torch.split(encoder, leaves + 1, dim=1)
    key = key + weights["encoder.bias"].unsqueeze(1)
    leaf = _take(value[:, 1:], batch.values).unflatten(1, (-1, leaves)) + key[:, 1:].unsqueeze(1)
    return torch.cat([leaf.flatten(1, 2), key + value[:, :1]], dim=1)  # a blank is key 0 with value 0, a root key q


def _copies(rows: Tensor, plan: LayerPlan, batch: Queries) -> Tensor:
    """The own state of each pair's root where it is still one for each query, and those of its two children."""
    return _take(rows, batch.place[:, -len(plan.copied) :] + plan.copied)


def _take(table: Tensor, index: Tensor) -> Tensor:
    """Rows of each replica: ``[R, M, D]`` by ``[R, N]`` to ``[R, N, D]``.

    ``index_select`` because its gradient is a sum without sorting.
    """
    replicas, rows, width = table.shape
    offset = rows * torch.arange(replicas, device=index.device).unsqueeze(1)
    return table.reshape(-1, width).index_select(0, (index + offset).flatten()).view(replicas, -1, width)


def _counts(batch: Queries, plans: list[LayerPlan], trees: int, leaves: int) -> list[Tensor]:
    """How often each row that a layer makes occurs among the nodes of the batch, ``[R, N]`` for each layer."""
    zeros = batch.count.new_zeros
    by_tree = zeros(len(batch.count), trees).scatter_add(1, batch.slot, batch.count)
    by_query = zeros(len(batch.count), leaves).scatter_add(1, batch.query, batch.count)
    total = batch.count.sum(1, keepdim=True)
    counts = []
    for plan in plans:
        parts = [by_tree.unsqueeze(2).expand(-1, -1, nodes).flatten(1) for nodes in plan.nodes_of_height]
        parts += [total * plan.blanks] if plan.blanks else []
        counts.append(torch.cat([*parts, batch.count if len(plan.copied) else by_query], dim=1))
    return counts
