"""The graph benchmarks run, measure what they say, and write the form that the report reads."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nsr
from nsr.bench import graph, scale
from nsr.bench import graph_steps as steps
from nsr.bench.graph import bench_graph
from nsr.bench.graph_cases import QUICK, TOLOKERS, edge_index, random_edges
from nsr.bench.literal_branch import as_worded
from nsr.cli import app


@pytest.fixture
def task() -> steps.Task:
    return steps.Task(random_edges(30, 80, 0.5), 30, width=16, layers=2, device=torch.device("cpu"))


def test_literal_form_is_the_same_function(task: steps.Task) -> None:
    ours = steps.attached(task).double().eval()
    literal = as_worded(copy.deepcopy(ours))
    x = task.x.double()
    results = [model(x, task.edge_index) for model in (ours, literal)]
    torch.testing.assert_close(results[1], results[0])
    grads = [
        torch.autograd.grad(out.square().sum(), list(m.parameters()))
        for out, m in zip(results, (ours, literal), strict=True)
    ]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(theirs, mine)


def test_trained_form_is_the_same_function(task: steps.Task) -> None:
    attached, trained = steps.attached(task).eval(), steps.trained(task).eval()
    trained.load_state_dict(attached.state_dict())
    torch.testing.assert_close(
        trained(task.x, task.edge_index), attached(task.x, task.edge_index), atol=1e-4, rtol=1e-4
    )
    with nsr.disabled(trained):
        assert not torch.allclose(trained(task.x, task.edge_index), attached(task.x, task.edge_index), atol=1e-2)


def test_steps_train(task: steps.Task) -> None:
    model = steps.trained(task)
    before = [p.detach().clone() for p in model.parameters()]
    steps.step(model, task)()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@torch.no_grad()  # with gradients torch warns of its own look at the .grad of a layer's input
def test_layers_share_what_is_compiled(task: steps.Task) -> None:
    model = steps.trained(task).eval()
    expected = copy.deepcopy(model)(task.x, task.edge_index)
    graphs = []
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for layer in model.layers:
        layer.compile(dynamic=False, fullgraph=True, backend=backend)
    torch.testing.assert_close(model(task.x, task.edge_index), expected)
    assert len(graphs) == 1, "whole, and the same for both layers"


def test_scale_is_kept_after_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(scale, "QUICK_MEMBERS", (200, 400))

    def out_of_memory(task: steps.Task) -> None:
        raise torch.OutOfMemoryError("200 GB are too many")

    monkeypatch.setattr(steps, "literal", out_of_memory)
    record = scale.bench_scale(
        torch.device("cpu"), machine="here", quick=True, keep=lambda r: kept.append(list(r.metrics))
    )
    assert kept == [["200 members"], ["200 members", "400 members"]]
    assert record.metrics["400 members"]["NSR as worded"] == {"error": "OutOfMemoryError: 200 GB are too many"}
    assert record.metrics["400 members"]["NSR"]["milliseconds"]["median"] > 0


@pytest.mark.parametrize("command", ["graph", "scale"])
def test_commands(command: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["bench", command, "--quick", "--device", "cpu", "--results", str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert "NSR as worded" in run.output
    (file,) = tmp_path.glob("bench/*.json")
    record = json.loads(file.read_text())
    assert record["experiment"] == "bench"
    assert record["cell"] == {"bench": command, "machine": f"cpu-{torch.get_num_threads()}"}
    for arms in record["metrics"].values():
        timed = {name: arm for name, arm in arms.items() if "milliseconds" in arm}
        assert len(timed) >= 3
        assert all(arm["milliseconds"]["median"] > 0 for arm in timed.values())
        if command == "graph":
            assert max(arms["kernel errors"]["fp32"].values()) < 1e-5
            assert max(arms["model errors"]["fp32"].values()) < 1e-4
            assert arms["NSR as worded, eager"]["speed_up"] == 1


def test_published_graph_where_it_is_at_hand(tmp_path: Path) -> None:
    edges, origin = edge_index(TOLOKERS, tmp_path)
    assert origin == "generated"
    assert edges.shape == (2, 2 * TOLOKERS.edges)
    assert int(edges.max()) < TOLOKERS.nodes
    assert torch.bincount(edges[1]).max() > 800, "a few nodes have very many members, as in the published graph"
    assert edge_index(QUICK)[1] == "generated"


@pytest.mark.data
def test_published_graph(data_dir: Path) -> None:
    edges, origin = edge_index(TOLOKERS, data_dir)
    assert origin == "published"
    assert edges.shape == (2, 2 * TOLOKERS.edges)


def test_only_some_arms_kept_after_each_graph() -> None:
    kept = []
    record = bench_graph(torch.device("cpu"), machine="here", quick=True, only=["GCN*"], keep=kept.append)
    (arms,) = record.metrics.values()
    assert set(arms) == {"kernel errors", "model errors", "GCN, eager"}
    assert [so_far.metrics for so_far in kept] == [record.metrics]
    with pytest.raises(ValueError, match=r"only=\['none'\] matches no arm; there are \['GCN, eager', "):
        bench_graph(torch.device("cpu"), machine="here", quick=True, only=["none"])


def test_what_a_compiler_works_on_comes_last_on_a_gpu() -> None:
    names = ["GCN, compiled", "GCN, eager"]
    assert graph._stages((QUICK, TOLOKERS), names, on_gpu=True) == [
        ((QUICK, TOLOKERS), ["errors", "GCN, eager"]),
        ((QUICK, TOLOKERS), ["GCN, compiled"]),
    ]
    assert graph._stages((QUICK, TOLOKERS), names, on_gpu=False) == [
        ((QUICK,), ["errors", *names]),
        ((TOLOKERS,), ["errors", *names]),
    ]


def test_an_arm_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(task: steps.Task) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(steps, "attention", fails)
    record = bench_graph(torch.device("cpu"), machine="here", quick=True, only=["G*"])
    (arms,) = record.metrics.values()
    assert arms["GATv2, eager"] == {"error": "RuntimeError: out of luck"}
    assert arms["GCN, eager"]["milliseconds"]["median"] > 0
