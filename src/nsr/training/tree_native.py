"""The model on trees in C++: the fast twin of ``PlainParts`` on a CPU; see ``native/tree.cpp``."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nsr.training.native import load_library, pointers, threads
from nsr.training.replicas import Replicas
from nsr.training.tree_batches import Queries
from nsr.training.tree_layer import LayerKind, Weights, host_update, track
from nsr.training.tree_plan import LayerPlan
from nsr.training.tree_sections import PLACES, layer_sections


class NativeParts:
    """See :class:`nsr.training.tree_model.Parts`; each layer reads the section of its weights.

    Args:
        kind: Of the layers.
        replicas: The model; the gradients of what the layers read are taken in sections.
        layers: How many.
        library: Of the model's width, see :func:`tree_library`.
    """

    def __init__(self, kind: LayerKind, replicas: Replicas, layers: int, library: ctypes.CDLL) -> None:
        self.kind, self.gin = kind, kind.backbone == "gin"
        self.library = library
        self.sections = layer_sections(kind, replicas, layers)

    def encode(self, weights: Weights, batch: Queries) -> Tensor:
        """See :class:`nsr.training.tree_model.Parts`."""
        return _Encode.apply(self.library, batch.values, weights["encoder.weight"], weights["encoder.bias"])

    def layer(
        self, number: int, weights: Weights, rows: Tensor, plan: LayerPlan, place: Tensor, count: Tensor | None
    ) -> Tensor:
        """See :class:`nsr.training.tree_model.Parts`."""
        values, places = self.sections[number]
        shape = (rows.shape[0], rows.shape[1], len(plan.members), plan.first_pair, place.shape[1] // 3, plan.own_moves)
        branch = self.kind.source is not None
        kind = (values.stride(0), self.kind.copies, branch, not self.gin, self.kind.backbone == "sage")
        layer = _Numbers(*map(int, (*shape, *kind)), *(places[name] for name in PLACES))
        out, aggregate = _Layer.apply(rows, values, plan, place, self.library, layer)
        return out + self._gin_conv(weights, aggregate, count) if self.gin else out

    def _gin_conv(self, weights: Weights, aggregate: Tensor, count: Tensor | None) -> Tensor:
        """The update of GIN from the aggregates, ``[R, N, D]``; see :func:`nsr.training.tree_layer.host_update`."""
        if count is None:
            return host_update(self.kind, weights, aggregate, aggregate, count)
        total = count.sum(1, keepdim=True)
        for linear, norm in ((0, 1), (3, 4)):
            stage = [weights[f"conv.nn.{name}"] for name in (f"{linear}.weight", f"{linear}.bias")]
            stage += [weights[f"conv.nn.{norm}.{name}"] for name in ("weight", "bias")]
            aggregate, mean, variance = _Stage.apply(self.library, aggregate, count, *stage)
            track(weights, f"conv.nn.{norm}", mean, variance * (total / (total - 1)))
        return aggregate

    def loss(self, weights: Weights, rows: Tensor, batch: Queries) -> tuple[Tensor, Tensor]:
        """See :class:`nsr.training.tree_model.Parts`."""
        return _HeadAndLoss.apply(
            self.library, rows, batch.label, batch.count, weights["head.weight"], weights["head.bias"]
        )


def tree_library(width: int) -> ctypes.CDLL | None:
    """The functions for models of a width, where they can be compiled."""
    library = load_library("tree", (f"NSR_WIDTH={width}",))
    if library is not None:
        library.tree_layer_saved_size.restype = ctypes.c_int64
    return library


class _Numbers(ctypes.Structure):
    """``Layer`` in C++, with ``Places``, in the order of :data:`nsr.training.tree_sections.PLACES`, at its end."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("replicas", "read", "nodes", "first_pair", "pairs", "own_moves"),
            *("weight_stride", "copies", "branch", "host", "sage"),
            *PLACES,
        )
    ]


