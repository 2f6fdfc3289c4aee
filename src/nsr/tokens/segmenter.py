"""Semantic segmentation on a merged ViT: restored grid, LayerNorm, a linear layer, bilinear upsampling."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.tokens import host
from nsr.tokens.vit import MergedViT


class Segmenter(nn.Module):
    """Class logits for every pixel.

    The backbone's own classifier is dropped, with its pooling and the norm behind it: the segmenter has its own head,
    and nothing untrained is left in its checkpoints.

    Args:
        vit: The merged ViT.
        num_classes: Classes ``K``.

    Shapes:
        ``[B, C, H, W] -> [B, K, H, W]``.
    """

    def __init__(self, vit: MergedViT, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"A segmenter needs at least one class, got num_classes={num_classes}.")
        vit.backbone.reset_classifier(0, "")
        vit.backbone.fc_norm = nn.Identity()
        self.vit = vit
        like = vit.backbone.patch_embed.proj.weight
        self.norm = nn.LayerNorm(vit.dim, eps=1e-6, device=like.device, dtype=like.dtype)
        self.head = nn.Linear(vit.dim, num_classes, device=like.device, dtype=like.dtype)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        """Logits at the image's own resolution."""
        logits, patch = self.patch_logits(image), self.vit.backbone.patch_embed.patch_size
        # a backbone that pads its images does so below and on the right, and its grid covers the padding too
        covered = (logits.shape[2] * patch[0], logits.shape[3] * patch[1])
        logits = F.interpolate(logits, size=covered, mode="bilinear", align_corners=False)
        return logits[..., : image.shape[2], : image.shape[3]]

    def patch_logits(self, image: Tensor) -> Tensor:
        """Logits at the resolution of the patch grid, ``[B, K, h, w]``: what a loss at low resolution wants."""
        grid = host.grid_of(self.vit.backbone, image)
        logits = host.norm_linear(self.vit.forward_patches(image), self.norm, self.head)
        return logits.transpose(1, 2).unflatten(2, grid)

    def sliding_window(self, image: Tensor, window: tuple[int, int], stride: tuple[int, int], batch: int = 8) -> Tensor:
        """Logits for images larger than the window: overlapping windows, averaged where they overlap.

        The last window of a row or column is moved back inside the image. Cityscapes in the paper is window
        ``(512, 1024)`` with stride ``(341, 682)``.

        Args:
            image: ``[B, C, H, W]``, at least as large as the window.
            window: Height and width of a window, a size the ViT takes.
            stride: Step between windows, at most the window.
            batch: Windows in one forward pass, counted for each image of the batch.

        Returns:
            ``[B, K, H, W]``, in at least fp32.
        """
        size = image.shape[-2:]
        corners = [
            (top, left)
            for top in window_starts(size[0], window[0], stride[0])
            for left in window_starts(size[1], window[1], stride[1])
        ]
        total: Tensor | None = None
        count = torch.zeros(size, device=image.device)
        for first in range(0, len(corners), batch):
            chunk = corners[first : first + batch]
            crops = [image[..., top : top + window[0], left : left + window[1]] for top, left in chunk]
            logits = self(torch.cat(crops))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # windows are summed
            if total is None:
                total = logits.new_zeros(image.shape[0], logits.shape[1], *size)
            for (top, left), part in zip(chunk, logits.chunk(len(chunk)), strict=True):
                total[..., top : top + window[0], left : left + window[1]] += part
                count[top : top + window[0], left : left + window[1]] += 1
        assert total is not None
        return total / count


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along one side so that they cover it; the last is moved back inside.

    Example:
        >>> window_starts(1024, 512, 341)
        [0, 341, 512]
    """
    if not 0 < stride <= window:
        raise ValueError(f"A stride of {stride} with a window of {window} leaves gaps; use 1 to {window}.")
    if length < window:
        raise ValueError(f"The image has {length} pixels where the window has {window}: resize or pad it first.")
    return [*range(0, length - window, stride), length - window]
