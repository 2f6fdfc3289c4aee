"""The tensor schedule equals torch's scheduler and a plain early-stopping loop, replica by replica."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from nsr.training.plateau import Plateau, PlateauRule


@pytest.mark.parametrize("mode", ["max", "min"])
def test_equal_to_torchs_scheduler(mode: str) -> None:
    curves = (torch.rand(200, 4) * 0.3 + torch.linspace(0.1, 0.6, 200)[:, None]) * (1 if mode == "max" else -1) + 1
    rule = PlateauRule(mode, rate=1e-3, patience=5, stop_after=10**6, min_rate=1e-5)  # type: ignore[arg-type]
    plateau = Plateau(rule, 4, torch.device("cpu"))
    optimizers = [torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1e-3) for _ in range(4)]
    schedulers = [ReduceLROnPlateau(o, mode, factor=0.5, patience=5, min_lr=1e-5) for o in optimizers]  # type: ignore[arg-type]
    for metrics in curves:
        plateau.update(metrics)
        for scheduler, metric in zip(schedulers, metrics.tolist(), strict=True):
            scheduler.step(metric)
        expected = torch.tensor([o.param_groups[0]["lr"] for o in optimizers])
        torch.testing.assert_close(plateau.rate, expected)
    assert plateau.rate.min() < 1e-3


def test_stops_each_replica_on_its_own_and_keeps_its_best() -> None:
    plateau = Plateau(PlateauRule("max", 1.0, patience=100, stop_after=3), 2, torch.device("cpu"))
    curve = torch.tensor([[0.5, 0.1], [0.6, 0.2], [0.6, 0.3], [0.5, 0.4], [0.4, 0.5], [0.9, 0.6]])
    improved = torch.stack([plateau.update(metrics) for metrics in curve])
    # the first stops after three evaluations without a better one; its later 0.9 does not count
    assert plateau.active.tolist() == [False, True]
    torch.testing.assert_close(plateau.best, torch.tensor([0.6, 0.6]))
    assert plateau.best_evaluation.tolist() == [2, 6]
    assert improved.sum(0).tolist() == [2, 6]


def test_annealing_follows_a_cosine_whatever_the_metric_does() -> None:
    rule = PlateauRule("max", rate=2e-3, patience=1, stop_after=100, anneal_over=10)
    plateau = Plateau(rule, 2, torch.device("cpu"))
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(10):
        plateau.update(torch.tensor([0.5, 0.1]))
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close(plateau.rate, torch.full((2,), optimizer.param_groups[0]["lr"]))
    plateau.update(torch.tensor([0.5, 0.1]))
    assert plateau.rate.tolist() == [0.0, 0.0]  # and does not rise again


def test_state_round_trip_goes_on_alike() -> None:
    rule = PlateauRule("min", 1e-2, patience=2, stop_after=20)
    one, two = (Plateau(rule, 3, torch.device("cpu")) for _ in range(2))
    curve = torch.rand(30, 3)
    for metrics in curve[:15]:
        one.update(metrics)
    two.load({name: tensor.clone() for name, tensor in one.state().items()})
    for metrics in curve[15:]:
        assert torch.equal(one.update(metrics), two.update(metrics))
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name])
