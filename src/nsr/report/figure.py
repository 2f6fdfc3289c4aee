"""A figure: panels under one caption, with a key and the number of runs behind it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One entry of a figure's legend."""

    text: str
    series: int
    kind: str = "line"  # line, dash, dot, bound, ring, bar, limit, band


@dataclass(frozen=True)
class Panel:
    """One chart with a heading."""

    heading: str
    svg: str


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or one of ours when ``ours`` is set.

    Args:
        label: The paper's label.
        title: What it shows.
        panels: Its charts; empty while nothing has been run.
        keys: The legend.
        remark: How to read it.
        runs: How many runs it is computed from.
        command: What to run to fill it.
        ours: Not a figure of the paper.
    """

    label: str
    title: str
    panels: tuple[Panel, ...]
    keys: tuple[Key, ...] = ()
    remark: str = ""
    runs: int = 0
    command: str = ""
    ours: bool = False
