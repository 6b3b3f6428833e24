"""Implements save_checkpoint and load_checkpoint: engine checkpoints under DeepSpeed's tags.

save_dir/
├── latest                        the tag of the newest save; written last
└── global_step100/               a tag
    ├── step-100/                 weights and optimizer state, as engine.save writes them
    └── client-100-5f0c2a91.pt    client_state, schedule and counters, readable without running code

The client file has a new name in every save. The step folder records that name, and is written
after the client file. A complete step folder therefore always has its client file, even if a later
save is killed.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.bridging.written_files import copied_state, on_main, write
from shardwise.checkpoint import document
from shardwise.checkpoint.atomic_folders import DOCUMENT, complete
from shardwise.checkpoint.deepspeed import as_checkpoint
from shardwise.deepspeed.configured import Configured
from shardwise.errors import (
    BadCall,
    BrokenCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    FailedAssertion,
    UsageError,
)

LATEST = "latest"
BESIDE = "schedules_of_deepspeed"
"""The entry of a checkpoint that records the name of its client file."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The parts of a checkpoint that will be loaded in addition to the weights.

    If `strict` is true, all parameter names must match.
    """

    strict: bool
    optimizer: bool
    scheduler: bool
    counts: bool


def save(
    engine: Configured,
    folder: str | PathLike[str],
    tag: str | None,
    client_state: dict[str, Any],
    *,
    save_latest: bool,
) -> bool:
    """Save a checkpoint; see DeepSpeedEngine.save_checkpoint."""
    world, inner = engine.world, engine._engine("save_checkpoint")
    if not folder:
        raise BadCall(f"save_checkpoint(save_dir={folder!r}) needs the name of a folder.")
    home = Path(folder)
    name = _tag_of(engine, tag)
    place = home / name
    client = world.broadcast_object(f"client-{inner.steps}-{secrets.token_hex(4)}.pt")

    def write_client() -> None:
        data = _client_file(engine, client_state)  # also in a trial, because it checks client_state
        if not world.settings.trial:
            write(place / client, data)

    # Write it before the step folder, which records its name. At whatever point a save is killed, a
    # complete step folder has its client file.
    on_main(world, place, write_client, in_trial=True)
    engine._parts.schedules_file.file = client
    try:
        path = inner.save(place)
    finally:
        # Reset it, because the engine's own saves have no client file.
        engine._parts.schedules_file.file = None
    inner.leave_folders()
    if path is None:
        return False
    on_main(world, place, lambda: _remove_others(place, path, client))
    if save_latest:  # last, so that it never refers to an incomplete tag
        on_main(world, home, lambda: write(home / LATEST, name.encode()))
    return True


def _tag_of(engine: Configured, tag: str | None) -> str:
    """Return rank 0's tag on all ranks.

    Raises UsageError if the tag is a path, and FailedAssertion if tags differ and the config's
    checkpoint.tag_validation is Fail.
    """
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    first = engine.world.broadcast_object(name)
    if not first or first in (".", "..") or os.sep in first:
        raise UsageError(
            f"save_checkpoint(tag={first!r}): a tag must be the name of a folder, not a path."
        )
    if engine.world.any(first != name) and engine._job.tag_validation != "ignore":
        words = f"save_checkpoint has the tag {first!r} on rank 0 and another one elsewhere"
        if engine._job.tag_validation == "fail":
            raise FailedAssertion(f"{words} (here: {name!r}): pass the same tag on all workers.")
        engine.world.say_once(f"{words}: all workers save under the tag of rank 0.")
    return first


def _client_file(engine: Configured, client_state: dict[str, Any]) -> bytes:
    """Return the contents of the client file.

    Raises UsageError if loading `client_state` would execute code (pickle).
    """
    schedule = engine.lr_scheduler
    known = hasattr(schedule, "state_dict")
    if schedule is not None and not known:
        engine.world.say_once(
            f"the schedule, a {type(schedule).__name__}, has no state_dict(): it is not saved, and "
            "starts from its beginning when this checkpoint is loaded."
        )
    content = {
        "client_state": client_state,
        "lr_scheduler": schedule.state_dict() if known else None,
        "schedule": type(schedule).__name__ if known else None,
        "counts": asdict(engine._counts),
    }
    buffer = io.BytesIO()
    # Check now, and not when a run resumes, that loading it needs no code execution.
    try:
        torch.save(content, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            "save_checkpoint(client_state=...) may have only numbers, strings, tensors, and dicts "
            f"and lists of them, because it must be readable without running code: {first}."
        ) from None
    return buffer.getvalue()


def _remove_others(place: Path, kept: Path, client: str) -> None:
    """Remove earlier saves under the same tag. If this fails, the next save tries again."""
    for path in place.glob("step-*"):
        if path.name != kept.name and (path / DOCUMENT).is_file():
            shutil.rmtree(path, ignore_errors=True)
    for path in place.glob("client-*.pt"):
        if path.name != client:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def load(
    engine: Configured, folder: str | PathLike[str], tag: str | None, wanted: Wanted
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; see DeepSpeedEngine.load_checkpoint."""
    world, inner = engine.world, engine._engine("load_checkpoint")
    found: Any = None
    # Only the main rank reads the folder, so that all ranks load the same checkpoint.
    if world.is_main:
        try:
            found = _found(Path(folder), tag)
        except CheckpointError as error:  # raised below, because the other ranks wait for a result
            found = error
        except (OSError, ValueError) as error:
            found = CheckpointError(f"{folder} cannot be read: {error}.")
    found = world.broadcast_object(found)
    if found is None:
        world.say_once(f"load_checkpoint: {folder} has no file {LATEST}: nothing is loaded.")
        return None, None
    if isinstance(found, CheckpointError):
        raise found
    place, path, data = found
    # Read and check the client file before anything changes, so that a failed load changes nothing.
    beside = _of_deepspeed(engine, place) if data is None else _content(place, data)
    schedule = beside["lr_scheduler"] if wanted.scheduler else None
    if schedule is not None and engine.lr_scheduler is not None:
        _check_schedule(engine.lr_scheduler, schedule, beside["schedule"], place)
    inner.load(path, strict=wanted.strict, model_only=not wanted.optimizer)
    if schedule is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(schedule)
    if wanted.counts:
        for name, value in beside["counts"].items():
            setattr(engine._counts, name, value)
    return str(place), beside["client_state"]


