"""On a GPU, with captured steps and fused kernels, training is what it is on a CPU."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from nsr.data.minesweeper import minesweeper
from nsr.data.tree import tree_task
from nsr.data.zinc import ATOMS, Molecules
from nsr.experiments.graph_models import graph_model
from nsr.graph.models import Backbone, GraphModel, Readout
from nsr.training import loop
from nsr.training.capture import CapturedStep
from nsr.training.molecules import train_molecules
from nsr.training.nodes import node_run, train_nodes
from nsr.training.plateau import PlateauRule
from nsr.training.tree import _Trainer, train_trees

pytestmark = pytest.mark.gpu
DEVICES = (torch.device("cpu"), torch.device("cuda"))
BACKBONES: tuple[Backbone, ...] = ("gcn", "sage", "gin")
# ROC-AUC after 60 steps on nodes. GIN's ReLUs make it sensitive: weights that differ by 1e-7 end 0.009 apart on a CPU.
CLOSE: dict[Backbone, float] = {"gcn": 5e-3, "sage": 5e-3, "gin": 0.03}


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.set_float32_matmul_precision("highest")


def build(
    backbone: Backbone,
    encoder: Callable[[int], nn.Module],
    outputs: int,
    readout: Readout,
    device: torch.device,
    seed: int = 1,
    dropout: float = 0.5,
) -> GraphModel:
    return graph_model(
        backbone,
        "nsr",
        encoder,
        seed=seed,
        width=32,
        outputs=outputs,
        layers=3,
        dropout=dropout,
        readout=readout,
        fuse=device.type == "cuda",
    )


def features(count: int) -> Callable[[int], nn.Module]:
    return lambda width: nn.Linear(count, width)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_nodes(backbone: Backbone) -> None:
    graph = minesweeper(side=20, splits=3, seed=2)
    rule = PlateauRule("max", rate=3e-3, patience=50, stop_after=100)
    on_cpu, on_gpu = (
        train_nodes(
            [build(backbone, features(7), 2, "node", device) for _ in range(3)],
            graph,
            range(3),
            epochs=60,
            rule=rule,
            device=device,
        )
        for device in DEVICES
    )
    assert on_gpu.val == pytest.approx(on_cpu.val, abs=CLOSE[backbone])
    assert on_gpu.test == pytest.approx(on_cpu.test, abs=2 * CLOSE[backbone])


@pytest.mark.parametrize("backbone", BACKBONES)
def test_trees(backbone: Backbone) -> None:
    rule = PlateauRule("max", rate=3e-3, patience=100, stop_after=1000, perfect=1.0)
    seeds = (11, 12)

    def curve(device: torch.device) -> list[list[float]]:
        accuracies: list[list[float]] = []
        train_trees(
            [build(backbone, features(10), 4, "root", device, seed, dropout=0.0) for seed in seeds],
            [tree_task(2, seed) for seed in seeds],
            epochs=12,
            rule=rule,
            device=device,
            look_every=1,
            watch=lambda progress: accuracies.append(progress.metric),
        )
        return accuracies

    on_cpu, on_gpu = map(curve, DEVICES)
    assert len(on_gpu) == 12
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours == pytest.approx(theirs, abs=0.03)  # two of 76 samples


@pytest.mark.parametrize(("depth", "trees_per_batch"), [(2, None), (2, 5), (5, None), (5, 64)])
def test_trees_see_the_same_order_in_every_epoch(depth: int, trees_per_batch: int | None) -> None:
    rule = PlateauRule("max", rate=3e-3, patience=100, stop_after=1000, perfect=1.0)
    leaves = 2**depth

    def trainer(device: torch.device) -> _Trainer:
        model = graph_model(
            "gcn",
            "nsr",
            features(2 * (leaves + 1)),
            seed=1,
            width=16,
            outputs=leaves,
            layers=depth + 1,
            readout="root",
        )
        return _Trainer([model], [tree_task(depth)], rule, trees_per_batch, device)

    on_cpu, on_gpu = map(trainer, DEVICES)
    seen = []
    for number in range(8):  # captured from the fourth on
        for one in (on_cpu, on_gpu):
            one.number.fill_(number)
            one.begin()
        seen.append(on_gpu.order.clone())
        for ours, theirs in zip(on_gpu.queries._parts(), on_cpu.queries._parts(), strict=True):
            assert torch.equal(ours.cpu(), theirs)
    assert all(not torch.equal(one, two) for one, two in pairwise(seen))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_molecules(backbone: Backbone) -> None:
    generator = torch.Generator().manual_seed(0)

    def molecules(count: int) -> Molecules:
        atom = torch.randint(ATOMS, (5 * count,), generator=generator).numpy()
        chain = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]]).repeat(count, 1).numpy()
        y = (atom.reshape(count, 5).mean(1) / ATOMS).astype("float32")
        sizes = torch.full((count,), 5).numpy()
        return Molecules(sizes, sizes - 1, atom, chain, chain[:, 0] * 0 + 1, y)

    data = {"train": molecules(40), "val": molecules(10), "test": molecules(10)}
    rule = PlateauRule("min", rate=3e-3, patience=50, stop_after=100)

    def curve(device: torch.device) -> list[list[float]]:
        errors: list[list[float]] = []
        train_molecules(
            [build(backbone, lambda width: nn.Embedding(ATOMS, width), 1, "graph", device, seed) for seed in (0, 1)],
            data,  # type: ignore[arg-type]
            [0, 1],
            epochs=8,
            batch=16,
            rule=rule,
            device=device,
            look_every=1,
            watch=lambda progress: errors.append(progress.metric),
        )
        return errors

    on_cpu, on_gpu = map(curve, DEVICES)
    assert len(on_gpu) == 8
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours == pytest.approx(theirs, abs=5e-3)


def test_runs_that_take_turns_do_not_disturb_each_other() -> None:
    graph = minesweeper(side=20, splits=2, seed=2)
    device = DEVICES[1]

    def run(backbone: Backbone) -> loop.Run:
        return node_run([build(backbone, features(7), 2, "node", device)], graph, [0], epochs=60, device=device)

    alone = [loop.take_turns([run(backbone)], device)[0] for backbone in BACKBONES]
    in_turns = loop.take_turns([run(backbone) for backbone in BACKBONES], device)
    for one, two, close in zip(alone, in_turns, CLOSE.values(), strict=True):
        assert two.val[0] == pytest.approx(one.val[0], abs=close)


def test_a_step_is_captured_and_counts_every_call() -> None:
    total = torch.zeros((), device="cuda")

    def step() -> None:
        total.add_(1)

    captured = CapturedStep(step, torch.device("cuda"))
    for _ in range(10):
        captured()
    assert captured.graph is not None
    assert total.item() == 10
