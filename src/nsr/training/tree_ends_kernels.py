"""The two ends of the model on trees: the encoder, and head, loss and accuracy, each a kernel or two."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.training.tree_product import product


@triton.jit(do_not_specialize=["trees"])
def encode(
    weight_ptr, bias_ptr, values_ptr, out_ptr, trees, LEAVES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of leaves, blank and roots: the columns of their key and of their value, and the bias; column 0 is blank."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)[None, :]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    leaves, rows = trees * LEAVES, trees * LEAVES + 1 + LEAVES
    is_leaf = row < leaves
    value = tl.load(values_ptr + replica * leaves + row, mask=is_leaf, other=-1).to(tl.int32) + 1
    key = tl.where(is_leaf, row % LEAVES + 1, row - leaves)
    inside = (row < rows)[:, None]
    weight = weight_ptr + (replica * D + d) * 2 * (LEAVES + 1)
    state = tl.load(weight + key[:, None], mask=inside, other=0.0)
    state += tl.load(weight + LEAVES + 1 + value[:, None], mask=inside, other=0.0)
    state += tl.load(bias_ptr + replica * D + d)
    tl.store(out_ptr + (replica * rows + row)[:, None] * D + d, state, mask=inside)


@triton.jit(do_not_specialize=["trees"])
def encode_gradient(
    grad_ptr, position_ptr, d_weight_ptr, trees, LEAVES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient of one column: the sum over the rows that have its key, or its value, each program one column."""
    column = tl.program_id(0)
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)[None, :]
    leaves, rows = trees * LEAVES, trees * LEAVES + 1 + LEAVES
    grad_ptr += replica * rows * D
    is_value = column > LEAVES
    number = tl.where(is_value, column - LEAVES - 1, column)
    total = tl.zeros([BLOCK, D], tl.float32)
    if number > 0:  # the leaf of each tree that has this key, or this value
        for start in range(0, trees, BLOCK):
            tree = start + tl.arange(0, BLOCK)
            inside = tree < trees
            at = tree * LEAVES + number - 1
            found = tl.load(position_ptr + replica * leaves + at, mask=inside, other=0).to(tl.int32)
            row = tl.where(is_value, tree * LEAVES + found, at)
            total += tl.load(grad_ptr + row[:, None] * D + d, mask=inside[:, None], other=0.0)
    if (number == 0) & is_value:  # blank and roots have no value
        for start in range(0, LEAVES + 1, BLOCK):
            row = start + tl.arange(0, BLOCK)
            total += tl.load(grad_ptr + (leaves + row)[:, None] * D + d, mask=(row <= LEAVES)[:, None], other=0.0)
    result = tl.sum(total, 0)
    if column <= LEAVES:  # the blank, or the root that asks for this key
        result += tl.load(grad_ptr + (leaves + column) * D + tl.arange(0, D))
    tl.store(d_weight_ptr + (replica * D + tl.arange(0, D)) * 2 * (LEAVES + 1) + column, result)


@triton.jit(do_not_specialize=["rows", "pairs", "tiles_each"])
def head_loss(
    rows_ptr, weight_ptr, bias_ptr, label_ptr, count_ptr, d_root_ptr, part_ptr, rows, pairs, tiles_each,
    LEAVES: tl.constexpr, D: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the roots, the last rows: gradients of their states, and a part of those of the head, of loss and accuracy.

    A part is ``[LEAVES, D + 1]``, weight and bias of each class, then the loss and the number of right answers.
    """
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    c = tl.arange(0, CLASSES)
    known = c < LEAVES
    weight = tl.load(weight_ptr + (replica * LEAVES + c)[:, None] * D + d[None, :], mask=known[:, None], other=0.0)
    bias = tl.load(bias_ptr + replica * LEAVES + c, mask=known, other=-float("inf"))[None, :]
    counted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        counted += tl.load(count_ptr + replica * pairs + pair, mask=pair < pairs, other=0.0)
    total = tl.sum(counted, 0)
    d_weight = tl.zeros([CLASSES, D], tl.float32)
    d_bias = tl.zeros([CLASSES], tl.float32)
    loss = tl.zeros([BLOCK], tl.float32)
    right = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        pair = tile * BLOCK + tl.arange(0, BLOCK)
        inside = pair < pairs
        at = (replica * rows + rows - pairs + pair)[:, None] * D + d[None, :]
        x = tl.load(rows_ptr + at, mask=inside[:, None], other=0.0)
        label = tl.load(label_ptr + replica * pairs + pair, mask=inside, other=0).to(tl.int32)
        count = tl.load(count_ptr + replica * pairs + pair, mask=inside, other=0.0)
        logits = product(x, tl.trans(weight)) + bias
        best = tl.max(logits, 1)
        power = tl.exp(logits - best[:, None])
        below = tl.sum(power, 1)
        is_label = c[None, :] == label[:, None]
        of_label = tl.sum(tl.where(is_label, logits, 0.0), 1)
        loss += count * (tl.log(below) + best - of_label)
        right += tl.where(tl.argmax(logits, 1) == label, count, 0.0)
        d_logits = (power / below[:, None] - tl.where(is_label, 1.0, 0.0)) * (count / total)[:, None]
        d_weight += product(tl.trans(d_logits), x)
        d_bias += tl.sum(d_logits, 0)
        dx = product(d_logits, weight)
        tl.store(d_root_ptr + (replica * pairs + pair)[:, None] * D + d[None, :], dx, mask=inside[:, None])
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * (LEAVES * (D + 1) + 2)
    tl.store(part_ptr + c[:, None] * D + d[None, :], d_weight, mask=known[:, None])
    tl.store(part_ptr + LEAVES * D + c, d_bias, mask=known)
    tl.store(part_ptr + LEAVES * (D + 1), tl.sum(loss, 0) / total)
    tl.store(part_ptr + LEAVES * (D + 1) + 1, tl.sum(right, 0))
