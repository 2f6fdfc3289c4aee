r"""Full-neighbour inference, one layer at a time: exact, in :math:`O(N d)` memory however many edges there are.

::

    x ── nodewise(encoder) ── h0 ── aggregated(layer 1) ── h1 ── … ── nodewise(head) ── logits
                               └ one table [N, d] at a time, in memory or on disk, written block by block of nodes

A node of a layer needs the rows of its own neighbours and nothing more, so no sampling is involved. A block is a small
graph of its own: its nodes, then their other neighbours, and the edges into the block. The layer runs on it as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GCNConv

from nsr.graph.models import GraphModel


@dataclass(frozen=True)
class InNeighbours:
    """The graph by its incoming edges; the arrays may be memory maps.

    Attributes:
        pointer: The members of node ``v`` are ``source[pointer[v] : pointer[v + 1]]``, ``[N + 1]``.
        source: Where each edge comes from, ``[E]``.
    """

    pointer: np.ndarray
    source: np.ndarray

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return len(self.pointer) - 1

    @cached_property
    def self_loops(self) -> np.ndarray:
        """How many edges of each node come from itself, ``[N]``."""
        count = np.zeros(self.num_nodes, dtype=np.int32)
        for begin in range(0, self.num_nodes, 2**20):
            pointer = self.pointer[begin : begin + 2**20 + 1]
            target = np.repeat(np.arange(begin, begin + len(pointer) - 1), np.diff(pointer))
            loops = target[self.source[pointer[0] : pointer[-1]] == target]
            count[begin : begin + len(pointer) - 1] = np.bincount(loops - begin, minlength=len(pointer) - 1)
        return count

    @cached_property
    def scratch(self) -> np.ndarray:
        """Room for one number a node, -1 whenever nobody uses it, ``[N]``."""
        return np.full(self.num_nodes, -1, dtype=np.int64)

    def edges(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and target of every edge into ``nodes``."""
        begin, count = self.pointer[nodes], self.pointer[nodes + 1] - self.pointer[nodes]
        first = np.repeat(begin - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
        return self.source[first + np.arange(count.sum())], np.repeat(nodes, count)


def infer(
    model: GraphModel,
    x: np.ndarray,
    neighbours: InNeighbours,
    *,
    block: int = 2**16,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
) -> np.ndarray:
    """The logits of every node, ``[N, K]``, as ``model(x, edge_index)`` in evaluation mode has them.

    Args:
        model: One of the paper's backbones with ``readout="node"``, with branches or without. For another model,
            compose :func:`nodewise` and :func:`aggregated` the way its forward does.
        x: Node inputs ``[N, F]``, perhaps a memory map.
        neighbours: The graph.
        block: Nodes computed together; bounds the memory beside the tables.
        device: Where blocks are computed; the model is left there.
        folder: Where to keep the tables of hidden states; in memory if ``None``.
    """
    if model.readout != "node":
        raise ValueError(f"Layer by layer every node is scored; the model's readout is {model.readout!r}, not 'node'.")
    table = nodewise(model.encoder, x, block=block, device=device, out=folder and folder / "hidden-0.npy")
    for number, layer in enumerate(model.layers, start=1):
        name = folder and folder / f"hidden-{number % 2}.npy"  # two files take turns
        table = aggregated(layer, table, neighbours, block=block, device=device, out=name)
    return nodewise(model.head, table, block=block, device=device)


@torch.inference_mode()
def nodewise(
    module: nn.Module, x: np.ndarray, *, block: int = 2**16, device: torch.device | str = "cpu", out: Path | None = None
) -> np.ndarray:
    """``module`` of every row, ``[N, F] -> [N, D]``; see :func:`infer` for the arguments."""
    module.to(device).eval()
    table: np.ndarray | None = None
    for begin in range(0, len(x), block):
        rows = module(_tensor(x[begin : begin + block], device)).cpu()
        table = _table(len(x), rows, out) if table is None else table
        table[begin : begin + block] = rows
    assert table is not None, "a graph has nodes"
    return table


@torch.inference_mode()
def aggregated(
    layer: nn.Module,
    h: np.ndarray,
    neighbours: InNeighbours,
    *,
    block: int = 2**16,
    device: torch.device | str = "cpu",
    out: Path | None = None,
) -> np.ndarray:
    """``layer(h, edge_index)`` with all neighbours of every node, ``[N, D] -> [N, D']``.

    Args:
        layer: Called with node states and ``edge_index``. A layer that looks further than its incoming edges (several
            hops, reversed flow, statistics over the graph) is refused: a few nodes are computed from a larger
            neighbourhood too, and both must agree. GCN's normalisation, which needs its neighbours' degrees, is given
            those of the whole graph.
        h: Node states, ``[N, D]``.
        neighbours: The graph.
        block: Nodes computed together.
        device: Where.
        out: File for the result; in memory if ``None``.
    """
    if len(h) != neighbours.num_nodes:
        raise ValueError(f"h has {len(h)} rows, the graph {neighbours.num_nodes} nodes.")
    layer.to(device).eval()
    _refuse_if_far_sighted(layer, h, neighbours, device)
    table: np.ndarray | None = None
    for begin in range(0, len(h), block):
        targets = np.arange(begin, min(begin + block, len(h)))
        rows = _one_hop(layer, h, neighbours, targets, device).cpu()
        table = _table(len(h), rows, out) if table is None else table
        table[begin : begin + block] = rows
    assert table is not None, "a graph has nodes"
    return table


def _one_hop(
    layer: nn.Module, h: np.ndarray, neighbours: InNeighbours, targets: np.ndarray, device: torch.device | str
) -> Tensor:
    """The layer's rows of ``targets``, from their own incoming edges."""
    nodes, edge_index = _local(neighbours, targets, targets)
    edge_index = edge_index.to(device)
    with _normalisation(layer, lambda conv: _gcn_norm(conv, neighbours, nodes, edge_index, len(targets))):
        return layer(_tensor(h[nodes], device), edge_index)[: len(targets)]


def _two_hops(
    layer: nn.Module, h: np.ndarray, neighbours: InNeighbours, targets: np.ndarray, device: torch.device | str
) -> Tensor:
    """The same from their neighbours' incoming edges too: there every degree is that of the whole graph."""
    within = np.union1d(targets, neighbours.edges(targets)[0])
    nodes, edge_index = _local(neighbours, targets, within)
    with _normalisation(layer, lambda conv: None):
        return layer(_tensor(h[nodes], device), edge_index.to(device))[: len(targets)]


@contextmanager
def _normalisation(layer: nn.Module, make: Callable[[GCNConv], tuple[Tensor, Tensor] | None]) -> Iterator[None]:
    """Give every GCN conv the normalised edges that it would otherwise compute, or keep, itself."""
    convs = [module for module in layer.modules() if isinstance(module, GCNConv) and module.normalize]
    kept = [conv._cached_edge_index for conv in convs]
    try:
        for conv in convs:
            conv._cached_edge_index = make(conv)
        yield
    finally:
        for conv, cache in zip(convs, kept, strict=True):
            conv._cached_edge_index = cache


def _gcn_norm(
    conv: GCNConv, neighbours: InNeighbours, nodes: np.ndarray, edge_index: Tensor, targets: int
) -> tuple[Tensor, Tensor]:
    """What PyG's ``gcn_norm`` makes of these edges inside the whole graph."""
    degree = neighbours.pointer[nodes + 1] - neighbours.pointer[nodes]
    if conv.add_self_loops:  # one loop a node, in place of those that are there; `improved` acts on weighted edges only
        degree = degree - neighbours.self_loops[nodes] + 1
        others = edge_index[0] != edge_index[1]
        loops = torch.arange(targets, device=edge_index.device).expand(2, -1)
        edge_index = torch.cat([edge_index[:, others], loops], dim=1)
    scale = torch.from_numpy(np.where(degree > 0, degree, np.inf) ** -0.5).float().to(edge_index.device)
    return edge_index, scale[edge_index[0]] * scale[edge_index[1]]


def _refuse_if_far_sighted(
    layer: nn.Module, h: np.ndarray, neighbours: InNeighbours, device: torch.device | str
) -> None:
    """Compute a few nodes in both ways."""
    candidates = np.arange(0, neighbours.num_nodes, max(1, neighbours.num_nodes // 256))
    cost = [_second_hop_edges(neighbours, node) for node in candidates.tolist()]
    by_cost = candidates[np.argsort(cost, kind="stable")]
    targets = by_cost[: len(by_cost) // 2 + 1][:: max(1, len(by_cost) // 16)]  # not the hubs
    far, near = (way(layer, h, neighbours, targets, device) for way in (_two_hops, _one_hop))
    difference = float((far - near).abs().max())
    if difference > 1e-3 * float(far.abs().max()) + 1e-5:
        raise ValueError(
            f"{type(layer).__name__} looks further than the incoming edges of a node: computed from its neighbours' "
            f"edges too, a node differs by {difference:.1e}. Layer by layer, only layers of one hop are exact; split "
            "this one into its hops."
        )


def _second_hop_edges(neighbours: InNeighbours, node: int) -> int:
    sources = neighbours.source[neighbours.pointer[node] : neighbours.pointer[node + 1]]
    return int((neighbours.pointer[sources + 1] - neighbours.pointer[sources]).sum())


def _local(neighbours: InNeighbours, targets: np.ndarray, within: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """A block as a graph of its own: its nodes, ``targets`` first, and the edges into ``within`` in their numbers."""
    source, target = neighbours.edges(within)
    number = neighbours.scratch
    number[source] = number[within] = 0
    number[targets] = -1
    others = np.flatnonzero(number == 0)
    nodes = np.concatenate([targets, others])
    number[nodes] = np.arange(len(nodes))
    edge_index = torch.from_numpy(np.stack([number[source], number[target]]))
    number[nodes] = -1
    return nodes, edge_index


def _tensor(rows: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def _table(rows: int, like: Tensor, out: Path | None) -> np.ndarray:
    shape, dtype = (rows, *like.shape[1:]), like.numpy().dtype
    return np.empty(shape, dtype) if out is None else np.lib.format.open_memmap(out, "w+", dtype, shape)
