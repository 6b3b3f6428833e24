"""Records the last batch passed to the script. Its size is the weight of a loss without `weight=`.

A Loader opens a stream for each iteration and describes each batch. The engine looks up the batch
from which a loss was computed. Metrics looks up whether that batch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

from shardwise.errors import UsageError
from shardwise.world.sequence_parts import Sequences


@dataclass(kw_only=True, slots=True)  # not frozen: that takes four times as long, in every step
class Batch:
    """This rank's part of one micro-batch. It is never changed.

    samples   number of samples; 0 for a stand-in: a real sample that a rank without samples gets,
              so that it runs the same collectives as the others
    whole     number of samples of this micro-batch across all ranks; 0 if unknown on this rank
    last      True for the last micro-batch of a step
    indices   dataset indices, for messages, if the dataset is map-style
    rows      range [first, end) within the `total` rows of all ranks' batches, if known
    sequence  the sequences before `--context` split them; None if they are not split
    step      an object shared by all micro-batches of a step
    tokens    number of tokens of this micro-batch across all ranks; 0 if unknown
    positions number of positions that all ranks compute for these tokens, including padding
    """

    samples: int
    whole: int = 0
    last: bool = True
    indices: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    total: int = 0
    sequence: Sequences | None = None
    step: object = field(default_factory=object)
    tokens: int = 0
    positions: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """The batch size and number of steps of a stream, across all ranks. Shown at startup."""

    batch_size: int | None
    micro_batches: int
    steps_per_epoch: int | None
    tokens: int | None = None
    """Token budget of a step, if it determines the batches."""


@dataclass(eq=False)
class LoaderStream:
    """One iteration over a Loader, from its first batch until it ends or is abandoned."""

    name: str
    plan: StreamShape
    passing: bool = False
    """True for a batch of `world.share`, which has no loop and is replaced by the next such
    batch."""
    batch: Batch | None = None
    training: bool = False
    trained: bool = False
    """True if a backward pass has used any of its batches."""
    stepped: bool = False
    """True if a step has ended since the last backward pass."""


SitOut = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that allows ranks to run different numbers of forward passes."""


