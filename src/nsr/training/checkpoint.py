"""Where a run stands: one safetensors file, replaced as a whole, so a run killed at any moment leaves a good one."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def save(path: Path, state: dict[str, Tensor], configuration: dict[str, Any], epoch: int) -> None:
    """Write the state of a run after ``epoch`` epochs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    metadata = {"configuration": _fingerprint(configuration), "epoch": str(epoch)}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, partial, metadata=metadata)
    os.replace(partial, path)


def load(path: Path, configuration: dict[str, Any]) -> tuple[dict[str, Tensor], int] | None:
    """The state and the number of epochs done; ``None`` where there is no checkpoint of this configuration.

    A checkpoint of another configuration belongs to another run and is left to be replaced.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("configuration") != _fingerprint(configuration):
                return None
            return {name: file.get_tensor(name) for name in file.keys()}, int(metadata["epoch"])  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"The checkpoint {path} is damaged ({error}). Delete it to start this run anew.") from error


def _fingerprint(configuration: dict[str, Any]) -> str:
    return json.dumps(configuration, sort_keys=True)
