"""Writes a plan's HTML page, and its plots of memory, time and cost as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from shardwise.messages.printable import in_bytes, in_shell, time_unit
from shardwise.tools.plan import plots, search
from shardwise.tools.plan.plots import DrawnMemory, TimedPlacement
from shardwise.tools.report.look import save_picture
from shardwise.tools.report.page import write_page

if TYPE_CHECKING:
    from shardwise.tools.plan.plans import Plan
    from shardwise.tools.plan.search import Line

DRAWN = 4
"""Number of placements in the memory plot."""

LISTED = 8
"""Number of placements listed above the plots. The rest of the list is collapsed."""

MOST_TIMED = 12
"""Maximum number of placements in the time plot."""

WIDTH = 9.5
"""Width of the plots in inches."""


def write(plan: Plan, folder: Path) -> Path:
    """Write plan.html and its plots (plan.png, time.png, cost.png) to `folder`.

    Returns the path of plan.html. Needs matplotlib and Jinja2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timed = [
        TimedPlacement(label_of(line), line.estimate, plan.cost(line))
        for line in plan.lines
        if line.fits and line.estimate is not None
        # Lines are sorted by time, so these are the fastest.
    ][:MOST_TIMED]
    unit, size = time_unit(plots.longest_of(timed) if timed else 1.0)
    costs = [plan.cost(line) for line in plan.lines]
    page = folder / "plan.html"
    write_page(
        page,
        "shardwise.tools.plan",
        headline=f"{plan.request.script.name} on {plan.cluster}",
        notes=plan.notes(),
        pictures=list(_pictures(plan, timed, folder)),
        rows=[
            (
                in_shell(plan.command_words(line)),
                in_bytes(line.memory.peak),
                line.memory.where,
                "yes" if line.fits else f"no, by {in_bytes(line.over or line.over_host)}",
                "-" if line.estimate is None else f"{line.estimate.seconds / size:.3g}",
                "-" if cost is None else cost.dollar_range,
            )
            for line, cost in zip(plan.lines, costs, strict=True)
        ],
        unit=unit,
        is_priced=any(costs),
        shown=LISTED,
        kinds=plots.kinds_of(timed),
        times=[(each.label, *plots.cells(each, timed)) for each in timed],
    )
    return page


def _pictures(
    plan: Plan, timed: list[TimedPlacement], folder: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield the title, caption and SVG of each plot, and save each plot as a PNG file."""
    drawn = [
        DrawnMemory(label_of(line), line.memory, plan.question.capacity)
        for line in plan.lines[:DRAWN]
    ]
    # Height in inches: 0.9 for the legend and axis label, then 2.3 for each placement.
    size = WIDTH, 0.9 + 2.3 * len(drawn)
    yield _picture(
        folder / "plan",
        size,
        partial(plots.draw_memory, placements=drawn),
        "Memory over a step",
        "The scale is the same for all placements.",
    )
    if timed:
        size = WIDTH, 1.6 + 0.35 * len(plots.bars_of(timed))
        draw = partial(plots.draw_times, placements=timed)
        caption = "The whisker is the error band of the estimate."
        yield _picture(folder / "time", size, draw, "Time of a step", caption)
    if points := plots.priced(timed):
        draw = partial(plots.draw_frontier, points=points)
        caption = (
            "A labelled placement is not beaten by another one in both. Its grey lines: the error "
            "band of the time, and the range of prices with this error."
        )
        yield _picture(folder / "cost", (WIDTH, 4.4), draw, "Cost against time", caption)


def _picture(
    file: Path, size: tuple[float, float], draw: Callable[[Any], None], title: str, caption: str
) -> tuple[str, str, str]:
    """Save a plot with its title and caption as a PNG file. Return the title, caption and SVG."""
    heading = f"{title}\n{fill(caption, 110)}"
    return title, caption, save_picture(file, size, draw, title={"t": heading, "fontsize": 9.5})


def label_of(line: Line) -> str:
    """Return a placement's label in plots: its flags, with `nvme:FOLDER` shortened to `nvme`."""
    words = ("nvme" if word.startswith("nvme:") else word for word in search.flags_of(line))
    return " ".join(words) or "one device"
