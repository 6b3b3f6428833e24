"""Saves and resumes several engines of a script together, such as those of a GAN.

checkpoints/
├── generator/step-100/           a checkpoint of each engine, like any other
├── discriminator/step-500/
└── together-7.json               written last: lists the checkpoints that belong together, with
                                  the CRC-32 of each one's checkpoint.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.agreement import agree
from shardwise.checkpoint.atomic_folders import DOCUMENT, complete, place_of
from shardwise.checkpoint.document import crc_of
from shardwise.checkpoint.file_system import replace_file
from shardwise.checkpoint.schema import is_plain_name
from shardwise.engine.engine import Engine
from shardwise.errors import BrokenCheckpoint, CheckpointNotWritten, UsageError

_NAME = re.compile(r"together-(\d+)\.json")


class Engines:
    """Several engines that are saved and resumed together, in one folder.

    The engines may take different numbers of steps. To save a Loader or another object, pass it
    to `engine.track` of one of the engines.

    Args:
        **engines: The engines by name. Each saves to a subfolder with its name.

    Attributes:
        saves: Number of saves, including those before a resume.

    Raises:
        UsageError: No engine was passed, an argument is not an engine, or a name is not valid as a
            folder name.

    Example:
        g_engine.track(loader=loader)
        both = sw.Engines(generator=g_engine, discriminator=d_engine)
        both.resume("checkpoints")
        ...
        both.save("checkpoints", keep=3)
    """

    def __init__(self, **engines: Engine) -> None:
        for name, engine in engines.items():
            if not isinstance(engine, Engine) or not is_plain_name(name):
                raise UsageError(
                    f"sw.Engines({name}=...) takes an engine, and its name must be a valid folder "
                    "name (without / and NUL)."
                )
        if not engines:
            raise UsageError("sw.Engines() takes engines by name: sw.Engines(generator=engine).")
        self._engines = engines
        self._world = next(iter(engines.values())).world
        self._world.progress.parts |= {engine._state.number for engine in engines.values()}
        self._home: Path | None = None
        self._resumes = False
        self._joined: tuple[int, Path] | None = None
        """The last save in `_home`: this process's number of steps then, and the file's path."""
        self.saves = 0

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> Path | None:
        """Save every engine in `folder`, then write a file that lists their checkpoints.

        A save is valid only if that file exists. With `--trial` nothing is written. Collective.

        Args:
            folder: Folder of the run's checkpoints.
            keep: Number of saves to keep. One more checkpoint is kept per engine. Default: all.

        Returns:
            The path of the file that lists the checkpoints, or None if the save failed and
            `--save-failure continue` is set.

        Raises:
            CheckpointNotWritten: No disk accepts the checkpoints.
            UsageError: As for `Engine.save`.
        """
        home = Path(folder)
        # Keep one more: the previous save's checkpoints must survive a failure in this save.
        kept = None if keep is None else keep + 1
        paths = {
            name: each._checkpoints.save_without_leaving(home / name, kept)
            for name, each in self._engines.items()
        }
        joined = None
        if not self._world.settings.trial and None not in paths.values():
            try:
                joined = self._join(home)
            except CheckpointNotWritten as error:
                # Raises, or only prints a message with --save-failure continue.
                next(iter(self._engines.values()))._checkpoints.saver.tolerate(error)
        if joined is not None:
            if keep is not None and self._world.is_main:
                for _, path in _marks(home)[keep:]:
                    # Ignore a file that remains: without its checkpoints it is harmless.
                    with suppress(OSError):
                        path.unlink()
            # If the run was resumed from another folder, treat this save as a copy: a save on a
            # signal still goes to the original folder.
            if self._home in (None, home) or not self._resumes:
                self._settle_in(home)
                self._joined = self._world.steps_made, joined
        self._world.preemption.leave_between_steps()
        return joined

    def resume(self, folder: str | PathLike[str]) -> int:
        """Load the newest save in `folder`, if there is one. Collective.

        Args:
            folder: Folder that was passed to `save`.

        Returns:
            `saves`, the number of saves so far; 0 if there was nothing to load.

        Raises:
            BrokenCheckpoint: `folder` has checkpoints of the engines, but no complete save of all
                of them.
            CheckpointMismatch: As for `Engine.resume`, which may raise other errors too.
        """
        home = Path(folder)
        if self._world.settings.trial:
            return self.saves
        # Only the main rank lists the folder, because another host might see a different state of a
        # shared file system.
        mine = _find_newest(home, list(self._engines)) if self._world.is_main else _NOTHING
        found = self._world.broadcast_object(mine)
        agree(self._world.collectives, found.wrong, BrokenCheckpoint)
        number, fields = found.number, found.fields
        for name, engine in self._engines.items():
            engine._checkpoints.resume_from(home / name, found.paths.get(name))
        last = self._engines.get(fields.get("last", ""))
        if last is not None:
            self._world.last_stepped_engine = last._state.number
            last._randoms.reseed()  # same state as after that engine's step
        self.saves, self._resumes = number, True
        self._settle_in(home)
        if fields:
            self._joined = self._world.steps_made, home / f"together-{number}.json"
            self._world.progress.used(self._joined[1])
        if not self._world.settings.quiet:
            line = (
                f"resumed from {home / f'together-{number}.json'}"
                if fields
                else "no checkpoint to resume: starting at step 0"
            )
            self._world.print(f"shardwise: {line}")
        return number

    def _settle_in(self, home: Path) -> None:
        """Use folder `home` for saves that a signal triggers, too."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._join_at_the_end)
        if home != self._home:
            self._home, self._joined = home, None

    def _is_between_steps(self) -> bool:
        return True  # each engine has its own check

    def _join_at_the_end(self) -> Path:
        """List the engines' last checkpoints in a file, unless a file already lists this step's.

        Returns the path of the file.
        """
        assert self._home is not None
        if self._joined is not None and self._joined[0] == self._world.steps_made:
            return self._joined[1]
        return self._join(self._home)

    def _join(self, home: Path) -> Path:
        """Write the file in `home` that lists the engines' current checkpoints. Collective."""
        # The engines' steps differ, so the file records each, and which engine stepped last.
        steps = {name: engine.steps for name, engine in self._engines.items()}
        named = {engine._state.number: name for name, engine in self._engines.items()}
        fields = {"steps": steps, "last": named.get(self._world.last_stepped_engine, "")}
        path, failure = home / f"together-{self.saves + 1}.json", None
        if self._world.is_main:
            try:
                sums = {name: _sum(place_of(home / name, step)) for name, step in steps.items()}
                data = json.dumps(fields | {"checksums": sums}, indent=1).encode()
                replace_file(path, data)
            except OSError as error:
                failure = f"{path} was not written: {error.strerror or error}."
        # All ranks raise if the main rank could not write.
        agree(self._world.collectives, failure, CheckpointNotWritten)
        self.saves += 1
        self._world.progress.used(path)
        return path