class _Layer(torch.autograd.Function):
    """``rows [R, M, D]`` and ``weights [R, P]`` to the result and, for GIN, the aggregates, each ``[R, N, D]``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, plan: LayerPlan, place: Tensor, library: ctypes.CDLL, layer: _Numbers
    ) -> tuple[Tensor, Tensor]:
        rows, place = rows.contiguous(), place.contiguous()
        out = rows.new_empty(layer.replicas, layer.nodes, rows.shape[2])
        aggregate = out.new_empty(0) if layer.host else torch.empty_like(out)
        messages = torch.empty_like(rows) if layer.branch else out.new_empty(0)
        saved = out.new_empty(layer.replicas, library.tree_layer_saved_size(ctypes.c_int64(layer.nodes)))
        library.tree_layer_forward(
            threads(layer.replicas),
            ctypes.byref(layer),
            *pointers(rows, plan.members, plan.coefficient, place, weights, out, aggregate, messages, saved),
        )
        ctx.save_for_backward(rows, weights, place, messages, saved)
        ctx.plan, ctx.library, ctx.layer = plan, library, layer
        return out, aggregate

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_aggregate: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, place, messages, saved = ctx.saved_tensors
        plan: LayerPlan = ctx.plan
        d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights, memory_format=torch.contiguous_format)
        grad, d_aggregate = grad.contiguous(), d_aggregate.contiguous()
        ctx.library.tree_layer_backward(
            threads(ctx.layer.replicas),
            ctypes.byref(ctx.layer),
            *pointers(rows, plan.members, plan.coefficient, place, weights, messages, saved),
            *pointers(grad, d_aggregate, d_rows, d_weights),
            ctypes.c_int64(d_weights.shape[1]),
        )
        return d_rows, d_weights, None, None, None, None


class _Encode(torch.autograd.Function):
    """``values [R, S L]`` to the rows before the first layer, ``[R, S L + 1 + L, D]``."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values, weight, bias = values.contiguous(), weight.contiguous(), bias.contiguous()
        ctx.sizes = (*values.shape, weight.shape[2] // 2 - 1)
        rows = bias.new_empty(values.shape[0], values.shape[1] + ctx.sizes[2] + 1, bias.shape[1])
        library.tree_encode_forward(
            threads(len(values)), *map(ctypes.c_int64, ctx.sizes), *pointers(weight, bias, values, rows)
        )
        ctx.library = library
        ctx.save_for_backward(values, weight, bias)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias = ctx.saved_tensors
        grad, dw, d_bias = grad.contiguous(), torch.empty_like(weight), torch.empty_like(bias)
        ctx.library.tree_encode_backward(
            threads(len(values)), *map(ctypes.c_int64, ctx.sizes), *pointers(values, grad, dw, d_bias)
        )
        return None, None, dw, d_bias


class _HeadAndLoss(torch.autograd.Function):
    """``rows [R, N, D]`` with the roots at their end to loss and number of right answers, each ``[R]``."""

    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, rows: Tensor, label: Tensor, count: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, label, count, weight, bias = (x.contiguous() for x in (rows, label, count, weight, bias))
        (replicas, total, width), pairs = rows.shape, label.shape[1]
        loss, right = rows.new_empty(replicas), rows.new_empty(replicas)
        gradients = (rows.new_empty(replicas, pairs, width), torch.empty_like(weight), torch.empty_like(bias))
        library.tree_head_and_loss(
            threads(replicas),
            *map(ctypes.c_int64, (replicas, total, pairs, bias.shape[1])),
            *pointers(rows, weight, bias, label, count, loss, right, *gradients),
        )
        ctx.above = total - pairs
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_roots, dw, d_bias = ctx.saved_tensors
        each = grad.view(-1, 1, 1)
        d_rows = torch.nn.functional.pad(d_roots * each, (0, 0, ctx.above, 0))
        return None, d_rows, None, None, dw * each, d_bias * grad.unsqueeze(1)


class _Stage(torch.autograd.Function):
    """One stage of GIN's conv: ``x [R, N, D]`` to ``ReLU(BatchNorm(x W^T + b))``, mean and variance ``[R, D]``."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, count: Tensor, *stage: Tensor) -> tuple[Tensor, ...]:
        x, count = x.contiguous(), count.contiguous()
        weight, bias, gamma, beta = (tensor.contiguous() for tensor in stage)
        hat, y = torch.empty_like(x), torch.empty_like(x)
        mean, variance, scale = (torch.empty_like(bias) for _ in range(3))
        library.gin_stage_forward(
            threads(len(x)),
            *map(ctypes.c_int64, x.shape[:2]),
            *pointers(x, weight, bias, gamma, beta, count, hat, y, mean, variance, scale),
        )
        ctx.library = library
        ctx.save_for_backward(x, weight, gamma, count, hat, y, scale)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gamma, count, hat, y, scale = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        d_bias, d_gamma, d_beta = (torch.empty_like(gamma) for _ in range(3))
        grad = grad.contiguous()
        ctx.library.gin_stage_backward(
            threads(len(x)),
            *map(ctypes.c_int64, x.shape[:2]),
            *pointers(x, weight, gamma, count, hat, y, scale, grad, dx, dw, d_bias, d_gamma, d_beta),
        )
        return None, dx, None, dw, d_bias, d_gamma, d_beta
