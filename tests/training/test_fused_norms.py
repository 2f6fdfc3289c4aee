"""Norms fused with what follows them are the plain operators: outputs, gradients, statistics; names stay."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nsr.experiments.graph_models import graph_model
from nsr.graph.models import Backbone
from nsr.training.fused_norms import FinishedBatchNorm, FinishedLayerNorm, fuse_norms
from nsr.training.noise import seed_dropout

PROGRAM = Path(__file__).with_name("norms_compared.py")


def errors(device: str) -> dict[str, float]:
    environment = os.environ | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if device == "cpu" else {})
    run = subprocess.run(
        [sys.executable, str(PROGRAM), device], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equal_to_plain_operators(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    found = errors(device)
    assert len(found) == 4
    assert {case: value for case, value in found.items() if value > 2e-5} == {}


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_a_fused_model_is_the_same_model(backbone: Backbone) -> None:
    def model() -> nn.Module:
        made = graph_model(
            backbone, "nsr", lambda w: nn.Linear(5, w), seed=3, width=16, outputs=2, layers=2, dropout=0.5
        )
        return seed_dropout(made, 7)

    plain, fused = model(), fuse_norms(model())
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in plain.named_parameters()]
    norms = [m for m in fused.modules() if isinstance(m, FinishedLayerNorm | FinishedBatchNorm)]
    assert len(norms) == (6 if backbone == "gin" else 4)
    x, edge_index = torch.randn(30, 5), torch.randint(30, (2, 90))
    for step in range(2):
        ours, theirs = fused(x, edge_index), plain(x, edge_index)
        torch.testing.assert_close(ours, theirs, msg=f"step {step}")
        for module in (plain, fused):
            module.zero_grad()
        ours.square().sum().backward()
        theirs.square().sum().backward()
        for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    torch.testing.assert_close(fused.eval()(x, edge_index), plain.eval()(x, edge_index))
