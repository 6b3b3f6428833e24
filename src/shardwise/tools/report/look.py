"""Defines the common style of all plots: colors, matplotlib settings, and SVGs for HTML pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, GREY, FAINT = "#22272e", "#6b7480", "#d5dae1"
BLUE, ORANGE, GREEN, PURPLE = "#2563a8", "#d9622b", "#2f8f5b", "#8a4fb0"
OCHRE, CRIMSON, TEAL, BROWN = "#b0892c", "#c23b6b", "#3a9aa8", "#7a6a5c"
SLATE, INDIGO, ROSE = "#8d99ae", "#5b6abf", "#c98fa8"
APRICOT, MINT, SAND, AMBER = "#f0915f", "#6cc795", "#b8a999", "#e0a458"
RED = "#b3261e"

SERIES = (ORANGE, GREEN, PURPLE, OCHRE, CRIMSON, TEAL, BROWN)
"""Colors of the second and later lines of a plot. The first line is BLUE."""

DARK = {
    INK: "#e6e9ee", GREY: "#9aa4b2", FAINT: "#3a414b",
    BLUE: "#6ea8e8", ORANGE: "#f0915f", GREEN: "#6cc795", PURPLE: "#c29be0",
    OCHRE: "#dbb968", CRIMSON: "#ee8aad", TEAL: "#7fd0dc", BROWN: "#bfae9e",
    SLATE: "#aab4c4", INDIGO: "#98a5f0", ROSE: "#e3b7c8",
    APRICOT: "#d9622b", MINT: "#2f8f5b", SAND: "#8f7f6e", AMBER: "#a8752f",
}  # fmt: skip
"""Maps each color to its replacement in dark mode. A light and a dark shade of the same color swap
roles, so that they stay distinct."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text, in the page's font
}
"""Settings of all plots, for matplotlib.rc_context."""

GRID: dict[Any, Any] = {"axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.6}
TITLES: dict[Any, Any] = {
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
"""Settings for the titles of several plots in one figure."""


def save_picture(
    file: Path,
    size: tuple[float, float],
    draw: Callable[[Any], None],
    *,
    style: Mapping[str, Any] = TITLES,
    title: Mapping[str, Any] | None = None,
    formats: Sequence[str] = ("png",),
) -> str:
    """Draw a figure, save it to files, and return its SVG for an HTML page.

    Args:
        file: Path of the files without a suffix.
        size: Width and height in inches.
        draw: Function that draws on an empty matplotlib figure.
        style: matplotlib settings in addition to STYLE.
        title: Arguments of `Figure.suptitle`. The title appears only in the files, because a page
            has its own heading.
        formats: Suffixes of the files to write.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure  # unlike pyplot, it needs no window system

    with mpl.rc_context(STYLE | dict(style) | {"svg.hashsalt": file.name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        # Save the SVG before adding the title. Without a date, its bytes are reproducible.
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        if title is not None:
            figure.suptitle(**title)
        for suffix in formats:
            figure.savefig(file.with_name(f"{file.name}.{suffix}"), dpi=110)
    return _for_page(svg.getvalue(), file.name)


def _for_page(svg: str, name: str) -> str:
    """Return `svg` with a flexible width, the page's colors, and ids prefixed with `name`."""
    # Remove the XML declaration and the doctype, which HTML does not allow inside a page.
    svg = svg[svg.index("<svg") :]
    for color in DARK:
        svg = svg.replace(color, f"var(--{variable(color)})")
    # Without the prefix, two plots on the same page would have the same ids.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    # Also update the references to these ids from clip paths and markers.
    svg = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", svg)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt"', "", svg, count=1)


def variable(color: str) -> str:
    """Return the name of the CSS variable for a color, without the leading dashes."""
    return f"c{color[1:]}"
