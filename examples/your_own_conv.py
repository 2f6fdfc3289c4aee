"""A message-passing layer of your own: nothing to register, the branch reads what the layer really does.

The conv below weighs every message by a learned score of its edge and sums. No reader knows this class, so its members
are the messages as realised. A layer with a norm and a skip around a conv says so with one attribute.

    python examples/your_own_conv.py
"""

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import nsr


class ScoredConv(MessagePassing):
    """``x'_v = sum_u sigmoid(s(x_u, x_v)) * W x_u``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="sum")
        self.in_channels = in_channels  # tells nsr.attach how wide the input is; without it, pass example=
        self.linear = nn.Linear(in_channels, out_channels)
        self.score = nn.Linear(2 * in_channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.score(torch.cat([x_i, x_j], dim=-1)).sigmoid() * self.linear(x_j)


class Layer(nn.Module):
    """Norm, activation and skip around the conv: the branch adds to what this layer returns."""

    message_passing = "conv"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), ScoredConv(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.conv(self.norm(x), edge_index).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ScoredConv(8, 16), Layer(16)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index), edge_index)


torch.manual_seed(0)
x, edge_index = torch.randn(100, 8), torch.randint(0, 100, (2, 600))
model = Model()
before = model(x, edge_index)

members = nsr.graph.coefficients(model.first, x, edge_index)
print(f"{len(members.source)} members at {members.num_targets} nodes; messages {tuple(members.messages.shape)}")
lost = members.residual(members.messages)
print(f"share of the messages that the sum makes invisible: {lost.norm() / members.messages.norm():.0%}")
print(f"and what the sum sees of it: {members.aggregate(lost).abs().max():.1e}")

print(nsr.attach(model))
print("unchanged until trained:", torch.equal(model(x, edge_index), before))
