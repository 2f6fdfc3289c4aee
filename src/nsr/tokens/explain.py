"""What merging does to one picture, block by block: who stands for whom, and what was thrown away."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr import branches
from nsr.tokens import host
from nsr.tokens.at_rest import at_rest
from nsr.tokens.plan import MergePlan
from nsr.tokens.segmenter import Segmenter
from nsr.tokens.vit import MergedViT


@dataclass(frozen=True)
class BlockView:
    """The picture after one block.

    Attributes:
        block: Counted from 0.
        token_of_patch: Which token stands for each patch, ``[h, w]``.
        tokens: Patch tokens left.
        merged_share: Share of those tokens that stand for more than one patch.
        residual: ``‖z‖ / ‖x‖`` of the token that covered each patch at this block's merge, ``[h, w]``; 0 where nothing
            merged.
        lost_share: ``‖Z‖ / ‖X‖`` of this block's merge over all patch tokens; 0 without one.
    """

    block: int
    token_of_patch: Tensor
    tokens: int
    merged_share: float
    residual: Tensor
    lost_share: float


@dataclass(frozen=True)
class Explanation:
    """All blocks of one picture, and a segmenter's predictions if there is one.

    Attributes:
        blocks: One view a block.
        prediction: Class of every pixel, ``[H, W]``; ``None`` without a segmenter.
        prediction_without: The same with the null-space branches switched off; ``None`` where there are none.
    """

    blocks: list[BlockView]
    prediction: Tensor | None = None
    prediction_without: Tensor | None = None

    @property
    def merges(self) -> list[BlockView]:
        """The blocks in which something merged."""
        return [view for view in self.blocks if view.lost_share > 0]

    @property
    def total_residual(self) -> Tensor:
        """What each patch lost over all merges, ``[h, w]``: the root of the sum of its squared shares."""
        return torch.stack([view.residual for view in self.blocks]).square().sum(dim=0).sqrt()


@torch.no_grad()
def explain(model: MergedViT | Segmenter, image: Tensor) -> Explanation:
    """Follow one normalised image ``[C, H, W]`` through a merged ViT, in evaluation mode."""
    if image.dim() != 3:
        raise ValueError(f"One image at a time, [C, H, W]; got shape {tuple(image.shape)}.")
    vit = model.vit if isinstance(model, Segmenter) else model
    if vit.merger is None:
        raise ValueError("This ViT merges nothing, so there is nothing to explain. Give it a merger.")
    with at_rest(model):
        blocks = _follow(vit, image.unsqueeze(0))
        with_nsr = without = None
        if isinstance(model, Segmenter):
            with_nsr = model(image.unsqueeze(0)).argmax(dim=1)[0]
            if vit.branches:
                with branches.disabled(model):
                    without = model(image.unsqueeze(0)).argmax(dim=1)[0]
    return Explanation(blocks, with_nsr, without)


def _follow(vit: MergedViT, image: Tensor) -> list[BlockView]:
    grid = host.grid_of(vit.backbone, image)
    prefix, patches = vit.num_prefix_tokens, grid[0] * grid[1]
    views = []
    state = vit.start(image)
    for block in range(vit.depth):
        events: list[tuple[Tensor, MergePlan]] = []

        def observe(_: int, x: Tensor, plan: MergePlan, events: list[tuple[Tensor, MergePlan]] = events) -> None:
            events.append((x, plan))

        before = _cover(state.token_of_patch, prefix, patches, image.device)
        state = vit.step(block, state, grid, observe)
        lost = size = torch.zeros(1, device=image.device)
        residual = torch.zeros(patches, device=image.device)
        for x, plan in events:
            lost, size = plan.as_segment().residual(x)[0].norm(dim=-1), x[0].norm(dim=-1)
            residual = (lost / size)[before]
        cover = _cover(state.token_of_patch, prefix, patches, image.device)
        counts = torch.bincount(cover)[prefix:]
        views.append(
            BlockView(
                block=block,
                token_of_patch=cover.view(grid),
                tokens=int((counts > 0).sum()),
                merged_share=float((counts > 1).sum() / (counts > 0).sum()),
                residual=residual.view(grid),
                lost_share=float(lost[prefix:].norm() / size[prefix:].norm()) if events else 0.0,
            )
        )
    return views


def _cover(token_of_patch: Tensor | None, prefix: int, patches: int, device: torch.device) -> Tensor:
    # shape: [N0], the token that covers each patch of the only image
    return torch.arange(prefix, prefix + patches, device=device) if token_of_patch is None else token_of_patch[0]
