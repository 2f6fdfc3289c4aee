"""Backbone weights from a local safetensors file with timm's key names."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from nsr.tokens.host import require_plain_vit


def load_pretrained(backbone: nn.Module, path: str | Path) -> None:
    """Load a timm checkpoint, resizing its position embeddings to the backbone's grid.

    A classifier of another number of classes is left out; anything else that does not fit is an error, and the backbone
    stays as it was. Half-precision files are widened to the backbone's own format.

    Args:
        backbone: A timm ViT, at the image size it will be used with.
        path: A safetensors file, such as ``timm`` or its hub pages provide.

    Raises:
        ValueError: The file is missing, unreadable, or of another architecture.
    """
    vit = require_plain_vit(backbone)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no checkpoint at {path}.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
    own = backbone.state_dict()
    for name in [name for name in tensors if name.split(".")[0] in ("head", "head_dist")]:
        if name not in own or own[name].shape != tensors[name].shape:
            del tensors[name]
    expected = {name for name in own if name in tensors or not name.startswith(("head.", "head_dist."))}
    if "pos_embed" in own and "pos_embed" in tensors and tensors["pos_embed"].shape != own["pos_embed"].shape:
        tensors["pos_embed"] = _to_grid(vit, tensors["pos_embed"])
    wrong = sorted(
        name
        for name in expected | tensors.keys()
        if name not in tensors or name not in own or tensors[name].shape != own[name].shape
    )
    if wrong:
        raise ValueError(
            f"{path} is not a checkpoint of this {type(backbone).__name__}: {', '.join(wrong[:4])}"
            f"{' and others' if len(wrong) > 4 else ''} are missing, extra or of another shape. Create the backbone "
            "with the architecture the file was saved from."
        )
    backbone.load_state_dict(tensors, strict=False)


def _to_grid(backbone: VisionTransformer, pos_embed: Tensor) -> Tensor:
    """Position embeddings of a square grid, resized bicubically; the prefix tokens' own are kept."""
    prefix = 0 if backbone.no_embed_class else backbone.num_prefix_tokens
    return resample_abs_pos_embed(
        pos_embed.float(), new_size=list(backbone.patch_embed.grid_size), num_prefix_tokens=prefix
    )
