"""What the tree's kernels learn on a GPU is what plain operators learn, there and elsewhere.

GCN + NSR at depth 5, 64 whole trees a batch, rate 2e-3, seed 11. After 100 epochs plain operators on a CPU have 30 % of
the training queries and 18 % of the held-out ones; with an order of batches that never changes 22 and 9 %. On an H200
the kernels had 31 and 22 % in fp32, 26 to 29 and 7 to 10 % when they still took TF32. That is TF32 and no fault of
theirs: plain operators rounded to it have 5 to 21 % of the held-out ones on a CPU, by chance.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from nsr.data.tree import tree_task
from nsr.experiments.graph_models import graph_model
from nsr.training import tree
from nsr.training.plateau import PlateauRule

EPOCHS = 100


@dataclass(frozen=True)
class Arm:
    """Whether the model is kernels, and what torch is told of the precision of products."""

    kernels: bool
    precision: str = "highest"


ARMS = {
    "kernels": Arm(True),
    "kernels, TF32 allowed": Arm(True, "high"),
    "plain operators": Arm(False),
}


@contextmanager
def only(arm: Arm) -> Iterator[None]:
    """Inside the block a trainer has what the arm has."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(arm.precision)
    try:
        with pytest.MonkeyPatch.context() as patched:
            if not arm.kernels:
                patched.setattr(tree, "fusible", lambda *_: False)
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def make(
    device: torch.device, depth: int = 5, trees: int | None = 64, rate: float = 2e-3, seed: int = 11
) -> tree._Trainer:
    leaves = 2**depth
    model = graph_model(
        "gcn",
        "nsr",
        lambda width: nn.Linear(2 * (leaves + 1), width),
        seed=seed,
        width=32,
        outputs=leaves,
        layers=depth + 1,
        readout="root",
    )
    rule = PlateauRule("max", rate=rate, patience=1000, stop_after=2000, perfect=1.0)
    return tree._Trainer([model], [tree_task(depth, seed)], rule, trees, device)


@pytest.mark.gpu
def test_held_out_queries_are_learned_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    held_out: dict[str, float] = {}
    print(f"\n{'':22} epochs  train   test  orders  seconds")
    for name, arm in ARMS.items():
        with only(arm):
            trainer = make(torch.device("cuda"))
            orders, began = set(), time.monotonic()
            for number in range(EPOCHS):
                trainer.epoch(number)
                if number < 12:
                    orders.add(tuple(trainer.queries.values.flatten()[:64].tolist()))
            held_out[name] = accuracy_on_held_out(trainer)
            seconds = time.monotonic() - began
        print(
            f"{name:22} {EPOCHS:6} {trainer.latest.item():6.3f} {held_out[name]:6.3f} {len(orders):7} {seconds:8.1f}",
            flush=True,
        )
        assert len(orders) == 12
    # In fp32 on a CPU it is .17 to .20 from weights that differ by 1e-6; the kernels in TF32 had .10 at most.
    assert min(held_out.values()) >= 0.12, held_out
    assert min(held_out.values()) >= 0.6 * held_out["plain operators"], held_out


def accuracy_on_held_out(trainer: tree._Trainer) -> float:
    right = trainer.correct_answers(trainer.permutations)
    return float(right[0, torch.from_numpy(trainer.tasks[0].test).to(right.device)].double().mean())
