"""Several engines of one script (GANs), saved and resumed together.

checkpoints/
├── generator/step-100/           a checkpoint of each engine, like any other
├── discriminator/step-500/
└── together-7.json               written last: the checkpoints that belong together, each with the
                                  CRC-32 of its checkpoint.json
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

    Each engine may step as often as it likes. Objects tracked with `engine.track` are saved with
    their engine.

    Args:
        **engines: The engines by name; each gets a subfolder of that name.

    Attributes:
        saves: Number of saves, including those before a resume.

    Raises:
        UsageError: There is no engine, an argument is no engine, or a name cannot name a folder.

    Example:
        both = sw.Engines(generator=g_engine, discriminator=d_engine)
        both.resume("checkpoints")
        ...
        both.save("checkpoints", keep=3)
    """

    def __init__(self, **engines: Engine) -> None:
        for name, engine in engines.items():
            if not isinstance(engine, Engine) or not is_plain_name(name):
                raise UsageError(
                    f"sw.Engines({name}=...) takes an engine, under a name that can name a folder "
                    "(without / and NUL)."
                )
        if not engines:
            raise UsageError("sw.Engines() takes engines by name: sw.Engines(generator=engine).")
        self._engines = engines
        self._world = next(iter(engines.values())).world
        self._home: Path | None = None
        self._resumes = False
        self._joined: tuple[int, Path] | None = None
        """The last save in `_home`: the number of steps of this process at that time, and its file.
        """
        self.saves = 0

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> Path | None:
        """Save every engine in `folder`, then write the file that joins the checkpoints.

        A save is valid only if that file exists. With `--trial` nothing is written. Collective.

        Args:
            folder: Folder of the run's checkpoints.
            keep: Keep the newest `keep` saves, and one more checkpoint of each engine. Default:
                all.

        Returns:
            The path of the file that joins the checkpoints; None if it failed and `--save-failure
            continue` is set.

        Raises:
            CheckpointNotWritten: No disk accepts the checkpoints.
            UsageError: As for `Engine.save`.
        """
        home = Path(folder)
        # One more, because the checkpoints of the previous save must outlive a failure in this one.
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
                # Raises, or with --save-failure continue prints a line.
                next(iter(self._engines.values()))._checkpoints.saver.tolerate(error)
        if joined is not None:
            if keep is not None and self._world.is_main:
                for _, path in _marks(home)[keep:]:
                    with suppress(OSError):  # its checkpoints are gone, so it is only clutter
                        path.unlink()
            # After a resume from one folder, a save into another is a copy, and signals still save
            # at home.
            if self._home in (None, home) or not self._resumes:
                self._settle_in(home)
                self._joined = self._world.steps_made, joined
        self._world.preemption.leave_between_steps()
        return joined

    def resume(self, folder: str | PathLike[str]) -> int:
        """Load the newest save in `folder`, if there is one. Collective.

        Returns:
            `saves`, the number of saves.

        Raises:
            BrokenCheckpoint: Engines were saved there, but never together.
            CheckpointMismatch: As for `Engine.resume`, like all its errors.
        """
        home = Path(folder)
        if self._world.settings.trial:
            return self.saves
        # Only the main rank looks: another host might see a shared folder at another moment.
        mine = _find_newest(home, list(self._engines)) if self._world.is_main else _NOTHING
        found = self._world.broadcast_object(mine)
        agree(self._world.collectives, found.wrong, BrokenCheckpoint)
        number, fields = found.number, found.fields
        for name, engine in self._engines.items():
            engine._checkpoints.resume_from(home / name, found.paths.get(name))
        last = self._engines.get(fields.get("last", ""))
        if last is not None:
            self._world.last_stepped_engine = last._state.number
            last._randoms.reseed()  # as after a step of the engine that stepped last
        self.saves, self._resumes = number, True
        self._settle_in(home)
        if fields:
            self._joined = self._world.steps_made, home / f"together-{number}.json"
        if not self._world.settings.quiet:
            line = f"resumed from {home / f'together-{number}.json'}" if fields else "starting anew"
            self._world.print(f"shardwise: {line}")
        return number

    def _settle_in(self, home: Path) -> None:
        """Join the checkpoints in `home` also when a signal ends the run, after all saves."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._join_at_the_end)
        if home != self._home:
            self._home, self._joined = home, None

    def _is_between_steps(self) -> bool:
        return True  # each engine has its own check

    def _join_at_the_end(self) -> Path:
        """Join the last checkpoints of the engines, unless that is already done for this step."""
        assert self._home is not None
        if self._joined is not None and self._joined[0] == self._world.steps_made:
            return self._joined[1]
        return self._join(self._home)

    def _join(self, home: Path) -> Path:
        """Write the file that joins the engines' checkpoints in `home`. Collective."""
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
        return path


def _sum(checkpoint: Path) -> str:
    """Return the CRC-32 of a checkpoint's document, which contains the checksums of all files."""
    return crc_of((checkpoint / DOCUMENT).read_bytes())


def _marks(home: Path) -> list[tuple[int, Path]]:
    """Return numbers and paths of the files that join checkpoints, newest first."""
    paths = home.iterdir() if home.is_dir() else ()
    marks = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted(marks, reverse=True)


@dataclass(frozen=True)
class _Found:
    """A save of all engines: its number and content, and the checkpoint of each engine.

    `wrong` is the error message if there is no valid one.
    """

    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    wrong: str | None = None


_NOTHING = _Found()


def _find_newest(home: Path, names: list[str]) -> _Found:
    """Return the newest valid save of all engines `names`."""
    # The checksums matter: a later save, killed before it joined its checkpoints, may have replaced
    # a checkpoint by another one of the same step.
    there = {name: {each.step: each.path for each in complete(home / name)} for name in names}
    marks = _marks(home)
    for number, path in marks:
        # A damaged or incomplete save is skipped, and an older one is used.
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
