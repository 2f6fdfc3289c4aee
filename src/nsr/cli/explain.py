"""``nsr explain``: what merging throws away of a picture, seen."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsr.cli.merger import Blocks, Keep, R, parse_merger

if TYPE_CHECKING:
    import torch

    from nsr.tokens import MergedViT, MergeRule, Segmenter


def explain(
    image: Annotated[Path | None, typer.Argument(help="A picture: .jpg, .png, .webp, …")] = None,
    merger: Annotated[str | None, typer.Option(help="tome, pitome or mpm; ToMe at about 1.8× if not given.")] = None,
    r: R = None,
    keep: Keep = None,
    blocks: Blocks = None,
    model: Annotated[str, typer.Option(help="A plain ViT of timm.")] = "deit_tiny_patch16_224",
    weights: Annotated[
        Path | None, typer.Option(help="Its weights, a timm safetensors file; timm downloads them if not given.")
    ] = None,
    segmenter: Annotated[
        Path | None,
        typer.Option(
            help="A segmenter from nsr.tokens.save_segmenter: also shows its prediction with and without NSR."
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH in pixels; the model's own if not given.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write, without extension; beside you if not given.")
    ] = None,
    gallery: Annotated[
        str | None, typer.Option(help="Ids of validation images, by commas: one page of trained models side by side.")
    ] = None,
    task: Annotated[str, typer.Option(help="Gallery: voc, ade20k, cityscapes or shapes.")] = "voc",
    point: Annotated[str, typer.Option(help="Gallery: the operating point of the trained models.")] = "3.4x",
    seed: Annotated[int, typer.Option(help="Gallery: their seed.")] = 0,
    outputs: Annotated[Path, typer.Option(help="Gallery: where nsr run kept their weights.")] = Path("outputs"),
    data: Annotated[
        Path | None, typer.Option(help="Gallery: the data; $NSR_DATA or the user's cache folder if not given.")
    ] = None,
) -> None:
    """Show what token merging does to a picture: one PNG, and one HTML page with a slider over the blocks.

    For every block: which patches were merged, and how much of each token the merge made invisible, ‖z‖/‖x‖.
    With `--gallery`, trained models from `nsr run`: image, truth, full, merged, merged + NSR, merge map, energy.
    """
    if (image is None) == (gallery is None):
        raise ValueError("Give either a picture or --gallery with ids of validation images.")
    if gallery is not None:
        from nsr.cli.gallery import open_gallery

        if any(given is not None for given in (r, keep, blocks, weights, segmenter, size)):
            raise ValueError(
                "A gallery shows trained models: --merger and --point name them, their settings are known."
            )
        page = out.with_name(out.name + ".html") if out is not None else Path(f"{task}-gallery.html")
        open_gallery(task, merger or "tome", point, seed, gallery, outputs, data, page)
        typer.echo(page)
        return
    assert image is not None
    from nsr.tokens import Segmenter
    from nsr.tokens.explain import explain as follow
    from nsr.tokens.explain_page import write_page
    from nsr.tokens.explain_picture import write_figure
    from nsr.tokens.image import load_image, normalise

    if segmenter is not None and (merger is not None or weights is not None or size is not None):
        raise ValueError("A segmenter brings its merger, weights and size: leave out --merger, --weights and --size.")
    if merger is None and (r is not None or keep is not None or blocks is not None):
        raise ValueError("--r, --keep and --blocks are settings of a merger: name it with --merger.")
    rule = None if merger is None else parse_merger(merger, r, keep, blocks)
    network: MergedViT | Segmenter
    network = _segmenter(model, segmenter) if segmenter is not None else _merged_vit(model, weights, size, rule)
    vit = network.vit if isinstance(network, Segmenter) else network
    picture = load_image(image, vit.backbone.patch_embed.img_size)
    trained: Any = vit.backbone.pretrained_cfg
    normalised = normalise(picture, trained["mean"], trained["std"]) if segmenter is None else normalise(picture)
    explanation = follow(network, normalised)
    target = out if out is not None else Path(f"{image.stem}-merged")
    target.parent.mkdir(parents=True, exist_ok=True)
    title = f"{image.name} through {model}, {_describe(vit.merger)}"
    png, page = (target.with_name(target.name + suffix) for suffix in (".png", ".html"))
    write_figure(png, picture, explanation, title)
    write_page(page, picture, explanation, title)
    left = explanation.blocks[-1].tokens
    forgotten = max(explanation.blocks, key=lambda view: view.lost_share)
    typer.echo(
        f"{explanation.blocks[0].token_of_patch.numel()} patches become {left} token{'s' * (left > 1)}; block "
        f"{forgotten.block} forgets most, {forgotten.lost_share:.0%}.\n{png}\n{page}"
    )


def _merged_vit(model: str, weights: Path | None, size: str | None, rule: "MergeRule | None") -> "MergedViT":
    from nsr.tokens import MergedViT, ToMe, load_pretrained

    img_size = None if size is None else _parse_size(size)
    backbone = _create(model, pretrained=weights is None)
    if weights is not None:
        load_pretrained(backbone, weights)
    vit = MergedViT(backbone, rule, img_size=img_size)
    if rule is None:
        # a fourteenth of the patches a block is the paper's 1.8x on its smallest images
        vit = MergedViT(backbone, ToMe(r=max(1, vit.backbone.patch_embed.num_patches // 14)))
    return vit


def _segmenter(model: str, path: Path) -> "Segmenter":
    from nsr.tokens import load_segmenter

    return load_segmenter(path, _create(model, pretrained=False))


def _create(model: str, pretrained: bool) -> "torch.nn.Module":
    import timm

    if not timm.is_model(model):
        raise ValueError(f"timm has no model {model!r}; timm.list_models('*deit*') lists some that merging serves.")
    try:
        return timm.create_model(model, pretrained=pretrained)
    except Exception as error:  # what a failed download raises is up to the hub's client
        if not pretrained:
            raise
        raise ValueError(
            f"timm could not load weights for {model} ({error}). Give a local file with --weights."
        ) from error


def _describe(rule: "MergeRule | None") -> str:
    """The rule and its chosen settings: ``ToMe, r = 14``."""
    assert is_dataclass(rule)
    chosen = [f for f in fields(rule) if f.init and getattr(rule, f.name) != f.default]
    return ", ".join([type(rule).__name__, *(f"{f.name} = {getattr(rule, f.name)}" for f in chosen)])


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--size {text!r} is not HEIGHTxWIDTH in pixels, such as 224x224.")
    return int(height), int(width)
