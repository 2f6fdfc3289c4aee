"""The whole method for any operator, by hand.

::

    x [N, D] ──────────────────────────── A ──────────────> y = A x ────────────── (+) ──> y + Δ
      │                                                      │                      │
      │   Z = (I - U A) x        what A makes invisible      │ U y                  │
      ├──────────> z ── RMSNorm ── u ──┬── W_enc u ───┐      │                      │
      │                                │              (⊙)── c ── A ── W_dec ── Δ ───┘
      └────────────────────────────> [u ; x ; U y]    │       member codes, reaggregated
                                       └── gate ──────┘       by the same A

Without the gate, ``Δ`` would vanish identically: a code that is linear in ``z`` and shared by all members is
``Z B``, and ``A (Z B) = (A Z) B = 0``. The gate weighs members differently, which breaks the cancellation;
so does the norm, being no linear map. ``tests/residual/test_null_space.py`` holds both statements.
"""

import torch
from torch import Tensor, nn

from nsr.operators import LinearOperator
from nsr.residual.branch import Branch


class NullSpaceResidual(Branch):
    r"""Encode and gate what an operator loses, and give back what the task finds useful.

    .. math::
        c_i = \sigma\big(W_2\,\mathrm{GELU}(W_1 [u_i ; x_i ; (U y)_i])\big) \odot W_{enc} u_i,
        \qquad u_i = \mathrm{RMSNorm}(z_i), \qquad \Delta = W_{dec}\, A c.

    ``y = op.apply(x) + branch(op, x)`` is the whole method. The decoder starts at zero, so an untrained branch changes
    nothing. A member without a residual, such as the only one of its group, has code 0.

    Args:
        dim: Features ``D`` of ``x``.
        code: Width ``R`` of the member codes.
        hidden: Width of the gate's hidden layer.

    Shapes:
        ``x``: as ``op.apply`` takes it, with ``D`` on ``op.feature_axis``; the result is that of ``op.apply(x)``.

    Example:
        >>> import torch, nsr
        >>> pool = nsr.Segment(torch.tensor([0, 0, 1]), torch.tensor([0.5, 0.5, 1.0]), 2)
        >>> branch = nsr.NullSpaceResidual(dim=8)
        >>> x = torch.randn(3, 8)
        >>> bool((pool.apply(x) + branch(pool, x) == pool.apply(x)).all())
        True
    """

    def __init__(self, dim: int, code: int = 64, hidden: int = 32) -> None:
        if min(dim, code, hidden) < 1:
            raise ValueError(f"dim, code and hidden must be at least 1, got dim={dim}, code={code}, hidden={hidden}.")
        super().__init__(dim=dim, code=code, hidden=hidden)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.encoder = nn.Linear(dim, code, bias=False)
        self.gate = nn.Sequential(nn.Linear(3 * dim, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Linear(code, dim, bias=False)
        nn.init.zeros_(self.decoder.weight)

    def forward(self, op: LinearOperator, x: Tensor) -> Tensor:
        """The update to add to ``op.apply(x)``."""
        axis = op.feature_axis
        if x.dim() < -axis or x.shape[axis] != self.encoder.in_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; expected {self.encoder.in_features} features on axis {axis}, "
                f"the feature axis of {type(op).__name__}."
            )
        y = op.apply(x)
        if not self.enabled:
            return torch.zeros_like(y)
        z = op.residual(x)
        codes = self.codes(z.movedim(axis, -1), x.movedim(axis, -1), op.lift(y).movedim(axis, -1))
        return self.decoder(op.apply(codes.movedim(-1, axis)).movedim(axis, -1)).movedim(-1, axis)

    def codes(self, z: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """Member codes from residuals, members and their lifted groups, features last: ``[..., D] -> [..., R]``."""
        # A member without a residual has code 0. It is masked before the norm, whose slope there is 1/sqrt(eps), and
        # by its size relative to x, because the norm would blow rounding up to a full-sized signal.
        noise = 8 * torch.finfo(z.dtype).eps
        energy, scale = (_energy(rows) for rows in (z, x))
        present = energy > noise**2 * scale
        u = self.norm(torch.where(present, z, 1.0)) * present
        gate = torch.sigmoid(self.gate(torch.cat([u, x, context], dim=-1)))
        return gate * self.encoder(u)


def _energy(rows: Tensor) -> Tensor:
    """``|row|^2``, ``[..., 1]``, in at least fp32: in fp16 a row of length 256 has none that is finite."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(-1, keepdim=True)
