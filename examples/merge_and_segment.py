"""Merge the tokens of a timm ViT, train it to segment, and see what the null-space residual gives back.

The task: cells of a random colour, each with fine stripes whose direction is its class. Tokens merge by what they have
most of in common, which is the colour; the direction of the stripes is what the mean of several tokens forgets.

    python examples/merge_and_segment.py

With real weights: timm.create_model("deit_tiny_patch16_224", pretrained=True), see docs/timm.md.
"""

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import nsr
from nsr.tokens import MergedViT, MergeRule, Segmenter, TokenResidual, ToMe

SIZE, CELL, CLASSES, STEPS = 64, 8, 4, 100


def striped_cells(count: int) -> tuple[Tensor, Tensor]:
    """Pictures ``[count, 3, 64, 64]`` and the class of every pixel ``[count, 64, 64]``."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.stack([x, y, x + y, x - y]) // 2 % 2 - 0.5  # shape: [CLASSES, SIZE, SIZE]
    cells = torch.randint(0, CLASSES, (count, SIZE // CELL, SIZE // CELL))
    label = cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)
    colour = torch.randn(count, 3, SIZE // CELL, SIZE // CELL)
    image = colour.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    return image + F.one_hot(label, CLASSES).movedim(-1, 1).mul(stripes).sum(1, keepdim=True), label


def build(merger: MergeRule | None, residual: TokenResidual | None) -> Segmenter:
    torch.manual_seed(0)
    backbone = timm.create_model(
        "deit_tiny_patch16_224", pretrained=False, img_size=SIZE, patch_size=8, embed_dim=48, depth=4, num_heads=3
    )
    return Segmenter(MergedViT(backbone, merger, residual), CLASSES)


def train(model: Segmenter) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        image, label = striped_cells(16)
        optimiser.zero_grad()
        F.cross_entropy(model(image), label).backward()
        optimiser.step()


@torch.no_grad()
def accuracy(model: Segmenter) -> float:
    torch.manual_seed(1)
    image, label = striped_cells(64)
    return (model.eval()(image).argmax(1) == label).float().mean().item()


tome = ToMe(r=32)  # 64 patches become 4 tokens in four blocks
for name, merger, residual in [("full ViT", None, None), ("ToMe", tome, None), ("ToMe + NSR", tome, TokenResidual())]:
    model = build(merger, residual)
    train(model)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name:<12}{parameters:>9,} parameters   {accuracy(model):6.1%} of pixels right")

with nsr.disabled(model):
    print(f"{'NSR off':<12}{'':>21}   {accuracy(model):6.1%} of pixels right")
