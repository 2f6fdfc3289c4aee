"""Arguments that differ from graph to graph: a kernel is compiled once for all their values.

Triton makes a variant of a kernel for numbers that 16 divides, and one for 1. These numbers only bound loops and place
rows, whose length is a constant of the kernel, so a variant would gain nothing and cost seconds.
"""

SIZES = [
    "chunk",
    "cleared",
    "end_tile",
    "first_run",
    "first_tile",
    "members",
    "members_per_run",
    "numel",
    "others",
    "replicas",
    "rows",
    "runs",
    "sources",
    "targets",
    "tiles",
    "tiles_per_program",
    "tiles_per_run",
]
