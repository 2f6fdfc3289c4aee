"""Tree-NeighborsMatch without repeated work: each tree once, its root once a query, and no node that cannot matter.

Edges run upwards only, so no state below the root depends on the query. A batch of ``B`` (tree, query) pairs over ``S``
different trees therefore needs ``B`` roots and ``S`` trees in place of ``B`` trees. And of ``d + 1`` layers the
``l``-th one needs to update only what still reaches the root: levels up to ``d + 1 - l``.

One layer sees one small graph that is the same for every batch; which tree a root belongs to enters as a gather alone::

    rows     0 .. B         B .. 3B                   3B ..
             roots          the two children of       trees, level by level (1, 2, ..., d), so that
                            each root, copied         what is no longer needed is cut from the end
    updated  yes            no                        levels that the next layers need

Where a batch holds every query of its trees (*grouped*), the roots' children are known beforehand: nothing is copied.

Logits and gradients are those of the plain form, ``B`` whole trees in one batch, to rounding. BatchNorm looks at every
node of the plain form: there nothing is cut, and each row counts as often as it occurs there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsr.graph.models import GraphModel
from nsr.training.batch_norm import row_weights, weigh_batch_norm
from nsr.training.normalisation import preset_normalisation


@dataclass(frozen=True)
class LayerGraph:
    """What one layer works on.

    Attributes:
        rows: Tree rows that it reads.
        kept: Tree rows, the first ones, of which later layers need the update.
        edge_index: Edges into everything that is updated, over all rows (roots, copied children, trees).
        gcn_weight: GCN's coefficient of each edge in the whole tree, which the cut graph no longer shows.
    """

    rows: int
    kept: int
    edge_index: Tensor
    gcn_weight: Tensor


class SharedTrees(nn.Module):
    """A model with root readout, applied to batches of trees with shared work.

    Args:
        model: Takes the one-hot key and value of a node; its BatchNorms are exchanged for weighted ones.
        depth: ``d`` of the trees.
        batch: ``B``, the number of (tree, query) pairs in a batch.
        slots: ``S``, the most different trees in a batch.
        grouped: Pair ``b`` always belongs to tree ``b // L``, so that ``B = S L``.
        device: Where the graphs live.
    """

    def __init__(
        self,
        model: GraphModel,
        depth: int,
        batch: int,
        slots: int,
        grouped: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        assert not grouped or batch == slots * 2**depth, "a grouped batch holds every query of its trees"
        self.model: GraphModel = weigh_batch_norm(model)
        self.depth, self.batch, self.slots = depth, batch, slots
        self.copies = 0 if grouped else 2 * batch
        self.cuts = not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
        # No buffers: the graphs are the same for all replicas and are not stacked with the weights.
        self.graphs = [self._graph(number, len(model.layers), device) for number in range(1, len(model.layers) + 1)]
        for layer, graph in zip(model.layers, self.graphs, strict=True):
            preset_normalisation(layer, graph.edge_index, graph.gcn_weight)

    def forward(self, permutations: Tensor, query: Tensor, slot: Tensor, weight: Tensor) -> Tensor:
        """Logits of the roots.

        Args:
            permutations: Values of the leaves of each different tree, ``[S, L]``.
            query: The key that each root asks for, 1 to L, ``[B]``.
            slot: The tree that each root belongs to, ``[B]``.
            weight: 1 for each pair, 0 for one that only fills up the batch, ``[B]``.

        Returns:
            ``[B, L]``.
        """
        root, tree = self._encode(permutations, query)
        children = (2 * slot.unsqueeze(1) + torch.arange(2, device=slot.device)).flatten()[: self.copies]
        counts = None if self.cuts else self._counts(slot, weight)
        with row_weights(self.model, counts):
            for layer, graph in zip(self.model.layers, self.graphs, strict=True):
                rows = torch.cat([root, tree.index_select(0, children), tree[: graph.rows]])
                rows = layer(rows, graph.edge_index)
                root, tree = rows[: self.batch], rows[self.batch + self.copies :][: graph.kept]
        return self.model.head(root)

    def _encode(self, permutations: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Roots ``[B, D]`` and trees ``[S (2^(d+1) - 2), D]``; all inner nodes have the same input, two blanks."""
        leaves = permutations.shape[1]
        symbols = torch.arange(leaves + 1, device=query.device)

        def embed(key: Tensor, value: Tensor) -> Tensor:
            pair = torch.cat([key.unsqueeze(-1) == symbols, value.unsqueeze(-1) == symbols], dim=-1)
            return self.model.encoder(pair.to(self.model.head.weight.dtype))

        keys = symbols[1:].expand(permutations.shape)
        blank = embed(symbols[:1], symbols[:1]).expand(self.slots * (leaves - 2), -1)
        tree = torch.cat([blank, embed(keys, permutations).flatten(0, 1)])
        return embed(query, torch.zeros_like(query)), tree

    def _counts(self, slot: Tensor, weight: Tensor) -> Tensor:
        """How often each row stands in the plain form: a copied child never, a tree once for each of its roots."""
        trees = weight.new_zeros(self.slots).scatter_add(0, slot, weight)
        levels = [trees.repeat_interleave(2**level) for level in range(1, self.depth + 1)]
        return torch.cat([weight, weight.new_zeros(self.copies), *levels])

    def _graph(self, number: int, layers: int, device: torch.device | str) -> LayerGraph:
        """The graph of layer ``number``, counted from 1."""
        updated = min(layers - number, self.depth) if self.cuts else self.depth
        read = 0 if updated == 0 and self.copies else min(updated + 1, self.depth)
        trees = self.batch + self.copies  # where the tree rows begin

        def level(k: int) -> Tensor:
            return trees + self._rows(k - 1) + torch.arange(self.slots * 2**k)

        roots = torch.arange(self.batch)
        if self.copies:
            children = self.batch + torch.arange(self.copies)
        else:
            children = level(1).view(-1, 1, 2).expand(-1, 2**self.depth, -1).flatten()
        edges = [(roots, roots), (children, roots.repeat_interleave(2))]
        edges += [(level(k), level(k)) for k in range(1, updated + 1)]
        edges += [(level(k), level(k - 1).repeat_interleave(2)) for k in range(2, read + 1)]
        source = torch.cat([s for s, _ in edges])
        target = torch.cat([t for _, t in edges])
        degree = torch.full((trees + self._rows(read),), 3.0)  # two children and itself
        if read == self.depth:
            degree[level(self.depth)] = 1.0  # a leaf has its self-loop alone
        weight = (degree[source] * degree[target]).rsqrt()
        edge_index = torch.stack([source, target])
        return LayerGraph(self._rows(read), self._rows(updated), edge_index.to(device), weight.to(device))

    def _rows(self, level: int) -> int:
        """Tree rows up to and with a level."""
        return self.slots * (2 ** (level + 1) - 2)


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
