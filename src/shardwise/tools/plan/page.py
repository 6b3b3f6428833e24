"""Writes a plan's page: memory of a step by state, its time by kind, cost; and the same as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.messages.printable import as_utf8, in_bytes, in_shell
from shardwise.tools.plan import memory_plot, search, time_plots
from shardwise.tools.plan.memory_plot import DrawnMemory
from shardwise.tools.plan.time_plots import TimedPlacement
from shardwise.tools.report import plot_look
from shardwise.tools.report.plot_look import FAINT, GREY, INK

if TYPE_CHECKING:
    from shardwise.tools.plan.plans import Plan
    from shardwise.tools.plan.search import Line

DRAWN = 4
"""Placements whose memory is drawn."""

LISTED = 8
"""Placements that stand above the pictures; the others unfold."""

MOST_TIMED = 12
"""Placements whose time is drawn."""

VARIABLES = {INK: "ink", GREY: "grey", FAINT: "faint"}
"""Colors of the plots, and the names that they have in the style sheet of the page."""

STYLE = plot_look.STYLE | plot_look.TITLES | {"font.size": 10, "svg.hashsalt": "plan"}


def write(made: Plan, folder: Path) -> Path:
    """Write plan.html and its pictures (plan.png, time.png, cost.png) into `folder`; returns the
    page. Needs matplotlib and Jinja2."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = _timed(made)
    page = folder / "plan.html"
    html = plot_look.render_page(
        "shardwise.tools.plan",
        headline=f"{made.request.script.name} on {made.cluster}",
        notes=made.notes(),
        pictures=list(_pictures(made, timed, folder)),
        rows=[_row(made, line) for line in made.lines],
        shown=LISTED,
        kinds=time_plots.kinds_of(timed),
        times=[(each.label, *time_plots.cells(each, timed)) for each in timed],
    )
    page.write_bytes(as_utf8(html))
    return page


def _pictures(made: Plan, timed: list[TimedPlacement], folder: Path) -> list[tuple[str, str, str]]:
    """Title, caption and SVG of each picture, which is saved as PNG too."""
    drawn = [
        DrawnMemory(label_of(line), line.memory, made.question.capacity)
        for line in made.lines[:DRAWN]
    ]
    height = 0.9 + 2.3 * len(drawn)
    memory = _saved(folder, "plan", height, lambda figure: memory_plot.draw_memory(figure, drawn))
    found = [("Memory over a step", "Dotted: backward begins. Dashed: what a device has.", memory)]
    if timed:
        rows = time_plots.bars_of(timed)
        svg = _saved(
            folder, "time", 1.6 + 0.35 * len(rows), lambda f: time_plots.draw_times(f, timed)
        )
        found.append(("Time of a step", "The whisker is the band of the estimate.", svg))
    if points := time_plots.priced(timed):
        svg = _saved(folder, "cost", 4.4, lambda f: time_plots.draw_frontier(f, points))
        found.append(("Cost against days", "The line joins what none beats in both.", svg))
    return found


def _saved(folder: Path, name: str, height: float, draw: Callable[[Any], None]) -> str:
    """Draw on a figure of `height` inches, save it as PNG; returns its SVG for the page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(9.5, height), layout="constrained")
        draw(figure)
        figure.savefig(folder / f"{name}.png", dpi=110)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return plot_look.themed(picture.getvalue(), VARIABLES, name)


def label_of(line: Line) -> str:
    """What a picture calls a placement: its flags, without the folder of a disk."""
    words = ("nvme" if word.startswith("nvme:") else word for word in search.flags_of(line))
    return " ".join(words) or "one device"


def _timed(made: Plan) -> list[TimedPlacement]:
    """Time and cost of what fits."""
    return [
        TimedPlacement(label_of(line), line.estimate, made.cost(line))
        for line in made.lines
        if line.fits and line.estimate is not None
    ][:MOST_TIMED]


def _row(made: Plan, line: Line) -> tuple[str, str, str, str]:
    """The cells of a placement: command, peak, where it is, whether it fits."""
    fits = "yes" if line.fits else f"no, {in_bytes(line.over or line.over_host)} too much"
    return in_shell(made.command_words(line)), in_bytes(line.memory.peak), line.memory.where, fits
