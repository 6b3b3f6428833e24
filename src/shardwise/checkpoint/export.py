"""Exports whole tensors as one plain file that the stock libraries read."""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import MOST_TENSORS, TensorSpec, dtype_name, lay_out
from shardwise.errors import CheckpointError

PICKLED = (".pt", ".pth", ".bin")
"""Endings of files as torch.save writes them."""


def write_model(model: nn.Module, path: Path) -> None:
    """Write the state of `model` to `path`: as torch.save does where the ending is of `PICKLED`,
    else as safetensors, which hold no more than tensors."""
    write_tensors(*_plain(model), path)


def write_tensors(
    tensors: dict[str, Tensor], aliases: Mapping[str, str], rest: Mapping[str, Any], path: Path
) -> None:
    """Write `tensors`, each with memory of its own, and for each of `aliases` the tensor that it
    names; of `rest`, which are none, what the form of `path` can hold. The folder is made.

    Safetensors have tied weights once, and the alias in the metadata as their `save_model` does.
    Raises OSError, and CheckpointError for tensors that safetensors do not know.
    """
    with written_aside(path) as file:
        if path.suffix in PICKLED:
            twins = {alias: tensors[first] for alias, first in aliases.items()}
            with disk_errors(file) as writer:
                torch.save({**tensors, **twins, **rest}, writer)
        else:
            _write_safetensors(tensors, aliases, path, file)


def _write_safetensors(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], path: Path, file: IO[bytes]
) -> None:
    specs = [
        TensorSpec(n, dtype_name(value.dtype), tuple(value.shape)) for n, value in tensors.items()
    ]
    laid, *more = lay_out(path.stem, specs, limit=math.inf, aliases=aliases)
    if more:
        raise CheckpointError(
            f"{len(specs)} tensors are too many for {path}: a file of safetensors holds "
            f"{MOST_TENSORS} here. Export to .pt."
        )
    file.write(laid.header)
    for name in laid.tensors:  # in the order of their places
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


class _Writer:
    """A file for torch.save that keeps the error of the disk: torch raises another one over it."""

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
        """Write what is in the buffer."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


@contextmanager
def disk_errors(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Around torch.save to what it gives: raises the OSError of `file`, such as of a full disk,
    where torch would raise RuntimeError ("unexpected pos")."""
    writer: Any = _Writer(file)
    try:
        yield writer
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None


_NAMELESS = getattr(os, "O_TMPFILE", 0)
"""Linux's flag for it."""

_NEEDS_A_NAME = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""What file systems say on which every file has a name at first."""


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """Gives a file that becomes `path` once it is whole; the folder is made.

    It has no name until then, so that a killed process leaves nothing. Where it needs one, its
    lock says that someone writes it, and the next export to `path` removes those without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A killed process has left its file behind; the kernel has released the lock on it.
    _sweep(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        fd, named = _open(aside)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if not named:
                _name(fd, aside)
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _open(aside: Path) -> tuple[int, bool]:
    """A file in the folder of `aside`, and whether it has that name rather than none."""
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
    """Give an open file without a name that of `path`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # With a folder Python calls linkat, which follows the link to the open file.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _lock(fd: int) -> bool:
    """Whether nobody else has a lock on the file, as far as its file system knows of any."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Remove what killed exports to `path` have left."""
    begin, end = f".{path.name}.", ".partial"
    for found in path.parent.iterdir():
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
    """The state_dict of `model` with plain names and CPU memory of its own, in which tied weights
    are one tensor."""
    tensors, aliases, rest = _plain(model)
    found = tensors | {alias: tensors[first] for alias, first in aliases.items()} | rest
    return {key: found[key] for name in model.state_dict() if (key := _plain_name(name)) in found}


def _plain_name(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _plain(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors with memory of their own, by plain name, the first name of each alias, and what else
    is in the state_dict."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
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
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases, rest
