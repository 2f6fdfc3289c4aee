"""The models that the token benchmark compares, all with the same backbone and the same schedule of token counts."""

import timm
import torch
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.tokens import MergedViT, Segmenter, TokenResidual, ToMe, host
from nsr.tokens.budget import ViTShape, merge_events
from nsr.tokens.operating_point import tome_point

REDUCTION = 3.4
CLASSES = 21


def schedule(size: tuple[int, int]) -> tuple[int, list[int]]:
    """ToMe's ``r`` at FLOPs ÷3.4 for DeiT-Tiny/16 on images of ``size``, and the tokens it removes in each block."""
    shape = ViTShape((size[0] // 16, size[1] // 16), CLASSES)
    r = tome_point(shape, REDUCTION).control
    removed = {event.block: event.merged for event in merge_events(shape, ToMe(r))}
    return r, [removed.get(block, 0) for block in range(shape.depth)]


def backbone(size: tuple[int, int]) -> nn.Module:
    """DeiT-Tiny/16 for images of ``size``, with random weights."""
    return timm.create_model("deit_tiny_patch16_224", img_size=size, num_classes=0)


def full(size: tuple[int, int]) -> Segmenter:
    """Nothing merged."""
    return Segmenter(MergedViT(backbone(size), None), CLASSES)


def merged(size: tuple[int, int]) -> Segmenter:
    """ToMe at FLOPs ÷3.4."""
    return Segmenter(MergedViT(backbone(size), ToMe(schedule(size)[0])), CLASSES)


def with_residual(size: tuple[int, int]) -> Segmenter:
    """The same with NSR, its decoders no longer zero."""
    model = Segmenter(MergedViT(backbone(size), ToMe(schedule(size)[0]), TokenResidual()), CLASSES)
    with torch.no_grad():
        for branch in (*model.vit.branches.values(), model.vit.spatial):
            nn.init.trunc_normal_(branch.decoder.weight, std=0.02)  # type: ignore[union-attr, arg-type]
    return model


class PatchLogits(nn.Module):
    """A segmenter up to the logits on its patch grid: upsampling them costs every arm the same and is left out."""

    def __init__(self, segmenter: Segmenter) -> None:
        super().__init__()
        self.segmenter = segmenter

    def forward(self, image: Tensor) -> Tensor:
        """``[B, 3, H, W] -> [B, K, H / 16, W / 16]``."""
        return self.segmenter.patch_logits(image)


class FreeDrop(Segmenter):
    """The limit: tokens leave on the same schedule, by a slice, for nothing. What it predicts is worthless.

    At the end each patch copies one of the tokens that are left, so that the head sees the full grid. Layers are timm's
    or, with ``own_layers``, those that merged models run: whichever is faster is the limit.
    """

    def __init__(self, size: tuple[int, int], own_layers: bool = False) -> None:
        super().__init__(MergedViT(backbone(size), None), CLASSES)
        self.removed, self.own_layers = schedule(size)[1], own_layers

    def patch_logits(self, image: Tensor) -> Tensor:
        """Logits on the patch grid."""
        vit = self.vit
        grid = host.grid_of(vit.backbone, image)
        x = host.embed(vit.backbone, image)
        for block, removed in zip(vit.backbone.blocks, self.removed, strict=True):
            assert isinstance(block, Block)
            if self.own_layers:
                x = host.mlp_half(block, _attended(block, x)[:, : x.shape[1] - removed])
            else:
                x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
                x = x[:, : x.shape[1] - removed]
                x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        x = vit.backbone.norm(x)[:, 1:]
        x = x[:, torch.arange(grid[0] * grid[1], device=x.device) % x.shape[1]]
        return self.head(self.norm(x)).transpose(1, 2).unflatten(2, grid)


def _attended(block: Block, x: Tensor) -> Tensor:
    """``x + attn(norm1(x))`` with the library's linear layers; the attention is torch's, which knows no sizes."""
    attn = block.attn
    assert isinstance(attn, Attention)
    qkv = host.norm_linear(x, block.norm1, attn.qkv).unflatten(2, (3, attn.num_heads, -1))
    q, k, v = qkv.transpose(1, 3).unbind(2)  # shape: [B, H, N, d_h]
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return host.linear_add(x, attended, attn.proj)


class LiteralToMe(Segmenter):
    """ToMe as its publication describes it, the peer to beat: written for this benchmark.

    Attention by hand with the log-size bias, a matrix of all scores, a full sort, scatter-reduce for the merge, and
    the state of a forward pass kept in one dictionary that every block reads and writes.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(MergedViT(backbone(size), None), CLASSES)
        self.r = schedule(size)[0]
        self.state: dict[str, Tensor | None] = {}

    def patch_logits(self, image: Tensor) -> Tensor:
        """Logits on the patch grid."""
        vit = self.vit
        grid = host.grid_of(vit.backbone, image)
        x = host.embed(vit.backbone, image)
        self.state = {"size": None, "token_of_patch": torch.arange(1, x.shape[1], device=x.device).expand(len(x), -1)}
        for block in vit.backbone.blocks:
            assert isinstance(block, Block)
            assert isinstance(block.attn, Attention)
            attended, metric = self._attend(block.attn, block.norm1(x))
            x = self._merge(x + block.drop_path1(block.ls1(attended)), metric)
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        x = vit.backbone.norm(x)
        index = self.state["token_of_patch"]
        assert index is not None
        x = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x)).transpose(1, 2).unflatten(2, grid)

    def _attend(self, attn: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        qkv = attn.qkv(x).reshape(batch, tokens, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = (q * attn.scale) @ k.transpose(-2, -1)
        if self.state["size"] is not None:
            scores = scores + self.state["size"].log()[:, None, None, :, 0]
        x = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return attn.proj(x), k.mean(1)

    def _merge(self, x: Tensor, metric: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        r = min(self.r, (tokens - 1) // 2)
        if r == 0:
            return x
        metric = metric / metric.norm(dim=-1, keepdim=True)
        scores = metric[:, ::2] @ metric[:, 1::2].transpose(-1, -2)
        scores[:, 0] = -torch.inf
        best, partner = scores.max(dim=-1)
        order = best.argsort(dim=-1, descending=True)
        source, kept = order[:, :r], order[:, r:].sort(dim=1).values
        partner = partner.gather(1, source)

        def reduce(values: Tensor) -> Tensor:
            a, b = values[:, ::2], values[:, 1::2]
            wide = values.shape[-1]
            moved = a.gather(1, source.unsqueeze(-1).expand(-1, -1, wide))
            b = b.scatter_reduce(1, partner.unsqueeze(-1).expand(-1, -1, wide), moved, reduce="sum")
            return torch.cat([a.gather(1, kept.unsqueeze(-1).expand(-1, -1, wide)), b], dim=1)

        size = self.state["size"]
        size = torch.ones_like(x[..., :1]) if size is None else size
        new_size = reduce(size)
        x = reduce(x * size) / new_size
        first_b = kept.shape[1]
        group = torch.empty(batch, tokens, dtype=torch.int64, device=x.device)
        group[:, 1::2] = first_b + torch.arange(tokens // 2, device=x.device)
        even = torch.empty(batch, (tokens + 1) // 2, dtype=torch.int64, device=x.device)
        even.scatter_(1, kept, torch.arange(first_b, device=x.device).expand(batch, -1))
        even.scatter_(1, source, first_b + partner)
        group[:, ::2] = even
        index = self.state["token_of_patch"]
        assert index is not None
        self.state = {"size": new_size, "token_of_patch": group.gather(1, index)}
        return x


def matched_inputs(batch: int, size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Images with the smoothness of photographs, so that groups have realistic sizes: noise at several scales."""
    height, width = size
    total = torch.zeros(batch, 3, height, width, device=device)
    for cells in (4, 16, 64):
        noise = torch.randn(batch, 3, cells, cells, device=device)
        total += F.interpolate(noise, size=size, mode="bilinear")
    return total.to(dtype)
