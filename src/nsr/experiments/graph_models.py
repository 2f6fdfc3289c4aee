"""The variants of a graph experiment: one backbone, and what is added to it."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from nsr.graph.attach import attach
from nsr.graph.branch import Source
from nsr.graph.models import Backbone, GraphModel, Readout, matched_width
from nsr.training.fused_aggregation import fuse_aggregation

Variant = Literal["original", "nsr", "raw-source", "post-aggregation", "matched"]

BACKBONES: tuple[Backbone, ...] = get_args(Backbone)
VARIANTS: tuple[Variant, ...] = get_args(Variant)
_SOURCE: dict[Variant, Source] = {"nsr": "residual", "raw-source": "raw", "post-aggregation": "aggregate"}


def graph_model(
    backbone: Backbone,
    variant: Variant,
    encoder: Callable[[int], nn.Module],
    *,
    seed: int,
    width: int,
    outputs: int,
    layers: int,
    dropout: float = 0.0,
    readout: Readout = "node",
    fuse: bool = False,
) -> GraphModel:
    """One model of the paper, initialised from ``seed``; every variant but ``matched`` starts from the same backbone.

    Args:
        backbone: The host.
        variant: ``original``; ``nsr``; the controls ``raw-source`` and ``post-aggregation``; or ``matched``, the
            original made so wide (in steps of 16) that it has as many parameters as ``nsr``.
        encoder: Makes the input layer of a given width.
        seed: Of the initialisation. The global stream is left as it was.
        width: ``D``.
        outputs: Classes or targets.
        layers: Message-passing layers.
        dropout: In layers and branches.
        readout: See :class:`nsr.graph.models.GraphModel`.
        fuse: Let the convs sum by the fused operator; the results are the same.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; expected one of {VARIANTS}.")

    def plain(width: int) -> GraphModel:
        model = GraphModel(backbone, encoder(width), width, outputs, layers, dropout, readout)
        return fuse_aggregation(model) if fuse else model

    def branched(source: Source) -> GraphModel:
        model = plain(width)
        attach(model, source=source, init="paper", dropout=dropout)
        return model

    with torch.random.fork_rng(devices=[]):
        if variant == "matched":
            width = matched_width(plain, parameter_count(branched("residual")), multiple=16)
        torch.manual_seed(seed)
        return branched(_SOURCE[variant]) if variant in _SOURCE else plain(width)


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
