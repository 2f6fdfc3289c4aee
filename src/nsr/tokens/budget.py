"""What a merged ViT costs: multiply-accumulates and parameters, exact, from shapes alone.

Two countings, never mixed:

* the *paper's convention*: one multiply-accumulate is one FLOP; norms, activations, indexing and upsampling are free;
  NSR's spatial write-back counts as the dense product ``[N0 × M]·[M × R]``;
* *as executed*: the matrix products that this implementation really runs, equal to what ``torch.utils.flop_counter``
  measures on one image. The write-back is a gather and costs nothing, only members of merged groups are encoded, the
  gate's group part is computed once a group; proportional attention pays for its extra channels.

Letters: ``N`` tokens with the class token, ``P = N - 1`` patch tokens, ``N0`` original patches, ``d`` width, ``d_h``
head width, ``R`` code width (64), ``M`` members and ``G`` groups that NSR sees at a merge event.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nsr.tokens.attention import biased_width
from nsr.tokens.branch import TokenResidual
from nsr.tokens.mpm import MPM
from nsr.tokens.pitome import PiToMe
from nsr.tokens.rule import MergeRule
from nsr.tokens.tome import ToMe

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
        groups: ``G``, the groups that NSR decodes, as the paper counts them.
        members: ``M``, the members that NSR encodes, as the paper counts them.
        matching: Multiply-accumulates of the similarity scores, as the paper counts them.
        matching_executed: The same for the products that the rule really runs.
        proportional: Whether later attention weighs keys by their sizes.
    """

    block: int
    before_block: bool
    tokens: int
    merged: int
    groups: int
    members: int
    matching: int
    matching_executed: int
    proportional: bool


def merge_events(shape: ViTShape, rule: MergeRule, pairs: Sequence[int] | None = None) -> list[MergeEvent]:
    """The merge events of a rule on a model.

    Args:
        shape: The model.
        rule: ToMe, PiToMe or MPM.
        pairs: What MPM finds in one image, a count for each block of its schedule; the other rules need none.

    Raises:
        ValueError: The counts of this rule cannot be known from shapes.
    """
    if isinstance(rule, ToMe):
        return _tome_events(shape, rule)
    if isinstance(rule, PiToMe):
        return _pitome_events(shape, rule)
    if isinstance(rule, MPM):
        return _mpm_events(shape, rule, pairs)
    raise ValueError(f"The budget knows ToMe, PiToMe and MPM; {rule} has no published counting.")


def _tome_events(shape: ViTShape, rule: ToMe) -> list[MergeEvent]:
    events = []
    tokens = shape.patches + 1
    for block in rule.layers(shape.depth):
        merged = rule.merge_count(block, tokens - 1, shape.depth)
        if merged:
            # the paper's even positions have the class token among them, which no product needs
            even, odd = (tokens + 1) // 2, tokens // 2
            paper, executed = even * odd * shape.head_dim, (even - 1) * odd * shape.head_dim
            events.append(
                MergeEvent(block, False, tokens, merged, even, even + merged, paper, executed, rule.proportional)
            )
        tokens -= merged
    return events


def _pitome_events(shape: ViTShape, rule: PiToMe) -> list[MergeEvent]:
    events = []
    patches = shape.patches
    for block in rule.layers(shape.depth):
        merged = rule.merge_count(block, patches, shape.depth)
        if merged:
            half = patches // 2
            everyone = block < shape.depth // 2
            groups = half if everyone else merged
            # energy needs all pairs; the matching between the two sides is a second, smaller product
            paper = patches**2 * shape.head_dim
            sides = (patches - half) * half if everyone else merged**2
            executed = paper + sides * shape.head_dim
            events.append(
                MergeEvent(
                    block, False, patches + 1, merged, groups, groups + merged, paper, executed, rule.proportional
                )
            )
        patches -= merged
    return events


def _mpm_events(shape: ViTShape, rule: MPM, pairs: Sequence[int] | None) -> list[MergeEvent]:
    blocks = rule.layers(shape.depth)
    if pairs is None or len(blocks) != len(pairs):
        given = "none" if pairs is None else f"{len(pairs)} of them"
        raise ValueError(f"MPM on blocks {list(blocks)} needs one pair count for each of them, got {given}.")
    events = []
    patches = shape.patches
    for block, merged in zip(blocks, pairs, strict=True):
        if not 0 <= merged <= patches // 2:
            raise ValueError(
                f"{merged} pairs at block {block}: {patches} patch tokens are left there, so 0 to {patches // 2} pairs."
            )
        matching = patches**2 * shape.dim
        executed = matching if patches > 1 else 0
        events.append(MergeEvent(block, True, patches + 1, merged, merged, 2 * merged, matching, executed, False))
        patches -= merged
    return events


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


def nsr_flops(shape: ViTShape, events: Sequence[MergeEvent], residual: TokenResidual | None = None) -> int:
    """What NSR adds in the paper's convention: encoder, gate, feature decoder, write-back; one spatial decoder.

    Of the controls, feature-only and spatial-only have the parts of their path, and the one that sees merged tokens
    alone encodes one row a group.
    """
    if not events:
        return 0
    d, residual = shape.dim, residual or TokenResidual()
    code, hidden = residual.code, residual.hidden
    encoded = code * d + 3 * d * hidden + hidden * code
    total = code * shape.patches * d if residual.spatial else 0
    for event in events:
        total += encoded * (event.groups if residual.post_merge_only else event.members)
        total += code * event.groups * d if residual.feature else 0
        total += code * shape.patches * event.members if residual.spatial else 0
    return total


def executed_flops(shape: ViTShape, events: Sequence[MergeEvent], residual: TokenResidual | None) -> int:
    """The merged segmenter as executed on one image, with a residual or without."""
    d, at_block = shape.dim, {event.block: event for event in events}
    total = shape.patches * 3 * shape.patch**2 * d + shape.patches * d * shape.classes
    tokens, attention_width = shape.patches + 1, d
    for block in range(shape.depth):
        event = at_block.get(block)
        after = tokens - (event.merged if event else 0)
        attended = after if event and event.before_block else tokens
        total += 4 * attended * d**2 + 2 * attended**2 * attention_width + 8 * after * d**2
        if event:
            total += event.matching_executed
            total += _executed_site(d, event.merged, residual) if residual else 0
            if event.proportional:  # sizes differ from here on
                attention_width = shape.heads * biased_width(shape.head_dim)
        tokens = after
    return total + (residual.code * shape.patches * d if residual and residual.spatial and events else 0)


def _executed_site(dim: int, merged: int, residual: TokenResidual) -> int:
    """One site: ``merged`` tokens disappear into at most as many groups, so that many groups of two have room."""
    members, groups, code, hidden = 2 * merged, merged, residual.code, residual.hidden
    per_member = code * dim + 2 * dim * hidden + hidden * code  # encoder, gate on residual and member, gate's output
    per_group = dim * hidden + (code * dim if residual.feature else 0)  # gate on the group, feature decoder
    return members * per_member + groups * per_group


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
