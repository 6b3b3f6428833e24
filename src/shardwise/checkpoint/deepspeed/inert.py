"""Loads a file that torch.save wrote, and runs nothing that it names.

A pickle asks for functions and classes by name. Of those, BUILDERS are the closed list that is
called: the ones that make tensors, sizes, ordered maps, sets, bytes and numbers of numpy. Any other
name becomes a class of its own without behaviour, whose objects hold what the file says of them:
DeepSpeed's LossScaler, ZeroStageEnum and fragment_address, and whatever users put into their
client_state.
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
    """What a file says of an object whose class is not read: its attributes, and `args`, with which
    it was made. `kind` is the name of the class."""

    kind = ""
    args: tuple[Any, ...]

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, dict):
            plain = {k: v for k, v in state.items() if isinstance(k, str) and k[:2] != "__"}
            self.__dict__.update(plain)

    def __repr__(self) -> str:
        return f"<{self.kind}, as it stands in the file>"

    def append(self, _: Any) -> None:
        """Take an element of what was a kind of list."""

    def extend(self, _: Any) -> None:
        """Take elements of what was a kind of list."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """Take an element of what was a kind of map."""


class _Builder:
    """A function that a file may call, and can change nothing of: a pickle can set attributes of
    whatever it has named."""

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


def _of_type(function: Any, _: Any, args: Any, __: Any) -> Any:
    """A tensor that carries attributes, which are left out."""
    return function(*args) if isinstance(function, _Builder) else Inert()


def _number(kind: Any, data: bytes = b"") -> Any:
    """A number of numpy's, from its type and its bytes."""
    name = kind.args[0] if isinstance(kind, Inert) and kind.args else None
    form = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u8": "Q", "b1": "?"}.get(str(name))
    if form is None or not isinstance(data, bytes):
        return Inert()
    return struct.unpack(f"<{form}", data)[0]


BUILDERS: dict[tuple[str, str], _Builder] = {
    ("collections", "OrderedDict"): _Builder(lambda *args: OrderedDict(*args)),
    ("torch", "Size"): _Builder(lambda *args: torch.Size(*args)),
    ("torch._utils", "_rebuild_tensor_v2"): _Builder(
        # Later arguments are hooks and metadata, which are left out.
        lambda *args: torch._utils._rebuild_tensor_v2(*args[:6])  # type: ignore[no-untyped-call]
    ),
    ("torch._utils", "_rebuild_parameter"): _Builder(lambda data, *_: data),
    ("torch._tensor", "_rebuild_from_type_v2"): _Builder(_of_type),
    ("builtins", "set"): _Builder(lambda *args: set(*args)),
    ("builtins", "complex"): _Builder(lambda *args: complex(*args)),
    # Python 2 protocols write bytes as text of this coding.
    ("_codecs", "encode"): _Builder(
        lambda text, coding="latin1": text.encode("latin1" if coding == "latin1" else "utf-8")
    ),
    ("numpy.core.multiarray", "scalar"): _Builder(_number),
    ("numpy._core.multiarray", "scalar"): _Builder(_number),
}
"""By module and name what stands for it. All that a file can have called."""


class _Unpickler(pickle.Unpickler):
    """Gives BUILDERS, dtypes, and Inert classes for all other names; imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        if (module, name) in BUILDERS:
            return BUILDERS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})


def _no_stream(*_: Any, **__: Any) -> NoReturn:
    raise pickle.UnpicklingError("it is not of torch.save's zip format")


class _Pickle:
    """What torch.load takes in the place of the module pickle."""

    Unpickler = _Unpickler
    load = staticmethod(_no_stream)


def load(path: Path) -> Any:
    """What the file `path` holds; tensors are mapped, and read from the disk when looked at.

    Raises BrokenCheckpoint where it is missing, cut, or none of torch.save's.
    """
    try:
        must_be_file(path)
        zipfile.ZipFile(path).close()
        names = _records(path)
        if "constants.pkl" in names or "data.pkl" not in names:
            raise BrokenCheckpoint(f"{path} is no file of torch.save. Take another checkpoint.")
        return torch.load(
            path, map_location="cpu", pickle_module=_Pickle, weights_only=False, mmap=True
        )
    except BrokenCheckpoint:
        raise
    except FileNotFoundError as error:
        raise BrokenCheckpoint(
            f"{path} belongs to this checkpoint and is not there. Bring the file back, or take "
            "another checkpoint."
        ) from error
    except zipfile.BadZipFile as error:
        raise BrokenCheckpoint(
            f"{path} is cut short, or no file of torch.save. Take another checkpoint, or a fresh "
            "copy of this file."
        ) from error
    except Exception as error:  # whatever torch meets in a file that is not whole
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


def _records(path: Path) -> list[str]:
    """The names of the records as torch.load finds them. Where it finds constants.pkl it runs the
    file as TorchScript, and a file can be made in which zipfile finds other names than torch."""
    reader = torch._C.PyTorchFileReader(str(path))
    found: list[str] = reader.get_all_records()
    return found


_UNSUMMED = "version"
"""A record of every file, whose sum is 0 where torch was told to write none."""


def damage(path: Path) -> str | None:
    """In words, what of the file `path` is not what was written, by the CRC-32 of its records."""
    try:
        with zipfile.ZipFile(path) as archive:
            several = archive.infolist()
            if any(e.filename.endswith(f"/{_UNSUMMED}") and not e.CRC for e in several):
                return None
            name = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return f"{path} cannot be read ({error})"
    return None if name is None else f"{name} in {path} is not what was written"
