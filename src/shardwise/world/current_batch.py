"""CurrentBatch knows which batch was given last: its size is the weight of a loss without one.

A Loader opens a stream for each iteration and says what each batch holds. The engine asks for
the batch that a loss came from, and Metrics asks whether the batch counts at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

from shardwise.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's part of one micro-batch.

    `samples` is 0 for a stand-in: one real sample that a rank without any is given so that it
    runs the same collectives as the others. `last` marks the last micro-batch of a step. `whole`
    counts the samples of this micro-batch on all ranks, 0 if this rank does not know.
    `indices` are dataset indices where the dataset is map-style, for messages. `rows` are its
    place [first, end) among the `total` rows of all ranks' batches, where that is known; batches
    of one `step` have that object in common.
    """

    samples: int
    whole: int = 0
    last: bool = True
    indices: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    total: int = 0
    step: object = field(default_factory=object)


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """The shape of a stream, for the line at the start of a run. Numbers are of the whole run."""

    batch_size: int | None
    micro_batches: int
    steps_per_epoch: int | None


@dataclass(eq=False)
class LoaderStream:
    """One iteration over a Loader, from its first batch until it ends or is dropped."""

    name: str
    plan: StreamShape
    passing: bool = False
    """Whether it has no end of its own, and gives way to the next one (world.share)."""
    batch: Batch | None = None
    training: bool = False
    trained: bool = False
    """Whether a backward has used any of its batches."""


SitOut = Callable[[], AbstractContextManager[None]]
"""Makes a block in which ranks may run different numbers of forwards."""


