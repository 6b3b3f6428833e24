"""The position of training in the data, and how checkpoints represent it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.data.order import locate
from shardwise.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """The order of a stream's samples in an epoch.

    If `parts` is 0, samples are in the order of the stream. Otherwise the stream is split into
    `parts` parts, one per rank at the start of the epoch, and a global batch of `batch` samples
    contains a share from each part.
    """

    parts: int = 0
    batch: int = 0
    joined: bool = False
    """True if every rank reads all parts.

    This happens if the world size or the batch size changed in the middle of the epoch.
    """


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data.

    It is `offset` samples and `steps` steps into `epoch`, with `before` samples in earlier epochs.
    """

    epoch: int = 0
    offset: int = 0
    steps: int = 0
    before: int = 0
    order: PartOrder | None = None
    """The order of a stream. None if unknown, and for map-style datasets."""
    stream: Any = None
    """State of a stream that can continue from it, after `offset` samples. None if it cannot."""

    @property
    def samples(self) -> int:
        """Number of samples consumed since training started."""
        return self.before + self.offset

    def stepped(self, total: int, stream: Any = None) -> Position:
        """Return the position after a step of `total` samples, with the stream's new state."""
        return Position(  # `dataclasses.replace` is slow, and this runs once per step
            epoch=self.epoch,
            offset=self.offset + total,
            steps=self.steps + 1,
            before=self.before,
            order=self.order,
            stream=stream,
        )

    def next_epoch(self, epoch_length: int | None) -> Position:
        """Return the start of the next epoch, even if this epoch has unused samples."""
        passed = self.offset if epoch_length is None else epoch_length
        return Position(epoch=self.epoch + 1, before=self.before + passed)

    def state(self, epoch_length: int | None) -> dict[str, Any]:
        """Return the position in the form that checkpoints store."""
        # The number of samples alone would be ambiguous: at the end of an epoch, the rest of the
        # user's loop body has still to run, and at the start of the next epoch it has run.
        place: dict[str, Any] = {"samples": self.samples, "epoch": self.epoch}
        if epoch_length is not None:
            return place
        place |= {"offset": self.offset, "steps": self.steps}
        if self.order is None:
            return place
        parts, batch, joined = self.order.parts, self.order.batch, int(self.order.joined)
        place |= {"parts": parts, "part_batch": batch, "joined": joined}
        return place if self.stream is None else place | {"stream": self.stream}


def restored(
    state: Mapping[str, Any], epoch_length: int | None, batch_size: int | None
) -> Position:
    """Return the position that `state` describes. Raises DataError if `state` is invalid."""
    order: PartOrder | None = None
    try:
        samples = int(state["samples"])
        if epoch_length is not None:
            saved_epoch = state.get("epoch")
            # `<=`, because at the end of an epoch the state still contains that epoch: the rest of
            # its loop body has not run yet.
            if (
                saved_epoch is not None
                and 0 <= samples - saved_epoch * epoch_length <= epoch_length
            ):
                epoch, offset = saved_epoch, samples - saved_epoch * epoch_length
            else:
                epoch, offset = locate(samples, epoch_length)
            steps = -(-offset // batch_size) if batch_size else 0
        else:
            epoch, offset, steps = (int(state[key]) for key in ("epoch", "offset", "steps"))
            if "parts" in state:  # missing in states of earlier versions
                parts, batch = int(state["parts"]), int(state["part_batch"])
                order = PartOrder(parts=parts, batch=batch, joined=bool(state["joined"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "The state of a Loader has the key samples (and epoch, offset and steps for a "
            f"sampler or a stream), but this is {dict(state)!r}. Pass the result of "
            "Loader.state_dict()."
        ) from error
    is_order = order is None or order.parts == 0 or 0 < order.parts <= order.batch
    if min(samples, epoch, offset, steps) < 0 or offset > samples or not is_order:
        raise DataError(
            f"{dict(state)!r} is not the state of a Loader. Pass the result of Loader.state_dict()."
        )
    before = samples - offset
    stream = state.get("stream")
    return Position(
        epoch=epoch, offset=offset, steps=steps, before=before, order=order, stream=stream
    )
