"""Batches of small graphs put together on the device at a fixed size, so that a step can be captured.

Graphs of different sizes make batches of different sizes; a captured step knows one. The graphs of a batch lie one
after the other, and what is left of the fixed size is filled up with nodes of one more graph that nobody reads::

    nodes   | graph 0 | graph 1 | ... | graph B-1 | filling ... |     graph of the filling: B
    edges   | of graph 0 | of graph 1 | ... | last node to itself ... |
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsr.data.zinc import Molecules


@dataclass(frozen=True)
class Batch:
    """Graphs one after the other.

    Attributes:
        atom: ``[N]``.
        edge_index: Both directions of every bond, ``[2, E]``.
        graph: Graph of each node, ``[N]``; the filling belongs to one beyond the last.
        real: 1 for a node, 0 for filling, ``[N]``.
        y: Target of each graph, ``[B]``.
    """

    atom: Tensor
    edge_index: Tensor
    graph: Tensor
    real: Tensor
    y: Tensor


class MoleculeStore:
    """A split on a device, from which batches are gathered without asking the host.

    Args:
        molecules: The split.
        device: Where it lies.
    """

    def __init__(self, molecules: Molecules, device: torch.device) -> None:
        both = np.concatenate([molecules.edges[:, None], molecules.edges[:, None, ::-1]], axis=1).reshape(-1, 2)
        self.num_nodes = torch.from_numpy(molecules.num_nodes).to(device)
        self.num_edges = 2 * torch.from_numpy(molecules.num_edges).to(device)
        self.atom = torch.from_numpy(molecules.atom).to(device)
        self.edges = torch.from_numpy(both).to(device)  # shape: [2E, 2], numbers within the molecule
        self.y = torch.from_numpy(molecules.y).to(device)
        self.first_node = self.num_nodes.cumsum(0) - self.num_nodes
        self.first_edge = self.num_edges.cumsum(0) - self.num_edges

    def __len__(self) -> int:
        return len(self.num_nodes)

    def sizes(self, batches: Tensor, real: Tensor) -> tuple[int, int]:
        """Nodes (one to spare, and a multiple of 256) and edges that hold every one of the batches.

        Args:
            batches: Which graphs, ``[..., B]``.
            real: False for a place in a batch that stays empty; broadcasts to ``[..., B]``.
        """
        nodes, edges = (int((count[batches] * real).sum(-1).max()) for count in (self.num_nodes, self.num_edges))
        return -(-(nodes + 1) // 256) * 256, edges

    def gather(self, chosen: Tensor, real: Tensor, nodes: int, edges: int) -> Batch:
        """Put graphs together.

        Args:
            chosen: Which, ``[B]``.
            real: False for a place in the batch that stays empty, ``[B]``.
            nodes: ``N``, more than the graphs have.
            edges: ``E``, at least as many as the graphs have.
        """
        graph, node, is_node = _places(self.num_nodes[chosen] * real, self.first_node[chosen], nodes)
        atom = torch.where(is_node, self.atom[node], 0)
        offset = (self.num_nodes[chosen] * real).cumsum(0) - self.num_nodes[chosen] * real
        owner, edge, is_edge = _places(self.num_edges[chosen] * real, self.first_edge[chosen], edges)
        ends = self.edges[edge] + offset[owner.clamp(max=len(chosen) - 1)].unsqueeze(1)
        edge_index = torch.where(is_edge.unsqueeze(1), ends, nodes - 1).T.contiguous()
        return Batch(atom, edge_index, graph, is_node.to(self.y.dtype), self.y[chosen])

    def everything(self) -> Batch:
        """The whole split as one batch."""
        every = torch.arange(len(self), device=self.y.device)
        real = torch.ones_like(every, dtype=torch.bool)
        return self.gather(every, real, *self.sizes(every, real))


def _places(counts: Tensor, first: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay ``counts [B]`` items of each owner one after the other in ``length`` places.

    Returns:
        For each place its owner (``B`` for filling), the number of its item, and whether there is one.
    """
    end = counts.cumsum(0)
    place = torch.arange(length, device=counts.device)
    owner = torch.searchsorted(end, place, right=True)
    inside = owner < len(counts)
    known = owner.clamp(max=len(counts) - 1)
    item = first[known] + place - (end - counts)[known]
    return owner, torch.where(inside, item, 0), inside
