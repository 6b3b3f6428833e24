"""Reads torch's distributed checkpoints (DCP), without running any code that they name.

    checkpoint/.metadata        a pickle: names, shapes, chunks, and the place of each chunk
    checkpoint/__R_N.distcp     consecutive chunks, each in the format of torch.save

FSDP, torchtitan, Lightning and Accelerate write this format. Megatron-Core does too, with its own
layout of tensors (megatron.py). Source of the format: metadata.py, filesystem.py and
default_planner.py in torch/distributed/checkpoint.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.file_system import open_to_read, read_whole
from shardwise.checkpoint.format import ITEM_BYTES, TensorSpec, dtype_name, dtype_of
from shardwise.checkpoint.formats import torch_files, training_dict
from shardwise.checkpoint.formats.saved import Checkpoint, Leaf, reading
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

METADATA = ".metadata"
"""File that every DCP checkpoint contains."""

WHAT = "torch's distributed checkpoint (DCP)"

_REST = "meta.pt"
"""File that Lightning writes for everything that is not sharded."""

_LARGEST_VALUE = 64 * 2**20
"""Maximum size in bytes of a value that is not a tensor, such as the state of a data loader."""


class _Properties(inert.Inert):
    """Replacement for the pickled TensorProperties, whose state is a tuple."""

    kind = "TensorProperties"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state:
            self.__dict__["dtype"] = state[0]
        else:
            super().__setstate__(state)


@dataclass(frozen=True)
class _Place:
    """The place of a chunk: `length` bytes of the file `file`, starting at byte `offset`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Chunk:
    """A chunk: a rectangular part of a tensor (a box), and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def interval(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the range of flat elements that the box covers, or None if it is not contiguous.

        A box is contiguous if it has the tensor's full size in every dim after its first dim larger
        than 1.
        """
        varied = next((d for d, size in enumerate(self.sizes) if size != 1), len(shape))
        if any(self.sizes[d] != shape[d] for d in range(varied + 1, len(shape))):
            return None
        first = 0
        for size, offset in zip(shape, self.offsets, strict=True):
            first = first * size + offset
        return first, first + self.numel


