"""The members and coefficients that a PyG conv really uses: read from its own call of ``propagate``, never guessed.

A conv normalises, adds self-loops, computes attention and drops some of it, and then hands the result to
``propagate``. Reading it there gives the realised coefficients, cached ones included, at no cost. What each conv
class hands over is one line of :data:`READERS`; any other sum or mean is read in the *message view*, as the plain sum
or mean of its realised messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import aggr as pyg_aggr
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import is_sparse, to_edge_index

from nsr.graph.members import Members


@dataclass(frozen=True)
class Reader:
    """Where a conv class keeps what its aggregation multiplies the messages with.

    Attributes:
        description: The members and coefficients in words.
        weight: The argument of ``propagate`` that holds the coefficients, ``[E]`` or ``[E, H]``. ``None`` inside a
            call, or throughout for a conv that has none, means 1.
        root: The conv adds ``(1 + eps) x_v`` to its sum: one more member a node.
        attention: The conv computes its attention inside ``message`` and leaves it in ``_alpha``.
        by_message: The message view.
    """

    description: str
    weight: str | None = None
    root: bool = False
    attention: bool = False
    by_message: bool = False

    @property
    def needs_messages(self) -> bool:
        """Whether the realised messages have to be kept for the reader."""
        return self.by_message or self.attention


READERS: Mapping[type[MessagePassing], Reader] = {
    pyg.GCNConv: Reader("edges and self-loops, as normalised", weight="edge_weight"),
    pyg.SAGEConv: Reader("edges"),
    pyg.GINConv: Reader("edges, and the root with 1 + eps", root=True),
    pyg.GraphConv: Reader("edges, as weighted", weight="edge_weight"),
    pyg.GATConv: Reader("edges, attention per head", weight="alpha"),
    pyg.GATv2Conv: Reader("edges, attention per head", weight="alpha"),
    pyg.TransformerConv: Reader("edges, attention per head", attention=True),
    pyg.ARMAConv: Reader("edges, as normalised; first hop", weight="edge_weight"),
    pyg.APPNP: Reader("edges and self-loops, as normalised; first hop", weight="edge_weight"),
    pyg.TAGConv: Reader("edges, as normalised; first hop", weight="edge_weight"),
    pyg.SGConv: Reader("edges and self-loops, as normalised; first hop", weight="edge_weight"),
    pyg.ChebConv: Reader("edges and self-loops of the scaled Laplacian; first hop", weight="norm"),
    pyg.GCN2Conv: Reader("edges and self-loops, as normalised", weight="edge_weight"),
}
MESSAGE_VIEW = Reader("messages as realised", by_message=True)


def reader_for(conv: MessagePassing) -> Reader:
    """The reader of a conv.

    Raises:
        ValueError: The conv's aggregation is not linear, or cannot be read; the message says why.
    """
    name = type(conv).__name__
    reason = _obstacle(conv)
    if reason is not None:
        raise ValueError(f"{name} has no null-space residual: {reason}.")
    return _reader_of_class(type(conv))


def _reader_of_class(conv_class: type[MessagePassing]) -> Reader:
    for known, reader in READERS.items():
        # A subclass with a message of its own no longer uses the coefficients of its parent.
        if issubclass(conv_class, known) and conv_class.message is known.message:
            return reader
    return MESSAGE_VIEW


def _obstacle(conv: MessagePassing) -> str | None:
    """Why this conv cannot be read, ``None`` if it can."""
    if "propagate" in vars(conv):
        return (
            "its propagate was replaced on the instance, as decomposed_layers > 1 or an explanation does; undo it first"
        )
    if isinstance(conv, pyg.SGConv) and conv.cached:
        return "with cached=True it aggregates once and never again; use cached=False"
    if type(conv).aggregate is not MessagePassing.aggregate:
        return "it overrides aggregate(), so how it combines messages cannot be read"
    if not isinstance(conv.aggr_module, pyg_aggr.Aggregation):
        return "it has no aggregation module, so how it combines messages cannot be read"
    return _nonlinearity(conv.aggr_module)


def _nonlinearity(aggregation: pyg_aggr.Aggregation) -> str | None:
    """Why an aggregation is not a weighted sum of its members, ``None`` if it is one."""
    if isinstance(aggregation, pyg_aggr.SumAggregation | pyg_aggr.MeanAggregation):
        return None
    if isinstance(aggregation, pyg_aggr.MultiAggregation):
        return next(filter(None, map(_nonlinearity, aggregation.aggrs)), None)
    if isinstance(aggregation, pyg_aggr.DegreeScalerAggregation):  # scales each node's result by its degree
        return _nonlinearity(aggregation.aggr)
    kind = type(aggregation).__name__
    selects = (pyg_aggr.MaxAggregation, pyg_aggr.MinAggregation, pyg_aggr.MedianAggregation)
    if isinstance(aggregation, selects):
        return f"its {kind} selects a value instead of summing, and only a linear map has a null space; use sum or mean"
    return f"its {kind} is not a weighted sum of messages, and only a linear map has a null space; use sum or mean"


def is_mean(aggregation: pyg_aggr.Aggregation) -> bool:
    """Whether a linear aggregation divides by the number of members."""
    if isinstance(aggregation, pyg_aggr.DegreeScalerAggregation):
        return is_mean(aggregation.aggr)
    if isinstance(aggregation, pyg_aggr.MultiAggregation):
        return all(map(is_mean, aggregation.aggrs))
    return isinstance(aggregation, pyg_aggr.MeanAggregation)


def read(
    conv: MessagePassing,
    reader: Reader,
    edge_index: Any,
    size: Any,
    arguments: Mapping[str, Any],
    out: Tensor,
    messages: Tensor | None,
) -> Members:
    """The members of one call ``out = conv.propagate(edge_index, size=size, **arguments)``.

    Args:
        conv: The conv, still in its forward pass.
        reader: Its reader.
        edge_index: As the conv passed it on, self-loops and all; or a sparse adjacency.
        size: As the conv passed it on.
        arguments: The other arguments.
        out: The aggregate; gives the number of target nodes and the dtype.
        messages: The realised messages where the reader needs them and the call was not fused.
    """
    source, target, values = _edges(conv, edge_index)
    num_targets = out.size(conv.node_dim)
    rows = None
    if reader.by_message:
        if messages is None:
            messages = _unfused_messages(conv, edge_index, size, arguments)
        rows = messages.movedim(conv.node_dim, 0).flatten(1)  # shape: [E, M]
        source = torch.arange(rows.shape[0], device=rows.device)
    weight = _weight(conv, reader, edge_index, arguments, values, messages)
    wide = torch.promote_types(out.dtype, torch.float32)  # counts and coefficients are not for bf16
    if weight is None:
        weight = torch.ones(target.shape[0], device=target.device, dtype=wide)
    coefficient = (weight.unsqueeze(1) if weight.dim() == 1 else weight).to(wide)  # shape: [E, H]
    if is_mean(conv.aggr_module):
        count = coefficient.new_zeros(num_targets).index_add(0, target, torch.ones_like(coefficient[:, 0]))
        coefficient = coefficient / count.index_select(0, target).unsqueeze(1)
    if reader.root:
        return _with_roots(conv, arguments["x"], source, target, coefficient, num_targets)
    return Members(source, target, coefficient, num_targets, messages=rows)


def _edges(conv: MessagePassing, edge_index: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Source, target and, of a sparse adjacency, the value of each edge."""
    if is_sparse(edge_index):
        (target, source), values = to_edge_index(edge_index)
        return source, target, values
    plain = (edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index).long()
    source, target = plain if conv.flow == "source_to_target" else plain.flip(0)
    return source, target, None