def _check_schedule(schedule: Any, state: Any, kind: str | None, place: Path) -> None:
    """Raise CheckpointMismatch if `schedule` cannot load `state`.

    This is the case if it has no load_state_dict, or if the saved schedule has a different `kind`.
    """
    # A checkpoint from DeepSpeed itself does not record the kind, so compare the names of the
    # entries.
    name = type(schedule).__name__
    advice = "leave its state out: load_checkpoint(load_lr_scheduler_states=False)."
    if not hasattr(schedule, "state_dict") or not hasattr(schedule, "load_state_dict"):
        raise CheckpointMismatch(
            f"{place} has the state of a schedule, but {name} in this script has no state_dict() "
            f"and load_state_dict(). Define these methods, or {advice}"
        )
    if kind is not None and kind != name:
        raise CheckpointMismatch(
            f"{place} has the schedule {kind}, but this script has {name}. Create the one that "
            f"was saved, or {advice}"
        )
    here, there = schedule.state_dict(), state if isinstance(state, dict) else {}
    # Private entries differ between versions of torch.
    known = {entry for entry in here if not entry.startswith("_")}
    if kind is None and not known <= there.keys():
        raise CheckpointMismatch(
            f"{place} has a schedule of a different class than {name}: its state has "
            f"{_listed(there)}, but this one has {_listed(here)}. Create the schedule that was "
            f"saved, or {advice}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))[:200]


def _content(place: Path, data: bytes) -> dict[str, Any]:
    """Return the contents of a client file. Raises BrokenCheckpoint if it is damaged."""
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types for a damaged file
        raise BrokenCheckpoint(f"{place} has a damaged client-*.pt: load another tag.") from error
    if isinstance(content, dict):
        content.setdefault("schedule", None)  # saves of earlier versions do not record the kind
    if not isinstance(content, dict) or content.keys() != _CONTENT:
        raise BrokenCheckpoint(
            f"{place} has a client-*.pt that save_checkpoint has not written: load another tag."
        )
    return content


_CONTENT = {"client_state", "lr_scheduler", "schedule", "counts"}


def _of_deepspeed(engine: Configured, place: Path) -> dict[str, Any]:
    """Return the client_state, schedule and counters of a DeepSpeed checkpoint. Collective.

    The result has the same form as that of `_content`. If one rank fails, all raise its error.
    """
    # Every rank reads the file, because objects in its client_state become records of their
    # attributes, which cannot be sent.
    found: dict[str, Any] = {}
    fault: CheckpointError | None = None
    try:
        save = as_checkpoint.opened(place)
        micro_steps = save.steps * engine.gradient_accumulation_steps()
        found = {
            "client_state": save.client_state,
            "lr_scheduler": save.scheduler,
            "schedule": None,
            "counts": save.counts | {"micro_steps": micro_steps},
        }
    except CheckpointError as error:
        fault = error
    except Exception as error:  # reading another library's file may raise any exception
        fault = CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error}.")
    for each in engine.world.gather(fault):
        if each is not None:
            raise each
    return found