class DcpReader(TensorReader):
    """Reads tensors from a DCP folder.

    Args:
        folder: The folder that contains .metadata.
        chunks: Chunks of each tensor, by tensor name.
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], chunks: Mapping[str, list[_Chunk]]
    ) -> None:
        self._folder = folder
        self.specs = dict(specs)
        self._chunks = chunks
        self._fds: dict[str, int] = {}
        self._found: dict[_Place, tuple[int, Tensor | None]] = {}
        # The last tensor that had to be assembled, because its chunks are boxes of several rows.
        self._assembled: tuple[str, Tensor] | None = None

    def read(self, name: str, first: int, into: Tensor) -> None:
        spec, end = self.specs[name], first + into.numel()
        intervals = [(chunk, chunk.interval(spec.shape)) for chunk in self._chunks[name]]
        if any(interval is None for _, interval in intervals):
            into.copy_(self._assemble(name)[first:end])
            return
        for chunk, interval in intervals:
            assert interval is not None
            low, high = max(first, interval[0]), min(end, interval[1])
            if low < high:
                part = into[low - first : high - first]
                self._read_chunk(spec, chunk, low - interval[0], part)

    def _assemble(self, name: str) -> Tensor:
        """Return all elements of a tensor whose chunks are not contiguous in it."""
        if self._assembled is None or self._assembled[0] != name:
            spec = self.specs[name]
            whole = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
            for chunk in self._chunks[name]:
                part = torch.empty(chunk.numel, dtype=whole.dtype)
                self._read_chunk(spec, chunk, 0, part)
                box = tuple(
                    slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                whole[box] = part.view(chunk.sizes)
            self._assembled = name, whole.view(-1)
        return self._assembled[1]

    def _read_chunk(self, spec: TensorSpec, chunk: _Chunk, first: int, into: Tensor) -> None:
        """Fill `into` with a chunk's elements, starting at the chunk's element `first`."""
        if not into.numel():
            return
        with reading(self._folder, WHAT):
            at, value = self._locate(spec, chunk)
            if value is not None:
                into.copy_(value[first : first + into.numel()])
                return
            dtype = dtype_of(spec.dtype)
            near = into if into.dtype == dtype else torch.empty(into.numel(), dtype=dtype)
            data = near.view(torch.uint8).numpy().data
            place, begin = chunk.place, at + first * dtype.itemsize
            while data:
                count = os.preadv(self._open(place.file), [data], begin)
                if count == 0:
                    raise EOFError(f"{place.file} ends inside {spec.name}")
                data, begin = data[count:], begin + count
            if near is not into:
                into.copy_(near)

    def _locate(self, spec: TensorSpec, chunk: _Chunk) -> tuple[int, Tensor | None]:
        """Locate a chunk's elements.

        Returns (byte position in the file, None) if they were saved in element order. Otherwise,
        returns (0, tensor) with a tensor that contains the elements in order.
        """
        place = chunk.place
        if place not in self._found:
            archive = zipfile.ZipFile(_Window(self._open(place.file), place))
            start, shape = _parse_chunk(archive, place, spec.dtype)
            if shape != chunk.sizes:
                raise ValueError(f"a chunk of {spec.name} has the shape {shape}")
            value = None
            if start is None:
                loaded = self.load(place)
                value = loaded.contiguous().view(-1)
                start = 0
            self._found[place] = start, value
        return self._found[place]

    def load(self, place: _Place) -> Any:
        """Return the value at `place`. Runs no code from the file."""
        if place.length > _LARGEST_VALUE:
            raise ValueError(f"{place.file} has a value of {place.length} bytes")
        data = io.BytesIO(os.pread(self._open(place.file), place.length, place.offset))
        # torch does not compare the checksums of the records that it reads.
        if (wrong := inert.damaged_record(zipfile.ZipFile(data))) is not None:
            raise ValueError(f"{wrong} in {place.file} does not have its checksum")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)

    def _open(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = open_to_read(self._folder / name)
        return self._fds[name]

    def damages(self, rank: int, size: int) -> Iterator[str]:
        """Check this rank's share of the chunks, and yield one sentence per damaged chunk.

        Args:
            rank: Index of this rank.
            size: Number of ranks that share the work.
        """
        entries = [(name, c) for name, chunks in sorted(self._chunks.items()) for c in chunks]
        for name, chunk in entries[rank::size]:
            try:
                with reading(self._folder, WHAT):
                    place = chunk.place
                    archive = zipfile.ZipFile(_Window(self._open(place.file), place))
                    if (wrong := inert.damaged_record(archive)) is not None:
                        raise ValueError(f"{wrong} of {name} does not have its checksum")
            except BrokenCheckpoint as error:
                yield str(error)

    @property
    def files(self) -> list[str]:
        """Names of the files that contain tensors."""
        return sorted({c.place.file for chunks in self._chunks.values() for c in chunks})

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class _Window(io.RawIOBase):
    """File object that contains only the bytes of one chunk."""

    def __init__(self, fd: int, place: _Place) -> None:
        self._fd, self._place, self._at = fd, place, 0
        if place.offset + place.length > os.fstat(fd).st_size:
            raise EOFError(f"{place.file} ends before byte {place.offset + place.length}")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        # Released even if the read fails, because its traceback would keep the view of a buffer
        # that the caller frees.
        with memoryview(buffer) as whole, whole[: max(0, self._place.length - self._at)] as view:
            count = os.preadv(self._fd, [view], self._place.offset + self._at) if view else 0
        self._at += count
        return count


@dataclass(frozen=True)
class _StoredTensor:
    """Description of a tensor, from a chunk's pickle."""

    key: str
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _ChunkUnpickler(pickle.Unpickler):
    """Reads the description of a tensor from a chunk's pickle. Rejects all other contents."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> str:
        _, _, key, *_ = pid
        if not isinstance(key, str):
            raise pickle.UnpicklingError("its storage has no name")
        return key


def _rebuild(key: str, first: int, shape: Any, stride: Any, *_: Any) -> _StoredTensor:
    return _StoredTensor(key, first, tuple(shape), tuple(stride))


def _parse_chunk(
    archive: zipfile.ZipFile, place: _Place, dtype: str
) -> tuple[int | None, tuple[int, ...]]:
    """Return the byte position of a chunk's elements in the file, and the chunk's shape.

    The position is None if the elements are not stored in order. If so, torch must load the chunk.
    """
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    order = records.get("byteorder")
    if order is not None and archive.read(order) != b"little":
        raise ValueError("it was written on a machine with another byte order")
    stored = _ChunkUnpickler(io.BytesIO(archive.read(records["data.pkl"]))).load()
    if not isinstance(stored, _StoredTensor):
        raise ValueError("a chunk contains no tensor")
    info = records[f"data/{stored.key}"]
    expected, is_ordered = 1, True
    for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
        is_ordered &= size == 1 or stride == expected
        expected *= size
    needed = (stored.first + math.prod(stored.shape)) * ITEM_BYTES[dtype]
    if not is_ordered:
        return None, stored.shape
    if info.compress_type != zipfile.ZIP_STORED or info.file_size < needed:
        raise ValueError(f"a chunk has {info.file_size} of {needed} bytes")
    assert archive.fp is not None
    archive.fp.seek(info.header_offset)
    header = archive.fp.read(30)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + 30 + lengths
    if start + info.file_size > place.length:
        raise EOFError("a chunk ends before its elements")
    return place.offset + start + stored.first * ITEM_BYTES[dtype], stored.shape


# -- the metadata ------------------------------------------------------------------------------


def find(path: Path) -> Path | None:
    """Return `path` if it is a DCP folder, otherwise None."""
    return path if path.is_dir() and os.path.lexists(path / METADATA) else None


def open_reader(folder: Path) -> tuple[DcpReader, dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Open a DCP folder.

    Returns:
        The reader, each key's path in the nested state_dict that was saved, and the places of the
        values that are not tensors.

    Raises:
        BrokenCheckpoint: A file is missing, truncated or not of this format.
        CheckpointError: The checkpoint has a feature that is not supported.
    """
    with reading(folder / METADATA, WHAT):
        modules = ("checkpoint.metadata", "_shard.sharded_tensor.metadata")
        properties = {(f"torch.distributed.{m}", "TensorProperties"): _Properties for m in modules}
        meta = inert.loads(read_whole(folder / METADATA), properties)
        tensors, storage = meta.state_dict_metadata, meta.storage_data
        places: dict[str, dict[tuple[int, ...] | None, _Place]] = {}
        for index, info in storage.items():
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{folder} is compressed or encrypted by an extension of DCP, which cannot be "
                    "read. Save it without extensions."
                )
            offset = getattr(index, "offset", None)
            file = info.relative_path
            if not is_plain_name(file):
                raise ValueError(
                    f"it names the file {file!r:.60}, which is not a file in the same folder"
                )
            place = _Place(file, info.offset, info.length)
            if min(place.offset, place.length) < 0:
                raise ValueError("a chunk has a negative position")
            places.setdefault(index.fqn, {})[None if offset is None else tuple(offset)] = place
        specs: dict[str, TensorSpec] = {}
        chunks: dict[str, list[_Chunk]] = {}
        values: dict[str, Any] = {}
        for name, entry in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"a key is {name!r:.60}")
            if not hasattr(entry, "chunks"):
                values[name] = places[name][None]
                continue
            specs[name] = TensorSpec(name, dtype_name(entry.properties.dtype), tuple(entry.size))
            chunks[name] = []
            for chunk in entry.chunks:
                offsets = tuple(chunk.offsets)
                # A tensor that is not sharded may be stored without an offset.
                key = offsets if offsets in places[name] else None
                chunks[name].append(_Chunk(offsets, tuple(chunk.sizes), places[name][key]))
            _check_cover(specs[name], chunks[name])
        paths = _nested_paths(meta.planner_data, [*specs, *values])
        reader = DcpReader(folder, specs, chunks)
    for file in reader.files:
        if not (folder / file).is_file():
            raise BrokenCheckpoint(
                f"{folder} lacks {file}, which has chunks of tensors: the save did not finish, or "
                "a file was not copied. Restore the file, or use another checkpoint."
            )
    return reader, paths, values


