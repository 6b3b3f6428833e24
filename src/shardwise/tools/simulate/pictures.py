"""Plots how a simulated run spends its time, and writes the HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from shardwise.tools.report.look import (
    BLUE,
    BROWN,
    CRIMSON,
    GREEN,
    GREY,
    INDIGO,
    INK,
    OCHRE,
    ORANGE,
    PURPLE,
    ROSE,
    SLATE,
    TEAL,
    save_picture,
)
from shardwise.tools.report.page import write_page
from shardwise.tools.simulate.failure_classes import DAY
from shardwise.tools.simulate.outcome import USEFUL
from shardwise.tools.simulate.report import SimulationReport, headline, sentences
from shardwise.tools.simulate.run_model import CAUSES

COLORS = {
    "lost": ORANGE,
    "restart": OCHRE,
    "detection": CRIMSON,
    "waiting": PURPLE,
    "saves": GREEN,
    "slowest": TEAL,
    "slow": BROWN,
    "fewer": SLATE,
    "boundaries": INDIGO,
    "rejoining": ROSE,
    "reconnecting": ROSE,
}


def draw(report: SimulationReport, folder: Path) -> Path:
    """Save simulate.png and simulate.html to `folder`. Return the path of simulate.html."""

    def draw_both(figure: Any) -> None:
        over_time, second = figure.subplots(1, 2, width_ratios=(2, 1))
        _over_time(over_time, report)
        (_intervals if report.tried else _causes)(second, report)

    words, goodput, page = headline(report), report.goodput, folder / "simulate.html"
    title = {"t": words, "fontsize": 12, "fontweight": "bold"}
    picture = save_picture(folder / "simulate", (13, 4.4), draw_both, title=title)
    write_page(
        page,
        "shardwise.tools.simulate",
        headline=words,
        sentences=sentences(report),
        picture=picture,
        lost=[(CAUSES[c], f"{goodput.lost[c]:.2%}") for c in CAUSES if goodput.lost[c]],
        goodput=f"{goodput.goodput.mean:.2%}",
        failed=[
            (each.title, each.scope, f"{goodput.failures[each.name]:,.1f}")
            for each in report.failures.classes
        ],
        title=report.failures.title,
        sources=sorted({str(source) for source in report.failures.sources.values()}),
    )
    return page


def _over_time(axes: Any, report: SimulationReport) -> None:
    """Plot how the median run spends its time, and mark its failures above the plot."""
    shown = report.goodput.shown
    kinds = [USEFUL, *(cause for cause in COLORS if shown.lost[cause] > 0)]
    longest = max(len(shown.bins[kind]) for kind in kinds)
    width = shown.width / DAY
    starts = [number * width for number in range(longest)]
    base = [0.0] * longest
    for kind in kinds:
        seconds = shown.bins[kind] + [0.0] * (longest - len(shown.bins[kind]))
        share = [each / shown.width for each in seconds]
        axes.bar(
            starts,
            share,
            width=width,
            bottom=base,
            align="edge",
            color=BLUE if kind == USEFUL else COLORS[kind],
            label="steps that count" if kind == USEFUL else CAUSES[kind],
        )
        # Stack the bars, so that each kind starts on top of the previous kinds.
        base = [low + more for low, more in zip(base, share, strict=True)]
    moments = [moment / DAY for moment, _ in shown.moments]
    axes.plot(moments, [1.03] * len(moments), "|", color=INK, markersize=6, alpha=0.6)
    axes.set_ylim(0, 1.07)
    axes.set_xlim(0, shown.wall / DAY)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("days (marks above: failures)")
    axes.set_title("where the time goes, in the run of median goodput")
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        frameon=False,
        fontsize=8.5,
        loc="outside lower left",
        ncols=4,
    )


def _intervals(axes: Any, report: SimulationReport) -> None:
    """Plot goodput against the interval between checkpoints."""
    minutes = [interval / 60 for interval, _ in report.tried]
    bands = [band for _, band in report.tried]
    axes.fill_between(
        minutes, [b.low for b in bands], [b.high for b in bands], color=BLUE, alpha=0.2, linewidth=0
    )
    axes.plot(minutes, [b.mean for b in bands], color=BLUE, marker="o")
    axes.axvline(report.model.interval / 60, color=GREY, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # more labels would overlap
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("minutes of steps between checkpoints")
    axes.set_title("goodput by interval")


def _causes(axes: Any, report: SimulationReport) -> None:
    """Plot the share of each cause of lost time, over all trials."""
    causes = [cause for cause in COLORS if report.goodput.lost[cause] > 0][::-1]
    axes.set_title("lost, over all runs")
    if not causes:
        axes.axis("off")
        axes.text(0.5, 0.5, "nothing is lost", ha="center", va="center", color=GREY)
        return
    shares = [report.goodput.lost[cause] for cause in causes]
    axes.barh(range(len(causes)), shares, color=[COLORS[cause] for cause in causes], height=0.4)
    # Put the labels above the bars. Next to them, they would take up half of the width.
    for place, cause in enumerate(causes):
        axes.text(0, place + 0.26, CAUSES[cause], fontsize=8.5, va="bottom")
    axes.set_ylim(-0.5, len(causes) - 0.2)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
