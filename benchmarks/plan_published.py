"""Holds the planner's formulas and clock against published tables, and prints the errors.

    python benchmarks/plan_published.py > docs/plan_accuracy.md
    python benchmarks/plan_published.py --data FOLDER     # also vTrain's measured steps

FOLDER has ground_truth_single.csv and ground_truth_multi.csv of github.com/VIA-Research/vTrain
(MIT), which are not part of this repository. The efficiency of an A100 in the catalogue was fitted
to every second of their rows; nothing was fitted to a row of a table here, but for what a caption
says. "Constant" is the floor that any model must be under: one utilisation for all rows of the
table, that of the fitted row, or else the median of all, which a planner would not have.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan_tables as tables
from shardwise.placement import Placement
from shardwise.planning.catalogue import Curve, read_catalogue
from shardwise.planning.cluster import Cluster, parse_cluster
from shardwise.planning.parallelism import Parallelism
from shardwise.planning.stages import Bytes
from shardwise.planning.transformer import Transformer
from shardwise.planning.transformer_clock import Software, step_seconds, transformer_times

CATALOGUE = read_catalogue(user=False)
MEGATRON = Software(0.85e-3, 0.0, Bytes(gradient=2.0))
"""Megatron-LM on an A100: a layer's forward takes its host 0.85 ms (fitted with the device's
efficiency to every second row of vTrain's); 16-bit gradients."""

NETWORK = 0.7
"""The fraction of the line rate between hosts that collectives reach, fitted with the rest."""

MEGATRON_WAY = {"overlap": False, "blocking_sends": True, "stages_last": True}
"""Megatron-LM of 2021: it reduces gradients after backward, and waits for its sends."""


@dataclass(frozen=True)
class Line:
    """A row of a table: what was published, what is predicted, and the model FLOPs of each device
    in a second of it (0 where it is not a time)."""

    name: str
    published: float
    predicted: float
    work: float = 0.0
    note: str = ""

    @property
    def error(self) -> float:
        """The error, as a fraction."""
        return self.predicted / self.published - 1


def main() -> None:
    """Print all tables as Markdown."""
    parser = argparse.ArgumentParser(description="The planner against published tables.")
    parser.add_argument("--data", type=Path, help="the folder with vTrain's two files")
    options = parser.parse_args()
    print(HEAD)
    for title, caption, unit, lines in _tables():
        print("\n".join(_markdown(title, caption, unit, list(lines))), flush=True)
    print("\n".join(_vtrain(options.data)))


HEAD = """# The planner's accuracy on published tables

Made by `python benchmarks/plan_published.py --data FOLDER`, which says what was fitted to what.
Goals: states exact, activations within 2 %, Korthikanti's times within 3 %, MegaScale's and Llama
3's within 5 % but for the row that is fitted. Each table's last line says what was reached. Errors
are predicted / published - 1. *Constant* beside a table of times is one utilisation for all of its
rows, that of the fitted row or else the median of all: a floor.
"""


def _tables() -> Iterator[tuple[str, str, str, Iterable[Line]]]:
    yield (
        "ZeRO, table 1",
        "Bytes of states by the cells of each row. Errors are digits that the paper cuts off.",
        "GB",
        zero_lines(),
    )
    yield "Megatron-LM (SC 2021), table 1", SC21_CAPTION, "s", sc21_lines()
    yield "Megatron-LM (SC 2021), table 2, theirs", SC21_CAPTION_2, "s", sc21_second_lines()
    yield "Megatron-LM (SC 2021), table 2, ZeRO-3", SC21_ZERO_CAPTION, "s", sc21_zero_lines()
    yield "Korthikanti et al., activations", ACTIVATIONS_CAPTION, "GiB or %", activation_lines()
    yield "Korthikanti et al., seconds of a step", KORTHIKANTI_CAPTION, "s", korthikanti_lines()
    yield "MegaScale, Megatron-LM", MEGASCALE_CAPTION, "s", megascale_lines("megatron")
    yield "MegaScale, their own system", MEGASCALE_CAPTION, "s", megascale_lines("megascale")
    yield "Llama 3 405B", LLAMA_CAPTION, "s", llama_lines()


