"""Metrics and loss against their references."""

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassJaccardIndex

from nsr.training.pixel_loss import pixel_cross_entropy, upsample
from nsr.training.segmentation_metrics import confusion_matrix, intersection_over_union, mean_iou, pixel_accuracy


def test_confusion_matrix_is_that_of_torchmetrics() -> None:
    labels, predicted = torch.randint(0, 7, (2, 40, 40)), torch.randint(0, 7, (2, 40, 40))
    labels[0, :5] = 255
    expected = MulticlassConfusionMatrix(7, ignore_index=255)(predicted, labels)
    found = confusion_matrix(labels, predicted, 7)
    assert torch.equal(found, expected)
    assert found.sum() == (labels != 255).sum()
    jaccard = MulticlassJaccardIndex(7, ignore_index=255)(predicted, labels)
    assert mean_iou(found) == pytest.approx(float(jaccard), abs=1e-6)


def test_counts_stay_exact_where_float32_would_round() -> None:
    confusion = torch.tensor([[2**24 + 1, 0], [1, 2]])
    assert pixel_accuracy(confusion) == pytest.approx((2**24 + 3) / (2**24 + 4), abs=1e-12)


def test_a_class_without_union_does_not_count_and_one_only_predicted_does() -> None:
    labels, predicted = torch.tensor([0, 0, 1, 255]), torch.tensor([0, 2, 1, 3])
    confusion = confusion_matrix(labels, predicted, 5)
    iou = intersection_over_union(confusion)
    assert iou[:3].tolist() == [0.5, 1.0, 0.0]
    assert iou[3:].isnan().all()  # class 3 was predicted on an ignored pixel only
    assert mean_iou(confusion) == 0.5
    assert pixel_accuracy(confusion) == pytest.approx(2 / 3)


def test_nothing_to_count() -> None:
    with pytest.raises(ValueError, match="every label of the evaluated images is ignored"):
        mean_iou(torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.parametrize("grid", [(14, 14), (3, 5), (1, 1)])
def test_upsampling_is_bilinear_interpolation(grid: tuple[int, int]) -> None:
    logits = torch.randn(2, 3, *grid, requires_grad=True)
    expected = F.interpolate(logits, size=(48, 80), mode="bilinear", align_corners=False)
    found = upsample(logits, (48, 80))
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    (want,) = torch.autograd.grad((expected * weight).sum(), logits)
    (got,) = torch.autograd.grad((found * weight).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_loss_is_cross_entropy_over_the_pixels_that_count() -> None:
    logits, labels = torch.randn(2, 4, 5, 5), torch.randint(0, 4, (2, 40, 40))
    labels[:, :7] = 255
    pixels = F.interpolate(logits, size=(40, 40), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(pixels, labels, ignore_index=255)
    torch.testing.assert_close(pixel_cross_entropy(logits, labels), expected.unsqueeze(0))


def test_loss_of_nothing_is_zero() -> None:
    assert pixel_cross_entropy(torch.randn(1, 3, 2, 2), torch.full((1, 8, 8), 255)) == 0
