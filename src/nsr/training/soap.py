"""Adam in the eigenbasis of each matrix's gradients (SOAP, Vyas et al., arXiv:2409.11321), for replicas.

For a block ``W`` of a matrix with gradient ``G``, with ``EMA`` an exponential moving average::

    L = EMA(G Gᵀ),  R = EMA(Gᵀ G)          Q_L, Q_R: their eigenvectors, renewed every few steps
    M = EMA(G),     V = EMA((Q_Lᵀ G Q_R)²)
    W ← W − rate · Q_L [ (Q_Lᵀ M Q_R) / √V ] Q_Rᵀ

Adam scales each weight by itself, so directions in which a loss is flat are crossed slowly wherever they mix weights.
In the eigenbasis they are coordinates. At the widths of a small model the products are nearly free.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsr.training.replicas import Replicas

RENEW_EVERY = 10
_DECAY = 0.95  # of all averages
_EPS = 1e-8


class Soap:
    """The optimizer of some matrices of :class:`Replicas`; all their other weights follow Adam.

    A matrix that is several times as wide as it is high is so many square blocks: the gate's ``[Ws | Wd | Wz]`` has a
    basis for what it reads from each of the three.

    Args:
        replicas: The models.
        prefix: The matrices are those whose names begin with it.
    """

    def __init__(self, replicas: Replicas, prefix: str) -> None:
        self.replicas = replicas
        shapes: dict[torch.Size, list[Tensor]] = {}
        for name, values in replicas.parameters.items():
            if name.startswith(prefix) and values.dim() == 3:
                for block in _blocks(_places(values)):
                    shapes.setdefault(block.shape, []).append(block)
        if not shapes:
            raise ValueError(f"No matrix has a name that begins with {prefix!r}; got {list(replicas.parameters)}.")
        self.alike = [_Alike(torch.stack(blocks), replicas) for blocks in shapes.values()]

    @torch.no_grad()
    def step(self, rate: Tensor, number: int) -> None:
        """One step along the gradients of :meth:`Replicas.backward`.

        Args:
            rate: Learning rate of each replica, ``[R]``; 0 leaves a replica as it is.
            number: Of the step, counted from 0.
        """
        before = [alike.read(self.replicas.rows) for alike in self.alike]
        self.replicas.adam(rate)
        seen = 1 - _DECAY ** (number + 1)  # what the averages lack at first
        for alike, weights in zip(self.alike, before, strict=True):
            gradient = alike.read(self.replicas.gradient)
            alike.average(gradient)
            if number % RENEW_EVERY == 0:
                alike.renew(first=number == 0)
            alike.write(self.replicas.rows, weights - rate.view(-1, 1, 1, 1) * alike.update(gradient, seen))

    def state(self) -> dict[str, Tensor]:
        """Everything that a step changes, beside the state of the replicas."""
        return {f"{n}.{name}": tensor for n, alike in enumerate(self.alike) for name, tensor in alike.state().items()}


class _Alike:
    """Blocks of one shape ``[H, W]`` of all replicas: everything is ``[R, K, ...]``.

    Args:
        places: Where the blocks stand in a row of the replicas, ``[K, H, W]``.
        replicas: The models.
    """

    def __init__(self, places: Tensor, replicas: Replicas) -> None:
        self.shape = (replicas.count, *places.shape)
        self.places = places.flatten().to(replicas.rows.device)
        count, blocks, height, width = self.shape
        zeros = replicas.rows.new_zeros
        self.left, self.right = zeros(count, blocks, height, height), zeros(count, blocks, width, width)
        self.left_basis, self.right_basis = torch.zeros_like(self.left), torch.zeros_like(self.right)
        self.first, self.second = zeros(self.shape), zeros(self.shape)

    def read(self, rows: Tensor) -> Tensor:
        return rows.index_select(1, self.places).view(self.shape)

    def write(self, rows: Tensor, values: Tensor) -> None:
        rows.index_copy_(1, self.places, values.flatten(1))

    def average(self, gradient: Tensor) -> None:
        self.left.lerp_(gradient @ gradient.mT, 1 - _DECAY)
        self.right.lerp_(gradient.mT @ gradient, 1 - _DECAY)
        self.first.lerp_(gradient, 1 - _DECAY)

    def update(self, gradient: Tensor, seen: float) -> Tensor:
        """What to subtract, at a rate of 1."""
        turned = self.left_basis.mT @ gradient @ self.right_basis
        self.second.mul_(_DECAY).addcmul_(turned, turned, value=1 - _DECAY)
        size = (self.second / seen).sqrt_().add_(_EPS)
        moved = self.left_basis.mT @ (self.first / seen) @ self.right_basis
        return self.left_basis @ (moved / size) @ self.right_basis.mT

    def renew(self, first: bool) -> None:
        for covariance, basis, axis in ((self.left, self.left_basis, 2), (self.right, self.right_basis, 3)):
            if first:
                basis.copy_(torch.linalg.eigh(covariance)[1].flip(-1))
                continue
            # steepest direction first: QR keeps the first columns best
            order = (basis.mT @ covariance @ basis).diagonal(dim1=2, dim2=3).argsort(-1, descending=True)
            sorted_basis = basis.gather(3, order.unsqueeze(2).expand_as(basis))
            basis.copy_(torch.linalg.qr(covariance @ sorted_basis)[0])
            self.second.copy_(self.second.gather(axis, order.unsqueeze(5 - axis).expand_as(self.second)))

    def state(self) -> dict[str, Tensor]:
        names = ("left", "right", "left_basis", "right_basis", "first", "second")
        return {name: getattr(self, name) for name in names}


def _places(values: Tensor) -> Tensor:
    """Where a parameter ``[R, H, W]`` stands in a row, ``[H, W]``."""
    first = int(values.storage_offset())
    return torch.arange(first, first + values[0].numel()).view(values.shape[1:])


def _blocks(places: Tensor) -> Sequence[Tensor]:
    height, width = places.shape
    return places.split(height, 1) if width % height == 0 else [places]
