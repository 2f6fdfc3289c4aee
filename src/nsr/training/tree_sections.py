"""Where the weights of a tree layer lie, for what reads them from one stretch of numbers."""

from collections.abc import Mapping

from nsr.training.replicas import Replicas, Section
from nsr.training.tree_layer import LayerKind

# The names that each has in the different layers.
PLACES = {
    "W_MESSAGE": ("null_space.message.weight",),
    "W_HIDDEN": ("null_space.gate_hidden.weight",),
    "B_HIDDEN": ("null_space.gate_hidden.bias",),
    "W_GATE": ("null_space.gate_output.weight",),
    "B_GATE": ("null_space.gate_output.bias",),
    "NORM_W": ("null_space.norm.weight",),
    "NORM_B": ("null_space.norm.bias",),
    "W_FIRST": ("null_space.output.0.weight",),
    "B_FIRST": ("null_space.output.0.bias",),
    "W_SECOND": ("null_space.output.2.weight",),
    "B_SECOND": ("null_space.output.2.bias",),
    "W_CONV": ("conv.lin.weight", "conv.lin_l.weight"),
    "B_CONV": ("conv.bias", "conv.lin_l.bias"),
    "W_ROOT": ("conv.lin_r.weight",),
    "UPDATE_W": ("update.0.weight",),
    "UPDATE_B": ("update.0.bias",),
}


def places(begins: Mapping[str, int], prefix: str = "") -> dict[str, int]:
    """The places of :data:`PLACES` among names that begin with ``prefix``; 0 for what a layer does not have."""
    return {
        key: next((begins[prefix + name] for name in names if prefix + name in begins), 0)
        for key, names in PLACES.items()
    }


def layer_sections(kind: LayerKind, replicas: Replicas, layers: int) -> list[Section]:
    """The weights of each layer as one tensor, with its :func:`places`.

    Of GIN the branch alone: its conv, whose BatchNorms need all rows at once, is computed apart.
    """
    gin = kind.backbone == "gin"
    if gin and kind.source is None:  # nothing but the aggregation
        return [Section(replicas.rows.new_empty(replicas.count, 0), dict.fromkeys(PLACES, 0))] * layers
    part = "null_space." if gin else ""
    sections = []
    for number in range(layers):
        values, begins = replicas.section(f"layers.{number}.{part}")
        sections.append(Section(values, places({f"{part}{name}": at for name, at in begins.items()})))
    return sections
