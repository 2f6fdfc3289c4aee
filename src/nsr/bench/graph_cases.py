"""The graphs that are measured: published ones where they are at hand, else random ones of the same size and skew."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsr.data.heterophilous import path_of, topology


@dataclass(frozen=True)
class GraphCase:
    """A graph by its size.

    Attributes:
        name: Of the published graph, or of nobody.
        nodes: ``N``.
        edges: Undirected.
        skew: Spread of the log-normal weights by which endpoints are drawn where the graph itself is not at hand.
    """

    name: str
    nodes: int
    edges: int
    skew: float


TOLOKERS = GraphCase("tolokers", 11_758, 519_000, 1.1)
ROMAN_EMPIRE = GraphCase("roman_empire", 22_662, 32_927, 0.3)
MINESWEEPER = GraphCase("minesweeper", 10_000, 39_402, 0.1)
QUICK = GraphCase("quick", 60, 150, 0.5)


def edge_index(case: GraphCase, folder: Path | None = None) -> tuple[Tensor, str]:
    """Both directions of every edge, ``[2, 2 E]``, and where they come from."""
    if case != QUICK:
        path = path_of(case.name, folder)
        if path.is_file() or path.with_name(f"{case.name}_topology.npz").is_file():
            edges = torch.from_numpy(topology(case.name, folder)[0]).long().t()
            return torch.cat([edges, edges.flip(0)], dim=1), "published"
    return random_edges(case.nodes, case.edges, case.skew), "generated"


def random_edges(nodes: int, edges: int, skew: float, device: torch.device | str = "cpu") -> Tensor:
    """Both directions of random edges whose endpoints have log-normal weights, ``[2, 2 E]``."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(nodes, generator=generator, dtype=torch.float64, device=device).mul_(skew).exp_()
    place = torch.rand(2, edges, generator=generator, dtype=torch.float64, device=device)
    ends = torch.searchsorted(weight.cumsum(0) / weight.sum(), place).clamp_(max=nodes - 1)
    return torch.cat([ends, ends.flip(0)], dim=1)
