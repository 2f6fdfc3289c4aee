"""The graph branch: what a neighbourhood aggregation makes invisible, gated and given back.

::

    h_src ── W ──> m ──┐                        members i of node v, coefficients t of the host's own aggregation
                       ├─ z_i = m_i - t_i u ──┬─────────────────────────(⊙)── K^-1/2 Σ_i ── LayerNorm ── Dropout ─┐
    u = Σ t m / Σ t² ──┘                      │                          │                                        │
                                  [h_src ; h_dst ; z] ── W1 ── GELU ── W2 ── σ = g                                │
    h_next = host's update + Δ <──────────────────────────────────────────────── Δ ── Linear ── GELU ── Linear <──┘

``W1 = [Ws | Wd | Wz]`` is never applied to a member: ``W1 [h_s ; h_v ; z] + b1 = a_s + b_v - t c_v`` with
``a = (Ws + Wz W) h``, ``b = Wd h + b1`` and ``c = Wz u``, all of them per node. What remains per member is one
operator, :func:`nsr.kernels.gated_residual_sum`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.graph.members import Members
from nsr.kernels import gated_residual_sum, segment_sum
from nsr.residual.branch import Branch

Source = Literal["residual", "raw", "aggregate"]
Init = Literal["identity", "paper"]


class GraphResidual(Branch):
    r"""The null-space branch of one message-passing layer.

    .. math::
        z_i &= m_i - t_i\, \frac{\sum_j t_j m_j}{\sum_j t_j^2}, \qquad m_i = W h_{s(i)}, \\
        g_i &= \sigma\big(W_2\, \mathrm{GELU}(W_1 [h_{s(i)} ; h_v ; z_i] + b_1) + b_2\big), \\
        \Delta_v &= \mathrm{Out}\Big(\mathrm{Dropout}\big(\mathrm{LayerNorm}(K_v^{-1/2} \textstyle\sum_i
        g_i \odot z_i)\big)\Big).

    With several heads each has its own coefficients and its own share of the channels of ``m``. A node without members,
    or with one, has a zero sum and receives the constant ``Out(LayerNorm(0))``. Residual, product and sum are fp32
    under autocast too: the residuals of a node nearly cancel in the sum, and LayerNorm amplifies what is left.

    Args:
        in_source: Width of the source table.
        in_target: Width of the target table; 0 where the target nodes have no features.
        width: ``D``, the width of messages, residuals and gates.
        out: Width of the update.
        heads: ``H``, a divisor of ``width``.
        source: What is gated and summed. ``"residual"`` is the method. Two controls have the same parameters:
            ``"raw"`` takes the message ``m`` itself in place of ``z``, in the gate too; ``"aggregate"`` sees nothing
            but the aggregate ``y = Σ t h`` of the node (its positive and its negative part in place of the source and
            the target, so that no block of ``W1`` is idle, and ``Σ t m`` in place of ``z``).
        dropout: Before the output network.
        init: ``"identity"`` starts the last layer at zero, so that the branch changes nothing until it is trained;
            ``"paper"`` starts it like any other layer.
        fused: Take the fused kernels where they can run, see :func:`nsr.kernels.path_for`; ``False`` takes the plain
            path everywhere.

    Shapes:
        ``source``: ``[S, in_source]``; ``target``: ``[T, in_target]``; the update: ``[T, out]``. With all widths
        equal to ``d`` there are ``7 d² + 6 d`` parameters.
    """

    def __init__(
        self,
        in_source: int,
        in_target: int,
        width: int,
        out: int,
        heads: int = 1,
        source: Source = "residual",
        dropout: float = 0.0,
        init: Init = "identity",
        fused: bool = True,
    ) -> None:
        if min(in_source, width, out, heads) < 1 or in_target < 0:
            raise ValueError(
                f"in_source, width, out and heads must be at least 1 and in_target at least 0, got "
                f"in_source={in_source}, in_target={in_target}, width={width}, out={out}, heads={heads}."
            )
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}: each head has its share of channels.")
        if source not in get_args(Source):
            raise ValueError(f"source is {source!r}; expected one of {get_args(Source)}.")
        if init not in get_args(Init):
            raise ValueError(f"init is {init!r}; expected one of {get_args(Init)}.")
        super().__init__(
            in_source=in_source,
            in_target=in_target,
            width=width,
            out=out,
            heads=heads,
            source=source,
            dropout=dropout,
        )
        self.heads, self.source, self.init, self.fused = heads, source, init, fused
        self.gate_split = (in_source, in_source if source == "aggregate" else in_target, width)
        self.message = nn.Linear(in_source, width, bias=False)
        self.gate_hidden = nn.Linear(sum(self.gate_split), width)
        self.gate_output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))
        self._start()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, as on construction."""
        for layer in (self.message, self.gate_hidden, self.gate_output, self.norm, self.output[0], self.output[2]):
            layer.reset_parameters()  # type: ignore[operator]
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """What differs from the layers' own initialisation: gates nearly shut, and perhaps no update at all."""
        self.gate_output.bias.fill_(-2.0)
        if self.init == "identity":
            self.output[2].weight.zero_()  # type: ignore[operator]
            self.output[2].bias.zero_()  # type: ignore[operator]

    def forward(self, members: Members, source: Tensor, target: Tensor | None) -> Tensor:
        """The update to add to the host layer's output.

        Args:
            members: Of this layer's aggregation.
            source: Source table that ``members.source`` indexes, ``[S, in_source]``.
            target: Target table, ``[T, in_target]``; ``None``, where the target nodes have no features, stands for 0.
        """
        if members.heads != self.heads:
            raise ValueError(f"The members have {members.heads} heads, the branch was made for {self.heads}.")
        fused = None if self.fused else False
        w_source, w_target, w_residual = self.gate_hidden.weight.split(self.gate_split, dim=1)
        if target is None:
            target = source.new_zeros(members.num_targets, w_target.shape[1])
        if self.source == "aggregate":
            members, message, source, target = _aggregated(members, self.message(source), source)
            source_gate = F.linear(source, w_source) + F.linear(message, w_residual)
            target_gate = F.linear(target, w_target, self.gate_hidden.bias)
        else:
            message, source_gate, target_gate = self._tables(source, target)

        if self.source == "residual":
            coefficient = members.unit_coefficient(fused=fused)
            mean = segment_sum(message, members.source, members.target, coefficient, members.num_targets, fused=fused)
        else:  # nothing is projected away
            coefficient = torch.zeros_like(members.coefficient)
            mean = message.new_zeros(members.num_targets, message.shape[1])
        mean_by_head = mean.to(w_residual.dtype).unflatten(1, (self.heads, -1))  # shape: [T, H, D / H]
        mean_gate = torch.einsum("thc,dhc->thd", mean_by_head, w_residual.unflatten(1, (self.heads, -1)))

        gated = gated_residual_sum(
            message,
            source_gate,
            target_gate,
            mean,
            mean_gate,
            self.gate_output.weight,
            self.gate_output.bias,
            members.source,
            members.target,
            coefficient,
            fused=fused,
        )
        return self.output(self.dropout(self.norm(gated.to(self.norm.weight.dtype))))

    def _tables(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """``m``, ``a`` and ``b`` of the gated sum, ``[S, D]``, ``[S, D]`` and ``[T, D]``.

        What has the same input is one product: the tables are then columns of its result.
        """
        w_source, w_target, w_residual = self.gate_hidden.weight.split(self.gate_split, dim=1)
        bias, width = self.gate_hidden.bias, self.gate_hidden.out_features
        with torch.autocast(source.device.type, enabled=False):  # weights are folded at full precision
            w_member = torch.addmm(w_source, w_residual, self.message.weight)
        weights = [self.message.weight, w_member]
        if target is source:
            joined = F.linear(source, torch.cat([*weights, w_target]), F.pad(bias, (2 * width, 0)))
            return joined.split(width, dim=1)
        message, source_gate = F.linear(source, torch.cat(weights)).split(width, dim=1)
        return message, source_gate, F.linear(target, w_target, bias)


def _aggregated(members: Members, message: Tensor, source: Tensor) -> tuple[Members, Tensor, Tensor, Tensor]:
    """The post-aggregation control: every node has one member, and that is its own aggregate."""
    mean = Members(members.source, members.target, members.coefficient.mean(1, keepdim=True), members.num_targets)
    aggregate = mean.aggregate(source).to(source.dtype)
    nodes = torch.arange(members.num_targets, device=source.device)
    alone = Members(nodes, nodes, members.coefficient.new_ones(members.num_targets, members.heads), members.num_targets)
    return alone, members.aggregate(message).to(message.dtype), F.relu(aggregate), F.relu(-aggregate)
