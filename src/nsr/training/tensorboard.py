"""Curves for TensorBoard, where they are asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Log = Callable[..., None]


@contextmanager
def tensorboard(folder: Path | None) -> Iterator[Log]:
    """Give a function ``log(step, **values)`` that writes scalars under ``folder``, or does nothing for ``None``.

    A name becomes a curve; ``__`` separates its group: ``log(10, train__loss=0.3)`` draws ``train/loss``.

    Args:
        folder: Where the event files go, one folder a run; ``None`` turns logging off.
    """
    if folder is None:
        yield lambda step, **values: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise ValueError("--tensorboard needs a package that is not here: pip install tensorboard") from missing
    with SummaryWriter(str(folder)) as writer:

        def log(step: int, **values: float) -> None:
            for name, value in values.items():
                writer.add_scalar(name.replace("__", "/"), value, step)

        yield log
