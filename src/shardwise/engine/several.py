"""Several engines of one script (GANs), saved and resumed as one.

checkpoints/
├── generator/step-100/           each engine's checkpoint, as any other
├── discriminator/step-500/
└── together-7.json               written last: which of them belong to each other
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folders import complete, place_of, sync
from shardwise.checkpoint.schema import plain_name
from shardwise.engine.alike import agree
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
            if not isinstance(engine, Engine) or not plain_name(name):
                raise UsageError(f"sw.Engines({name}=...) takes an engine by a plain name.")
        if not engines:
            raise UsageError("sw.Engines(...) takes engines by name: sw.Engines(generator=engine).")
        self._engines = engines
        self._world = next(iter(engines.values())).world
        self._home: Path | None = None
        self.saves = 0

    def save(self, folder: str | PathLike[str], keep: int | None = None) -> Path | None:
        """Save every engine in `folder`, and return the path of the file that joins them.

        Until that is there the save before is the newest. Of what was saved so the newest `keep`
        stay (default: all), and one more of each engine. Collective. Raises as `Engine.save` does;
        with `--trial` nothing is written.
        """
        home = Path(folder)
        kept = None if keep is None else keep + 1
        paths = [engine.save(home / name, kept) for name, engine in self._engines.items()]
        if self._world.settings.trial or None in paths:
            return None
        self._settle_in(home)
        made = self._mark()
        if keep is not None:
            self._prune(keep)
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
            path = place_of(home / name, fields["steps"][name]) if fields else None
            engine._resume_from(home / name, path)
        last = self._engines.get(fields.get("last", ""))
        if last is not None:
            last._reseed()  # what is drawn next goes by the engine whose step came last
        self.saves = number
        self._settle_in(home)
        if not self._world.settings.quiet:
            line = f"resumed from {home / f'together-{number}.json'}" if fields else "starting anew"
            self._world.print(f"shardwise: {line}")
        return number

    def _settle_in(self, home: Path) -> None:
        """Join them there too when asked to end, after each has saved."""
        if self._home is None:
            self._world.preemption.heed(self._is_between_steps, self._mark)
        self._home = home

    def _is_between_steps(self) -> bool:
        return True  # the engines tell for themselves

    def _mark(self) -> Path:
        """Write which checkpoints belong to each other. Collective."""
        assert self._home is not None
        self.saves += 1
        steps = {name: engine.steps for name, engine in self._engines.items()}
        named = {engine._number: name for name, engine in self._engines.items()}
        fields = {"steps": steps, "last": named.get(self._world.stepped_last, "")}
        path, failure = self._home / f"together-{self.saves}.json", None
        if self._world.is_main:
            try:
                _write(path, fields)
            except OSError as error:
                failure = f"{path} was not written: {error.strerror or error}."
        agree(self._world.collectives, failure, CheckpointNotWritten)
        return path

    def _prune(self, keep: int) -> None:
        if self._world.is_main and self._home is not None:
            for _, path in _marks(self._home)[keep:]:
                with suppress(OSError):  # it only names what is no longer there
                    path.unlink()


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def _marks(home: Path) -> list[tuple[int, Path]]:
    """The files that join engines, newest first."""
    paths = home.iterdir() if home.is_dir() else ()
    found = [(int(named[1]), path) for path in paths if (named := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class _Found:
    """A save of all engines: its number, and what it says; or in words what is wrong."""

    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    wrong: str | None = None


_NOTHING = _Found()


def _found(home: Path, names: list[str]) -> _Found:
    """The newest save of all of `names` that is whole."""
    there = {name: {found.step for found in complete(home / name)} for name in names}
    marks = _marks(home)
    for number, path in marks:
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            if all(fields["steps"][name] in there[name] for name in names):
                return _Found(number, fields)
    if marks or any(there.values()):
        who = ", ".join(name for name in names if there[name]) or "others"
        return _Found(
            wrong=f"{home} has checkpoints of {who}, and none of "
            f"{' and '.join(names)} together that is whole. Load each with engine.load, or save "
            "elsewhere."
        )
    return _NOTHING
