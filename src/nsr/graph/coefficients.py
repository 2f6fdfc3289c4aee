"""The public door to the members and coefficients of any conv."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import is_torch_sparse_tensor

from nsr.graph.members import Members
from nsr.graph.readers import reader_for
from nsr.graph.recording import restore, run_to_aggregation


def coefficients(
    conv: MessagePassing,
    x: Tensor | tuple[Tensor, Tensor | None],
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    **arguments: Any,
) -> Members:
    """The members and coefficients with which ``conv`` aggregates this input.

    The conv itself is asked: it runs up to its aggregation, on a shallow copy, so no cache is filled and no running
    statistic moves. ``Members.aggregate`` of what the conv's aggregation sums (the linearly transformed features for
    GCN, the input for SAGE and GIN, ...) is the conv's own aggregate.

    Args:
        conv: Any PyG message-passing layer with a sum or mean aggregation.
        x: Node features, or those of source and target nodes.
        edge_index: ``[2, E]``, or a sparse (transposed) adjacency matrix.
        edge_weight: Passed to the conv as ``edge_weight``, or as ``edge_attr`` where it calls its weights so.
        arguments: Whatever else the conv's ``forward`` takes.

    Raises:
        ValueError: The aggregation is not linear (max, median, LSTM, ...), or the input does not fit the conv.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import SAGEConv
        >>> from nsr.graph import coefficients
        >>> members = coefficients(SAGEConv(4, 4), torch.randn(3, 4), torch.tensor([[0, 1, 2], [2, 2, 0]]))
        >>> members.source.tolist(), members.target.tolist(), members.coefficient.flatten().tolist()
        ([0, 1, 2], [2, 2, 0], [0.5, 0.5, 1.0])
    """
    check_edge_index(edge_index)
    twin = copy.copy(conv)
    restore(twin)
    parameters = inspect.signature(twin.forward).parameters
    if edge_weight is not None:
        name = next((name for name in ("edge_weight", "edge_attr") if name in parameters), None)
        if name is None:
            raise ValueError(f"{type(conv).__name__} takes no edge weights; leave edge_weight out.")
        arguments[name] = edge_weight
    if "x_0" in parameters:
        arguments.setdefault("x_0", x)  # GCN2Conv: the initial features play no part in the members
    return run_to_aggregation(twin, reader_for(twin), x, edge_index=edge_index, **arguments)


def check_edge_index(edge_index: Any) -> None:
    """Refuse what PyG would fail on far from the cause."""
    if not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index):
        return
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise ValueError(f"edge_index is {edge_index.dtype}; expected integers [2, E]. Convert it with .long().")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}; expected [2, E].")
