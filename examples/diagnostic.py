"""Where does a graph network need what aggregation hides? Score the nodes, train with and without NSR, compare.

The data: Minesweeper, generated. The score of a node is the share of its neighbours' label energy that lies in the null
space of its aggregations; the gain of the null-space residual is then shown by score.

    python examples/diagnostic.py
"""

import torch
from torch.nn import functional as F
from torch_geometric.nn import GraphSAGE

import nsr
from nsr.data.minesweeper import minesweeper
from nsr.graph import accuracy_by_score, coefficients, null_space_scores

torch.manual_seed(0)
board = minesweeper(side=50, splits=1)
x, labels = torch.from_numpy(board.features), torch.from_numpy(board.labels)
edge_index = torch.from_numpy(board.edge_index())
train, test = torch.from_numpy(board.train_masks[0]), torch.from_numpy(board.test_masks[0])


def trained(with_nsr: bool, epochs: int = 200) -> torch.nn.Module:
    """A two-layer GraphSAGE, from the same start either way."""
    torch.manual_seed(1)
    model = GraphSAGE(in_channels=7, hidden_channels=32, num_layers=2, out_channels=2)
    if with_nsr:
        nsr.attach(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edge_index)[train], labels[train], torch.tensor([1.0, 4.0])).backward()
        optimizer.step()
    return model.eval()


# Which members does the first layer aggregate, and with which weights? They are read from the layer itself.
members = coefficients(trained(False, epochs=0).convs[0], x, edge_index)
scores = null_space_scores(
    members.source, members.target, members.coefficient.squeeze(1), labels, len(labels), layers=2
)
print(f"mean score {scores.mean():.3f}: so much of the neighbours' labels is invisible to the mean over them")

models = [trained(with_nsr) for with_nsr in (False, True)]
right = [(model(x, edge_index).argmax(1) == labels)[test] for model in models]
table = accuracy_by_score(scores[test], *right, bins=4)

print("\nscore   nodes   GraphSAGE   with NSR    gain")
for bin_ in zip(table.score, table.count, table.original, table.nsr, table.gain, strict=True):
    score, count, original, with_nsr, gain = (value.item() for value in bin_)
    print(f"{score:5.3f}   {count:5d}   {100 * original:7.1f} %   {100 * with_nsr:6.1f} %   {100 * gain:+5.1f}")
