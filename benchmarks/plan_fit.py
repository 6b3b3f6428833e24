"""vTrain's measured steps: their table, and the fit of an A100, its host and its network to them.

    python benchmarks/plan_fit.py --data FOLDER

FOLDER has ground_truth_single.csv and ground_truth_multi.csv of github.com/VIA-Research/vTrain
(MIT), which are not part of this repository. Five numbers are fitted to every second row of both
(the rest is held out), so that the mean of |predicted / measured - 1| is least. Prints them next to
those in use (hardware/a100.toml and plan_systems.py), with the errors of both.

    matmul     top * x / (x + half), x in GFLOP of a product
    memory     scale * (0.2, 0.8, 1.0, 1.2) at 0.1, 1, 10 and 100 MB
    host       seconds of a layer's forward
    network    the fraction of the line rate between hosts
"""

import argparse
import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plan_systems import CATALOGUE, MEGATRON, NETWORK, Line, constant, gpt, megatron, seconds_of
from shardwise.planning.catalogue import Curve, Device
from shardwise.planning.cluster import Cluster, parse_cluster
from shardwise.planning.parallelism import Parallelism
from shardwise.planning.transformer import Transformer
from shardwise.planning.transformer_clock import Software, step_seconds, transformer_times


def vtrain_table(folder: Path | None) -> Iterator[str]:
    """Yield the mean error on the rows that were fitted to, and on those held out."""
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


SIZES = (0.01, 0.1, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
"""GFLOP of the catalogue's points of products."""

MEMORY = ((0.1, 0.2), (1.0, 0.8), (10.0, 1.0), (100.0, 1.2))
"""Megabytes, and the shape of the curve of traffic."""

START = (0.7, 20.0, 0.7, 1e-3, 0.8)
"""Where the search starts: round numbers, of which none was measured."""

ROUNDS = 400
"""Evaluations of the search, at most."""


@dataclass(frozen=True)
class Fit:
    """The five fitted numbers."""

    top: float
    half: float
    memory: float
    host: float
    network: float

    def device(self, like: Device) -> Device:
        """`like` with these efficiencies."""
        products = Curve(tuple((x, min(1.0, self.top * x / (x + self.half))) for x in SIZES))
        traffic = Curve(tuple((x, min(1.0, self.memory * part)) for x, part in MEMORY))
        return replace(like, curves={"matmul": products, "memory": traffic})


@dataclass(frozen=True)
class Row:
    """A measured step: the model, how it was trained, on how many devices, in seconds."""

    model: Transformer
    run: Parallelism
    gpus: int
    seconds: float


def main() -> None:
    """Fit, and print."""
    parser = argparse.ArgumentParser(description="Fit an A100 to vTrain's measured steps.")
    parser.add_argument("--data", type=Path, required=True, help="the folder with vTrain's files")
    folder = parser.parse_args().data
    files = {
        kind: [_row(each) for each in vtrain_rows(folder / f"ground_truth_{kind}.csv")]
        for kind in ("single", "multi")
    }
    fitted = search([row for rows in files.values() for row in rows[::2]])
    print("| | top | half, GFLOP | memory | host, ms | network |\n|---|--:|--:|--:|--:|--:|")
    for name, fit in (("in use", in_use()), ("fitted now", fitted)):
        print(
            f"| {name} | {fit.top:.3f} | {fit.half:.2f} | {fit.memory:.3f} "
            f"| {1e3 * fit.host:.3f} | {fit.network:.3f} |"
        )
    print("\n| file | rows | in use | fitted now |\n|---|--:|--:|--:|")
    for kind, rows in files.items():
        for name, part in (("fitted to", rows[::2]), ("held out", rows[1::2])):
            errors = (f"{error(fit, part):.1%}" for fit in (in_use(), fitted))
            print(f"| {kind}-node, {name} | {len(part)} | {' | '.join(errors)} |")


def in_use() -> Fit:
    """What the catalogue and plan_py have."""
    curves = CATALOGUE.device("A100").curves
    (low, first), (high, last) = curves["matmul"].points[2], curves["matmul"].points[-1]
    half = (last / first - 1) / (1 / low - last / first / high)
    top = first * (low + half) / low
    return Fit(top, half, curves["memory"].at(10.0), MEGATRON.host, NETWORK)


def search(rows: Sequence[Row]) -> Fit:
    """The numbers with the least error on `rows`, by the simplex of Nelder and Mead (1965)."""
    from scipy.optimize import minimize

    def objective(scales: Sequence[float]) -> float:
        if min(scales) <= 0:
            return 1e3
        return error(_scaled(scales), rows)

    found = minimize(
        objective, [1.0] * len(START), method="Nelder-Mead",
        options={"maxfev": ROUNDS, "xatol": 1e-3, "fatol": 1e-5},
    )  # fmt: skip
    return _scaled(found.x)


def _scaled(scales: Sequence[float]) -> Fit:
    return Fit(*(float(a * b) for a, b in zip(START, scales, strict=True)))


def error(fit: Fit, rows: Sequence[Row]) -> float:
    """The mean of |predicted / measured - 1|."""
    return statistics.mean(abs(predicted(fit, row) / row.seconds - 1) for row in rows)


def predicted(fit: Fit, row: Row) -> float:
    """Seconds of a step."""
    known = parse_cluster("A100", CATALOGUE)
    far = replace(known.between, bandwidth=VTRAIN_LINE * fit.network)
    hosts, per_host = max(1, row.gpus // 8), min(8, row.gpus)
    cluster = Cluster(hosts, per_host, fit.device(known.device), known.inside, far)
    software = Software(fit.host, 0.0, MEGATRON.size)
    return step_seconds(transformer_times(row.model, row.run, cluster, software))


def _row(values: Sequence[float]) -> Row:
    model, run, gpus = vtrain_run(values)
    return Row(model, run, gpus, values[10] / 1e3)


if __name__ == "__main__":
    main()
