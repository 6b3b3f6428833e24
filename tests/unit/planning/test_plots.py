"""Plots of a step's time, and of cost against days."""

import pytest

from shardwise.tools.plan import plots
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Estimate
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.cost import cost_of
from shardwise.tools.plan.memory import KINDS as MEMORY_KINDS
from shardwise.tools.plan.plots import TimedPlacement
from shardwise.tools.plan.stages import KINDS

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def _placement(label: str, seconds: float, device: str = "8xH100") -> TimedPlacement:
    parts = {"matrix products": seconds * 0.75, "update": seconds * 0.25}
    estimate = Estimate(seconds=seconds, error=0.2, parts=parts, per_rank=(parts, parts))
    cost = cost_of(seconds, 0.2, 1e5, parse_cluster(device, read_catalogue(user=False)))
    return TimedPlacement(label, estimate, cost)


def test_each_kind_has_a_color() -> None:
    assert len(KINDS) == len(plots.TIME_COLORS)
    assert len(MEMORY_KINDS) == len(plots.MEMORY_COLORS)


def test_draws_a_bar_per_stage_and_lists_the_numbers() -> None:
    from matplotlib.figure import Figure

    placements = [_placement("--zero 3", 2.0), _placement("--zero 2", 1.5)]
    figure = Figure()
    plots.draw_times(figure, placements)
    names = [each.get_text() for each in figure.axes[0].get_yticklabels()]
    assert names == [f"--zero {level}, stage {stage}" for level in (3, 2) for stage in (0, 1)]
    assert plots.kinds_of(placements) == ["matrix products", "update"]
    assert plots.cells(placements[0], placements) == ["2 ±20%", "1.5", "0.5"]


def test_frontier_needs_prices() -> None:
    assert plots.priced([_placement("--zero 0", 1.0, "TPU-v5e")]) == []
    assert len(plots.priced([_placement("--zero 0", 1.0)])) == 1


@pytest.mark.parametrize(
    ("seconds", "time", "cost"),
    [(2.0, "s per step", "days"), (0.002, "ms per step", "hours"), (2e-6, "µs per step", "hours")],
)
def test_axes_name_the_unit_of_their_values(seconds: float, time: str, cost: str) -> None:
    from matplotlib.figure import Figure

    placements = [_placement("--zero 0", seconds), _placement("--zero 3", 1.5 * seconds)]
    figures = Figure(), Figure()
    plots.draw_times(figures[0], placements)
    plots.draw_frontier(figures[1], plots.priced(placements))
    times, costs = (figure.axes[0] for figure in figures)
    assert (times.get_xlabel(), costs.get_xlabel()) == (time, cost)
    lengths = [bar.get_width() for bar in times.patches[:2]]
    assert lengths == pytest.approx([0.75 * 2.0] * 2)


def test_peak_is_drawn_among_many_operations() -> None:
    import numpy as np

    curve = np.zeros(10_000, dtype=np.int64)
    curve[4321] = 7
    shown = plots.most_of_each(curve, 500)
    assert len(shown) == 500
    assert 4321 in shown


def test_only_unbeaten_placements_have_error_bars_and_labels() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    placements = [_placement(f"--zero {level}", 1.0 + level) for level in range(3)]
    plots.draw_frontier(figure, plots.priced(placements))
    (axis,) = figure.axes
    assert [each.get_text() for each in axis.texts] == ["--zero 0"]
    assert len(axis.containers) == 1


def test_dollars_are_a_range() -> None:
    cost = _placement("--zero 0", 1.0).cost
    assert cost is not None
    assert cost.dollar_range == f"{cost.dollars_low:,.0f}-{cost.dollars_high:,.0f}"
    unpriced = _placement("--zero 0", 1.0, "TPU-v5e").cost
    assert unpriced is not None
    assert unpriced.dollar_range == "-"
