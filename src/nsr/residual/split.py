"""The decomposition itself."""

from torch import Tensor

from nsr.operators import LinearOperator


def split(op: LinearOperator, x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Split ``x`` into what ``op`` keeps and what it makes invisible.

    .. math:: x = U A x + (I - U A) x, \qquad A (I - U A) x = 0.

    Returns:
        ``(kept, lost)``, both of the shape of ``x``, with ``kept + lost == x`` and ``op.apply(lost) == 0``.

    Example:
        >>> import torch, nsr
        >>> pool = nsr.Segment(torch.tensor([0, 0]), torch.tensor([0.5, 0.5]), 1)
        >>> kept, lost = nsr.split(pool, torch.tensor([[1.0], [3.0]]))
        >>> kept.tolist(), lost.tolist()
        ([[2.0], [2.0]], [[-1.0], [1.0]])
    """
    lost = op.residual(x)
    return x - lost, lost
