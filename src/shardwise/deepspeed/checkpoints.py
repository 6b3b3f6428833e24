"""save_checkpoint and load_checkpoint: the engine's checkpoints under DeepSpeed's tags.

save_dir/
├── latest                        the tag of the newest one, written last
└── global_step100/               a tag
    ├── step-100/                 weights and optimizer state, as engine.save writes them
    └── client-100-5f0c2a91.pt    client_state, schedule and counts, without code

The step names its client file, which has a name of its own in every save and is written before it:
wherever a save is cut off, a complete step has the client file that it was saved with.
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
from shardwise.checkpoint import document
from shardwise.checkpoint.atomic_folders import DOCUMENT, complete
from shardwise.checkpoint.deepspeed import as_checkpoint
from shardwise.checkpoint.file_system import replace_file
from shardwise.deepspeed.configured import Configured
from shardwise.deepspeed.written_files import also_in_trial, on_main
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
"""The name under which an engine keeps which file is beside its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is loaded beside the weights; `strict`: their names are all there."""

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
    """See DeepSpeedEngine.save_checkpoint."""
    world, inner = engine.world, engine._engine("save_checkpoint")
    if not folder:
        raise BadCall(f"save_checkpoint(save_dir={folder!r}) takes the name of a folder.")
    home = Path(folder)
    name = _tag_of(engine, tag)
    place = home / name
    client = world.broadcast_object(f"client-{inner.steps}-{secrets.token_hex(4)}.pt")
    also_in_trial(world, place, lambda: _begin_client(engine, place / client, client_state))
    engine._trained.beside.file = client
    try:
        path = inner.save(place)
    finally:
        engine._trained.beside.file = None
    inner.leave_folders()
    if path is None:
        return False
    on_main(world, place, lambda: _remove_others(place, path, client))
    if save_latest:
        on_main(world, home, lambda: replace_file(home / LATEST, name.encode()))
    return True


def _begin_client(engine: Configured, path: Path, client_state: dict[str, Any]) -> None:
    data = _client_file(engine, client_state)
    if not engine.world.settings.trial:
        _begin(path, data)


def _begin(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def _tag_of(engine: Configured, tag: str | None) -> str:
    """The tag, alike on all workers: rank 0's. Raises UsageError for one that is a path, and, where
    checkpoint.tag_validation is Fail, for others elsewhere; Warn says so."""
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    first = engine.world.broadcast_object(name)
    if not first or first in (".", "..") or os.sep in first:
        raise UsageError(f"save_checkpoint(tag={first!r}): a tag is the name of a folder.")
    if engine.world.any(first != name) and engine._job.tag_validation != "ignore":
        words = f"save_checkpoint has the tag {first!r} on rank 0 and another one elsewhere"
        if engine._job.tag_validation == "fail":
            raise FailedAssertion(f"{words} (here: {name!r}): give all workers the same.")
        engine.world.say_once(f"{words}: all workers save under that of rank 0.")
    return first


def _client_file(engine: Configured, client_state: dict[str, Any]) -> bytes:
    """What is kept beside the engine's own checkpoint. Raises UsageError for what could not be
    read without running code."""
    schedule = engine.lr_scheduler
    known = hasattr(schedule, "state_dict")
    if schedule is not None and not known:
        engine.world.say_once(
            f"the schedule, a {type(schedule).__name__}, has no state_dict(): it is not saved, and "
            "begins anew where this checkpoint goes on."
        )
    content = {
        "client_state": client_state,
        "lr_scheduler": schedule.state_dict() if known else None,
        "schedule": type(schedule).__name__ if known else None,
        "counts": asdict(engine._counts),
    }
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            "save_checkpoint(client_state=...) takes numbers, words, tensors, and dicts and lists "
            f"of them, which are read without running code: {first}."
        ) from None
    return buffer.getvalue()


def _remove_others(place: Path, kept: Path, client: str) -> None:
    """Remove what earlier saves under the same tag have left; what cannot be removed takes room,
    and the next save tries again."""
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
    """See DeepSpeedEngine.load_checkpoint."""
    world, inner = engine.world, engine._engine("load_checkpoint")
    found = world.broadcast_object(_looked_for(Path(folder), tag) if world.is_main else None)
    if found is None:
        world.say_once(f"load_checkpoint: {folder} has no file {LATEST}: nothing is loaded.")
        return None, None
    if isinstance(found, CheckpointError):
        raise found
    place, path, data = found
    # All that stands beside is read before anything changes.
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
    """Raise CheckpointMismatch for the state of a schedule of another `kind`, and where the one
    here takes none. A save of DeepSpeed names no kind: there the entries tell."""
    name = type(schedule).__name__
    advice = "leave its state out: load_checkpoint(load_lr_scheduler_states=False)."
    if not hasattr(schedule, "state_dict") or not hasattr(schedule, "load_state_dict"):
        raise CheckpointMismatch(
            f"{place} has the state of a schedule, and the {name} here has no state_dict() and "
            f"load_state_dict(): write them, or {advice}"
        )
    if kind is not None and kind != name:
        raise CheckpointMismatch(
            f"{place} has the schedule {kind}, and here is {name}: make the one that was saved, or "
            f"{advice}"
        )
    here, there = schedule.state_dict(), state if isinstance(state, dict) else {}
    if kind is None and not _known_to_users(here) <= there.keys():
        raise CheckpointMismatch(
            f"{place} has a schedule of another kind than {name}: its state is "
            f"{_listed(there)}, and here {_listed(here)}. Make the schedule that was saved, or "
            f"{advice}"
        )


def _known_to_users(state: Iterable[str]) -> set[str]:
    """The entries that every version of a schedule has: torch adds and drops others."""
    return {name for name in state if not name.startswith("_")}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))[:200]


def _content(place: Path, data: bytes) -> dict[str, Any]:
    """What `_client_file` has written. Raises BrokenCheckpoint for what it has not."""
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch meets in a file that is not whole
        raise BrokenCheckpoint(
            f"{place} has a client-*.pt that is damaged: load another tag."
        ) from error
    if isinstance(content, dict):
        content.setdefault("schedule", None)  # earlier saves do not name its kind
    if not isinstance(content, dict) or content.keys() != _CONTENT:
        raise BrokenCheckpoint(f"{place} has a client-*.pt of something else: load another tag.")
    return content


_CONTENT = {"client_state", "lr_scheduler", "schedule", "counts"}


def _of_deepspeed(engine: Configured, place: Path) -> dict[str, Any]:
    """What a save of DeepSpeed has beside its tensors, in the form of `_content`.

    Objects of classes in its client_state are records of their attributes, which cannot be sent:
    every worker reads for itself. What one cannot read is raised by all. Collective.
    """
    found: dict[str, Any] = {}
    fault: CheckpointError | None = None
    try:
        found = _read_deepspeed(engine, place)
    except CheckpointError as error:
        fault = error
    except Exception as error:  # whatever a file of another library makes of reading
        fault = CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error}.")
    for each in engine.world.gather(fault):
        if each is not None:
            raise each
    return found


def _read_deepspeed(engine: Configured, place: Path) -> dict[str, Any]:
    save = as_checkpoint.opened(place)
    micro_steps = save.steps * engine.gradient_accumulation_steps()
    return {
        "client_state": save.client_state,
        "lr_scheduler": save.scheduler,
        "schedule": None,
        "counts": save.counts | {"micro_steps": micro_steps},
    }


def _looked_for(
    folder: Path, tag: str | None
) -> tuple[Path, Path, bytes | None] | CheckpointError | None:
    """What `_found` returns; an error too where a file cannot be read, since other workers wait for
    the answer of this one."""
    try:
        return _found(folder, tag)
    except CheckpointError as error:
        return error
    except (OSError, ValueError) as error:
        return CheckpointError(f"{folder} cannot be read: {error}.")


def _found(
    folder: Path, tag: str | None
) -> tuple[Path, Path, bytes | None] | CheckpointError | None:
    """The folder of the tag, the checkpoint in it, and what is kept beside; None where no tag is
    given and none is the latest; an error where there is nothing that can be loaded."""
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
            f"{place} is a checkpoint of engine.save, which keeps no counts, schedule or "
            "client_state for load_checkpoint: give the folder and the tag that save_checkpoint "
            "was given."
        )
    if not saves and (cut := sorted(place.glob("step-*"))):
        return BrokenCheckpoint(
            f"{cut[-1]} lacks {DOCUMENT}: its save was cut off, or the file is lost. Load another "
            "tag."
        )
    if not saves:
        return place, place, None  # DeepSpeed's own files, or an error of engine.load
    path = saves[-1].path
    name = document.load(path)["tracked"].get(BESIDE, {}).get("file")
    earlier = f"client-{path.name.removeprefix('step-')}.pt"  # before steps named their file
    if name is None and (place / earlier).is_file():
        name = earlier
    if name is None:
        return CheckpointError(
            f"{path} is a checkpoint of engine.save, which keeps no counts, schedule or "
            "client_state for load_checkpoint: load it by engine.load."
        )
    beside = place / Path(name).name
    if not beside.is_file():
        return BrokenCheckpoint(f"{place} lacks {beside.name}: load another tag.")
    return place, path, beside.read_bytes()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with memory of its own: parameters are views of a buffer, which would be saved."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def save_weights(world: sw.World, state: dict[str, Any], folder: Path, name: str) -> bool:
    """Write `state`, weights by name on the main worker, as one file. Collective."""

    def save() -> None:
        buffer = io.BytesIO()
        torch.save(_copied(state), buffer)
        _begin(folder / name, buffer.getvalue())

    on_main(world, folder, save)
    return True
