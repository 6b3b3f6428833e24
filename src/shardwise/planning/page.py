"""Draws a plan: memory of a step by state, its time by kind, and cost (plan.html and pictures)."""

from __future__ import annotations

import base64
import html
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import LaunchError
from shardwise.planning import search
from shardwise.planning.memory import KINDS
from shardwise.planning.plan import Plan
from shardwise.planning.time_plots import TimedPlacement, as_html
from shardwise.printable import in_bytes

DRAWN = 4
"""Placements that are drawn."""

MOST_TIMED = 12
"""Placements whose time is drawn."""

GB = 1e9


def write(made: Plan, folder: Path) -> Path:
    """Write plan.png and plan.html into `folder`; returns the page. Raises LaunchError without
    matplotlib."""
    if find_spec("matplotlib") is None:
        raise LaunchError(
            "shardwise plan --page draws with matplotlib, which is not installed: "
            "pip install 'shardwise[scale]'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "plan.png"
    _draw(made, picture)
    page = folder / "plan.html"
    page.write_text(_page(made, picture) + _times(made, folder))
    return page


def _draw(made: Plan, path: Path) -> None:
    """A panel for each placement: bytes on the device by operation, stacked by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = made.lines[:DRAWN]
    figure, axes = pyplot.subplots(len(lines), 1, figsize=(9, 2.6 * len(lines)), squeeze=False)
    for axis, line in zip(axes[:, 0], lines, strict=True):
        parts = {kind: line.memory.parts[kind] for kind in KINDS if line.memory.parts[kind].any()}
        steps = np.arange(len(line.memory.curve))
        axis.stackplot(steps, [each / GB for each in parts.values()], labels=list(parts))
        axis.axhline(made.question.capacity / GB, color="black", linestyle="--", linewidth=1)
        axis.axvline(made.record.backward, color="grey", linewidth=0.5)
        title = " ".join(search.flags_of(line)) or "one device"
        axis.set_title(f"{title}: {in_bytes(line.memory.peak)}", loc="left", fontsize=9)
        axis.set_ylabel("GB per device")
        axis.margins(x=0)
    axes[-1, 0].set_xlabel("operations of a micro-batch: forward, then backward; the update last")
    _legend(axes[0, 0])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _legend(axis: Any) -> None:
    axis.legend(loc="upper left", fontsize=7, ncols=4)


def _times(made: Plan, folder: Path) -> str:
    """The page's part on time and cost of what fits."""
    timed = [
        TimedPlacement(
            " ".join(search.flags_of(line)) or "one device", line.estimate, made.cost(line)
        )
        for line in made.lines
        if line.fits and line.estimate is not None
    ]
    return as_html(timed[:MOST_TIMED], folder) if timed else ""


def _page(made: Plan, picture: Path) -> str:
    """The page, with the picture inside."""
    image = base64.b64encode(picture.read_bytes()).decode()
    rows = "".join(
        f"<tr><td><code>{html.escape(made.command(line))}</code></td>"
        f"<td>{in_bytes(line.memory.peak)}</td><td>{html.escape(line.memory.where)}</td>"
        f"<td>{'yes' if line.fits else 'no'}</td></tr>"
        for line in made.lines
    )
    name = html.escape(f"{made.request.script.name} on {made.cluster}")
    return (
        f"<!doctype html><meta charset=utf-8><title>{name}</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}"
        "td,th{text-align:left;padding:.3em .8em .3em 0}img{max-width:100%}</style>"
        f"<h1>{name}</h1><img alt='memory over the step' src='data:image/png;base64,{image}'>"
        "<table><tr><th>command</th><th>peak</th><th>at</th><th>fits</th></tr>"
        f"{rows}</table>\n"
    )
