"""StepLog records each step of a run for those who measure it; off unless `--record DIR` is given.

Each rank writes DIR/rank-N.jsonl, a line when something has happened:

    {"step": 12, "epoch": 0, "between": 0.001, "seconds": 0.04, "samples": 64, "loss": 1.93, ...}
    {"epoch": 0, "training": false, "means": {"accuracy": 0.81}}

A step lasts from the moment its data is asked for to the end of engine.step, so that what lies
`between` it and the step before (an evaluation, a checkpoint) is not of it; where nobody asks, in a
loop by world.share, it lasts from the end of the step before, with all that lies between. `samples`
are this rank's own, `loss` and `weight` those of all. Means are what a Metrics object computed. Of
several engines the first counts: of trainings one after the other, each by an engine of its own,
neither steps nor means of later ones are written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from shardwise.errors import ConfigError


class StepOutcome(Protocol):
    """What engine.step returns; reading it may wait for a device."""

    @property
    def loss(self) -> float: ...

    @property
    def weight(self) -> float: ...


class StepLog:
    """The log of one rank; without a `folder` it writes nothing.

    After `stop_after` steps of this run it ends: every rank leaves with exit code 0. A rank whose
    samples another one `counts` as well, since both have a part of one model, writes none.
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
            self._file = _opened(folder, rank)
        self.ended = False
        """Whether the run was ended here, maybe between the backward and the step of an engine."""
        self._stop_after = stop_after
        self.counts = counts
        """Whether samples of this rank are written."""
        self._stepped: set[int] = set()  # engines that have stepped since the last pass began
        self._made = 0  # steps of this run, which may have resumed at a later one
        self._epoch = 0
        self._begin: float | None = None
        self._samples = 0  # given to train on since the last step
        self._left = False  # a pass ended with samples in hand that no step has trained on
        self._last = time.perf_counter()

    @property
    def is_on(self) -> bool:
        """Whether anybody wants to know."""
        return self._file is not None or self._stop_after is not None

    def began(self) -> None:
        """A pass over data to train on begins, and its first step is asked for."""
        self._stepped.clear()
        if self._left:
            self._begin, self._samples, self._left = None, 0, False
        self.asked()

    def asked(self) -> None:
        """The data of a step to train on is asked for."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def given(self, samples: int, epoch: int | None = None) -> None:
        """Samples to train on are handed out."""
        self._samples += samples
        if epoch is not None:
            self._epoch = epoch

    def closed(self, *, in_hand: bool = False) -> None:
        """A pass over the data has ended: what was asked for last did not come or, `in_hand`, it
        was left with samples, which count if a step comes before the next pass."""
        if not self._samples:
            self._begin = None
        elif in_hand:
            self._left = True

    def stepped(self, engine: int, steps: int, outcome: StepOutcome) -> None:
        """Engine number `engine` has made its step number `steps`; of several the first counts.

        Raises SystemExit when the run is to end.
        """
        self._stepped.add(engine)
        if engine or not self.is_on:
            return
        if self._file is not None:
            self._add(steps, outcome)
        self._made += 1
        if self._stop_after is not None and self._made >= self._stop_after:
            self.ended = True
            raise SystemExit(0)

    def _add(self, steps: int, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        begin = self._last if self._begin is None else self._begin
        self._write(
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
        """Means over all ranks, of what autograd recorded or of an evaluation."""
        if self._stepped and 0 not in self._stepped:
            return  # another training, by a later engine
        self._write(epoch=self._epoch, training=training, means=dict(means))

    def close(self) -> None:
        """The rank leaves; what comes later is not written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **row: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            name, self._file = self._file.name, None
            line = f"shardwise: steps are recorded in {name} no more: {error.strerror or error}."
            print(line, file=sys.stderr, flush=True)


def _opened(folder: Path, rank: int) -> TextIO:
    """The file of a rank, empty. Raises ConfigError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"rank-{rank}.jsonl").open("w", buffering=1)
    except OSError as error:
        raise ConfigError(
            f"--record {folder} cannot be written: {error.strerror or error}. Name a folder, which "
            "is made where there is none."
        ) from error
