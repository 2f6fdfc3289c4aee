"""The paper's numbers, as printed, keyed by the label of their table.

``paper.json`` holds one row a printed cell group: what names the cell (experiment, merger, point, variant, ...) beside
the printed values in the table's own unit. A printed spread stands beside its mean as ``<metric>_std``.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

Row = dict[str, Any]


@cache
def _tables() -> dict[str, list[Row]]:
    return json.loads(files("nsr.report").joinpath("paper.json").read_text(encoding="utf-8"))


def rows(label: str) -> list[Row]:
    """Every row of the table with this label.

    >>> rows("tab:zinc-results")[0]["test_mae"]
    0.4732
    """
    return _tables()[label]


def labels() -> list[str]:
    """The labels of all tables."""
    return list(_tables())


@cache
def _index(label: str, metric: str) -> list[tuple[frozenset[tuple[str, Any]], Row]]:
    return [(frozenset(row.items()), row) for row in rows(label) if metric in row]


def value(label: str, where: Mapping[str, Any], metric: str) -> tuple[float | None, float | None]:
    """The printed value and its printed spread, ``None`` where the paper has none.

    Args:
        label: The table's label.
        where: What names the cell; every key must agree.
        metric: Which value of the row.

    >>> value("tab:heterophily-main", {"dataset": "tolokers", "backbone": "gcn", "variant": "nsr"}, "test")
    (84.36, 0.73)
    """
    wanted = frozenset(where.items())
    found = [row for items, row in _index(label, metric) if wanted <= items]
    assert len(found) <= 1, f"{label}: {dict(where)} names {len(found)} rows"
    return (found[0][metric], found[0].get(f"{metric}_std")) if found else (None, None)
