"""Assigns a PipelineModule's layers to stages, by its partition_method. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.errors import UsageError
from shardwise.parallel.pipeline.partition import balanced_starts, with_trainable_stages


def starts_of(
    method: str, names: Sequence[str], sizes: Sequence[int], adds: Sequence[bool], stages: int
) -> list[int]:
    """Return the index of each stage's first layer. Every stage has at least one layer.

    Args:
        method: "uniform" gives each stage an equal number of layers. "parameters" and "type:REGEX"
            minimise the largest stage, measured in trained elements or in layers of matching types.
        names: The type name of each layer.
        sizes: Number of trained elements in each layer.
        adds: Whether each layer trains a parameter that no earlier layer has.
        stages: Number of stages.

    Raises:
        UsageError: If the method is unknown, the pattern matches nothing, or there are more stages
            than layers.
    """
    if len(names) < stages:
        raise UsageError(
            f"A PipelineModule of {len(names)} layer(s) cannot have {stages} stages: pass more "
            "layers, or fewer stages."
        )
    word = method.lower()
    if word == "uniform":
        least, more = divmod(len(names), stages)
        return [stage * least + min(stage, more) for stage in range(stages)]
    if word == "parameters":
        return with_trainable_stages(balanced_starts([float(size) for size in sizes], stages), adds)
    if word.startswith("type:"):
        return balanced_starts(_matches(method.partition(":")[2], names), stages)
    raise UsageError(
        f'partition_method={method!r} does not exist: write "parameters", "uniform" or '
        '"type:REGEX".'
    )


def _matches(pattern: str, names: Sequence[str]) -> list[float]:
    """Return 1 for each layer whose type matches `pattern`, ignoring case, else 0."""
    try:
        found = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in names]
    except re.error as error:
        raise UsageError(
            f"partition_method='type:{pattern}' is not a valid regular expression: {error}."
        ) from None
    if not any(found):
        raise UsageError(
            f"partition_method='type:{pattern}' matches no layer. The types of layers are "
            f"{', '.join(sorted(set(names)))}."
        )
    return found
