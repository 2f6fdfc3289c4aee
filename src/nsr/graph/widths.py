"""How wide a site is: asked of a copy of it, on two nodes or on an example input, never of the site itself."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.conv import MessagePassing

from nsr.graph.host import Observed, conv_of, exchange_site
from nsr.graph.readers import Reader
from nsr.graph.recording import Unreadable


class Widths(NamedTuple):
    """What the branch of a site has to fit."""

    in_source: int
    in_target: int
    out: int
    heads: int


class Measured(Observed):
    """Mixed into a copy of a site: notes its widths in passing."""

    nsr_widths: Widths | Unreadable | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's own."""
        try:
            out, members, source, target = self.nsr_observe(args, kwargs)
        except Unreadable as reason:
            self.nsr_widths = reason
            return super().forward(*args, **kwargs)
        update = out[0] if isinstance(out, tuple) else out
        in_target = 0 if target is None else target.shape[1]
        self.nsr_widths = Widths(source.shape[1], in_target, update.shape[-1], members.heads)
        return out


def widths_of(name: str, host: nn.Module, reader: Reader) -> Widths | Unreadable:
    """The widths of a site from the module alone, or why it has none: a copy of it runs on two nodes.

    Raises:
        ValueError: The module is lazy, or takes more than node features, edges and edge features.
    """
    title = f"{name or 'the model itself'} ({type(conv_of(host)).__name__})"
    remedy = "Pass example=, one input of the model: attach(model, example=(x, edge_index))."
    arguments = _two_nodes(host)
    if arguments is None:
        raise ValueError(f"The widths of {title} cannot be read from it: it is lazy or does not say. {remedy}")
    twin = _twin(host)
    exchange_site(twin, Measured, reader)
    try:
        with torch.no_grad():
            twin(**arguments)
    except Exception as error:  # whatever a foreign forward raises on made-up input
        raise ValueError(f"The widths of {title} cannot be read from it ({error}). {remedy}") from error
    return cast(Widths | Unreadable, twin.nsr_widths)


def widths_by_example(
    model: nn.Module, readers: Mapping[str, Reader], example: Sequence[Any] | Mapping[str, Any]
) -> dict[str, Widths | Unreadable]:
    """The widths of the sites in ``readers``, or why they have none, from one run of a copy of the model.

    No random number is used up.

    Raises:
        ValueError: The run does not reach a site.
    """
    twin = _twin(model)
    hosts = {name: twin.get_submodule(name) for name in readers}
    for name, host in hosts.items():
        exchange_site(host, Measured, readers[name])
    devices = {weight.device for weight in twin.parameters() if weight.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices):
        _ = twin(**example) if isinstance(example, Mapping) else twin(*example)
    unreached = [name for name, host in hosts.items() if host.nsr_widths is None]
    if unreached:
        raise ValueError(f"The example input did not reach {unreached}; leave them out with include=.")
    return {name: cast(Widths | Unreadable, host.nsr_widths) for name, host in hosts.items()}


def _twin(module: nn.Module) -> nn.Module:
    """A copy that may run on any graph: no dropout, and no graph remembered (PyG keeps them in ``_cached_...``)."""
    twin = copy.deepcopy(module).eval()
    for part in twin.modules():
        vars(part).update({name: None for name in vars(part) if name.startswith("_cached_")})
    return twin


def _two_nodes(host: nn.Module) -> dict[str, Any] | None:
    """Arguments for a forward of ``host`` on two nodes with an edge each way, ``None`` if it takes other things."""
    conv = conv_of(host)
    widths = _input_widths(conv)
    if widths is None:
        return None
    like = next(conv.parameters(), torch.empty(0))
    parameters = list(inspect.signature(type(host).forward).parameters.values())[1:]
    x = tuple(torch.zeros(2, width, dtype=like.dtype, device=like.device) for width in widths)
    single = isinstance(host, MessagePassing) and isinstance(getattr(conv, "in_channels", None), tuple | list)
    known: dict[str, Any] = {
        parameters[0].name: x if single else x[0],
        "edge_index": torch.tensor([[0, 1], [1, 0]], device=like.device),
        "x_0": x[0],
    }
    edge_width = _edge_width(conv, widths[0])
    if edge_width is not None:
        known["edge_attr"] = torch.zeros(2, edge_width, dtype=like.dtype, device=like.device)
    accepted = {p.name for p in parameters}
    required = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return {name: known[name] for name in known if name in accepted} if required <= known.keys() else None


def _input_widths(conv: MessagePassing) -> tuple[int, int] | None:
    """Features of source and target nodes, ``None`` if the conv is lazy or does not say."""
    if isinstance(conv, pyg.GINConv | pyg.GINEConv):
        first = next(
            (layer for layer in conv.nn.modules() if hasattr(layer, "weight") and layer.weight.dim() == 2), None
        )
        widths = None if first is None else first.weight.shape[1]
    else:
        widths = getattr(conv, "in_channels", getattr(conv, "channels", None))
    if isinstance(widths, int):
        widths = (widths, widths)
    if not isinstance(widths, tuple | list) or len(widths) != 2 or min(widths) < 1:
        return None
    return widths[0], widths[1]


def _edge_width(conv: MessagePassing, in_source: int) -> int | None:
    """Features of an edge, ``None`` if the conv takes none."""
    if isinstance(conv, pyg.GINEConv):
        return in_source if conv.lin is None else conv.lin.weight.shape[1]
    width = getattr(conv, "edge_dim", None)
    return width if isinstance(width, int) and width > 0 else None
