"""Draw the pictures of the documentation: docs/pictures/*.svg.

    python scripts/pictures.py            # all
    python scripts/pictures.py placement  # one

Each picture is a light card, so it reads on a light and on a dark page.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
PARAMETERS, GRADIENTS, OPTIMIZER = "#4c78a8", "#f58518", "#54a24b"
FORWARD, BACKWARD, COMMUNICATION, UPDATE = "#4c78a8", "#e4572e", "#b279a2", "#54a24b"
FAINT, INK, CARD = "#d7dbe0", "#22272e", "#fbfbf9"
STATES = [("parameters", PARAMETERS), ("gradients", GRADIENTS), ("optimizer state", OPTIMIZER)]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of `width` x `height` inches, with one axis of the same units."""
    figure = plt.figure(figsize=(width, height), facecolor=CARD)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str = FAINT,
    text: str = "",
    *,
    ink: str = "white",
    size: float = 9,
) -> None:
    """Draw a rectangle with its lower left corner at (x, y), and text in its middle."""
    style = "round,pad=0,rounding_size=0.04"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec="white", lw=0.8)
    )
    label(axes, x + width / 2, y + height / 2, text, color=ink, size=size)


def label(axes: Axes, x: float, y: float, text: str, **options: object) -> None:
    """Write `text` with its middle at (x, y)."""
    settings: dict[str, object] = {"ha": "center", "va": "center", "color": INK, "size": 9}
    axes.text(x, y, text, **(settings | options))


