"""Small charts as inline SVG. Colours are CSS classes, so a chart follows the page's theme.

A chart is a panel of 340 by 250 units, shown at about that many pixels: one fills a phone, three stand side by side on
a desk, and the letters have the same size on both. Series are numbered; ``s0`` ... ``s5`` are coloured by the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

Point = tuple[float, float]

WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 12, 38


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Args:
        low: Smallest value shown.
        high: Largest value shown.
        title: What is measured, with its unit.
        ticks: Where to write numbers; chosen when empty.
        logarithmic: Equal ratios at equal distances.
        names: Words in place of the ticks' numbers.
    """

    low: float
    high: float
    title: str
    ticks: tuple[float, ...] = ()
    logarithmic: bool = False
    names: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """Where ``value`` lies, from 0 at ``low`` to 1 at ``high``."""
        if self.logarithmic:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[tuple[float, str]]:
        """Each tick with its label."""
        ticks = self.ticks or (_log_ticks(self.low, self.high) if self.logarithmic else nice_ticks(self.low, self.high))
        return [(tick, self.names[i] if self.names else number(tick)) for i, tick in enumerate(ticks)]


@dataclass
class Chart:
    """A panel that is drawn into, back to front."""

    title: str
    x: Axis
    y: Axis
    height: int = HEIGHT
    left: int = LEFT
    shapes: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """Data to drawing coordinates."""
        width, height = WIDTH - self.left - RIGHT, self.height - TOP - BOTTOM
        return self.left + width * self.x.place(point[0]), TOP + height * (1 - self.y.place(point[1]))

    def line(self, points: Sequence[Point], series: int, kind: str = "") -> None:
        """Connect points; ``kind`` adds CSS classes such as ``dash`` or ``faint``."""
        if len(points) > 1:
            self.shapes.append(f'<polyline class="line s{series} {kind}" points="{self._path(points)}"/>')

    def band(self, lower: Sequence[Point], upper: Sequence[Point], series: int) -> None:
        """Fill between two curves."""
        outline = self._path([*lower, *reversed(upper)])
        self.shapes.append(f'<polygon class="band s{series}" points="{outline}"/>')

    def dot(self, point: Point, series: int, note: str, kind: str = "", radius: float = 3.2) -> None:
        """A marker that tells ``note`` under the pointer."""
        x, y = self.at(point)
        self.shapes.append(
            f'<circle class="dot s{series} {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(note)}</title></circle>"
        )

    def bound(self, point: Point, series: int, note: str) -> None:
        """A marker for a value that is at least so high: it points upwards."""
        x, y = self.at(point)
        self.shapes.append(
            f'<path class="dot s{series}" d="M{x - 4.5:.1f} {y + 3.5:.1f}h9l-4.5 -8z">'
            f"<title>{escape(note)}</title></path>"
        )

    def bar(self, start: Point, end: Point, thickness: float, series: int, note: str, kind: str = "") -> None:
        """A bar from ``start`` to ``end``, along the axis in which they differ more."""
        (x0, y0), (x1, y1) = self.at(start), self.at(end)
        if abs(x1 - x0) > abs(y1 - y0):
            x, y, width, height = min(x0, x1), y0 - thickness / 2, abs(x1 - x0), thickness
        else:
            x, y, width, height = x0 - thickness / 2, min(y0, y1), thickness, abs(y1 - y0)
        self.shapes.append(
            f'<rect class="bar s{series} {kind}" x="{x:.1f}" y="{y:.1f}"'
            f' width="{width:.1f}" height="{height:.1f}" rx="1.5">'
            f"<title>{escape(note)}</title></rect>"
        )

    def rule(self, start: Point, end: Point, kind: str = "limit") -> None:
        """A thin straight line, for limits and zero lines."""
        (x0, y0), (x1, y1) = self.at(start), self.at(end)
        self.shapes.append(f'<line class="rule {kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')

    def say(self, point: Point, text: str, anchor: str = "start", shift: Point = (0, 0)) -> None:
        """Words at a point."""
        x, y = (place + by for place, by in zip(self.at(point), shift, strict=True))
        self.shapes.append(f'<text class="say" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self) -> str:
        """The finished panel."""
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
        grid: list[str] = []
        for tick, text in self.y.marks():
            y = self.at((self.x.low, tick))[1]
            grid.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            grid.append(f'<text x="{self.left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
        for tick, text in self.x.marks():
            x = self.at((tick, self.y.low))[0]
            grid.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(text)}</text>')
        grid.append(f'<line class="axis" x1="{self.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        grid.append(_x_title(self.x.title, (self.left + right) / 2, self.height))
        if self.y.title:
            y = (TOP + bottom) / 2
            grid.append(
                f'<text class="name" transform="translate(11 {y:.0f}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.y.title)}</text>"
            )
        return _frame(self.title, self.height, "".join(grid + self.shapes))

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))


def heat_map(title: str, rows: Sequence[str], values: Sequence[Sequence[float]], top: float, x_title: str) -> str:
    """A grid of cells, the deeper the colour the larger the value; ``top`` is full colour."""
    left, step = LEFT, (WIDTH - LEFT - RIGHT) / max(len(row) for row in values)
    tall = 28
    height = TOP + tall * len(rows) + BOTTOM
    shapes = []
    for i, (label, row) in enumerate(zip(rows, values, strict=True)):
        y = TOP + i * tall
        shapes.append(f'<text x="{left - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for j, value in enumerate(row):
            note = f"{label}, block {j}: {100 * value:.1f} % of the tokens"
            shapes.append(
                f'<rect class="heat" style="--heat:{100 * value / top if top else 0:.0f}%"'
                f' x="{left + j * step + 1:.1f}" y="{y + 1}" width="{step - 2:.1f}"'
                f' height="{tall - 2}" rx="2"><title>{escape(note)}</title></rect>'
            )
    for j in range(len(values[0])):
        shapes.append(
            f'<text x="{left + (j + 0.5) * step:.1f}" y="{height - BOTTOM + 15}" text-anchor="middle">{j}</text>'
        )
    shapes.append(_x_title(x_title, (left + WIDTH - RIGHT) / 2, height))
    return _frame(title, height, "".join(shapes))


def nice_ticks(low: float, high: float, wanted: int = 5) -> tuple[float, ...]:
    """About ``wanted`` round numbers between ``low`` and ``high``.

    >>> nice_ticks(0, 1)
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    step = (high - low) / wanted
    unit = 10.0 ** floor(log10(step))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= step * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers, the fewer the longer the axis."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    span = log10(high / low)
    factors = (1, 2, 3, 4, 6, 8) if span < 0.8 else (1, 2, 5) if span < 2.5 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)


def number(value: float) -> str:
    """A tick's number, short.

    >>> number(0.5), number(20000.0), number(-3.0), number(2e6)
    ('0.5', '20k', '−3', '2M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}".replace("-", "−")
    return f"{value:g}".replace("-", "−")


def _x_title(text: str, x: float, height: float) -> str:
    return f'<text class="name" x="{x:.0f}" y="{height - 6}" text-anchor="middle">{escape(text)}</text>'


def _frame(title: str, height: float, inside: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{inside}</svg>'
    )
