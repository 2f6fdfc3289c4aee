"""Charts are well-formed, stay inside their panel, and escape what they are told."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from nsr.report.chart import WIDTH, Axis, Chart, heat_map, nice_ticks
from nsr.report.token_figures import pareto_front


def test_a_chart_is_well_formed_and_escaped() -> None:
    chart = Chart('<b>"title"</b>', Axis(0, 1, "x & y"), Axis(1, 100, "log", logarithmic=True))
    chart.line([(0, 1), (1, 100)], 0, "dash")
    chart.band([(0, 1), (1, 10)], [(0, 10), (1, 100)], 1)
    chart.dot((0.5, 10), 2, "<script>")
    chart.bound((0.5, 20), 2, "<script>")
    chart.bar((0.2, 1), (0.2, 50), 8, 3, "bar")
    chart.rule((0, 10), (1, 10))
    chart.say((0.5, 10), "a < b")
    root = ElementTree.fromstring(chart.svg())
    assert root.attrib["aria-label"] == '<b>"title"</b>'
    assert "<script>" not in chart.svg()


@pytest.mark.parametrize("logarithmic", [False, True])
def test_data_lands_inside_the_panel(logarithmic: bool) -> None:
    chart = Chart("t", Axis(1, 8, "x", logarithmic=logarithmic), Axis(0, 1, "y"))
    assert chart.at((1, 0))[0] < chart.at((2, 0))[0] < chart.at((8, 0))[0] < WIDTH
    assert 0 < chart.at((1, 1))[1] < chart.at((1, 0))[1] < chart.height


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-33.3, 100), (0.314, 0.317), (0, 2e6), (10, 70)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 7
    assert low - 1e-9 <= min(ticks) <= max(ticks) <= high + 1e-9


def test_a_heat_map_has_one_box_a_value() -> None:
    svg = heat_map("t", ["1.8×", "2.5×"], [[0.1, 0.2, 0.0], [0.3, 0.1, 0.0]], 0.3, "block")
    assert len(re.findall('class="heat"', svg)) == 6
    assert "--heat:100%" in svg


def test_nothing_on_the_front_is_beaten() -> None:
    points = [(float(i * 7 % 11), float(i * 5 % 13)) for i in range(40)]
    front = pareto_front(points)
    assert front == sorted(front)
    for x, y in points:
        assert any(fx <= x and fy >= y for fx, fy in front)