def _check_cover(spec: TensorSpec, chunks: Sequence[_Chunk]) -> None:
    """Raise ValueError unless the chunks cover each element of the tensor exactly once.

    Also raises it if a chunk is larger than its place in the file.
    """
    check_boxes(spec.name, spec.shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    for chunk in chunks:
        # Readers allocate memory by these sizes, so a false one must not pass.
        if chunk.numel * ITEM_BYTES[spec.dtype] > chunk.place.length:
            raise ValueError(f"a chunk of {spec.name} is larger than its place in the file")


def check_boxes(
    name: str, shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Raise ValueError unless the boxes cover each element of a tensor exactly once.

    Args:
        name: Name of the tensor, for messages.
        shape: Shape of the tensor.
        boxes: Offsets and sizes of each box.
    """
    for offsets, sizes in boxes:
        if any(not 0 <= o <= o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {name} is outside its shape {tuple(shape)}")
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise ValueError(f"the chunks of {name} are not all of its elements")
    # Their sizes add up, so unless two chunks overlap there is no gap. Sorted by the first dim, a
    # chunk can only overlap chunks that start before it ends there.
    ordered = sorted((tuple(o), tuple(s)) for o, s in boxes if math.prod(s))
    for number, (start, sizes) in enumerate(ordered):
        for start_2, sizes_2 in ordered[number + 1 :]:
            if start and start_2[0] >= start[0] + sizes[0]:
                break
            if all(
                max(a, b) < min(a + s, b + t)
                for a, s, b, t in zip(start, sizes, start_2, sizes_2, strict=True)
            ):
                raise ValueError(f"two chunks of {name} overlap")


def _nested_paths(planner_data: Any, keys: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    known = planner_data if isinstance(planner_data, dict) else {}
    found: dict[str, tuple[Any, ...]] = {}
    for key in keys:
        path = known.get(key, (key,))
        if not isinstance(path, tuple) or not path:
            raise TypeError(f"the path of {key} is {path!r:.60}")
        found[key] = path
    return found


# -- as a checkpoint ---------------------------------------------------------------------------


def read_tree(folder: Path, stack: ExitStack) -> tuple[dict[Any, Any], DcpReader]:
    """Return the nested state_dict of a DCP folder, with a Leaf in place of each tensor.

    Values that cannot be read without running code become `training_dict.Unread` objects.
    """
    reader, paths, values = open_reader(folder)
    stack.callback(reader.close)
    entries: dict[tuple[Any, ...], Any] = {}
    for key, path in paths.items():
        if key in reader.specs:
            entries[path] = Leaf(reader, key)
            continue
        with reading(folder, WHAT):
            try:
                entries[path] = reader.load(values[key])
            except pickle.UnpicklingError:
                entries[path] = training_dict.Unread(key)
    with reading(folder, WHAT):
        return training_dict.nest(entries), reader


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the DCP folder at `path`. Returns None if `path` is no such folder."""
    folder = find(path)
    if folder is None:
        return None
    with ExitStack() as stack:
        tree, reader = read_tree(folder, stack)
        rest = folder / _REST
        if rest.is_file():
            with reading(rest, torch_files.WHAT):
                tree = dict(torch_files.as_tree(torch_files.load(rest)[0], rest)[0]) | tree
        found = training_dict.interpret(tree, folder)
        format = "Lightning sharded checkpoint" if rest.is_file() else "torch DCP"
        checkpoint = Checkpoint(format, folder, **found)
        checkpoint.facts["files"] = str(len(reader.files))
        files = [rest] if rest.is_file() else []
        checkpoint.damages = lambda rank, size: itertools.chain(
            reader.damages(rank, size), torch_files.damages(files[rank::size])
        )
        checkpoint.stack = stack.pop_all()
        return checkpoint
