"""What the block loop asks of a matching rule."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from nsr.tokens.plan import MergePlan


class MergeRule(ABC):
    """Where and how often a rule merges, and the plan it makes there.

    A rule is a small frozen dataclass of settings over a pure function. It holds no parameters and no state.

    Attributes:
        where: ``"after_attention"``: between the attention and the MLP of a block. ``"before_block"``: ahead of it.
        metric: What :meth:`plan` compares. ``"keys"``: the mean over heads of this block's keys, after any k-norm.
            ``"tokens"``: the residual stream at that place. ``"learned"``: an embedding of its own of ``norm1(x)``.
        proportional: Whether attention adds ``log(size)`` of each key to its logits.
    """

    where: ClassVar[Literal["after_attention", "before_block"]]
    metric: ClassVar[Literal["keys", "tokens", "learned"]]
    proportional: bool

    def layers(self, depth: int) -> tuple[int, ...]:
        """The blocks, counted from 0, at which the rule may merge in a ViT of ``depth`` blocks.

        Raises:
            ValueError: The settings name a block that such a ViT does not have.
        """
        return tuple(range(depth))

    @abstractmethod
    def merge_count(self, layer: int, num_patches: int, depth: int) -> int | None:
        """Tokens removed at ``layer``; ``None`` where that depends on the image. 0 means there is no event."""

    @abstractmethod
    def plan(
        self,
        metric: Tensor,
        *,
        layer: int,
        depth: int,
        size: Tensor | None = None,
        num_prefix: int = 1,
        valid: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> MergePlan | None:
        """The merge at ``layer``, or ``None`` where there is no event.

        Args:
            metric: What the rule compares, ``[B, N, D]``, prefix tokens included; keys as ``[B, H, N, D]``, of which
                the mean over heads is compared.
            layer: Block, counted from 0.
            depth: Blocks of the ViT.
            size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
            num_prefix: Leading tokens that never merge.
            valid: Which tokens are real, ``[B, N]``; all if not given. Padding is at the end.
            grid: Rows and columns of the unmerged patches.
        """


def require_count(name: str, value: object, least: int) -> None:
    """Refuse a setting that is not an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def require_layers(rule: str, layers: tuple[int, ...], depth: int) -> None:
    """Refuse a schedule that names a block the ViT does not have."""
    missing = [layer for layer in layers if not 0 <= layer < depth]
    if missing:
        raise ValueError(
            f"{rule} names block {missing[0]}, but the ViT has {depth} blocks, counted from 0: name blocks between 0 "
            f"and {depth - 1}."
        )


def require_unpadded(rule: str, valid: Tensor | None) -> None:
    """Refuse padding where a rule removes the same number of tokens from every sample."""
    if valid is not None:
        raise ValueError(
            f"{rule} removes the same number of tokens from every image, so its input has no padding; got a mask. "
            "Rules whose count depends on the image (MPM, ALGM) take padded sequences."
        )
