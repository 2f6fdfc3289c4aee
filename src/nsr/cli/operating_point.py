"""``nsr operating-point``: the setting of a merger that reaches a wanted reduction of computation."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsr.cli.flops import AsJson, Classes, Depth, Dim, Heads, Patch
from nsr.cli.merger import Grid, Merger, parse_grid, require_merger

if TYPE_CHECKING:
    from nsr.tokens.budget import ViTShape
    from nsr.tokens.operating_point import OperatingPoint


def operating_point(
    merger: Merger,
    target: Annotated[float, typer.Option(help="How many times fewer FLOPs than the full model, such as 1.8.")],
    grid: Grid = "14x14",
    classes: Classes = 21,
    dim: Dim = 192,
    depth: Depth = 12,
    heads: Heads = 3,
    patch: Patch = 16,
    images: Annotated[Path | None, typer.Option(help="MPM: a folder of pictures to count pairs on.")] = None,
    weights: Annotated[Path | None, typer.Option(help="MPM: the ViT's weights, a timm safetensors file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the setting whose cost is nearest to `full / target`: ToMe's `r`, PiToMe's keep ratio, MPM's blocks.

    ToMe and PiToMe cost what their settings say. MPM costs what it finds, so it needs `--images` and `--weights`: its
    schedule is searched on at most 32 pictures and refined on at most 200, which are normalised with ImageNet's mean
    and deviation, as DeiT wants them.
    """
    from nsr.tokens.budget import ViTShape
    from nsr.tokens.operating_point import pitome_point, tome_point

    require_merger(merger)
    shape = ViTShape(parse_grid(grid), classes, dim, depth, heads, patch)
    if merger == "mpm":
        if images is None or weights is None:
            raise ValueError("MPM's pairs depend on what it sees: --merger mpm needs --images and --weights.")
        point: OperatingPoint = _mpm_point(shape, target, images, weights)
    elif images is not None or weights is not None:
        raise ValueError(f"--images and --weights are for mpm; the cost of {merger} follows from its setting.")
    else:
        point = tome_point(shape, target) if merger == "tome" else pitome_point(shape, target)
    if as_json:
        typer.echo(json.dumps({"control": point.control, "achieved": point.achieved, "base": point.base}))
    else:
        setting = {"tome": "r", "pitome": "keep", "mpm": "blocks"}[merger]
        typer.echo(
            f"{merger} with {setting} = {point.control}: {point.base / 1e9:.4f} GFLOPs, the full ÷ {point.achieved:.3f}"
        )


def _mpm_point(shape: "ViTShape", target: float, images: Path, weights: Path) -> "OperatingPoint[tuple[int, ...]]":
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from nsr.tokens import load_pretrained
    from nsr.tokens.image import load_image, normalise
    from nsr.tokens.operating_point import mpm_point
    from nsr.tokens.pairs import pair_counter

    size = (shape.grid[0] * shape.patch, shape.grid[1] * shape.patch)
    backbone = VisionTransformer(
        img_size=size,
        patch_size=shape.patch,
        embed_dim=shape.dim,
        depth=shape.depth,
        num_heads=shape.heads,
        num_classes=0,
    )
    load_pretrained(backbone, weights)
    files = sorted(p for p in images.glob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))[:200]
    if not files:
        raise ValueError(f"{images} holds no .jpg, .png or .webp pictures.")
    batch = normalise(torch.stack([load_image(file, size) for file in files]))
    coarse = mpm_point(shape, target, pair_counter(backbone, batch[:32]))
    return mpm_point(shape, target, pair_counter(backbone, batch), start=coarse.control)
