"""Gives plots and their pages one look: colors, matplotlib's style, SVGs in a page's colors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

INK, GREY, FAINT = "#22272e", "#6b7480", "#d5dae1"

STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text, in the page's font
}
"""What all plots have in common, for matplotlib.rc_context."""

GRID: dict[Any, Any] = {"axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.6}
TITLES: dict[Any, Any] = {
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
"""Titles of several plots beside each other."""


def themed(svg: str, variables: Mapping[str, str], name: str = "") -> str:
    """`svg`, as matplotlib writes it, to stand in a page: as wide as its place, and with the colors
    that the page's style sheet gives to `variables` (by color, a name). A page that has several
    gives each a `name` of letters, with which its ids begin."""
    svg = svg[svg.index("<svg") :]
    for color, variable in variables.items():
        svg = svg.replace(color, f"var(--{variable})")
    if name:
        svg = re.sub(r'\bid="', f'id="{name}-', svg)
        svg = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", svg)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt"', "", svg, count=1)


def render_page(package: str, **given: Any) -> str:
    """The page that page.html.jinja of `package` makes of what is `given`; it fetches nothing."""
    from jinja2 import Environment

    text = resources.files(package).joinpath("page.html.jinja").read_text()
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return template.render(**given)
