"""One message-passing layer on complete binary trees with self-loops: every node has its own state and two children.

::

    rows [R, M, D] ── plan ── own, left, right ─┬─ y = t_own own + t_child (left + right) ── conv ── update ─┐
                                                ├─ the branch over the same members ─────────────────────────┤
                                                └─ own ──────────────────────────────────────────────────────┴─ + ──

``R`` replicas have their own weights, each ``[R, ...]`` under the names of :class:`nsr.graph.models.GraphLayer`. What
is computed is what the PyG layer and its :class:`nsr.graph.GraphResidual` compute on the tree's edges;
``tests/training/test_tree_model.py`` holds one against the other. GIN has a node twice among its members, by its
self-loop and as the root term. A leaf has itself alone; children that are not there read as 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.graph.branch import Source
from nsr.graph.models import Backbone
from nsr.training.tree_plan import LayerPlan

Weights = Mapping[str, Tensor]

EPS = 1e-5  # of LayerNorm and BatchNorm, torch's default
_MOMENTUM = 0.1  # of BatchNorm, torch's default


@dataclass(frozen=True)
class LayerKind:
    """What a layer consists of.

    Attributes:
        backbone: Of the host.
        source: What its branch gates and sums; ``None`` without a branch.
    """

    backbone: Backbone
    source: Source | None

    @property
    def copies(self) -> int:
        """How often a node is a member of its own aggregation."""
        return 2 if self.backbone == "gin" else 1


def fusible(kind: LayerKind, width: int) -> bool:
    """Whether :class:`nsr.training.tree_fused.FusedParts` has kernels for such layers."""
    return kind.source in (None, "residual") and width in (16, 32)  # more does not fit the registers


def tree_layer(
    kind: LayerKind, weights: Weights, rows: Tensor, plan: LayerPlan, place: Tensor, count: Tensor | None
) -> Tensor:
    """One layer.

    Args:
        kind: Of the layer.
        weights: Of the layer, by name.
        rows: What the plan reads, ``[R, M, D]``.
        plan: Which rows each node reads.
        place: Of the batch, see :class:`nsr.training.tree_batches.Queries`.
        count: How often each row that is made counts in BatchNorm's statistics, ``[R, N]``; with ``None`` BatchNorm
            uses its running statistics.

    Returns:
        ``[R, N, D]``.
    """
    nothing = rows.new_zeros(rows.shape[0], 1, rows.shape[2])  # row -1
    extended = torch.cat([rows, nothing], dim=1)
    index = plan.rows_of(place) % extended.shape[1]
    members = take_rows(extended, index.flatten(1)).unflatten(1, (-1, 3))  # shape: [R, N, 3, D]
    own = members[:, :, 0]
    t_own, t_child = plan.coefficient.split(1, dim=1)  # shape: [N, 1]
    aggregate = kind.copies * t_own * own + t_child * members[:, :, 1:].sum(2)
    after = own + host_update(kind, weights, own, aggregate, count)
    if kind.source == "aggregate":
        after = after + _output(weights, _gated_aggregate(weights, aggregate))
    elif kind.source is not None:
        after = after + _output(weights, _gated_members(kind, weights, members, t_own, t_child))
    return after


def host_update(kind: LayerKind, weights: Weights, own: Tensor, aggregate: Tensor, count: Tensor | None) -> Tensor:
    """What the host adds to its input: ``update(conv(h))`` from the states and their aggregates, ``[R, N, D]``."""
    if kind.backbone == "gin":
        for linear, norm in ((0, 1), (3, 4)):
            hidden = affine(aggregate, weights[f"conv.nn.{linear}.weight"], weights[f"conv.nn.{linear}.bias"])
            aggregate = F.relu(batch_norm(weights, f"conv.nn.{norm}", hidden, count))
        return aggregate
    if kind.backbone == "sage":
        out = affine(aggregate, weights["conv.lin_l.weight"], weights["conv.lin_l.bias"])
        out = out + affine(own, weights["conv.lin_r.weight"])
    else:
        out = affine(aggregate, weights["conv.lin.weight"], weights["conv.bias"])
    return F.gelu(layer_norm(out, weights["update.0.weight"], weights["update.0.bias"]))


def _gated_members(kind: LayerKind, weights: Weights, members: Tensor, t_own: Tensor, t_child: Tensor) -> Tensor:
    """``K^{-1/2} sum_i g_i z_i`` over the node and its children, ``[R, N, 3, D] -> [R, N, D]``."""
    w_source, w_target, w_residual = _gate_weight(weights)
    message = affine(members.flatten(1, 2), weights["null_space.message.weight"]).view_as(members)
    times = torch.ones_like(message[0, 0, :, :1])
    times[0] = kind.copies
    if kind.source == "residual":
        length = (kind.copies * t_own.square() + 2 * t_child.square()).sqrt()
        t = torch.stack([t_own, t_child, t_child], dim=1) / length.unsqueeze(2)  # shape: [N, 3, 1]
        message = message - t * (times * t * message).sum(2, keepdim=True)
    hidden = affine(members.flatten(1, 2), w_source) + affine(message.flatten(1, 2), w_residual)
    target = affine(members[:, :, 0], w_target, weights["null_space.gate_hidden.bias"])
    gate = _gate(weights, (hidden.view_as(members) + target.unsqueeze(2)).flatten(1, 2)).view_as(members)
    size = kind.copies + 2.0 * (t_child != 0).to(message.dtype)
    return (times * gate * message).sum(2) * size.rsqrt()


def _gated_aggregate(weights: Weights, aggregate: Tensor) -> Tensor:
    """The post-aggregation control: every node has one member, its own aggregate."""
    w_source, w_target, w_residual = _gate_weight(weights)
    message = affine(aggregate, weights["null_space.message.weight"])
    hidden = affine(F.relu(aggregate), w_source) + affine(message, w_residual)
    target = affine(F.relu(-aggregate), w_target, weights["null_space.gate_hidden.bias"])
    return message * _gate(weights, hidden + target)


def _gate_weight(weights: Weights) -> tuple[Tensor, ...]:
    """``Ws``, ``Wd`` and ``Wz``, each ``[R, D, D]``."""
    return weights["null_space.gate_hidden.weight"].chunk(3, dim=2)


def _gate(weights: Weights, hidden: Tensor) -> Tensor:
    out = affine(F.gelu(hidden), weights["null_space.gate_output.weight"], weights["null_space.gate_output.bias"])
    return out.sigmoid()


def _output(weights: Weights, gated: Tensor) -> Tensor:
    normed = layer_norm(gated, weights["null_space.norm.weight"], weights["null_space.norm.bias"])
    hidden = affine(normed, weights["null_space.output.0.weight"], weights["null_space.output.0.bias"])
    return affine(F.gelu(hidden), weights["null_space.output.2.weight"], weights["null_space.output.2.bias"])


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of each replica: ``[R, M, D]`` by ``[R, N]`` to ``[R, N, D]``.

    ``index_select`` because its gradient is a sum without sorting.
    """
    replicas, rows, width = table.shape
    offset = rows * torch.arange(replicas, device=index.device).unsqueeze(1)
    return table.reshape(-1, width).index_select(0, (index + offset).flatten()).view(replicas, -1, width)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``, each replica with its own: ``[R, N, D]`` and ``[R, C, D]`` make ``[R, N, C]``."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over ``D``, each replica with its own weight and bias."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * weight.unsqueeze(1) + bias.unsqueeze(1)