def note(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a line of explanation that begins at x."""
    label(axes, x, y, text, ha="left", size=8)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **options: str) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "-|>", "color": INK} | options
    axes.add_patch(FancyArrowPatch(start, end, mutation_scale=10, lw=1.1, **style))


def placement() -> Figure:
    """Which part of each state four workers hold, in the rows ZERO_0 to ZERO_3."""
    figure, axes = canvas(7.6, 3.5)
    workers, width, height = 4, 1.3, 0.16
    for row in range(4):
        bottom = 2.35 - row * 0.72
        label(axes, 0.55, bottom + 0.25, f"--zero {row}", size=10, family="monospace")
        for worker in range(workers):
            left = 1.3 + worker * (width + 0.22)
            for index, (_, color) in enumerate(STATES):
                y = bottom + (2 - index) * (height + 0.03)
                sharded = row >= 3 - index
                box(axes, left, y, width, height, FAINT if sharded else color)
                if sharded:
                    part = width / workers
                    box(axes, left + worker * part, y, part, height, color)
    for worker in range(workers):
        label(axes, 1.3 + worker * (width + 0.22) + width / 2, 3.05, f"worker {worker}")
    for index, (name, color) in enumerate(STATES):
        box(axes, 1.3 + index * 1.5, 3.24, 0.16, 0.13, color)
        label(axes, 1.52 + index * 1.5, 3.3, name, ha="left", size=8)
    box(axes, 1.3 + 3 * 1.5, 3.24, 0.16, 0.13, FAINT)
    note(axes, 1.52 + 3 * 1.5, 3.3, "on another worker")
    return figure


def _lanes(axes: Axes, lanes: list[tuple[str, list[tuple[float, float, str, str]]]]) -> None:
    """Draw blocks (start, length, color, text) on a line per name, with time to the right."""
    top = 0.55 + 0.5 * len(lanes)
    for index, (name, blocks) in enumerate(lanes):
        y = top - 0.5 * (index + 1)
        label(axes, 0.1, y + 0.17, name, ha="left")
        for start, length, color, text in blocks:
            box(axes, 1.5 + start, y, length, 0.34, color, text, size=8)
    arrow(axes, (1.5, 0.3), (axes.get_xlim()[1] - 0.15, 0.3))
    note(axes, 1.5, 0.14, "time")


def zero2_step() -> Figure:
    """A step of ZERO_2 over time: each bucket is reduced while backward continues."""
    figure, axes = canvas(7.6, 2.25)
    compute = [(0.0, 1.5, FORWARD, "forward")]
    compute += [(1.5 + 0.7 * i, 0.7, BACKWARD, f"layer {3 - i}") for i in range(4)]
    compute += [(4.65, 0.5, UPDATE, "update")]
    communication = [(2.2 + 0.7 * i, 0.45, COMMUNICATION, f"b{i}") for i in range(4)]
    communication += [(5.15, 0.75, COMMUNICATION, "weights")]
    _lanes(axes, [("computation", compute), ("communication", communication)])
    note(
        axes,
        1.5,
        1.95,
        "b0 to b3: a bucket of gradients is summed to the worker that owns its shard",
    )
    note(axes, 1.5, 1.75, "weights: each worker sends its updated shard")
    return figure


def zero3_step() -> Figure:
    """A step of ZERO_3 over time: units are gathered ahead of their use."""
    figure, axes = canvas(7.9, 2.7)
    forward, backward, reduce = 0.6, 0.95, "#9d755d"
    begin = 0.45 + 3 * forward  # of backward
    compute = [(0.45 + forward * i, forward, FORWARD, f"unit {i}") for i in range(3)]
    compute += [(begin + backward * i, backward, BACKWARD, f"unit {2 - i}") for i in range(3)]
    compute += [(begin + 3 * backward + 0.45, 0.6, UPDATE, "update")]
    gathers = [(0.0, 0.43, COMMUNICATION, "g0"), (0.45, 0.43, COMMUNICATION, "g1")]
    gathers += [(0.45 + forward, 0.43, COMMUNICATION, "g2"), (begin, 0.43, COMMUNICATION, "g1")]
    gathers += [(begin + backward, 0.43, COMMUNICATION, "g0")]
    sums = [(begin + backward * (i + 1), 0.43, reduce, f"r{2 - i}") for i in range(3)]
    _lanes(axes, [("computation", compute), ("all-gather", gathers), ("reduce-scatter", sums)])
    note(
        axes, 1.5, 2.5, "g: gather the whole weights of a unit before its use, and free them after"
    )
    note(axes, 1.5, 2.3, "r: sum the gradients of a unit to the workers that own their shards")
    return figure


def bucket() -> Figure:
    """How gradients become a bucket, and the bucket two shards."""
    figure, axes = canvas(7.6, 2.9)
    sizes = [("0.weight", 2.2), ("0.bias", 0.7), ("2.weight", 1.9), ("2.bias", 0.6)]
    left = 1.5
    label(axes, 0.1, 2.55, "gradients", ha="left")
    label(axes, 0.1, 1.72, "bucket", ha="left")
    label(axes, 0.1, 0.72, "shards", ha="left")
    for name, size in sizes:
        box(axes, left, 2.35, size - 0.08, 0.38, GRADIENTS, name, size=8)
        arrow(axes, (left + size / 2, 2.33), (left + size / 2, 1.93))
        box(axes, left, 1.53, size, 0.38, GRADIENTS, "slot", size=8)
        left += size
    half = (left - 1.5 + 0.2) / 2
    box(axes, left, 1.53, 0.2, 0.38, FAINT, "")
    label(axes, left + 0.1, 1.4, "padding", size=7)
    for worker in range(2):
        x = 1.5 + worker * half
        arrow(axes, (x + half / 2, 1.5), (x + half / 2, 0.95))
        box(
            axes,
            x,
            0.53,
            half,
            0.38,
            OPTIMIZER,
            f"span of worker {worker}: reduced, then updated",
            size=8,
        )
    label(axes, 1.5 + half, 1.2, "reduce-scatter", size=8)
    note(
        axes,
        1.5,
        0.25,
        "A slot is the place of one tensor. A span can begin and end inside a tensor.",
    )
    return figure


def tensor_split() -> Figure:
    """A linear layer pair split over two workers: columns, then rows."""
    figure, axes = canvas(7.6, 2.6)
    for worker, color in enumerate((PARAMETERS, OPTIMIZER)):
        y = 1.45 - worker * 1.15
        label(axes, 0.1, y + 0.35, f"worker {worker}", ha="left")
        box(axes, 1.2, y, 0.7, 0.7, FAINT, "x", ink=INK)
        arrow(axes, (1.95, y + 0.35), (2.35, y + 0.35))
        box(axes, 2.4, y, 1.1, 0.7, color, "half of the\ncolumns of A", size=8)
        arrow(axes, (3.55, y + 0.35), (3.95, y + 0.35))
        box(axes, 4.0, y, 1.1, 0.7, color, "half of the\nrows of B", size=8)
        arrow(axes, (5.15, y + 0.35), (5.85, 1.35))
    box(axes, 5.9, 1.05, 0.95, 0.6, COMMUNICATION, "all-reduce", size=8)
    arrow(axes, (6.88, 1.35), (7.15, 1.35))
    label(axes, 7.35, 1.35, "y")
    note(
        axes,
        1.2,
        2.4,
        "y = gelu(x A) B: one sum over the workers, in place of a whole A and B on each",
    )
    return figure


def pipeline_split() -> Figure:
    """The 1F1B schedule of four micro-batches on two stages."""
    figure, axes = canvas(7.6, 2.0)
    unit = 0.42
    first = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "", "B3"]
    second = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    lanes = []
    for name, start, order in (("stage 0", 0.0, first), ("stage 1", unit, second)):
        blocks, at = [], start
        for index, word in enumerate(order):
            length = unit if word.startswith("F") else 1.5 * unit
            if name == "stage 0" and index == 2:  # waits until stage 1 has sent the gradient
                at = start + 3.5 * unit
            color = {"F": FORWARD, "B": BACKWARD}.get(word[:1], CARD)
            blocks.append((at, length if word else unit, color, word))
            at += length if word else unit
        lanes.append((name, blocks))
    _lanes(axes, lanes)
    note(axes, 1.5, 1.78, "F: forward of a micro-batch, B: its backward. Gaps: a stage waits.")
    return figure


def islands() -> Figure:
    """Two islands of two workers each, which synchronise every H steps."""
    figure, axes = canvas(7.6, 2.6)
    for island in range(2):
        x = 0.4 + island * 4.2
        box(axes, x, 0.5, 2.6, 1.5, "#e9edf2")
        label(axes, x + 1.3, 1.8, f"island {island}")
        for worker in range(2):
            box(
                axes,
                x + 0.2 + worker * 1.25,
                0.8,
                0.95,
                0.6,
                PARAMETERS,
                f"worker {2 * island + worker}",
                size=8,
            )
        arrow(axes, (x + 1.15, 1.1), (x + 1.45, 1.1), arrowstyle="<|-|>")
        label(axes, x + 1.3, 0.62, "sum gradients in every step", size=8)
    arrow(axes, (3.05, 1.25), (4.55, 1.25), arrowstyle="<|-|>", linestyle="--")
    label(axes, 3.8, 1.5, "every H steps:\nsynchronise weights", size=8)
    label(axes, 3.8, 2.4, "A slow link is used once in H steps", size=9)
    label(axes, 3.8, 1.02, "slow link", size=8)
    return figure


def checkpoint() -> Figure:
    """What a checkpoint folder contains, and who writes it."""
    figure, axes = canvas(7.6, 3.0)
    label(axes, 0.2, 2.75, "checkpoints/step-50/", ha="left", family="monospace")
    rows = [
        (
            "model.safetensors",
            PARAMETERS,
            "whole tensors under the model's names: F32, shape, bytes",
        ),
        ("optimizer.safetensors", OPTIMIZER, "whole moments: NAME.exp_avg, NAME.exp_avg_sq"),
        ("checkpoint.json", INK, "step, seed, learning rates, tracked objects, checksums"),
    ]
    for index, (name, color, text) in enumerate(rows):
        y = 2.05 - index * 0.5
        box(axes, 0.4, y, 2.0, 0.38, color, name, size=8)
        note(axes, 2.55, y + 0.19, text)
    for worker in range(4):
        box(axes, 0.4 + worker * 0.5, 0.35, 0.48, 0.3, PARAMETERS, f"w{worker}", size=7)
    note(axes, 2.55, 0.5, "each worker writes its own byte ranges of the files, without a gather")
    note(axes, 2.55, 0.2, "checkpoint.json is written last: without it the folder does not count")
    return figure


def hang_report() -> Figure:
    """How a rank that does not answer is named."""
    figure, axes = canvas(7.6, 2.2)
    steps = [
        ("rank 0 waits\nin all-reduce 17", PARAMETERS),
        ("after --warn-after\nit asks the others", COMMUNICATION),
        ("rank 1 answers:\nin forward, train.py:12", GRADIENTS),
        ("report: rank 1\nis not in all-reduce 17", BACKWARD),
        ("after --timeout\nall ranks end", INK),
    ]
    for index, (text, color) in enumerate(steps):
        x = 0.15 + index * 1.49
        box(axes, x, 0.95, 1.3, 0.7, color, text, size=6.5)
        if index:
            arrow(axes, (x - 0.18, 1.3), (x - 0.01, 1.3))
    note(
        axes,
        0.15,
        0.6,
        "If a rank cannot answer, the report shows the state of its process, such as stopped (T),",
    )
    note(axes, 0.15, 0.38, "or that its host or its connection is lost.")
    label(axes, 0.15, 1.95, "No collective waits in silence", ha="left", size=10)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (
        placement,
        zero2_step,
        zero3_step,
        bucket,
        tensor_split,
        pipeline_split,
        islands,
        checkpoint,
        hang_report,
    )
}


def main() -> None:
    """Write the pictures whose names are given, or all."""
    FOLDER.mkdir(exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "shardwise"  # equal files from run to run
    for name in sys.argv[1:] or PICTURES:
        figure = PICTURES[name]()
        figure.savefig(FOLDER / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
