"""A small run that takes about two seconds, as a process of its own; importable by name in a new process."""

import multiprocessing
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from nsr.data.segmentation.shapes import shapes
from nsr.experiments import segmentation
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_runs import run_table
from nsr.experiments.segmentation_task import TASKS
from nsr.tokens.budget import ViTShape

TINY = replace(
    TASKS["shapes"],
    name="tiny",
    shape=ViTShape((4, 4), 5, dim=16, depth=3, heads=2, patch=8),
    read=lambda _, part: shapes(part, {"train": 9, "val": 5}[part]),
    protocol=replace(TASKS["shapes"].protocol, epochs=120, batch=4, precision="fp32"),
)
RESULT = Path("results/tiny/tome-1.8x-nsr-0.json")


def start(folder: Path, outputs: Path | None = None) -> BaseProcess:
    """Start the run in a process of its own, forked from one that has the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["timm", "nsr.experiments.segmentation_runs"])
    process = context.Process(target=run, args=(folder, outputs or folder / "outputs"))
    process.start()
    return process


def run(folder: Path, outputs: Path) -> None:
    """Make the run, with a checkpoint after every epoch; prints the epochs it does."""
    torch.set_num_threads(1)
    segmentation._SECONDS_BETWEEN_CHECKPOINTS = 0.0
    lab = SegmentationLab(TINY, folder, outputs, torch.device("cpu"), workers=0)
    with (folder / "epochs").open("a") as epochs:
        run_table(
            lab,
            [SegmentationCell("tome", "1.8x", "nsr")],
            TINY.protocol,
            folder / "results",
            say=lambda _: None,
            watch=lambda progress: print(progress.epoch, file=epochs, flush=True),
            every=0,
        )
