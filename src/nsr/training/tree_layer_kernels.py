"""One tree layer as a kernel forward and a kernel backward; names follow ``tree_layer.py``.

``x0`` is a node's own state, ``x1`` and ``x2`` are its children's. A tile of nodes stays in registers from the gathered
rows to the result. The backward kernel computes everything anew; each program adds up the gradients of the weights, and
that of the blank row, over its tiles. A layer's weights are one stretch of numbers, in which ``W_...`` and ``B_...``
are the places of the matrices and vectors.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.training.tree_product import product

EPS = tl.constexpr(1e-5)


@triton.jit
def matrix(w_ptr, AT: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """A ``D x D`` matrix among the weights."""
    i = tl.arange(0, D)
    return tl.load(w_ptr + AT + i[:, None] * STRIDE + i[None, :])


@triton.jit
def vector(w_ptr, AT: tl.constexpr, D: tl.constexpr):
    """A vector among the weights, as a row."""
    return tl.load(w_ptr + AT + tl.arange(0, D))[None, :]


@triton.jit
def forth(x, w_ptr, AT: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """``x W^T``."""
    return product(x, tl.trans(matrix(w_ptr, AT, STRIDE, D)))


@triton.jit
def back(dy, w_ptr, AT: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """``dy W``, the gradient of ``x`` in ``y = x W^T``."""
    return product(dy, matrix(w_ptr, AT, STRIDE, D))


@triton.jit
def outer(dy, x):
    """``dy^T x``, the gradient of ``W`` in ``y = x W^T``."""
    return product(tl.trans(dy), x)


@triton.jit
def gelu_cdf(x):
    """The normal distribution function."""
    return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def gelu(x):
    """GELU, exact."""
    return x * gelu_cdf(x)


@triton.jit
def gelu_slope(x):
    """The derivative of GELU."""
    return gelu_cdf(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def normed(x, D: tl.constexpr):
    """``(x - mean) / std`` of each row, and ``1 / std``."""
    centred = x - tl.sum(x, 1)[:, None] / D
    scale = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / D + EPS)
    return centred * scale, scale


@triton.jit
def normed_back(grad, hat, scale, D: tl.constexpr):
    """The gradient of ``x`` from that of the normed ``x``."""
    mean = tl.sum(grad, 1)[:, None] / D
    along = tl.sum(grad * hat, 1)[:, None] / D
    return scale * (grad - mean - hat * along)


@triton.jit
def load_members(
    rows_ptr, members_ptr, t_ptr, place_ptr, node, inside, first_pair, pairs, own_moves, D: tl.constexpr
):  # fmt: skip
    """Rows and states of a node and its children, 0 where there is none, and the coefficients.

    From ``first_pair`` on nodes are the roots of pairs, whose rows depend on the batch.
    """
    d = tl.arange(0, D)[None, :]
    pair = node - first_pair
    moves = inside & (pair >= 0)
    i0 = tl.load(members_ptr + node * 3, mask=inside, other=-1)
    i1 = tl.load(members_ptr + node * 3 + 1, mask=inside, other=-1)
    i2 = tl.load(members_ptr + node * 3 + 2, mask=inside, other=-1)
    i0 += tl.load(place_ptr + pair, mask=moves, other=0).to(tl.int32) * own_moves
    i1 += tl.load(place_ptr + pairs + 2 * pair, mask=moves, other=0).to(tl.int32)
    i2 += tl.load(place_ptr + pairs + 2 * pair + 1, mask=moves, other=0).to(tl.int32)
    x0 = tl.load(rows_ptr + i0[:, None] * D + d, mask=(i0 >= 0)[:, None], other=0.0)
    x1 = tl.load(rows_ptr + i1[:, None] * D + d, mask=(i1 >= 0)[:, None], other=0.0)
    x2 = tl.load(rows_ptr + i2[:, None] * D + d, mask=(i2 >= 0)[:, None], other=0.0)
    t0 = tl.load(t_ptr + node * 2, mask=inside, other=1.0)[:, None]
    t1 = tl.load(t_ptr + node * 2 + 1, mask=inside, other=1.0)[:, None]
    return i0, i1, i2, x0, x1, x2, t0, t1


@triton.jit
def residuals(x0, x1, x2, s0, s1, w_ptr, COPIES: tl.constexpr, W_MESSAGE: tl.constexpr, D: tl.constexpr):
    """``z_i = m_i - s_i u`` with unit coefficients ``s``."""
    m0, m1, m2 = (
        forth(x0, w_ptr, W_MESSAGE, D, D),
        forth(x1, w_ptr, W_MESSAGE, D, D),
        forth(x2, w_ptr, W_MESSAGE, D, D),
    )
    u = COPIES * s0 * m0 + s1 * (m1 + m2)
    return m0 - s0 * u, m1 - s1 * u, m2 - s1 * u


@triton.jit
def hidden(x, z, node, w_ptr, W_HIDDEN: tl.constexpr, D: tl.constexpr):
    """The gate's hidden layer before GELU, ``Ws x + Wz z`` and the node's part."""
    return forth(x, w_ptr, W_HIDDEN, 3 * D, D) + forth(z, w_ptr, W_HIDDEN + 2 * D, 3 * D, D) + node


@triton.jit(do_not_specialize=["read", "nodes", "first_pair", "pairs", "own_moves", "w_stride"])
def layer_forward(
    rows_ptr, members_ptr, t_ptr, place_ptr, w_ptr, out_ptr, aggregate_ptr, read, nodes, first_pair, pairs, own_moves,
    w_stride,
    COPIES: tl.constexpr, BRANCH: tl.constexpr, HOST: tl.constexpr, SAGE: tl.constexpr,
    W_MESSAGE: tl.constexpr, W_HIDDEN: tl.constexpr, B_HIDDEN: tl.constexpr, W_GATE: tl.constexpr,
    B_GATE: tl.constexpr, NORM_W: tl.constexpr, NORM_B: tl.constexpr, W_FIRST: tl.constexpr, B_FIRST: tl.constexpr,
    W_SECOND: tl.constexpr, B_SECOND: tl.constexpr, W_CONV: tl.constexpr, B_CONV: tl.constexpr, W_ROOT: tl.constexpr,
    UPDATE_W: tl.constexpr, UPDATE_B: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Without ``HOST`` the aggregate is stored, and the result is the node's own state and the branch's update."""
    replica = tl.program_id(1).to(tl.int64)
    rows_ptr += replica * read * D
    place_ptr += replica * 3 * pairs
    w_ptr += replica * w_stride
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = node < nodes
    at = (replica * nodes + node)[:, None] * D + tl.arange(0, D)[None, :]
    _, _, _, x0, x1, x2, t0, t1 = load_members(
        rows_ptr, members_ptr, t_ptr, place_ptr, node, inside, first_pair, pairs, own_moves, D
    )
    y = COPIES * t0 * x0 + t1 * (x1 + x2)
    out = x0
    if HOST:
        r = forth(y, w_ptr, W_CONV, D, D) + vector(w_ptr, B_CONV, D)
        if SAGE:
            r += forth(x0, w_ptr, W_ROOT, D, D)
        hat, _ = normed(r, D)
        out += gelu(hat * vector(w_ptr, UPDATE_W, D) + vector(w_ptr, UPDATE_B, D))
    else:
        tl.store(aggregate_ptr + at, y, mask=inside[:, None])
    if BRANCH:
        length = tl.rsqrt(COPIES * t0 * t0 + 2 * t1 * t1)
        z0, z1, z2 = residuals(x0, x1, x2, t0 * length, t1 * length, w_ptr, COPIES, W_MESSAGE, D)
        target = forth(x0, w_ptr, W_HIDDEN + D, 3 * D, D) + vector(w_ptr, B_HIDDEN, D)
        bias = vector(w_ptr, B_GATE, D)
        v = (
            COPIES
            * z0
            * tl.sigmoid(forth(gelu(hidden(x0, z0, target, w_ptr, W_HIDDEN, D)), w_ptr, W_GATE, D, D) + bias)
        )
        v += z1 * tl.sigmoid(forth(gelu(hidden(x1, z1, target, w_ptr, W_HIDDEN, D)), w_ptr, W_GATE, D, D) + bias)
        v += z2 * tl.sigmoid(forth(gelu(hidden(x2, z2, target, w_ptr, W_HIDDEN, D)), w_ptr, W_GATE, D, D) + bias)
        hat, _ = normed(v * tl.rsqrt(COPIES + 2.0), D)
        n = hat * vector(w_ptr, NORM_W, D) + vector(w_ptr, NORM_B, D)
        o = forth(n, w_ptr, W_FIRST, D, D) + vector(w_ptr, B_FIRST, D)
        out += forth(gelu(o), w_ptr, W_SECOND, D, D) + vector(w_ptr, B_SECOND, D)
    tl.store(out_ptr + at, out, mask=inside[:, None])