def _found(
    folder: Path, tag: str | None
) -> tuple[Path, Path, bytes | None] | CheckpointError | None:
    """Return the tag's folder, the checkpoint in it, and the contents of its client file.

    Returns None if no tag is given and no latest tag exists. Returns an error if nothing can be
    loaded.
    """
    if tag is None:
        if not (folder / LATEST).is_file():
            return None
        tag = (folder / LATEST).read_text().strip()
    place = folder / str(tag)
    if not place.is_dir():
        return CheckpointError(f"{folder} has no checkpoint with the tag {tag!r}.")
    saves = complete(place)
    if not saves and (place / DOCUMENT).is_file():
        return CheckpointError(
            f"{place} is a checkpoint of engine.save, which has no counts, schedule or "
            "client_state for load_checkpoint. Pass the folder and the tag that were passed to "
            "save_checkpoint."
        )
    if not saves and (cut := sorted(place.glob("step-*"))):
        return BrokenCheckpoint(
            f"{cut[-1]} lacks {DOCUMENT}: its save was killed, or the file is lost. Load another "
            "tag."
        )
    if not saves:
        return place, place, None  # DeepSpeed's own files; otherwise engine.load fails
    path = saves[-1].path
    name = document.load(path)["tracked"].get(BESIDE, {}).get("file")
    earlier = f"client-{path.name.removeprefix('step-')}.pt"  # the name in earlier versions
    if name is None and (place / earlier).is_file():
        name = earlier
    if name is None:
        return CheckpointError(
            f"{path} is a checkpoint of engine.save, which has no counts, schedule or "
            "client_state for load_checkpoint: load it with engine.load."
        )
    # Use only the last component, because a checkpoint must not refer to files outside its folder.
    beside = place / Path(name).name
    if not beside.is_file():
        return BrokenCheckpoint(f"{place} lacks {beside.name}: load another tag.")
    return place, path, beside.read_bytes()


def save_weights(world: sw.World, state: dict[str, Any], folder: Path, name: str) -> bool:
    """Write the weights in `state`, which only the main rank has, to one file. Collective."""

    def save() -> None:
        buffer = io.BytesIO()
        torch.save(copied_state(state), buffer)
        write(folder / name, buffer.getvalue())

    on_main(world, folder, save)
    return True
