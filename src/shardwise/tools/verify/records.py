"""Reads the records that ranks have written (see tensor_log.py), and assembles full tensors."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.layout import fingerprints
from shardwise.layout.fingerprints import Fingerprint
from shardwise.world.tensor_log import read_fingerprint

T = TypeVar("T")
Key = tuple[str, str]
"""The kind and name of a tensor."""


@dataclass(frozen=True)
class WholeTensor:
    """A full tensor, assembled from the shards of all ranks.

    Replicas of a tensor are numbered copies. `copies` maps each copy to its fingerprint, and
    `ranks` maps it to the ranks that hold its shards. `values` are the values of the first copy,
    shape (numel,), or None if they were not recorded.
    """

    copies: Mapping[int, Fingerprint]
    values: Tensor | None
    ranks: Mapping[int, list[int]]

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the first copy."""
        return self.copies[min(self.copies)]

    @property
    def strays(self) -> list[int]:
        """The ranks whose copy differs from the first copy."""
        return [
            rank
            for copy, fingerprint in self.copies.items()
            if not fingerprint.same_bits(self.fingerprint)
            for rank in self.ranks[copy]
        ]


@dataclass(frozen=True)
class FeedRecord:
    """Totals over all inputs of the models in a step (see `tensor_log.FeedTotals`)."""

    elements: int
    hashes: int
    sums: tuple[float, float]
    rows: int


@dataclass(frozen=True)
class Step:
    """The record of one step of an engine. Number 0 is the state before the first step."""

    number: int
    loss: float
    grad_norm: float
    weight: float
    lr: tuple[float, ...]
    samples: tuple[int, ...]
    fed: FeedRecord
    numbers: Mapping[str, float]
    tensors: Mapping[Key, WholeTensor]
    skipped: bool = False
    """Whether the engine skipped the update (False if this was not recorded)."""


