"""What trains segmenters on kernels against its plain twin: ``segmentation_kernel_checks.py DEVICE SEED``.

Triton decides when a kernel is defined whether it is interpreted, so :mod:`test_segmentation_kernels` runs this file as
a program of its own, on a CPU with ``TRITON_INTERPRET=1``.
"""

import copy
import sys

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from nsr.data.segmentation.split import IGNORE
from nsr.kernels.tokens import token_kernels
from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, ToMe, mpm_plan
from nsr.training.pixel_loss import pixel_cross_entropy
from nsr.training.segmentation_lengths import shortened
from nsr.training.segmentation_stack import SegmenterStack

DEVICE = sys.argv[1]


def both(call):
    """What a call gives with the kernels and without."""
    found = []
    for enabled in (True, False):
        with token_kernels(enabled):
            found.append(call())
    return found


def check_loss() -> None:
    scales = torch.tensor([0.7, -1.3], device=DEVICE)
    shapes = [(2, 21, 3, 4, 16), (1, 5, 1, 3, 8), (3, 3, 1, 1, 2), (1, 40, 2, 2, 4), (2, 2, 3, 2, 5), (1, 2, 2, 2, 1)]
    for batch, classes, rows, columns, patch in shapes:
        labels = torch.randint(0, classes, (batch, rows * patch, columns * patch), device=DEVICE)
        labels[torch.rand(labels.shape, device=DEVICE) < 0.2] = IGNORE
        labels[0, :patch] = IGNORE
        for kind, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            drawn = (3 * torch.randn(2 * batch, rows * columns, classes, device=DEVICE)).to(kind)  # of two models
            logits = drawn.transpose(1, 2).unflatten(2, (rows, columns)).requires_grad_()  # as a segmenter has them

            def run(logits=logits, labels=labels) -> tuple[Tensor, Tensor]:
                losses = pixel_cross_entropy(logits, labels)
                return losses.detach(), torch.autograd.grad(losses @ scales, logits)[0]

            (fast, fast_grad), (plain, plain_grad) = both(run)
            torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
            scale = plain_grad.float().abs().max().clamp(min=1e-6)
            torch.testing.assert_close(fast_grad.float() / scale, plain_grad.float() / scale, rtol=0, atol=tolerance)
            assert fast_grad.dtype == kind
            assert torch.equal(run()[1], run()[1])


def check_loss_without_a_pixel() -> None:
    logits = torch.randn(1, 3, 2, 2, device=DEVICE, requires_grad=True)
    with token_kernels(True):
        loss = pixel_cross_entropy(logits, torch.full((1, 8, 8), IGNORE, device=DEVICE))
        (grad,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == 0
    assert not grad.any()


def check_fixed_length_plan() -> None:
    tokens = torch.randn(4, 21, 16, device=DEVICE)
    for valid in (None, torch.arange(21, device=DEVICE) < torch.tensor([[21], [20], [9], [2]], device=DEVICE)):
        fast, plain = both(lambda valid=valid: mpm_plan(tokens, valid=valid, keep_length=True))
        assert fast.layout is not None
        assert torch.equal(fast.group, plain.group)
        assert torch.equal(fast.weight, plain.weight)
        assert torch.equal(fast.valid, plain.valid)
        torch.testing.assert_close(fast.merge(tokens), plain.merge(tokens))
        longest = int(plain.valid.sum(1).max())
        fast, plain = shortened(fast, longest), shortened(plain, longest)
        assert fast.layout.start.shape[1] == longest + 1
        assert torch.equal(fast.weight, plain.weight)
        torch.testing.assert_close(fast.merge(tokens), plain.merge(tokens))


def check_fixed_length_model() -> None:
    backbone = VisionTransformer(img_size=48, patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    model = Segmenter(MergedViT(backbone, MPM((0, 1), keep_length=True), TokenResidual(code=16, hidden=16)), 3).to(
        DEVICE
    )
    for parameter in model.parameters():  # decoders at zero would hide the branch
        torch.nn.init.normal_(parameter, std=0.2)
    image, labels = torch.randn(2, 3, 48, 48, device=DEVICE), torch.randint(0, 3, (2, 48, 48), device=DEVICE)

    def gradients() -> list[Tensor]:
        loss = pixel_cross_entropy(model.patch_logits(image), labels)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for (name, _), fast, plain in zip(model.named_parameters(), *both(gradients), strict=True):
        scale = plain.abs().max().clamp(min=1e-2)
        torch.testing.assert_close(fast / scale, plain / scale, rtol=0, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def check_stack() -> None:
    """With kernels, a stack learns what its models learn without them."""
    kinds = ({}, {"feature": False}, {"source": "raw"}, {"spatial": False, "post_merge_only": True})
    residuals = (None, *(TokenResidual(code=16, hidden=16, **kind) for kind in kinds))
    image, labels = torch.randn(2, 3, 48, 48, device=DEVICE), torch.randint(0, 3, (2, 48, 48), device=DEVICE)
    for rule in (ToMe(r=2), MPM((0, 1), keep_length=True)):
        models = []
        for residual in residuals:
            backbone = VisionTransformer(img_size=48, patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=0)
            models.append(Segmenter(MergedViT(backbone, rule, residual), 3).to(DEVICE))
            for parameter in models[-1].parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        twins = copy.deepcopy(models)
        stack = SegmenterStack(models)
        with token_kernels(True):
            logits = stack.patch_logits(image)
            pixel_cross_entropy(logits, labels).sum().backward()
        with token_kernels(False):
            expected = torch.cat([twin.patch_logits(image) for twin in twins])
            pixel_cross_entropy(expected, labels).sum().backward()
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        for name, parameter in stack.named_parameters():
            grads = [dict(twin.named_parameters()).get(name, torch.zeros(())).grad for twin in twins]
            grad = torch.stack([torch.zeros_like(parameter[0]) if own is None else own for own in grads])
            scale = grad.abs().max().clamp(min=1e-2)
            torch.testing.assert_close(parameter.grad / scale, grad / scale, rtol=0, atol=2e-3, msg=name)


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[2]))
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name)
