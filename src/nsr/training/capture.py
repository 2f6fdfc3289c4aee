"""A training step as one CUDA graph: its launches are recorded once and then replayed as a whole."""

import warnings
from collections.abc import Callable

import torch

from nsr.kernels.member_order import one_capture

_WARM_UP = 3
_ATTEMPTS = 2


class CapturedStep:
    """Call a step again and again; on a GPU from a CUDA graph, elsewhere as it is.

    The step takes nothing and returns nothing: it reads and writes tensors that stay where they are. Its first calls
    run eagerly (libraries choose their algorithms then) and count as steps like any other. A capture can fail because a
    library loads a kernel in it that the eager calls did not need (cuBLAS does, now and then); the kernel is there
    afterwards, so a step is captured once more before it is left to run eagerly for good.

    Args:
        step: The step.
        device: Where it runs.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        self._eager_calls = _WARM_UP if device.type == "cuda" else -1  # counts down to the capture
        self._attempts = _ATTEMPTS

    def __call__(self) -> None:
        """One step."""
        if self.graph is not None:
            self.graph.replay()
        elif self._eager_calls == 0:
            self._capture()
        elif self._eager_calls > 0:
            self._eager_calls -= 1
            self._on_side_stream()
        else:
            self.step()

    def _on_side_stream(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph), one_capture():
                self.step()
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self._attempts -= 1
            self._eager_calls = _WARM_UP if self._attempts else -1
            if not self._attempts:
                warnings.warn(f"The step could not be captured in a CUDA graph and runs eagerly: {error}", stacklevel=3)
            self.step()
            return
        self.graph = graph
        graph.replay()
