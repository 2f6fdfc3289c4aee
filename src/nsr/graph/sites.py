"""The places of a model where a branch is, or would be: a value that prints as a table."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """One aggregation of a model.

    Attributes:
        name: The module whose update the branch adds to, by its name in the model.
        conv: Class of the conv that aggregates.
        members: The members and coefficients in words.
        inputs: Widths of the source and the target table.
        width: Width of messages and residuals.
        outputs: Width of the update.
        heads: Heads, each with its own coefficients.
        parameters: What the branch adds.
        path: Which implementation the branch takes where its weights are now, and why.
    """

    name: str
    conv: str
    members: str
    inputs: tuple[int, int]
    width: int
    outputs: int
    heads: int
    parameters: int
    path: str


@dataclass(frozen=True)
class Refused:
    """A message-passing layer that has no null-space residual, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Sites:
    """All sites of a model, in its own order. Printing it gives a table."""

    sites: tuple[Site, ...]
    refused: tuple[Refused, ...] = ()

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __getitem__(self, index: int) -> Site:
        return self.sites[index]

    @property
    def parameters(self) -> int:
        """What all branches together add."""
        return sum(site.parameters for site in self.sites)

    @property
    def paths(self) -> tuple[str, ...]:
        """The different paths that the sites take, in their order."""
        return tuple(dict.fromkeys(site.path for site in self.sites))

    def __str__(self) -> str:
        rows = [("site", "conv", "members", "in", "width", "out", "heads", "parameters")]
        rows += [
            (
                site.name or "(the model itself)",
                site.conv,
                site.members,
                str(site.inputs[0]) if len(set(site.inputs)) == 1 else f"{site.inputs[0]}, {site.inputs[1]}",
                str(site.width),
                str(site.outputs),
                str(site.heads),
                f"{site.parameters:,}",
            )
            for site in self.sites
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(row, widths, (False,) * 3 + (True,) * 5, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines.append(f"{len(self)} site{'' if len(self) == 1 else 's'}, {self.parameters:,} parameters")
        by_path = {path: [site.name for site in self.sites if site.path == path] for path in self.paths}
        lines += [path if len(by_path) == 1 else f"{', '.join(names)}: {path}" for path, names in by_path.items()]
        lines += [f"not {refused.name}: {refused.reason}" for refused in self.refused]
        return "\n".join(lines)
