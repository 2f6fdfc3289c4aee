"""A timm ViT whose blocks merge tokens, with a null-space branch at every merge.

::

    image ── embed ── [ block 0 ] ── [ block 1 ] ── … ── norm ── unmerge ── (+) ──> features [B, prefix + N0, D]
                          │               │                                  │
                     merge event     merge event           spatial codes S ──┘ W_sp
                     x, size, which token covers which patch, S: one value, handed from block to block

Nothing is left on the modules between calls, so activation checkpointing, ``torch.compile`` and export see a pure
function of the image.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsr.kernels import tokens as kernels
from nsr.tokens import host
from nsr.tokens.branch import EventCodes, SpatialDecoder, TokenBranch, TokenResidual, spread_codes
from nsr.tokens.dtem import DTEM
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule
from nsr.tokens.tome import ToMe, laid_out_plan

Observer = Callable[[int, Tensor, MergePlan], None]


class TokenState(NamedTuple):
    """What travels from block to block.

    Attributes:
        x: Tokens, ``[B, N, D]``, prefix first.
        size: Patches each token stands for, ``[B, N]``; ``None`` while all are 1.
        valid: Which tokens are real, ``[B, N]``; ``None`` while all are.
        token_of_patch: The token that covers each patch, ``[B, N0]``; ``None`` while nothing has merged.
        codes: What each event so far leaves to the spatial path, see :func:`~nsr.tokens.branch.spread_codes`.
    """

    x: Tensor
    size: Tensor | None = None
    valid: Tensor | None = None
    token_of_patch: Tensor | None = None
    codes: tuple[EventCodes, ...] = ()


class MergedViT(nn.Module):
    """A plain timm ViT that merges tokens and restores the grid at its end.

    Without a merger, or where nothing merges, its output is the backbone's to the bit; with an untrained residual it is
    that of the merged ViT without one. ``forward`` classifies with the backbone's own head.

    Args:
        backbone: A timm ``VisionTransformer`` (ViT, DeiT, DeiT-III, DINOv2, …). It is used, not copied.
        merger: The matching rule; ``None`` merges nothing.
        residual: Settings of the null-space branch; ``None`` for the merged ViT alone.
        img_size: Images to work on, if not those the backbone was made for: its position embeddings are resized once.

    Example:
        >>> import nsr, timm, torch
        >>> backbone = timm.create_model("deit_tiny_patch16_224", depth=4, embed_dim=48)
        >>> vit = MergedViT(backbone, nsr.tokens.ToMe(r=29), TokenResidual())
        >>> vit.forward_features(torch.randn(1, 3, 224, 224)).shape
        torch.Size([1, 197, 48])
    """

    def __init__(
        self,
        backbone: nn.Module,
        merger: MergeRule | None,
        residual: TokenResidual | None = None,
        img_size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if merger is not None and not isinstance(merger, MergeRule):
            raise ValueError(
                f"Unknown merger {merger!r}; give a rule with its settings, such as nsr.tokens.ToMe(r=29), or None."
            )
        if merger is None and residual is not None:
            raise ValueError("A residual needs a merger: without one nothing is lost that it could give back.")
        self.backbone = host.require_plain_vit(backbone)
        if img_size is not None:
            host.resize(self.backbone, img_size)
        self.merger = merger
        self.residual = residual
        self.layers = merger.layers(self.depth) if merger is not None else ()
        self.embeddings = nn.ModuleDict()
        if isinstance(merger, DTEM):
            self.embeddings.update({str(block): merger.embedding(self.dim) for block in self.layers})
        self.branches = nn.ModuleDict()
        self.spatial: SpatialDecoder | None = None
        if merger is not None and residual is not None:
            sites = merge_sites(merger, self.depth, self.backbone.patch_embed.num_patches)
            if not sites:
                raise ValueError(
                    f"{merger} merges nothing on a grid of {_text(self.backbone.patch_embed.grid_size)}, so a residual "
                    "has no site. Merge more, or leave the residual out."
                )
            self.branches.update({str(block): TokenBranch(self.dim, residual) for block in sites})
            self.spatial = SpatialDecoder(self.dim, residual) if residual.spatial else None
        like = self.backbone.patch_embed.proj.weight
        for added in (self.embeddings, self.branches, self.spatial):
            if added is not None:
                added.to(device=like.device, dtype=like.dtype)

    @property
    def depth(self) -> int:
        """Blocks of the backbone."""
        return len(self.backbone.blocks)

    @property
    def dim(self) -> int:
        """Features ``D`` of a token."""
        return self.backbone.embed_dim

    @property
    def num_prefix_tokens(self) -> int:
        """Leading tokens that never merge: class, distillation, registers."""
        return self.backbone.num_prefix_tokens

    def freeze_backbone(self) -> None:
        """Stop the backbone's learning; the branches (and a segmenter's head) are what is left to train."""
        self.backbone.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        """Class logits from the backbone's own head, which sees the restored grid: ``[B, classes]``."""
        return self.backbone.forward_head(self.forward_features(image))

    def forward_features(self, image: Tensor) -> Tensor:
        """Normalised features on the restored grid: ``[B, C, H, W] -> [B, prefix + N0, D]``."""
        grid = host.grid_of(self.backbone, image)
        state = self.start(image)
        for block in range(self.depth):
            state = self.step(block, state, grid)
        return self.restore(state, norm=True)

    def forward_patches(self, image: Tensor) -> Tensor:
        """Those features without the prefix tokens, ``[B, N0, D]``: what a dense head reads."""
        grid = host.grid_of(self.backbone, image)
        state = self.start(image)
        for block in range(self.depth):
            state = self.step(block, state, grid)
        return self._unmerged(self.backbone.norm(state.x), state)

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]] | tuple[Tensor, list[Tensor] | list[tuple[Tensor, Tensor]]]:
        """Features after chosen blocks, each restored to the full grid as if that block were the last.

        The arguments are timm's, in its order, but for ``output_dict`` and ``attn_mask``.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}; expected 'NCHW' or 'NLC'.")
        wanted, last = feature_take_indices(self.depth, list(indices) if isinstance(indices, Sequence) else indices)
        grid = host.grid_of(self.backbone, image)
        prefix = self.num_prefix_tokens
        taken: list = []
        state = self.start(image)
        for block in range(last + 1 if stop_early else self.depth):
            state = self.step(block, state, grid)
            if block in wanted:
                features = self.restore(state, norm=norm)
                patches = features[:, prefix:]
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
                taken.append((patches, features[:, :prefix]) if return_prefix_tokens and prefix else patches)
        return taken if intermediates_only else (self.restore(state, norm=True), taken)

    def start(self, image: Tensor) -> TokenState:
        """The state before the first block."""
        return TokenState(host.embed(self.backbone, image))

    def step(self, block: int, state: TokenState, grid: tuple[int, int], observe: Observer | None = None) -> TokenState:
        """One block, with its merge event if it has one.

        Args:
            block: Counted from 0.
            state: The state before it.
            grid: Rows and columns of the unmerged patches.
            observe: Called at the merge event with the block, the tokens before the merge and the plan.
        """
        if self.backbone.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._step, block, state, grid, observe, use_reentrant=False)
        return self._step(block, state, grid, observe)

    def restore(self, state: TokenState, norm: bool) -> Tensor:
        """Unmerge, then add the decoded spatial codes: ``[B, prefix + N0, D]``."""
        x = self.backbone.norm(state.x) if norm else state.x
        if state.token_of_patch is None:
            return x
        return torch.cat([x[:, : self.num_prefix_tokens], self._unmerged(x, state)], dim=1)

    def _unmerged(self, x: Tensor, state: TokenState) -> Tensor:
        """The patches of tokens ``x`` ``[B, N, D]``, with what the spatial path adds: ``[B, N0, D]``."""
        if state.token_of_patch is None:
            return x[:, self.num_prefix_tokens :]
        layouts = [event.plan.layout for event in state.codes if event.plan.layout is not None]
        codes = [event.codes for event in state.codes if event.codes is not None]
        spatial = self.spatial if self.spatial is not None and self.spatial.enabled and codes else None
        laid_out = 0 < len(layouts) == len(state.codes) and x.dtype != torch.float64
        if (
            laid_out
            and spatial is not None
            and len(codes) == len(layouts)
            and _at_once(x, *codes, *spatial.parameters())
        ):
            return kernels.restore(x, codes, layouts, spatial.decoder.weight, self.num_prefix_tokens)
        if laid_out:
            patches = kernels.unmerge(x, layouts, self.num_prefix_tokens)
        else:
            patches = x.gather(1, state.token_of_patch.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        if spatial is not None:
            patches = patches + spatial(spread_codes(state.codes, self.num_prefix_tokens)).to(patches.dtype)
        return patches

    def _step(self, index: int, state: TokenState, grid: tuple[int, int], observe: Observer | None) -> TokenState:
        block, merger = self.backbone.blocks[index], self.merger
        assert isinstance(block, Block)
        count = self._merge_count(index, state)
        merges = count != 0
        if merger is not None and merges and merger.where == "before_block":
            state = self._merge(index, state, state.x, grid, observe)
            merges = False
        size = state.size if merger is not None and merger.proportional else None
        if size is None and state.valid is None and not merges:
            return state._replace(x=block(state.x))
        host.warn_of_hooks(block, index)
        matching = self._matching(count, state) if merges else None
        attended = host.attention_half(block, state.x, size, state.valid, matching)
        state = state._replace(x=attended.x)
        if merges:
            plan = None if attended.layout is None else laid_out_plan(attended.layout)
            state = self._merge(index, state, self._metric(index, attended), grid, observe, plan)
        return state._replace(x=host.mlp_half(block, state.x))

    def _merge_count(self, index: int, state: TokenState) -> int | None:
        """Tokens that the merge event of a block removes: 0 without one, ``None`` where that depends on the image."""
        if self.merger is None or index not in self.layers:
            return 0
        return self.merger.merge_count(index, state.x.shape[1] - self.num_prefix_tokens, self.depth)

    def _matching(self, count: int | None, state: TokenState) -> kernels.Matching | None:
        """What can be matched beside the attention; ``None`` where the rule has no kernel for it."""
        if count is None or not isinstance(self.merger, ToMe):
            return None
        return kernels.Matching(count, self.num_prefix_tokens, state.size)

    def _metric(self, index: int, attended: host.Attended) -> Tensor:
        """What the rule compares, ``[B, N, E]``; keys with their heads, ``[B, H, N, E]``."""
        assert self.merger is not None
        if self.merger.metric == "keys":
            return attended.keys
        if self.merger.metric == "learned":
            return self.embeddings[str(index)](attended.normed)
        return attended.x

    def _merge(
        self,
        index: int,
        state: TokenState,
        metric: Tensor,
        grid: tuple[int, int],
        observe: Observer | None,
        plan: MergePlan | None = None,
    ) -> TokenState:
        """The merge event of a block, by ``plan`` where it has been made already."""
        assert self.merger is not None
        prefix = self.num_prefix_tokens
        if plan is None:
            plan = self.merger.plan(
                metric,
                layer=index,
                depth=self.depth,
                size=state.size,
                num_prefix=prefix,
                valid=state.valid,
                grid=grid,
            )
        if plan is None:
            return state
        if observe is not None:
            observe(index, state.x, plan)
        x, size, _, token_of_patch, codes = state
        if size is None:
            size = torch.ones(x.shape[:2], device=x.device)
        if token_of_patch is None:
            token_of_patch = torch.arange(prefix, x.shape[1], device=x.device).expand(x.shape[0], -1)
        merged_size = plan.merged_size(size) if plan.size is None else plan.size
        branch = self._branch(index, grid)
        branch = branch if branch is not None and branch.enabled else None
        member_codes = None
        if self.training and isinstance(self.merger, DTEM):
            tokens, merged_size = self.merger.soft_merge(plan, metric, x, size, prefix)
            if branch is not None:
                update, member_codes = branch(plan, x, plan.merge(x))
                tokens = tokens if update is None else tokens + update
        elif branch is not None:
            tokens, member_codes = branch.merge(plan, x)
        else:
            tokens = plan.merge(x)
        codes = (*codes, EventCodes(member_codes, plan))
        return TokenState(tokens, merged_size, plan.valid, plan.route(token_of_patch), codes)

    def _branch(self, index: int, grid: tuple[int, int]) -> TokenBranch | None:
        if not self.branches:
            return None
        if str(index) not in self.branches:
            raise ValueError(
                f"Block {index} merges on a grid of {_text(grid)} but has no residual branch: the branches were made "
                f"for {_text(self.backbone.patch_embed.grid_size)}. Give MergedViT the img_size it will work on."
            )
        return self.branches[str(index)]  # type: ignore[return-value]


def merge_sites(merger: MergeRule, depth: int, patches: int) -> list[int]:
    """The blocks at which a merge event takes place, or may where that depends on the image."""
    sites = []
    for block in merger.layers(depth):
        count = merger.merge_count(block, patches, depth)
        if count != 0:
            sites.append(block)
        patches -= count or 0
    return sites


def _at_once(*tensors: Tensor) -> bool:
    """Whether one kernel can work on these: all in one half precision, and nobody wants a gradient."""
    kind = tensors[0].dtype
    return (
        kind in (torch.float16, torch.bfloat16)
        and all(tensor.dtype == kind for tensor in tensors)
        and not kernels.needs_grad(*tensors)
    )


def _text(grid: tuple[int, int]) -> str:
    return f"{grid[0]} × {grid[1]} patches"
