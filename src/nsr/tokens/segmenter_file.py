"""A trained segmenter as one safetensors file that knows its merger, its branches and its image size."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from nsr.tokens.algm import ALGM
from nsr.tokens.branch import TokenResidual
from nsr.tokens.dtem import DTEM
from nsr.tokens.mpm import MPM
from nsr.tokens.pitome import PiToMe
from nsr.tokens.rule import MergeRule
from nsr.tokens.segmenter import Segmenter
from nsr.tokens.tome import ToMe
from nsr.tokens.vit import MergedViT

FORMAT = "nsr-segmenter-1"
RULES: dict[str, Callable[..., MergeRule]] = {rule.__name__: rule for rule in (ToMe, PiToMe, MPM, ALGM, DTEM)}


def save_segmenter(segmenter: Segmenter, path: str | Path) -> None:
    """Write all weights of a segmenter, the backbone's included, and what rebuilds it around a backbone."""
    vit = segmenter.vit
    settings = {
        "merger": _describe(vit.merger),
        "residual": None if vit.residual is None else asdict(vit.residual),
        "img_size": list(vit.backbone.patch_embed.img_size),
        "classes": segmenter.head.out_features,
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in segmenter.state_dict().items()}
    save_file(tensors, path, metadata={"format": FORMAT, "settings": json.dumps(settings)})


def load_segmenter(path: str | Path, backbone: nn.Module) -> Segmenter:
    """The segmenter of a file, around a backbone of the architecture it was trained with; its weights are replaced.

    Raises:
        ValueError: The file is no segmenter, or one of another backbone.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no segmenter at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no segmenter: its format is {metadata.get('format')!r}, expected {FORMAT!r}. Write one with "
            "nsr.tokens.save_segmenter(segmenter, path)."
        )
    try:
        settings = json.loads(metadata["settings"])
        with torch.device("meta"):  # shapes first: damaged settings could ask for any amount of memory
            own = _built(copy.deepcopy(backbone).to("meta"), settings).state_dict()
    except Exception as error:  # whatever the settings of a damaged file make their constructors say
        raise ValueError(f"{path} is damaged: its settings make no segmenter ({error}).") from error
    wrong = sorted(
        name
        for name in own.keys() | tensors.keys()
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape
    )
    if wrong:
        raise ValueError(
            f"{path} was trained with another backbone than this {type(backbone).__name__}: {', '.join(wrong[:4])} are "
            "missing, extra or of another shape."
        )
    segmenter = _built(backbone, settings)
    segmenter.load_state_dict(tensors)
    return segmenter


def _built(backbone: nn.Module, settings: dict[str, Any]) -> Segmenter:
    residual = None if settings["residual"] is None else TokenResidual(**settings["residual"])
    vit = MergedViT(backbone, _rebuild(settings["merger"]), residual, img_size=tuple(settings["img_size"]))
    return Segmenter(vit, settings["classes"])


def _describe(rule: MergeRule | None) -> dict[str, Any] | None:
    if rule is None:
        return None
    name = type(rule).__name__
    if RULES.get(name) is not type(rule):
        raise ValueError(f"A segmenter with the rule {name} cannot be saved by name; save its state_dict instead.")
    return {"rule": name, **{field.name: getattr(rule, field.name) for field in fields(rule) if field.init}}


def _rebuild(description: dict[str, Any] | None) -> MergeRule | None:
    if description is None:
        return None
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in description.items()}
    return RULES[str(settings.pop("rule"))](**settings)
