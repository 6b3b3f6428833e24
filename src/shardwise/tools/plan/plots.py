"""Draws the plots of a plan: memory over a step, step time by kind, and cost against days."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.messages.printable import byte_unit, in_bytes, time_unit
from shardwise.tools.plan.choice import Estimate
from shardwise.tools.plan.cost import Cost, frontier
from shardwise.tools.plan.memory import KINDS as MEMORY_KINDS
from shardwise.tools.plan.memory import MemoryPlan
from shardwise.tools.plan.stages import KINDS as TIME_KINDS
from shardwise.tools.report.look import (
    AMBER,
    APRICOT,
    BLUE,
    BROWN,
    CRIMSON,
    GREEN,
    GREY,
    INK,
    MINT,
    OCHRE,
    ORANGE,
    PURPLE,
    SAND,
    SLATE,
    TEAL,
)

MEMORY_COLORS = (
    BLUE, TEAL, PURPLE, SLATE, SAND, MINT, GREEN, BROWN, APRICOT, ORANGE, AMBER, CRIMSON
)  # fmt: skip
"""The color of each kind in MEMORY_KINDS."""

COLUMNS = 500
"""Maximum number of points in a memory curve. With more operations, each point shows the maximum
of a range of operations."""

VISIBLE = 0.005
"""Smallest part of the plot's height at which a kind of memory is listed in the legend."""


@dataclass(frozen=True)
class DrawnMemory:
    """A placement in the memory plot: its flags, its memory, and the device's capacity in bytes."""

    label: str
    memory: MemoryPlan
    capacity: int


