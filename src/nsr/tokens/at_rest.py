"""A model in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards, whatever happens, every module has the mode that it had.

    ``model.train(was)`` would not do: a frozen backbone is in evaluation mode inside a model that trains.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
