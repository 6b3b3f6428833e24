"""Reads ranges of elements from files, so that each rank reads only its part of a tensor."""

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
    PlacedTensor,
    TensorFile,
    TensorSpec,
    dtype_name,
    dtype_of,
    header_length,
    parse,
)
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

_CHUNK = 2**20
"""Number of elements per read when computing a checksum."""


class TensorReader(ABC):
    """Reads tensors by name.

    Attributes:
        specs: Dtype and shape of every tensor, by name.
    """

    specs: Mapping[str, TensorSpec]

    @abstractmethod
    def read(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` with elements of tensor `name`, starting at element `first`.

        Raises BrokenCheckpoint if the file is too short.

        Args:
            into: A 1-D CPU tensor. Elements are converted to its dtype.
        """

    def whole(self, name: str) -> Tensor:
        """Return the full tensor `name`, with its saved shape and dtype."""
        spec = self.specs[name]
        value = torch.empty(spec.numel, dtype=dtype_of(spec.dtype))
        self.read(name, 0, value)
        return value.view(spec.shape)

    def checksum(self, name: str) -> str:
        """Return the CRC-32 of the bytes of tensor `name`, as 8 hexadecimal digits."""
        spec, crc = self.specs[name], 0
        dtype = dtype_of(spec.dtype)
        for first in range(0, spec.numel, _CHUNK):
            value = torch.empty(min(_CHUNK, spec.numel - first), dtype=dtype)
            self.read(name, first, value)
            crc = zlib.crc32(value.view(torch.uint8).numpy().data, crc)
        return f"{crc:08x}"

    def close(self) -> None:  # noqa: B027 (optional: some readers have no open files)
        """Close the files."""


class SafetensorsReader(TensorReader):
    """Reads the tensors in one or more safetensors files.

    Args:
        headers: Expected CRC-32 of each file's header, by file name. Other headers are not checked.
    """

    def __init__(self, paths: Iterable[Path], headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers or {}
        self.files: list[TensorFile] = []
        self._fds: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self._placed: dict[str, PlacedTensor] = {}
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
                f"{path} is part of this checkpoint but cannot be read ({error.strerror}). Restore "
                "the file, or use another checkpoint."
            ) from error
        self._fds[path.name], self._paths[path.name] = fd, path
        nbytes = os.fstat(fd).st_size
        # Check that the header's length fits the file size before reading that many bytes.
        length = header_length(os.pread(fd, 8, 0), nbytes, str(path))
        header = os.pread(fd, 8 + length, 0)
        written = self._headers.get(path.name)
        if written is not None and f"{zlib.crc32(header):08x}" != written:
            raise BrokenCheckpoint(
                f"The header of {path} was changed after it was written: its CRC-32 is not "
                f"{written}. Use another checkpoint."
            )
        file = parse(header, nbytes, str(path))
        for name, placed in file.tensors.items():
            # If two files contain the same tensor, there is no way to tell which one is right.
            if name in self._placed:
                raise BrokenCheckpoint(
                    f"{path} and {self._placed[name].file} both contain {name!r}. Use another "
                    "checkpoint."
                )
            self._placed[name] = PlacedTensor(placed.spec, path.name, placed.begin, placed.end)
        self.files.append(file)

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains tensor `name`."""
        return self._placed[name].file

    @property
    def metadata(self) -> dict[str, str]:
        """Merged metadata from the headers of all files."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def read(self, name: str, first: int, into: Tensor) -> None:
        placed = self._placed[name]
        dtype = dtype_of(placed.spec.dtype)
        assert first + into.numel() <= placed.spec.numel, "the range is within the tensor"
        target = into if into.dtype == dtype and into.is_contiguous() else None
        # Read directly into `into` if possible, otherwise through a buffer in the file's dtype.
        value = torch.empty(into.numel(), dtype=dtype) if target is None else target
        data = value.detach().view(torch.uint8).numpy().data if value.numel() else memoryview(b"")
        self._fill(placed, first * dtype.itemsize, data)
        if target is None:
            into.copy_(value)

    def _fill(self, placed: PlacedTensor, at: int, data: memoryview) -> None:
        offset = placed.begin + at
        while data:
            # preadv does not use the file position, so threads may read the same file concurrently.
            count = os.preadv(self._fds[placed.file], [data], offset)
            if count == 0:
                raise BrokenCheckpoint(
                    f"{self._paths[placed.file]} ends at byte {offset}, inside "
                    f"{placed.spec.name!r}: it was truncated while it was read. Load it again once "
                    "nothing writes to it."
                )
            data, offset = data[count:], offset + count

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class PickleReader(TensorReader):
    """Reads the tensors in files written by torch.save, without running code from them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            self._tensors |= _find_state_dict(_unpickle(path), path)
        self.specs = {
            name: TensorSpec(name, dtype_name(value.dtype), tuple(value.shape))
            for name, value in self._tensors.items()
        }

    def read(self, name: str, first: int, into: Tensor) -> None:
        # The file is memory-mapped, so only the elements that are used are read from disk.
        flat = self._tensors[name].detach().contiguous().view(-1)
        into.copy_(flat[first : first + into.numel()])


def _unpickle(path: Path) -> Any:
    try:
        must_be_file(path)
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # not a zip file, so written by torch before 1.6
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or contains more than tensors and plain values. Shardwise does "
            "not read such files, because unpickling them could run code. Load the file in a "
            "program that trusts it, and save only its state_dict()."
        ) from error
    except BrokenCheckpoint:
        raise
    except Exception as error:  # torch raises many exception types for truncated files
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


_INSIDE = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts commonly store a model's state_dict."""


def _find_state_dict(loaded: Any, path: Path) -> dict[str, Tensor]:
    """Return the state_dict in a loaded object. Raises CheckpointError if there is none."""
    while isinstance(loaded, Mapping):
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {_check_name(path, name, value): value for name, value in loaded.items()}
        # Some libraries nest the state_dict several levels deep.
        inside = [key for key in _INSIDE if isinstance(loaded.get(key), Mapping)]
        if not inside:
            break
        loaded = loaded[inside[0]]
    raise CheckpointError(
        f"{path} contains no state_dict, neither at the top nor under {', '.join(_INSIDE)}. Save "
        "only model.state_dict()."
    )


def _check_name(path: Path, name: Any, value: Tensor) -> str:
    """Check an entry of a state_dict, and return its name.

    Raises CheckpointError if it is not a string, or if `value` is not a dense CPU tensor, so
    that ranges of it cannot be read.
    """
    if value.layout != torch.strided or value.device.type != "cpu":
        raise CheckpointError(
            f"{path} has {name!r:.60} as a {value.layout} tensor on {value.device}, which cannot "
            "be read. Save it as a dense tensor on a real device."
        )
    if not isinstance(name, str):
        raise CheckpointError(
            f"{path} has a tensor under {name!r:.60}, which is not a name: the keys of a "
            "state_dict() are strings. Save only model.state_dict()."
        )
    return name


# -- finding the files ----------------------------------------------------------------------

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def open_foreign(path: Path) -> TensorReader:
    """Open another library's model: a file, or a folder in Hugging Face's layout.

    Raises CheckpointError if `path` does not exist or has an unsupported format.
    """
    if path.is_dir():
        # Prefer the file names of transformers, then of diffusers, then of older transformers.
        for stem in ("model", "diffusion_pytorch_model", "pytorch_model"):
            if (files := files_of(path, stem, ".safetensors")) is not None:
                return SafetensorsReader(files)
        if (files := files_of(path, "pytorch_model", ".bin")) is not None:
            return PickleReader(files)
        raise CheckpointError(
            f"{path} contains no model.safetensors, model.safetensors.index.json or "
            "pytorch_model.bin. Name a file, a checkpoint folder such as step-200, or the folder "
            "of a model."
        )
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a file or folder to load.")
    if path.suffix == ".safetensors":
        return SafetensorsReader([path])
    if path.suffix in _PICKLES:
        return PickleReader([path])
    raise CheckpointError(
        f"{path} ends in {path.suffix or 'nothing'}, which cannot be loaded. Name a folder, or a "
        f"file that ends in .safetensors, {', '.join(_PICKLES)}."
    )


def open_set(
    folder: Path, names: Iterable[Any], headers: Mapping[str, str] | None = None
) -> SafetensorsReader:
    """Open a tensor set of the checkpoint in `folder`.

    Args:
        names: Names of the set's files.
        headers: Expected CRC-32 of each file's header, as in `SafetensorsReader`.
    """
    return SafetensorsReader([folder / _check_file_name(folder, name) for name in names], headers)


def files_of(folder: Path, stem: str, suffix: str) -> list[Path] | None:
    """Return the files of the set `stem` in `folder`, or None if it does not exist.

    Reads the file names from the set's index if there is one.
    """
    index = folder / f"{stem}{suffix}.index.json"
    if os.path.lexists(index):
        return [folder / name for name in _read_index(index)]
    whole = folder / f"{stem}{suffix}"
    return [whole] if os.path.lexists(whole) else None


def _read_index(path: Path) -> list[str]:
    """Return the file names in an index. Raises BrokenCheckpoint if it is invalid."""
    try:
        table = json.loads(read_whole(path))["weight_map"]
        names = sorted(set(table.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(
            f"{path} is not the index of a split model: it has no weight_map of file names."
        ) from error
    return [_check_file_name(path, name) for name in names]


def _check_file_name(path: Path, name: Any) -> str:
    """Return `name`. Raises BrokenCheckpoint if it could refer to a file in a different folder."""
    if not is_plain_name(name):
        raise BrokenCheckpoint(
            f"{path} names the file {name!r}, which is not a file in the same folder."
        )
    return str(name)
