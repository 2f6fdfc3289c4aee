"""Make a trained ViT cheaper without retraining it: freeze it, merge its tokens, train the null-space adapter alone.

The task: cells of a random colour, each with fine stripes whose direction is its class.

    python examples/adapter_training.py
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nsr
from nsr.tokens import MergedViT, Segmenter, TokenResidual, ToMe

SIZE, CELL, CLASSES = 64, 8, 4


def striped_cells(count: int) -> tuple[Tensor, Tensor]:
    """Pictures ``[count, 3, 64, 64]`` and the class of every pixel ``[count, 64, 64]``."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.stack([x, y, x + y, x - y]) // 2 % 2 - 0.5  # shape: [CLASSES, SIZE, SIZE]
    cells = torch.randint(0, CLASSES, (count, SIZE // CELL, SIZE // CELL))
    label = cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)
    colour = torch.randn(count, 3, SIZE // CELL, SIZE // CELL)
    image = colour.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    return image + F.one_hot(label, CLASSES).movedim(-1, 1).mul(stripes).sum(1, keepdim=True), label


def train(model: nn.Module, parameters: Iterable[nn.Parameter], steps: int) -> None:
    optimiser = torch.optim.AdamW(parameters, lr=2e-3)
    for _ in range(steps):
        image, label = striped_cells(16)
        optimiser.zero_grad()
        F.cross_entropy(model(image), label).backward()
        optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    torch.manual_seed(1)
    image, label = striped_cells(64)
    return (model.eval()(image).argmax(1) == label).float().mean().item()


torch.manual_seed(0)
backbone = timm.create_model(
    "deit_tiny_patch16_224", pretrained=False, img_size=SIZE, patch_size=8, embed_dim=48, depth=4, num_heads=3
)
full = Segmenter(MergedViT(backbone, None), CLASSES)
train(full, full.parameters(), steps=100)
print(f"trained ViT, 64 tokens throughout        {accuracy(full):6.1%} of pixels right")

merged = Segmenter(MergedViT(backbone, ToMe(r=32), TokenResidual()), CLASSES)
merged.norm, merged.head = full.norm, full.head  # they learn on, with the branches
print(f"its tokens merged, 64 to 4               {accuracy(merged):6.1%}")

merged.vit.freeze_backbone()
learning = [p for p in merged.parameters() if p.requires_grad]
train(merged, learning, steps=100)
share = sum(p.numel() for p in learning) / sum(p.numel() for p in merged.parameters())
print(f"the adapter trained, {share:.0%} of the weights  {accuracy(merged):6.1%}")

with nsr.disabled(merged):
    print(f"the adapter off                          {accuracy(merged):6.1%}")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "adapter.safetensors"
    nsr.save(merged, file)  # the branches alone; one backbone can serve many
    print(f"the adapter's file                       {file.stat().st_size / 1024:.0f} KiB")
