"""Reads tensors of any file by ranges of elements, so that no rank reads what it does not hold."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_system import must_be_file, open_to_read, read_whole
from shardwise.checkpoint.format import (
    Placed,
    TensorFile,
    TensorSpec,
    dtype_name,
    dtype_of,
    header_length,
    parse,
)
from shardwise.checkpoint.schema import plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

_CHUNK = 2**20
"""Elements that are read at a time to be summed."""


class TensorReader(ABC):
    """Reads tensors by name; `specs` says what there is."""

    specs: Mapping[str, TensorSpec]

    @abstractmethod
    def read(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` (flat, on the CPU, of any dtype) with the elements of `name` from `first`
        on. Raises BrokenCheckpoint where the file ends too early."""

    def whole(self, name: str) -> Tensor:
        """All of tensor `name`, in its shape."""
        spec = self.specs[name]
        value = torch.empty(spec.numel, dtype=dtype_of(spec.dtype))
        self.read(name, 0, value)
        return value.view(spec.shape)

    def checksum(self, name: str) -> str:
        """The CRC-32 of the bytes of tensor `name`, as a checkpoint tells it."""
        spec, crc = self.specs[name], 0
        dtype = dtype_of(spec.dtype)
        for first in range(0, spec.numel, _CHUNK):
            value = torch.empty(min(_CHUNK, spec.numel - first), dtype=dtype)
            self.read(name, first, value)
            crc = zlib.crc32(value.view(torch.uint8).numpy().data, crc)
        return f"{crc:08x}"

    def close(self) -> None:  # noqa: B027 (nothing to close where nothing is open)
        """Let go of the files."""


