"""Export of whole tensors as one plain file that other libraries read."""

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

    A suffix in `PICKLED` means torch.save, any other suffix safetensors, which hold tensors only.
    """
    write_tensors(*_split_state_dict(model), path)


def write_tensors(
    tensors: dict[str, Tensor], aliases: Mapping[str, str], rest: Mapping[str, Any], path: Path
) -> None:
    """Write tensors and their aliases to `path`; its folder is created.

    In safetensors a tied weight is written once, and its aliases go into the metadata, as with
    their own `save_model`.

    Args:
        tensors: Tensors by name; no two share memory.
        aliases: Further names of tensors, each with the name in `tensors`.
        rest: Values that are not tensors. Safetensors cannot hold them, so they are omitted there.

    Raises:
        OSError: The file cannot be written.
        CheckpointError: Safetensors have no such dtype.
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
    """Write safetensors into `file`, which becomes `path`.

    Args:
        aliases: Further names of tied weights, each with the name of the written tensor.
        parts: Returns the elements of a tensor as consecutive flat tensors.

    Raises:
        CheckpointError: There are more tensors than a file may hold.
    """
    # One file, so no size limit: only the number of tensors could split it.
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
    """File for torch.save that remembers a disk error, which torch replaces with its own error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data`."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Flush the buffer."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


@contextmanager
def disk_errors(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Context manager that yields a file for torch.save.

    It raises the OSError of `file`, for example for a full disk. torch alone would raise a
    RuntimeError ("unexpected pos").
    """
    writer: Any = _Writer(file)
    try:
        yield writer
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None


_NAMELESS = getattr(os, "O_TMPFILE", 0)
"""Linux's flag for opening a file without a name."""

_NEEDS_A_NAME = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""Errors of file systems that require a name for every file."""


@contextmanager
def replace_when_complete(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that yields a file which becomes `path` once it is complete.

    The folder is created. The file has no name before that, so a killed process leaves
    nothing behind. If the file system requires a name, the file is locked while it is being
    written, and the next export to `path` removes such files that are not locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A killed process may have left its file behind; the kernel has released the lock on it.
    _sweep(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        fd, named = _open(aside)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if not named:
                _name(fd, aside)
            # Before the file is closed, because closing it releases the lock.
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _open(aside: Path) -> tuple[int, bool]:
    """Open a file in the folder of `aside`; the second result says whether it has that name."""
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
    """Give the open file without a name the name `path`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # With dst_dir_fd Python calls linkat, which follows the link to the open file.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _lock(fd: int) -> bool:
    """Lock the file; return False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Remove the remains of killed exports to `path`."""
    begin, end = f".{path.name}.", ".partial"
    for found in path.parent.iterdir():
        # The process id only keeps names apart. It may have been reused, or be from another host.
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
    """Return a copy of the state_dict of `model` on the CPU, with plain names.

    Tied weights are one tensor.
    """
    tensors, aliases, rest = _split_state_dict(model)
    state = tensors | {alias: tensors[first] for alias, first in aliases.items()} | rest
    return {key: state[key] for name in model.state_dict() if (key := _plain_name(name)) in state}


def _plain_name(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _split_state_dict(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Return copies of the tensors by plain name, the first name of each alias, and all other
    entries of the state_dict."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    # Sorted, so that the same name of a tied weight comes first in every export.
    for key, value in sorted(model.state_dict().items()):
        name = _plain_name(key)
        if not isinstance(value, Tensor):
            rest[name] = value
            continue
        # Tied weights share memory, shape and strides; a view of a part differs in shape.
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in first_name:
            aliases[name] = first_name[place]
            continue
        first_name[place] = name
        # cpu() and contiguous() return the same tensor if there is nothing to do, so clone.
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases, rest
