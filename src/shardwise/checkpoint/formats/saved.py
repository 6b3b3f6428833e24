"""Defines the interface that all formats share: a checkpoint whose tensors are read on demand."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint, CheckpointError

Names = Mapping[str, Sequence[str]]
"""All names of each of a model's tensors, keyed by the first one."""

Groups = Sequence[Sequence[Sequence[str]]]
"""For each optimizer and parameter group, the first names of its parameters."""

SetsAndFields = tuple[dict[str, TensorReader], dict[str, Any]]
"""Tensor sets by name, and the fields that checkpoint.json would have."""


@dataclass(frozen=True)
class Leaf:
    """A checkpoint's tensor, named `name` in `reader`. Its values are read on demand."""

    reader: TensorReader
    name: str

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the tensor, and its name in the reader."""
        return self.reader.specs[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def value(self) -> Tensor:
        """Read and return the full tensor."""
        return self.reader.whole(self.name)


class MappedReader(TensorReader):
    """Reads tensors from other readers under new names.

    Args:
        leaves: The tensors, by their new names.
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self.leaves = dict(leaves)
        self.specs = {
            name: TensorSpec(name, leaf.spec.dtype, leaf.spec.shape)
            for name, leaf in self.leaves.items()
        }

    def read(self, name: str, first: int, into: Tensor) -> None:
        leaf = self.leaves[name]
        leaf.reader.read(leaf.name, first, into)


class LastValue:
    """Caches the last tensor that readers computed, because a tensor is read in several parts."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Tensor] | None = None

    def get(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """Return the cached tensor if `key` is the last key, otherwise compute and cache it."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # free the last tensor before the next is computed
            self._kept = key, compute()
        return self._kept[1]


class MemoryReader(TensorReader):
    """Reads tensors that are in memory or memory-mapped."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.specs: dict[str, TensorSpec] = {}

    def add(self, name: str, value: Tensor) -> Leaf:
        """Add a dense CPU tensor.

        Raises CheckpointError if the dtype is not supported.
        """
        self.specs[name] = TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
        self._tensors[name] = value.detach()
        return Leaf(self, name)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor itself, without a copy."""
        return self._tensors[name]

    def read(self, name: str, first: int, into: Tensor) -> None:
        value = self._tensors[name]
        # A view of a contiguous tensor reads only the requested elements from a mapped file.
        into.copy_(value.contiguous().view(-1)[first : first + into.numel()])


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group.

    Args:
        keys: The group's parameters: names, or positions (int) if the source stores no names.
        options: Learning rate and other options.
    """

    keys: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """One optimizer of a checkpoint.

    Args:
        groups: The optimizer's parameter groups.
        state: State entries (Leaf objects or plain values) by parameter key and entry name.
        kind: Class of the optimizer, or "" if the source does not store it.
    """

    groups: list[OptimizerGroup]
    state: dict[Any, dict[str, Any]]
    kind: str = ""

    @property
    def is_by_position(self) -> bool:
        """Whether the source identifies parameters by position."""
        return any(not isinstance(key, str) for group in self.groups for key in group.keys)


@dataclass
class Checkpoint:
    """An open checkpoint of any format. Also a context manager that closes the files.

    Args:
        format: Name of the format, for users.
        path: The file or folder.
        model: The model's tensors.
        optimizers: The optimizers, in order. Empty if the source has none.
        step: Number of updates, or None if the source does not store it.
        schedulers: States of learning-rate schedulers, by name.
        scale: Loss scale and the number of steps since it last changed, or None.
        seed: The seed of the run, or None.
        aliases: Maps further names of tied weights to names in `model`.
        averages: Other sets of weights in the source, such as moving averages, by name.
        facts: Further information that the source contains about itself, for display.
        notes: Sentences about contents that the source lacks or that are not read.
        config: Small files of the model, such as config.json, by name.
        damages: Checks a rank's share of the files, and yields one sentence per damaged item.
            Called with the index of the rank and the number of ranks.
        resolve: Returns the tensor sets and the fields of checkpoint.json for a model. Default:
            `optimizers.fields_for`.
        has_checksums: False if the format has no checksums, so that `damages` finds nothing.
    """

    format: str
    path: Path
    model: TensorReader
    optimizers: list[SavedOptimizer] = field(default_factory=list)
    step: int | None = None
    schedulers: dict[str, Any] = field(default_factory=dict)
    scale: tuple[float, int] | None = None
    seed: int | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    averages: dict[str, TensorReader] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, bytes] = field(default_factory=dict)
    damages: Callable[[int, int], Iterator[str]] = lambda rank, size: iter(())
    resolve: Callable[[Names, Groups], SetsAndFields] | None = None
    has_checksums: bool = True
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Idempotent."""
        self.stack.close()

    def use(self, average: str) -> None:
        """Use the averaged weights `average` as the model. Raises KeyError if they do not exist."""
        self.model = self.averages[average]
        # The names of tied weights are those of the model that was replaced.
        self.aliases = {a: f for a, f in self.aliases.items() if f in self.model.specs}


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Context manager that converts errors from unexpected file contents to BrokenCheckpoint.

    Such errors are TypeError, KeyError and the like. Even if a file is not damaged, reading it can
    raise them because a value is missing or has an unexpected type.

    Args:
        what: Name of the format, for the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise _unlike(path, what, error) from error
    except (RuntimeError, MemoryError, OSError, EOFError, AssertionError) as error:
        raise _unlike(path, what, error) from error
    except (pickle.PickleError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise _unlike(path, what, error) from error


def _unlike(path: Path, what: str, error: BaseException) -> BrokenCheckpoint:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return BrokenCheckpoint(
        f"{path} is damaged or incomplete: it is not what {what} writes ({reason}). Use another "
        "checkpoint, or a fresh copy of this one."
    )


def as_number(value: Any) -> Any:
    """Return a 0-dim tensor or Leaf as a Python number, and any other value unchanged."""
    if isinstance(value, Leaf) and not value.shape:
        value = value.value()
    return value.item() if isinstance(value, torch.Tensor) and not value.ndim else value
