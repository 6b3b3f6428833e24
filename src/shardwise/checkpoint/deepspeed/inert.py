"""Loads files written by torch.save without running any code that they name.

A pickle refers to functions and classes by name. This loader calls only the functions in BUILDERS,
which create tensors, sizes, ordered dicts, sets, bytes and numpy scalars. Any other name becomes a
class without behaviour, whose instances only hold their attributes. Examples are DeepSpeed's
LossScaler, ZeroStageEnum and fragment_address, and any class of an object that users put into
`client_state`.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.file_system import must_be_file
from shardwise.errors import BrokenCheckpoint


class Inert:
    """A plain record that stands in for an object whose class is not loaded. Holds its attributes.

    Attributes:
        kind: Name of the class, including its module.
        args: Positional arguments of the constructor.
    """

    kind = ""
    args: tuple[Any, ...]

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        record = super().__new__(cls)
        record.__dict__["args"] = args
        return record

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, dict):
            # Skip `__class__` and the like, which would change how the record behaves.
            plain = {k: v for k, v in state.items() if isinstance(k, str) and k[:2] != "__"}
            self.__dict__.update(plain)

    def __repr__(self) -> str:
        return f"<{self.kind}, as stored in the file>"

    def append(self, _: Any) -> None:
        """Ignore an element of a list-like object."""

    def extend(self, _: Any) -> None:
        """Ignore elements of a list-like object."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """Ignore an element of a map-like object."""


class _Builder:
    """Wraps a function that a file may call.

    A pickle can set attributes of any object that it names. The wrapper prevents a file from
    changing the function itself.
    """

    __slots__ = ("function",)
    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it sets {name} of a function")

    def __setstate__(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("it sets the state of a function")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _build_number(kind: Any, data: bytes = b"") -> Any:
    """Return the Python number for a numpy scalar with dtype `kind` and bytes `data`.

    Returns an empty record if the dtype is not supported.
    """
    name = kind.args[0] if isinstance(kind, Inert) and kind.args else None
    form = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u8": "Q", "b1": "?"}.get(str(name))
    if form is None or not isinstance(data, bytes):
        return Inert()
    return struct.unpack(f"<{form}", data)[0]


BUILDERS: dict[tuple[str, str], _Builder] = {
    ("collections", "OrderedDict"): _Builder(lambda *args: OrderedDict(*args)),
    ("torch", "Size"): _Builder(lambda *args: torch.Size(*args)),
    ("torch._utils", "_rebuild_tensor_v2"): _Builder(
        # Ignore further arguments, which are hooks and metadata.
        lambda *args: torch._utils._rebuild_tensor_v2(*args[:6])  # type: ignore[no-untyped-call]
    ),
    ("torch._utils", "_rebuild_parameter"): _Builder(lambda data, *_: data),
    ("torch._tensor", "_rebuild_from_type_v2"): _Builder(
        # For a tensor subclass, ignore the type and the saved attributes.
        lambda function, _, args, __: function(*args) if isinstance(function, _Builder) else Inert()
    ),
    ("builtins", "set"): _Builder(lambda *args: set(*args)),
    ("builtins", "complex"): _Builder(lambda *args: complex(*args)),
    # Pickle protocols 0 to 2 store bytes as text in this encoding.
    ("_codecs", "encode"): _Builder(
        lambda text, coding="latin1": text.encode("latin1" if coding == "latin1" else "utf-8")
    ),
    ("numpy.core.multiarray", "scalar"): _Builder(_build_number),
    ("numpy._core.multiarray", "scalar"): _Builder(_build_number),
}
"""Functions that a file may call, by module and name. It cannot call any others."""


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves names to functions in BUILDERS, dtypes or Inert classes.

    It imports nothing.
    """

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        if (module, name) in BUILDERS:
            return BUILDERS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        # Return a class, because a pickle may instantiate it or call it like a function.
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})


def loads(data: bytes, more: Mapping[tuple[str, str], type[Inert]]) -> Any:
    """Return the object in the plain pickle `data`, without running any code that the pickle names.

    Raises UnpicklingError, or another error of the unpickler, if the pickle is damaged.

    Args:
        more: Additional classes, keyed by the module and name that the pickle uses for them.
    """

    class Unpickler(_Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return more.get((module, name)) or super().find_class(module, name)

    return Unpickler(io.BytesIO(data)).load()


class _Pickle:
    """Replacement for the `pickle` module that torch.load uses."""

    Unpickler = _Unpickler

    @staticmethod
    def load(*_: Any, **__: Any) -> NoReturn:
        """Raise UnpicklingError. torch.load calls this only for files that are not zip files."""
        raise pickle.UnpicklingError("it is not of torch.save's zip format")


def load(path: Path) -> Any:
    """Return the contents of the file `path`, with memory-mapped tensors.

    Raises BrokenCheckpoint if the file is missing, truncated, or not written by torch.save.
    """
    try:
        must_be_file(path)
        # Check this first, because torch.load would read any other file as a plain pickle.
        zipfile.ZipFile(path).close()
        # If torch.load finds constants.pkl, it runs the file as TorchScript. A crafted file may
        # list different names for zipfile than for torch, so list them with torch's own reader.
        names = torch._C.PyTorchFileReader(str(path)).get_all_records()
        if "constants.pkl" in names or "data.pkl" not in names:
            raise BrokenCheckpoint(f"{path} was not written by torch.save. Use another checkpoint.")
        return torch.load(
            path, map_location="cpu", pickle_module=_Pickle, weights_only=False, mmap=True
        )
    except BrokenCheckpoint:
        raise
    except FileNotFoundError as error:
        raise BrokenCheckpoint(
            f"{path} is part of this checkpoint but does not exist. Restore the file, or use "
            "another checkpoint."
        ) from error
    except zipfile.BadZipFile as error:
        raise BrokenCheckpoint(
            f"{path} is truncated, or was not written by torch.save. Use another checkpoint, or a "
            "fresh copy of this file."
        ) from error
    except Exception as error:  # torch raises many exception types for truncated files
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


_UNSUMMED = "version"
"""Record in every file. Its checksum is 0 if torch was configured not to write checksums."""


def damage(path: Path) -> str | None:
    """Return a description of the damage to the file `path`, or None if it is intact.

    Checks each record's CRC-32. A file without checksums counts as intact.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = damaged_record(archive)
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError) as error:
        return f"{path} cannot be read ({error})"
    return None if name is None else f"{name} in {path} was changed after it was written"


def damaged_record(archive: zipfile.ZipFile) -> str | None:
    """Return the name of a record whose CRC-32 is wrong, or None if all records are intact.

    `archive` was written by torch.save. If it has no checksums, it counts as intact.
    """
    records = archive.infolist()
    if any(e.filename.endswith(f"/{_UNSUMMED}") and not e.CRC for e in records):
        return None
    return archive.testzip()
