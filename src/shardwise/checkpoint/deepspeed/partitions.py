"""Reads parameters and optimizer state that are split across the ranks' flat partitions."""

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
    """Consecutive elements `values` (1-D) of a tensor, starting at the tensor's element `first`."""

    first: int
    values: Tensor


class FragmentReader(TensorReader):
    """TensorReader that assembles tensors from fragments in memory."""

    def __init__(self) -> None:
        self._fragments: dict[str, list[Fragment]] = {}
        self.specs: dict[str, TensorSpec] = {}

    def add_whole(self, name: str, value: Tensor) -> None:
        """Add a complete tensor under `name`."""
        spec = TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
        self.specs[name] = spec
        self._fragments[name] = [Fragment(0, value.detach().contiguous().view(-1))]

    def add_cuts(
        self, name: str, shape: Sequence[int], cuts: Sequence[Cut], flats: Mapping[int, Tensor]
    ) -> None:
        """Add a tensor under `name`, assembled from the ranks' flat tensors.

        Raises BrokenCheckpoint if a flat tensor is too short or elements are missing.

        Args:
            shape: Shape of the tensor.
            cuts: The tensor's parts, with their positions in the flat tensors.
            flats: Flat tensors by rank.
        """
        found = []
        for cut in cuts:
            flat = flats[cut.rank].detach().view(-1)
            values = flat[cut.at : cut.at + cut.count]
            if values.numel() < cut.count:
                raise BrokenCheckpoint(
                    f"The part of {name} that rank {cut.rank} saved ends after {values.numel()} of "
                    f"{cut.count} elements. Either files of several saves are mixed, or the states "
                    "were on NVMe and are not in the files. Use another checkpoint."
                )
            found.append(Fragment(cut.first, values))
        # The cuts are computed from one rank's sizes, so if the files are from different saves, the
        # total is wrong.
        if sum(fragment.values.numel() for fragment in found) != prod(shape):
            raise BrokenCheckpoint(
                f"The ranks' parts of {name} do not add up to its {prod(shape)} elements. Use "
                "another checkpoint."
            )
        # The dtype is the same on all ranks, so use any of them.
        dtype = flats[min(flats)].dtype
        self.specs[name] = TensorSpec(name, dtype_name(dtype), tuple(shape))
        self._fragments[name] = found

    def add_from(self, name: str, other: FragmentReader, other_name: str) -> None:
        """Add a tensor from the reader `other` under the name `name`. Values are not copied."""
        spec = other.specs[other_name]
        self.specs[name] = TensorSpec(name, spec.dtype, spec.shape)
        self._fragments[name] = other._fragments[other_name]

    def read(self, name: str, first: int, into: Tensor) -> None:
        end = first + into.numel()
        for fragment in self._fragments[name]:
            low = max(first, fragment.first)
            high = min(end, fragment.first + fragment.values.numel())
            if low < high:
                values = fragment.values[low - fragment.first : high - fragment.first]
                # copy_ converts the dtype if `into` has a different one.
                into[low - first : high - first].copy_(values)


STAGE_3 = 3


@dataclass(frozen=True)
class Keys:
    """The keys under which a saved optimizer stores its fp32 partitions and its state_dict.

    `flats` is the key of the partitions, and `base` is the key of the state_dict.
    """

    flats: str
    base: str


KEYS_OF_STAGES = {
    # Stage 0 has these keys only with DeepSpeed's own fp16 optimizer.
    0: Keys("fp32_groups_flat", "optimizer_state_dict"),
    1: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    2: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    STAGE_3: Keys("fp32_flat_groups", "optimizer_state_dict"),
}


