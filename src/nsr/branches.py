"""The branches of a model as one thing: find them, switch them off, save them, load them.

A checkpoint is one safetensors file with the branches' tensors alone, under the names they have in the model, and the
branches' configurations as JSON in its metadata. The host's own weights are never in it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nsr.residual.branch import Branch

FORMAT = "nsr-branches-1"


def find(model: nn.Module) -> dict[str, Branch]:
    """The branches of ``model`` by their module name, in the model's own order.

    Raises:
        ValueError: The model has no branch.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Branch)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no null-space branch. Attach one first: nsr.attach(model) for a PyG model, "
            "nsr.tokens.MergedViT(backbone, merger, nsr.tokens.TokenResidual()) for a timm ViT."
        )
    return found


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Run the block with every branch of ``model`` switched off: the host as it was, in place.

    Example:
        >>> with nsr.disabled(model):  # doctest: +SKIP
        ...     baseline = evaluate(model)
    """
    branches = find(model).values()
    before = [branch.enabled for branch in branches]
    for branch in branches:
        branch.enabled = False
    try:
        yield
    finally:
        for branch, enabled in zip(branches, before, strict=True):
            branch.enabled = enabled


def save(model: nn.Module, path: str | Path) -> None:
    """Write the branches of ``model``, and nothing else of it, to a safetensors file."""
    branches = find(model)
    configs = {name: branch.config for name, branch in branches.items()}
    metadata = {"format": FORMAT, "branches": json.dumps(configs)}
    save_file(_tensors(branches), path, metadata=metadata)


def load(model: nn.Module, path: str | Path) -> None:
    """Load branches saved by :func:`save` into a model that has the same branches attached.

    Everything is compared before anything is written, so a file that does not fit leaves the model as it was.

    Raises:
        ValueError: The file is no branch checkpoint, or its branches are not those of the model.
    """
    branches = find(model)
    configs, tensors = read(path)
    if configs.keys() != branches.keys():
        raise ValueError(
            f"{path} holds branches at {sorted(configs)}, the model has them at {sorted(branches)}. "
            "Attach with the same selection of sites as when it was saved."
        )
    for name, branch in branches.items():
        if configs[name] != branch.config:
            raise ValueError(
                f"{path} was saved from another branch at '{name}': there {configs[name]}, here {branch.config}. "
                "Attach with the saved configuration."
            )
    here = _tensors(branches)
    if here.keys() != tensors.keys() or any(here[key].shape != tensors[key].shape for key in here):
        wrong = sorted(
            key
            for key in here.keys() | tensors.keys()
            if key not in here or key not in tensors or here[key].shape != tensors[key].shape
        )
        raise ValueError(f"{path} does not fit the model: {wrong[:5]} are missing, extra or of another shape.")
    for name, branch in branches.items():
        prefix = f"{name}." if name else ""
        branch.load_state_dict({key: tensors[prefix + key] for key in branch.state_dict()})


def read(path: str | Path) -> tuple[dict[str, dict], dict[str, Tensor]]:
    """The configurations and the tensors of a branch checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no branch checkpoint at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  safe_open is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a branch checkpoint: its format is {metadata.get('format')!r}, expected {FORMAT!r}. "
            "Write one with nsr.save(model, path)."
        )
    try:
        configs = json.loads(metadata["branches"])
        return {str(name): dict(config) for name, config in configs.items()}, tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its branches cannot be read ({error}).") from error


def _tensors(branches: dict[str, Branch]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}" if name else key: value.detach().contiguous()
        for name, branch in branches.items()
        for key, value in branch.state_dict().items()
    }
