"""How long ranks wait for each other if steps are closed by samples, by tokens, or packed.

    python benchmarks/token_waits.py [--ranks 4] [--samples 2048] [--plot docs/token_waits.png]

Trains on texts with a long-tailed distribution of lengths, and reads the waits of each step from
the timeline. The forward pass sleeps for a time in proportion to the computed positions, with
padding, so that there may be more ranks than cores. All three have about the same number of tokens
in a step. Prints a table in Markdown.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import figure
import shardwise as sw
from shardwise.tools.timeline.reading import read
from shardwise.tools.timeline.steps import StepTimes, steps_of

ROW = 1024
"""Largest number of tokens in a text, and number of tokens in a packed row."""
PER_STEP = 16
"""Samples per step and rank, if steps are closed by samples."""
MICRO = 2 * ROW
"""Largest number of positions in a micro-batch, except if steps are closed by samples."""
WAYS = {
    "samples": "`batch_size`",
    "tokens": "`tokens`",
    "packed": "`tokens` and `pack`",
}
COLORS = {"samples": "#94a3b8", "tokens": "#c2410c", "packed": "#0f766e"}


def texts(count: int) -> list[torch.Tensor]:
    """Return texts with log-normal lengths between 8 and `ROW` tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randn(count, generator=draw).mul(1.0).add(4.6).exp().long().clamp(8, ROW)
    return [torch.ones(length, dtype=torch.long) for length in lengths.tolist()]


def padded(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the texts of a micro-batch, padded to the longest."""
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True)


def work(way: str, count: int, micros: float) -> None:
    """Train one epoch on this rank."""
    world = sw.init(seed=0, device="cpu")
    dataset = texts(count)
    if way == "samples":
        loader = sw.Loader(
            dataset, batch_size=PER_STEP * world.size, shuffle=True, collate_fn=padded
        )
    else:
        mean = sum(map(len, dataset)) / len(dataset)
        rows = round(mean * PER_STEP / ROW * world.size)
        pack = sw.Packing(False, row=ROW) if way == "packed" else None
        loader = sw.Loader(
            dataset,
            tokens=rows * ROW,
            length=list(map(len, dataset)),
            micro_batch_tokens=MICRO,
            pack=pack,
            shuffle=True,
            collate_fn=None if pack else padded,
        )
    model = nn.Linear(1, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    positions, tokens, steps, began = 0, 0, 0, time.perf_counter()
    for step in loader.steps():
        for batch in step:
            ids = batch["input_ids"] if isinstance(batch, dict) else batch
            if world.rows:
                time.sleep(ids.numel() * micros / 1e6)
                positions += ids.numel()
                tokens += int(ids.sum())
            engine.backward(model(torch.ones(len(ids), 1)).mean())
        engine.step()
        steps += 1
    seconds = time.perf_counter() - began
    totals = [sum(each) for each in zip(*world.gather((positions, tokens)), strict=True)]
    padding, speed = 1 - totals[1] / totals[0], totals[1] / seconds
    world.print(json.dumps({"steps": steps, "padding": padding, "speed": speed}))
    engine.close()


def measure(
    way: str, options: argparse.Namespace
) -> tuple[list[list[StepTimes]], dict[str, float]]:
    """Run a way, and return the steps of each rank and the figures that rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", "shardwise", "run", "-n", str(options.ranks)]
        command += ["--timeline", str(file), __file__, "--way", way]
        command += ["--samples", str(options.samples), "--micros", str(options.micros)]
        figures = figure.result_of(command)
        # Leave out the first step, in which ranks also wait for each other's start.
        ranks = [times[1:] for times in steps_of(read([file])).values()]
    return ranks, figures


def waits_of(ranks: Sequence[Sequence[StepTimes]]) -> list[float]:
    """Return the waiting time of each step, averaged over the ranks, in milliseconds."""
    return [
        1e3 * statistics.mean(each.waited for each in step) for step in zip(*ranks, strict=True)
    ]


def table(found: Mapping[str, tuple[list[list[StepTimes]], dict[str, float]]]) -> list[str]:
    """Return the figures of all ways in Markdown."""
    heads = ["steps closed by", "steps", "padding", "tokens/s", "ms of waiting per step", "share"]
    rows = []
    for way, (ranks, facts) in found.items():
        waits = waits_of(ranks)
        lasted = [
            1e3 * statistics.mean(each.seconds for each in step)
            for step in zip(*ranks, strict=True)
        ]
        mean = statistics.mean(waits)
        rows.append(
            [
                WAYS[way],
                f"{facts['steps']:.0f}",
                f"{facts['padding']:.0%}",
                f"{facts['speed']:,.0f}",
                f"{mean:.1f}",
                f"{mean / statistics.mean(lasted):.0%}",
            ]
        )
    return figure.table(heads, rows)


def plot(found: Mapping[str, tuple[list[list[StepTimes]], dict[str, float]]], path: Path) -> None:
    """Draw the waiting time of each step, one line per way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for way, (ranks, _) in found.items():
        waits = waits_of(ranks)
        label = f"{WAYS[way].replace('`', '')}: {statistics.mean(waits):.0f} ms"
        # `measure` leaves out step 1.
        axes.plot(range(2, len(waits) + 2), waits, color=COLORS[way], linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("ms waiting for the slowest rank")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        title="steps closed by (mean)",
        frameon=False,
        ncols=3,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )
    drawing.savefig(path, dpi=150)


def main() -> None:
    """Measure all ways, or work as a rank of one."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"ranks": 4, "samples": 2048})
    parser.add_argument(
        "--micros", type=float, default=20.0, help="microseconds per position (default 20)"
    )
    parser.add_argument("--plot", type=Path, help="file of the picture")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        work(options.way, options.samples, options.micros)
        return
    facts = figure.begin()
    found = {way: measure(way, options) for way in WAYS}
    figure.show(*table(found))
    figure.keep(options, facts, runs={way: figures for way, (_, figures) in found.items()})
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
