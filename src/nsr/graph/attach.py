"""Attach the branch to any PyG model: one call, from outside, and back.

A *site* is a message-passing layer: a conv, or a layer around a conv that says so (see
:class:`nsr.graph.models.GraphLayer`). Attaching exchanges the site's class for a subclass of it, whose ``forward`` runs
the host's own and adds the update, and gives it one child, the branch. Every key of the host's state dict stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from nsr.graph.branch import GraphResidual, Init, Source
from nsr.graph.host import CHILD, Corrected, conv_of, exchange_site
from nsr.graph.readers import Reader, is_mean, reader_for
from nsr.graph.recording import Recording, Unreadable, own_class, restore
from nsr.graph.sites import Refused, Site, Sites
from nsr.graph.widths import Widths, widths_by_example, widths_of
from nsr.kernels import path_for


def attach(
    model: nn.Module,
    source: Source = "residual",
    init: Init = "identity",
    include: str | Iterable[str] | None = None,
    width: int | None = None,
    dropout: float = 0.0,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    fused: bool = True,
) -> Sites:
    """Add a null-space branch at every linear aggregation of a PyG model, in place.

    With ``init="identity"`` the model computes what it did, to the bit, until the branches are trained.

    Args:
        model: Any module with PyG message-passing layers in it.
        source: What the branches process, see :class:`nsr.graph.GraphResidual`; the controls of the paper are
            ``"raw"`` and ``"aggregate"``.
        init: ``"identity"`` or ``"paper"``.
        include: Names of sites to take, as patterns (``"convs.*"``); all by default.
        width: Width of messages and residuals. By default that of the layer's output, but at least that of its input
            up to 64: a wide input is narrowed, a narrow output does not strangle the branch.
        dropout: Of the branches.
        example: One input of the model, positional or by name. Needed where widths cannot be read from the layers: lazy
            ones, and those that take more than node features, edges and edge features.
        fused: Take the fused kernels where they can run; the table says where, and why not. ``False`` takes the plain
            path everywhere.

    Returns:
        The sites; print them.

    Raises:
        ValueError: Nothing to attach to, branches attached already, a pattern without a match, or unknown widths.

    Example:
        >>> import nsr, torch
        >>> from torch_geometric.nn import GCN
        >>> model = GCN(in_channels=8, hidden_channels=8, num_layers=2)
        >>> print(nsr.attach(model))
        site     conv     members                              in  width  out  heads  parameters
        convs.0  GCNConv  edges and self-loops, as normalised   8      8    8      1         496
        convs.1  GCNConv  edges and self-loops, as normalised   8      8    8      1         496
        2 sites, 992 parameters
        plain: width 8, and the fused kernels of a CPU take multiples of 16 channels a head
    """
    attached = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, Corrected)]
    if attached:
        raise ValueError(
            f"{own_class(model).__name__} has branches already: {', '.join(attached[:5])}. Detach them first: "
            "nsr.detach(model)."
        )
    plan, refused = _plan(model, include, example)
    # all of them before any is attached
    branches = [_branch(place, source, init, width, dropout, fused) for place in plan]
    for place, branch in zip(plan, branches, strict=True):
        like = _weight_of(place.host, model)
        branch.to(device=like.device, dtype=like.dtype).train(place.host.training)
        place.host.add_module(CHILD, branch)
        exchange_site(place.host, Corrected, place.reader)
    return _table(model, plan, branches, refused)


def detach(model: nn.Module) -> None:
    """Take every branch off again: the model as it was before :func:`attach`, bit for bit.

    Raises:
        ValueError: No branch is attached.
    """
    hosts = [module for module in model.modules() if isinstance(module, Corrected)]
    if not hosts:
        raise ValueError(f"{type(model).__name__} has no branch to detach; nsr.attach(model) adds them.")
    for host in hosts:
        conv = conv_of(host)
        del host._modules[CHILD]
        restore(host)
        restore(conv)


def sites(model: nn.Module, example: Sequence[Any] | Mapping[str, Any] | None = None) -> Sites:
    """Where the branches of a model are; of a model without any, where :func:`attach` would put them.

    Args:
        model: Any PyG model.
        example: As for :func:`attach`, where no branch is attached yet.
    """
    attached = [(name, host) for name, host in model.named_modules() if isinstance(host, Corrected)]
    if attached:
        convs = [cast(Recording, conv_of(host)) for _, host in attached]
        return Sites(
            tuple(
                _site(name, conv, conv.nsr_reader, getattr(host, CHILD), getattr(host, CHILD).message.weight)
                for (name, host), conv in zip(attached, convs, strict=True)
            )
        )
    plan, refused = _plan(model, None, example)
    with torch.device("meta"):
        return _table(model, plan, [_branch(place) for place in plan], refused)


class Place(NamedTuple):
    """A site as planned: the module to add to, the conv that aggregates, how to read it and how wide it is."""

    name: str
    host: nn.Module
    conv: MessagePassing
    reader: Reader
    widths: Widths


def _hosts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every message-passing layer by name: layers that name their conv, and all other convs."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(type(module), "message_passing", None), str)
        and isinstance(getattr(module, module.message_passing, None), MessagePassing)
    }
    claimed = {id(conv_of(layer)) for layer in layers.values()}
    return [
        (name, module)
        for name, module in model.named_modules()
        if name in layers or (isinstance(module, MessagePassing) and id(module) not in claimed)
    ]


def _plan(
    model: nn.Module, include: str | Iterable[str] | None, example: Sequence[Any] | Mapping[str, Any] | None
) -> tuple[list[Place], list[Refused]]:
    hosts = _hosts(model)
    if not hosts:
        raise ValueError(
            f"{type(model).__name__} has no message-passing layer: nsr.attach looks for "
            "torch_geometric.nn.MessagePassing modules."
        )
    patterns = None if include is None else [include] if isinstance(include, str) else list(include)
    if patterns is not None:
        names = [name for name, _ in hosts]
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if idle or not patterns:
            raise ValueError(f"include={patterns} matches nothing for {idle}; the sites are {names}.")
        hosts = [(name, host) for name, host in hosts if any(fnmatchcase(name, pattern) for pattern in patterns)]

    places, readers, refused = [], {}, []
    for name, host in hosts:
        try:
            if CHILD in host._modules:
                raise ValueError(f"it has a child named {CHILD!r} already, which is the branch's name.")
            readers[name] = reader_for(conv_of(host))
        except ValueError as error:
            refused.append(Refused(name, str(error)))
    by_example = {} if example is None else widths_by_example(model, readers, example)
    for name, host in hosts:
        if name not in readers:
            continue
        widths = by_example[name] if example is not None else widths_of(name, host, readers[name])
        if isinstance(widths, Unreadable):
            refused.append(Refused(name, str(widths)))
        else:
            places.append(Place(name, host, conv_of(host), readers[name], widths))
    if refused and (patterns is not None or not places):
        reasons = "; ".join(f"{r.name or 'the model itself'}: {r.reason}" for r in refused)
        raise ValueError(f"{len(refused)} of the chosen sites cannot have a branch. {reasons}")
    return places, refused


def _branch(
    place: Place,
    source: Source = "residual",
    init: Init = "identity",
    width: int | None = None,
    dropout: float = 0.0,
    fused: bool = True,
) -> GraphResidual:
    in_source, in_target, out, heads = place.widths
    if width is None:
        width = max(out, min(in_source, 64))
        width += -width % heads  # each head has an equal share
    return GraphResidual(in_source, in_target, width, out, heads, source, dropout, init, fused)


def _weight_of(host: nn.Module, model: nn.Module) -> Tensor:
    """A weight of the host, or else of the model, for its device and dtype."""
    weights = chain(host.parameters(), model.parameters())
    return next((weight for weight in weights if weight.is_floating_point()), torch.empty(0, device="cpu"))


def _table(model: nn.Module, plan: list[Place], branches: list[GraphResidual], refused: list[Refused]) -> Sites:
    rows = [
        _site(place.name, place.conv, place.reader, branch, _weight_of(place.host, model))
        for place, branch in zip(plan, branches, strict=True)
    ]
    return Sites(tuple(rows), tuple(refused))


def _site(name: str, conv: MessagePassing, reader: Reader, branch: GraphResidual, like: Tensor) -> Site:
    """``like`` has the device and the dtype that the branch has or will have."""
    config = branch.config
    return Site(
        name,
        type(conv).__name__,
        reader.description + (", mean" if is_mean(conv.aggr_module) else ""),
        (config["in_source"], config["in_target"]),
        config["width"],
        config["out"],
        config["heads"],
        sum(parameter.numel() for parameter in branch.parameters()),
        path_for(
            torch.empty(0, config["width"], device=like.device, dtype=like.dtype),
            torch.empty(0, config["heads"], device=like.device, dtype=like.dtype),
            fused=None if branch.fused else False,
        ),
    )
