"""Proportional attention by extra channels equals the written-out bias, in values and gradients."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsr.tokens.attention import (
    MASKED,
    biased_attention,
    biased_attention_reference,
    key_bias,
    sized_attention,
)


def inputs(width=16, tokens=13, dtype=torch.float64):
    q, k, v = (torch.randn(2, 3, tokens, width, dtype=dtype, requires_grad=True) for _ in range(3))
    size = torch.randint(1, 50, (2, tokens))
    return q, k, v, size


@pytest.mark.parametrize("width", [8, 12, 16, 24, 63, 64, 80])
def test_equals_reference_in_values_and_gradients(width):
    q, k, v, size = inputs(width)
    bias = key_bias(size, None).double()
    fast, plain = biased_attention(q, k, v, bias), biased_attention_reference(q, k, v, bias)
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-13)
    weight = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), (q, k, v)),
        torch.autograd.grad((plain * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_token_of_size_s_counts_as_s_equal_tokens():
    q, k, v, _ = inputs(tokens=4)
    size = torch.tensor([[3, 1, 2, 1]] * 2)
    repeated = [t.repeat_interleave(size[0], dim=2) for t in (k, v)]
    merged = biased_attention(q, k, v, key_bias(size, None).double())
    torch.testing.assert_close(merged, biased_attention_reference(q, *repeated, None), rtol=0, atol=1e-6)


def test_no_bias_is_torch_attention_to_the_bit():
    q, k, v, _ = inputs(dtype=torch.float32)
    assert torch.equal(biased_attention(q, k, v, None), torch.nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_keys_weigh_exactly_nothing(dtype):
    q, k, v, size = inputs(dtype=dtype)
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[0, 9:] = False
    bias = key_bias(size, valid)
    before = biased_attention(q, k, v, bias)
    hidden = ~valid[:, None, :, None]
    after = biased_attention(q, k.masked_fill(hidden, 7.0), v.masked_fill(hidden, -300.0), bias)
    assert torch.equal(before, after)
    for grad in torch.autograd.grad(before.float().sum(), (k, v)):
        assert not grad[0, :, 9:].any()
        assert grad.isfinite().all()


def test_bfloat16_keeps_log_sizes_that_it_cannot_represent():
    """log 37 = 3.611 rounds to 3.609 in bfloat16; the second channel holds the rest."""
    q, k, v, _ = inputs(dtype=torch.bfloat16)
    size = torch.full((2, 13), 37)
    size[:, 0] = 1
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    v = torch.zeros_like(v)
    v[:, :, 0] = 1.0
    weight = biased_attention(q, k, v, key_bias(size, None)).double()
    exact = 1 / (1 + 12 * 37)
    assert (weight - exact).abs().max() / exact < 2**-8  # no worse than rounding the output once


def test_runs_on_a_flash_kernel():
    q, k, v, size = inputs(width=64, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if the shapes do not fit it
        fast = biased_attention(q, k, v, key_bias(size, None))
    torch.testing.assert_close(fast, biased_attention_reference(q, k, v, key_bias(size, None)), rtol=0, atol=1e-5)


def test_query_norms_in_float32_do_not_spoil_half_precision():
    q, k, v, size = inputs(dtype=torch.float32)
    bias = key_bias(size, None)
    mixed = biased_attention(q, k, v.bfloat16(), bias)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, biased_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias))


def test_bias_of_nothing_is_nothing():
    assert key_bias(None, None) is None
    valid = torch.tensor([[True, False]])
    assert key_bias(None, valid).tolist() == [[0.0, MASKED]]
    assert key_bias(torch.tensor([[1, 5]]), valid).tolist() == [[0.0, MASKED]]


def test_sizes_and_padding_become_the_bias_of_each_key():
    qkv = torch.randn(2, 7, 3, 2, 8)
    size = torch.randint(1, 5, (2, 7)).float()
    valid = torch.arange(7) < torch.tensor([[7], [4]])
    expected = biased_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), key_bias(size, valid)).transpose(1, 2)
    assert torch.equal(sized_attention(qkv, size, valid), expected)
    padded = qkv.clone()
    padded[1, 4:] = torch.randn(3, 3, 2, 8)
    assert torch.equal(sized_attention(padded, size, valid)[1, :4], expected[1, :4])
