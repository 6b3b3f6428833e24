"""Reads tensors that are cut over the flat partitions of several ranks, and the state over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.flat_groups import Cut, Shapes, each_by_itself, end_to_end
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint, CheckpointError


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


STAGE_3 = 3


@dataclass(frozen=True)
class Keys:
    """Under which keys a kind of optimizer saves its fp32 partitions, and torch's state_dict."""

    flats: str
    base: str


KEYS_OF_STAGES = {
    0: Keys("fp32_groups_flat", "optimizer_state_dict"),
    1: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    2: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    STAGE_3: Keys("fp32_flat_groups", "optimizer_state_dict"),
}


class Partitions:
    """What the ranks of `folder` saved, by rank, of flat groups whose parameters have `shapes`."""

    def __init__(
        self, folder: Path, stage: int, saved: Mapping[int, Mapping[str, Any]], shapes: list[Shapes]
    ) -> None:
        self._folder = folder
        self._saved = saved
        self._keys = KEYS_OF_STAGES[stage]
        self._is_cut_each = stage == STAGE_3
        self.shapes = shapes

    def flats(self, group: int) -> dict[int, Tensor]:
        """The fp32 partitions of a flat group, by rank. Raises BrokenCheckpoint without them."""
        return self._tensors(
            f"{self._keys.flats} of group {group}",
            lambda saved: saved[self._keys.flats][group],
        )

    def bases(self) -> dict[int, Mapping[str, Any]]:
        """The state_dict of each rank's optimizer over its partitions."""
        found = {rank: saved.get(self._keys.base) for rank, saved in self._saved.items()}
        if any(not isinstance(each, dict) or "param_groups" not in each for each in found.values()):
            raise CheckpointError(
                f"{self._folder} has the optimizer's state in a form that is not read here, as of "
                "elastic_checkpoint. Load the model alone: engine.load(path, model_only=True)."
            )
        return {rank: each for rank, each in found.items() if each is not None}

    def state(self, number: int, key: str) -> dict[int, Tensor]:
        """Entry `key` of the optimizer's state of a flat group, by rank."""
        return self._tensors(
            f"{key} of group {number}",
            lambda saved: saved[self._keys.base]["state"][number][key],
        )

    def _tensors(self, what: str, of: Any) -> dict[int, Tensor]:
        try:
            found = {rank: of(saved) for rank, saved in self._saved.items()}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BrokenCheckpoint(
                f"{self._folder} has not on every rank {what}. Take another checkpoint."
            ) from error
        if not all(isinstance(each, Tensor) for each in found.values()):
            raise BrokenCheckpoint(
                f"{self._folder} has something else than tensors as {what}. Take another "
                "checkpoint."
            )
        return found

    def add(
        self,
        to: FragmentReader,
        group: int,
        flats: Mapping[int, Tensor],
        names: Mapping[str, str],
    ) -> None:
        """Add to a reader what flat tensors laid out like the group hold of its parameters, under
        `names`; without those that have none."""
        for name, cuts in self._cuts(group).items():
            if name in names:
                to.add_cuts(names[name], self.shapes[group][name], cuts, flats)

    def _cuts(self, group: int) -> dict[str, list[Cut]]:
        shapes, ranks = self.shapes[group], len(self._saved)
        if self._is_cut_each:
            return each_by_itself(shapes, ranks)
        first = self._saved[0]
        partition = self.flats(group)[0].numel()
        if "zero_stage" in first:  # the others save the padding too
            told = first.get("group_paddings")
            padding = told[group] if isinstance(told, list) and group < len(told) else 0
            partition += padding if isinstance(padding, int) else 0
        paddings = first.get("param_alignment_paddings")
        return end_to_end(shapes, partition, ranks, paddings[group] if paddings else None)


def stage_of(folder: Path, saved: Mapping[int, Mapping[str, Any]]) -> int:
    """The stage of ZeRO that `saved` partitions are of; 0 without any. Raises CheckpointError for
    one that is not known."""
    if not saved:
        return 0
    told = saved[0].get("zero_stage", 1)  # bf16 over fp32 gradients does not say one
    stage = told.args[0] if isinstance(told, inert.Inert) and told.args else told
    if not isinstance(stage, int) or stage not in (1, 2, STAGE_3):
        raise CheckpointError(
            f"{folder} is of ZeRO stage {stage!r:.20}, and 0 to 3 are read: it is damaged, or of a "
            "later DeepSpeed."
        )
    return stage


def check_count(folder: Path, saved: Mapping[int, Mapping[str, Any]], models: int | None) -> None:
    """Raise BrokenCheckpoint where there are not as many files as ranks that saved; `models` counts
    those of stage 3 with the model."""
    told = saved[0].get("partition_count", len(saved))
    wanted = max(told) if isinstance(told, Sequence) and told else told
    there = {"optim_states.pt": len(saved)} | ({"model_states.pt": models} if models else {})
    for kind, count in there.items():
        if count != wanted:
            raise BrokenCheckpoint(
                f"{folder} was saved by {wanted} ranks, and {count} files *_{kind} are there. "
                "Bring the others back; where there are too many, some are of another save."
            )