def draw_memory(figure: Any, placements: Sequence[DrawnMemory]) -> None:
    """Draw one panel per placement on an empty matplotlib figure."""
    axes = figure.subplots(len(placements), 1, squeeze=False, sharey=True)[:, 0]
    top = max(max(each.memory.peak, int(each.memory.curve.max())) for each in placements)
    for axis, each in zip(axes, placements, strict=True):
        _panel(axis, each, top)
    axes[-1].set_xlabel("operations of a micro-batch: forward, backward, then the update")
    names: dict[str, Any] = {}
    for axis in axes:
        names |= {
            label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
    figure.legend(
        names.values(), names, loc="outside lower center", ncols=6, frameon=False, fontsize=8.5
    )


def _panel(axis: Any, drawn: DrawnMemory, top: int) -> None:
    memory = drawn.memory
    unit, size = byte_unit(top)
    shown = most_of_each(memory.curve, COLUMNS)
    kinds = [kind for kind in MEMORY_KINDS if memory.parts[kind].any()]
    colors = [MEMORY_COLORS[MEMORY_KINDS.index(kind)] for kind in kinds]
    stacked = [memory.parts[kind][shown] / size for kind in kinds]
    # A label that starts with an underscore is left out of the legend.
    is_visible = [memory.parts[kind].max() > VISIBLE * top for kind in kinds]
    labels = [
        f"{'' if is_seen else '_'}{kind}" for is_seen, kind in zip(is_visible, kinds, strict=True)
    ]
    axis.stackplot(shown, stacked, labels=labels, colors=colors, linewidth=0)
    axis.axvline(memory.backward, color=GREY, linestyle=":", linewidth=1, label="start of backward")
    if drawn.capacity < 4 * top:  # a higher line would flatten the curves
        axis.axhline(
            drawn.capacity / size, color=INK, linestyle="--", linewidth=1, label="available"
        )
    axis.set_title(f"{drawn.label}: {in_bytes(memory.peak)}")
    axis.set_ylabel(f"{unit} per device")
    axis.margins(x=0)


def most_of_each(curve: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    """Return the indices of `curve` to draw: all, or each maximum over `columns` equal ranges."""
    if len(curve) <= columns:
        return np.arange(len(curve))
    edges = np.linspace(0, len(curve), columns + 1).astype(np.int64)
    return np.array([first + int(curve[first:end].argmax()) for first, end in pairwise(edges)])


TIME_COLORS = (
    BLUE, TEAL, BROWN, PURPLE, MINT, ORANGE, CRIMSON, OCHRE, SAND, GREEN, AMBER, SLATE
)  # fmt: skip
"""The color of each kind in TIME_KINDS."""

MOST_RANKS = 16
"""Maximum number of stages to plot. For a longer pipeline, evenly spaced stages are shown."""


@dataclass(frozen=True)
class TimedPlacement:
    """A placement in the time plot: its flags, its step time, and the cost of the run."""

    label: str
    estimate: Estimate
    cost: Cost | None = None


Point = tuple[float, float, TimedPlacement]
"""A point of the cost plot: days, dollars, and the placement."""


def draw_times(figure: Any, placements: Sequence[TimedPlacement]) -> None:
    """Draw a stacked bar with an error bar for each placement, or for each pipeline stage."""
    bars, axis = bars_of(placements), figure.subplots()
    unit, size = time_unit(longest_of(placements))
    scale = 1 / size
    left = [0.0] * len(bars)
    for kind, color in zip(TIME_KINDS, TIME_COLORS, strict=True):
        widths = [scale * parts.get(kind, 0.0) for _, parts, _ in bars]
        if any(widths):
            axis.barh(range(len(bars)), widths, left=left, color=color, label=kind, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (_, _, each) in enumerate(bars):
        length, error = scale * each.estimate.seconds, each.estimate.error
        axis.errorbar(length, place, xerr=length * error, color=INK, capsize=2, linewidth=0.8)
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit} per step")
    figure.legend(fontsize=8, ncols=5, loc="outside lower center", frameon=False)


def longest_of(placements: Sequence[TimedPlacement]) -> float:
    """Return the longest step time in seconds."""
    return max(each.estimate.seconds for each in placements)


def bars_of(
    placements: Sequence[TimedPlacement],
) -> list[tuple[str, dict[str, float], TimedPlacement]]:
    """Return the bars of the plot: label, seconds by kind, and the placement."""
    return [(name, parts, each) for each in placements for name, parts in _bars(each)]


def _bars(placement: TimedPlacement) -> list[tuple[str, dict[str, float]]]:
    ranks = placement.estimate.per_rank
    if len(ranks) <= 1:
        return [(placement.label, placement.estimate.parts)]
    # Adjacent stages take similar times, so evenly spaced stages show the shape.
    every = -(-len(ranks) // MOST_RANKS)
    return [
        (f"{placement.label}, stage {stage}", ranks[stage]) for stage in range(0, len(ranks), every)
    ]


def priced(placements: Sequence[TimedPlacement]) -> list[Point]:
    """Return the placements whose cost in dollars is known."""
    return [
        (each.cost.days, each.cost.dollars, each)
        for each in placements
        if each.cost is not None and each.cost.dollars is not None
    ]


def draw_frontier(figure: Any, points: Sequence[Point]) -> None:
    """Draw dollars against days (or hours), and connect the placements on the Pareto frontier.

    Only these placements have a label and error bars.
    """
    axis = figure.subplots()
    unit, scale = ("days", 1.0) if max(days for days, *_ in points) >= 1 else ("hours", 24.0)
    for days, dollars, _ in points:
        axis.plot(scale * days, dollars, "o", color=BLUE)
    best = frontier(points)
    # Ranges of all placements would overlap.
    for days, dollars, each in best:
        cost = each.cost
        assert cost is not None
        assert cost.dollars_low is not None
        assert cost.dollars_high is not None
        reach = [[dollars - cost.dollars_low], [cost.dollars_high - dollars]]
        across = [[scale * (days - cost.days_low)], [scale * (cost.days_high - days)]]
        axis.errorbar(
            scale * days, dollars, yerr=reach, xerr=across, color=GREY, linewidth=0.8, zorder=1
        )
    # Put labels below and to the left of a point. That area is free, because a point there would be
    # better in both dimensions.
    for days, dollars, each in best:
        axis.annotate(
            each.label,
            (scale * days, dollars),
            fontsize=8,
            xytext=(-5, -5),
            textcoords="offset points",
            ha="right",
            va="top",
        )
    line = [scale * days for days, *_ in best], [dollars for _, dollars, _ in best]
    axis.plot(*line, color=ORANGE)
    axis.set_xlabel(unit)
    axis.set_ylabel("dollars, mean of the range")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)


def kinds_of(placements: Sequence[TimedPlacement]) -> list[str]:
    """Return the kinds of time that occur in any of `placements`, in the order of TIME_KINDS."""
    return [kind for kind in TIME_KINDS if any(kind in each.estimate.parts for each in placements)]


def cells(placement: TimedPlacement, among: Sequence[TimedPlacement]) -> list[str]:
    """Return the table cells of a placement, in the unit of the longest step in `among`.

    The first cell is the total with its error band. It is followed by one cell for each kind that
    occurs in `among`.
    """
    estimate = placement.estimate
    _, size = time_unit(longest_of(among))
    total = f"{estimate.seconds / size:.4g} ±{estimate.error:.0%}"
    return [total, *(f"{estimate.parts.get(kind, 0.0) / size:.4g}" for kind in kinds_of(among))]
