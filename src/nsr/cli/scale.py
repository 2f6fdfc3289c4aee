"""``nsr scale``: a graph larger than a GPU, on disk: made, trained on by sampling, inferred exactly, and measured."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from nsr.cli.device import chosen_device

Folder = Annotated[Path, typer.Option(help="Where the graph and the hidden states go; about 3 GB at the default size.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the generated graph.")]
Edges = Annotated[int, typer.Option(min=0, help="Directed edges.")]
Backbone = Annotated[str, typer.Option(help="gcn, sage or gin.")]
Steps = Annotated[int, typer.Option(min=0, help="Training steps on sampled neighbourhoods; 0 needs no backend.")]
Batch = Annotated[int, typer.Option(min=1, help="Seed nodes in a step, over all processes.")]
Fanout = Annotated[str, typer.Option(help="Members drawn for each node, from the seeds outwards; one number a layer.")]
Width = Annotated[int, typer.Option(min=1, help="Width of the model.")]
Block = Annotated[int, typer.Option(min=1, help="Nodes inferred together.")]
Branch = Annotated[bool, typer.Option("--nsr/--plain", help="With null-space residuals, or the backbone alone.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def scale(
    folder: Folder = Path("outputs/scale"),
    nodes: Nodes = 10_000_000,
    edges: Edges = 100_000_000,
    backbone: Backbone = "gcn",
    steps: Steps = 200,
    batch: Batch = 1024,
    fanout: Fanout = "10,10",
    width: Width = 32,
    block: Block = 2**16,
    branch: Branch = True,
    device: Device = "cpu",
) -> None:
    """Generate a heterophilous graph on disk, train on sampled neighbourhoods, infer every node exactly; print JSON.

    The default is 10 million nodes and 100 million edges. `torchrun --nproc-per-node N -m nsr scale` shares the
    training between processes.
    """
    import torch
    from torch import nn

    import nsr
    from nsr.cli.selection import integers
    from nsr.data.generated_graph import CLASSES, generated_graph
    from nsr.graph.layerwise import InNeighbours, infer
    from nsr.graph.models import GraphModel
    from nsr.training.distributed import join
    from nsr.training.memory import peak_memory
    from nsr.training.sampled import SampledProtocol, train_sampled

    group = join(chosen_device(device))
    fanouts = tuple(integers("--fanout", fanout))
    figures: dict[str, float] = {"nodes": nodes, "edges": edges, "processes": group.size}

    def note(stage: str, begin: float, own: int, mapped: int) -> None:
        figures[f"{stage}_seconds"] = round(time.perf_counter() - begin, 1)
        figures[f"{stage}_gib"] = round(own / 2**30, 2)
        figures[f"{stage}_mapped_gib"] = round(mapped / 2**30, 2)

    graph_folder = folder / f"graph-{nodes}-{edges}"
    if group.writes:
        begin = time.perf_counter()
        with peak_memory() as peak:
            generated_graph(graph_folder, nodes, edges)
        note("generation", begin, peak.own, peak.mapped)
    group.wait()
    graph = generated_graph(graph_folder, nodes, edges)
    torch.manual_seed(0)
    model = GraphModel(backbone, nn.Linear(graph.features.shape[1], width), width, CLASSES, len(fanouts))  # type: ignore[arg-type]
    if branch:
        nsr.attach(model)
    half = nodes // 2  # learn from the first half of the nodes, which are in random order
    if steps:
        begin = time.perf_counter()
        with peak_memory() as peak:
            protocol = SampledProtocol(fanouts, batch, steps)
            train_sampled(model, graph, torch.arange(half).numpy(), protocol, group)
        note("training", begin, peak.own, peak.mapped)
        figures["training_nodes_per_second"] = round(steps * batch / figures["training_seconds"])
    if group.writes:
        begin = time.perf_counter()
        with peak_memory() as peak:
            neighbours = InNeighbours(graph.pointer, graph.source)
            logits = infer(model, graph.features, neighbours, block=block, device=group.device, folder=folder)
        note("inference", begin, peak.own, peak.mapped)
        figures["accuracy"] = round(float((logits[half:].argmax(1) == graph.labels[half:]).mean()), 4)
        typer.echo(json.dumps(figures, indent=1))