@dataclass
class CurrentBatch:
    """The open streams of this process. `batch` is the one given last, by any of them."""

    streams: list[LoaderStream] = field(default_factory=list)
    batch: Batch | None = None
    sat_out: int = 0
    """How many batches of evaluations had no sample for this rank, which then ran none."""
    own_rows: int | None = None
    """The rows of the next loss's batch where a bridge knows them, and no stream gave the batch."""
    stand_in: str | None = None
    """Which stream has given a stand-in of which nobody has asked yet whether it is one."""
    _apart: int = 0
    """How many batches are under way that other ranks sit out."""
    _latest: LoaderStream | None = None
    """The stream that last gave a batch to train on, open or not."""
    _shared: list[Batch] = field(default_factory=list)
    """What passing streams have given to train on since the last backward."""
    _watchers: list[WeakMethod[Callable[[Batch], None]]] = field(default_factory=list)
    _uneven: list[WeakMethod[SitOut]] = field(default_factory=list)

    def watch(self, watcher: Callable[[Batch], None]) -> None:
        """Call `watcher` (a bound method, held weakly) before each batch is handed out."""
        self._watchers.append(WeakMethod(watcher))

    def allow_uneven(self, block: SitOut) -> None:
        """Enter what `block` (a bound method, held weakly) makes around each batch of an
        evaluation that some ranks sit out."""
        self._uneven.append(WeakMethod(block))

    @contextmanager
    def some_sit_out(self) -> Iterator[None]:
        """Inside the block some ranks run a batch of an evaluation, and others have none.

        Leaving it is collective where parameters are gathered by all ranks.
        """
        self._uneven = [reference for reference in self._uneven if reference() is not None]
        with ExitStack() as blocks:
            for reference in self._uneven:
                if (block := reference()) is not None:
                    blocks.enter_context(block())
            self._apart += 1
            blocks.callback(self._together)
            yield

    def _together(self) -> None:
        self._apart -= 1

    def check_even(self, call: str) -> None:
        """Raise UsageError for a `call` that takes all ranks, in a batch that some sit out."""
        if self._apart:
            raise UsageError(
                f"{call} in a batch of an evaluation of which other workers have no sample, so "
                "that they would never come to it. Call it after the loop, over what each worker "
                "has added up; or let no batch have fewer rows than there are workers: "
                "drop_last=True."
            )

    def open(self, name: str, plan: StreamShape) -> LoaderStream:
        """Register an iteration that has begun."""
        stream = LoaderStream(name, plan)
        self.streams.append(stream)
        return stream

    def close(self, stream: LoaderStream) -> None:
        """Forget an iteration that has ended; closing twice is harmless."""
        if stream in self.streams:
            self.streams.remove(stream)
            if self.batch is stream.batch:
                given = [other.batch for other in self.streams if other.batch is not None]
                self.batch = given[-1] if given else None

    def give(self, stream: LoaderStream, batch: Batch, *, training: bool) -> None:
        """Note the batch that is handed out now; `training` is whether autograd records now."""
        if training and not stream.passing:
            self._close_passing(training=True)  # what was shared out before is not of this batch
            self._shared = []
        self._watchers = [reference for reference in self._watchers if reference() is not None]
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
        """Note a batch that is handed out without a loop: it stands until the next one of its kind.

        One to evaluate on does not displace one to train on, whose backward may still come.
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
        """Note that a backward has used what was given last.

        With no stream open that is `x, y = next(iter(loader))`, whose stream has gone already.
        """
        self._shared, self.own_rows = [], None
        self._close_passing(training=False)
        latest = [self._latest] if self._latest is not None else []
        for stream in self.training_streams() or latest:
            stream.trained = True

    def training_streams(self) -> list[LoaderStream]:
        """The open streams whose last batch was given while autograd recorded, oldest first."""
        return [stream for stream in self.streams if stream.training and stream.batch]

    def in_loop(self) -> bool:
        """Whether a loop over a Loader is under way, or begins, that gives batches to train on."""
        loops = (stream for stream in self.streams if not stream.passing)
        return any(stream.training or stream.batch is None for stream in loops)

    def batch_of_forward(self, *, training: bool) -> Batch | None:
        """The batch that a forward now is of, where `training` says whether autograd records."""
        given = self.training_streams() if training else []
        if not given or any(stream.batch is self.batch for stream in given):
            return self.batch
        return given[-1].batch

    def batch_of_loss(self, *, weighted: bool, anew: bool = False) -> Batch | None:
        """The batch that a loss comes from, or None without any.

        That of the loop over a Loader, where there is one; else what was shared out last. Raises
        UsageError where others were given beside it and the weight of this loss cannot be told,
        unless it is `weighted` by the user: two training Loaders; batches of other sizes that
        world.share gave since the last backward; a stand-in beside samples. And where a loss with a
        weight of its own, `anew`, meets a stand-in that may not be what it is of.
        """
        training = self.training_streams()
        loops = [stream for stream in training if not stream.passing]
        if not weighted:
            self._check_weight(training, loops)
        _check_stand_ins(training)
        if anew and training and not loops:
            self._check_shared_stand_in(training[-1])
        given = [stream.batch for stream in loops or training if stream.batch is not None]
        latest = [batch for batch in given if batch is self.batch]
        return latest[0] if latest else given[-1] if given else None

    def _check_shared_stand_in(self, last: LoaderStream) -> None:
        """A stand-in makes whatever is of it weigh nothing: not rows that were cut by hand."""
        assert last.batch is not None
        several = len({batch.samples == 0 for batch in [last.batch, *self._shared]}) > 1
        if several or (last.trained and last.batch.samples == 0):
            before = "another batch since the last backward" if several else "an earlier backward"
            raise UsageError(
                f"{last.name} gave this worker a stand-in, which counts nothing, since a batch had "
                f"fewer rows than there are workers, and there was {before}: whether this loss "
                "with weight= is of the stand-in cannot be told. Take all batches or none from "
                f"{last.name}, and call engine.backward after each; a further loss of the stand-in "
                "says same_items=True."
            )

    def _check_weight(
        self, training: Sequence[LoaderStream], loops: Sequence[LoaderStream]
    ) -> None:
        if len(loops) > 1:
            raise UsageError(
                f"Two training loaders are open ({_names(loops)}), so the weight of this loss "
                f"cannot be told. {_WEIGHT}"
            )
        given = [stream.batch for stream in training if stream.batch is not None]
        sizes = dict.fromkeys(batch.samples for batch in [*given, *self._shared])
        if len(sizes) > 1:
            counted = " and ".join(str(size) for size in sizes)
            raise UsageError(
                f"{_names(training)} gave this worker batches of {counted} samples since the last "
                f"backward, so the weight of this loss cannot be told. {_WEIGHT}"
            )


_WEIGHT = (
    "For a mean over n items of one batch write engine.backward(loss, weight=n). For a sum of "
    "means over several batches no such n is right: multiply each by its items of this worker, "
    "divide it by those of all workers, and write engine.backward(loss_a * n_a / total_a + "
    'loss_b * n_b / total_b, reduction="sum").'
)


def _check_stand_ins(training: Sequence[LoaderStream]) -> None:
    if len({stream.batch.samples == 0 for stream in training if stream.batch is not None}) > 1:
        raise UsageError(
            f"Of what is open to train on ({_names(training)}) one has no sample left for this "
            "rank and another has, so what this loss counts cannot be told. Give them batches and "
            "datasets of one length, or iterate one of them at a time."
        )


def _names(streams: Sequence[LoaderStream]) -> str:
    return " and ".join(stream.name for stream in streams)
