"""Back to the patches, in one walk from event to event and token to token: the codes of all events, and the tokens."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_weight


@triton.jit
def walk(
    codes, groups, lengths, sample, token, inside, EVENTS: tl.constexpr, CODE: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Codes of tokens summed over the events, ``[token, c]``, and where each token is ahead of the last one."""
    c = tl.arange(0, BLOCK_C)
    token = token.to(tl.int64)
    total = tl.zeros([token.shape[0], BLOCK_C], tl.float32)
    for event in tl.static_range(EVENTS):
        before = sample * lengths[event]
        total += load_rows(codes[event] + before * CODE, token, inside, CODE, c, CODE).to(tl.float32)
        if event + 1 < EVENTS:
            token = tl.load(groups[event] + before + token, mask=inside, other=0)
    return total, token


@triton.jit(do_not_specialize=["num_prefix", "patches"])
def spread(
    codes,
    groups,
    lengths,
    out_ptr,
    num_prefix,
    patches,
    EVENTS: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """``S_p = Σ_e c_e[token of p ahead of event e]``; ``codes``, ``groups`` and ``lengths`` are tuples over the events.

    Programs are (tile of patches, sample).
    """
    sample = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.arange(0, BLOCK_C)
    inside = p < patches
    total, _ = walk(codes, groups, lengths, sample, num_prefix + p, inside, EVENTS, CODE, BLOCK_C)
    at = (sample * patches + p)[:, None] * CODE + c[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (c < CODE)[None, :])


@triton.jit(do_not_specialize=["num_prefix", "patches", "last"])
def unmerge(
    x_ptr,
    groups,
    lengths,
    out_ptr,
    num_prefix,
    patches,
    last,
    EVENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Copy to each patch the row of the token that covers it after all events, of which ``last`` are left.

    Programs are (tile of patches, sample).
    """
    sample = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    inside = p < patches
    token = (num_prefix + p).to(tl.int64)
    for event in tl.static_range(EVENTS):
        token = tl.load(groups[event] + sample * lengths[event] + token, mask=inside, other=0)
    rows = load_rows(x_ptr + sample * last * WIDTH, token, inside, WIDTH, d, WIDTH)
    at = (sample * patches + p)[:, None] * WIDTH + d[None, :]
    tl.store(out_ptr + at, rows, mask=inside[:, None] & (d < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_prefix", "patches", "last"])
def restore(
    x_ptr,
    codes,
    groups,
    lengths,
    decoder_ptr,
    out_ptr,
    num_prefix,
    patches,
    last,
    EVENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """``unmerge`` and ``W_sp spread``, added up, each rounded as it would be alone; programs are those of both.

    What takes time is the way from event to event, so channels come ``BLOCK_D`` at a time: all of them at once need so
    many registers that a multiprocessor has few programs to wait with.
    """
    sample = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.arange(0, BLOCK_C)
    inside = p < patches
    total, token = walk(codes, groups, lengths, sample, num_prefix + p, inside, EVENTS, CODE, BLOCK_C)
    token = tl.load(groups[EVENTS - 1] + sample * lengths[EVENTS - 1] + token, mask=inside, other=0)
    kind = out_ptr.dtype.element_ty
    total = total.to(kind)
    for first in range(0, WIDTH, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        added = dot(total, load_weight(decoder_ptr, CODE, c, d, CODE, WIDTH), "ieee").to(kind).to(tl.float32)
        rows = load_rows(x_ptr + sample * last * WIDTH, token, inside, WIDTH, d, WIDTH).to(tl.float32)
        at = (sample * patches + p)[:, None] * WIDTH + d[None, :]
        tl.store(out_ptr + at, (rows + added).to(kind), mask=inside[:, None] & (d < WIDTH)[None, :])
