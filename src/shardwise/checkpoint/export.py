"""Exports full tensors to a single file that other libraries can read."""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import MOST_TENSORS, TensorSpec, dtype_name, lay_out
from shardwise.errors import CheckpointError

PICKLED = (".pt", ".pth", ".bin")
"""Suffixes of files that torch.save writes."""


def write_model(model: nn.Module, path: Path) -> None:
    """Write the state_dict of `model` to `path`.

    Uses torch.save if the suffix is in `PICKLED`. Otherwise writes safetensors and omits entries
    that are not tensors.
    """
    write_tensors(*_split_state_dict(model), path)


def write_tensors(
    tensors: dict[str, Tensor], aliases: Mapping[str, str], rest: Mapping[str, Any], path: Path
) -> None:
    """Write tensors and their aliases to `path`, and create its folder if necessary.

    A safetensors file contains a tied weight once. Its metadata lists the aliases, as with
    safetensors' own `save_model`.

    Args:
        tensors: Tensors by name. No two of them may share memory.
        aliases: Maps each further name of a tied weight to its name in `tensors`.
        rest: Values that are not tensors. A safetensors file omits them.
        path: File to write. Its suffix selects the format, as in `write_model`.

    Raises:
        OSError: The file cannot be written.
        CheckpointError: safetensors does not support the dtype of a tensor.
    """
    with replace_when_complete(path) as file:
        if path.suffix in PICKLED:
            alias_tensors = {alias: tensors[first] for alias, first in aliases.items()}
            with disk_errors(file) as writer:
                torch.save({**tensors, **alias_tensors, **rest}, writer)
        else:
            specs = [
                TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
                for name, value in tensors.items()
            ]
            write_safetensors(
                file,
                path,
                specs,
                aliases,
                lambda spec: [tensors[spec.name].detach().cpu().contiguous().reshape(-1)],
            )


def write_safetensors(
    file: IO[bytes],
    path: Path,
    specs: Sequence[TensorSpec],
    aliases: Mapping[str, str],
    parts: Callable[[TensorSpec], Iterable[Tensor]],
) -> None:
    """Write tensors to `file` in the safetensors format.

    Args:
        path: Final path of the file, for error messages.
        specs: Tensors to write.
        aliases: Maps each further name of a tied weight to the name of the written tensor.
        parts: Returns a tensor's elements as consecutive 1-D CPU tensors.

    Raises:
        CheckpointError: There are too many tensors for one file.
    """
    # Without a size limit, `lay_out` splits the set only if there are too many tensors.
    layout, *more = lay_out(path.stem, specs, limit=math.inf, aliases=aliases)
    if more:
        raise CheckpointError(
            f"{len(specs)} tensors are too many for {path}: a safetensors file may have "
            f"{MOST_TENSORS}. Write a .pt file instead."
        )
    file.write(layout.header)
    for placed in layout.tensors.values():  # in the order of their offsets
        for flat in parts(placed.spec):
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


class _Writer:
    """A file for torch.save that records the first disk error, because torch would hide it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


@contextmanager
def disk_errors(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Context manager that yields a wrapper of `file` for torch.save.

    If writing fails, for example because the disk is full, it raises the original OSError instead
    of torch's RuntimeError ("unexpected pos").
    """
    writer: Any = _Writer(file)
    try:
        yield writer
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None


_NAMELESS = getattr(os, "O_TMPFILE", 0)
"""Flag for opening an unnamed file (Linux only; 0 elsewhere)."""

_NEEDS_A_NAME = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""Error numbers of file systems that do not support unnamed files."""


@contextmanager
def replace_when_complete(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that yields a new file, and names it `path` if the block succeeds.

    Creates the folder if necessary. During the block, the file is unnamed, so that a killed process
    leaves nothing behind. If the file system does not support unnamed files, the file has a
    temporary name and is locked while it is written. The next export to `path` removes temporary
    files that are no longer locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Remove the files that killed processes left behind. The kernel has released their locks.
    _sweep(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        fd, named = _open(aside)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if not named:
                _name(fd, aside)
            # Rename the file before closing it, because closing it releases the lock.
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _open(aside: Path) -> tuple[int, bool]:
    """Open a new file, which is unnamed if possible, and otherwise at the path `aside` and locked.

    Returns the file descriptor, and whether the file is at `aside`.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        if _NAMELESS:
            return os.open(aside.parent, flags | _NAMELESS, 0o666), False
    except OSError as error:
        if error.errno not in _NEEDS_A_NAME:
            raise
    fd = os.open(aside, flags | os.O_CREAT | os.O_EXCL, 0o666)
    _lock(fd)
    return fd, True


def _name(fd: int, path: Path) -> None:
    """Give the open, unnamed file the name `path`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # With dst_dir_fd, Python calls linkat, which follows the /proc link to the open file.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _lock(fd: int) -> bool:
    """Lock the file. Return False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Remove temporary files that killed exports to `path` left behind."""
    begin, end = f".{path.name}.", ".partial"
    for found in path.parent.iterdir():
        # Check the lock, not the process id in the name: the id may have been reused, or the
        # process may run on another host.
        pid = found.name.removeprefix(begin).removesuffix(end)
        if found.name != f"{begin}{pid}{end}" or not pid.isdigit() or not found.is_file():
            continue
        fd = os.open(found, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _lock(fd):
                found.unlink(missing_ok=True)
        finally:
            os.close(fd)


def plain_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the state_dict of `model` on the CPU.

    Names do not contain torch.compile's prefix. Tied weights still share one tensor.
    """
    tensors, aliases, rest = _split_state_dict(model)
    state = tensors | {alias: tensors[first] for alias, first in aliases.items()} | rest
    return {key: state[key] for name in model.state_dict() if (key := _plain_name(name)) in state}


def _plain_name(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _split_state_dict(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Split the state_dict of `model` into dicts of tensors, aliases and other entries, by name.

    Names do not contain wrappers' prefixes. The tensors are copies on the CPU. The second dict
    maps each alias of a tied weight to its first name.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    # Sort the names, so that every export uses the same name of a tied weight.
    for key, value in sorted(model.state_dict().items()):
        name = _plain_name(key)
        if not isinstance(value, Tensor):
            rest[name] = value
            continue
        # Tied weights share memory, shape and strides. A view of part of a tensor does not.
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in first_name:
            aliases[name] = first_name[place]
            continue
        first_name[place] = name
        # cpu() and contiguous() may return the tensor itself, so clone it too.
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases, rest
