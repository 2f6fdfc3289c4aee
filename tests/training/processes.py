"""Several processes that make one run, and what they do: importable by name in a new process."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from nsr.data.segmentation.resident import load_resident
from nsr.data.segmentation.shapes import shapes
from nsr.tokens import MergedViT, Segmenter, TokenResidual, ToMe
from nsr.training import checkpoint, interruption
from nsr.training.distributed import ALONE, Group, join
from nsr.training.segmentation import SegmentationProtocol, SegmentationTrainer, train
from nsr.training.segmentation_evaluation import evaluate
from nsr.training.segmentation_feed import EpochDraws, ResidentFeed

WINDOW = (32, 32)


def start(size: int, target: Callable[..., None], *args: object) -> list[int]:
    """Run ``target(*args)`` in ``size`` processes as torchrun would; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["timm", "nsr.tokens", "nsr.training.segmentation_evaluation"])
    started = [context.Process(target=_child, args=(rank, size, port, target, args)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return [process.exitcode or 0 for process in started]


def _child(rank: int, size: int, port: int, target: Callable[..., None], args: tuple[object, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    target(join("cpu"), *args)


def trained(group: Group, path: Path) -> None:
    """Train and judge a small segmenter with NSR; the writer leaves its weights and confusion matrix."""
    torch.manual_seed(0)
    backbone = VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    net = Segmenter(MergedViT(backbone, ToMe(3), TokenResidual()), 5)
    protocol = SegmentationProtocol(epochs=2, batch=4, lr=1e-4, precision="fp32", seed=5)
    data = load_resident(shapes("train", 14))
    feed = ResidentFeed(data, EpochDraws(data.sizes, WINDOW, protocol.batch, protocol.seed, group=group))
    trainer = SegmentationTrainer(net, feed, protocol, capture=False, group=group)
    train([trainer])
    found = {
        **net.state_dict(),
        "confusion": evaluate(net, data, WINDOW, group=group),
        "windows": evaluate(net, data, WINDOW, stride=(24, 24), group=group),
        "loss": torch.tensor(trainer.mean_losses()[0]),
    }
    save_file({name: value.contiguous() for name, value in found.items()}, path.with_name(f"{path.name}-{group.rank}"))


def alone(path: Path) -> None:
    trained(ALONE, path)


def sampled(group: Group, path: Path) -> None:
    """Train on all neighbours of sampled seeds, so that nothing is random but the order of the seeds."""
    # here, because the others need no graph libraries
    from nsr import attach
    from nsr.data.generated_graph import generated_graph
    from nsr.graph.models import GraphModel
    from nsr.training.sampled import SampledProtocol, train_sampled

    graph = generated_graph(path.with_name(f"{path.name}-graph-{group.rank}"), nodes=400, edges=3000, features=4)
    torch.manual_seed(0)
    model = GraphModel("sage", torch.nn.Linear(4, 8), 8, 4, layers=2)
    attach(model)
    train_sampled(model, graph, torch.arange(200).numpy(), SampledProtocol((-1, -1), 50, steps=10), group)
    save_file(model.state_dict(), path.with_name(f"{path.name}-{group.rank}"))


def dying(group: Group) -> None:
    """The last process is killed while the others wait for it."""
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.sum(torch.ones(1))


def asked_to_stop(group: Group, path: Path) -> None:
    """One process is asked to stop; all leave at the same epoch, one checkpoint is written."""
    keeper = checkpoint.Keeper(path, {}, every=3600, writes=group.writes)
    with interruption.noticed():
        for epoch in range(1, 100):
            if group.rank == 1 and epoch == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            interruption.share(group)
            keeper.keep(lambda epoch=epoch: {"epoch": torch.tensor(epoch)}, epoch)
            interruption.leave_if_requested()