def _rows(fields: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield dict(zip(fields, row, strict=True))


def zero_lines() -> Iterator[Line]:
    """States with Adam in 16 bit, from the cells of each row: 2 bytes of parameters, 2 of
    gradients, 12 of optimizer state; the paper cuts digits off."""
    each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    for ranks, sizes in tables.ZERO.items():
        for parameters, published in zip(tables.ZERO_SIZES, sizes, strict=True):
            for level, printed in zip((1, 2, 3), published, strict=True):
                row = Placement.zero(level)
                held = sum(
                    count / (ranks if row.is_sharded(state) else 1) for state, count in each.items()
                )
                name = f"{parameters / 1e9:g}B, {ranks} ranks, ZERO_{level}"
                yield Line(name, printed, parameters * held / 1e9)


SC21_CAPTION = """Seconds of a step, from the published TFLOP/s. The paper does not say the
micro-batch and the interleaving of a row: the fastest of 1, 2, 4, 8 and 16 is predicted, without
interleaving."""


def sc21_lines() -> Iterator[Line]:
    """Table 1: weak scaling from 1.7 to 1008 billion parameters."""
    for row in _rows(tables.SC21_FIELDS, tables.SC21):
        model = _gpt(row["layers"], row["hidden"], row["heads"], 51200)
        data = row["gpus"] // row["tensor"] // row["pipeline"]
        seconds = _hardware_flops(model, row["batch"]) / row["gpus"] / row["teraflops"] / 1e12
        sizes = [b for b in (1, 2, 4, 8, 16) if row["batch"] % (data * b) == 0]
        predicted, micro = min(
            (_step(model, _megatron(row, data, b, "full"), row["gpus"]), b) for b in sizes
        )
        name = f"{row['billions']:g}B on {row['gpus']}"
        yield Line(name, seconds, predicted, _work(model, row), f"micro-batch {micro}")


SC21_ZERO_CAPTION = """DeepSpeed's ZeRO-3 of that time, without model parallelism. Missed by far:
the prediction gathers one unit ahead over all network cards of a host. The published times of 768
devices and more are those of three passes over the parameters at 16 GB/s, about one card of the
eight."""


def sc21_zero_lines() -> Iterator[Line]:
    """Table 2, ZeRO-3."""
    for row in _rows(tables.SC21_ZERO_FIELDS, tables.SC21_ZERO):
        model = _gpt(*SC21_SHAPES[row["billions"]], 51200)
        micros = row["batch"] // row["gpus"] // row["micro"]
        run = Parallelism(
            data=row["gpus"],
            micro_batch=row["micro"],
            micros=max(1, micros),
            recompute="full",
            placement=Placement.zero(3),
        )
        seconds = _hardware_flops(model, row["batch"]) / row["gpus"] / row["teraflops"] / 1e12
        name = f"{row['billions']:g}B on {row['gpus']}, ZeRO-3"
        yield Line(name, seconds, _step(model, run, row["gpus"]), _work(model, row))


SC21_SHAPES = {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}
SC21_CAPTION_2 = """Tensor 8, pipeline 12 and 35, without interleaving."""


def sc21_second_lines() -> Iterator[Line]:
    """Table 2, tensor and pipeline parallelism."""
    for row in _rows(tables.SC21_THEIRS_FIELDS, tables.SC21_THEIRS):
        model = _gpt(*SC21_SHAPES[row["billions"]], 51200)
        data = row["gpus"] // row["tensor"] // row["pipeline"]
        run = _megatron(row, data, row["micro"], "full")
        seconds = _hardware_flops(model, row["batch"]) / row["gpus"] / row["teraflops"] / 1e12
        name = f"{row['billions']:g}B on {row['gpus']}, theirs"
        yield Line(name, seconds, _step(model, run, row["gpus"]), _work(model, row))


ACTIVATIONS_CAPTION = """Bytes that the first stage keeps, all layers of a pipeline's length of
micro-batches in flight; and what is left of them, in percent, with each method."""


def activation_lines() -> Iterator[Line]:
    """Figures 1 and 7."""
    ways = {
        "sequence": ("none", True),
        "selective": ("selective", False),
        "both": ("selective", True),
        "recomputed": ("full", False),
    }
    for row in _rows(tables.KORTHIKANTI_FIELDS, tables.KORTHIKANTI):
        model = _gpt(row["layers"], row["hidden"], row["heads"], 51200)
        name, micro = row["name"], row["micro"]
        per_layer = {
            way: model.activation_bytes(micro, 8, recompute, sequence_parallel=sequence)
            for way, (recompute, sequence) in ways.items()
        }
        kept = model.activation_bytes(micro, 8, "none", sequence_parallel=False)
        stages = row["pipeline"]
        held = model.layers * (1 + (stages - 1) / stages / row["interleaved"])
        held = held if row["interleaved"] > 1 else float(model.layers)
        yield Line(f"{name}, nothing recomputed", row["kept_gib"], kept * held / 2**30)
        yield Line(f"{name}, both", row["new_gib"], per_layer["both"] * held / 2**30)
        for way, count in per_layer.items():
            yield Line(f"{name}, left by {way}, %", row[way], 100 * count / kept)


KORTHIKANTI_CAPTION = """Full recomputation, and their sequence parallelism with selective
recomputation. Goal: 3 %. What the model leaves out: the gathers that backward makes again for
sequence parallelism, which they hide."""


def korthikanti_lines() -> Iterator[Line]:
    """Table 5."""
    for row in _rows(tables.KORTHIKANTI_FIELDS, tables.KORTHIKANTI):
        model = _gpt(row["layers"], row["hidden"], row["heads"], 51200)
        for way, recompute in (("full", "full"), ("new", "selective")):
            run = _megatron(row | {"tensor": 8}, 1, row["micro"], recompute)
            run = replace(run, sequence_parallel=way == "new")
            name = f"{row['name']}, {'all recomputed' if way == 'full' else 'selective'}"
            yield Line(name, row[way], _step(model, run, row["gpus"]), _work(model, row))


LATER = replace(MEGATRON, size=Bytes(gradient=4.0))
"""Megatron-LM since bf16: gradients are reduced in fp32."""

MEGASCALE_CAPTION = """The first row fits one factor for the matrix products' efficiency; the others
are predicted. Goal: 5 %. What the model leaves out: stragglers and slow hosts, which they find to
grow with the number of devices, and the network's collisions."""


def megascale_lines(system: str) -> Iterator[Line]:
    """Table 2: strong scaling at two batch sizes."""
    model = _gpt(96, 12288, 128, 64000)
    own = system == "megascale"
    if own:
        model = replace(model, flash=True)
    way = {"overlap": own, "blocking_sends": not own, "stages_last": True}

    def predict(row: dict[str, Any], factor: float) -> float:
        data = row["gpus"] // 64
        run = Parallelism(
            data=data,
            tensor=8,
            pipeline=8,
            schedule="interleaved",
            stages_per_rank=6,
            micros=row["batch"] // data,
            recompute="none" if own else "selective",
            sequence_parallel=True,
            placement=Placement.zero(1),
            **way,  # type: ignore[arg-type]
        )
        return _step(model, run, row["gpus"], factor=factor, software=LATER)

    yield from _first_fitted(tables.MEGASCALE_FIELDS, tables.MEGASCALE, system, model, predict)


LLAMA_CAPTION = """Each rank has 8 stages of one layer; embedding and head count as one each. The
first row fits one factor for the matrix products' efficiency of an H100; the second is predicted.
The third, with context parallelism of 16, is not: the model has no context parallelism."""


def llama_lines() -> Iterator[Line]:
    """Table 4."""
    model = Transformer(
        layers=126, hidden=16384, heads=128, sequence=8192, vocabulary=128256,
        kv_heads=8, ffn=53248, gated=True, flash=True, causal=True,
    )  # fmt: skip
    batches = [row[4] * row[6] for row in tables.LLAMA3]
    rows = [
        (*row, model.model_flops(batch) / row[0] / row[7] / 1e12, batch)
        for row, batch in zip(tables.LLAMA3[:2], batches[:2], strict=True)
    ]
    fields = [*tables.LLAMA3_FIELDS, "seconds", "batch"]

    def predict(row: dict[str, Any], factor: float) -> float:
        run = Parallelism(
            data=row["data"],
            tensor=8,
            pipeline=16,
            schedule="interleaved",
            stages_per_rank=8,
            micros=row["per_data"],
            sequence_parallel=True,
            placement=Placement.zero(1),
        )
        return _step(model, run, row["gpus"], factor=factor, device="H100", software=LLAMA)

    yield from _first_fitted(fields, rows, "seconds", model, predict)


LLAMA = Software(0.0, 0.0, Bytes(gradient=4.0))


def _first_fitted(
    fields: Sequence[str], rows: Sequence[Sequence[Any]], key: str, model: Transformer, predict: Any
) -> Iterator[Line]:
    """Lines whose first fits the factor that the others are predicted with."""
    first, *others = _rows(fields, rows)
    factor = 1.0
    for _ in range(4):  # the time of the products is inverse to it, and nearly all of the time
        factor *= predict(first, factor) / first[key]
    name = f"{first['gpus']} devices, batch {first['batch']}"
    note = f"fitted: factor {factor:.3f}"
    yield Line(name, first[key], predict(first, factor), _work(model, first), note)
    for row in others:
        name = f"{row['gpus']} devices, batch {row['batch']}"
        yield Line(name, row[key], predict(row, factor), _work(model, row))


def _gpt(layers: int, hidden: int, heads: int, words: int) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=words)


