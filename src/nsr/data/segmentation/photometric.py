"""Photometric distortion: brightness, contrast, saturation and hue, for a batch at once."""

import torch
from torch import Tensor


def distort(rgb: Tensor, colour: Tensor) -> Tensor:
    """Distort the colours of a batch, each image by its own row.

    Args:
        rgb: Between 0 and 255, ``[B, 3, H, W]``.
        colour: ``[B, 5]``: added brightness; factor of contrast; factor of saturation; degrees added to the hue; and
            whether contrast comes last (1) or before saturation and hue (0).

    Returns:
        ``[B, 3, H, W]``, between 0 and 255.
    """
    brightness, contrast, saturation, hue, last = (c.view(-1, 1, 1, 1) for c in colour.unbind(1))
    rgb = (rgb + brightness).clamp(0, 255)
    rgb = torch.where(last > 0, rgb, (rgb * contrast).clamp(0, 255))
    rgb = _turn(rgb, saturation, hue)
    return torch.where(last > 0, (rgb * contrast).clamp(0, 255), rgb)


def _turn(rgb: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Scale the saturation and turn the hue, in the HSV cone."""
    value = rgb.amax(1, keepdim=True)
    chroma = value - rgb.amin(1, keepdim=True)
    degrees = _hue(rgb, value, chroma) + hue
    chroma = torch.minimum(chroma * saturation, value)  # saturation = chroma / value, at most 1
    # a channel falls off around its own hue: red at 0, green at 120, blue at 240 degrees
    centre = (300.0 - 120.0 * torch.arange(3, device=rgb.device)).view(1, 3, 1, 1)
    sector = torch.remainder(degrees + centre, 360) / 60
    return value - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)


def _hue(rgb: Tensor, value: Tensor, chroma: Tensor) -> Tensor:
    """In degrees, ``[B, 1, H, W]``; 0 for grey."""
    red, green, blue = rgb.split(1, dim=1)
    safe = torch.where(chroma > 0, chroma, 1.0)
    of_blue = (red - green) / safe + 4
    of_green = (blue - red) / safe + 2
    of_red = (green - blue) / safe
    sector = torch.where(value == red, of_red, torch.where(value == green, of_green, of_blue))
    return torch.where(chroma > 0, 60 * sector, 0.0)
