"""Compares two checkpoints, which may have different formats, and computes tensor fingerprints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import TensorSpec, dtype_name, dtype_of
from shardwise.checkpoint.formats.importing import CHUNK, chunks
from shardwise.checkpoint.formats.optimizers import named_by_order
from shardwise.checkpoint.formats.saved import Checkpoint, Leaf, MemoryReader
from shardwise.checkpoint.reader import TensorReader


@dataclass(frozen=True)
class Difference:
    """Comparison of one tensor in two checkpoints.

    Args:
        name: Name of the tensor.
        first: Its spec in the first checkpoint, or None if it is missing there.
        second: Its spec in the second checkpoint, or None if it is missing there.
        changed: Number of elements with different bits, after conversion to a common dtype.
        relative: Largest difference divided by the largest absolute value. NaN if an element is NaN
            in only one of the checkpoints.
    """

    name: str
    first: TensorSpec | None
    second: TensorSpec | None
    changed: int = 0
    relative: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether shape, dtype and bits are the same in both checkpoints."""
        one, other = self.first, self.second
        if one is None or other is None or self.changed:
            return False
        return (one.shape, one.dtype) == (other.shape, other.dtype)


def tensors_of(
    checkpoint: Checkpoint, *, model_only: bool = False, all_names: bool = False
) -> dict[str, Leaf]:
    """Return the model's tensors by name, and the optimizer state as `optimizer: NAME.KEY`.

    Args:
        model_only: Leave out the optimizers.
        all_names: Include a tied weight under all its names, and not only under the first one.
    """
    model, aliases = checkpoint.model, checkpoint.aliases
    found = {name: Leaf(model, name) for name in model.specs if all_names or name not in aliases}
    if all_names:
        found |= {alias: Leaf(model, first) for alias, first in aliases.items()}
    scalars = MemoryReader()
    for optimizer in () if model_only else checkpoint.optimizers:
        # Positions become names if the order of the tensors determines them.
        for key, entry in (named_by_order(checkpoint, optimizer) or optimizer).state.items():
            for kind, value in entry.items():
                name = f"optimizer: {key}.{kind}"
                if isinstance(value, int | float):
                    value = torch.tensor(float(value))
                if isinstance(value, Tensor):
                    value = scalars.add(name, value)
                if isinstance(value, Leaf):
                    found[name] = value
    return found


def compare(first: Mapping[str, Leaf], second: Mapping[str, Leaf]) -> Iterator[Difference]:
    """Yield one Difference per tensor, in the order of `first`. Tensors are read in chunks."""
    for name in [*first, *(name for name in second if name not in first)]:
        one, other = first.get(name), second.get(name)
        if one is None or other is None or one.shape != other.shape:
            spec, spec_there = (None if leaf is None else leaf.spec for leaf in (one, other))
            yield Difference(name, spec, spec_there)
            continue
        yield _compare_values(name, one, other)


def _compare_values(name: str, one: Leaf, other: Leaf) -> Difference:
    dtypes = [dtype_of(leaf.spec.dtype) for leaf in (one, other)]
    # Two dtypes are compared in the one that holds both exactly, for example bf16 in fp32.
    common = dtypes[0] if dtypes[0] == dtypes[1] else torch.promote_types(*dtypes)
    changed, largest, has_nan = 0, 0.0, False
    for begin in range(0, one.spec.numel, CHUNK):
        values = []
        for leaf, dtype in zip((one, other), dtypes, strict=True):
            value = torch.empty(min(CHUNK, one.spec.numel - begin), dtype=dtype)
            leaf.reader.read(leaf.name, begin, value)
            values.append(value.to(common))
        bits = [value.view(torch.uint8).view(value.numel(), -1) for value in values]
        differs = (bits[0] != bits[1]).any(1)
        count = int(differs.sum())
        if not count:
            continue
        changed += count
        wide = [_widened(value[differs]) for value in values]
        gap = (wide[0] - wide[1]).abs()
        # Equal infinities and two NaNs are no difference in value.
        gap[wide[0] == wide[1]] = 0
        gap[wide[0].isnan() & wide[1].isnan()] = 0
        has_nan |= bool(gap.isnan().any())
        largest = max(largest, float(gap.nan_to_num(nan=0.0).max()))
    scale = max(_largest(one), _largest(other)) if changed else 0.0
    relative = math.nan if has_nan else largest / scale if scale else largest
    return Difference(name, one.spec, other.spec, changed, relative)


def _widened(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(leaf: Leaf) -> float:
    """Return the largest finite absolute value of a tensor."""
    largest = 0.0
    for _, value in chunks(leaf.reader, leaf.spec):
        size = _widened(value).abs()
        finite = size[size.isfinite()]
        largest = max(largest, float(finite.max())) if finite.numel() else largest
    return largest


# -- fingerprints ------------------------------------------------------------------------------


def fingerprint(value: Tensor) -> str:
    """Return the fingerprint of a tensor: dtype, shape and the CRC-32 of its bytes in row order.

    Args:
        value: A dense tensor on any device.

    Example::

        fingerprint(torch.zeros(2))     # "F32:2:6522df69"
    """
    near = value.detach().contiguous().view(-1).cpu()
    crc = zlib.crc32(near.view(torch.uint8).numpy().data) if near.numel() else 0
    spec = TensorSpec("", dtype_name(value.dtype), tuple(value.shape))
    return format_fingerprint(spec, f"{crc:08x}")


def format_fingerprint(spec: TensorSpec, crc: str) -> str:
    """Return the fingerprint of a tensor whose checksum is `crc`."""
    return f"{spec.dtype}:{'x'.join(map(str, spec.shape))}:{crc}"


def fingerprints(model: nn.Module | Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of each tensor of a model or state_dict, by name.

    Two models with the same fingerprints are bit-identical. A server can use this function to check
    that its model has the bits that the trainer published.

    Args:
        model: A module, or tensors by name. Values that are not tensors are skipped.

    Example::

        assert fingerprints(served) == json.loads(Path("weights/fingerprints.json").read_text())
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: fingerprint(v) for name, v in state.items() if isinstance(v, Tensor)}


def fingerprints_of(tensors: TensorReader, names: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprint of each tensor in a file, by name.

    Args:
        tensors: Reader of the file.
        names: Maps further names of tied weights to names in `tensors`.
    """
    found = {
        name: format_fingerprint(spec, tensors.checksum(name))
        for name, spec in tensors.specs.items()
    }
    return found | {alias: found[first] for alias, first in names.items() if first in found}