@dataclass
class CurrentBatch:
    """The open streams of this process. `batch` is the last batch that any stream returned."""

    streams: list[LoaderStream] = field(default_factory=list)
    batch: Batch | None = None
    skipped_batches: int = 0
    """Number of evaluation batches that this rank skipped because it had no sample in them."""
    own_rows: int | None = None
    """Number of rows of the next loss, if a bridge knows it and no stream returned the batch."""
    stand_in: str | None = None
    """Name of the stream that returned a stand-in, until the script reads `world.rows`."""
    _apart: int = 0
    """Number of current evaluation batches that other ranks skip."""
    _latest: LoaderStream | None = None
    """The stream, open or closed, that last returned a training batch."""
    _shared: list[Batch] = field(default_factory=list)
    """Training batches that `world.share` returned since the last backward pass."""
    _watchers: list[WeakMethod[Callable[[Batch], None]]] = field(default_factory=list)
    _uneven: list[WeakMethod[SitOut]] = field(default_factory=list)

    def watch(self, watcher: Callable[[Batch], None]) -> None:
        """Call `watcher`, a bound method that is held weakly, before each batch is returned."""
        self._watchers.append(WeakMethod(watcher))

    def allow_uneven(self, block: SitOut) -> None:
        """Register a context manager for evaluation batches that some ranks skip.

        `block` is a bound method, held weakly, that returns the context manager.
        """
        self._uneven.append(WeakMethod(block))

    @contextmanager
    def some_ranks_skip(self) -> Iterator[None]:
        """Mark the block as an evaluation batch that some ranks skip.

        Exiting the block is collective if parameters are sharded.
        """
        # Drop engines that have been freed.
        self._uneven = [reference for reference in self._uneven if reference() is not None]
        with ExitStack() as blocks:
            for reference in self._uneven:
                if (block := reference()) is not None:
                    blocks.enter_context(block())
            self._apart += 1
            try:
                yield
            finally:
                # Do this before the contexts exit, when all ranks participate in collectives again.
                self._apart -= 1

    def check_even(self, call: str) -> None:
        """Raise UsageError if a collective `call` is made inside a batch that some ranks skip."""
        if self._apart:
            raise UsageError(
                f"{call} in an evaluation batch that has no sample for some workers, which "
                "therefore never make this call. Call it once after the loop, on the sums of each "
                "worker; or avoid batches with fewer rows than there are workers: drop_last=True."
            )

    def open(self, name: str, plan: StreamShape) -> LoaderStream:
        """Register the start of an iteration over a Loader."""
        stream = LoaderStream(name, plan)
        self.streams.append(stream)
        return stream

    def close(self, stream: LoaderStream) -> None:
        """Remove an iteration that has ended. Closing it again does nothing."""
        if stream in self.streams:
            self.streams.remove(stream)
            if self.batch is stream.batch:
                # An inner loop (an evaluation) has ended, so the outer loop's batch is current
                # again.
                given = [other.batch for other in self.streams if other.batch is not None]
                self.batch = given[-1] if given else None

    def give(self, stream: LoaderStream, batch: Batch, *, training: bool) -> None:
        """Record the batch that `stream` is about to return.

        `training` is True if autograd is recording.
        """
        if training and not stream.passing:
            # The next loss belongs to this Loader's batch, not to earlier batches of world.share.
            self._close_passing(training=True)
            self._shared = []
        self._watchers = [reference for reference in self._watchers if reference() is not None]
        # Call watchers before recording the batch, because one may save the position before this
        # batch.
        for reference in self._watchers:
            if (watcher := reference()) is not None:
                watcher(batch)
        stream.batch, stream.training = batch, training
        self.batch = batch
        if batch.samples == 0:
            self.stand_in = stream.name
        if training:
            self._latest = stream

    def share(self, name: str, plan: StreamShape, batch: Batch, *, training: bool) -> None:
        """Record a batch that is returned outside a loop. It replaces the previous such batch.

        An evaluation batch does not replace a training batch, whose backward pass may still follow.
        """
        self._close_passing(training=training)
        stream = LoaderStream(name, plan, passing=True)
        self.streams.append(stream)
        self.give(stream, batch, training=training)
        if training:
            self._shared.append(batch)

    def _close_passing(self, *, training: bool) -> None:
        for older in [s for s in self.streams if s.passing and s.training == training]:
            self.close(older)

    def train(self) -> None:
        """Record that a backward pass has used the last batch."""
        # `x, y = next(iter(loader))` leaves no open stream, so use the latest one.
        self._shared, self.own_rows = [], None
        self._close_passing(training=False)
        latest = [self._latest] if self._latest is not None else []
        for stream in self.training_streams() or latest:
            stream.trained, stream.stepped = True, False

    def step(self) -> None:
        """Record that a step has used the gradients of all batches so far."""
        for stream in self.streams:
            stream.stepped = stream.trained

    def is_used(self, batch: Batch) -> bool:
        """Return whether `world.share` returned `batch`, and a step has used it since."""
        return any(s.batch is batch and s.passing and s.stepped for s in self.streams)

    def training_streams(self) -> list[LoaderStream]:
        """Return the open streams whose last batch was a training batch, oldest first."""
        return [stream for stream in self.streams if stream.training and stream.batch]

    def in_loop(self) -> bool:
        """Return whether a running loop over a Loader may return training batches."""
        loops = (stream for stream in self.streams if not stream.passing)
        return any(stream.training or stream.batch is None for stream in loops)

    def batch_of_forward(self, *, training: bool) -> Batch | None:
        """Return the batch that the current forward pass runs on.

        `training` is True if autograd is recording.
        """
        given = self.training_streams() if training else []
        if not given or any(stream.batch is self.batch for stream in given):
            return self.batch
        return given[-1].batch

    def batch_of_loss(self, *, weighted: bool, anew: bool = False) -> Batch | None:
        """Return the batch that a loss was computed from, or None if there was no batch.

        This is the Loader's current batch or, without a Loader, the last batch of `world.share`.

        Args:
            weighted: True if the user passed the loss's weight or a reduction.
            anew: True if the user passed a weight, and no earlier backward pass has counted the
                items.

        Raises:
            UsageError: The loss is not `weighted` and its weight is ambiguous, because two training
                Loaders are open, or because `world.share` has returned batches of different sizes
                since the last backward pass. Also raised if one open stream returned a stand-in and
                another returned samples, or if `anew` is true and the loss may have been computed
                from a stand-in.
        """
        training = self.training_streams()
        # Inside a loop over a Loader, a batch of world.share (such as noise for a GAN) does not
        # determine the loss's weight.
        loops = [stream for stream in training if not stream.passing]
        if not weighted:
            self._check_weight(training, loops)
        if len({stream.batch.samples == 0 for stream in training if stream.batch is not None}) > 1:
            raise UsageError(
                f"The weight of this loss is ambiguous: of the training loaders {_names(training)},"
                " one has no sample left for this rank, and another one has. Give them batches and "
                "datasets of the same length, or iterate over one of them at a time."
            )
        if anew and training and not loops:
            self._check_shared_stand_in(training[-1])
        given = [stream.batch for stream in loops or training if stream.batch is not None]
        # Of several candidates, prefer the batch that was handed out last.
        latest = [batch for batch in given if batch is self.batch]
        return latest[0] if latest else given[-1] if given else None

    def _check_shared_stand_in(self, last: LoaderStream) -> None:
        """Raise UsageError if a weighted loss may have been computed from a stand-in."""
        # A stand-in's loss has weight 0, but a loss of rows that the script selected itself counts.
        assert last.batch is not None
        several = len({batch.samples == 0 for batch in [last.batch, *self._shared]}) > 1
        if several or (last.trained and last.batch.samples == 0):
            before = "another batch since the last backward" if several else "an earlier backward"
            raise UsageError(
                f"{last.name} gave this worker a stand-in that does not count, because a batch had "
                f"fewer rows than there are workers, and there was {before}: this loss with "
                "weight= may or may not be computed from it. Take all batches or none from "
                f"{last.name}, and call engine.backward after each; for a further loss of the "
                "stand-in, pass same_items=True."
            )

    def _check_weight(
        self, training: Sequence[LoaderStream], loops: Sequence[LoaderStream]
    ) -> None:
        if len(loops) > 1:
            raise UsageError(
                f"Two training loaders are open ({_names(loops)}), so the weight of this loss is "
                f"ambiguous. {_WEIGHT}"
            )
        given = [stream.batch for stream in training if stream.batch is not None]
        sizes = dict.fromkeys(batch.samples for batch in [*given, *self._shared])
        if len(sizes) > 1:
            counted = " and ".join(str(size) for size in sizes)
            raise UsageError(
                f"{_names(training)} gave this worker batches of {counted} samples since the last "
                f"backward, so the weight of this loss is ambiguous. {_WEIGHT}"
            )


_WEIGHT = (
    "For a mean over n items of one batch write engine.backward(loss, weight=n). For a sum of "
    "means over several batches no single n fits: multiply each by its number of items on this "
    "worker, divide it by the number on all workers, and write engine.backward(loss_a * n_a / "
    'total_a + loss_b * n_b / total_b, reduction="sum").'
)


def _names(streams: Sequence[LoaderStream]) -> str:
    return " and ".join(stream.name for stream in streams)
