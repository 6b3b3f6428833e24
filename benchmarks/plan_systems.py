"""Published systems as the planner's clock describes them; a published row and its table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.tools.plan.catalogue import Curve, read_catalogue
from shardwise.tools.plan.cluster import Cluster, parse_cluster
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.stages import Bytes
from shardwise.tools.plan.transformer import (
    Software,
    Transformer,
    step_seconds,
    transformer_times,
)

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
    """A row of a table: its published and its predicted figure, and the model FLOPs of each device
    in the row's seconds (0 if the figure is not a time)."""

    name: str
    published: float
    predicted: float
    work: float = 0.0
    note: str = ""
    rival: float = 0.0
    """Calculon's prediction; 0 if it was not asked."""

    @property
    def error(self) -> float:
        """The error, as a fraction."""
        return self.predicted / self.published - 1


def gpt(layers: int, hidden: int, heads: int, words: int) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=words)


def megatron(row: dict[str, Any], data: int, micro: int, recompute: str) -> Parallelism:
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


def hardware_flops(model: Transformer, batch: int) -> float:
    """Return the FLOPs of a step with all recomputed: 96 B s l h²(1 + s/6h + V/16lh)."""
    s, layers, h, words = model.sequence, model.layers, model.hidden, model.vocabulary
    return 96.0 * batch * s * layers * h * h * (1 + s / 6 / h + words / 16 / layers / h)


def work_of(model: Transformer, row: dict[str, Any]) -> float:
    """Return the model FLOPs of a device in a step."""
    return model.model_flops(row["batch"]) / row["gpus"]


def seconds_of(
    model: Transformer,
    run: Parallelism,
    gpus: int,
    *,
    factor: float = 1.0,
    device: str = "A100",
    software: Software = MEGATRON,
    between: float | None = None,
) -> float:
    """Return the seconds of a step. Matrix products reach `factor` times the catalogue's
    efficiency; hosts exchange `between` bytes/s for each device, by default the catalogue's."""
    cluster = parse_cluster(device, CATALOGUE)
    curve = Curve(
        tuple((s, min(1.0, e * factor)) for s, e in cluster.device.curves["matmul"].points)
    )
    each = replace(cluster.device, curves={**cluster.device.curves, "matmul": curve})
    rate = between or NETWORK * cluster.between.bandwidth
    far = replace(cluster.between, bandwidth=rate)
    whole = Cluster(max(1, gpus // 8), min(8, gpus), each, cluster.inside, far)
    return step_seconds(transformer_times(model, run, whole, software))


def markdown(title: str, caption: str, unit: str, lines: list[Line]) -> Iterator[str]:
    """Yield a table with its summary."""
    yield f"\n## {title}\n\n{caption}\n"
    floors = constant(lines) if all(line.work for line in lines) else []
    rivals = any(line.rival for line in lines)
    more = " constant |" * bool(floors) + " Calculon |" * rivals
    yield f"| row | published, {unit} | predicted | error |{more}"
    yield "|---|--:|--:|--:|" + "--:|" * (bool(floors) + rivals)
    for number, line in enumerate(lines):
        note = f" ({line.note})" if line.note else ""
        cells = [f"{floors[number]:+.1%}"] if floors else []
        if rivals:
            cells.append(f"{line.rival / line.published - 1:+.1%}" if line.rival else "-")
        yield (
            f"| {line.name}{note} | {line.published:.4g} | {line.predicted:.4g} "
            f"| {line.error:+.1%} |" + "".join(f" {cell} |" for cell in cells)
        )
    yield _summary(lines, floors)


def _summary(lines: Sequence[Line], floors: Sequence[float]) -> str:
    """Return the mean and the largest error of the rows to which nothing was fitted."""
    own = [not line.note.startswith("fitted") for line in lines]
    errors = [abs(line.error) for line, counts in zip(lines, own, strict=True) if counts]
    text = f"\nMean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}"
    if floors:
        others = [abs(each) for each, counts in zip(floors, own, strict=True) if counts]
        text += f"; constant utilisation: mean {statistics.mean(others):.1%}"
    if rivals := [abs(line.rival / line.published - 1) for line in lines if line.rival]:
        same = [abs(line.error) for line in lines if line.rival]
        text += (
            f". On the {len(same)} rows that Calculon also covers, the mean error is "
            f"{statistics.mean(same):.1%}; Calculon's is {statistics.mean(rivals):.1%} "
            f"(largest {max(rivals):.1%})"
        )
    return text + "."


def constant(lines: Sequence[Line]) -> list[float]:
    """Return the errors of one utilisation for all rows: the fitted row's, else the median."""
    fitted = [line for line in lines if line.note.startswith("fitted")]
    rate = statistics.median(line.work / line.published for line in fitted or lines)
    return [line.work / rate / line.published - 1 for line in lines]
