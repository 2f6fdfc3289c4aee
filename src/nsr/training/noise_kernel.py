"""Hashed dropout of many replicas as one kernel."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsr.kernels.counts import cdiv

_BLOCK = 2048
# The multipliers of nsr.training.noise, unsigned.
_MIX_A, _MIX_B, _GOLDEN = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35), tl.constexpr(0x9E3779B9)


def masked(x: Tensor, key: Tensor, p: float) -> Tensor:
    """The fused twin of :func:`nsr.training.noise.masked`; rows ``[R, n]``, one after the other in memory."""
    replicas, length = x.shape
    out = torch.empty_like(x)
    dropout_rows[(cdiv(length, _BLOCK), replicas)](x, key, out, length, *constants(p), BLOCK=_BLOCK)
    return out


def constants(p: float) -> tuple[int, float]:
    """What the kernels take of a probability: the least hash that is kept, and the share that is."""
    return round(p * 2**32) - 2**31, 1 - p


@triton.jit
def mix(x):
    """:func:`nsr.training.noise.mix` of unsigned numbers."""
    x = (x ^ (x >> 16)) * _MIX_A
    x = (x ^ (x >> 13)) * _MIX_B
    return x ^ (x >> 16)


@triton.jit
def key_of(seed, site, step):
    """:func:`nsr.training.noise.key_of` of a dropout's site and step."""
    key = mix(mix(seed.to(tl.uint32, bitcast=True)) * _GOLDEN + site.to(tl.uint32))
    return mix(key * _GOLDEN + step.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def kept(position, key, least):
    """Whether dropout keeps the number at each position: :func:`nsr.training.noise.uniform_bits` against ``least``."""
    x = mix(position.to(tl.uint32))
    x = (x ^ key.to(tl.uint32, bitcast=True)) * _MIX_A
    x = x ^ (x.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)
    return (x * _MIX_B).to(tl.int32, bitcast=True) >= least


@triton.jit(do_not_specialize=["length", "least", "share"])
def dropout_rows(x_ptr, key_ptr, out_ptr, length, least, share, BLOCK: tl.constexpr):
    """``x / share`` where it is kept, else 0; programs are (block, replica)."""
    replica = tl.program_id(1)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = replica.to(tl.int64) * length + position
    x = tl.load(x_ptr + at, mask=position < length, other=0.0)
    keep = kept(position, tl.load(key_ptr + replica), least)
    tl.store(out_ptr + at, tl.where(keep, tl.div_rn(x, share + tl.zeros_like(x)), 0.0), mask=position < length)
