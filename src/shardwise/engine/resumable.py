"""The part of an engine that saves it, loads it, and lets it go on where it was."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folders import DOCUMENT, Found, place_of
from shardwise.config import Settings
from shardwise.engine.checkpoints import Checkpoints
from shardwise.errors import BrokenCheckpoint, CheckpointNotWritten
from shardwise.world import World


@dataclass(frozen=True)
class _Habit:
    """How the user saves."""

    keep: int | None = None
    split: int = 5 * 10**9


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


class Resumable(ABC):
    """What can be saved between two steps; an engine is one."""

    world: World
    settings: Settings
    steps: int
    _checkpoints: Checkpoints
    _home: Path | None = None
    """Where to save when asked to end: where it resumed from, else where it was saved last."""
    _habit: _Habit
    _resumes = False
    _saved: tuple[int, int] | None = None
    """The moment that is saved there."""
    _agreed_here = False
    _tried: frozenset[Path] = frozenset()
    """Where a trial would have saved; what it loads from there it has."""

    @abstractmethod
    def _is_between_steps(self) -> bool:
        """Whether it can be saved now."""

    @abstractmethod
    def _refuse_in_step(self, call: str) -> None:
        """Raise UsageError unless `call` comes between two steps."""

    @abstractmethod
    def _reseed(self) -> None:
        """Set the randomness of the next step."""

    def track(self, **objects: Any) -> None:
        """Save and load `objects` with the engine, each under its name: engine.track(
        loader=loader, scheduler=scheduler). Anything with `state_dict` and `load_state_dict`; a
        generator of torch, numpy or random; a dict, list, deque or tensor, which loading fills in
        place. Its state is alike on all ranks, and rank 0's is saved. Raises UsageError for
        anything else.
        """
        self._checkpoints.tracking.add(objects)

    def save(
        self,
        folder: str | PathLike[str],
        keep: int | None = None,
        *,
        background: bool = False,
        split_gb: float = 5.0,
    ) -> Path | None:
        """Write a checkpoint to `folder`/step-N, N being `steps`, and return that path.

        It is there whole or not at all; docs/checkpoint_format.md has its form. Of the checkpoints
        up to this one the newest `keep` stay (default: all). Files longer than `split_gb` (10^9
        bytes) are split. With `background` this returns when the state is copied (what rests on a
        disk passes through memory then); what goes wrong later is raised by the next `step`,
        `save`, `load` or `close`. Collective.

        Raises CheckpointNotWritten, on all ranks alike, where no disk takes it (with
        `--save-failure continue` that is said, and this returns None); UsageError between backward
        and step or inside `ema()`. With `--trial` nothing is written.
        """
        path = self._save(folder, keep, background=background, split_gb=split_gb)
        self.world.preemption.leave_between_steps()
        return path

    def _save(
        self,
        folder: str | PathLike[str],
        keep: int | None,
        *,
        background: bool = False,
        split_gb: float = 5.0,
    ) -> Path | None:
        """The same, and go on even where this process is asked to end."""
        self._refuse_in_step("engine.save")
        home, split = Path(folder), int(split_gb * 1e9)
        if self.world.settings.trial:
            self._tried |= {place_of(home, self.steps)}
            return place_of(home, self.steps)
        path = None
        try:
            path = self._checkpoints.save(
                home, self.steps, keep=keep, background=background, split=split
            )
        except CheckpointNotWritten as error:
            self._checkpoints.tolerate(error)
        if self._home in (None, home) or not self._resumes:
            self._settle_in(home, _Habit(keep, split))
            self._saved = None if background or path is None else self._moment()
        return path

    def resume(self, folder: str | PathLike[str]) -> int:
        """Go on from the newest complete checkpoint in `folder`; where there is none, from here.

        At the same size, row and settings what follows has the bits of a run that was never
        interrupted: each rank draws for itself, so make models and splits of data before. One that
        was damaged later is passed over, with a line that says so. Returns
        `steps`. Collective. With `--trial` nothing is loaded.

        Raises as `load` does, FolderInUse where another job saves there, and BrokenCheckpoint
        rather than begin beside what only lacks its checkpoint.json.
        """
        if self.world.settings.trial:
            return self.steps
        home = Path(folder)
        self._checkpoints.claim(home)
        complete, lost = self._checkpoints.found(home)
        loaded = self._load_newest([found.path for found in complete])
        if loaded is None:
            _refuse_beside(home, lost)
            line = f"no checkpoint in {folder} yet: starting at step {self.steps}"
        else:
            for found in lost:
                if found.step > self.steps:
                    self._pass_over(f"{found.path} has no {DOCUMENT}, so it is not complete.")
            line = f"resumed from {loaded}, at step {self.steps}"
        self._resumes, self._saved = True, None if loaded is None else self._moment()
        self._settle_in(home, _Habit())
        self.world.telling.resumes()
        if not self.settings.quiet:
            self.world.print(f"shardwise: {line}")
        return self.steps

    def _resume_from(self, home: Path, path: Path | None) -> None:
        """Go on from `path`, a checkpoint in `home`, or where it is None from here. Collective."""
        self._checkpoints.claim(home)
        if path is not None:
            self.load(path)
        self._resumes, self._saved = True, None if path is None else self._moment()
        self._settle_in(home, _Habit())
        self.world.telling.resumes()

    def _pass_over(self, why: object) -> None:
        self.world.print(f"shardwise: passed over: {why}", file=sys.stderr)

    def _load_newest(self, paths: Sequence[Path]) -> Path | None:
        """Load the first of `paths` that is whole, and return it; None where there are none."""
        broken: list[BrokenCheckpoint] = []
        for path in paths:
            try:
                self.load(path)
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            for each in broken:
                self._pass_over(each)
            return path
        if broken:
            older = f" None of the {len(broken) - 1} before it is whole." if broken[1:] else ""
            raise BrokenCheckpoint(f"{broken[0]}{older}") from broken[0]
        return None

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Load `path`: a checkpoint's folder (`folder`/step-N), whatever row and size wrote it; or
        the tensors of a model from .safetensors, .pt, or a folder as Hugging Face writes them.

        `model_only` leaves optimizers, steps and what is tracked as they are, as a file of another
        library does. Without `strict` names that are missing or unexpected are passed over.
        Pickles are read without running code. Collective.

        Raises CheckpointError where there is nothing to load, BrokenCheckpoint for files that are
        not whole, CheckpointMismatch for another model's.
        """
        self._refuse_in_step("engine.load")
        if Path(path) in self._tried:
            return
        steps = self._checkpoints.load(Path(path), strict=strict, model_only=model_only)
        if steps is not None:
            self.steps = steps
            self._reseed()

    def leave_folders(self) -> None:
        """Let other jobs save where this engine has: for those who save into a folder of its own
        each time. The next save into one of them claims it again."""
        self._checkpoints.leave()

    # -- asked to end -----------------------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        """What a checkpoint is of: with a step of another engine of this process, what is tracked
        and drawn has moved on too."""
        return self.steps, self.world.steps_made

    def _settle_in(self, home: Path, habit: _Habit) -> None:
        """Save to `home`, as the user does, when asked to end; the first time, begin to listen."""
        if self._home is None:
            self.world.preemption.heed(self._is_between_steps, self._save_at_the_end)
        self._home, self._habit = home, habit

    def _agree_to_end(self, asked: int) -> None:
        """All ranks know by now that a signal asks them to end."""
        self.world.preemption.agreed = asked
        self._agreed_here = True
        self._checkpoints.mark_boundary()

    def _leave_if_asked(self) -> None:
        """In a loop that no Loader feeds: the forward that came before counts for nothing. With a
        Loader the body of the loop is finished first: other engines may step in it too."""
        if self._agreed_here and not self.world.feed.in_loop():
            self.world.preemption.leave_between_steps()

    def _save_at_the_end(self) -> Path:
        """Save to where the user does, unless this moment is saved there."""
        assert self._home is not None
        if self._saved == self._moment():
            return place_of(self._home, self.steps)
        self._checkpoints.go_back_to_boundary()
        return self._checkpoints.save(
            self._home,
            self.steps,
            keep=self._habit.keep,
            background=False,
            split=self._habit.split,
        )
