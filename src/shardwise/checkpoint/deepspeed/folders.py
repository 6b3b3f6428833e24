"""Finds the files of one save of DeepSpeed, and says which are missing.

ckpt/latest                                          names the tag
ckpt/global_step3/mp_rank_00_model_states.pt         stages 0 to 2: the model
ckpt/global_step3/zero_pp_rank_R_mp_rank_00_model_states.pt    stage 3: of each rank R
ckpt/global_step3/zero_pp_rank_R_mp_rank_00_optim_states.pt    stages 1 to 3 (bf16_zero_... too)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.atomic_folders import DOCUMENT
from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.schema import plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"
"""What DeepSpeed leaves beside the tags of a run with ZeRO."""

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]{2,})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]{2,})_?optim_states\.pt")
_UNIVERSAL = "zero"
"""The folder in which ds_to_universal.py puts the tensors, beside a model_states.pt."""

_PARTS = re.compile(r"(layer_[0-9]|expp_rank_|layer_[0-9]+_expert_).*_states\.pt")


@dataclass(frozen=True)
class SaveFiles:
    """The files of a save: by data-parallel rank those with the model, and those with the
    optimizer's partitions (none at stage 0)."""

    folder: Path
    models: dict[int, Path]
    optimizers: dict[int, Path]

    @property
    def all(self) -> list[Path]:
        """Every file, in one order."""
        return [*self.models.values(), *self.optimizers.values()]


def find(path: Path) -> Path | None:
    """The folder of one save: `path`, or the one that its `latest` names, or its only one.

    None where `path` holds nothing of DeepSpeed's. Raises BrokenCheckpoint where `latest` names
    what is not there, CheckpointError where it is to be said which of several is meant.
    """
    if not path.is_dir() or (path / DOCUMENT).exists():
        return None
    if _is_save(path):
        return path
    tag = None
    if (path / LATEST).is_file():
        tag = read_whole(path / LATEST)[:4096].decode(errors="replace").strip()
    if tag is not None and plain_name(tag):
        if _is_save(path / tag):
            return path / tag
        if not (path / tag).exists() and (path / _SCRIPT).exists():
            raise BrokenCheckpoint(
                f"{path / LATEST} names {tag}, which is not in {path}. Bring the folder back, or "
                "name the folder of another tag."
            )
        return None
    saves = sorted(each for each in path.iterdir() if each.is_dir() and _is_save(each))
    if len(saves) > 1:
        raise CheckpointError(
            f"{path} holds several saves of DeepSpeed ({', '.join(each.name for each in saves)}) "
            f"and no file {LATEST} that names one. Name the folder of a tag."
        )
    return saves[0] if saves else None


def _is_save(path: Path) -> bool:
    try:
        return any(
            _MODEL.fullmatch(each.name) or _OPTIMIZER.fullmatch(each.name)
            for each in path.iterdir()
        )
    except OSError:
        return False


def files_of(folder: Path) -> SaveFiles:
    """The files of the save in `folder`, all ranks' there.

    Raises BrokenCheckpoint where one of several ranks' is missing, CheckpointError for a save of a
    model that was cut in another way than ZeRO's.
    """
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if _PARTS.fullmatch(path.name):
            raise _cut_otherwise(folder, path.name)
        if path.name == _UNIVERSAL and path.is_dir():
            raise CheckpointError(
                f"{folder} is a universal checkpoint of DeepSpeed (ds_to_universal.py), which is "
                "not read here. Load the save that it was made of, or load this in a run of "
                "DeepSpeed without pipeline, tensor and expert parallelism and save there."
            )
        for form, found in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            if named := form.fullmatch(path.name):
                if int(named[2]):
                    raise _cut_otherwise(folder, path.name)
                found[int(named[1] or 0)] = path
    if 0 not in models:
        raise _missing(folder, "its model_states.pt of rank 0")
    for found, kind in ((models, "model"), (optimizers, "optim")):
        if lost := sorted(set(range(max(found, default=0))) - set(found)):
            raise _missing(folder, f"zero_pp_rank_{lost[0]}_mp_rank_00_{kind}_states.pt")
    return SaveFiles(folder, dict(sorted(models.items())), dict(sorted(optimizers.items())))


def _missing(folder: Path, what: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{folder} lacks {what}: a save that did not end, or a file that was not copied. Bring it "
        "back, or take another checkpoint."
    )


def _cut_otherwise(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is a save of DeepSpeed's pipeline, tensor or expert parallelism ({name}), which "
        "is not read here. Load it in a run of DeepSpeed without these (ds_to_universal.py makes "
        "that possible), and load here what that run saves."
    )


@contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Inside the block what is read of the save in `folder` has the form that DeepSpeed writes.

    The files may hold anything, and be whole: BrokenCheckpoint is what comes of a value that is
    missing, or of another type.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BrokenCheckpoint(
            f"{folder} has a file that is whole, and not as DeepSpeed writes one ({what}). Take "
            "another checkpoint, or a fresh copy of this."
        ) from error
