"""The lines of memory.py as a table, as JSON and drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from neighbours import BUSY
from residents import MB
from workloads import Gpt

TOLERANCE = 0.02
"""How far a state may be from its formula, beside its padding."""

HEADINGS = ("state", "formula", "off by", "in memory", "resident", "peak", "beyond formula")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One case; bytes per rank.

    `state` is the engine's word and `formula` the paper's, wherever the bytes rest; `in_memory` is
    the formula's part that no disk holds. `resident` and `peak` are the kernel's count, less what
    the rank held before it had a model; None where it cannot be read. `padding` is a share.
    """

    name: str
    state: int
    formula: float
    padding: float
    in_memory: float
    resident: float | None
    peak: float | None

    @property
    def deviation(self) -> float:
        """How much more the engine holds than the formula says, as a share."""
        return self.state / self.formula - 1

    @property
    def is_wrong(self) -> bool:
        """Whether that is more than padding explains."""
        return not -TOLERANCE <= self.deviation <= TOLERANCE + self.padding

    @property
    def beyond(self) -> float | None:
        """Resident bytes between two steps that the formula does not know of."""
        return None if self.resident is None else self.resident - self.in_memory


def table(workload: Gpt, ranks: int, lines: Sequence[Line]) -> Table:
    """One row per case, in MB per rank."""
    title = f"{workload.describe()}; {ranks} ranks; MB per rank"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("", no_wrap=True)
    for name in HEADINGS:
        drawn.add_column(name, justify="right")
    for line in lines:
        drawn.add_row(
            line.name,
            _mb(line.state),
            _mb(line.formula),
            f"{line.deviation:+.2%}",
            _mb(line.in_memory),
            _mb(line.resident),
            _mb(line.peak),
            _mb(line.beyond),
            style="red" if line.is_wrong else "",
        )
    return drawn


def remarks(lines: Sequence[Line], others: float | None) -> Iterator[str]:
    """What the table comes to, and whether the machine was quiet."""
    wrong = [line.name for line in lines if line.is_wrong]
    allowed = f"{TOLERANCE:.0%} and the padding"
    if wrong:
        yield f"MORE THAN {allowed} FROM THE FORMULA: {'; '.join(wrong)}"
    else:
        yield f"all states are within {allowed} of their formulas"
    if others is not None:
        yield f"other processes took {others:.0%} of the machine" + (
            " (no matter for states; peaks may be missed)" if others > BUSY else ""
        )


def as_json(facts: dict[str, str], workload: Gpt, ranks: int, lines: Sequence[Line]) -> Any:
    """Everything that was measured."""
    cases = [asdict(line) | {"deviation": line.deviation} for line in lines]
    return {"machine": facts, "workload": asdict(workload), "ranks": ranks, "cases": cases}


def plot(lines: Sequence[Line], path: Path, caption: str) -> None:
    """A bar per case for the resident set between steps, a thin one for the peak, and a mark where
    the formula puts it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = range(len(lines))
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.34 * len(lines)), layout="constrained")
    peaks = [(line.peak or 0) / MB for line in lines]
    between = [(line.resident or 0) / MB for line in lines]
    highest = axes.barh(places, peaks, color="#fed7aa", height=0.7, label="peak within a step")
    axes.barh(places, between, color="#c2410c", height=0.45, label="between steps")
    values = [f"{a:,.0f}, {b:,.0f}" for a, b in zip(between, peaks, strict=True)]
    axes.bar_label(highest, values, padding=3, fontsize=7)
    axes.margins(x=0.12)
    axes.plot(
        [line.in_memory / MB for line in lines],
        places,
        linestyle="none",
        marker="|",
        markersize=15,
        markeredgewidth=2.5,
        color="black",
        label="formula",
    )
    axes.set_yticks(places, [line.name for line in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_title("MB per rank, less what it held before it had a model", fontsize=9)
    figure.legend(fontsize=7, ncols=3, loc="outside upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=7, color="#64748b")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:,.0f}"
