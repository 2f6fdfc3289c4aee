"""Which index of a compiled graph a call is about: there the memory of an index does not tell.

``torch.compile`` lets an index that it computes take the memory of an earlier one that is no longer needed, and its
kernels write without a trace in the version counter. Two indices of one graph then look the same to a cache that knows
storages, shapes and versions alone; nor does it see that an index was written to in place. So while a graph is traced
every tensor that an index comes from is given a number, another one after each write to it, and the number goes with
the call as a constant.
"""

import itertools
import operator
from typing import Any

import torch
from torch import Tensor

_numbers = itertools.count(1)
_noted = 0
_KEY = "nsr_index"
_IN_PLACE = {"iadd", "isub", "imul", "ifloordiv", "imod", "iand", "ior", "ixor", "ilshift", "irshift"}  # x += 1, ...
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


def _number(index: torch.fx.Node) -> int:
    """Of the tensor that an index is a view of, as it is now: places within it tell views apart."""
    viewed = _viewed(index)
    writes = sum(_writes(node) and _viewed(node.args[0]) is viewed for node in viewed.graph.nodes)
    return viewed.meta.setdefault(f"{_KEY} after {writes} writes", next(_numbers))


def _viewed(node: Any) -> Any:
    """What a node is a view of. Rows that another tensor picks are a copy."""
    while isinstance(node, torch.fx.Node) and (_is_view(node) or _writes(node)):
        node = node.args[0]
    return node


def _is_view(node: torch.fx.Node) -> bool:
    return node.target in _VIEWS and node.all_input_nodes == [*node.args[:1]]


def _writes(node: torch.fx.Node) -> bool:
    """Whether a node changes its first argument, which is then also what it returns."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return node.target is operator.setitem or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
