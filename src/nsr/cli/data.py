"""``nsr data``: what data there is, where it lies, and whether it is what it should be."""

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The data sets: list, fetch, verify, describe; generate the tree task.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


@app.command()
def tree(
    depth: Annotated[int, typer.Option(help="Depth of the trees, 2 to 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of permutations and split.")] = 11,
    as_json: AsJson = False,
) -> None:
    """Generate Tree-NeighborsMatch and print its counts and hashes."""
    from nsr.data.tree import tree_task

    task = tree_task(depth, seed)
    facts = {
        "depth": depth,
        "seed": seed,
        "permutations": len(task.permutations),
        "train_samples": len(task.train),
        "test_samples": len(task.test),
        "first_values": task.permutations[0, :8].tolist(),
        "sha256": task.hashes(),
    }
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(f"{key:14} {facts[key]}" for key in facts))
