"""Records the results of each training step, for `shardwise verify`.

Each rank writes one file per step, FOLDER/rank-R/engine-E-step-S.pt. It contains the loss, gradient
norm, weight, learning rates, this rank's samples and model inputs, and a fingerprint
(layout/fingerprints.py) of this rank's part of every tensor. If requested, it also contains the
values of these parts. Step 0 is the state before training; step S is the state after S steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
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
"""By default, all values are written if a rank's tensors have at most this many elements."""

WANTED = "wanted.json"
"""File in the folder that lists the tensors whose values are written: {"names": [...]}."""


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a tensor, starting at `offset`.

    If ranks hold several copies of the tensor, `copy` is the index of this copy. `kind` is model,
    buffer, optimizer, average or attribute.
    """

    kind: str
    name: str
    values: Tensor
    offset: int = 0
    copy: int = 0


@dataclass
class FeedTotals:
    """Totals of all inputs to an engine's models since the last step.

    They consist of the number of elements, the sums of the elements' hashes, values and squares,
    and the number of rows. None of these depends on how rows, or the tokens of a row, are divided
    among ranks.
    """

    elements: int = 0
    hashes: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rows: int = 0

    def add(self, nest: Any, recorded: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Add the tensors of a nested batch. For sparse tensors, only their rows are counted.

        Elements are counted only in tensors for which `recorded` returns True.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
        for value in filter(recorded, filter(fingerprints.can_be_taken, tensors)):
            value = value.detach()
            if value.is_complex():
                value = torch.view_as_real(value)
            if value.dtype in (torch.float16, torch.bfloat16, torch.float64):
                # Convert, because the hash must not depend on the precision of the model's inputs.
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
    """Writes the records of one rank. Raises ConfigError if `folder` is not writable."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / f"rank-{rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--record-tensors {folder} cannot be written: {error.strerror or error}. Name a "
                "folder that exists or can be created."
            ) from error
        wanted = folder / WANTED
        self._wanted: set[str] | None = None
        # `verify` writes this file for a second run, after comparing the fingerprints.
        if wanted.exists():
            self._wanted = set(json.loads(wanted.read_text())["names"])

    def write(
        self, engine: int, step: int, figures: Mapping[str, Any], parts: Iterable[Part]
    ) -> None:
        """Write the record of step number `step`: its `figures`, and this rank's tensor parts."""
        parts = list(parts)
        small = sum(part.values.numel() for part in parts) <= SMALL
        tensors: dict[tuple[str, str, int], dict[str, Any]] = {}
        for part in parts:
            key = part.kind, part.name, part.copy
            entry = tensors.setdefault(key, {"print": fingerprints.nothing(), "values": []})
            entry["print"] += fingerprints.of(part.values, part.offset)
            # Without a list, write all values of a small model, which saves `verify` a second run.
            if small if self._wanted is None else part.name in self._wanted:
                values = part.values.detach().reshape(-1).cpu().clone()
                entry["values"].append((part.offset, values))
        rows = [
            {"kind": kind, "name": name, "copy": copy, "values": entry["values"]}
            | vars(entry["print"])
            for (kind, name, copy), entry in tensors.items()
        ]
        path = self._folder / f"engine-{engine}-step-{step}.pt"
        # Write to a temporary name and rename, because `verify` counts a run's steps by these
        # files, and must see only complete ones.
        torch.save({**figures, "tensors": rows}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write facts that do not belong to a particular step to `name`.json."""
        text = json.dumps(facts)
        path = self._folder / f"{name}.json"
        path.with_suffix(".part").write_text(text)
        os.replace(path.with_suffix(".part"), path)


def read_fingerprint(row: Mapping[str, Any]) -> Fingerprint:
    """Rebuild the fingerprint from a tensor's row in a record file."""
    return Fingerprint(row["numel"], row["bits"], row["placed"], row["sketch"], row["largest"])
