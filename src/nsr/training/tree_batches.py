"""Batches of (tree, query) samples by the different trees in them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Queries:
    """(tree, query) pairs of each replica; ``...`` may be the batches of an epoch.

    Attributes:
        values: Of the leaves of each different tree, 0 to L - 1, tree after tree, ``[R, ..., S L]``.
        positions: The leaf of its tree that has each value, 0 to L - 1: the values the other way round,
            ``[R, ..., S L]``.
        place: What each pair reads: the number of its query, ``[R, ..., B]``, then the two children of its tree's root,
            counted over all trees, ``[R, ..., 2 B]``; together ``[R, ..., 3 B]``.
        label: The value that each pair asks for, 0 to L - 1, ``[R, ..., B]``.
        count: 1 for each pair, 0 for one that only fills up the batch, ``[R, ..., B]``.
    """

    values: Tensor
    positions: Tensor
    place: Tensor
    label: Tensor
    count: Tensor

    @property
    def query(self) -> Tensor:
        """The query of each pair, 0 to L - 1, ``[R, ..., B]``."""
        return self.place[..., : self.label.shape[-1]]

    @property
    def slot(self) -> Tensor:
        """The number of each pair's tree, ``[R, ..., B]``."""
        return self.place[..., self.label.shape[-1] :: 2] // 2

    def batch(self, number: Tensor) -> "Queries":
        """One batch of an epoch; the number is a tensor of one element."""
        return Queries(*(part.index_select(1, number).squeeze(1) for part in self._parts()))

    def clone(self) -> "Queries":
        """The same in other memory."""
        return Queries(*(part.clone() for part in self._parts()))

    def copy_(self, other: "Queries") -> None:
        """Take over the pairs of another epoch."""
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            mine.copy_(theirs)

    def _parts(self) -> tuple[Tensor, ...]:
        return self.values, self.positions, self.place, self.label, self.count


def sampled(permutations: Tensor, samples: Tensor, count: Tensor, slots: int) -> Queries:
    """Batches of any samples.

    Args:
        permutations: All trees, values 1 to L, ``[R, P, L]``.
        samples: Tree times ``L`` plus query, ``[R, ..., B]``.
        count: 1 for each sample that counts, else 0, ``[R, ..., B]``.
        slots: At least as many as there are different trees in any batch.
    """
    slot, tree = assign_slots(samples // permutations.shape[2], slots)
    return _queries(permutations, samples, count, slot, tree)


def grouped(permutations: Tensor, samples: Tensor, count: Tensor) -> Queries:
    """Batches of whole trees: each with all of its queries in order; arguments as for :func:`sampled`."""
    leaves = permutations.shape[2]
    slot = torch.arange(samples.shape[-1], device=samples.device).div(leaves, rounding_mode="floor").expand_as(samples)
    return _queries(permutations, samples, count, slot, samples[..., ::leaves] // leaves)


def _queries(permutations: Tensor, samples: Tensor, count: Tensor, slot: Tensor, tree: Tensor) -> Queries:
    leaves = permutations.shape[2]
    index = tree.flatten(1).unsqueeze(2).expand(-1, -1, leaves)
    values = permutations.gather(1, index).view(*tree.shape, leaves) - 1  # shape: [R, ..., S, L]
    positions = torch.empty_like(values).scatter_(
        -1, values, torch.arange(leaves, device=tree.device).expand_as(values)
    )
    children = torch.stack([2 * slot, 2 * slot + 1], dim=-1).flatten(-2)
    label = permutations.flatten(1).gather(1, samples.flatten(1)).view_as(samples) - 1
    place = torch.cat([samples % leaves, children], dim=-1)
    return Queries(values.flatten(-2), positions.flatten(-2), place, label, count)


def assign_slots(tree: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Number the different trees of each batch, without asking the host how many there are.

    Args:
        tree: The tree of each pair, ``[..., B]``.
        slots: At least as many as there are different trees in any batch.

    Returns:
        The slot of each pair, ``[..., B]``, and the tree in each slot, ``[..., S]`` (0 in an unused slot).
    """
    ordered, order = tree.sort(dim=-1)
    first = torch.ones_like(ordered)
    first[..., 1:] = (ordered[..., 1:] != ordered[..., :-1]).to(first.dtype)
    number = first.cumsum(-1) - 1
    slot = torch.zeros_like(tree).scatter(-1, order, number)
    content = tree.new_zeros(*tree.shape[:-1], slots).scatter(-1, number, ordered)
    return slot, content
