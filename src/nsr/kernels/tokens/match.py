"""The steps of matching as operators: nothing quadratic in memory, no full sort, no value read back.

Each equals a line or two of the plain rules (:mod:`nsr.tokens.matching` and the rules beside it), its twin, ties
included: among equals the lowest index comes first, and NaN is greater than every number.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.tokens.layout import GroupLayout, bucket, empty_layout

_FEW = 2048  # rows of scores that leave multiprocessors idle in tiles of 64: smaller ones, and longer steps
_ONE_PROGRAM = 128  # pairs of a sample that one program matches faster than three kernels do


@torch.library.custom_op("nsr::split_features", mutates_args=())
def split_features(x: Tensor) -> Tensor:
    """Both terms of the grid features of the mean over heads: ``[B, H, N, D] -> [B, N, 2, D]``, float16.

    They are those of :func:`nsr.tokens.similarity.grid_features`.
    """
    from nsr.kernels.tokens.match_kernels import split_features as kernel

    batch, _, length, width = x.shape
    terms = x.new_empty(batch, length, 2, width, dtype=torch.float16)
    grid = (cdiv(length, 16), batch)
    kernel[grid](*_of_heads(x), terms, length, BLOCK_N=16, num_warps=4, **_features(x))
    return terms


@split_features.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], 2, x.shape[3], dtype=torch.float16)


@torch.library.custom_op("nsr::best_match", mutates_args=())
def best_match(
    terms: Tensor,
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
        terms: Grid features of the tokens, ``[B, N, 2, D]``, see :func:`split_features`.
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
    from nsr.kernels.tokens.match_kernels import best_match as kernel

    batch, length = terms.shape[:2]
    order = None if order is None else order.contiguous()
    mask = None if valid is None else valid.contiguous().view(torch.uint8)
    best = terms.new_empty(batch, count_a, dtype=torch.float32)
    partner = terms.new_empty(batch, count_a, dtype=torch.int64)
    tile = _tile(terms)
    if batch * count_a <= _FEW:
        tile |= {"BLOCK_A": 16, "BLOCK_B": 128}
    kernel[(cdiv(count_a, tile["BLOCK_A"]), batch)](
        terms, terms if order is None else order, terms if mask is None else mask, best, partner,
        length, 0 if order is None else order.shape[1], 0 if mask is None else mask.shape[1],
        count_a, count_b, first_a, first_b, step,
        ORDERED=order is not None, MASKED=mask is not None, NOT_SELF=not_self, **tile,
    )  # fmt: skip
    return best, partner


@best_match.register_fake
def _(terms: Tensor, order: Tensor | None, valid: Tensor | None, first_a: int, count_a: int, *_: Any) -> tuple:
    shape = (terms.shape[0], count_a)
    return terms.new_empty(shape, dtype=torch.float32), terms.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("nsr::pitome_energy", mutates_args=())
def energy(terms: Tensor, margin: float) -> Tensor:
    """``mean_j ELU(cos(x_i, x_j) - margin)`` of grid features: ``[B, P, 2, D] -> [B, P]`` in fp32."""
    from nsr.kernels.tokens.match_kernels import energy as kernel

    batch, count = terms.shape[:2]
    out = terms.new_empty(batch, count, dtype=torch.float32)
    tile = _tile(terms)
    grid = (cdiv(count, tile["BLOCK_A"]), batch)
    margin = torch.tensor(margin, dtype=torch.float32, device="cpu").item()
    units = energy_units(count)
    kernel[grid](terms, out, count, margin, units, 1 / (units * count), **tile)
    return out


def energy_units(count: int) -> float:
    """In how many units 1 is cut, so that the sum of ``count`` terms below 2 is exact in 32 bits."""
    return 2.0 ** (30 - count.bit_length())


@energy.register_fake
def _(terms: Tensor, margin: float) -> Tensor:
    return terms.new_empty(terms.shape[:2], dtype=torch.float32)


@torch.library.custom_op("nsr::descending", mutates_args=())
def descending(score: Tensor) -> Tensor:
    """Positions from the highest to the lowest score, equal ones ascending: ``[B, N] -> [B, N]``, int64."""
    from nsr.kernels.tokens.match_kernels import rank_scores

    score = score.float().contiguous()
    batch, count = score.shape
    order = torch.empty_like(score, dtype=torch.int64)
    if count:
        rank_scores[(cdiv(count, 64), batch)](score, order, count, BLOCK_A=64, BLOCK_B=64)
    return order


@descending.register_fake
def _(score: Tensor) -> Tensor:
    return score.new_empty(score.shape, dtype=torch.int64)


def tome_layout(metric: Tensor, size: Tensor | None, r: int, num_prefix: int) -> GroupLayout:
    """ToMe's merge of ``r`` tokens, keys to layout in three kernels, in one where there are few tokens.

    The plan is that of :func:`nsr.tokens.tome.tome_plan`.

    Args:
        metric: What is compared, ``[B, H, N, D]``: its mean over ``H``.
        size: Sizes of the tokens, ``[B, N]``; all 1 if not given.
        r: Tokens to remove, at least 1 and at most ``P // 2``.
        num_prefix: Leading tokens that never merge.
    """
    return GroupLayout(*_tome_layout(metric, size, r, num_prefix))


@torch.library.custom_op("nsr::tome_layout", mutates_args=())
def _tome_layout(metric: Tensor, size: Tensor | None, r: int, num_prefix: int) -> list[Tensor]:
    from nsr.kernels.tokens.tome_layout_kernels import match_few, tome_layout

    batch, _, length, width = metric.shape
    first_a, first_b = num_prefix + (num_prefix > 0), num_prefix + (num_prefix == 0)
    count_a, count_b = (length - first_a + 1) // 2, (length - first_b + 1) // 2
    assert length < 1 << 15, "both ends of a match share one 32-bit number"
    layout = list(_tome_layout_like(metric, r))
    room = [layout[0].new_empty(batch, count, dtype=torch.int32) for count in (r, count_b)]
    weighed = layout[1] if size is None else size.float().contiguous()
    shared = (weighed, *layout, *room, length, count_a, count_b, first_a, first_b, num_prefix, r)
    sized = {"SIZED": size is not None, "BLOCK_C": 16}
    most = max(count_a, count_b, num_prefix)
    if most <= _ONE_PROGRAM and width <= 64:
        block = 64 if most <= 64 else _ONE_PROGRAM
        match_few[(batch,)](  # one stage: there is hardly a second tile to fetch ahead
            *_of_heads(metric), *shared, TILE_B=64, BLOCK_A=block, BLOCK_B=block, BLOCK_R=block,
            num_warps=block // 16, num_stages=1, **sized, **_features(metric),
        )  # fmt: skip
        return layout
    best, partner = best_match(split_features(metric), None, None, first_a, count_a, first_b, count_b, 2, False)
    block_a = bucket(count_a)
    tome_layout[(batch,)](
        best, partner, *shared, BLOCK_A=block_a, BLOCK_B=bucket(max(count_b, num_prefix)), BLOCK_R=bucket(r, 256),
        num_warps=4 if block_a == 64 else 8, **sized,
    )  # fmt: skip
    return layout


@_tome_layout.register_fake
def _(metric: Tensor, size: Tensor | None, r: int, num_prefix: int) -> list[Tensor]:
    return list(_tome_layout_like(metric, r))


def _tome_layout_like(metric: Tensor, r: int) -> GroupLayout:
    """Room for a layout with its members listed."""
    batch, _, length, _ = metric.shape
    return empty_layout(metric.new_empty(batch, length, dtype=torch.int64), length - r, 2 * r)


def low_bits(width: int) -> int:
    """Bits of the finer term of grid features of this width: as many as keep the sums exact."""
    return min(11, 13 - math.ceil(math.log2(width) / 2))


def _of_heads(x: Tensor) -> tuple[Any, ...]:
    """What kernels that make features take: where the heads are."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(2)


def _features(x: Tensor) -> dict[str, Any]:
    """How those kernels are compiled."""
    _, heads, _, width = x.shape
    return {
        "HEADS": heads,
        "LOW": low_bits(width),
        "WIDTH": width,
        "BLOCK_D": max(16, next_power_of_2(width)),
        "enable_fp_fusion": False,  # a product is rounded before anything is added to it
    }


def _tile(terms: Tensor) -> dict[str, Any]:
    """How score tiles are cut."""
    width = terms.shape[-1]
    return {
        "LOW": low_bits(width),
        "WIDTH": width,
        "BLOCK_C": min(64, max(16, next_power_of_2(width))),
        "BLOCK_A": 64,
        "BLOCK_B": 64,
        "num_warps": 4,
        "num_stages": 2,
    }
