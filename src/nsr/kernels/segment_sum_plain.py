"""The weighted sum over members in plain PyTorch, chunked over members."""

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}


def forward(messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int) -> Tensor:
    """``sum_i t_i m_i`` as ``[R, T, D]``."""
    replicas, _, width = messages.shape
    heads = coefficient.shape[1]
    out = messages.new_zeros(replicas, num_targets, width)
    for r in range(replicas):
        table = messages[r].contiguous()  # a CPU gathers rows out of a wider table more slowly
        for members in _slices(messages, source):
            rows = table.index_select(0, source[members]).unflatten(1, (heads, width // heads))
            out[r].index_add_(0, target[members], rows.mul_(coefficient[members].unsqueeze(2)).flatten(1))
    return out


def backward(
    grad: Tensor, messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, needs_coefficient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``messages`` and, where asked for, of ``coefficient``."""
    replicas, _, width = messages.shape
    heads = coefficient.shape[1]
    d_messages = grad.new_zeros(messages.shape)
    d_coefficient = torch.zeros_like(coefficient) if needs_coefficient else None
    for r in range(replicas):
        for members in _slices(messages, source):
            s = source[members]
            rows = grad[r].index_select(0, target[members]).unflatten(1, (heads, width // heads))
            if d_coefficient is not None:
                d_coefficient[members].add_((messages[r].index_select(0, s).view_as(rows) * rows).sum(2))
            d_messages[r].index_add_(0, s, rows.mul_(coefficient[members].unsqueeze(2)).flatten(1))
    return d_messages, d_coefficient


def _slices(messages: Tensor, source: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS.get(messages.device.type, 1 << 19) // messages.shape[-1])
    return [slice(start, start + size) for start in range(0, source.shape[0], size)]