def _sum(checkpoint: Path) -> str:
    """Return the CRC-32 of a checkpoint's checkpoint.json, which contains its files' checksums."""
    return crc_of((checkpoint / DOCUMENT).read_bytes())


def _marks(home: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of each `together-*.json` file in `home`, newest first."""
    paths = home.iterdir() if home.is_dir() else ()
    marks = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted(marks, reverse=True)


@dataclass(frozen=True)
class _Found:
    """A save of all engines: its number, its content, and each engine's checkpoint.

    `wrong` is the error message if there is no valid save.
    """

    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    wrong: str | None = None


_NOTHING = _Found()


def _find_newest(home: Path, names: list[str]) -> _Found:
    """Return the newest valid save that contains all engines in `names`."""
    # Compare checksums, because a later save that was killed before it wrote its own file may have
    # replaced a checkpoint with another one of the same step.
    there = {name: {each.step: each.path for each in complete(home / name)} for name in names}
    marks = _marks(home)
    for number, path in marks:
        # Skip a damaged or incomplete save, and try the next older one.
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            paths = {name: there[name][fields["steps"][name]] for name in names}
            if all(_sum(paths[name]) == fields["checksums"][name] for name in names):
                return _Found(number, fields, paths)
    if marks or any(there.values()):
        saved = ", ".join(name for name in names if there[name]) or "others"
        return _Found(
            wrong=f"{home} has checkpoints of {saved}, but no complete save of "
            f"{' and '.join(names)} together. Load each with engine.load, or save into another "
            "folder."
        )
    return _NOTHING