@triton.jit
def store_matrix(ptr, x, AT: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """Undo :func:`matrix`."""
    i = tl.arange(0, D)
    tl.store(ptr + AT + i[:, None] * STRIDE + i[None, :], x)


@triton.jit
def store_vector(ptr, x, AT: tl.constexpr, D: tl.constexpr):
    """Undo :func:`vector`."""
    tl.store(ptr + AT + tl.arange(0, D), x)


@triton.jit(
    do_not_specialize=[
        "read", "nodes", "first_pair", "pairs", "own_moves", "blank", "w_stride", "part_stride", "tiles_each"
    ]
)  # fmt: skip
def layer_backward(
    rows_ptr, members_ptr, t_ptr, place_ptr, w_ptr, grad_ptr, d_aggregate_ptr, d_own_ptr, d_child_ptr, part_ptr,
    read, nodes, first_pair, pairs, own_moves, blank, w_stride, part_stride, tiles_each,
    COPIES: tl.constexpr, BRANCH: tl.constexpr, HOST: tl.constexpr, SAGE: tl.constexpr,
    W_MESSAGE: tl.constexpr, W_HIDDEN: tl.constexpr, B_HIDDEN: tl.constexpr, W_GATE: tl.constexpr,
    B_GATE: tl.constexpr, NORM_W: tl.constexpr, NORM_B: tl.constexpr, W_FIRST: tl.constexpr, B_FIRST: tl.constexpr,
    W_SECOND: tl.constexpr, B_SECOND: tl.constexpr, W_CONV: tl.constexpr, B_CONV: tl.constexpr, W_ROOT: tl.constexpr,
    UPDATE_W: tl.constexpr, UPDATE_B: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of each node's own state and of its children; a part of those of the weights and of the blank row."""
    replica = tl.program_id(1).to(tl.int64)
    rows_ptr += replica * read * D
    place_ptr += replica * 3 * pairs
    w_ptr += replica * w_stride
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * part_stride
    d = tl.arange(0, D)[None, :]
    root_k = tl.rsqrt(COPIES + 2.0)

    dw_message = tl.zeros([D, D], tl.float32)
    dw_source = tl.zeros([D, D], tl.float32)
    dw_target = tl.zeros([D, D], tl.float32)
    dw_residual = tl.zeros([D, D], tl.float32)
    dw_gate = tl.zeros([D, D], tl.float32)
    dw_first = tl.zeros([D, D], tl.float32)
    dw_second = tl.zeros([D, D], tl.float32)
    dw_conv = tl.zeros([D, D], tl.float32)
    dw_root = tl.zeros([D, D], tl.float32)
    db_hidden = tl.zeros([D], tl.float32)
    db_gate = tl.zeros([D], tl.float32)
    d_norm_w = tl.zeros([D], tl.float32)
    d_norm_b = tl.zeros([D], tl.float32)
    db_first = tl.zeros([D], tl.float32)
    db_second = tl.zeros([D], tl.float32)
    db_conv = tl.zeros([D], tl.float32)
    d_update_w = tl.zeros([D], tl.float32)
    d_update_b = tl.zeros([D], tl.float32)
    d_blank = tl.zeros([D], tl.float32)

    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        node = tile * BLOCK + tl.arange(0, BLOCK)
        inside = node < nodes
        at = (replica * nodes + node)[:, None] * D + d
        grad = tl.load(grad_ptr + at, mask=inside[:, None], other=0.0)
        i0, i1, i2, x0, x1, x2, t0, t1 = load_members(
            rows_ptr, members_ptr, t_ptr, place_ptr, node, inside, first_pair, pairs, own_moves, D
        )
        dx0 = grad
        if HOST:
            y = COPIES * t0 * x0 + t1 * (x1 + x2)
            r = forth(y, w_ptr, W_CONV, D, D) + vector(w_ptr, B_CONV, D)
            if SAGE:
                r += forth(x0, w_ptr, W_ROOT, D, D)
            hat, scale = normed(r, D)
            update_w = vector(w_ptr, UPDATE_W, D)
            dk = grad * gelu_slope(hat * update_w + vector(w_ptr, UPDATE_B, D))
            d_update_w += tl.sum(dk * hat, 0)
            d_update_b += tl.sum(dk, 0)
            dr = normed_back(dk * update_w, hat, scale, D)
            dw_conv += outer(dr, y)
            db_conv += tl.sum(dr, 0)
            dy = back(dr, w_ptr, W_CONV, D, D)
            if SAGE:
                dw_root += outer(dr, x0)
                dx0 += back(dr, w_ptr, W_ROOT, D, D)
        else:
            dy = tl.load(d_aggregate_ptr + at, mask=inside[:, None], other=0.0)
        dx0 += COPIES * t0 * dy
        dx1 = t1 * dy
        dx2 = t1 * dy
        if BRANCH:
            length = tl.rsqrt(COPIES * t0 * t0 + 2 * t1 * t1)
            s0, s1 = t0 * length, t1 * length
            z0, z1, z2 = residuals(x0, x1, x2, s0, s1, w_ptr, COPIES, W_MESSAGE, D)
            target = forth(x0, w_ptr, W_HIDDEN + D, 3 * D, D) + vector(w_ptr, B_HIDDEN, D)
            p0 = hidden(x0, z0, target, w_ptr, W_HIDDEN, D)
            p1 = hidden(x1, z1, target, w_ptr, W_HIDDEN, D)
            p2 = hidden(x2, z2, target, w_ptr, W_HIDDEN, D)
            bias = vector(w_ptr, B_GATE, D)
            g0 = tl.sigmoid(forth(gelu(p0), w_ptr, W_GATE, D, D) + bias)
            g1 = tl.sigmoid(forth(gelu(p1), w_ptr, W_GATE, D, D) + bias)
            g2 = tl.sigmoid(forth(gelu(p2), w_ptr, W_GATE, D, D) + bias)
            hat, scale = normed((COPIES * z0 * g0 + z1 * g1 + z2 * g2) * root_k, D)
            norm_w = vector(w_ptr, NORM_W, D)
            n = hat * norm_w + vector(w_ptr, NORM_B, D)
            o = forth(n, w_ptr, W_FIRST, D, D) + vector(w_ptr, B_FIRST, D)
            # the output network and its norm
            dw_second += outer(grad, gelu(o))
            db_second += tl.sum(grad, 0)
            do = back(grad, w_ptr, W_SECOND, D, D) * gelu_slope(o)
            dw_first += outer(do, n)
            db_first += tl.sum(do, 0)
            dn = back(do, w_ptr, W_FIRST, D, D)
            d_norm_w += tl.sum(dn * hat, 0)
            d_norm_b += tl.sum(dn, 0)
            dv = normed_back(dn * norm_w, hat, scale, D) * root_k
            # gates
            dq0, dq1, dq2 = COPIES * dv * z0 * g0 * (1 - g0), dv * z1 * g1 * (1 - g1), dv * z2 * g2 * (1 - g2)
            dw_gate += outer(dq0, gelu(p0)) + outer(dq1, gelu(p1)) + outer(dq2, gelu(p2))
            db_gate += tl.sum(dq0 + dq1 + dq2, 0)
            dp0 = back(dq0, w_ptr, W_GATE, D, D) * gelu_slope(p0)
            dp1 = back(dq1, w_ptr, W_GATE, D, D) * gelu_slope(p1)
            dp2 = back(dq2, w_ptr, W_GATE, D, D) * gelu_slope(p2)
            dw_source += outer(dp0, x0) + outer(dp1, x1) + outer(dp2, x2)
            dw_residual += outer(dp0, z0) + outer(dp1, z1) + outer(dp2, z2)
            dp = dp0 + dp1 + dp2
            dw_target += outer(dp, x0)
            db_hidden += tl.sum(dp, 0)
            # residuals and messages
            dz0 = COPIES * dv * g0 + back(dp0, w_ptr, W_HIDDEN + 2 * D, 3 * D, D)
            dz1 = dv * g1 + back(dp1, w_ptr, W_HIDDEN + 2 * D, 3 * D, D)
            dz2 = dv * g2 + back(dp2, w_ptr, W_HIDDEN + 2 * D, 3 * D, D)
            du = s0 * dz0 + s1 * (dz1 + dz2)
            dm0, dm1, dm2 = dz0 - COPIES * s0 * du, dz1 - s1 * du, dz2 - s1 * du
            dw_message += outer(dm0, x0) + outer(dm1, x1) + outer(dm2, x2)
            dx0 += back(dp0, w_ptr, W_HIDDEN, 3 * D, D) + back(dm0, w_ptr, W_MESSAGE, D, D)
            dx0 += back(dp, w_ptr, W_HIDDEN + D, 3 * D, D)
            dx1 += back(dp1, w_ptr, W_HIDDEN, 3 * D, D) + back(dm1, w_ptr, W_MESSAGE, D, D)
            dx2 += back(dp2, w_ptr, W_HIDDEN, 3 * D, D) + back(dm2, w_ptr, W_MESSAGE, D, D)
        d_blank += tl.sum(tl.where((i0 == blank)[:, None], dx0, 0.0), 0)
        d_blank += tl.sum(tl.where((i1 == blank)[:, None], dx1, 0.0), 0)
        d_blank += tl.sum(tl.where((i2 == blank)[:, None], dx2, 0.0), 0)
        tl.store(d_own_ptr + at, dx0, mask=inside[:, None])
        at_child = ((replica * nodes + node) * 2)[:, None] * D + d
        tl.store(d_child_ptr + at_child, dx1, mask=inside[:, None])
        tl.store(d_child_ptr + at_child + D, dx2, mask=inside[:, None])

    tl.store(part_ptr + part_stride - D + tl.arange(0, D), d_blank)
    if BRANCH:
        store_matrix(part_ptr, dw_message, W_MESSAGE, D, D)
        store_matrix(part_ptr, dw_source, W_HIDDEN, 3 * D, D)
        store_matrix(part_ptr, dw_target, W_HIDDEN + D, 3 * D, D)
        store_matrix(part_ptr, dw_residual, W_HIDDEN + 2 * D, 3 * D, D)
        store_matrix(part_ptr, dw_gate, W_GATE, D, D)
        store_matrix(part_ptr, dw_first, W_FIRST, D, D)
        store_matrix(part_ptr, dw_second, W_SECOND, D, D)
        store_vector(part_ptr, db_hidden, B_HIDDEN, D)
        store_vector(part_ptr, db_gate, B_GATE, D)
        store_vector(part_ptr, d_norm_w, NORM_W, D)
        store_vector(part_ptr, d_norm_b, NORM_B, D)
        store_vector(part_ptr, db_first, B_FIRST, D)
        store_vector(part_ptr, db_second, B_SECOND, D)
    if HOST:
        store_matrix(part_ptr, dw_conv, W_CONV, D, D)
        store_vector(part_ptr, db_conv, B_CONV, D)
        store_vector(part_ptr, d_update_w, UPDATE_W, D)
        store_vector(part_ptr, d_update_b, UPDATE_B, D)
        if SAGE:
            store_matrix(part_ptr, dw_root, W_ROOT, D, D)


@triton.jit(do_not_specialize=["read", "nodes", "blank", "sum_stride"])
def collect_rows(
    d_own_ptr, d_child_ptr, uses_ptr, blank_ptr, out_ptr, read, nodes, blank, sum_stride,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of each row that was read: where it was a node's own state, and where it was a child."""
    replica = tl.program_id(1).to(tl.int64)
    d_own_ptr += replica * nodes * D
    d_child_ptr += replica * nodes * 2 * D
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < read
    d = tl.arange(0, D)[None, :]
    own = tl.load(uses_ptr + row * 2, mask=inside, other=-1)
    child = tl.load(uses_ptr + row * 2 + 1, mask=inside, other=-1)
    grad = tl.load(d_own_ptr + own[:, None] * D + d, mask=(own >= 0)[:, None], other=0.0)
    grad += tl.load(d_child_ptr + child[:, None] * D + d, mask=(child >= 0)[:, None], other=0.0)
    of_blank = tl.load(blank_ptr + replica * sum_stride + tl.arange(0, D))[None, :]
    grad += tl.where((row == blank)[:, None], of_blank, 0.0)
    tl.store(out_ptr + (replica * read + row)[:, None] * D + d, grad, mask=inside[:, None])


@triton.jit(do_not_specialize=["read", "nodes", "first_pair", "pairs", "own_moves"])
def collect_pairs(
    d_own_ptr, d_child_ptr, members_ptr, place_ptr, out_ptr, read, nodes, first_pair, pairs, own_moves,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of what the pairs have read by their place; many may have read the same row."""
    replica = tl.program_id(1).to(tl.int64)
    place_ptr += replica * 3 * pairs
    out_ptr += replica * read * D
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    node = first_pair + pair
    d = tl.arange(0, D)[None, :]
    at = (replica * nodes + node)[:, None] * D + d
    i0 = tl.load(members_ptr + node * 3, mask=inside, other=0) + tl.load(place_ptr + pair, mask=inside, other=0)
    moved = (inside & (own_moves + pair * 0 > 0))[:, None]
    tl.atomic_add(out_ptr + i0[:, None] * D + d, tl.load(d_own_ptr + at, mask=moved, other=0.0), mask=moved)
    at = ((replica * nodes + node) * 2)[:, None] * D + d
    for side in tl.static_range(2):
        row = tl.load(members_ptr + node * 3 + 1 + side, mask=inside, other=0)
        row += tl.load(place_ptr + pairs + 2 * pair + side, mask=inside, other=0)
        grad = tl.load(d_child_ptr + at + side * D, mask=inside[:, None], other=0.0)
        tl.atomic_add(out_ptr + row[:, None] * D + d, grad, mask=inside[:, None])
