"""The steps of matching as operators: nothing quadratic in memory, no full sort, no value read back.

Each equals a line or two of the plain rules (:mod:`nsr.tokens.matching` and the rules beside it), its twin, ties
included: among equals the lowest index comes first, and NaN is greater than every number.
"""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.tokens.layout import GroupLayout, empty_layout


@torch.library.custom_op("nsr::best_match", mutates_args=())
def best_match(
    x: Tensor,
    order: Tensor | None,
    valid: Tensor | None,
    first_a: int,
    count_a: int,
    first_b: int,
    count_b: int,
    step: int,
    not_self: bool,
) -> tuple[Tensor, Tensor]:
    """The highest cosine of each a among all b, and the first b that has it.

    Both sides are tokens at regular ranks: ``a_i`` is the one at rank ``first_a + step i``, ``b_j`` that at
    ``first_b + step j``.

    Args:
        x: Features of the tokens, ``[B, N, D]``; their lengths do not matter.
        order: Token at each rank, ``[B, R]``, int64; rank and token are the same if not given.
        valid: Tokens that may be chosen, ``[B, N]``, bool; all if not given.
        first_a: Rank of the first a.
        count_a: ``A``.
        first_b: Rank of the first b.
        count_b: Number of b, at least 1.
        step: Ranks from one to the next.
        not_self: Whether ``a_i`` must not choose ``b_i``.

    Returns:
        The cosines ``[B, A]`` in fp32 (NaN as infinity), and which b, ``[B, A]``, int64.
    """
    import triton

    from nsr.kernels.tokens.match_kernels import best_match as kernel

    x = _rows(x)
    order = None if order is None else order.contiguous()
    mask = None if valid is None else valid.contiguous().view(torch.uint8)
    best = x.new_empty(x.shape[0], count_a, dtype=torch.float32)
    partner = x.new_empty(x.shape[0], count_a, dtype=torch.int64)
    tile = _tile(x)
    kernel[(triton.cdiv(count_a, tile["BLOCK_A"]), x.shape[0])](
        x, x if order is None else order, x if mask is None else mask, best, partner,
        x.stride(0), x.stride(1), 0 if order is None else order.shape[1], 0 if mask is None else mask.shape[1],
        count_a, count_b, first_a, first_b, step,
        ORDERED=order is not None, MASKED=mask is not None, NOT_SELF=not_self, **tile,
    )  # fmt: skip
    return best, partner


@best_match.register_fake
def _(x: Tensor, order: Tensor | None, valid: Tensor | None, first_a: int, count_a: int, *_: Any) -> tuple:
    shape = (x.shape[0], count_a)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("nsr::pitome_energy", mutates_args=())
def energy(x: Tensor, margin: float) -> Tensor:
    r"""``mean_j ELU(cos(x_i, x_j) - margin)``: ``[B, P, D] -> [B, P]`` in fp32; lengths do not matter."""
    import triton

    from nsr.kernels.tokens.match_kernels import energy as kernel

    x = _rows(x)
    batch, count, _ = x.shape
    out = x.new_empty(batch, count, dtype=torch.float32)
    tile = _tile(x)
    grid = (triton.cdiv(count, tile["BLOCK_A"]), batch)
    kernel[grid](x, out, x.stride(0), x.stride(1), count, margin, **tile)
    return out


@energy.register_fake
def _(x: Tensor, margin: float) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


@torch.library.custom_op("nsr::descending", mutates_args=())
def descending(score: Tensor) -> Tensor:
    """Positions from the highest to the lowest score, equal ones ascending: ``[B, N] -> [B, N]``, int64."""
    import triton

    from nsr.kernels.tokens.match_kernels import rank_scores

    score = score.float().contiguous()
    batch, count = score.shape
    order = torch.empty_like(score, dtype=torch.int64)
    if count:
        rank_scores[(triton.cdiv(count, 64), batch)](score, order, count, BLOCK_A=64, BLOCK_B=64)
    return order


@descending.register_fake
def _(score: Tensor) -> Tensor:
    return score.new_empty(score.shape, dtype=torch.int64)


def tome_layout(metric: Tensor, size: Tensor | None, r: int, num_prefix: int) -> GroupLayout:
    """ToMe's merge of ``r`` tokens, keys to layout in two kernels.

    The plan is that of :func:`nsr.tokens.tome.tome_plan`.

    Args:
        metric: What is compared, ``[B, N, D]``.
        size: Sizes of the tokens, ``[B, N]``; all 1 if not given.
        r: Tokens to remove, at least 1 and at most ``P // 2``.
        num_prefix: Leading tokens that never merge.
    """
    return GroupLayout(*_tome_layout(metric, size, r, num_prefix))


@torch.library.custom_op("nsr::tome_layout", mutates_args=())
def _tome_layout(
    metric: Tensor, size: Tensor | None, r: int, num_prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    import triton

    from nsr.kernels.tokens.match_kernels import tome_layout as kernel

    batch, length, _ = metric.shape
    first_a, first_b = num_prefix + (num_prefix > 0), num_prefix + (num_prefix == 0)
    count_a, count_b = (length - first_a + 1) // 2, (length - first_b + 1) // 2
    assert length < 1 << 15, "both ends of a match share one 32-bit number"
    best, partner = best_match(metric, None, None, first_a, count_a, first_b, count_b, 2, False)
    group = partner.new_empty(batch, length)
    share, order, start, total = empty_layout(group, length - r)
    keys, counts = order.new_empty(batch, r), order.new_empty(batch, count_b)
    kernel[(batch,)](
        best, partner, best if size is None else size.float().contiguous(), group, share, order, start, total,
        keys, share.new_empty(batch, r), counts, length, count_a, count_b, first_a, first_b, num_prefix, r,
        SIZED=size is not None,
        BLOCK_A=triton.next_power_of_2(count_a), BLOCK_B=triton.next_power_of_2(max(count_b, num_prefix)),
        BLOCK_R=triton.next_power_of_2(r), BLOCK_C=16, num_warps=4 if count_a <= 128 else 8,
    )  # fmt: skip
    return group, share, order, start, total


@_tome_layout.register_fake
def _(metric: Tensor, size: Tensor | None, r: int, num_prefix: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    group = metric.new_empty(metric.shape[:2], dtype=torch.int64)
    return group, *empty_layout(group, metric.shape[1] - r)


def _rows(x: Tensor) -> Tensor:
    """Tokens whose features lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(x: Tensor) -> dict[str, Any]:
    """How the score tiles of features like ``x`` are cut."""
    import triton

    width = max(16, triton.next_power_of_2(x.shape[-1]))
    row_bytes = width * x.element_size()
    side = 64 if row_bytes <= 512 else 32  # two tiles and their TF32 terms fit into shared memory
    return {
        "WIDTH": x.shape[-1],
        "BLOCK_D": width,
        "BLOCK_A": side,
        "BLOCK_B": side,
        "PRECISION": "tf32x3",  # of fp32 features: three TF32 products are as good as fp32's own
        "num_warps": 4,
        "num_stages": 3 if row_bytes <= 256 else 1,
    }
