"""vTrain's measured steps, beside what is predicted of them: read, and as a table.

The two files are ground_truth_single.csv and ground_truth_multi.csv of
github.com/VIA-Research/vTrain (MIT), which are not part of this repository.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from plan_systems import NETWORK, Line, constant, gpt, megatron, seconds_of
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.transformer import Transformer


def vtrain_table(folder: Path | None) -> Iterator[str]:
    """The mean error on vTrain's measured steps, on the rows that fitted and on those held out."""
    yield "\n## vTrain's measured steps\n"
    if folder is None:
        yield "Not in this repository: `--data FOLDER` prints the errors on the rows held out."
        return
    yield "| file | rows | mean error | constant |\n|---|--:|--:|--:|"
    for kind in ("single", "multi"):
        rows = vtrain_rows(folder / f"ground_truth_{kind}.csv")
        for name, part in (("fitted to", rows[::2]), ("held out", rows[1::2])):
            lines = [_line(row) for row in part]
            error = statistics.mean(abs(line.error) for line in lines)
            floor = statistics.mean(map(abs, constant(lines)))
            yield f"| {kind}-node, {name} | {len(lines)} | {error:.1%} | {floor:.1%} |"


def vtrain_rows(file: Path) -> list[list[float]]:
    """Rows without the heading, from the number of GPUs on."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        heading, *rows = csv.reader(text)
    first = next(n for n, name in enumerate(heading) if "GPU" in name)
    return [[float(value) for value in row[first:]] for row in rows]


VTRAIN_LINE = 12.5e9
"""Bytes/s between hosts for each device, of four cards of 200 Gbit/s a host."""


def vtrain_run(row: Sequence[float]) -> tuple[Transformer, Parallelism, int]:
    """What a row of vTrain's was measured of: the model, how it was trained, and the devices."""
    gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[:10])
    model = replace(gpt(layers, hidden, heads, 51200), sequence=sequence)
    shape = {"tensor": tensor, "pipeline": pipeline, "batch": batch, "gpus": gpus}
    return model, megatron(shape, data, micro, "full"), gpus


def _line(row: Sequence[float]) -> Line:
    model, run, gpus = vtrain_run(row)
    predicted = seconds_of(model, run, gpus, between=VTRAIN_LINE * NETWORK)
    return Line("", row[10] / 1e3, predicted, model.model_flops(run.batch) / gpus)
