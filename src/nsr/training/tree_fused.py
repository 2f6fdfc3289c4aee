"""The model on trees by kernels: the fast twin of ``PlainParts`` on a GPU.

A layer of a tree of depth 6 has about forty operators forward and ninety backward on rows of 32 numbers, so its time is
that of launches. Here a layer without BatchNorm is one kernel forward and three backward (the layer, the sum of the
weights' gradients over its programs, and the rows' gradients; one more where pairs read by their place). GIN's conv,
whose BatchNorms need all rows at once, follows as kernels of its own.
"""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv
from nsr.training.replicas import Replicas
from nsr.training.tree_batches import Queries
from nsr.training.tree_conv_fused import gin_conv
from nsr.training.tree_ends_fused import encode_trees, head_and_loss
from nsr.training.tree_layer import LayerKind, Weights
from nsr.training.tree_layer_kernels import collect_pairs, collect_rows, layer_backward, layer_forward
from nsr.training.tree_plan import LayerPlan
from nsr.training.tree_sections import layer_sections

_NODES = 16  # in a tile
_WARPS_FORWARD, _WARPS_BACKWARD = 4, 4  # with two the forward kernel spills in fp32
_PROGRAMS = 264  # of the backward kernel: two for each multiprocessor of an H100
_ROWS = 32  # in a tile of collect_rows


class FusedParts:
    """See :class:`nsr.training.tree_model.Parts`; each layer reads the section of its weights.

    Args:
        kind: Of the layers.
        replicas: The model; the gradients of what the kernels read are taken in sections.
        layers: How many.
    """

    def __init__(self, kind: LayerKind, replicas: Replicas, layers: int) -> None:
        self.kind, self.gin = kind, kind.backbone == "gin"
        self.sections = layer_sections(kind, replicas, layers)

    def encode(self, weights: Weights, batch: Queries) -> Tensor:
        """See :class:`nsr.training.tree_model.Parts`."""
        return encode_trees(weights["encoder.weight"], weights["encoder.bias"], batch.values, batch.positions)

    def layer(
        self, number: int, weights: Weights, rows: Tensor, plan: LayerPlan, place: Tensor, count: Tensor | None
    ) -> Tensor:
        """See :class:`nsr.training.tree_model.Parts`."""
        values, places = self.sections[number]
        out, aggregate = _Layer.apply(rows, values, plan, place, self._constants(places, rows.shape[2]))
        return out + gin_conv(self.kind, weights, aggregate, count) if self.gin else out

    def loss(self, weights: Weights, rows: Tensor, batch: Queries) -> tuple[Tensor, Tensor]:
        """See :class:`nsr.training.tree_model.Parts`."""
        return head_and_loss(rows, weights["head.weight"], weights["head.bias"], batch.label, batch.count)

    def _constants(self, places: dict[str, int], width: int) -> dict[str, Any]:
        """The kernels' compile-time arguments."""
        return {
            "COPIES": self.kind.copies,
            "BRANCH": self.kind.source is not None,
            "HOST": not self.gin,
            "SAGE": self.kind.backbone == "sage",
            "D": width,
            **places,
        }


class _Layer(torch.autograd.Function):
    """``rows [R, M, D]`` and ``weights [R, P]`` to the result and, for GIN, the aggregates, each ``[R, N, D]``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, plan: LayerPlan, place: Tensor, constants: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        rows, place = rows.contiguous(), place.contiguous()
        replicas, read, width = rows.shape
        nodes = len(plan.members)
        out = rows.new_empty(replicas, nodes, width)
        aggregate = out.new_empty(0) if constants["HOST"] else torch.empty_like(out)
        layer_forward[(cdiv(nodes, _NODES), replicas)](
            rows, plan.members, plan.coefficient, place, weights, out, aggregate, read, nodes, *_pairs(plan, place),
            weights.stride(0),
            BLOCK=_NODES, num_warps=_WARPS_FORWARD, **constants,
        )  # fmt: skip
        ctx.save_for_backward(rows, weights, place)
        ctx.plan, ctx.constants = plan, constants
        return out, aggregate

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_aggregate: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, place = ctx.saved_tensors
        plan: LayerPlan = ctx.plan
        replicas, read, width = rows.shape
        nodes = len(plan.members)
        tiles = cdiv(nodes, _NODES)
        each = cdiv(tiles, max(1, _PROGRAMS // replicas))
        programs = cdiv(tiles, each)
        d_own, d_child = rows.new_empty(replicas, nodes, width), rows.new_empty(replicas, nodes, 2, width)
        parts = rows.new_empty(replicas, programs, weights.shape[1] + width)  # the weights, then the blank row
        layer_backward[(programs, replicas)](
            rows, plan.members, plan.coefficient, place, weights, grad.contiguous(), d_aggregate.contiguous(), d_own,
            d_child, parts, read, nodes, *_pairs(plan, place), plan.blank, weights.stride(0), parts.shape[2], each,
            BLOCK=_NODES, num_warps=_WARPS_BACKWARD, **ctx.constants,
        )  # fmt: skip
        total = parts.sum(1)
        d_rows = torch.empty_like(rows)
        collect_rows[(cdiv(read, _ROWS), replicas)](
            d_own, d_child, plan.uses, total[:, weights.shape[1] :], d_rows, read, nodes, plan.blank, total.stride(0),
            D=width, BLOCK=_ROWS,
        )  # fmt: skip
        if plan.first_pair < nodes:
            collect_pairs[(cdiv(place.shape[1] // 3, _ROWS), replicas)](
                d_own, d_child, plan.members, place, d_rows, read, nodes, *_pairs(plan, place), D=width, BLOCK=_ROWS
            )
        return d_rows, total[:, : weights.shape[1]], None, None, None


def _pairs(plan: LayerPlan, place: Tensor) -> tuple[int, int, int]:
    """The kernels' arguments on pairs: the first one's node, how many there are, whether their own state moves."""
    return plan.first_pair, place.shape[1] // 3, int(plan.own_moves)
