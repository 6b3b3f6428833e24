"""Finds the files of one DeepSpeed save, and reports missing ones.

ckpt/latest                                          names the tag
ckpt/global_step3/mp_rank_00_model_states.pt         stages 0 to 2: the model
ckpt/global_step3/zero_pp_rank_R_mp_rank_00_model_states.pt    stage 3, one per rank R
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
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"
"""Script that DeepSpeed copies next to the tags of a ZeRO run."""

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]{2,})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]{2,})_?optim_states\.pt")
_UNIVERSAL = "zero"
"""Folder that ds_to_universal.py creates for the tensors, next to a model_states.pt."""

# Files that DeepSpeed writes only with pipeline or expert parallelism, which is not supported.
_PARTS = re.compile(r"(layer_[0-9]|expp_rank_|layer_[0-9]+_expert_).*_states\.pt")


@dataclass(frozen=True)
class SaveFiles:
    """The files of a save, listed by data-parallel rank.

    Args:
        models: Files with the model.
        optimizers: Files with the optimizer's partitions. Empty at stage 0.
    """

    folder: Path
    models: dict[int, Path]
    optimizers: dict[int, Path]

    @property
    def all(self) -> list[Path]:
        """All files, in a fixed order."""
        return [*self.models.values(), *self.optimizers.values()]


def find(path: Path) -> Path | None:
    """Return the folder of the DeepSpeed save to which `path` refers.

    This is `path` itself, the subfolder that the file `latest` in `path` names, or the only save in
    `path`. Returns None if `path` is not a DeepSpeed checkpoint.

    Raises:
        BrokenCheckpoint: `latest` names a folder that does not exist.
        CheckpointError: `path` contains several saves but no file `latest`.
    """
    if not path.is_dir() or (path / DOCUMENT).exists():
        return None
    if _is_save(path):
        return path
    tag = None
    if (path / LATEST).is_file():
        tag = read_whole(path / LATEST)[:4096].decode(errors="replace").strip()
    if tag is not None and is_plain_name(tag):
        if _is_save(path / tag):
            return path / tag
        # Other libraries write files called `latest` too, so also look for DeepSpeed's script.
        if not (path / tag).exists() and (path / _SCRIPT).exists():
            raise BrokenCheckpoint(
                f"{path / LATEST} names {tag}, which is not in {path}. Restore the folder, or name "
                "the folder of another tag."
            )
        return None
    saves = sorted(entry for entry in path.iterdir() if entry.is_dir() and _is_save(entry))
    if len(saves) > 1:
        raise CheckpointError(
            f"{path} contains several DeepSpeed saves ({', '.join(entry.name for entry in saves)}) "
            f"but no file {LATEST} that names one. Name the folder of a tag."
        )
    return saves[0] if saves else None


def _is_save(path: Path) -> bool:
    try:
        return any(
            _MODEL.fullmatch(entry.name) or _OPTIMIZER.fullmatch(entry.name)
            for entry in path.iterdir()
        )
    except OSError:
        return False


def files_of(folder: Path) -> SaveFiles:
    """Return the files that all ranks wrote to `folder`.

    Raises:
        BrokenCheckpoint: A rank's file is missing.
        CheckpointError: The model was split by a method other than ZeRO.
    """
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if _PARTS.fullmatch(path.name):
            raise _other_parallelism(folder, path.name)
        if path.name == _UNIVERSAL and path.is_dir():
            raise CheckpointError(
                f"{folder} is a universal checkpoint of DeepSpeed (ds_to_universal.py), which "
                "cannot be loaded. Load the save that it was created from. Or load this one in "
                "DeepSpeed without pipeline, tensor and expert parallelism, and save there."
            )
        for form, found in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            if named := form.fullmatch(path.name):
                # An mp_rank above 0 means that tensor or pipeline parallelism split the model.
                if int(named[2]):
                    raise _other_parallelism(folder, path.name)
                found[int(named[1] or 0)] = path
    if 0 not in models:
        raise _missing(folder, "its model_states.pt of rank 0")
    # A gap in the rank numbers shows a missing file. `check_count` detects missing last ranks.
    for found, kind in ((models, "model"), (optimizers, "optim")):
        if lost := sorted(set(range(max(found, default=0))) - set(found)):
            raise _missing(folder, f"zero_pp_rank_{lost[0]}_mp_rank_00_{kind}_states.pt")
    return SaveFiles(folder, dict(sorted(models.items())), dict(sorted(optimizers.items())))


def _missing(folder: Path, what: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{folder} lacks {what}: the save did not finish, or a file was not copied. Restore the "
        "file, or use another checkpoint."
    )


def _other_parallelism(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} was saved with DeepSpeed's pipeline, tensor or expert parallelism ({name}), "
        "which cannot be loaded. Convert it with ds_to_universal.py, load the result in DeepSpeed "
        "without such parallelism, save there, and load that save."
    )


@contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Context manager that converts errors from unexpected file contents to BrokenCheckpoint.

    Such errors are TypeError, KeyError and the like. Even if a file is not damaged, reading it can
    raise them because a value is missing or has an unexpected type.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BrokenCheckpoint(
            f"{folder} has a readable file with contents that DeepSpeed does not write ({what}). "
            "Use another checkpoint, or a fresh copy of this one."
        ) from error
