"""Ten splits together equal ten one by one and a plain torch loop; interrupted and resumed equals run through."""

from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nsr.data.minesweeper import minesweeper
from nsr.data.node_graph import NodeGraph
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone, GraphModel
from nsr.training import loop, nodes
from nsr.training.node_metrics import accuracy, roc_auc
from nsr.training.nodes import NodeOutcome, train_nodes
from nsr.training.noise import seed_dropout
from nsr.training.plateau import PlateauRule
from nsr.training.progress import Progress

GRAPH = minesweeper(side=12, splits=3, seed=2)
RULE = PlateauRule("max", rate=1e-2, patience=1, stop_after=6, min_rate=1e-6)


def build(backbone: Backbone, variant: Variant, fuse: bool = False) -> GraphModel:
    return graph_model(
        backbone, variant, lambda w: nn.Linear(7, w), seed=42, width=16, outputs=2, layers=2, dropout=0.5, fuse=fuse
    )


def train_plainly(model: nn.Module, graph: NodeGraph, split: int, epochs: int) -> tuple[float, float]:
    """The protocol of the paper in the words of torch."""
    seed_dropout(model, 42)
    x, edge_index = torch.from_numpy(graph.features), torch.from_numpy(graph.edge_index())
    y = torch.from_numpy(graph.labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=RULE.rate, weight_decay=5e-4)
    schedule = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=RULE.patience, min_lr=RULE.min_rate)
    best, best_test, since = -1.0, -1.0, 0
    for epoch in range(1, epochs + 1):
        model.train()
        optimizer.zero_grad()
        mask = graph.train_masks[split]
        F.cross_entropy(model(x, edge_index)[mask], y[mask]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if epoch % 10:
            continue
        model.eval()
        with torch.no_grad():
            logits = model(x, edge_index)
        score = (logits[:, 1] - logits[:, 0]).numpy()
        val, test = (
            roc_auc_score(graph.labels[m], score[m]) for m in (graph.val_masks[split], graph.test_masks[split])
        )
        schedule.step(val)
        since += 1
        if val > best:
            best, best_test, since = val, test, 0
        if since == RULE.stop_after:
            break
    return best, best_test


@pytest.mark.parametrize(("backbone", "variant"), [("gcn", "nsr"), ("sage", "original"), ("gin", "nsr")])
def test_together_one_by_one_and_plainly_are_equal(backbone: Backbone, variant: Variant) -> None:
    together = train_nodes(
        [build(backbone, variant, fuse=True) for _ in range(3)], GRAPH, range(3), epochs=30, rule=RULE
    )
    alone = train_nodes([build(backbone, variant)], GRAPH, [1], epochs=30, rule=RULE)
    assert together.val[1] == pytest.approx(alone.val[0], abs=1e-3)
    assert together.test[1] == pytest.approx(alone.test[0], abs=1e-3)
    assert together.best_epoch[1] == alone.best_epoch[0]
    val, test = train_plainly(build(backbone, variant), GRAPH, 1, epochs=30)
    assert alone.val[0] == pytest.approx(val, abs=1e-3)
    assert alone.test[0] == pytest.approx(test, abs=1e-3)
    assert together.predictions.shape == (3, 144)
    assert len({round(v, 6) for v in together.val}) > 1  # each split has its own curve


def test_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LOOK_EVERY", 10)
    rule = PlateauRule("max", rate=0.0, patience=1, stop_after=3)  # nothing is learned, so nothing gets better
    outcome = train_nodes([build("gcn", "original")], GRAPH, [0], epochs=1000, rule=rule)
    assert outcome.epochs == 40
    assert outcome.best_epoch == [10]


class _KilledError(Exception):
    pass


def test_interrupted_and_resumed_equals_run_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LOOK_EVERY", 10)

    def train(save_to: Path | None, stop_at: int = 10**6) -> NodeOutcome:
        seen: list[int] = []

        def watch(progress: Progress) -> None:
            seen.append(progress.epoch)
            if progress.epoch == stop_at:
                raise _KilledError

        outcome = train_nodes(
            [build("gin", "nsr") for _ in range(2)],
            GRAPH,
            [0, 1],
            epochs=40,
            rule=RULE,
            watch=watch,
            save_to=save_to,
            configuration={"a": 1},
        )
        assert seen[0] == (10 if save_to is None else 30)  # resumed after 20 epochs
        return outcome

    whole = train(None)
    path = tmp_path / "run.safetensors"
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    with pytest.raises(_KilledError):
        train(path, stop_at=30)
    assert path.is_file()
    resumed = train(path)
    assert resumed.val == whole.val
    assert resumed.test == whole.test
    assert torch.equal(resumed.predictions, whole.predictions)


def scores() -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(4, 200, 2)
    logits[:, :, 1] = (logits[:, :, 1] * 4).round() / 4  # ties
    logits[:, ::3, 0] = 0
    return logits, torch.randint(2, (200,)), torch.rand(4, 200) < 0.5


def test_metrics_equal_the_references() -> None:
    logits, labels, mask = scores()
    for r in range(4):
        chosen = mask[r]
        score = (logits[r, :, 1] - logits[r, :, 0])[chosen]
        expected = roc_auc_score(labels[chosen], score)
        assert roc_auc(logits, labels, mask)[r].item() == pytest.approx(expected, abs=1e-6)
        expected = (logits[r].argmax(-1) == labels)[chosen].float().mean().item()
        assert accuracy(logits, labels, mask)[r].item() == pytest.approx(expected, abs=1e-6)
