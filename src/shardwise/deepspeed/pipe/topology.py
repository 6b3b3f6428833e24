"""Implements rank coordinates along the axes pipe, data and model, under DeepSpeed's names.

Regardless of the order of these axes, ranks are numbered as in Shardwise: rank = (data x stages +
stage) x model + part. DeepSpeed numbers them differently, with data varying faster than stages.
Scripts that use these classes' methods do not notice the difference.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

import shardwise as sw
from shardwise.errors import UsageError

AXES = ("data", "pipe", "model")
"""The axes of a run, outermost first. Ranks on the last axis are consecutive."""


class ProcessTopology:
    """A grid of ranks with the axis names `axes` and the axis lengths `dims`.

    If all axes are in AXES, ranks are numbered in the order of AXES, otherwise in the order of
    `axes`.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        order = sorted(self.axes, key=AXES.index) if set(self.axes) <= set(AXES) else self.axes
        places: Any = product(*(range(self.get_dim(axis)) for axis in order))
        self.mapping = {
            self.ProcessCoord(**dict(zip(order, place, strict=True))): rank
            for rank, place in enumerate(places)
        }

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at `coordinates`, one coordinate for each axis."""
        if set(coordinates) != set(self.axes):
            raise UsageError(f"get_rank needs one number for each of {', '.join(self.axes)}.")
        return self.mapping[self.ProcessCoord(**coordinates)]

    def get_axis_names(self) -> list[str]:
        """Return the axis names, in the order of the constructor."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the length of `axis`, or 0 if the axis does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of `rank`, as a named tuple with the axis names."""
        return next(place for place, number in self.mapping.items() if number == rank)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A grid of `num_pp` stages and `num_dp` replicas."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["data", "pipe"], [num_dp, num_pp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A grid of `num_pp` stages and `num_dp` replicas. `num_mp` ranks split each layer."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["data", "pipe", "model"], [num_dp, num_pp, num_mp])


class PipelineParallelGrid:
    """This rank's position in the grid, under the names of Megatron's `mpu`."""

    def __init__(self, world: sw.World) -> None:
        self._world = world
        self.data_parallel_size = world.data_size
        self.data_parallel_id = world.data_rank
        self.pipe_parallel_size = world.pipeline_size
        self.model_parallel_size = world.tensor_size
        self.stage_id = world.pipeline_rank

    def get_stage_id(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return self._world.rank

    def get_data_parallel_id(self) -> int:
        """Return the index of this rank's replica."""
        return self.data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.data_parallel_size

    def get_model_parallel_rank(self) -> int:
        """Return the index of this rank's part in every split layer."""
        return self._world.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks across which each layer is split."""
        return self.model_parallel_size

    get_pipe_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
