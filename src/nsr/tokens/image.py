"""A picture from a file, as a ViT wants it."""

from pathlib import Path

import torch
from torch import Tensor

# ImageNet's statistics, which DeiT and most timm ViTs were trained with
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def load_image(path: str | Path, size: tuple[int, int]) -> Tensor:
    """The centre of a picture at ``size`` (height, width), scaled so that it just covers it: ``[3, H, W]`` in [0, 1].

    Raises:
        ValueError: There is no such file, or it is no picture.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            picture = ImageOps.fit(file.convert("RGB"), (size[1], size[0]), Image.Resampling.BICUBIC)
    except FileNotFoundError:
        raise ValueError(f"There is no picture at {path}.") from None
    except (UnidentifiedImageError, IsADirectoryError):
        raise ValueError(f"{path} is not a picture that Pillow can read.") from None
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(*size, 3).permute(2, 0, 1).float() / 255


def normalise(image: Tensor) -> Tensor:
    """Pixels in [0, 1] to zero mean and unit variance: ``[..., 3, H, W]``."""
    return (image - image.new_tensor(MEAN)[:, None, None]) / image.new_tensor(STD)[:, None, None]
