"""One HTML page with all of a measurement, in itself: nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment

from shardwise.scaling.report import BATCH_GROWS, COLUMNS, Report, lines

CAPTIONS = {
    "throughput": "Samples a second of all workers together; dotted, the smallest size times N.",
    "efficiency": "The rate of a worker, against that of one at the smallest size.",
    "loss": "Mean training loss of each epoch; of each step, where there was but one epoch.",
    "accuracy": "The last {accuracies} of each epoch.",
}


def render(report: Report, pictures: Mapping[str, str]) -> str:
    """The page; `pictures` are the plots as SVG, by name."""
    text = resources.files("shardwise.scaling").joinpath("page.html.jinja").read_text()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return page.render(
        report=report,
        machine=report.machine(),
        notes=report.notes(),
        columns=list(COLUMNS),
        kinds=[(kind, BATCH_GROWS[kind], lines(report, kind)) for kind in report.plan.kinds],
        failed=[run for run in report.runs if run.error],
        pictures=[
            (name, CAPTIONS[name].format(accuracies=report.accuracies), svg)
            for name, svg in pictures.items()
        ],
    )
