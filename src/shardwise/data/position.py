"""Position says how far training has come in its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.data.order import locate
from shardwise.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """The order of a stream's samples in an epoch.

    With `parts` of 0 it is the order of the stream. Otherwise the stream is cut into `parts`, one
    per rank when the epoch began, and a total batch of `batch` samples takes a share of each part.
    """

    parts: int = 0
    batch: int = 0
    joined: bool = False
    """Whether every rank reads all parts, because the ranks or the batch changed in the epoch."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """`offset` samples and `steps` steps into `epoch`; earlier epochs had `before` samples."""

    epoch: int = 0
    offset: int = 0
    steps: int = 0
    before: int = 0
    order: PartOrder | None = None
    """Of a stream in the middle of an epoch. None if unknown, and for map-style datasets."""

    @property
    def samples(self) -> int:
        """Samples consumed since training began."""
        return self.before + self.offset

    def stepped(self, total: int) -> Position:
        """After one more step, of `total` samples."""
        return replace(self, offset=self.offset + total, steps=self.steps + 1)

    def next_epoch(self, epoch_length: int | None) -> Position:
        """The start of the next epoch, whatever is left of this one."""
        passed = self.offset if epoch_length is None else epoch_length
        return Position(epoch=self.epoch + 1, before=self.before + passed)

    def state(self, epoch_length: int | None) -> dict[str, int]:
        """What to save. The end of an epoch, whose last lines are still to run, is not the start of
        the next, so the number of samples alone would not do."""
        place = {"samples": self.samples, "epoch": self.epoch}
        if epoch_length is not None:
            return place
        place |= {"offset": self.offset, "steps": self.steps}
        if self.order is None:
            return place
        parts, batch, joined = self.order.parts, self.order.batch, int(self.order.joined)
        return place | {"parts": parts, "part_batch": batch, "joined": joined}


def restored(
    state: Mapping[str, Any], epoch_length: int | None, batch_size: int | None
) -> Position:
    """The position that `state` tells. Raises DataError for a state of something else."""
    order: PartOrder | None = None
    try:
        samples = int(state["samples"])
        if epoch_length is not None:
            told = state.get("epoch")
            # At the very end of an epoch the state still names that epoch, whose body is to run.
            if told is not None and 0 <= samples - told * epoch_length <= epoch_length:
                epoch, offset = told, samples - told * epoch_length
            else:
                epoch, offset = locate(samples, epoch_length)
            steps = -(-offset // batch_size) if batch_size else 0
        else:
            epoch, offset, steps = (int(state[key]) for key in ("epoch", "offset", "steps"))
            if "parts" in state:  # states of earlier versions do not have it
                parts, batch = int(state["parts"]), int(state["part_batch"])
                order = PartOrder(parts=parts, batch=batch, joined=bool(state["joined"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The state of a Loader holds samples (and epoch, offset and steps for a sampler or a "
            f"stream), not {dict(state)!r}."
        ) from error
    is_order = order is None or order.parts == 0 or 0 < order.parts <= order.batch
    if min(samples, epoch, offset, steps) < 0 or offset > samples or not is_order:
        raise DataError(f"{dict(state)!r} is no position in the data.")
    before = samples - offset
    return Position(epoch=epoch, offset=offset, steps=steps, before=before, order=order)
