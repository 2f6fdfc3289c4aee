"""Where a run stands: safetensors files, each written whole, the last two kept; a run killed at any moment goes on.

The newest is ``<path>``, the one before ``<path>.previous``. A checksum in the metadata covers everything else: a file
that has rotted is noticed, not trained on.
"""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nsr.training import interruption
from nsr.training.whole_file import replacing, synchronise

State = dict[str, Tensor]


class Checkpoint(NamedTuple):
    """What a run goes on from.

    Attributes:
        state: Every tensor that training changes.
        epoch: Epochs done.
        seconds: How long they took, over all parts of a run that was interrupted.
    """

    state: State
    epoch: int
    seconds: float


class Keeper:
    """The checkpoints of one run: about one a minute, and one when it is stopped.

    Args:
        path: Where to keep them; ``None`` keeps nothing.
        configuration: What makes a checkpoint that of this run.
        every: Seconds between two.
        writes: Whether this process writes them; of several that make one run, one does and all resume.

    Attributes:
        earlier: Seconds that the parts of the run before this one took.
    """

    def __init__(
        self, path: Path | None, configuration: dict[str, Any], every: float = 60.0, writes: bool = True
    ) -> None:
        self.path, self.configuration, self.every, self.writes = path, configuration, every, writes
        self.earlier = 0.0
        self._began = self._saved = time.monotonic()

    def resume(self) -> Checkpoint | None:
        """What there is to go on from, see :func:`load`."""
        found = None if self.path is None else load(self.path, self.configuration)
        self.earlier = found.seconds if found else 0.0
        return found

    def keep(self, state: Callable[[], State], epoch: int, stopped: bool = False) -> None:
        """Write a checkpoint after ``epoch`` epochs if it is time to, or the last one. ``state`` is asked only then."""
        if self.path is None or not self.writes:
            return
        if stopped or interruption.requested() or time.monotonic() - self._saved >= self.every:
            seconds = self.earlier + time.monotonic() - self._began
            save(self.path, state(), self.configuration, epoch, seconds)
            self._saved = time.monotonic()

    def finish(self) -> None:
        """The run is over: remove its checkpoints."""
        if self.path is not None and self.writes:
            remove(self.path)


def save(path: Path, state: State, configuration: dict[str, Any], epoch: int, seconds: float = 0.0) -> None:
    """Write the state of a run after ``epoch`` epochs, ``seconds`` long; the checkpoint before it is kept beside it.

    Raises:
        ValueError: It cannot be written, for want of room for example. The last two stay as they were.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    metadata = {"configuration": _fingerprint(configuration), "epoch": str(epoch), "seconds": str(seconds)}
    metadata["checksum"] = _checksum(state, metadata)
    try:
        with replacing(path) as partial:
            save_file(state, partial, metadata=metadata)
            synchronise(partial)
            if path.is_file():
                os.replace(path, _previous(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"The checkpoint {path} cannot be written ({error}). The one before it is kept: free some room, or choose "
            "another folder, and start the run again."
        ) from error


def load(path: Path, configuration: dict[str, Any]) -> Checkpoint | None:
    """The newest checkpoint; ``None`` where there is no checkpoint of this configuration.

    A checkpoint of another configuration belongs to another run and is left to be replaced. A damaged one is passed
    over, with a warning, for the one before it.

    Raises:
        ValueError: Both are damaged.
    """
    damaged = []
    for candidate in (path, _previous(path)):
        if not candidate.is_file():
            continue
        try:
            found = _read(candidate, configuration)
        except ValueError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(f"{damaged[0]} The run goes on from the checkpoint before it.", stacklevel=2)
        return found
    if damaged:
        raise ValueError(f"{' '.join(damaged)} Delete {path} to start this run anew.")
    return None


def configuration_of(path: Path) -> dict[str, Any] | None:
    """What made the checkpoint that of its run; ``None`` where the file is damaged or gone."""
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})["configuration"])
    except (SafetensorError, OSError, ValueError, KeyError):
        return None
    return found if isinstance(found, dict) else None


def remove(path: Path) -> None:
    """Remove the checkpoints of a run, where there are any."""
    path.unlink(missing_ok=True)
    _previous(path).unlink(missing_ok=True)


def _read(path: Path, configuration: dict[str, Any]) -> Checkpoint | None:
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        if metadata.pop("checksum", None) != _checksum(state, metadata):
            raise ValueError("its checksum is wrong")
        if metadata["configuration"] != _fingerprint(configuration):
            return None
        seconds = float(metadata.get("seconds", 0))  # earlier checkpoints do not tell
        return Checkpoint(state, int(metadata["epoch"]), seconds)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"The checkpoint {path} is damaged ({error}).") from error


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _fingerprint(configuration: dict[str, Any]) -> str:
    return json.dumps(configuration, sort_keys=True)


def _checksum(state: State, metadata: dict[str, str]) -> str:
    """Over names, shapes, dtypes and bytes of the tensors, and what is said about them."""
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
