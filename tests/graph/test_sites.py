"""The table of sites says which implementation each branch takes, and why."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv

import nsr
from nsr.kernels import gated_sum, member_library


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_library, "load_library", lambda source: None)


def model(*widths: int) -> nn.Module:
    return nn.ModuleDict({f"layer{i}": GCNConv(width, width) for i, width in enumerate(widths)})


@pytest.mark.usefixtures("without_a_compiler")
def test_one_path_is_said_once() -> None:
    table = nsr.attach(model(32, 32))
    assert table.paths == ("plain: no C++ compiler that takes the kernels of a CPU",)
    assert str(table).splitlines()[-1] == table.paths[0]


@pytest.mark.usefixtures("without_a_compiler")
def test_several_paths_are_said_by_site() -> None:
    lines = str(nsr.sites(model(32, 24, 32))).splitlines()
    assert lines[-2] == "layer0, layer2: plain: no C++ compiler that takes the kernels of a CPU"
    assert lines[-1] == "layer1: plain: width 24, and the fused kernels of a CPU take multiples of 16 channels a head"


def test_the_path_is_that_of_the_weights_as_they_are_now() -> None:
    net = model(32)
    nsr.attach(net)
    assert "float64" not in nsr.sites(net)[0].path
    assert "float64" in nsr.sites(net.double())[0].path


@pytest.mark.parametrize("fused", [True, False])
def test_off_by_one_argument(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = model(16)
    path = nsr.attach(net, init="paper", fused=fused)[0].path
    assert (path == "plain: asked for by fused=False") is not fused
    asked = []
    choose = gated_sum.choose
    monkeypatch.setattr(gated_sum, "choose", lambda *a, **kw: asked.append(kw["fused"]) or choose(*a, **kw))
    net["layer0"](torch.randn(5, 16), torch.randint(5, (2, 12)))
    assert asked == [None if fused else False]