class SafetensorsReader(TensorReader):
    """The tensors of one or several safetensors files.

    `headers` are the CRC-32 that their headers must have, by the names of files, as far as known.
    """

    def __init__(self, paths: Iterable[Path], headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers or {}
        self.files: list[TensorFile] = []
        self._fds: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self._placed: dict[str, Placed] = {}
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self.specs = {name: placed.spec for name, placed in self._placed.items()}

    def _open(self, path: Path) -> None:
        try:
            fd = open_to_read(path)
        except OSError as error:
            raise BrokenCheckpoint(
                f"{path} belongs to this checkpoint and cannot be read ({error.strerror}). Bring "
                "the file back, or take another checkpoint."
            ) from error
        self._fds[path.name], self._paths[path.name] = fd, path
        nbytes = os.fstat(fd).st_size
        # The length comes from the file: it is compared with the size before so much is read.
        length = header_length(os.pread(fd, 8, 0), nbytes, str(path))
        header = os.pread(fd, 8 + length, 0)
        written = self._headers.get(path.name)
        if written is not None and f"{zlib.crc32(header):08x}" != written:
            raise BrokenCheckpoint(
                f"The header of {path} is not what was written: its CRC-32 is not {written}. Take "
                "another checkpoint."
            )
        file = parse(header, nbytes, str(path))
        for name, placed in file.tensors.items():
            if name in self._placed:
                raise BrokenCheckpoint(
                    f"{path} and {self._placed[name].file} both hold {name!r}. Take another "
                    "checkpoint."
                )
            self._placed[name] = Placed(placed.spec, path.name, placed.begin, placed.end)
        self.files.append(file)

    def file_of(self, name: str) -> str:
        """The name of the file that holds tensor `name`."""
        return self._placed[name].file

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers say beside their tensors."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def read(self, name: str, first: int, into: Tensor) -> None:
        placed = self._placed[name]
        dtype = dtype_of(placed.spec.dtype)
        assert first + into.numel() <= placed.spec.numel, "a range lies in its tensor"
        target = into if into.dtype == dtype and into.is_contiguous() else None
        # Straight into the target where possible, else through memory of the file's dtype.
        value = torch.empty(into.numel(), dtype=dtype) if target is None else target
        data = value.detach().view(torch.uint8).numpy().data if value.numel() else memoryview(b"")
        self._fill(placed, first * dtype.itemsize, data)
        if target is None:
            into.copy_(value)

    def _fill(self, placed: Placed, at: int, data: memoryview) -> None:
        offset = placed.begin + at
        while data:
            # With an offset, so that no read depends on the position that another one has left.
            count = os.preadv(self._fds[placed.file], [data], offset)
            if count == 0:
                raise BrokenCheckpoint(
                    f"{self._paths[placed.file]} ends at byte {offset}, inside "
                    f"{placed.spec.name!r}: it was cut short while it was read."
                )
            data, offset = data[count:], offset + count

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class PickleReader(TensorReader):
    """The tensors of files that torch.save wrote; never runs code."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            self._tensors |= _state_dict(_unpickled(path), path)
        self.specs = {
            name: TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
            for name, value in self._tensors.items()
        }

    def read(self, name: str, first: int, into: Tensor) -> None:
        # Mapped memory: what is not looked at is not read from the disk.
        flat = self._tensors[name].detach().contiguous().view(-1)
        into.copy_(flat[first : first + into.numel()])


def _unpickled(path: Path) -> Any:
    try:
        must_be_file(path)
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # not a zip file, as torch before 1.6 wrote them
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or holds more than tensors and plain values; reading those could "
            "run code, which a checkpoint never does here. Load it where you trust it, and save "
            "its state_dict() by itself."
        ) from error
    except BrokenCheckpoint:
        raise
    except Exception as error:  # whatever torch meets in a file that is not whole
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


_INSIDE = ("state_dict", "model_state_dict", "model", "module")
"""Where training scripts put a model's tensors in what they save."""


def _state_dict(loaded: Any, path: Path) -> dict[str, Tensor]:
    """The tensors in what was loaded, by name."""
    while isinstance(loaded, Mapping):
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {_name_in(path, name, value): value for name, value in loaded.items()}
        inside = [key for key in _INSIDE if isinstance(loaded.get(key), Mapping)]
        if not inside:
            break
        loaded = loaded[inside[0]]
    raise CheckpointError(
        f"{path} holds no state_dict, at its top or as one of {', '.join(_INSIDE)}. Save "
        "model.state_dict() by itself."
    )


def _name_in(path: Path, name: Any, value: Tensor) -> str:
    """`name`, where it is one and `value` can be read by ranges."""
    if value.layout != torch.strided or value.device.type != "cpu":
        raise CheckpointError(
            f"{path} has {name!r:.60} as a {value.layout} tensor on {value.device}, which is not "
            "read here. Save it as a dense one, on a device that holds values."
        )
    if not isinstance(name, str):
        raise CheckpointError(
            f"{path} has a tensor under {name!r:.60}, which is no name: a state_dict() has text "
            "there. Save model.state_dict() by itself."
        )
    return name


# -- finding the files ----------------------------------------------------------------------

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def open_foreign(path: Path) -> TensorReader:
    """The tensors of a file, or of a folder as Hugging Face writes them, split or not.

    Raises CheckpointError where there is none.
    """
    if path.is_dir():
        for stem in ("model", "diffusion_pytorch_model", "pytorch_model"):
            if (files := files_of(path, stem, ".safetensors")) is not None:
                return SafetensorsReader(files)
        if (files := files_of(path, "pytorch_model", ".bin")) is not None:
            return PickleReader(files)
        raise CheckpointError(
            f"{path} holds no model.safetensors, model.safetensors.index.json or "
            "pytorch_model.bin. Name a file, the folder of a checkpoint's step, or that of a model."
        )
    if not path.exists():
        raise CheckpointError(f"There is no {path} to load.")
    if path.suffix == ".safetensors":
        return SafetensorsReader([path])
    if path.suffix in _PICKLES:
        return PickleReader([path])
    raise CheckpointError(
        f"{path} ends in {path.suffix or 'nothing'}: what can be loaded ends in .safetensors, "
        f"{', '.join(_PICKLES)}, or is a folder."
    )


def open_set(
    folder: Path, names: Iterable[Any], headers: Mapping[str, str] | None = None
) -> SafetensorsReader:
    """The files `names` of a checkpoint in `folder`; `headers` as SafetensorsReader has them."""
    return SafetensorsReader([folder / _plain_name(folder, name) for name in names], headers)


def files_of(folder: Path, stem: str, suffix: str) -> list[Path] | None:
    """The files of the set `stem` in `folder`, by its index if it has one; None without any."""
    index = folder / f"{stem}{suffix}.index.json"
    if os.path.lexists(index):
        return [folder / name for name in _in_index(index)]
    whole = folder / f"{stem}{suffix}"
    return [whole] if os.path.lexists(whole) else None


def _in_index(path: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        table = json.loads(read_whole(path))["weight_map"]
        names = sorted(set(table.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(
            f"{path} is no index of a split model: it has no weight_map of names."
        ) from error
    return [_plain_name(path, name) for name in names]


def _plain_name(path: Path, name: Any) -> str:
    """`name` if it is that of a file in the same folder: nothing leads out of a checkpoint."""
    if not plain_name(name):
        raise BrokenCheckpoint(
            f"{path} names the file {name!r}, which is not one in the same folder."
        )
    return str(name)
