import torch
from torch.nn import functional as F

from nsr.training.pixel_loss import pixel_cross_entropy, upsample


def test_models_have_the_losses_they_have_alone() -> None:
    logits, labels = torch.randn(6, 3, 2, 2), torch.randint(0, 3, (2, 8, 8))
    labels[0, :3] = 255
    alone = torch.cat([pixel_cross_entropy(own, labels) for own in logits.chunk(3)])
    torch.testing.assert_close(pixel_cross_entropy(logits, labels), alone)


def test_an_evaluation_that_comes_first_does_not_spoil_training() -> None:
    with torch.inference_mode():
        upsample(torch.randn(1, 3, 5, 7), (11, 13))
    logits = torch.randn(1, 3, 5, 7, requires_grad=True)
    labels = torch.randint(0, 3, (1, 11, 13))
    pixel_cross_entropy(logits, labels).backward()
    expected = logits.detach().clone().requires_grad_()
    F.cross_entropy(F.interpolate(expected, size=(11, 13), mode="bilinear"), labels).backward()
    torch.testing.assert_close(logits.grad, expected.grad)
