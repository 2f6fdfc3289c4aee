r"""The label-based null-space diagnostic: how much label structure do a node's aggregations make invisible?

At one aggregation with members ``i = 1 .. k``, coefficients ``t`` and one-hot labels ``S [k, C]``, the share of the
labels' energy that lies in the null space of ``t`` needs no projection matrix:

.. math::
    r = \frac{\|(I - t t^T / t^T t) S\|_F^2}{\|S\|_F^2}
      = 1 - \frac{\sum_c (\sum_{i \in c} t_i)^2}{k \sum_i t_i^2}.

For uniform ``t`` it is the Gini impurity of the members' labels. A node's score averages ``r`` over all aggregations of
its ``L``-layer computation tree, weighted by their member counts. The tree is never unfolded: its sums obey

.. math:: S^{(L)}_v = k_v r_v + \sum_{i \in v} S^{(L-1)}_i, \qquad K^{(L)}_v = k_v + \sum_{i \in v} K^{(L-1)}_i.

The labels are read after training and serve neither training nor selection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def local_scores(
    source: Tensor, target: Tensor, coefficient: Tensor, labels: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """``r`` and ``k`` of the aggregation at each node.

    Args:
        source: Node that sends each member's message, ``[E]``.
        target: Node at which it is aggregated, ``[E]``.
        coefficient: ``t`` as the backbone uses it, ``[E]``.
        labels: Class of each node, ``[N]``.
        num_nodes: ``N``.

    Returns:
        ``r [N]`` and ``k [N]`` in fp64. Where there are no members or ``t`` is zero, nothing is projected away by
        ``t``: ``r`` is 0 without members and 1 at ``t = 0``, whose null space is everything.
    """
    _validate(source, target, coefficient, labels, num_nodes)
    t = coefficient.double()
    classes = int(labels.max()) + 1 if labels.numel() else 1
    per_class = t.new_zeros(num_nodes * classes).index_add(0, target * classes + labels[source], t)
    seen = per_class.view(num_nodes, classes).square().sum(dim=1)
    energy = t.new_zeros(num_nodes).index_add(0, target, t.square())
    count = t.new_zeros(num_nodes).index_add(0, target, torch.ones_like(t))
    total = count * energy
    share = 1 - seen / total.where(total > 0, 1.0)
    return torch.where(count > 0, share.clamp(0, 1), 0.0), count


def null_space_scores(
    source: Tensor, target: Tensor, coefficient: Tensor, labels: Tensor, num_nodes: int, layers: int
) -> Tensor:
    """The diagnostic score of each node, ``[N]`` in ``[0, 1]``, over its computation tree of ``layers`` layers.

    The members and coefficients are those of the backbone (:func:`nsr.graph.coefficients` reads them); a separate root
    path, as GraphSAGE's, is no member. A node without members scores 0. Arguments as in :func:`local_scores`.

    Example:
        >>> import torch
        >>> from nsr.graph.diagnostic import null_space_scores
        >>> source, target = torch.tensor([0, 1, 2]), torch.tensor([2, 2, 2])
        >>> null_space_scores(source, target, torch.ones(3), torch.tensor([0, 1, 1]), 3, layers=1).tolist()
        [0.0, 0.0, 0.4444444444444444]
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}.")
    share, count = local_scores(source, target, coefficient, labels, num_nodes)
    score_sum, count_sum = torch.zeros_like(share), torch.zeros_like(count)
    for _ in range(layers):
        score_sum = (share * count).index_add(0, target, score_sum[source])
        count_sum = count.index_add(0, target, count_sum[source])
    return score_sum / count_sum.clamp(min=1)


def score_bins(scores: Tensor, bins: int = 10) -> Tensor:
    """Bin of each score, ``0`` (low) to ``bins - 1``, by quantiles; equal scores always share a bin.

    Ties make bins uneven, and a value that fills several quantiles leaves bins empty.
    """
    if scores.dim() != 1 or not scores.numel():
        raise ValueError(f"scores must be a non-empty vector, got shape {tuple(scores.shape)}.")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    ranks = torch.arange(1, bins, dtype=torch.float64, device=scores.device) / bins
    boundaries = torch.quantile(scores.double(), ranks, interpolation="lower")
    return torch.searchsorted(boundaries, scores.double())


@dataclass(frozen=True)
class BinnedAccuracy:
    """Accuracy of two models on the same nodes, by score bin; ``nan`` where a bin is empty.

    Attributes:
        count: Nodes in each bin, ``[bins]``.
        score: Mean score in each bin, ``[bins]``.
        original: Accuracy of the original model, ``[bins]``.
        nsr: Accuracy with the null-space branch, ``[bins]``.
    """

    count: Tensor
    score: Tensor
    original: Tensor
    nsr: Tensor

    @property
    def gain(self) -> Tensor:
        """What the branch adds in each bin, ``[bins]``."""
        return self.nsr - self.original


def accuracy_by_score(scores: Tensor, original_correct: Tensor, nsr_correct: Tensor, bins: int = 10) -> BinnedAccuracy:
    """Compare two models on the same nodes, by the nodes' diagnostic score.

    Args:
        scores: Score of each evaluated node, ``[M]``: the test nodes of one split.
        original_correct: Whether the original model is right there, ``[M]``, bool.
        nsr_correct: The same for the model with the branch.
        bins: How many quantile bins.
    """
    if not scores.shape == original_correct.shape == nsr_correct.shape:
        raise ValueError(
            f"scores {tuple(scores.shape)}, original_correct {tuple(original_correct.shape)} and nsr_correct "
            f"{tuple(nsr_correct.shape)} must have one entry for each of the same nodes."
        )
    index = score_bins(scores, bins)
    empty = scores.new_zeros(bins, dtype=torch.float64)
    count = empty.index_add(0, index, torch.ones_like(scores, dtype=torch.float64))

    def mean(values: Tensor) -> Tensor:
        return empty.index_add(0, index, values.double()) / count

    return BinnedAccuracy(count.long(), mean(scores), mean(original_correct), mean(nsr_correct))


def _validate(source: Tensor, target: Tensor, coefficient: Tensor, labels: Tensor, num_nodes: int) -> None:
    if not (source.dim() == 1 and source.shape == target.shape == coefficient.shape):
        raise ValueError(
            f"source {tuple(source.shape)}, target {tuple(target.shape)} and coefficient {tuple(coefficient.shape)} "
            "must be vectors with one entry for each member."
        )
    if labels.shape != (num_nodes,) or labels.is_floating_point():
        raise ValueError(
            f"labels must hold one class index for each of the {num_nodes} nodes, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}."
        )
    if labels.numel() and int(labels.min()) < 0:
        raise ValueError(f"labels must be class indices from 0, got {int(labels.min())}.")
    for name, index in (("source", source), ("target", target)):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_nodes:
            raise ValueError(
                f"{name} runs from {int(index.min())} to {int(index.max())}; expected node indices below {num_nodes}."
            )
