r"""Segmentation metrics from one confusion matrix of exact integer counts.

.. math::
    \mathrm{mIoU} = \frac{1}{|\mathcal{K}|} \sum_{k \in \mathcal{K}} \frac{C_{kk}}{C_{k\cdot} + C_{\cdot k} - C_{kk}},
    \qquad \text{pixel accuracy} = \frac{\sum_k C_{kk}}{\sum_{kl} C_{kl}},

with :math:`\mathcal{K}` the classes of non-zero union: a class that is neither present nor predicted does not count.
"""

import torch
from torch import Tensor

from nsr.data.segmentation.split import IGNORE


def confusion_matrix(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Pixels of class ``k`` that were taken for class ``l``, ignored ones left out: ``[K, K]``, int64."""
    counted = labels != IGNORE
    cell = labels[counted] * num_classes + predicted[counted]
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


def intersection_over_union(confusion: Tensor) -> Tensor:
    """IoU of each class, ``[K]``, float64; NaN for a class that is neither present nor predicted."""
    hit = confusion.diagonal().double()
    return hit / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal()).double()


def mean_iou(confusion: Tensor) -> float:
    """Mean IoU over the classes with non-zero union."""
    iou = intersection_over_union(_seen(confusion))
    return float(iou[~iou.isnan()].mean())


def pixel_accuracy(confusion: Tensor) -> float:
    """Share of the counted pixels that are right."""
    return int(_seen(confusion).diagonal().sum()) / int(confusion.sum())


def _seen(confusion: Tensor) -> Tensor:
    if not confusion.any():
        raise ValueError("No pixel was counted: every label of the evaluated images is ignored.")
    return confusion