@dataclass(frozen=True)
class RecordedTraining:
    """The record of a run.

    Attributes:
        engines: Steps of each engine.
        order: Names of each engine's modules, in the order of their first forward pass.
        parameters: Names and shapes of each engine's parameters, by parameter group.
        facts: Facts about the script that the ranks recorded (see watching.py).
    """

    engines: Mapping[int, list[Step]]
    order: Mapping[int, list[str]] = field(default_factory=dict)
    parameters: Mapping[int, list[list[tuple[str, tuple[int, ...]]]]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def driver(self) -> str:
        """What ran the training: "engine", "horovod", "plain", or "" if nothing was trained."""
        return str(self.facts.get("driver", ""))

    @property
    def steps(self) -> int:
        """The number of steps of the first engine."""
        return len(self.engines[min(self.engines)]) - 1 if self.engines else 0


def count_steps(folder: Path) -> int:
    """Return the number of steps that rank 0 has recorded so far."""
    files = list((folder / "rank-0").glob("engine-0-step-*.pt"))
    return max(len(files) - 1, 0)


def load_step(path: Path) -> dict[str, Any]:
    """Return what one rank recorded in one step."""
    row: dict[str, Any] = torch.load(path, weights_only=True)
    return row


def read(folder: Path, load: Callable[[Path], dict[str, Any]] = load_step) -> RecordedTraining:
    """Return the record of a run's ranks. `load` reads the file of one rank and step."""
    ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
    files: dict[tuple[int, int], list[tuple[int, Path]]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        for path in rank.glob("engine-*-step-*.pt"):
            _, of, _, step_number = path.stem.split("-")
            files[int(of), int(step_number)].append((number, path))
    engines: dict[int, list[Step]] = defaultdict(list)
    order: dict[int, list[str]] = {}
    parameters: dict[int, Any] = {}
    ended: set[int] = set()
    for (engine, step), several in sorted(files.items()):
        if len(several) < len(ranks):
            ended.add(engine)  # the run was stopped when only some ranks had written this step
        if engine in ended:
            continue
        rows = [(rank, load(path)) for rank, path in several]
        engines[engine].append(_step(step, rows))
        order[engine] = rows[0][1]["order"] or order.get(engine, [])
        # Parameters are the same on all ranks, because all of them build the same model.
        parameters[engine] = rows[0][1]["parameters"]
    # Renumber the engines without gaps, because a script may create optimizers that never step.
    return RecordedTraining(_dense(engines), _dense(order), _dense(parameters), _facts(ranks))


def _dense(by_engine: Mapping[int, T]) -> dict[int, T]:
    """Return `by_engine` with its keys replaced by 0, 1, 2, ... in ascending order."""
    return {number: by_engine[engine] for number, engine in enumerate(sorted(by_engine))}


def _facts(ranks: list[Path]) -> dict[str, Any]:
    """Return the ranks' facts. Lists are merged, and other values are taken from rank 0."""
    facts: dict[str, Any] = {}
    for rank in ranks:
        for path in sorted(rank.glob("*.json")):
            for name, value in json.loads(path.read_text()).items():
                if isinstance(value, list):
                    facts[name] = list(dict.fromkeys([*facts.get(name, []), *value]))
                else:
                    facts.setdefault(name, value)
    return facts


def _step(number: int, rows: list[tuple[int, dict[str, Any]]]) -> Step:
    first = rows[0][1]
    numbers: dict[str, float] = {}
    samples: list[int] = []
    for _, row in rows:
        # Merge scalars such as Adam's step, because ranks own different parameters.
        numbers |= row["numbers"]
        samples += row["samples"]
    fed = [row["fed"] for _, row in rows]
    # An engine's loss is the same on all ranks. In a Horovod script, each rank has its own loss,
    # and the script trains on their mean.
    losses = [row.get("loss", math.nan) for _, row in rows]
    return Step(
        number=number,
        loss=losses[0] if len(set(losses)) == 1 else math.fsum(losses) / len(losses),
        grad_norm=first.get("grad_norm", math.nan),
        weight=first.get("weight", math.nan),
        lr=tuple(first["lr"]),
        samples=tuple(sorted(samples)),
        fed=FeedRecord(
            sum(each["elements"] for each in fed),
            # Hashes are added modulo 2^64, so the sum does not depend on the division among ranks.
            sum(each["hashes"] for each in fed) % fingerprints.WORD,
            (
                math.fsum(each["sums"][0] for each in fed),
                math.fsum(each["sums"][1] for each in fed),
            ),
            sum(each["rows"] for each in fed),
        ),
        numbers=numbers,
        tensors=_wholes(rows),
        skipped=bool(first.get("skipped", False)),
    )


def _wholes(rows: list[tuple[int, dict[str, Any]]]) -> dict[Key, WholeTensor]:
    prints: dict[Key, dict[int, Fingerprint]] = defaultdict(dict)
    values: dict[Key, dict[int, list[tuple[int, Tensor]]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in rows:
        for tensor in row["tensors"]:
            # There is one record per shard. A fingerprint is a sum over elements, so adding the
            # fingerprints of a copy's shards gives the fingerprint of the full tensor.
            key, copy = (tensor["kind"], tensor["name"]), tensor["copy"]
            fingerprint = read_fingerprint(tensor)
            before = prints[key].get(copy)
            prints[key][copy] = fingerprint if before is None else before + fingerprint
            values[key][copy] += tensor["values"]
            ranks[key][copy].append(rank)
    return {
        key: WholeTensor(
            copies, _assemble(values[key][min(copies)], copies[min(copies)]), ranks[key]
        )
        for key, copies in prints.items()
    }


def _assemble(parts: list[tuple[int, Tensor]], fingerprint: Fingerprint) -> Tensor | None:
    """Return the values of a tensor, shape (numel,), or None if some of them were not recorded."""
    # Ranks record values only of small tensors, or of those that `Run.values` names.
    if sum(values.numel() for _, values in parts) != fingerprint.numel:
        return None
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    return torch.cat(ordered) if ordered else None
