"""Which layers each stage of a PipelineModule has, by its partition_method. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.errors import UsageError
from shardwise.parallel.pipeline.partition import balanced_starts, with_trainable_stages


def starts_of(
    method: str, names: Sequence[str], sizes: Sequence[int], adds: Sequence[bool], stages: int
) -> list[int]:
    """Return the first layer of each of `stages` stages. A stage has at least one layer.

    Args:
        method: "uniform" (the same number of layers), "parameters" or "type:REGEX" (the smallest
            largest stage, by trained elements or by layers of matching types)
        names: the layers' types
        sizes: the layers' numbers of trained elements
        adds: whether a layer trains something that no earlier layer has

    Raises:
        UsageError: for another method, a pattern without a match, more stages than layers
    """
    if len(names) < stages:
        raise UsageError(
            f"A PipelineModule of {len(names)} layer(s) for {stages} stages: give it more layers, "
            "or fewer stages."
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
        f'partition_method={method!r} is not there: write "parameters", "uniform" or "type:REGEX".'
    )


def _matches(pattern: str, names: Sequence[str]) -> list[float]:
    """Return 1 for each layer whose type matches `pattern`, ignoring case, else 0."""
    try:
        found = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in names]
    except re.error as error:
        raise UsageError(f"partition_method='type:{pattern}' is no pattern: {error}.") from None
    if not any(found):
        raise UsageError(
            f"partition_method='type:{pattern}' matches no layer: there are "
            f"{', '.join(sorted(set(names)))}."
        )
    return found
