"""Training steps on one graph, each as its users would write it: forward, backward, clip, Adam."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.conv import GATv2Conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import nsr
from nsr.bench.literal_branch import as_worded
from nsr.graph.models import GraphLayer, GraphModel
from nsr.training.capture import CapturedStep
from nsr.training.fused_aggregation import fuse_aggregation
from nsr.training.fused_norms import fuse_norms
from nsr.training.noise import seed_dropout
from nsr.training.normalisation import preset_normalisation
from nsr.training.replicas import Replicas
from nsr.training.split_products import split_long_products

FEATURES, CLASSES = 16, 4
HEADS = 4  # of GATv2
DROPOUT = 0.5
RATE, MAX_NORM = 1e-3, 1.0


class Task:
    """A graph with random features and labels; nothing about speed depends on their values.

    Args:
        edge_index: ``[2, E]``.
        nodes: ``N``.
        width: ``D`` of the models.
        layers: Of the models.
        device: Where.
    """

    def __init__(self, edge_index: Tensor, nodes: int, width: int, layers: int, device: torch.device) -> None:
        self.edge_index = edge_index.to(device)
        self.nodes, self.width, self.layers, self.device = nodes, width, layers, device
        self.x = torch.randn(nodes, FEATURES, device=device)
        self.labels = torch.randint(CLASSES, (nodes,), device=device)
        self.normalised = gcn_norm(self.edge_index, num_nodes=nodes, dtype=self.x.dtype)

    @property
    def members(self) -> int:
        """Of all nodes together, self-loops included."""
        return self.normalised[0].shape[1]


def plain(task: Task) -> GraphModel:
    """A GCN of the paper as PyG computes it, its coefficients computed once (``cached=True``)."""
    encoder = nn.Linear(FEATURES, task.width)
    model = GraphModel("gcn", encoder, task.width, CLASSES, task.layers, DROPOUT).to(task.device)
    preset_normalisation(model, *task.normalised)
    return model


def attention(task: Task) -> GraphModel:
    """GATv2 in the place of each GCN: the usual costlier alternative."""
    model = plain(task)
    for layer in model.modules():
        if isinstance(layer, GraphLayer):
            layer.conv = GATv2Conv(task.width, task.width // HEADS, heads=HEADS).to(task.device)
    return model


def literal(task: Task) -> GraphModel:
    """GCN with the branch as the paper words it."""
    return as_worded(attached(task))


def attached(task: Task) -> GraphModel:
    """``nsr.attach`` on the plain GCN, and nothing else."""
    model = plain(task)
    nsr.attach(model, init="paper", dropout=DROPOUT)
    return model


def trained(task: Task) -> GraphModel:
    """As the library's own training has it: GCN's sum fused too."""
    model = fuse_aggregation(plain(task))
    nsr.attach(model, init="paper", dropout=DROPOUT)
    return model


@contextmanager
def matmul_precision(told: str) -> Iterator[None]:
    """What ``torch.set_float32_matmul_precision`` is told inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(told)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def step(
    model: GraphModel, task: Task, *, compiled: bool = False, captured: bool = False, autocast: bool = False
) -> Callable[[], None]:
    """One training step of a model with torch's own Adam.

    Args:
        model: What is trained.
        task: On what.
        compiled: Its layers by ``torch.compile``, which they share: four times less to wait for than the whole model.
        captured: In a CUDA graph.
        autocast: Every product of the forward and backward pass in bf16.
    """
    on_gpu = task.device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True, capturable=on_gpu)
    if compiled:
        for layer in model.layers:
            layer.compile(dynamic=False)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=autocast):
            logits = model(task.x, task.edge_index)
        F.cross_entropy(logits.float(), task.labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return CapturedStep(run, task.device) if captured else run


def replicas_step(models: list[GraphModel], task: Task) -> Callable[[], None]:
    """One training step of several models at once, as :mod:`nsr.training.nodes` makes it; captured on a GPU."""
    replicas = Replicas([fuse_norms(seed_dropout(model, 0)) for model in models], task.device)
    rate = torch.full((len(models),), RATE, device=task.device)
    labels = task.labels.expand(len(models), -1)

    def run() -> None:
        logits = replicas.call(
            lambda model, x, edge_index: model(x, edge_index),
            task.x,
            task.edge_index,
            in_dims=(None, None),
            training=True,
        )  # shape: [R, N, C]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        with split_long_products(task.device):
            replicas.backward(losses)
        replicas.adam(rate, max_norm=MAX_NORM)

    return CapturedStep(run, task.device)
