"""Which index of a compiled graph a call is about: there the memory of an index does not tell.

``torch.compile`` lets an index that it computes take the memory of an earlier one that is no longer needed, and its
kernels write without a trace in the version counter. Two indices of one graph then look the same to a cache that knows
storages, shapes and versions alone. So while a graph is traced every tensor that an index comes from is given a number,
and the number goes with the call as a constant.
"""

import itertools
import operator
from typing import Any

import torch
from torch import Tensor

_numbers = itertools.count(1)
_noted = 0
_KEY = "nsr_index"
_VIEWS = {operator.getitem, torch.select, torch.unbind, "select", "unbind", "detach", "view"}


def index_origin(source: Tensor, target: Tensor) -> int:
    """A number for where both ends of the members come from; 0 outside a compiled graph."""
    if not torch.compiler.is_dynamo_compiling():
        return 0
    from torch._dynamo.comptime import comptime

    comptime(_note)
    return _last_noted()


@torch.compiler.assume_constant_result
def _last_noted() -> int:
    return _noted


def _note(context: Any) -> None:
    """Number the origins of the caller's ``source`` and ``target``, while it is traced."""
    global _noted
    first, second = (_number(context.get_local(name).as_proxy().node) for name in ("source", "target"))
    _noted = first << 24 | second


def _number(node: torch.fx.Node) -> int:
    """Of the tensor that an index is a view of: places within it tell views apart."""
    while node.op in ("call_function", "call_method") and node.target in _VIEWS and _by_constants(node):
        node = node.all_input_nodes[0]
    return node.meta.setdefault(_KEY, next(_numbers))


def _by_constants(node: torch.fx.Node) -> bool:
    """Whether nothing but the first argument is a tensor: rows that another tensor picks are a copy."""
    return len(node.all_input_nodes) == 1
