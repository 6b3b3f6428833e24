"""Draws the memory of placements over a step: bytes on a device by operation, stacked by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.messages.printable import byte_unit, in_bytes
from shardwise.tools.plan.memory import KINDS, MemoryPlan
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
    ORANGE,
    PURPLE,
    SAND,
    SLATE,
    TEAL,
)

COLORS = (
    BLUE, TEAL, PURPLE, SLATE, SAND, MINT, GREEN, BROWN, APRICOT, ORANGE, AMBER, CRIMSON
)  # fmt: skip
"""A color for each kind, in the order of KINDS."""

COLUMNS = 500
"""Places of a picture's width: of more operations, the one with the most bytes of each place."""


@dataclass(frozen=True)
class DrawnMemory:
    """A placement as it is drawn: its flags, its memory, the bytes that a device has for it."""

    label: str
    memory: MemoryPlan
    capacity: int


def draw_memory(figure: Any, placements: Sequence[DrawnMemory]) -> None:
    """A panel for each of `placements`, on an empty figure of matplotlib."""
    axes = figure.subplots(len(placements), 1, squeeze=False)[:, 0]
    unit = byte_unit(max(each.memory.peak for each in placements))
    for axis, each in zip(axes, placements, strict=True):
        _panel(axis, each, *unit)
    axes[-1].set_xlabel("operations of a micro-batch: forward, then backward; the update last")
    names: dict[str, Any] = {}
    for axis in axes:
        names |= {
            label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
    figure.legend(
        names.values(), names, loc="outside lower center", ncols=6, frameon=False, fontsize=8.5
    )


def _panel(axis: Any, drawn: DrawnMemory, unit: str, size: float) -> None:
    memory = drawn.memory
    shown = most_of_each(memory.curve, COLUMNS)
    kinds = [kind for kind in KINDS if memory.parts[kind].any()]
    colors = [COLORS[KINDS.index(kind)] for kind in kinds]
    stacked = [memory.parts[kind][shown] / size for kind in kinds]
    axis.stackplot(shown, stacked, labels=kinds, colors=colors, linewidth=0)
    axis.axvline(memory.backward, color=GREY, linestyle=":", linewidth=1)
    top = max(memory.peak, int(memory.curve.max())) / size
    if drawn.capacity / size < 4 * top:  # else it would press all else to the floor
        axis.axhline(
            drawn.capacity / size, color=INK, linestyle="--", linewidth=1, label="there is"
        )
    axis.set_title(f"{drawn.label}: {in_bytes(memory.peak)}")
    axis.set_ylabel(f"{unit} per device")
    axis.margins(x=0)


def most_of_each(curve: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    """The indices of `curve` that are drawn: all, or of each of `columns` equal parts the one with
    the largest value."""
    if len(curve) <= columns:
        return np.arange(len(curve))
    edges = np.linspace(0, len(curve), columns + 1).astype(np.int64)
    return np.array([first + int(curve[first:end].argmax()) for first, end in pairwise(edges)])
