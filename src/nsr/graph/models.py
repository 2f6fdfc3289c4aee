"""The paper's backbones: GCN, GraphSAGE and GIN stacks. They know nothing of null spaces.

::

    x ── encoder ── h ──[ h + update(conv(h)) ] × layers ── readout ── head ── logits

    GCN, SAGE   h + Dropout(GELU(LayerNorm(conv h)))
    GIN         h + Dropout(conv h),  conv = MLP of two Linear-BatchNorm-ReLU stages over the sum and the root
"""

from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GCNConv, GINConv, MessagePassing, SAGEConv

Backbone = Literal["gcn", "sage", "gin"]
Readout = Literal["node", "root", "graph"]


class GraphLayer(nn.Module):
    """A conv with what surrounds it: ``h + Dropout(update(conv(h)))``.

    Args:
        conv: Message passing at the width of ``h``.
        update: What follows the conv.
        dropout: Of the update.

    Attributes:
        message_passing: The name of the child that aggregates. A tool that adds to the update of a layer, as
            :func:`nsr.attach` does, finds in it that this layer, and not the conv inside, is what to add to.
    """

    message_passing: ClassVar[str] = "conv"

    def __init__(self, conv: MessagePassing, update: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = conv
        self.update = update
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        """``[N, D] -> [N, D]``."""
        return h + self.dropout(self.update(self.conv(h, edge_index)))


class GraphModel(nn.Module):
    """Encoder, message-passing layers, readout and linear head.

    Args:
        backbone: ``"gcn"``, ``"sage"`` (mean) or ``"gin"`` (sum, ``eps = 0`` fixed).
        encoder: Maps node inputs to ``[N, width]``: a Linear for features, an Embedding for types.
        width: ``D``.
        outputs: Classes or regression targets.
        layers: Number of message-passing layers.
        dropout: In every layer.
        readout: ``"node"`` scores every node, ``"root"`` the nodes named in the call, ``"graph"`` the mean of each
            graph's nodes.
    """

    def __init__(
        self,
        backbone: Backbone,
        encoder: nn.Module,
        width: int,
        outputs: int,
        layers: int,
        dropout: float = 0.0,
        readout: Readout = "node",
    ) -> None:
        super().__init__()
        if readout not in get_args(Readout):
            raise ValueError(f"readout is {readout!r}; expected one of {get_args(Readout)}.")
        self.readout = readout
        self.encoder = encoder
        self.layers = nn.ModuleList(graph_layer(backbone, width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, outputs)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        root: Tensor | None = None,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Tensor:
        """Logits of the nodes, roots or graphs.

        Args:
            x: Node inputs, as the encoder takes them.
            edge_index: ``[2, E]``.
            root: For ``readout="root"``, the node to score in each graph, ``[G]``.
            batch: For ``readout="graph"``, the graph of each node, ``[N]``.
            num_graphs: For ``readout="graph"``, ``G``.
        """
        h = self.encoder(x)  # shape: [N, D]
        for layer in self.layers:
            h = layer(h, edge_index)
        if self.readout == "root":
            if root is None:
                raise ValueError("readout='root' needs root, the index of the node to score in each graph.")
            h = h.index_select(0, root)
        elif self.readout == "graph":
            if batch is None or num_graphs is None:
                raise ValueError("readout='graph' needs batch, the graph of each node, and num_graphs.")
            h = mean_pool(h, batch, num_graphs)
        return self.head(h)


def graph_layer(backbone: Backbone, width: int, dropout: float = 0.0) -> GraphLayer:
    """One layer of the paper at width ``D``, see the top of this file."""
    if backbone == "gcn":
        return GraphLayer(GCNConv(width, width), nn.Sequential(nn.LayerNorm(width), nn.GELU()), dropout)
    if backbone == "sage":
        return GraphLayer(SAGEConv(width, width), nn.Sequential(nn.LayerNorm(width), nn.GELU()), dropout)
    if backbone == "gin":
        stages = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(2)]
        return GraphLayer(GINConv(nn.Sequential(*stages[0], *stages[1])), nn.Identity(), dropout)
    raise ValueError(f"backbone is {backbone!r}; expected one of {get_args(Backbone)}.")


def mean_pool(h: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
    """The mean of each graph's nodes, ``[N, D] -> [G, D]``; 0 for a graph without nodes."""
    total = h.new_zeros(num_graphs, h.shape[1]).index_add(0, batch, h)
    count = h.new_zeros(num_graphs).index_add(0, batch, h.new_ones(h.shape[0]))
    return total / count.clamp(min=1).unsqueeze(1)


def matched_width(build: Callable[[int], nn.Module], parameters: int, multiple: int = 1) -> int:
    """The width at which a plain model comes closest to a number of parameters.

    A branch makes a model several times larger, so its gain is honest only beside a baseline of the same size.

    Args:
        build: Makes the model of a given width; it grows with the width.
        parameters: How many it should have.
        multiple: Widths tried are multiples of it.
    """

    def size(step: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(step * multiple).parameters())

    high = 1
    while size(high) < parameters:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < parameters else (low, middle)
    return multiple * min((low, high), key=lambda step: abs(size(step) - parameters))
