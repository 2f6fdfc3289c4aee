"""A picture from a file, as a ViT wants it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# ImageNet's statistics: DeiT's, and those that segmenters are trained with here
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


def normalise(image: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Pixels in [0, 1] as a model was trained with them, ``[..., 3, H, W]``; timm has both in ``pretrained_cfg``."""
    return (image - image.new_tensor(mean)[:, None, None]) / image.new_tensor(std)[:, None, None]
