"""Compile for Hopper, without a GPU, every kernel that a case launches: ``for_hopper.py CASE``, printed as JSON.

What a GPU would be asked to run is built here and looked at: whether it compiles at all, how much of the chip it takes,
how many bytes a thread it spills. Launches are left out, so every result is 0 and nothing is compared. A program of its
own, because it puts a driver that knows no device in the place of Triton's.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1] / "training"))

import norms_compared
import trees_compared

from nsr.bench import token_models
from nsr.graph.models import Backbone
from nsr.kernels import gated_residual_sum, paths, segment_sum, tokens, unit_coefficient
from nsr.training.pixel_loss import pixel_cross_entropy
from nsr.training.segmentation_stack import SegmenterStack

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
USE = re.compile(r"REG:(\d+) STACK:(\d+)")
_compile = JITFunction.run
_found: dict[str, dict[str, int]] = {}
_measured: set[str] = set()


class Hopper:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(self: Any, *args: Any, **options: Any) -> None:
    kernel = _compile(self, *args, **options | {"warmup": True})
    if kernel.hash in _measured:
        return
    _measured.add(kernel.hash)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    use = USE.search(said.stdout + said.stderr)
    assert use, said
    taken = {
        "registers": int(use[1]),
        "spilled": int(use[2]),
        "shared": kernel.metadata.shared,
        "eights": kernel.asm["ptx"].count("m64n8k"),
    }
    most = _found.setdefault(self.fn.__name__, taken)
    _found[self.fn.__name__] = {name: max(most[name], value) for name, value in taken.items()}


def sums(width: int, heads: int, precision: str) -> None:
    """The operators of a graph branch, both ways."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    source, target = torch.randint(0, 40, (2, 200))
    t = unit_coefficient(drawn(200, heads), source, target, 40)
    m = drawn(40, width)
    mean = segment_sum(m, source, target, t, 40)
    tables = (m, drawn(40, width), drawn(40, width), mean, drawn(40, heads, width), drawn(width, width), drawn(width))
    gated_residual_sum(*tables, source, target, t, precision=precision).sum().backward()


def inference(size: tuple[int, int]) -> None:
    """Merged models in bf16 without gradient, with NSR and without."""
    for build in (token_models.merged, token_models.with_residual):
        model = build(size).to(torch.bfloat16).eval().requires_grad_(False)
        with torch.no_grad():
            model.patch_logits(torch.randn(2, 3, *size, dtype=torch.bfloat16))


def training() -> None:
    """A stack of both under bf16 autocast, from the loss back."""
    size = (64, 64)
    stack = SegmenterStack([token_models.merged(size), token_models.with_residual(size)])
    # autocast for CUDA is off where there is none, and the kernels ask for it by that name
    torch.is_autocast_enabled = lambda device="cuda": True
    torch.get_autocast_dtype = lambda device="cuda": torch.bfloat16
    logits = stack.patch_logits(torch.randn(2, 3, *size))
    pixel_cross_entropy(logits, torch.randint(0, token_models.CLASSES, (2, *size))).sum().backward()


def trees(backbone: Backbone) -> None:
    """A batch of trees with NSR, from the loss back."""
    case = trees_compared.Case(backbone, "nsr", width=32)
    trees_compared.results(case, trees_compared.kernels, "cpu")


CASES = {
    "graph in bf16": lambda: sums(128, 1, "bf16"),
    "graph in fp32": lambda: sums(128, 1, "fp32"),
    "narrow graph": lambda: sums(48, 1, "fp32"),
    "narrow graph in bf16": lambda: sums(64, 1, "bf16"),
    "heads": lambda: sums(128, 4, "bf16"),
    "images of 224": lambda: inference((224, 224)),
    "images of 512": lambda: inference((512, 512)),
    "training": training,
    "trees": lambda: trees("gcn"),
    "trees by GIN": lambda: trees("gin"),
    "norms": lambda: [norms_compared.results(case, "cpu") for case in norms_compared.CASES],
}


def main() -> None:
    driver.set_active(Hopper())
    JITFunction.run = compile_only
    paths._device_obstacle = lambda kind, index: None
    # what a kernel would have written is read as an index
    torch.empty = lambda *shape, memory_format=None, **options: torch.zeros(*shape, **options)
    torch.empty_like = torch.zeros_like
    Tensor.new_empty = Tensor.new_zeros  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    with tokens.token_kernels(True):
        CASES[sys.argv[1]]()
    print(json.dumps(_found))


if __name__ == "__main__":
    main()
