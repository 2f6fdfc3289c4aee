"""Tables of the report inside pages that are written by hand, so that no number in them is.

A page asks for a table by its label in a comment, which readers do not see; the table stands between it and the end:

    <!-- table tab:token-main
    Data set: VOC
    Method: ToMe | PiToMe
    columns: mIoU ↑ | mIoU + NSR ↑
    -->

    | Method | Point | mIoU ↑ | mIoU + NSR ↑ |
    ...

    <!-- end of table -->

Without wishes it is the whole table. A line that starts with one of its naming columns keeps the rows that have one of
the values there, ``columns`` the columns of numbers in the order given.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsr.report.plain import table_lines
from nsr.report.table import Row, Table

# What stands there holds no other comment: a forgotten end must not take prose with it.
_PLACE = re.compile(
    r"^<!-- table (?P<label>[^\s>]+?)(?P<wishes>(?:\s[^>]*)?)-->\n"
    r"(?:(?!<!-- ).*\n)*?"
    r"<!-- end of table -->$",
    re.MULTILINE,
)


def renewed(page: str, tables: Sequence[Table]) -> str:
    """The text of a page with each table in it as the results have it now.

    Raises:
        ValueError: A comment asks for what the report does not have, or its table has no end.
    """
    by_label = {table.label: table for table in tables}

    def filled(place: re.Match[str]) -> str:
        label = place["label"]
        if label not in by_label:
            raise ValueError(f"there is no table {label!r}; the report has {', '.join(by_label)}.")
        lines = table_lines(_chosen(by_label[label], _wishes(place["wishes"])), brief=True)
        return "\n".join([f"<!-- table {label}{place['wishes']}-->", "", *lines, "", "<!-- end of table -->"])

    text, count = _PLACE.subn(filled, page)
    asked = len(re.findall(r"^<!-- table ", page, re.MULTILINE))
    if asked != count:
        raise ValueError(f"of {asked} tables asked for, {count} have a line `<!-- end of table -->` below them.")
    return text


def _wishes(lines: str) -> dict[str, list[str]]:
    pairs = [line.partition(":") for line in lines.strip().splitlines()]
    return {key.strip(): [value.strip() for value in values.split("|")] for key, _, values in pairs}


def _chosen(table: Table, wishes: Mapping[str, list[str]]) -> Table:
    """The rows and columns asked for, less the names that are the same in every row."""
    rows = table.rows
    for key, values in wishes.items():
        if key == "columns":
            continue
        at = _position(table, key, table.names)
        rows = tuple(row for row in rows if row.names[at] in values)
        missing = set(values) - {row.names[at] for row in rows}
        if missing:
            raise ValueError(f"{table.label} has no row with {', '.join(sorted(missing))} under {key!r}.")
    columns = [_position(table, title, table.columns) for title in wishes.get("columns", table.columns)]
    names = [n for n in range(len(table.names)) if len(rows) == 1 or len({row.names[n] for row in rows}) > 1]
    return replace(
        table,
        names=tuple(table.names[n] for n in names),
        columns=tuple(table.columns[n] for n in columns),
        rows=tuple(Row(tuple(row.names[n] for n in names), tuple(row.cells[n] for n in columns)) for row in rows),
    )


def _position(table: Table, title: str, titles: Sequence[str]) -> int:
    if title not in titles:
        raise ValueError(f"{table.label} has no column {title!r}, but {', '.join(map(repr, titles))}.")
    return titles.index(title)