def _weight(
    conv: MessagePassing,
    reader: Reader,
    edge_index: Any,
    arguments: Mapping[str, Any],
    values: Tensor | None,
    messages: Tensor | None,
) -> Tensor | None:
    """The coefficients before a mean divides them by the count, ``[E]`` or ``[E, H]``; ``None`` for 1."""
    if reader.by_message:
        return None
    if reader.attention:
        return _attention(conv, messages)
    if reader.weight is not None:
        return values if arguments[reader.weight] is None else arguments[reader.weight]
    # A product with a torch.sparse adjacency multiplies with its values; of torch_sparse's own type PyG drops them.
    return values if conv.fuse and isinstance(edge_index, Tensor) else None


def _attention(conv: MessagePassing, messages: Tensor | None) -> Tensor:
    """TransformerConv's attention as its messages were scaled with it: ``[E, H]``.

    It keeps the attention of before dropout alone. What dropout set to zero shows in the messages.
    """
    alpha = conv._alpha
    if not (conv.training and conv.dropout > 0):
        return alpha
    assert messages is not None
    return alpha * messages.detach().ne(0).any(dim=-1) / (1 - conv.dropout)


def _with_roots(
    conv: MessagePassing, x: tuple[Tensor, Tensor | None], source: Tensor, target: Tensor, t: Tensor, num_targets: int
) -> Members:
    """GIN: after the neighbours, every node is a member of its own aggregation with ``1 + eps``."""
    if x[1] is None:
        return Members(source, target, t, num_targets)
    nodes = torch.arange(num_targets, device=target.device)
    # In a bipartite graph the targets' rows stand behind the sources', see Members.source_table.
    rows = nodes if x[1] is x[0] else nodes + x[0].shape[0]
    root = (1 + conv.eps).to(t.dtype).expand(num_targets, 1)
    return Members(
        torch.cat([source, rows]), torch.cat([target, nodes]), torch.cat([t, root]), num_targets, num_roots=num_targets
    )


def _unfused_messages(conv: MessagePassing, edge_index: Any, size: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The messages of a call that was fused with its sum, one a member.

    Fused convs multiply with a matrix: their messages are the same each time they are computed.
    """
    collected = conv._collect(conv._user_args, edge_index, conv._check_input(edge_index, size), dict(arguments))
    return conv.message(**conv.inspector.collect_param_data("message", collected))
