"""The host's side of a site: run its own forward, see what it aggregated, add to what it returns."""

import inspect
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from nsr.graph.members import Members
from nsr.graph.readers import Reader
from nsr.graph.recording import Exchanged, Recording, Unreadable, exchange

CHILD = "null_space"


class Observation(NamedTuple):
    """One forward pass of a host."""

    out: Any
    members: Members
    source: Tensor  # shape: [S, F], the table that members.source indexes
    target: Tensor | None  # shape: [T, F']


class Observed(Exchanged):
    """Mixed into a site: its own forward pass together with the members of its aggregation."""

    nsr_input: str  # the first argument of the host's forward: node features, or those of source and target

    def nsr_observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation:
        """Run the host's own forward and see what it aggregates."""
        conv = cast(Recording, conv_of(self))
        conv.nsr_listen()
        try:
            out = super().forward(*args, **kwargs)
            members = conv.nsr_heard()
        finally:
            conv.nsr_forget()
        x = args[0] if args else kwargs[self.nsr_input]
        return Observation(out, members, *_tables(x, cast(str, conv.flow), members))


class Corrected(Observed):
    """Mixed into a site: its forward adds the branch's update to the host's own output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's own, and the update."""
        branch = getattr(self, CHILD)
        if not branch.enabled:
            return super().forward(*args, **kwargs)
        out, members, source, target = self.nsr_observe(args, kwargs)
        update = branch(members, source, target)
        if isinstance(out, tuple):  # a conv that returns its attention weights too
            return out[0] + update.to(out[0].dtype), *out[1:]
        return out + update.to(out.dtype)

    def reset_parameters(self) -> None:
        """The host's own, and the branch's."""
        if hasattr(self.nsr_host_class, "reset_parameters"):
            super().reset_parameters()  # type: ignore[misc]
        getattr(self, CHILD).reset_parameters()


def conv_of(host: nn.Module) -> MessagePassing:
    """The conv that aggregates at a site: the site itself, or the child that it names."""
    return host if isinstance(host, MessagePassing) else getattr(host, cast(str, host.message_passing))


def exchange_site(host: nn.Module, layer: type[Observed], reader: Reader) -> None:
    """Make a module and its conv a site: ``layer`` on the module, a recording on the conv."""
    first = list(inspect.signature(type(host).forward).parameters)[1]
    if isinstance(host, MessagePassing):
        exchange(host, layer, Recording, nsr_reader=reader, nsr_input=first)
    else:
        exchange(conv_of(host), Recording, nsr_reader=reader)
        exchange(host, layer, nsr_input=first)


def _tables(x: Any, flow: str, members: Members) -> tuple[Tensor, Tensor | None]:
    """Source and target table of a site from the first argument of its forward."""
    source, target = (x[0], x[1]) if isinstance(x, tuple | list) else (x, x)
    if flow == "target_to_source":
        source, target = target, source
    for table in (source, target):
        if table is not None and not (isinstance(table, Tensor) and table.is_floating_point()):
            raise Unreadable("the first argument of its forward is no table of node features, which a branch reads.")
        if table is not None and table.dim() != 2:
            raise ValueError(
                f"Node features have shape {tuple(table.shape)}; a branch takes [N, F]. Make a batch one large graph "
                "(torch_geometric.data.Batch) instead of a leading axis."
            )
    if target is not None and target.shape[0] > members.num_targets:
        # a layer around a conv may take its first nodes as targets, as loaders order them
        target = target[: members.num_targets]
    return members.source_table(source, target), target
