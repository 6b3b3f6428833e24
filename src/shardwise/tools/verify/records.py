"""Reads the records that ranks wrote (tensor_log.py), and assembles whole tensors."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
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
    """A tensor assembled from all ranks.

    `copies` maps the number of a copy to its fingerprint, `ranks` to the ranks that hold it.
    `values` are the flat values of the first copy, shape (numel,), if they were recorded.
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
        """The ranks whose copy differs from the first one."""
        return [
            rank
            for copy, fingerprint in self.copies.items()
            if not fingerprint.same_bits(self.fingerprint)
            for rank in self.ranks[copy]
        ]


@dataclass(frozen=True)
class FeedRecord:
    """Sums over everything the models were fed in a step (see `tensor_log.FeedTotals`)."""

    elements: int
    hashes: int
    sums: tuple[float, float]
    rows: int


@dataclass(frozen=True)
class Step:
    """A step of one engine. Number 0 is the state before the first step."""

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
    """Whether the engine skipped the update; False if nothing reports it."""


@dataclass(frozen=True)
class RecordedTraining:
    """The record of a run, by engine.

    `order` lists modules in the order of their first forward, `parameters` the names and shapes by
    parameter group, and `facts` the notes of the ranks about the script.
    """

    engines: Mapping[int, list[Step]]
    order: Mapping[int, list[str]] = field(default_factory=dict)
    parameters: Mapping[int, list[list[tuple[str, tuple[int, ...]]]]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def driver(self) -> str:
        """What trained: "engine", "horovod", "plain", or "" if nothing did."""
        return str(self.facts.get("driver", ""))

    @property
    def steps(self) -> int:
        """The number of steps of the first engine."""
        return len(self.engines[min(self.engines)]) - 1 if self.engines else 0


def count_steps(folder: Path) -> int:
    """Return how many steps rank 0 has recorded so far."""
    files = list((folder / "rank-0").glob("engine-0-step-*.pt"))
    return max(len(files) - 1, 0)


def read(folder: Path) -> RecordedTraining:
    """Read everything that was recorded in `folder`."""
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
            ended.add(engine)  # the run ended after some ranks wrote this step, before others did
        if engine in ended:
            continue
        rows = [(rank, torch.load(path, weights_only=True)) for rank, path in several]
        engines[engine].append(_step(step, rows))
        order[engine] = rows[0][1]["order"] or order.get(engine, [])
        # Equal on all ranks, which all build the same model.
        parameters[engine] = rows[0][1]["parameters"]
    # Number engines by those that made a step: a script may make optimizers that never step.
    return RecordedTraining(_dense(engines), _dense(order), _dense(parameters), _facts(ranks))


def _dense(by_engine: Mapping[int, T]) -> dict[int, T]:
    """Return `by_engine` with its keys replaced by 0, 1, 2, ... in order."""
    return {number: by_engine[engine] for number, engine in enumerate(sorted(by_engine))}


def _facts(ranks: list[Path]) -> dict[str, Any]:
    """Return the notes of all ranks. Lists are merged; other values are taken from rank 0."""
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
        # Scalars such as Adam's step, by parameter: ranks own different parameters.
        numbers |= row["numbers"]
        samples += row["samples"]
    fed = [row["fed"] for _, row in rows]
    # The loss of an engine is the same on all ranks. In a Horovod script each rank has its own, and
    # the script trains on their mean.
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
            # Hashes add up modulo 2^64, whatever rows each rank was fed.
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
            # One record per shard. A fingerprint is a sum over elements, so the shards of a copy
            # add up to the fingerprint of the whole tensor.
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
    """Return the values of a tensor, shape (numel,), or None if some were not recorded."""
    # Only small tensors are recorded with values, unless `values` of the run names them.
    if sum(values.numel() for _, values in parts) != fingerprint.numel:
        return None
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    return torch.cat(ordered) if ordered else None
