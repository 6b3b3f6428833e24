"""Marks parameters as DeepSpeed's stage 3 does: `ds_id` and `ds_status`, by which scripts know that
a parameter is to be gathered before its values are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count

from torch import Tensor


class ZeroParamStatus(Enum):
    """Whether a parameter is whole on this worker."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_NUMBERS = count()
"""Of all parameters of this process, whatever engine they are of: scripts use them as keys."""


def mark(parameters: Iterable[Tensor]) -> None:
    """Mark `parameters`, which are sharded from now on."""
    for parameter in parameters:
        parameter.__dict__.update(
            ds_id=next(_NUMBERS),
            ds_shape=parameter.shape,
            ds_numel=parameter.numel(),
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
        )


def unmark(parameters: Iterable[Tensor]) -> None:
    """Take back what `mark` gave."""
    for parameter in parameters:
        for name in ("ds_id", "ds_shape", "ds_numel", "ds_status"):
            parameter.__dict__.pop(name, None)


@contextmanager
def whole(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block the marks of `parameters` say that they are whole."""
    marked = [each for each in parameters if "ds_status" in each.__dict__]
    before = [each.__dict__["ds_status"] for each in marked]
    for each in marked:
        each.__dict__["ds_status"] = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for each, status in zip(marked, before, strict=True):
            each.__dict__["ds_status"] = status
