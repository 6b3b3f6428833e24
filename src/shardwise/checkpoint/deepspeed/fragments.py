"""Reads tensors that are whole in a file, or cut over several flat ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from shardwise.checkpoint.deepspeed.flat_groups import Cut
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint


@dataclass(frozen=True)
class Fragment:
    """The elements of a tensor from `first` on, which are `values` (flat)."""

    first: int
    values: Tensor


class FragmentReader(TensorReader):
    """Tensors by name, each put together from its fragments while it is read."""

    def __init__(self) -> None:
        self._fragments: dict[str, list[Fragment]] = {}
        self.specs: dict[str, TensorSpec] = {}

    def add_whole(self, name: str, value: Tensor) -> None:
        """Have all of tensor `name`."""
        spec = TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
        self.specs[name] = spec
        self._fragments[name] = [Fragment(0, value.detach().contiguous().view(-1))]

    def add_cuts(
        self, name: str, shape: Sequence[int], cuts: Sequence[Cut], flats: Mapping[int, Tensor]
    ) -> None:
        """Have tensor `name` of `shape`, whose `cuts` lie in the flat tensors of ranks.

        Raises BrokenCheckpoint where these end before, or some elements are in none.
        """
        found = []
        for cut in cuts:
            flat = flats[cut.rank].detach().view(-1)
            values = flat[cut.at : cut.at + cut.count]
            if values.numel() < cut.count:
                raise BrokenCheckpoint(
                    f"The part of {name} that rank {cut.rank} saved ends after {values.numel()} of "
                    f"{cut.count} elements: files of several saves are mixed, or states that were "
                    "on NVMe are not in them. Take another checkpoint."
                )
            found.append(Fragment(cut.first, values))
        if sum(each.values.numel() for each in found) != prod(shape):
            raise BrokenCheckpoint(
                f"The ranks' parts of {name} are not all of its {prod(shape)} elements. Take "
                "another checkpoint."
            )
        dtype = flats[min(flats)].dtype
        self.specs[name] = TensorSpec(name, dtype_name(dtype), tuple(shape))
        self._fragments[name] = found

    def add_from(self, name: str, other: FragmentReader, theirs: str) -> None:
        """Have under `name` what is `theirs` in another."""
        spec = other.specs[theirs]
        self.specs[name] = TensorSpec(name, spec.dtype, spec.shape)
        self._fragments[name] = other._fragments[theirs]

    def read(self, name: str, first: int, into: Tensor) -> None:
        end = first + into.numel()
        for fragment in self._fragments[name]:
            low = max(first, fragment.first)
            high = min(end, fragment.first + fragment.values.numel())
            if low < high:
                values = fragment.values[low - fragment.first : high - fragment.first]
                into[low - first : high - first].copy_(values)
