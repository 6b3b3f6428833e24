"""Compares the planner's formulas and clock with published tables, and prints the errors.

    python benchmarks/plan_published.py --docs            # and puts them into docs/plan_accuracy.md
    python benchmarks/plan_published.py --data FOLDER     # also vTrain's measured steps
    python benchmarks/plan_published.py --calculon FOLDER # and Calculon's error on the same rows

FOLDER has ground_truth_single.csv and ground_truth_multi.csv of github.com/VIA-Research/vTrain
(MIT), which are not part of this repository. The efficiency of an A100 in the catalogue was fitted
to every second of their rows; to a row of a table here only what its caption says was fitted.
"Constant" is the error that any model must undercut: one utilisation for all rows of the table,
that of the fitted row, or else the median of all, which a planner would not have.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_calculon
import plan_docs
import plan_tables as tables
from plan_systems import (
    MEGATRON,
    Line,
    gpt,
    hardware_flops,
    markdown,
    megatron,
    seconds_of,
    work_of,
)
from plan_vtrain import vtrain_table
from shardwise.layout.placement import Placement
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.stages import Bytes
from shardwise.tools.plan.transformer import Software, Transformer


def main() -> None:
    """Print all tables as Markdown."""
    parser = argparse.ArgumentParser(description="The planner against published tables.")
    parser.add_argument("--data", type=Path, help="the folder with vTrain's two files")
    parser.add_argument("--docs", action="store_true", help="write docs/plan_accuracy.md")
    parser.add_argument("--calculon", type=Path, help="a folder with Calculon, to compare with")
    options = parser.parse_args()
    tables = [
        "\n".join(markdown(title, caption, unit, list(lines)))
        for title, caption, unit, lines in _tables(options.calculon)
    ]
    for text in (*tables, "\n".join(vtrain_table(options.data))):
        print(text, flush=True)
        if options.docs:
            title, *body = text.strip().removeprefix("## ").splitlines()
            plan_docs.put(title, body)


def _tables(calculon: Path | None) -> Iterator[tuple[str, str, str, Iterable[Line]]]:
    yield "ZeRO, table 1", ZERO_CAPTION, "GB", zero_lines()
    yield "Megatron-LM (SC 2021), table 1", SC21_CAPTION, "s", sc21_lines()
    yield "Megatron-LM (SC 2021), table 2, theirs", SC21_CAPTION_2, "s", sc21_second_lines("theirs")
    yield (
        "Megatron-LM (SC 2021), table 2, ZeRO-3",
        SC21_ZERO_CAPTION,
        "s",
        sc21_second_lines("ZeRO-3"),
    )
    kept, times = activation_lines(calculon), korthikanti_lines(calculon)
    yield "Korthikanti et al., activations", ACTIVATIONS_CAPTION, "GiB or %", kept
    yield "Korthikanti et al., seconds of a step", KORTHIKANTI_CAPTION, "s", times
    yield "MegaScale, Megatron-LM", MEGASCALE_CAPTION, "s", megascale_lines("megatron")
    yield "MegaScale, their own system", MEGASCALE_CAPTION, "s", megascale_lines("megascale")
    yield "Llama 3 405B", LLAMA_CAPTION, "s", llama_lines()
    yield "torchtitan, Llama 3.1 8B", TORCHTITAN_CAPTION, "GiB", torchtitan_lines()


def _rows(fields: str, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield dict(zip(fields.split(), row, strict=True))


ZERO_CAPTION = (
    "Bytes of the states in each row of the placement table. The errors are digits that the "
    "paper omits."
)


def zero_lines() -> Iterator[Line]:
    """States with Adam in 16 bit."""
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


SC21_CAPTION = """Seconds of a step, from the published TFLOP/s. The paper does not give the
micro-batch and the interleaving of a row. The prediction is the fastest of the micro-batches 1,
2, 4, 8 and 16, without interleaving."""


def sc21_lines() -> Iterator[Line]:
    """Table 1: weak scaling from 1.7 to 1008 billion parameters."""
    for row in _rows(tables.SC21_FIELDS, tables.SC21):
        model = gpt(row["layers"], row["hidden"], row["heads"], 51200)
        data = row["gpus"] // row["tensor"] // row["pipeline"]
        sizes = [b for b in (1, 2, 4, 8, 16) if row["batch"] % (data * b) == 0]
        predicted, micro = min(
            (seconds_of(model, megatron(row, data, b, "full"), row["gpus"]), b) for b in sizes
        )
        yield _sc21_line("", model, row, predicted, f"micro-batch {micro}")


SC21_SHAPES = {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}
SC21_CAPTION_2 = """Tensor 8, pipeline 12 and 35, without interleaving."""
SC21_ZERO_CAPTION = """DeepSpeed's ZeRO-3 of that time, without model parallelism. The prediction
is far off: it gathers one unit ahead over all network cards of a host. The published times of
768 devices and more equal three passes over the parameters at 16 GB/s, about one card of the
eight."""


def sc21_second_lines(system: str) -> Iterator[Line]:
    """Table 2: "theirs", tensor and pipeline parallelism, or "ZeRO-3"."""
    zero = system == "ZeRO-3"
    fields = tables.SC21_ZERO_FIELDS if zero else tables.SC21_THEIRS_FIELDS
    for row in _rows(fields, tables.SC21_ZERO if zero else tables.SC21_THEIRS):
        model = gpt(*SC21_SHAPES[row["billions"]], 51200)
        if zero:
            run = Parallelism(
                data=row["gpus"],
                micro_batch=row["micro"],
                micros=max(1, row["batch"] // row["gpus"] // row["micro"]),
                recompute="full",
                placement=Placement.zero(3),
            )
        else:
            data = row["gpus"] // row["tensor"] // row["pipeline"]
            run = megatron(row, data, row["micro"], "full")
        yield _sc21_line(f", {system}", model, row, seconds_of(model, run, row["gpus"]))


def _sc21_line(
    name: str, model: Transformer, row: dict[str, Any], predicted: float, note: str = ""
) -> Line:
    """The published seconds follow from the published TFLOP/s of each device."""
    published = hardware_flops(model, row["batch"]) / row["gpus"] / row["teraflops"] / 1e12
    name = f"{row['billions']:g}B on {row['gpus']}{name}"
    return Line(name, published, predicted, work_of(model, row), note)


ACTIVATIONS_CAPTION = """Bytes that the first stage keeps: all its layers, with as many micro-
batches in flight as the pipeline has stages. The other columns are the remaining percentage with
each method."""


def activation_lines(calculon: Path | None = None) -> Iterator[Line]:
    """Figures 1 and 7."""
    ways = {
        "sequence": ("none", True),
        "selective": ("selective", False),
        "both": ("selective", True),
        "recomputed": ("full", False),
    }
    for row in _rows(tables.KORTHIKANTI_FIELDS, tables.KORTHIKANTI):
        model = gpt(row["layers"], row["hidden"], row["heads"], 51200)
        name, micro = row["name"], row["micro"]
        per_layer = {
            way: model.activation_bytes(micro, 8, recompute, sequence_parallel=sequence)
            for way, (recompute, sequence) in ways.items()
        }
        kept = model.activation_bytes(micro, 8, "none", sequence_parallel=False)
        stages = row["pipeline"]
        held = model.layers * (1 + (stages - 1) / stages / row["interleaved"])
        held = held if row["interleaved"] > 1 else float(model.layers)
        for what, key, bytes_kept, way in (
            ("nothing recomputed", "kept_gib", kept, "none"),
            ("both", "new_gib", per_layer["both"], "seqsel"),
        ):
            rival = plan_calculon.kept_gib(calculon, name, way)
            predicted = bytes_kept * held / 2**30
            yield Line(f"{name}, {what}", row[key], predicted, rival=rival)
        for way, count in per_layer.items():
            yield Line(f"{name}, left by {way}, %", row[way], 100 * count / kept)


KORTHIKANTI_CAPTION = """Full recomputation, and their sequence parallelism with selective
recomputation. Goal: 3 %. Not modelled: the repeated gathers of sequence parallelism in backward,
which their system hides."""


def korthikanti_lines(calculon: Path | None = None) -> Iterator[Line]:
    """Table 5."""
    for row in _rows(tables.KORTHIKANTI_FIELDS, tables.KORTHIKANTI):
        model = gpt(row["layers"], row["hidden"], row["heads"], 51200)
        for way, recompute in (("full", "full"), ("new", "selective")):
            run = megatron(row | {"tensor": 8}, 1, row["micro"], recompute)
            run = replace(run, sequence_parallel=way == "new")
            name = f"{row['name']}, {'all recomputed' if way == 'full' else 'selective'}"
            rival = plan_calculon.seconds(calculon, row["name"], way)
            predicted, work = seconds_of(model, run, row["gpus"]), work_of(model, row)
            yield Line(name, row[way], predicted, work, rival=rival)


LATER = replace(MEGATRON, size=Bytes(gradient=4.0))
"""Megatron-LM since bf16: gradients are reduced in fp32."""

MEGASCALE_CAPTION = """The first row fits one factor for the efficiency of matrix products; the
others are predicted. Goal: 5 %. Not modelled: network collisions, and stragglers and slow hosts,
whose number grows with the number of devices in their measurements."""


def megascale_lines(system: str) -> Iterator[Line]:
    """Table 2: strong scaling at two batch sizes."""
    model = gpt(96, 12288, 128, 64000)
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
        return seconds_of(model, run, row["gpus"], factor=factor, software=LATER)

    yield from _first_fitted(tables.MEGASCALE_FIELDS, tables.MEGASCALE, system, model, predict)


LLAMA_CAPTION = """Each rank has 8 stages of one layer; embedding and head count as one each. The
first row fits one factor for the efficiency of matrix products on an H100; the others are
predicted. The third row splits sequences of 131072 over 16 ranks, which gather keys and values
of each layer."""


def llama_lines() -> Iterator[Line]:
    """Table 4."""
    model = Transformer(
        layers=126, hidden=16384, heads=128, sequence=8192, vocabulary=128256,
        kv_heads=8, ffn=53248, gated=True, flash=True, causal=True,
    )  # fmt: skip
    batches = [row[4] * row[6] for row in tables.LLAMA3]
    models = [replace(model, sequence=row[5], context=row[2]) for row in tables.LLAMA3]
    rows = [
        (*row, each.model_flops(batch) / row[0] / row[7] / 1e12, batch, each)
        for row, batch, each in zip(tables.LLAMA3, batches, models, strict=True)
    ]
    fields = f"{tables.LLAMA3_FIELDS} seconds batch model"

    def predict(row: dict[str, Any], factor: float) -> float:
        run = Parallelism(
            data=row["data"] * row["context"],
            tensor=8,
            pipeline=16,
            schedule="interleaved",
            stages_per_rank=8,
            micros=row["per_data"],
            sequence_parallel=True,
            placement=Placement.zero(1),
        )
        return seconds_of(
            row["model"], run, row["gpus"], factor=factor, device="H100", software=LLAMA
        )

    yield from _first_fitted(fields, rows, "seconds", model, predict)


TORCHTITAN_CAPTION = """Memory at the peak. The states are sharded in fp32. All other memory is
fitted to the row of 128 devices, and is the same on 8. Activations are not predicted separately:
the paper does not say which products its selective recomputation keeps, nor how it computes the
loss, which is a third of the memory. Its rows in float8, of 70B and 405B, are not compared."""


def torchtitan_lines() -> Iterator[Line]:
    """Tables 1 and 2: the same sequences of each device on 128 of them and on 8."""
    model = Transformer(
        layers=32, hidden=4096, heads=32, sequence=8192, vocabulary=128256,
        kv_heads=8, ffn=14336, gated=True, flash=True, causal=True,
    )  # fmt: skip
    beside = 0.0
    for number, (name, gpus, gib) in enumerate(tables.TORCHTITAN):
        states = 16 * model.parameters / gpus / 2**30
        note = ""
        if number % 2 == 0:
            beside = gib - states
            note = f"fitted: {beside:.1f} GiB beside states"
        yield Line(f"{name}, {gpus} devices", gib, states + beside, note=note)


LLAMA = Software(0.0, 0.0, Bytes(gradient=4.0))


def _first_fitted(
    fields: str, rows: Sequence[Sequence[Any]], key: str, model: Transformer, predict: Any
) -> Iterator[Line]:
    """Lines whose first fits the factor that the others are predicted with."""
    first, *others = _rows(fields, rows)
    factor = 1.0
    for _ in range(4):  # the time of the products is inverse to it, and nearly all of the time
        factor *= predict(first, factor) / first[key]
    name = f"{first['gpus']} devices, batch {first['batch']}"
    note = f"fitted: factor {factor:.3f}"
    yield Line(name, first[key], predict(first, factor), work_of(model, first), note)
    for row in others:
        name = f"{row['gpus']} devices, batch {row['batch']}"
        trained = row.get("model", model)
        yield Line(name, row[key], predict(row, factor), work_of(trained, row))


if __name__ == "__main__":
    main()
