"""Where the time of a merge event goes: matching, merging, NSR, each as its own CUDA graph over all events."""

from collections.abc import Callable

import torch

from nsr.bench import token_models as models
from nsr.bench.interleaved import interleaved
from nsr.tokens import TokenBranch, TokenResidual, tome_plan
from nsr.tokens.branch import write_back


def stage_times(
    size: tuple[int, int], batch: int, device: torch.device, dtype: torch.dtype, width: int = 192, head: int = 64
) -> dict[str, float]:
    """Milliseconds of each stage, summed over the merge events of one forward pass.

    ``matching``: keys to plan. ``merging``: plan and tokens to merged tokens. ``nsr``: what the branch adds to that,
    the write-back included.
    """
    removed = models.schedule(size)[1]
    length = size[0] // 16 * (size[1] // 16) + 1
    patches = length - 1
    events = []
    for r in filter(None, removed):
        metric = torch.randn(batch, length, head, device=device, dtype=dtype)
        x = torch.randn(batch, length, width, device=device, dtype=dtype)
        covering = torch.randint(1, length, (batch, patches), device=device)
        branch = TokenBranch(width, TokenResidual()).to(device, dtype).eval().requires_grad_(False)
        plan = tome_plan(metric, r)
        assert plan is not None
        events.append((metric, r, plan, x, branch, covering))
        length -= r
    codes = torch.zeros(batch, patches, TokenResidual().code, device=device)

    def match() -> None:
        for metric, r, *_ in events:
            tome_plan(metric, r)

    def merge() -> None:
        for _, _, plan, x, _, _ in events:
            plan.merge(x)

    def merge_with_branch() -> None:
        for _, _, plan, x, branch, covering in events:
            _, written = branch.merge(plan, x)
            codes.add_(write_back(written, covering))

    graphs = {stage.__name__: _captured(stage).replay for stage in (match, merge, merge_with_branch)}
    times = interleaved(graphs, device, rounds=5, seconds=0.05)
    merging, both = times["merge"].median, times["merge_with_branch"].median
    return {"matching": times["match"].median, "merging": merging, "nsr": both - merging}


@torch.inference_mode()
def _captured(stage: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage()
    return graph
