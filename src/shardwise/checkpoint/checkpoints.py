"""Decides where and when an engine is saved, and from which checkpoint it continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint.atomic_folders import DOCUMENT, Found, place_of
from shardwise.checkpoint.engine_view import Engine
from shardwise.checkpoint.loader import CheckpointLoader
from shardwise.checkpoint.saver import CheckpointSaver
from shardwise.checkpoint.tracking import Tracking
from shardwise.errors import BrokenCheckpoint, CheckpointNotWritten


@dataclass(frozen=True)
class _SaveOptions:
    """How the user saves: how many checkpoints to keep, and the bytes of a file."""

    keep: int | None = None
    split: int = 5 * 10**9


class Returns(Protocol):
    """Groups of ranks that may end, and come back while the others train."""

    @property
    def is_due(self) -> bool:
        """Whether this group is to come back."""

    def come_back(self) -> None:
        """Wait until the others admit this group, and continue from where they are."""

    def are_expected(self) -> None:
        """Tell the launcher that this group comes back if it ends."""


class Checkpoints:
    """The checkpoints of an engine, and the folder where it saves when the run is asked to end.

    Attributes: `saver` and `loader`, which move the bytes.

    Args:
        reseed: Seeds the random generators for the step that follows a load.
        returns_of: Makes what brings groups of ranks back by these checkpoints, None without.
    """

    def __init__(
        self,
        state: Engine,
        reseed: Callable[[], None],
        returns_of: Callable[[Checkpoints], Returns | None],
    ) -> None:
        self._state = state
        self._world = state.world
        self._reseed = reseed
        self._tracked = Tracking()
        self.saver = CheckpointSaver(state, self._tracked)
        self.loader = CheckpointLoader(state, self._tracked)
        self._home: Path | None = None  # where it resumed from, else where it was saved last
        self._options = _SaveOptions()
        self._resumes = False
        self._saved: tuple[int, int] | None = None  # the moment that is saved at home
        self._trial_paths: frozenset[Path] = frozenset()  # where a trial would have saved
        self._returns = returns_of(self)

    def track(self, objects: Mapping[str, Any]) -> None:
        """See Engine.track."""
        self._tracked.add(objects)

    # -- saving -----------------------------------------------------------------------------

    def save(
        self, folder: str | PathLike[str], keep: int | None, *, background: bool, split_gb: float
    ) -> Path | None:
        """See Engine.save."""
        path = self.save_and_stay(folder, keep, background=background, split_gb=split_gb)
        self._world.preemption.leave_between_steps()
        return path

    def save_and_stay(
        self,
        folder: str | PathLike[str],
        keep: int | None,
        *,
        background: bool = False,
        split_gb: float = 5.0,
    ) -> Path | None:
        """The same, and go on even where this process is asked to end."""
        self._state.refuse_in_step("engine.save")
        home, split = Path(folder), int(split_gb * 1e9)
        if self._world.settings.trial:
            path = place_of(home, self._state.steps)
            self._trial_paths |= {path}
            return path
        saved = None
        try:
            saved = self.saver.save(home, keep=keep, background=background, split=split)
        except CheckpointNotWritten as error:
            self.saver.tolerate(error)
        if self._home in (None, home) or not self._resumes:
            self._settle_in(home, _SaveOptions(keep, split))
            self._saved = None if background or saved is None else self._moment()
        return saved

    # -- resuming and loading ---------------------------------------------------------------

    def resume(self, home: Path) -> int:
        """See Engine.resume."""
        if self._world.settings.trial:
            return self._state.steps
        if self._returns is not None and self._returns.is_due:
            self._returns.come_back()
            return self._state.steps
        # Before looking: the previous start of this job may still be writing in there.
        self.saver.claim(home)
        self.saver.wait()
        self.saver.end_removals(home)
        complete, lost = self.loader.found(home)
        loaded = self._load_newest([found.path for found in complete])
        if loaded is None:
            _refuse_beside(home, lost)
            line = f"no checkpoint in {home} yet: starting at step {self._state.steps}"
        else:
            for found in lost:
                if found.step > self._state.steps:
                    self._pass_over(f"{found.path} has no {DOCUMENT}, so it is not complete.")
            line = f"resumed from {loaded}, at step {self._state.steps}"
        self._resumes, self._saved = True, None if loaded is None else self._moment()
        self._settle_in(home, _SaveOptions())
        self._tell_that_it_resumes()
        if not self._state.spec.settings.quiet:
            self._world.print(f"shardwise: {line}")
        return self._state.steps

    def resume_from(self, home: Path, path: Path | None) -> None:
        """Go on from `path`, a checkpoint in `home`, or where it is None from here. Collective."""
        self.saver.claim(home)
        self._go_on(home, path, _SaveOptions())

    def _go_on(self, home: Path, path: Path | None, options: _SaveOptions) -> None:
        if path is not None:
            self.load(path)
        self._resumes, self._saved = True, None if path is None else self._moment()
        self._settle_in(home, options)
        self._tell_that_it_resumes()

    def _tell_that_it_resumes(self) -> None:
        """Let the launcher know that what starts anew goes on from a checkpoint."""
        self._world.progress.resumes()
        if self._returns is not None:
            self._returns.are_expected()

    # -- for an elastic island that comes back ----------------------------------------------

    def save_for_return(self) -> dict[str, Any] | None:
        """Save now, where the user does, for an island that comes back; what it is to know, as
        JSON, None where that failed or nobody has said where. Collective."""
        home, options = self._home, self._options
        if home is None:
            return None
        path: Path | None = place_of(home, self._state.steps)
        if self._saved != self._moment():
            with self.saver.at_boundary():
                path = self.save_and_stay(home, options.keep, split_gb=options.split / 1e9)
        if path is None:
            return None
        about = {"home": str(home), "path": str(path.resolve())}
        options_now = {"keep": options.keep, "split": options.split}
        return about | options_now | {"draws_are_one": self._world.draws.is_one}

    def come_back(self, about: Mapping[str, Any]) -> None:
        """Go on from what `save_for_return` saved on the others, which have the folder. Collective
        over this island."""
        options = _SaveOptions(about["keep"], about["split"])
        self._go_on(Path(about["home"]), Path(about["path"]), options)
        self._world.draws.is_one = about["draws_are_one"]  # the stream is theirs

    def _pass_over(self, why: object) -> None:
        self._world.print(f"shardwise: passed over: {why}", file=sys.stderr)

    def _load_newest(self, paths: Sequence[Path]) -> Path | None:
        """Load the first of `paths` that is whole, and return it; None where there are none."""
        broken: list[BrokenCheckpoint] = []
        for path in paths:
            try:
                self.load(path)
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            # Said only now: if no checkpoint is whole, the newest one's error is raised instead.
            for each in broken:
                self._pass_over(each)
            return path
        if broken:
            older = f" None of the {len(broken) - 1} before it is whole." if broken[1:] else ""
            raise BrokenCheckpoint(f"{broken[0]}{older}") from broken[0]
        return None

    def load(self, path: Path, *, strict: bool = True, model_only: bool = False) -> None:
        """See Engine.load."""
        self._state.refuse_in_step("engine.load")
        # A trial has written nothing, and goes on with what it has.
        if path in self._trial_paths:
            return
        self.saver.wait()
        steps = self.loader.load(path, strict=strict, model_only=model_only)
        if steps is not None:
            self._state.continue_at(steps)
            self._reseed()

    # -- when the run is asked to end -------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        """What a checkpoint is of: with a step of another engine of this process, what is tracked
        and drawn has moved on too."""
        return self._state.steps, self._world.steps_made

    def _settle_in(self, home: Path, options: _SaveOptions) -> None:
        """Save to `home`, as the user does, when asked to end; the first time, begin to listen."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._save_at_the_end)
        self._home, self._options = home, options

    def _is_between_steps(self) -> bool:
        return self._state.is_between_steps

    def _save_at_the_end(self) -> Path:
        """Save to where the user does, unless this moment is saved there."""
        assert self._home is not None
        if self._saved == self._moment():
            return place_of(self._home, self._state.steps)
        # A forward may have run since the last step, whose step will never be made.
        self.saver.go_back_to_boundary()
        return self.saver.save(
            self._home,
            keep=self._options.keep,
            background=False,
            split=self._options.split,
        )

    def close(self) -> None:
        """Wait for a save in the background, and leave the folders to other jobs."""
        try:
            self.saver.wait()
        finally:
            self.saver.leave()
            self._world.preemption.leave_out(self._save_at_the_end)


def _refuse_beside(home: Path, lost: Sequence[Found]) -> None:
    """Raise BrokenCheckpoint where a run would begin anew beside what looks like checkpoints."""
    if lost:
        newest = lost[0].path
        more = f", as {len(lost) - 1} before it" if lost[1:] else ""
        raise BrokenCheckpoint(
            f"{newest} has the name of a checkpoint and no {DOCUMENT}{more}, and {home} has no "
            "complete one: this run would begin anew beside it. Bring the file back, or load the "
            f'weights alone (engine.load("{newest}", model_only=True)) and save elsewhere; to '
            "begin anew, move it away."
        )
