"""What each step of a training computed, for `shardwise verify`: off unless it is asked for.

Each rank writes a file per step, FOLDER/rank-R/engine-E-step-S.pt: loss, gradient norm, weight,
learning rates, which samples it was given, what its models were fed, and of every tensor that it
holds a part of a fingerprint (fingerprints.py), with the values themselves where they are asked
for. Step 0 is what is there before the first step; step S is what step number S-1 left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import ConfigError
from shardwise.layout import fingerprints
from shardwise.layout.fingerprints import Fingerprint

SMALL = 1 << 16
"""Elements of a rank's tensors up to which all values are written where nothing else is said."""

WANTED = "wanted.json"
"""A file in the folder that says of which tensors values are wanted: {"names": [...]}."""


@dataclass(frozen=True)
class Part:
    """Some elements of a tensor, those from `offset` on; of `copies` of the tensor that the ranks
    have, this is of number `copy`. `kind` is model, buffer, optimizer, average or attribute."""

    kind: str
    name: str
    values: Tensor
    offset: int = 0
    copy: int = 0


@dataclass
class Fed:
    """What the models of an engine were fed since the last step, alike however rows are cut: how
    many elements, the sum of hashes of all of them, their sum and the sum of their squares."""

    elements: int = 0
    hashes: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rows: int = 0

    def add(self, nest: Any) -> None:
        """Count the tensors of a batch, in any nest; of sparse ones the rows alone."""
        tensors = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
        for value in filter(fingerprints.can_be_taken, tensors):
            value = value.detach()
            if value.is_complex():
                value = torch.view_as_real(value)
            if value.dtype in (torch.float16, torch.bfloat16, torch.float64):
                # Hashes are of what the data says, in whatever precision the model takes it.
                hashed = value.float()
            else:
                hashed = value
            numbers = value.double()
            self.elements += value.numel()
            self.hashes = (self.hashes + fingerprints.unordered(hashed)) % fingerprints.WORD
            self.sums[0] += float(numbers.sum())
            self.sums[1] += float(numbers.square().sum())
        self.rows += next((len(value) for value in tensors if value.ndim), 0)


class TensorLog:
    """The writer of one rank. Raises ConfigError where `folder` cannot be written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / f"rank-{rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--record-tensors {folder} cannot be written: {error.strerror or error}. Name a "
                "folder, which is made where there is none."
            ) from error
        wanted = folder / WANTED
        self._wanted: set[str] | None = None
        if wanted.exists():
            self._wanted = set(json.loads(wanted.read_text())["names"])

    def write(
        self, engine: int, step: int, figures: Mapping[str, Any], parts: Iterable[Part]
    ) -> None:
        """Write step number `step` of an engine: its `figures`, and what this rank has of all
        tensors."""
        parts = list(parts)
        small = sum(part.values.numel() for part in parts) <= SMALL
        tensors: dict[tuple[str, str, int], dict[str, Any]] = {}
        for part in parts:
            key = part.kind, part.name, part.copy
            entry = tensors.setdefault(key, {"print": fingerprints.nothing(), "values": []})
            entry["print"] += fingerprints.of(part.values, part.offset)
            if small if self._wanted is None else part.name in self._wanted:
                values = part.values.detach().reshape(-1).cpu().clone()
                entry["values"].append((part.offset, values))
        rows = [
            {"kind": kind, "name": name, "copy": copy, "values": entry["values"]}
            | _spelled(entry["print"])
            for (kind, name, copy), entry in tensors.items()
        ]
        _save(self._folder / f"engine-{engine}-step-{step}.pt", {**figures, "tensors": rows})

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write facts that are not of a step, as JSON, under a `name` of their own."""
        text = json.dumps(facts)
        path = self._folder / f"{name}.json"
        path.with_suffix(".part").write_text(text)
        os.replace(path.with_suffix(".part"), path)


def _save(path: Path, row: Mapping[str, Any]) -> None:
    """Write aside, then rename: who counts the steps of a run sees whole files only."""
    aside = path.with_suffix(".part")
    torch.save(row, aside)
    os.replace(aside, path)


def _spelled(found: Fingerprint) -> dict[str, Any]:
    return {
        "numel": found.numel,
        "bits": found.bits,
        "placed": found.placed,
        "sketch": found.sketch,
        "largest": found.largest,
    }


def read_fingerprint(row: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint that stands in a row of a file."""
    return Fingerprint(row["numel"], row["bits"], row["placed"], row["sketch"], row["largest"])
