"""Small timm ViTs of every family that merging serves, with weights at which every part of them shows."""

import timm
import torch

_SMALL = {"pretrained": False, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 5}

FAMILIES = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 64}),
    "vit-qk-norm": ("vit_tiny_patch16_224", {"img_size": 64, "qk_norm": True}),
    "vit-no-class-token": ("vit_tiny_patch16_224", {"img_size": 64, "class_token": False, "global_pool": "avg"}),
    "deit": ("deit_tiny_patch16_224", {"img_size": (64, 96)}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 64}),
    "deit-3": ("deit3_small_patch16_224", {"img_size": 64}),
    "dinov2-registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),
}


def make(family: str = "deit", **changes) -> torch.nn.Module:
    """A model of the family in evaluation mode. Zero-like initial values (LayerScale, class token) are stirred."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**_SMALL, **arguments, **changes}).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def images(model: torch.nn.Module, batch: int = 2) -> torch.Tensor:
    """A batch that fits the model."""
    return torch.randn(batch, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(2))


def train_a_little(model: torch.nn.Module) -> None:
    """Move every branch off its zero start, so that what it does shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "branches." in name or "spatial." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
