"""What a merged ViT costs: multiply-accumulates and parameters, exact, from shapes alone.

Two countings, never mixed:

* the *paper's convention*: one multiply-accumulate is one FLOP; norms, activations, indexing and upsampling are free;
  NSR's spatial write-back counts as the dense product ``[N0 × M]·[M × R]``;
* *as executed*: the products that this implementation really runs (the write-back is a gather and costs nothing), equal
  to what ``torch.utils.flop_counter`` measures on the model. See :mod:`nsr.tokens.executed`.

Letters: ``N`` tokens with the class token, ``P = N - 1`` patch tokens, ``N0`` original patches, ``d`` width, ``d_h``
head width, ``R`` code width (64), ``M`` members and ``G`` groups that NSR sees at a merge event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

CODE = 64  # R, width of a member code
GATE = 32  # hidden width of the gate


@dataclass(frozen=True)
class ViTShape:
    """Everything about a plain ViT segmenter (one class token, MLP ratio 4) that decides its cost.

    The defaults are DeiT-Tiny/16.
    """

    grid: tuple[int, int]
    classes: int
    dim: int = 192
    depth: int = 12
    heads: int = 3
    patch: int = 16

    def __post_init__(self) -> None:
        sizes = {"grid": min(self.grid), "classes": self.classes, "dim": self.dim, "depth": self.depth}
        sizes |= {"heads": self.heads, "patch": self.patch}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by {self.heads} heads; choose heads that divide it.")

    @property
    def patches(self) -> int:
        """``N0``."""
        return self.grid[0] * self.grid[1]

    @property
    def head_dim(self) -> int:
        """``d_h``."""
        return self.dim // self.heads


@dataclass(frozen=True)
class MergeEvent:
    """One merge event, as the accounting sees it.

    Attributes:
        block: The block that merges, counted from 0.
        before_block: Whether the merge precedes the block's attention (MPM) or follows it (ToMe, PiToMe).
        tokens: ``N`` before the merge.
        merged: How many tokens disappear.
        groups: ``G``, the groups that NSR decodes.
        members: ``M``, the members that NSR encodes.
        matching: Multiply-accumulates of the similarity scores.
    """

    block: int
    before_block: bool
    tokens: int
    merged: int
    groups: int
    members: int
    matching: int


def tome_events(shape: ViTShape, r: int) -> list[MergeEvent]:
    """ToMe merges ``min(r, P // 2)`` tokens after the attention of every block, while there are any to merge."""
    if r < 0:
        raise ValueError(f"ToMe merges r ≥ 0 tokens a block, got r={r}.")
    events = []
    tokens = shape.patches + 1
    for block in range(shape.depth):
        merged = min(r, (tokens - 1) // 2)
        if merged:
            sources, targets = (tokens + 1) // 2, tokens // 2  # even and odd positions
            matching = sources * targets * shape.head_dim
            events.append(MergeEvent(block, False, tokens, merged, sources, sources + merged, matching))
        tokens -= merged
    return events


def pitome_events(shape: ViTShape, keep: Fraction) -> list[MergeEvent]:
    """PiToMe merges ``floor(P (1 - keep))`` after every attention; in the second half only tokens of dense clusters."""
    keep = keep_ratio(keep)
    events = []
    patches = shape.patches
    for block in range(shape.depth):
        merged = int(patches * (1 - keep))
        if merged:
            bipartite = block < shape.depth // 2
            groups = patches // 2 if bipartite else merged
            matching = patches**2 * shape.head_dim
            events.append(MergeEvent(block, False, patches + 1, merged, groups, groups + merged, matching))
        patches -= merged
    return events


def mpm_events(shape: ViTShape, blocks: Sequence[int], pairs: Sequence[int]) -> list[MergeEvent]:
    """MPM before each block of its schedule, with the mutual pairs found there."""
    if len(blocks) != len(pairs):
        raise ValueError(f"MPM needs one pair count a block: got {len(blocks)} blocks and {len(pairs)} counts.")
    mpm_schedule(blocks, shape.depth)
    events = []
    patches = shape.patches
    for block, merged in zip(blocks, pairs, strict=True):
        if not 0 <= merged <= patches // 2:
            raise ValueError(
                f"{merged} pairs at block {block}: {patches} patch tokens are left there, so 0 to {patches // 2} pairs."
            )
        matching = patches**2 * shape.dim
        events.append(MergeEvent(block, True, patches + 1, merged, merged, 2 * merged, matching))
        patches -= merged
    return events


def keep_ratio(keep: Fraction | float | str) -> Fraction:
    """The share of tokens PiToMe keeps, as the exact decimal that was meant (``0.895`` is 179/200, not its double)."""
    exact = keep if isinstance(keep, Fraction) else Fraction(str(keep))
    if not Fraction(1, 2) <= exact < 1:
        raise ValueError(f"PiToMe keeps a share of at least 0.5 and below 1 of the tokens, got {float(exact):g}.")
    return exact


def mpm_schedule(blocks: Sequence[int], depth: int) -> None:
    """Refuse a schedule that is not strictly ascending or leaves the model."""
    if list(blocks) != sorted(set(blocks)):
        raise ValueError(f"MPM's blocks must be ascending and distinct, got {list(blocks)}.")
    for block in blocks:
        if not 0 <= block < depth:
            raise ValueError(
                f"MPM's schedule names block {block}, but a model of {depth} blocks has blocks 0 to {depth - 1}."
            )


def backbone_flops(shape: ViTShape, events: Sequence[MergeEvent]) -> int:
    """The merged segmenter without NSR; with no events, the full one."""
    d, at_block = shape.dim, {event.block: event for event in events}
    total = shape.patches * 3 * shape.patch**2 * d  # patch embedding
    tokens = shape.patches + 1
    for block in range(shape.depth):
        event = at_block.get(block)
        after = tokens - (event.merged if event else 0)
        attended = after if event and event.before_block else tokens
        total += 4 * attended * d**2 + 2 * attended**2 * d
        if event:
            total += event.matching + 2 * event.tokens * d
        total += 8 * after * d**2
        tokens = after
    return total + shape.patches * d * shape.classes


def nsr_flops(shape: ViTShape, events: Sequence[MergeEvent]) -> int:
    """What NSR adds in the paper's convention: encoder, gate, feature decoder, write-back; one spatial decoder."""
    if not events:
        return 0
    d = shape.dim
    member = CODE * d + 3 * d * GATE + GATE * CODE
    sites = sum(e.members * member + CODE * e.groups * d + CODE * shape.patches * e.members for e in events)
    return sites + CODE * shape.patches * d


def backbone_parameters(shape: ViTShape) -> int:
    """Parameters of the ViT without its classifier, plus the segmentation head: LayerNorm and a linear layer."""
    d = shape.dim
    embedding = 3 * shape.patch**2 * d + d + d + (shape.patches + 1) * d  # patches, class token, positions
    block = 12 * d**2 + 13 * d  # qkv, proj, mlp with biases; two LayerNorms
    return embedding + shape.depth * block + 2 * d + 2 * d + (d + 1) * shape.classes


def site_parameters(dim: int) -> int:
    """One NSR site: RMSNorm, encoder, gate with its two LayerNorms, feature decoder."""
    gate = 3 * dim * GATE + GATE + GATE * CODE + CODE
    return dim + CODE * dim + gate + CODE * dim + 4 * dim


def nsr_parameters(dim: int, sites: int) -> int:
    """All sites and the one spatial decoder they share."""
    return sites * site_parameters(dim) + CODE * dim if sites else 0


def gap_closure(full: float, base: float, nsr: float) -> float:
    """Share of the gap between the merged baseline and the full model that NSR closes, in per cent."""
    if full == base:
        raise ValueError(f"There is no gap to close: the full model and the baseline both have {full}.")
    return 100 * (nsr - base) / (full - base)
