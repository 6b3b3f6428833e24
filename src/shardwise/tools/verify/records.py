"""What the ranks of a run recorded (tensor_log.py), put together into whole tensors."""

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
"""Kind and name of a tensor."""


@dataclass(frozen=True)
class Whole:
    """A tensor as all ranks together have it: `copies` by number, `values` flat where they were
    recorded, `ranks` by copy those that have it."""

    copies: Mapping[int, Fingerprint]
    values: Tensor | None
    ranks: Mapping[int, list[int]]

    @property
    def print(self) -> Fingerprint:
        """Of the first copy."""
        return self.copies[min(self.copies)]

    @property
    def strays(self) -> list[int]:
        """The ranks whose copy is not that of the first."""
        return [
            rank
            for copy, found in self.copies.items()
            if not found.same_bits(self.print)
            for rank in self.ranks[copy]
        ]


@dataclass(frozen=True)
class Fed:
    """What all models were fed in a step: see tensor_log.Fed."""

    elements: int
    hashes: int
    sums: tuple[float, float]
    rows: int


@dataclass(frozen=True)
class Step:
    """A step of one engine; `number` is 0 for what was there before the first."""

    number: int
    loss: float
    grad_norm: float
    weight: float
    lr: tuple[float, ...]
    samples: tuple[int, ...]
    fed: Fed
    numbers: Mapping[str, float]
    tensors: Mapping[Key, Whole]
    skipped: bool = False
    """Whether nothing was updated, where an engine says so."""


@dataclass(frozen=True)
class Training:
    """A run: its steps by engine, the modules in the order of their first forward, and what its
    ranks noted (`driver`: engine, horovod or plain; `facts` of rank 0)."""

    engines: Mapping[int, list[Step]]
    order: Mapping[int, list[str]] = field(default_factory=dict)
    parameters: Mapping[int, list[list[tuple[str, tuple[int, ...]]]]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def driver(self) -> str:
        """What trained: engine, horovod, plain, or "" where nothing did."""
        return str(self.facts.get("driver", ""))

    @property
    def steps(self) -> int:
        """How many the first engine made."""
        return len(self.engines[min(self.engines)]) - 1 if self.engines else 0


def steps_made(folder: Path) -> int:
    """How many steps rank 0 has recorded by now."""
    found = list((folder / "rank-0").glob("engine-0-step-*.pt"))
    return max(len(found) - 1, 0)


def read(folder: Path) -> Training:
    """Everything that was recorded in `folder`."""
    ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
    files: dict[tuple[int, int], list[tuple[int, Path]]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        for path in rank.glob("engine-*-step-*.pt"):
            _, of, _, made = path.stem.split("-")
            files[int(of), int(made)].append((number, path))
    engines: dict[int, list[Step]] = defaultdict(list)
    order: dict[int, list[str]] = {}
    parameters: dict[int, Any] = {}
    ended: set[int] = set()
    for (engine, step), several in sorted(files.items()):
        if len(several) < len(ranks):
            ended.add(engine)  # the run ended between the ranks' writes
        if engine in ended:
            continue
        rows = [(rank, torch.load(path, weights_only=True)) for rank, path in several]
        engines[engine].append(_step(step, rows))
        order[engine] = rows[0][1]["order"] or order.get(engine, [])
        parameters[engine] = rows[0][1]["parameters"]
    # An original may have made optimizers that never step: those that do are counted.
    return Training(_dense(engines), _dense(order), _dense(parameters), _facts(ranks))


def _dense(found: Mapping[int, T]) -> dict[int, T]:
    """The same, numbered from 0."""
    return {number: found[engine] for number, engine in enumerate(sorted(found))}


def _facts(ranks: list[Path]) -> dict[str, Any]:
    """What the ranks noted, lists put together."""
    found: dict[str, Any] = {}
    for rank in ranks:
        for path in sorted(rank.glob("*.json")):
            for name, value in json.loads(path.read_text()).items():
                if isinstance(value, list):
                    found[name] = list(dict.fromkeys([*found.get(name, []), *value]))
                else:
                    found.setdefault(name, value)
    return found


def _step(number: int, rows: list[tuple[int, dict[str, Any]]]) -> Step:
    first = rows[0][1]
    numbers: dict[str, float] = {}
    samples: list[int] = []
    for _, row in rows:
        numbers |= row["numbers"]
        samples += row["samples"]
    fed = [row["fed"] for _, row in rows]
    # What an engine says is alike on all ranks; a Horovod script's loss is each rank's own.
    losses = [row.get("loss", math.nan) for _, row in rows]
    return Step(
        number=number,
        loss=losses[0] if len(set(losses)) == 1 else math.fsum(losses) / len(losses),
        grad_norm=first.get("grad_norm", math.nan),
        weight=first.get("weight", math.nan),
        lr=tuple(first["lr"]),
        samples=tuple(sorted(samples)),
        fed=Fed(
            sum(each["elements"] for each in fed),
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


def _wholes(rows: list[tuple[int, dict[str, Any]]]) -> dict[Key, Whole]:
    prints: dict[Key, dict[int, Fingerprint]] = defaultdict(dict)
    values: dict[Key, dict[int, list[tuple[int, Tensor]]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in rows:
        for tensor in row["tensors"]:
            key, copy = (tensor["kind"], tensor["name"]), tensor["copy"]
            found = read_fingerprint(tensor)
            before = prints[key].get(copy)
            prints[key][copy] = found if before is None else before + found
            values[key][copy] += tensor["values"]
            ranks[key][copy].append(rank)
    return {
        key: Whole(copies, _assembled(values[key][min(copies)], copies[min(copies)]), ranks[key])
        for key, copies in prints.items()
    }


def _assembled(parts: list[tuple[int, Tensor]], known: Fingerprint) -> Tensor | None:
    """The values of a tensor, flat; None where not all were recorded."""
    if sum(values.numel() for _, values in parts) != known.numel:
        return None
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    return torch.cat(ordered) if ordered else None
