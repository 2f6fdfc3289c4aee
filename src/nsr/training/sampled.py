r"""Training on a graph that lies on disk, from sampled neighbourhoods; on several processes where there are several.

A step draws ``batch`` seed nodes, for each layer up to ``fanout`` members of every node reached so far, reads the
features of these nodes alone, and takes the loss of the seeds. Memory is that of one sampled neighbourhood, whatever
the graph; see :mod:`nsr.graph.layerwise` for evaluation with all neighbours.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import FeatureStore, GraphStore
from torch_geometric.data.feature_store import TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
from torch_geometric.loader import NeighborLoader

from nsr.data.disk_graph import DiskGraph
from nsr.training.distributed import Group, parallel


@dataclass(frozen=True)
class SampledProtocol:
    """How to train on sampled neighbourhoods.

    Args:
        fanout: Members drawn at most for each node, from the seeds outwards: as many numbers as the model has layers.
        batch: Seed nodes in a step, over all processes.
        steps: Of training.
        lr: Of Adam.
        seed: Of the order of the seeds.
        workers: Processes that sample, beside the one that trains.
    """

    fanout: tuple[int, ...] = (10, 10)
    batch: int = 1024
    steps: int = 1000
    lr: float = 1e-3
    seed: int = 0
    workers: int = 0


def neighbour_loader(
    graph: DiskGraph, nodes: Tensor, fanout: tuple[int, ...], batch: int, workers: int = 0
) -> NeighborLoader:
    """PyG's loader over ``nodes``, in their order, reading structure, features and labels from the memory maps.

    Each batch is a ``Data`` with ``x``, ``y``, ``edge_index`` and ``batch_size``: the first nodes are the seeds.

    Raises:
        ValueError: No sampling backend is installed; says how to get one.
    """
    if not (find_spec("pyg_lib") or find_spec("torch_sparse")):
        raise ValueError(
            "Sampling neighbours needs pyg-lib or torch-sparse, and neither is installed. torch-sparse builds from its "
            "source package in about ten minutes: pip install --no-build-isolation torch-scatter torch-sparse. Wheels "
            "of pyg-lib for some versions of PyTorch: https://data.pyg.org/whl."
        )
    with warnings.catch_warnings():
        # PyG recommends pyg-lib, which PyPI does not have; torch-sparse draws from the same distribution
        warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation.*")
        return NeighborLoader(
            (_Features(graph), _Edges(graph)), list(fanout), nodes, batch_size=batch, num_workers=workers
        )


def train_sampled(
    model: nn.Module,
    graph: DiskGraph,
    nodes: np.ndarray,
    protocol: SampledProtocol,
    group: Group,
    watch: Callable[[int, float], None] | None = None,
) -> None:
    """Train a node classifier in place; every process of ``group`` takes its share of each batch.

    Args:
        model: Called with features and ``edge_index``; the same on every process.
        graph: On disk.
        nodes: Those to learn from.
        protocol: How.
        group: The processes.
        watch: Told the number of steps done and the loss of the last one, on this process.
    """
    group.share(protocol.batch)  # refused before any process waits for another
    model.to(group.device).train()
    shared = parallel(model, group)
    optimizer = torch.optim.Adam(shared.parameters(), lr=protocol.lr)
    for step, data in enumerate(_batches(graph, nodes, protocol, group), start=1):
        data = data.to(group.device)
        optimizer.zero_grad(set_to_none=True)
        logits = shared(data.x, data.edge_index)[: data.batch_size]
        loss = F.cross_entropy(logits, data.y[: data.batch_size])
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch(step, float(loss.detach()))


def _batches(graph: DiskGraph, nodes: np.ndarray, protocol: SampledProtocol, group: Group) -> Iterator[Any]:
    """This process's share of ``protocol.steps`` batches; the order of the seeds is the same on every process."""
    own = group.share(protocol.batch)
    steps = len(nodes) // protocol.batch  # of an epoch
    if steps == 0:
        raise ValueError(f"A batch of {protocol.batch} needs at least as many nodes; there are {len(nodes)}.")
    for epoch in range(-(-protocol.steps // steps)):
        order = np.random.default_rng([protocol.seed, epoch]).permutation(len(nodes))
        count = min(steps, protocol.steps - epoch * steps)
        seeds = nodes[order[: count * protocol.batch]].reshape(count, group.size, own)[:, group.rank]
        yield from neighbour_loader(graph, torch.from_numpy(seeds.reshape(-1)), protocol.fanout, own, protocol.workers)


class _Features(FeatureStore):
    """Features and labels by node, read from the maps when a batch asks for them."""

    def __init__(self, graph: DiskGraph) -> None:
        super().__init__()
        self.__dict__["arrays"] = {"x": graph.features, "y": graph.labels}

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        array, index = self.arrays[attr.attr_name], attr.index
        return torch.from_numpy(array[index.numpy()] if isinstance(index, Tensor) else np.asarray(array[index]))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        return self.arrays[attr.attr_name].shape

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group_name=None, attr_name=name) for name in self.arrays]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise ValueError("A graph on disk is only read.")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise ValueError("A graph on disk is only read.")


class _Edges(GraphStore):
    """The incoming edges of every node, as they lie on disk."""

    def __init__(self, graph: DiskGraph) -> None:
        super().__init__()
        self.graph = graph

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        nodes = self.graph.num_nodes
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, size=(nodes, nodes))]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.graph.source), torch.from_numpy(self.graph.pointer)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise ValueError("A graph on disk is only read.")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise ValueError("A graph on disk is only read.")
