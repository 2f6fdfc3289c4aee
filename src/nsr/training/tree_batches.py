"""Batches of (tree, query) samples by the different trees in them."""

import torch
from torch import Tensor

from nsr.training.tree_model import Queries


def sampled(permutations: Tensor, samples: Tensor, count: Tensor, slots: int) -> Queries:
    """A batch of any samples.

    Args:
        permutations: All trees, ``[R, P, L]``.
        samples: Tree times ``L`` plus query, ``[R, B]``.
        count: 1 for each sample that counts, else 0, ``[R, B]``.
        slots: At least as many as there are different trees in any batch.
    """
    leaves = permutations.shape[2]
    slot, tree = assign_slots(samples // leaves, slots)
    return Queries(_take(permutations, tree), samples % leaves + 1, slot, count)


def grouped(permutations: Tensor, samples: Tensor, count: Tensor) -> Queries:
    """A batch of whole trees: each with all of its queries in order; arguments as for :func:`sampled`."""
    leaves = permutations.shape[2]
    slot = torch.arange(samples.shape[1], device=samples.device).div(leaves, rounding_mode="floor").expand_as(samples)
    return Queries(_take(permutations, samples[:, ::leaves] // leaves), samples % leaves + 1, slot, count)


def _take(permutations: Tensor, tree: Tensor) -> Tensor:
    return permutations.gather(1, tree.unsqueeze(2).expand(-1, -1, permutations.shape[2]))


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
