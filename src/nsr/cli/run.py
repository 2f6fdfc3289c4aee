"""``nsr run``: the paper's experiments, one command each."""

import typer

from nsr.cli.run_graph import add_graph
from nsr.cli.run_segmentation import add_segmentation

app = typer.Typer(no_args_is_help=True, help="The paper's experiments; each writes one result a cell under results/.")
add_graph(app)
add_segmentation(app)