class Partitions:
    """The flat partitions in a save, from all ranks.

    Args:
        folder: Folder of the save, for error messages.
        stage: ZeRO stage of the save.
        saved: Contents of each rank's optimizer file.
        shapes: Parameter shapes in each flat group.
    """

    def __init__(
        self, folder: Path, stage: int, saved: Mapping[int, Mapping[str, Any]], shapes: list[Shapes]
    ) -> None:
        self._folder = folder
        self._saved = saved
        self._keys = KEYS_OF_STAGES[stage]
        self._is_cut_each = stage == STAGE_3
        self.shapes = shapes

    def flats(self, group: int) -> dict[int, Tensor]:
        """Return the fp32 partitions of a flat group, by rank.

        Raises BrokenCheckpoint if a rank's partition is missing.
        """
        return self._tensors(
            f"{self._keys.flats} of group {group}",
            lambda saved: saved[self._keys.flats][group],
        )

    def bases(self) -> dict[int, Mapping[str, Any]]:
        """Return the state_dict of each rank's optimizer, which updated that rank's partitions.

        Raises CheckpointError if the state has an unsupported form.
        """
        found = {rank: saved.get(self._keys.base) for rank, saved in self._saved.items()}
        if any(
            not isinstance(state, dict) or "param_groups" not in state for state in found.values()
        ):
            raise CheckpointError(
                f"{self._folder} has optimizer state in an unsupported form, for example from "
                "elastic_checkpoint. Load only the model: engine.load(path, model_only=True)."
            )
        return {rank: state for rank, state in found.items() if state is not None}

    def state(self, number: int, key: str) -> dict[int, Tensor]:
        """Return each rank's part of the optimizer state `key` of flat group `number`.

        Raises BrokenCheckpoint if it is missing for a rank.
        """
        return self._tensors(
            f"{key} of group {number}",
            lambda saved: saved[self._keys.base]["state"][number][key],
        )

    def _tensors(self, what: str, of: Any) -> dict[int, Tensor]:
        try:
            found = {rank: of(saved) for rank, saved in self._saved.items()}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BrokenCheckpoint(
                f"{self._folder} lacks {what} on some rank. Use another checkpoint."
            ) from error
        if not all(isinstance(value, Tensor) for value in found.values()):
            raise BrokenCheckpoint(
                f"{self._folder} has a value that is not a tensor as {what}. Use "
                "another checkpoint."
            )
        return found

    def add(
        self,
        to: FragmentReader,
        group: int,
        flats: Mapping[int, Tensor],
        names: Mapping[str, str],
    ) -> None:
        """Add the tensors of a group's parameters to the reader `to`.

        Args:
            flats: Flat tensors by rank, with the same layout as the group's partitions.
            names: Maps parameter names to names in the reader. Other parameters are skipped.
        """
        for name, cuts in self._cuts(group).items():
            if name in names:
                to.add_cuts(names[name], self.shapes[group][name], cuts, flats)

    def _cuts(self, group: int) -> dict[str, list[Cut]]:
        shapes, ranks = self.shapes[group], len(self._saved)
        if self._is_cut_each:
            return each_by_itself(shapes, ranks)
        # Every partition has as many elements as rank 0's partition plus rank 0's padding.
        first = self._saved[0]
        partition = self.flats(group)[0].numel()
        if "zero_stage" in first:  # only this optimizer saves its partitions without padding
            all_paddings = first.get("group_paddings")
            padding = (
                all_paddings[group]
                if isinstance(all_paddings, list) and group < len(all_paddings)
                else 0
            )
            partition += padding if isinstance(padding, int) else 0
        paddings = first.get("param_alignment_paddings")
        return end_to_end(shapes, partition, ranks, paddings[group] if paddings else None)


def stage_of(folder: Path, saved: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the ZeRO stage of the partitions in `saved`, or 0 if `saved` is empty.

    Raises CheckpointError if the stage is unknown.
    """
    if not saved:
        return 0
    value = saved[0].get("zero_stage", 1)  # not stored with bf16 and fp32 gradients
    stage = value.args[0] if isinstance(value, inert.Inert) and value.args else value
    if not isinstance(stage, int) or stage not in (1, 2, STAGE_3):
        raise CheckpointError(
            f"{folder} has ZeRO stage {stage!r:.20}, but only 0 to 3 can be loaded. It is damaged, "
            "or was saved by a later DeepSpeed. Use another checkpoint."
        )
    return stage


def check_count(folder: Path, saved: Mapping[int, Mapping[str, Any]], models: int | None) -> None:
    """Raise BrokenCheckpoint if the number of files differs from the number of ranks.

    Args:
        models: Number of model files at stage 3, or None at other stages.
    """
    counts = saved[0].get("partition_count", len(saved))
    # A list has one count per parameter group.
    wanted = max(counts) if isinstance(counts, Sequence) and counts else counts
    counts_by_kind = {"optim_states.pt": len(saved)} | (
        {"model_states.pt": models} if models else {}
    )
    for kind, count in counts_by_kind.items():
        if count != wanted:
            raise BrokenCheckpoint(
                f"{folder} was saved by {wanted} ranks but has {count} files *_{kind}. Restore "
                "missing files; if there are too many, remove files of other saves."
            )
