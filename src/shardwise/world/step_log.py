"""Logs each step of a run with `--record DIR`, for commands that measure runs.

Each rank writes DIR/rank-N.jsonl, with one line per event:

    {"step": 12, "epoch": 0, "between": 0.001, "seconds": 0.04, "samples": 64, "loss": 1.93, ...}
    {"epoch": 0, "training": false, "means": {"accuracy": 0.81}}

    seconds       from the request for a step's first batch to the end of engine.step. A loop with
                  world.share requests no batch, so its steps are measured from the end of the
                  previous step
    between       seconds between the previous step and that request: evaluation, checkpoints
    samples       number of samples on this rank
    loss, weight  across all ranks
    means         results of a Metrics object

Only steps of the first engine are logged. If a script trains several engines one after another, the
log does not contain steps or means of the later ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO, cast

from shardwise.errors import ConfigError


class StepOutcome(Protocol):
    """The result of engine.step. Reading a value may synchronise with the device."""

    @property
    def loss(self) -> float: ...

    @property
    def weight(self) -> float: ...


class StepLog:
    """The step log of one rank. If `folder` is None, nothing is written.

    After `stop_after` steps, every rank exits with code 0. The ranks of a replica have the same
    samples, so only the rank whose `counts` is true logs their number; the others log 0.
    """

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        stop_after: int | None = None,
        *,
        counts: bool = True,
    ) -> None:
        self._file: TextIO | None = None
        if folder is not None:
            self._file = _open(folder, rank)
        self.ended = False
        """True if `stop_after` stopped the run, which may be between backward and step of another
        engine."""
        self._stop_after = stop_after
        self.counts = counts
        """True if this rank's number of samples is logged."""
        self._stepped: set[int] = set()  # engines that have stepped since the last pass began
        self._made = 0  # steps of this process; the step numbers of a resumed run start higher
        self._epoch = 0
        self._begin: float | None = None
        self._samples = 0  # handed out for training since the last step
        self._left = False  # a pass ended with samples that no step has used
        self._last = time.perf_counter()  # end of the previous step

    @property
    def is_on(self) -> bool:
        """True if steps are logged or counted."""
        return self._file is not None or self._stop_after is not None

    @property
    def made(self) -> int:
        """Number of steps that the ranks of the run have made in this start."""
        return self._made

    def join(self, folder: str | None, rank: int, made: int) -> None:
        """Log to `folder` as `rank` from now on, because this rank joins others in their run.

        They have made `made` steps. A rank that was lost before keeps its earlier lines.
        """
        # The wait of a spare is not part of its first step.
        self._made, self._last = made, time.perf_counter()
        self._begin = self._last
        if folder is not None:
            try:
                self._file = _open(Path(folder), rank, "a")
            except ConfigError as error:  # the others continue to train, and so does this rank
                print(f"shardwise: rank {rank}: {error}", file=sys.stderr, flush=True)

    def began(self) -> None:
        """Record the start of a pass over training data, and the request for its first batch."""
        self._stepped.clear()
        # No step has used the samples left from the last pass, so they do not belong to this step.
        if self._left:
            self._begin, self._samples, self._left = None, 0, False
        self.asked()

    def asked(self) -> None:
        """Record the request for the first batch of a training step."""
        # Don't restart the clock for later micro-batches of the step.
        if self._begin is None:
            self._begin = time.perf_counter()

    def given(self, samples: int, epoch: int | None = None) -> None:
        """Record that `samples` samples were returned for training."""
        self._samples += samples
        if epoch is not None:
            self._epoch = epoch

    def given_again(self) -> None:
        """Reset the sample count since the last step, because that step's samples are repeated."""
        self._samples = 0

    def closed(self, *, in_hand: bool = False) -> None:
        """Record the end of a pass.

        If `in_hand` is true, the loop ended early, and its last samples may still be used. They are
        counted if a step follows before the next pass.
        """
        if not self._samples:
            self._begin = None
        elif in_hand:
            self._left = True

    def stepped(self, engine: int, steps: int, outcome: StepOutcome) -> None:
        """Record that engine number `engine` has completed its step number `steps`.

        Raises SystemExit after `stop_after` steps.
        """
        self._stepped.add(engine)
        if engine or not self.is_on:
            return
        if self._file is not None:
            self._add(steps, outcome)
        # All ranks take the same steps, so they all exit here, outside any collective.
        self._made += 1
        if self._stop_after is not None and self._made >= self._stop_after:
            self.ended = True
            raise SystemExit(0)

    def _add(self, steps: int, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        begin = self._last if self._begin is None else self._begin
        self._write(
            # Steps in the log count from 0, like loop indices.
            step=steps - 1,
            epoch=self._epoch,
            between=begin - self._last if self._made else 0.0,
            seconds=now - begin,
            samples=self._samples if self.counts else 0,
            loss=outcome.loss,
            weight=outcome.weight,
        )
        self._begin, self._samples, self._last, self._left = None, 0, now, False

    def measured(self, means: Mapping[str, float], *, training: bool) -> None:
        """Record means across all ranks. `training` is True if autograd was recording."""
        # Only the first engine's training is measured.
        if self._stepped and 0 not in self._stepped:
            return  # means of another run, by a later engine
        self._write(epoch=self._epoch, training=training, means=dict(means))

    def close(self) -> None:
        """Close the file. Later events are not logged."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **row: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            # A full disk must not stop training: warn once and continue without the log.
            name, self._file = self._file.name, None
            line = f"shardwise: no further steps are recorded in {name}: {error.strerror or error}."
            print(line, file=sys.stderr, flush=True)


def _open(folder: Path, rank: int, mode: str = "w") -> TextIO:
    """Open a rank's file, by default an empty one. Raises ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Use line buffering, so that a killed rank leaves only complete lines.
        return cast(TextIO, (folder / f"rank-{rank}.jsonl").open(mode, buffering=1))
    except OSError as error:
        raise ConfigError(
            f"--record {folder} cannot be written: {error.strerror or error}. Name a folder that "
            "exists or can be created."
        ) from error
