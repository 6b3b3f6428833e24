"""What the loaders last gave: the weight that a loss takes when the user names none.

A Loader opens a stream for each iteration and says what each batch holds. The engine asks for
the batch that a loss came from, and Metrics asks whether the batch counts at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakMethod

from shardwise.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's part of one micro-batch.

    `samples` is 0 for a stand-in: one real sample that a rank without any is given so that it
    runs the same collectives as the others. `last` marks the last micro-batch of a step.
    `indices` are dataset indices where the dataset is map-style, for messages.
    """

    samples: int
    last: bool = True
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shape of a stream, for the line at the start of a run. Numbers are of the whole run."""

    batch_size: int | None
    micro_batches: int
    steps_per_epoch: int | None


@dataclass(eq=False)
class Stream:
    """One iteration over a Loader, from its first batch until it ends or is dropped."""

    name: str
    plan: Plan
    passing: bool = False
    """Whether it has no end of its own, and gives way to the next stream (world.share)."""
    batch: Batch | None = None
    training: bool = False
    trained: bool = False
    """Whether a backward has used any of its batches."""


@dataclass
class Feed:
    """The open streams of this process. `current` is the batch given last, by any of them."""

    streams: list[Stream] = field(default_factory=list)
    current: Batch | None = None
    _latest: Stream | None = None
    """The stream that last gave a batch to train on, open or not."""
    _watchers: list[WeakMethod[Callable[[bool], None]]] = field(default_factory=list)

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` (a bound method, held weakly) before each batch is handed out, with
        whether it is a stand-in."""
        self._watchers.append(WeakMethod(watcher))

    def open(self, name: str, plan: Plan, *, passing: bool = False) -> Stream:
        """Register an iteration that has begun."""
        for older in [stream for stream in self.streams if stream.passing]:
            self.close(older)
        stream = Stream(name, plan, passing)
        self.streams.append(stream)
        return stream

    def close(self, stream: Stream) -> None:
        """Forget an iteration that has ended; closing twice is harmless."""
        if stream in self.streams:
            self.streams.remove(stream)
            if self.current is stream.batch:
                given = [other.batch for other in self.streams if other.batch is not None]
                self.current = given[-1] if given else None

    def give(self, stream: Stream, batch: Batch, *, training: bool) -> None:
        """Say what is handed out now; `training` is whether autograd records at this moment."""
        self._watchers = [reference for reference in self._watchers if reference() is not None]
        for reference in self._watchers:
            if (watcher := reference()) is not None:
                watcher(batch.samples == 0)
        stream.batch, stream.training = batch, training
        self.current = batch
        if training:
            self._latest = stream

    def train(self) -> None:
        """Say that a backward has used what was given last.

        With no stream open that is `x, y = next(iter(loader))`, whose stream has gone already.
        """
        latest = [self._latest] if self._latest is not None else []
        for stream in self.training_streams() or latest:
            stream.trained = True

    def training_streams(self) -> list[Stream]:
        """The open streams whose last batch was given while autograd recorded, oldest first."""
        return [stream for stream in self.streams if stream.training and stream.batch]

    def batch_of_loss(self, *, weighted: bool) -> Batch | None:
        """The batch that a loss comes from, or None without any.

        Raises UsageError for two training streams unless the loss is `weighted` by the user, and
        where one of them gave a stand-in and another did not.
        """
        training = self.training_streams()
        given = [stream.batch for stream in training if stream.batch is not None]
        names = " and ".join(stream.name for stream in training)
        if len(given) > 1 and not weighted:
            raise UsageError(
                f"Two training loaders are open ({names}), so the weight of this loss cannot be "
                "told. Write engine.backward(loss, weight=number_of_items_the_loss_is_a_mean_over)."
            )
        if len({batch.samples == 0 for batch in given}) > 1:
            raise UsageError(
                f"Of the open training loaders ({names}) one has no sample left for this rank and "
                "another has, so what this loss counts cannot be told. Give them datasets of one "
                "length and one batch_size, or iterate one of them at a time."
            )
        latest = [batch for batch in given if batch is self.current]
        return latest[0] if latest else given[-1] if given else None
