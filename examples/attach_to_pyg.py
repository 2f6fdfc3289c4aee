"""Attach null-space residuals to a PyG model, train them, switch them off, save them, take them off again.

The task: every node asks one of its neighbours, by key, for its value. A mean over neighbours mixes the keys and values
of all of them, so a GraphSAGE cannot tell which value belongs to which key; the residual of each neighbour still can.

    python examples/attach_to_pyg.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GraphSAGE

import nsr

KEYS = VALUES = 6


def ask_a_neighbour(questions: int, neighbours: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Node inputs, edges and the answers: nodes ``0 .. questions - 1`` ask, the others hold a key and a value."""
    keys = torch.rand(questions, KEYS).argsort(1)[:, :neighbours]  # shape: [Q, K], no key twice
    values = torch.randint(0, VALUES, (questions, neighbours))
    asked = torch.randint(0, neighbours, (questions, 1))
    query = F.one_hot(keys.gather(1, asked).squeeze(1), KEYS)
    held = torch.cat([F.one_hot(keys, KEYS), F.one_hot(values, VALUES)], dim=2).flatten(0, 1)
    x = torch.cat([F.pad(query, (0, VALUES)), held]).float()  # shape: [Q + QK, KEYS + VALUES]
    source = torch.arange(questions, questions * (1 + neighbours))
    target = torch.arange(questions).repeat_interleave(neighbours)
    return x, torch.stack([source, target]), values.gather(1, asked).squeeze(1)


def accuracy(model: torch.nn.Module, questions: int = 1000) -> float:
    x, edge_index, answer = ask_a_neighbour(questions)
    with torch.no_grad():
        return (model(x, edge_index)[:questions].argmax(1) == answer).float().mean().item()


def train(model: torch.nn.Module, steps: int = 200) -> None:
    optimiser = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    for _ in range(steps):
        x, edge_index, answer = ask_a_neighbour(256)
        optimiser.zero_grad()
        F.cross_entropy(model(x, edge_index)[:256], answer).backward()
        optimiser.step()


torch.manual_seed(0)
model = GraphSAGE(KEYS + VALUES, hidden_channels=32, num_layers=1, out_channels=VALUES)
train(model)
print(f"GraphSAGE alone         {accuracy(model):6.1%}")

model.requires_grad_(False)  # only the branches learn from here on
print(nsr.attach(model, width=64))
train(model)
print(f"with its null space     {accuracy(model):6.1%}")
with nsr.disabled(model):
    print(f"branches switched off   {accuracy(model):6.1%}")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "branch.safetensors"
    nsr.save(model, file)  # the branches alone
    nsr.detach(model)
    print(f"detached                {accuracy(model):6.1%}")
    nsr.attach(model, width=64)
    nsr.load(model, file)
    print(f"loaded again            {accuracy(model):6.1%}")
