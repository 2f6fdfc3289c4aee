"""Accuracy and ROC-AUC of many replicas at once, on their device: nothing is read back."""

import torch
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Share of the masked nodes whose largest logit is the label's.

    Shapes:
        ``logits`` ``[R, N, C]``, ``labels`` ``[N]``, ``mask`` ``[R, N]`` bool; the result ``[R]``.
    """
    return ((logits.argmax(-1) == labels) & mask).sum(-1) / mask.sum(-1)


def roc_auc(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    r"""Area under the ROC curve of the masked nodes, scored by ``logit_1 - logit_0``.

    .. math:: \frac{1}{|P||Q|} \sum_{p \in P} \sum_{q \in Q} [s_p > s_q] + \tfrac12 [s_p = s_q]

    over positives ``P`` and negatives ``Q``, from one sort: each positive counts the negatives below it, and half of
    those level with it.

    Shapes:
        ``logits`` ``[R, N, 2]``, ``labels`` ``[N]``, ``mask`` ``[R, N]`` bool; the result ``[R]``.
    """
    scores = logits[..., 1] - logits[..., 0]
    positive, negative = mask & (labels == 1), mask & (labels == 0)
    ordered, order = scores.sort(dim=-1)
    below = torch.nn.functional.pad(negative.gather(-1, order).double().cumsum(-1), (1, 0))  # shape: [R, N + 1]
    first = torch.searchsorted(ordered, scores)
    last = torch.searchsorted(ordered, scores, right=True)
    wins = (below.gather(-1, first) + below.gather(-1, last)) / 2
    return ((wins * positive).sum(-1) / (positive.sum(-1) * negative.sum(-1))).float()
