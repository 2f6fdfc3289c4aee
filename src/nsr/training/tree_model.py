"""A graph model with root readout on batches of complete binary trees, by the plans of ``tree_plan.py``."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.conv import GCNConv, GINConv, SAGEConv

from nsr.graph.host import CHILD
from nsr.graph.models import Backbone, GraphModel
from nsr.training.tree_batches import Queries
from nsr.training.tree_layer import LayerKind, Weights, affine, take_rows, tree_layer
from nsr.training.tree_plan import LayerPlan, layer_plans


class Parts(Protocol):
    """What a model on trees is made of: :class:`PlainParts`, or its fused twin on a GPU."""

    def encode(self, weights: Weights, batch: Queries) -> Tensor:
        """The rows before the first layer, ``[R, M, D]``: leaves, blank and roots."""

    def layer(
        self, number: int, weights: Weights, rows: Tensor, plan: LayerPlan, place: Tensor, count: Tensor | None
    ) -> Tensor:
        """Layer ``number``; see :func:`nsr.training.tree_layer.tree_layer`."""

    def loss(self, weights: Weights, rows: Tensor, batch: Queries) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the pairs that count, and the number of right answers among them, each ``[R]``."""


class TreeModel:
    """What a :class:`nsr.graph.models.GraphModel` computes on trees; logits and gradients are the same, to rounding.

    Args:
        model: The model; its weights are given with each call.
        depth: ``d``.
        trees: ``S``, the most different trees in a batch.
        pairs: ``B``, the number of (tree, query) pairs in a batch.
        device: Where it runs.
        parts: What computes it; plain operators by default.
    """

    def __init__(
        self,
        model: GraphModel,
        depth: int,
        trees: int,
        pairs: int,
        device: torch.device | str = "cpu",
        parts: Parts | None = None,
    ) -> None:
        if len(model.layers) != depth + 1:
            raise ValueError(f"A tree of depth {depth} takes {depth + 1} layers; the model has {len(model.layers)}.")
        self.kind = kind_of(model)
        layer = model.layers[0]  # all are alike
        self.names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers()) if name != "conv.eps"]
        self.parts = parts or PlainParts(self.kind)
        self.trees, self.pairs, self.leaves = trees, pairs, 2**depth
        self.plans = layer_plans(self.kind.backbone, depth, trees, pairs, device, model.head.weight.dtype)

    def loss(self, weights: Weights, batch: Queries) -> tuple[Tensor, Tensor]:
        """In training: mean cross-entropy and number of right answers, each ``[R]``; see :class:`Parts`."""
        return self.parts.loss(weights, self._rows(weights, batch, training=True), batch)

    def logits(self, weights: Weights, batch: Queries) -> Tensor:
        """At rest: logits of the roots, ``[R, B, L]``."""
        roots = self._rows(weights, batch, training=False)[:, -self.pairs :]
        return affine(roots, weights["head.weight"], weights["head.bias"])

    def _rows(self, weights: Weights, batch: Queries, training: bool) -> Tensor:
        """The rows after the last layer, roots at the end; in training BatchNorm uses the statistics of the batch."""
        rows = self.parts.encode(weights, batch)
        counts: Sequence[Tensor | None] = [None] * len(self.plans)
        if training and self.kind.backbone == "gin":
            counts = _counts(batch, self.plans, self.trees, self.leaves)
        for number, (plan, count) in enumerate(zip(self.plans, counts, strict=True)):
            own = {name: weights[f"layers.{number}.{name}"] for name in self.names}
            rows = self.parts.layer(number, own, rows, plan, batch.place, count)
        return rows


class PlainParts:
    """Plain operators: the reference, and what runs where there are no kernels.

    Args:
        kind: Of the layers.
    """

    def __init__(self, kind: LayerKind) -> None:
        self.kind = kind

    def encode(self, weights: Weights, batch: Queries) -> Tensor:
        """One-hot key and value through a linear layer, as a sum of its columns; column 0 of each is the blank."""
        encoder = weights["encoder.weight"].transpose(1, 2)  # shape: [R, 2 (L + 1), D]
        leaves = encoder.shape[1] // 2 - 1
        key, value = torch.split(encoder, leaves + 1, dim=1)
        key = key + weights["encoder.bias"].unsqueeze(1)
        leaf = take_rows(value[:, 1:], batch.values).unflatten(1, (-1, leaves)) + key[:, 1:].unsqueeze(1)
        return torch.cat([leaf.flatten(1, 2), key + value[:, :1]], dim=1)  # a blank is key 0 with value 0, a root key q

    def layer(
        self, number: int, weights: Weights, rows: Tensor, plan: LayerPlan, place: Tensor, count: Tensor | None
    ) -> Tensor:
        """See :class:`Parts`."""
        return tree_layer(self.kind, weights, rows, plan, place, count)

    def loss(self, weights: Weights, rows: Tensor, batch: Queries) -> tuple[Tensor, Tensor]:
        """See :class:`Parts`."""
        logits = affine(rows[:, -batch.label.shape[1] :], weights["head.weight"], weights["head.bias"])
        losses = F.cross_entropy(logits.transpose(1, 2), batch.label, reduction="none")  # shape: [R, B]
        right = ((logits.detach().argmax(2) == batch.label) * batch.count).sum(1)
        return (losses * batch.count).sum(1) / batch.count.sum(1), right


def kind_of(model: GraphModel) -> LayerKind:
    """The kind of the layers of a model, all of which are alike."""
    layer = model.layers[0]
    backbones: dict[type, Backbone] = {GCNConv: "gcn", SAGEConv: "sage", GINConv: "gin"}
    backbone = next(name for conv, name in backbones.items() if isinstance(layer.conv, conv))
    branch = getattr(layer, CHILD, None)
    return LayerKind(backbone, None if branch is None else branch.source)


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
        by_pair = plan.first_pair < len(plan.members)
        counts.append(torch.cat([*parts, batch.count if by_pair else by_query], dim=1))
    return counts
