"""A training step that can be captured and replayed beside others, each on a stream of its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_WARM_UP = 3


class StreamedStep:
    """Call a step again and again; on a GPU on its own stream and, where asked, from a CUDA graph.

    The step takes nothing and returns nothing: it reads and writes tensors that stay where they are. Before a capture
    it runs eagerly a few times, because libraries choose their algorithms then; these are steps like any other.

    cuBLAS keeps one workspace a stream. Graphs captured on one stream would share it, and replayed at the same time
    they would write over each other's partial sums; hence the streams.

    Args:
        step: The step.
        device: Where it runs.
        capture: Whether to replay it from a CUDA graph; shapes must be static then, and nothing may read a value.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, capture: bool) -> None:
        self.step = step
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture = capture and self.stream is not None
        self._eager_calls = 0
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def context(self) -> AbstractContextManager:
        """Everything that the step reads or writes is to be touched within this context, or after :meth:`wait`."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self) -> None:
        """Wait until every step that was called is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def forget(self) -> None:
        """Capture the step anew, because its shapes have changed; one step runs eagerly before."""
        self.wait()
        self.graph = None
        self._eager_calls = min(self._eager_calls, _WARM_UP - 1)

    def __call__(self) -> None:
        """One step."""
        with self.context():
            if self.graph is not None:
                self.graph.replay()
            elif self.capture and self._eager_calls == _WARM_UP:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                    self.step()
                self.graph.replay()
            else:
                self._eager_calls += 1
                self.step()
