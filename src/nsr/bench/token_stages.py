"""Where the time of a merge event goes: matching, merging, NSR, each as its own CUDA graph over all events.

Each alone: in a captured model ToMe's matching runs beside attention (:mod:`nsr.kernels.tokens.beside`), so a model
takes less than its stages added up.
"""

from collections.abc import Callable

import torch

from nsr.bench import token_models as models
from nsr.tokens import TokenBranch, TokenResidual, tome_plan
from nsr.tokens.branch import EventCodes, spread_codes

# Keys to plan; plan and tokens to merged tokens; the same with the branch, the spatial codes spread over the patches
# included: what that takes longer is what NSR costs.
STAGES = ("stage: match", "stage: merge", "stage: merge with branch")


def captured_stages(
    size: tuple[int, int], batch: int, device: torch.device, dtype: torch.dtype, width: int = 192, heads: int = 3
) -> dict[str, Callable[[], object]]:
    """Each of :data:`STAGES` over the merge events of one forward pass, ready to be timed."""
    length = size[0] // 16 * (size[1] // 16) + 1
    events = []
    for r in filter(None, models.schedule(size)[1]):
        keys = torch.randn(batch, heads, length, width // heads, device=device, dtype=dtype)
        x = torch.randn(batch, length, width, device=device, dtype=dtype)
        branch = TokenBranch(width, TokenResidual()).to(device, dtype).eval().requires_grad_(False)
        plan = tome_plan(keys, r)
        assert plan is not None
        events.append((keys, r, plan, x, branch))
        length -= r

    def match() -> None:
        for keys, r, *_ in events:
            tome_plan(keys, r)

    def merge() -> None:
        for _, _, plan, x, _ in events:
            plan.merge(x)

    def merge_with_branch() -> None:
        spread_codes([EventCodes(branch.merge(plan, x)[1], plan) for _, _, plan, x, branch in events], num_prefix=1)

    return {
        name: _captured(stage).replay for name, stage in zip(STAGES, (match, merge, merge_with_branch), strict=True)
    }


@torch.inference_mode()
def _captured(stage: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage()
    return graph
