"""Curves of runs for TensorBoard, where they are asked for: one folder a run, named as its result is."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nsr.experiments import record
from nsr.training.tensorboard import Log, tensorboard


@contextmanager
def curves(folder: Path | None, experiment: str, cells: Sequence[dict[str, Any]]) -> Iterator[list[Log]]:
    """Give each cell a function ``log(step, **values)`` that writes under ``folder/<experiment>/<cell>``.

    Args:
        folder: Where the runs' folders go; ``None`` turns logging off.
        experiment: Which.
        cells: The runs that are made together.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    with ExitStack() as opened:
        places = [folder and record.path_of(folder, experiment, cell).with_suffix("") for cell in cells]
        yield [opened.enter_context(tensorboard(place)) for place in places]
