"""A conv that notes the members of its aggregation while it runs.

PyG's own hooks are skipped, without a word, under ``torch.compile`` and on fused paths. Here the conv's class is
exchanged for a subclass of it, so the noting is an ordinary method: it compiles without a graph break, deep-copies,
pickles, and the conv keeps its place, its parameters and its own ``forward``.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn.conv import MessagePassing

from nsr.graph.members import Members
from nsr.graph.readers import Reader, read


class Unreadable(ValueError):
    """A conv whose forward pass does not show one aggregation."""


class Exchanged(nn.Module):
    """A module whose class was exchanged for a subclass of it, see :func:`exchange`."""

    nsr_host_class: type[nn.Module]
    nsr_recipe: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made on the fly has no importable name: pickle and deepcopy make it anew.
        return _blank, self.nsr_recipe, self.__getstate__()


class _Notes:
    """What one forward pass of a conv has shown so far."""

    members: Members | None = None
    messages: Tensor | None = None


class _Listening(threading.local):
    """The forward passes that this thread follows, by the id of the conv: threads may share a model."""

    def __init__(self) -> None:
        self.notes: dict[int, _Notes] = {}


_LISTENING = _Listening()


class Recording(Exchanged, MessagePassing):
    """Mixed into a conv: between :meth:`nsr_listen` and :meth:`nsr_forget` it notes what it aggregates.

    A conv that propagates several times (TAG, SG, APPNP, ...) is read at its first hop, that of its own input.
    """

    nsr_reader: Reader
    nsr_notes: _Notes | None = None  # the latest, for what torch.compile traces, which sees no threads

    def nsr_listen(self) -> None:
        """Note the members of the forward pass that follows."""
        self.nsr_notes = _Notes()
        if not torch.compiler.is_compiling():
            _LISTENING.notes[id(self)] = self.nsr_notes

    def nsr_heard(self) -> Members:
        """What was noted."""
        notes = self._nsr_own()
        if notes is None or notes.members is None:
            raise Unreadable(f"{type(self).__name__} did not propagate in this forward pass: there are no members.")
        return notes.members

    def nsr_forget(self) -> None:
        """Note nothing any more."""
        self.nsr_notes = None
        if not torch.compiler.is_compiling():
            _LISTENING.notes.pop(id(self), None)

    def _nsr_own(self) -> _Notes | None:
        """Those of this thread; after a graph break a forward may go on the other way than it began."""
        latest = self.nsr_notes
        return latest if torch.compiler.is_compiling() else _LISTENING.notes.get(id(self), latest)

    def propagate(self, edge_index: Any, size: Any = None, **arguments: Any) -> Tensor:
        """The conv's own."""
        return self._nsr_note(super().propagate, edge_index, size, arguments)

    def _orig_propagate(self, edge_index: Any, size: Any = None, **arguments: Any) -> Tensor:
        # PyG switches to this one for explanations and decomposed layers.
        return self._nsr_note(super()._orig_propagate, edge_index, size, arguments)

    _jinja_propagate = propagate

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The conv's own; its messages are kept where they are read."""
        notes = self._nsr_own()
        if notes is not None and notes.members is None and self.nsr_reader.needs_messages:
            notes.messages = inputs
        return super().aggregate(inputs, *args, **kwargs)

    def _nsr_note(
        self, propagate: Callable[..., Tensor], edge_index: Any, size: Any, arguments: dict[str, Any]
    ) -> Tensor:
        out = propagate(edge_index, size=size, **arguments)
        notes = self._nsr_own()
        if notes is None:
            return out
        if notes.members is None:
            messages, notes.messages = notes.messages, None
            notes.members = read(self, self.nsr_reader, edge_index, size, arguments, out, messages)
        elif self.nsr_reader.by_message:
            raise Unreadable(
                f"{type(self).__name__} propagates more than once in a forward pass, so which of its aggregations a "
                "branch should read is not defined. Leave it out with include=."
            )
        return out

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # PyG writes generated methods into the class of the instance: it must be the conv's own class.
        own = type(self)
        self.__class__ = cast(type[Recording], self.nsr_host_class)
        self._set_jittable_templates(raise_on_error)
        self.__class__ = own


class _Read(Exception):
    """The aggregation has been read; nothing after it is of interest."""


class RunToAggregation(Recording):
    """Leaves the forward pass as soon as the aggregation has been read."""

    def _nsr_note(self, *args: Any) -> Tensor:
        super()._nsr_note(*args)
        raise _Read


def run_to_aggregation(conv: MessagePassing, reader: Reader, *args: Any, **kwargs: Any) -> Members:
    """Run ``conv`` up to its first aggregation and return its members.

    The class of ``conv`` is exchanged; its buffers stay as they are.
    """
    exchange(conv, RunToAggregation, nsr_reader=reader)
    buffers = {name: buffer.clone() for name, buffer in conv.named_buffers()}  # of a BatchNorm before the aggregation
    conv.nsr_listen()
    try:
        with suppress(_Read):
            functional_call(conv, buffers, args, kwargs)
        return conv.nsr_heard()
    finally:
        conv.nsr_forget()


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without what was mixed into it here."""
    return module.nsr_host_class if isinstance(module, Exchanged) else type(module)


def exchange(module: nn.Module, *layers: type[Exchanged], **attributes: Any) -> None:
    """Put ``layers``, with ``attributes`` of the class, before the module's own class."""
    host_class: Any = own_class(module)
    module.__class__ = _subclass(host_class, layers, tuple(attributes.items()))


def restore(module: nn.Module) -> None:
    """Give a module its own class back, and forget what was noted; a module of its own class stays as it is."""
    if not isinstance(module, Exchanged):
        return
    module.__class__ = cast(type[Exchanged], module.nsr_host_class)
    for name in [name for name in vars(module) if name.startswith("nsr_")]:
        delattr(module, name)
    if "propagate" in vars(module):  # PyG bound ours to the instance, for an explanation
        del module.propagate
        if module.explain:
            module.propagate = type(module)._orig_propagate.__get__(module, MessagePassing)  # type: ignore[attr-defined]


@cache
def _subclass(host_class: Any, layers: tuple[type, ...], attributes: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    """It keeps the name of the host's class, so that the module prints as before."""
    namespace = {"nsr_host_class": host_class, "nsr_recipe": (host_class, layers, attributes), **dict(attributes)}
    documented = {"__module__": host_class.__module__, "__doc__": host_class.__doc__}
    return type(host_class.__name__, (*layers, host_class), {**namespace, **documented})


def _blank(host_class: Any, layers: tuple[type, ...], attributes: tuple[tuple[str, Any], ...]) -> nn.Module:
    made = _subclass(host_class, layers, attributes)
    return made.__new__(made)
