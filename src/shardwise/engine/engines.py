"""Engines saves and resumes several engines of one script (GANs) together.

checkpoints/
├── generator/step-100/           each engine's checkpoint, as any other
├── discriminator/step-500/
└── together-7.json               written last: which of them belong to each other, by the CRC-32
                                  of each one's checkpoint.json
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
    """Engines by name, with one folder of checkpoints:
    `both = sw.Engines(generator=g_engine, discriminator=d_engine)`.

    They step as often as each likes. What is tracked (`engine.track`) is saved with its engine.
    Attributes: `saves`, how often they were saved in the run and before.
    """

    def __init__(self, **engines: Engine) -> None:
        for name, engine in engines.items():
            if not isinstance(engine, Engine) or not is_plain_name(name):
                raise UsageError(f"sw.Engines({name}=...) takes an engine by a plain name.")
        if not engines:
            raise UsageError("sw.Engines(...) takes engines by name: sw.Engines(generator=engine).")
        self._engines = engines
        self._world = next(iter(engines.values())).world
        self._home: Path | None = None
        self._resumes = False
        self._joined: tuple[int, Path] | None = None
        """What was joined last at home: after how many steps, and by which file."""
        self.saves = 0

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> Path | None:
        """Save every engine in `folder`, and return the path of the file that joins them.

        Until that is there the save before is the newest. Of what was saved so the newest `keep`
        stay (default: all), and one more of each engine. Collective. Raises as `Engine.save` does;
        with `--trial` nothing is written.
        """
        home = Path(folder)
        kept = None if keep is None else keep + 1
        paths = {
            name: each._checkpoints.save_and_stay(home / name, kept)
            for name, each in self._engines.items()
        }
        made = None
        if not self._world.settings.trial and None not in paths.values():
            made = self._join_or_tell(home)
        if made is not None:
            if keep is not None:
                self._prune(home, keep)
            if self._home in (None, home) or not self._resumes:
                self._settle_in(home)
                self._joined = self._world.steps_made, made
        self._world.preemption.leave_between_steps()
        return made

    def resume(self, folder: str | PathLike[str]) -> int:
        """Go on from what was saved together last in `folder`; where nothing was, from here.

        Returns `saves`. Collective. Raises as `Engine.resume` does, and BrokenCheckpoint where
        engines were saved there, but never together.
        """
        home = Path(folder)
        if self._world.settings.trial:
            return self.saves
        mine = _found(home, list(self._engines)) if self._world.is_main else _NOTHING
        found = self._world.broadcast_object(mine)
        agree(self._world.collectives, found.wrong, BrokenCheckpoint)
        number, fields = found.number, found.fields
        for name, engine in self._engines.items():
            engine._checkpoints.resume_from(home / name, found.paths.get(name))
        last = self._engines.get(fields.get("last", ""))
        if last is not None:
            self._world.stepped_last = last._state.number
            last._randoms.reseed()  # what is drawn next goes by the engine whose step came last
        self.saves, self._resumes = number, True
        self._settle_in(home)
        if fields:
            self._joined = self._world.steps_made, home / f"together-{number}.json"
        if not self._world.settings.quiet:
            line = f"resumed from {home / f'together-{number}.json'}" if fields else "starting anew"
            self._world.print(f"shardwise: {line}")
        return number

    def _settle_in(self, home: Path) -> None:
        """Join them there too when asked to end, after each has saved."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._join_at_the_end)
        if home != self._home:
            self._home, self._joined = home, None

    def _is_between_steps(self) -> bool:
        return True  # the engines tell for themselves

    def _join_at_the_end(self) -> Path:
        """Join what the engines have saved, unless this moment is joined there."""
        assert self._home is not None
        if self._joined is not None and self._joined[0] == self._world.steps_made:
            return self._joined[1]
        return self._join(self._home)

    def _join_or_tell(self, home: Path) -> Path | None:
        """The same for a save on the way: None where training goes on without."""
        try:
            return self._join(home)
        except CheckpointNotWritten as error:
            next(iter(self._engines.values()))._checkpoints.saver.tolerate(error)
            return None

    def _join(self, home: Path) -> Path:
        """Write which checkpoints in `home` belong to each other. Collective."""
        steps = {name: engine.steps for name, engine in self._engines.items()}
        named = {engine._state.number: name for name, engine in self._engines.items()}
        fields = {"steps": steps, "last": named.get(self._world.stepped_last, "")}
        path, failure = home / f"together-{self.saves + 1}.json", None
        if self._world.is_main:
            try:
                sums = {name: _sum(place_of(home / name, step)) for name, step in steps.items()}
                data = json.dumps(fields | {"checksums": sums}, indent=1).encode()
                replace_file(path, data)
            except OSError as error:
                failure = f"{path} was not written: {error.strerror or error}."
        agree(self._world.collectives, failure, CheckpointNotWritten)
        self.saves += 1
        return path

    def _prune(self, home: Path, keep: int) -> None:
        if self._world.is_main:
            for _, path in _marks(home)[keep:]:
                with suppress(OSError):  # it only names what is no longer there
                    path.unlink()


def _sum(checkpoint: Path) -> str:
    """What tells a checkpoint from another of its step: the sum of its document has all others."""
    return crc_of((checkpoint / DOCUMENT).read_bytes())


def _marks(home: Path) -> list[tuple[int, Path]]:
    """The files that join engines, newest first."""
    paths = home.iterdir() if home.is_dir() else ()
    found = [(int(named[1]), path) for path in paths if (named := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class _Found:
    """A save of all engines: its number, what it says, and each engine's checkpoint; or in words
    what is wrong."""

    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    wrong: str | None = None


_NOTHING = _Found()


def _found(home: Path, names: list[str]) -> _Found:
    """The newest save of all of `names` that is whole: none of its checkpoints has been replaced by
    another of the same step, in a save that was killed before it joined them."""
    there = {name: {each.step: each.path for each in complete(home / name)} for name in names}
    marks = _marks(home)
    for number, path in marks:
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            paths = {name: there[name][fields["steps"][name]] for name in names}
            if all(_sum(paths[name]) == fields["checksums"][name] for name in names):
                return _Found(number, fields, paths)
    if marks or any(there.values()):
        who = ", ".join(name for name in names if there[name]) or "others"
        return _Found(
            wrong=f"{home} has checkpoints of {who}, and none of "
            f"{' and '.join(names)} together that is whole. Load each with engine.load, or save "
            "elsewhere."
        )
    return _NOTHING