def _megatron(row: dict[str, Any], data: int, micro: int, recompute: str) -> Parallelism:
    interleaved = row.get("interleaved", 1)
    return Parallelism(
        data=data,
        tensor=row["tensor"],
        pipeline=row["pipeline"],
        schedule="interleaved" if interleaved > 1 else "1f1b",
        stages_per_rank=interleaved,
        micro_batch=micro,
        micros=row["batch"] // data // micro,
        recompute=recompute,
        **MEGATRON_WAY,  # type: ignore[arg-type]
    )


def _hardware_flops(model: Transformer, batch: int) -> float:
    """FLOPs of a step with all recomputed: 96 B s l h²(1 + s/6h + V/16lh)."""
    s, layers, h, words = model.sequence, model.layers, model.hidden, model.vocabulary
    return 96.0 * batch * s * layers * h * h * (1 + s / 6 / h + words / 16 / layers / h)


def _work(model: Transformer, row: dict[str, Any]) -> float:
    """Model FLOPs of a device in a step."""
    return model.model_flops(row["batch"]) / row["gpus"]


def _step(
    model: Transformer,
    run: Parallelism,
    gpus: int,
    *,
    factor: float = 1.0,
    device: str = "A100",
    software: Software = MEGATRON,
    between: float | None = None,
) -> float:
    """Seconds of a step; matrix products reach `factor` times the catalogue's efficiency, and hosts
    exchange `between` bytes/s for each device, where the catalogue's figure is not theirs."""
    cluster = parse_cluster(device, CATALOGUE)
    curve = Curve(
        tuple((s, min(1.0, e * factor)) for s, e in cluster.device.curves["matmul"].points)
    )
    each = replace(cluster.device, curves={**cluster.device.curves, "matmul": curve})
    rate = between or NETWORK * cluster.between.bandwidth
    far = replace(cluster.between, bandwidth=rate)
    whole = Cluster(max(1, gpus // 8), min(8, gpus), each, cluster.inside, far)
    return step_seconds(transformer_times(model, run, whole, software))


def _markdown(title: str, caption: str, unit: str, lines: list[Line]) -> Iterator[str]:
    """A table with its summary."""
    errors = [abs(line.error) for line in lines if not line.note.startswith("fitted")]
    yield f"\n## {title}\n\n{caption}\n"
    timed = all(line.work for line in lines)
    constant = _constant(lines) if timed else []
    yield f"| row | published, {unit} | predicted | error |{' constant |' if timed else ''}"
    yield "|---|--:|--:|--:|" + ("--:|" if timed else "")
    for number, line in enumerate(lines):
        note = f" ({line.note})" if line.note else ""
        floor = f" {constant[number]:+.1%} |" if timed else ""
        yield (
            f"| {line.name}{note} | {line.published:.4g} | {line.predicted:.4g} "
            f"| {line.error:+.1%} |{floor}"
        )
    summary = f"\nMean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}"
    if timed:
        others = [e for e, line in zip(constant, lines, strict=True) if line.note[:6] != "fitted"]
        summary += f"; constant utilisation: mean {statistics.mean(map(abs, others)):.1%}"
    yield summary + "."


def _constant(lines: Sequence[Line]) -> list[float]:
    """The errors of one utilisation for all rows: that of the row that was fitted, else the median
    of all."""
    fitted = [line for line in lines if line.note.startswith("fitted")]
    rate = statistics.median(line.work / line.published for line in fitted or lines)
    return [line.work / rate / line.published - 1 for line in lines]


def _vtrain(folder: Path | None) -> Iterator[str]:
    """The mean error on vTrain's measured steps, on the rows that fitted and on those held out."""
    yield "\n## vTrain's measured steps\n"
    if folder is None:
        yield "Not in this repository: `--data FOLDER` prints the errors on the rows held out."
        return
    yield "| file | rows | mean error | constant |\n|---|--:|--:|--:|"
    for kind in ("single", "multi"):
        rows = vtrain_rows(folder / f"ground_truth_{kind}.csv")
        for name, part in (("fitted to", rows[::2]), ("held out", rows[1::2])):
            lines = [_vtrain_line(row) for row in part]
            error = statistics.mean(abs(line.error) for line in lines)
            floor = statistics.mean(map(abs, _constant(lines)))
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
    model = replace(_gpt(layers, hidden, heads, 51200), sequence=sequence)
    shape = {"tensor": tensor, "pipeline": pipeline, "batch": batch, "gpus": gpus}
    return model, _megatron(shape, data, micro, "full"), gpus


def _vtrain_line(row: Sequence[float]) -> Line:
    model, run, gpus = vtrain_run(row)
    predicted = _step(model, run, gpus, between=VTRAIN_LINE * NETWORK)
    return Line("", row[10] / 1e3, predicted, model.model_flops(run.batch) / gpus)


if __name__ == "__main__":
    main()
