"""Decides where and when an engine is saved, and from which checkpoint it continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.atomic_folders import DOCUMENT, Found, place_of
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.loader import CheckpointLoader
from shardwise.checkpoint.saver import CheckpointSaver
from shardwise.checkpoint.tracking import Tracking
from shardwise.errors import BrokenCheckpoint, CheckpointNotWritten
from shardwise.states.step_hooks import Returns


@dataclass(frozen=True)
class _SaveOptions:
    """How many checkpoints the user keeps, and the largest file in bytes."""

    keep: int | None = None
    split: int = 5 * 10**9


class Checkpoints:
    """The checkpoints of an engine, and the folder for the save when the run is asked to end.

    Args:
        reseed: Seeds the random generators for the step that follows a load.
        returns_of: Makes the object that brings groups of ranks back, None if none can end.

    Attributes: `saver` and `loader`, which write and read the files.
    """

    def __init__(
        self,
        state: EngineView,
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
        """Save, but do not leave if this process is asked to end."""
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
        self._continue_in(home, _SaveOptions(), is_saved=loaded is not None)
        if not self._state.spec.settings.quiet:
            self._world.print(f"shardwise: {line}")
        return self._state.steps

    def resume_from(self, home: Path, path: Path | None) -> None:
        """Continue from `path`, a checkpoint in `home`; with None, from the present state.
        Collective."""
        self.saver.claim(home)
        if path is not None:
            self.load(path)
        self._continue_in(home, _SaveOptions(), is_saved=path is not None)

    def _continue_in(self, home: Path, options: _SaveOptions, *, is_saved: bool) -> None:
        """Save to `home` from now on, where the state of now may be saved; tell the launcher that a
        restart continues from there."""
        self._resumes, self._saved = True, self._moment() if is_saved else None
        self._settle_in(home, options)
        self._world.progress.resumes()
        if self._returns is not None:
            self._returns.are_expected()

    # -- for a group of ranks that comes back -----------------------------------------------

    def leave_folder(self) -> None:
        """Give up the claim to the folder, since another rank leads from now on."""
        self.saver.leave()

    def save_for_return(self) -> dict[str, Any] | None:
        """Save for a group of ranks that comes back, in the folder that the user saves to.

        Returns JSON for `come_back`; None if the save failed or the user has named no folder.
        Collective.
        """
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
        """Continue from the save of the other groups, on the same folder. Collective over this
        group."""
        self.load(Path(about["path"]))
        options = _SaveOptions(about["keep"], about["split"])
        self._continue_in(Path(about["home"]), options, is_saved=True)
        self._world.draws.is_one = about["draws_are_one"]  # the stream is theirs

    def _pass_over(self, why: object) -> None:
        self._world.print(f"shardwise: passed over: {why}", file=sys.stderr)

    def _load_newest(self, paths: Sequence[Path]) -> Path | None:
        """Load the first of `paths` that is whole and return it; None if `paths` is empty."""
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
        """Return what identifies the state of now.

        A step of another engine of this process counts: it changes tracked objects and random
        numbers.
        """
        return self._state.steps, self._world.steps_made

    def _settle_in(self, home: Path, options: _SaveOptions) -> None:
        """Use `home` for the save when the run is asked to end, and watch for that from now on."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._save_at_the_end)
        self._home, self._options = home, options

    def _is_between_steps(self) -> bool:
        return self._state.is_between_steps

    def _save_at_the_end(self) -> Path:
        """Save into the folder of the user, unless the state of now is saved there."""
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
        """Wait for a save in the background, and release the folders."""
        try:
            self.saver.wait()
        finally:
            self.saver.leave()
            self._world.preemption.leave_out(self._save_at_the_end)


def _refuse_beside(home: Path, lost: Sequence[Found]) -> None:
    """Raise BrokenCheckpoint if a run would start from scratch next to incomplete checkpoints."""
    if lost:
        newest = lost[0].path
        more = f", as {len(lost) - 1} before it" if lost[1:] else ""
        raise BrokenCheckpoint(
            f"{newest} has the name of a checkpoint and no {DOCUMENT}{more}, and {home} has no "
            "complete one: this run would begin anew beside it. Bring the file back, or load the "
            f'weights alone (engine.load("{newest}", model_only=True)) and save elsewhere; to '
            "begin anew, move it away."
        )
