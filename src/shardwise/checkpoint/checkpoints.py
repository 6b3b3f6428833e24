"""Decides where and when an engine saves checkpoints, and which one it resumes from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.atomic_folders import DOCUMENT, StepFolder, place_of
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.loader import CheckpointLoader
from shardwise.checkpoint.publishing import Publisher
from shardwise.checkpoint.saver import CheckpointSaver
from shardwise.checkpoint.tracking import Tracking
from shardwise.errors import BrokenCheckpoint, CheckpointNotWritten
from shardwise.states.step_hooks import Returns


@dataclass(frozen=True)
class _SaveOptions:
    """Options of the user's last save, for later saves into the same folder."""

    # Number of checkpoints to keep (None: all), and maximum file size in bytes.
    keep: int | None = None
    split: int = 5 * 10**9


class Checkpoints:
    """Saves and loads an engine's checkpoints, and makes the final save if the run is preempted.

    Args:
        reseed: Called after loading to seed the random generators for the current step.
        returns_of: Creates the object that lets groups of ranks rejoin the run. Returns None if
            groups never leave.

    Attributes:
        saver: Writes the files.
        loader: Reads the files.
        publisher: Publishes weights for inference.
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
        self.publisher = Publisher(state, self.saver.claim)
        # Folder for the final save: the one resumed from, otherwise the one last saved to.
        self._folder: Path | None = None
        self._options = _SaveOptions()
        self._resumes = False
        # `_moment()` of the last complete save in `_folder`, or None.
        self._saved: tuple[int, int] | None = None
        self._trial_paths: frozenset[Path] = frozenset()  # paths of saves skipped in a trial
        self._returns = returns_of(self)

    @property
    def folder(self) -> Path | None:
        """Folder of the final save, or None before the first save or resume."""
        return self._folder

    def track(self, objects: Mapping[str, Any]) -> None:
        """See Engine.track."""
        self._tracked.add(objects)

    @property
    def tracked(self) -> Tracking:
        """The objects that the engine tracks."""
        return self._tracked

    # -- saving -----------------------------------------------------------------------------

    def save(
        self, folder: str | PathLike[str], keep: int | None, *, background: bool, split_gb: float
    ) -> Path | None:
        """See Engine.save."""
        self._state.refuse_on_waiting_spare("engine.save")
        path = self.save_without_leaving(folder, keep, background=background, split_gb=split_gb)
        self._world.preemption.leave_between_steps()
        return path

    def save_without_leaving(
        self,
        target: str | PathLike[str],
        keep: int | None,
        *,
        background: bool = False,
        split_gb: float = 5.0,
    ) -> Path | None:
        """Save, and do not exit afterwards even if this process has been asked to shut down.

        Returns the checkpoint's path, or None if a tolerated disk error occurred.
        """
        self._state.refuse_in_step("engine.save")
        target, split = Path(target), int(split_gb * 1e9)
        if self._world.settings.trial:
            path = place_of(target, self._state.steps)
            self._trial_paths |= {path}
            return path
        saved = None
        try:
            saved = self.saver.save(target, keep=keep, background=background, split=split)
        except CheckpointNotWritten as error:
            self.saver.tolerate(error)
        # A run that resumed from a folder may also save elsewhere (say, its best checkpoint). Its
        # final save must still go to the folder that the next start resumes from.
        if self._folder in (None, target) or not self._resumes:
            self._use_folder(target, _SaveOptions(keep, split))
            self._saved = None if background or saved is None else self._moment()
        return saved

    # -- resuming and loading ---------------------------------------------------------------

    def resume(self, folder: Path) -> int:
        """See Engine.resume."""
        if self._world.settings.trial:
            return self._state.steps
        # This group rejoins a run that continued without it, so the other groups' state is newer
        # than any checkpoint.
        if self._returns is not None and self._returns.is_due:
            self._returns.come_back()
            return self._state.steps
        # Claim the folder first, because the previous start of this job may still be writing to it.
        self.saver.claim(folder)
        self.saver.wait()
        self.saver.end_removals(folder)
        complete, incomplete = self.loader.list_checkpoints(folder)
        loaded = self._load_newest([found.path for found in complete])
        if loaded is None:
            _refuse_fresh_start(folder, incomplete)
            line = f"no checkpoint in {folder}: starting at step {self._state.steps}"
        else:
            # Report only incomplete checkpoints that are newer than the loaded one. The others
            # would not have been used anyway.
            for found in incomplete:
                if found.step > self._state.steps:
                    self._report_skipped(f"{found.path} is incomplete: it has no {DOCUMENT}.")
            line = f"resumed from {loaded}, at step {self._state.steps}"
        self._continue_in(folder, _SaveOptions(), is_saved=loaded is not None)
        if not self._state.spec.settings.quiet:
            self._world.print(f"shardwise: {line}")
        return self._state.steps

    def resume_from(self, folder: Path, path: Path | None) -> None:
        """Resume from the checkpoint `path` in `folder`. Collective.

        If `path` is None, continue from the current state.
        """
        self.saver.claim(folder)
        if path is not None:
            self.load(path)
        self._continue_in(folder, _SaveOptions(), is_saved=path is not None)

    def _continue_in(self, folder: Path, options: _SaveOptions, *, is_saved: bool) -> None:
        """Use `folder` for the final save, and tell the launcher that a restart can resume."""
        self._resumes, self._saved = True, self._moment() if is_saved else None
        self.saver.reports_untracked = is_saved
        self._use_folder(folder, options)
        self._world.progress.resumes()
        if self._returns is not None:
            self._returns.are_expected()

    # -- for a group of ranks that rejoins --------------------------------------------------

    def leave_folder(self) -> None:
        """Release the folder's lock, because a different rank is becoming the main rank."""
        self.saver.leave()

    def save_for_return(self) -> dict[str, Any] | None:
        """Save to the user's folder, so that a group of ranks can rejoin from there. Collective.

        Returns:
            A JSON-serialisable record for `come_back`. None if the save failed or the user has not
            named a folder.
        """
        folder, options = self._folder, self._options
        if folder is None:
            return None
        path: Path | None = place_of(folder, self._state.steps)
        if self._saved != self._moment():
            # The rejoining ranks will repeat the random draws made since the step boundary.
            with self.saver.at_boundary():
                path = self.save_without_leaving(folder, options.keep, split_gb=options.split / 1e9)
        if path is None:
            return None
        record = {"home": str(folder), "path": str(path.resolve())}
        options_now = {"keep": options.keep, "split": options.split}
        return record | options_now | {"draws_are_one": self._world.draws.is_one}

    def come_back(self, record: Mapping[str, Any]) -> None:
        """Resume from the checkpoint of the groups that stayed, and save to their folder.

        Collective in this group.

        Args:
            record: Value that `save_for_return` returned in the groups that stayed.
        """
        self.load(Path(record["path"]))
        options = _SaveOptions(record["keep"], record["split"])
        self._continue_in(Path(record["home"]), options, is_saved=True)
        # Draw from the same common random stream as the other groups.
        self._world.draws.is_one = record["draws_are_one"]

    def _report_skipped(self, why: object) -> None:
        self._world.print(f"shardwise: skipped a checkpoint: {why}", file=sys.stderr)

    def _load_newest(self, paths: Sequence[Path]) -> Path | None:
        """Load the first intact checkpoint in `paths` and return its path.

        Returns None if `paths` is empty. Raises BrokenCheckpoint if no checkpoint is intact.
        """
        broken: list[BrokenCheckpoint] = []
        for path in paths:
            try:
                self.load(path)
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            # Not earlier: if no checkpoint is intact, the error of the newest is raised instead.
            for damage in broken:
                self._report_skipped(damage)
            return path
        if broken:
            older = f" Nor is any of the {len(broken) - 1} before it intact." if broken[1:] else ""
            raise BrokenCheckpoint(f"{broken[0]}{older}") from broken[0]
        return None

    def load(self, path: Path, *, strict: bool = True, model_only: bool = False) -> None:
        """See Engine.load."""
        self._state.refuse_in_step("engine.load")
        # A trial does not write the files that it "saves", so it keeps its state.
        if path in self._trial_paths:
            return
        self.saver.wait()
        steps = self.loader.load(path, strict=strict, model_only=model_only)
        if steps is not None:
            self._state.continue_at(steps)
            self._reseed()

    # -- preemption -------------------------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        """Return this engine's step count and the step count of all engines in this process.

        The pair changes whenever the state to save changes. Other engines' steps matter because
        they change tracked objects and random streams.
        """
        return self._state.steps, self._world.steps_made

    def _use_folder(self, folder: Path, options: _SaveOptions) -> None:
        """Use `folder` for the final save, and start watching for requests to shut down."""
        if self._folder is None:
            self._world.preemption.heed(self._is_between_steps, self._save_at_the_end)
        self._folder, self._options = folder, options

    def _is_between_steps(self) -> bool:
        return self._state.is_between_steps

    def _save_at_the_end(self) -> Path:
        """Save into the user's folder unless the current state is already saved there."""
        assert self._folder is not None
        if self._saved == self._moment():
            return place_of(self._folder, self._state.steps)
        # A forward pass may have run since the last step, but its step will never be completed.
        self.saver.go_back_to_boundary()
        return self.saver.save(
            self._folder,
            keep=self._options.keep,
            background=False,
            split=self._options.split,
        )

    def close(self) -> None:
        """Wait for the background save, and release the folders."""
        try:
            self.saver.wait()
        finally:
            self.saver.leave()
            self._world.preemption.leave_out(self._save_at_the_end)


def _refuse_fresh_start(folder: Path, incomplete: Sequence[StepFolder]) -> None:
    """Raise BrokenCheckpoint if there are `incomplete` checkpoints.

    Called if there are no complete checkpoints, in which case the run would silently start from
    scratch.
    """
    if incomplete:
        newest = incomplete[0].path
        more = f" (nor do {len(incomplete) - 1} before it)" if incomplete[1:] else ""
        raise BrokenCheckpoint(
            f"{newest} is named like a checkpoint but has no {DOCUMENT}{more}, and {folder} has no "
            "complete checkpoint, so this run would start from scratch. Restore the file, or load "
            f'only the weights (engine.load("{newest}", model_only=True)) and save to another '
            f"folder. To start from scratch, move {newest} to another place."
        )
