"""Splits an observed model as the first of several tensor-parallel ranks has it.

The engine's own rules say what is split, and try it, as in a real run. The other ranks are not
there: what is asked of their group has shapes only, which is all that an observation needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.comm import Solo
from shardwise.engine import tensor_parallel
from shardwise.engine.engine_spec import EngineSpec
from shardwise.parallel.tensor.split_model import TensorParallelModels


class AbsentRanks(Solo):
    """A group of `size` ranks of which only the first is there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def split_first_part(spec: EngineSpec, plan: Mapping[str, Any] | None, parts: int) -> EngineSpec:
    """`spec` with its models reduced to the first of `parts` parts.

    Raises ModelError where nothing can be split, ConfigError for settings that exclude it.
    """
    made = TensorParallelModels(
        AbsentRanks(parts), spec.device, sequence_parallel=spec.settings.sequence_parallel
    )
    tensor_parallel.find_and_split(spec, made, plan)
    return replace(spec, tensor=made)
