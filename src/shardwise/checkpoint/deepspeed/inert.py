"""Loads a file that torch.save wrote, without running any code that it names.

A pickle requests functions and classes by name. Only those in BUILDERS are called: a closed list of
builders for tensors, sizes, ordered maps, sets, bytes and numpy numbers. Any other name becomes a
class without behaviour, whose objects only hold their attributes: DeepSpeed's LossScaler,
ZeroStageEnum and fragment_address, and anything that users put into their client_state.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.file_system import must_be_file
from shardwise.errors import BrokenCheckpoint


class Inert:
    """Record of an object whose class is not loaded: its attributes, and its constructor's `args`.

    `kind` is the name of the class.
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
            # Not `__class__` and the like: the record must stay inert.
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
    """Function that a file may call but cannot modify. A pickle can set attributes of any object
    that it names."""

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
    """Return a numpy number, from its type and bytes."""
    name = kind.args[0] if isinstance(kind, Inert) and kind.args else None
    form = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u8": "Q", "b1": "?"}.get(str(name))
    if form is None or not isinstance(data, bytes):
        return Inert()
    return struct.unpack(f"<{form}", data)[0]


BUILDERS: dict[tuple[str, str], _Builder] = {
    ("collections", "OrderedDict"): _Builder(lambda *args: OrderedDict(*args)),
    ("torch", "Size"): _Builder(lambda *args: torch.Size(*args)),
    ("torch._utils", "_rebuild_tensor_v2"): _Builder(
        # Later arguments are hooks and metadata, which are ignored.
        lambda *args: torch._utils._rebuild_tensor_v2(*args[:6])  # type: ignore[no-untyped-call]
    ),
    ("torch._utils", "_rebuild_parameter"): _Builder(lambda data, *_: data),
    ("torch._tensor", "_rebuild_from_type_v2"): _Builder(
        # A tensor of a subclass: its type and the attributes that were saved with it are ignored.
        lambda function, _, args, __: function(*args) if isinstance(function, _Builder) else Inert()
    ),
    ("builtins", "set"): _Builder(lambda *args: set(*args)),
    ("builtins", "complex"): _Builder(lambda *args: complex(*args)),
    # Python 2 protocols store bytes as text in this encoding.
    ("_codecs", "encode"): _Builder(
        lambda text, coding="latin1": text.encode("latin1" if coding == "latin1" else "utf-8")
    ),
    ("numpy.core.multiarray", "scalar"): _Builder(_build_number),
    ("numpy._core.multiarray", "scalar"): _Builder(_build_number),
}
"""Replacements by module and name. A file can call nothing else."""


class _Unpickler(pickle.Unpickler):
    """Resolves names to BUILDERS, dtypes, or Inert classes. Imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        if (module, name) in BUILDERS:
            return BUILDERS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        # A class, because a pickle may instantiate a name or call it as a function.
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})


class _Pickle:
    """Replacement for the module pickle in torch.load."""

    Unpickler = _Unpickler

    @staticmethod
    def load(*_: Any, **__: Any) -> NoReturn:
        """Refuse a plain pickle stream: torch.load calls this only for files that are not zips."""
        raise pickle.UnpicklingError("it is not of torch.save's zip format")


def load(path: Path) -> Any:
    """Return the contents of the file `path`. Tensors are memory-mapped.

    Raises BrokenCheckpoint if it is missing, truncated, or was not written by torch.save.
    """
    try:
        must_be_file(path)
        # First, because torch.load would read a file that is not a zip as a plain pickle.
        zipfile.ZipFile(path).close()
        # If torch.load finds constants.pkl, it runs the file as TorchScript. A crafted file can
        # show other names to zipfile than to torch, so ask torch's own reader.
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
    except Exception as error:  # torch raises many types for a truncated file
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


_UNSUMMED = "version"
"""A record of every file. Its checksum is 0 if torch was told to write no checksums."""


def damage(path: Path) -> str | None:
    """Return a description of damage to the file `path`, by the CRC-32 of its records, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if any(e.filename.endswith(f"/{_UNSUMMED}") and not e.CRC for e in records):
                return None
            name = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return f"{path} cannot be read ({error})"
    return None if name is None else f"{name} in {path} was changed after it was written"
