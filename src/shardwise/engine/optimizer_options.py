"""The options of the user's optimizers, which must be alike on all ranks at every step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, optim

from shardwise.collectives import Collectives
from shardwise.errors import ModelMismatch
from shardwise.states.optimizer_kind import settings_of

_PLAIN = (bool, int, float, str, complex, type(None))


class Options:
    """Tells whether the parameter groups of `optimizers` have the same options on all ranks.

    What is not a number, a string, a sequence of such or a tensor on the CPU is left out.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._values: list[Any] = []
        self._number = 0.0

    def number(self) -> float:
        """A checksum, in microseconds: made anew when a value has changed."""
        values = [value for _, value in self._named()]
        if values != self._values:
            self._values, self._number = values, float(zlib.crc32(repr(values).encode()))
        return self._number

    def difference(self, group: Collectives) -> ModelMismatch:
        """The error for ranks whose checksums differ. Collective."""
        told: list[list[tuple[str, Any]]] = group.gather_objects(list(self._named()))
        for rank, named in enumerate(told):
            for (name, here), (_, there) in zip(told[0], named, strict=False):
                if repr(here) != repr(there):
                    return ModelMismatch(
                        f"{name} is {here!r} on rank 0 and {there!r} on rank {rank}, so ranks "
                        "would train different models. Nothing was updated. Set it alike on all "
                        "ranks; give a scheduler what all know, such as engine.step().loss."
                    )
        lengths = [len(named) for named in told]
        return ModelMismatch(f"Optimizers have different options on each rank: {lengths} of them.")

    def _named(self) -> Iterator[tuple[str, Any]]:
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in sorted(settings_of(group).items()):
                    if isinstance(value, Tensor) and value.device.type == "cpu":
                        value = value.tolist()
                    if _is_plain(value):
                        yield f"{key} of group {number} of {type(optimizer).__name__}", value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)
