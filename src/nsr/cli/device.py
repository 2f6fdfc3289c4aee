"""The option ``--device``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def chosen_device(name: str | None) -> "torch.device":
    """The device of that name; a GPU, if there is one, for no name.

    Raises:
        ValueError: There is no such device here.
    """
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {name!r} is no device; expected cpu, cuda or cuda:1, for example.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: expected cpu or cuda.")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} CUDA devices. Use --device cpu.")
    return device