def batch_norm(weights: Weights, name: str, x: Tensor, count: Tensor | None) -> Tensor:
    """BatchNorm of each replica over rows that count as often as ``count [R, N]`` says.

    It is :class:`nsr.training.batch_norm.WeightedBatchNorm` with an axis of replicas; running statistics change in
    place.
    """
    if count is None:
        mean, variance = weights[f"{name}.running_mean"].unsqueeze(1), weights[f"{name}.running_var"].unsqueeze(1)
    else:
        total = count.sum(1, keepdim=True)
        share = (count / total).unsqueeze(2)
        mean = (share * x).sum(1, keepdim=True)
        variance = (share * (x - mean).square()).sum(1, keepdim=True)
        track(weights, name, mean.squeeze(1), variance.squeeze(1) * (total / (total - 1)))
    weight, bias = weights[f"{name}.weight"].unsqueeze(1), weights[f"{name}.bias"].unsqueeze(1)
    return (x - mean) * torch.rsqrt(variance + EPS) * weight + bias


@torch.no_grad()
def track(weights: Weights, name: str, mean: Tensor, variance: Tensor) -> None:
    """Let BatchNorm's running statistics follow those of a batch, ``[R, D]``."""
    weights[f"{name}.running_mean"].lerp_(mean, _MOMENTUM)
    weights[f"{name}.running_var"].lerp_(variance, _MOMENTUM)
    weights[f"{name}.num_batches_tracked"].add_(1)
