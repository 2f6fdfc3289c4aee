"""The model on trees in C++: loss and gradient of a training step in one call; see ``native/tree_step.h``."""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsr.graph.models import GraphModel
from nsr.kernels.native import load_library, pointers, threads
from nsr.training.replicas import Replicas
from nsr.training.tree_batches import Queries
from nsr.training.tree_layer import Weights
from nsr.training.tree_model import TreeModel
from nsr.training.tree_plan import LayerPlan
from nsr.training.tree_sections import PLACES, places

_SOURCE = Path(__file__).parent / "native" / "tree.cpp"
_MOST_HEIGHTS = 8


class NativeTreeModel(TreeModel):
    """A :class:`TreeModel` on a CPU that trains in C++; at rest it is computed by plain operators.

    Args:
        model: The model.
        depth: ``d``.
        trees: ``S``, the most different trees in a batch.
        pairs: ``B``, the number of (tree, query) pairs in a batch.
        replicas: The model's weights; their gradients are taken all together from here on.
        library: Of the model's width, see :func:`tree_library`.
    """

    def __init__(
        self, model: GraphModel, depth: int, trees: int, pairs: int, replicas: Replicas, library: ctypes.CDLL
    ) -> None:
        super().__init__(model, depth, trees, pairs)
        self.library = library
        self.weights, begins = replicas.section("")
        ends = (begins[name] for name in ("encoder.weight", "encoder.bias", "head.weight", "head.bias"))
        sizes = (*self.weights.shape, len(self.plans), trees, self.leaves, pairs)
        self.sizes = _Model(*sizes, *ends)
        self.layers = (_TreeLayer * len(self.plans))()
        read = trees * self.leaves + 1 + self.leaves  # leaves, blank, roots
        for number, plan in enumerate(self.plans):
            self._describe(self.layers[number], number, plan, read, begins, replicas)
            read = len(plan.members)
        self.tracked = [values for name, values in replicas.buffers.items() if name.endswith("num_batches_tracked")]

    def loss(self, weights: Weights, batch: Queries) -> tuple[Tensor, Tensor]:
        """See :class:`TreeModel`; the weights are those of the replicas."""
        for count in self.tracked:
            count.add_(1)
        return _Step.apply(self.weights, self, batch)

    def _describe(
        self, layer: "_TreeLayer", number: int, plan: LayerPlan, read: int, begins: dict[str, int], replicas: Replicas
    ) -> None:
        """Fill in a layer; the plan's tensors and the buffers must outlive it."""
        prefix = f"layers.{number}."
        backbone = self.kind.backbone
        layer.members, layer.t = pointers(plan.members, plan.coefficient)
        layer.read, layer.nodes, layer.first_pair = read, len(plan.members), plan.first_pair
        layer.pairs, layer.own_moves, layer.copies = self.pairs, plan.own_moves, self.kind.copies
        layer.branch, layer.host, layer.sage = self.kind.source is not None, backbone != "gin", backbone == "sage"
        layer.heights, layer.blanks = len(plan.nodes_of_height), plan.blanks
        layer.nodes_of_height[: len(plan.nodes_of_height)] = plan.nodes_of_height
        for key, place in places(begins, prefix).items():
            setattr(layer, key, place)
        if backbone != "gin":
            return
        for stage, (linear, norm) in zip(layer.stages, (("nn.0", "nn.1"), ("nn.3", "nn.4")), strict=True):
            stage.weight, stage.bias = (begins[f"{prefix}conv.{linear}.{name}"] for name in ("weight", "bias"))
            stage.norm, stage.norm_bias = (begins[f"{prefix}conv.{norm}.{name}"] for name in ("weight", "bias"))
            running = (replicas.buffers[f"{prefix}conv.{norm}.running_{name}"] for name in ("mean", "var"))
            stage.running_mean, stage.running_variance = pointers(*running)


def tree_library(width: int) -> ctypes.CDLL | None:
    """The functions for models of a width, where they can be compiled."""
    return load_library(_SOURCE, (f"NSR_WIDTH={width}",))


class _Stage(ctypes.Structure):
    """``Stage`` in C++."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("weight", "bias", "norm", "norm_bias")),
        *((name, ctypes.c_void_p) for name in ("running_mean", "running_variance")),
    ]


class _TreeLayer(ctypes.Structure):
    """``TreeLayer`` in C++, its ``Layer`` and ``Places`` written out."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("members", "t")),
        *((name, ctypes.c_int64) for name in ("read", "nodes", "first_pair", "pairs", "own_moves")),
        *((name, ctypes.c_int64) for name in ("copies", "branch", "host", "sage", *PLACES)),
        ("heights", ctypes.c_int64),
        ("nodes_of_height", ctypes.c_int64 * _MOST_HEIGHTS),
        ("blanks", ctypes.c_int64),
        ("stages", _Stage * 2),
    ]


class _Model(ctypes.Structure):
    """``Model`` in C++."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("replicas", "weights", "layers", "trees", "leaves", "pairs"),
            *("encoder", "encoder_bias", "head", "head_bias"),
        )
    ]


class _Batch(ctypes.Structure):
    """``Batch`` in C++."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "place", "label", "count")]


class _Step(torch.autograd.Function):
    """``weights [R, P]`` to loss and number of right answers, each ``[R]``; the gradient is made with them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, model: NativeTreeModel, batch: Queries) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(weights)
        loss, right = weights.new_empty(len(weights)), weights.new_empty(len(weights))
        read = [part.contiguous() for part in (batch.values, batch.place, batch.label, batch.count)]
        model.library.tree_step(
            threads(len(weights)),
            *(ctypes.byref(x) for x in (model.sizes, model.layers, _Batch(*pointers(*read)))),
            *pointers(weights, gradient, loss, right),
        )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.unsqueeze(1), None, None
