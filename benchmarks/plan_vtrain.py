"""vTrain's measured steps, next to their predictions.

Its two files are ground_truth_single.csv and ground_truth_multi.csv of
github.com/VIA-Research/vTrain (MIT), which are not part of this repository. The efficiency of an
A100 in the catalogue, of its host and of its network (plan_systems.py) was fitted to every second
row of both; the others are held out.
"""

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from plan_systems import NETWORK, Line, constant, gpt, megatron, seconds_of

LINE_RATE = 12.5e9
"""Bytes/s between hosts for each device, of four cards of 200 Gbit/s a host."""


def vtrain_table(folder: Path | None) -> Iterator[str]:
    """Yield the mean error on the rows that were fitted to, and on those held out."""
    yield "\n## vTrain's measured steps\n"
    if folder is None:
        yield "Not in this repository: `--data FOLDER` prints the errors on the rows held out."
        return
    yield "| file | rows | mean error | constant |\n|---|--:|--:|--:|"
    for kind in ("single", "multi"):
        with (folder / f"ground_truth_{kind}.csv").open(newline="", encoding="utf-8-sig") as text:
            heading, *rows = csv.reader(text)
        first = next(n for n, name in enumerate(heading) if "GPU" in name)
        lines = [_line([float(value) for value in row[first:]]) for row in rows]
        for name, part in (("fitted to", lines[::2]), ("held out", lines[1::2])):
            error = statistics.mean(abs(line.error) for line in part)
            floor = statistics.mean(map(abs, constant(part)))
            yield f"| {kind}-node, {name} | {len(part)} | {error:.1%} | {floor:.1%} |"


def _line(row: Sequence[float]) -> Line:
    gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[:10])
    model = replace(gpt(layers, hidden, heads, 51200), sequence=sequence)
    shape = {"tensor": tensor, "pipeline": pipeline, "batch": batch, "gpus": gpus}
    run = megatron(shape, data, micro, "full")
    predicted = seconds_of(model, run, gpus, between=LINE_RATE * NETWORK)
    return Line("", row[10] / 1e3, predicted, model.model_flops(run.batch) / gpus)
