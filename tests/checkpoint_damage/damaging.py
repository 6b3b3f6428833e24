"""Random damage to a folder of checkpoints, determined by a seed."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import document
from shardwise.checkpoint.atomic_folders import DOCUMENT
from tests.checkpoint_damage.training import STEPS


@dataclass(frozen=True)
class Damage:
    """Description and kind of a damage.

    `known` means that `verify` may find nothing, because the damage includes valid checksums.
    """

    kind: str
    words: str
    known: bool = False


Rng = random.Random


def damage(seed: int, folder: Path) -> Damage:
    """Damage the newest checkpoint in `folder`, and sometimes all of them."""
    rng = Rng(seed)
    kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    steps = [STEPS] if rng.random() < 0.8 else list(range(STEPS, 0, -1))
    state = rng.getstate()
    said = ""
    for step in steps:
        rng.setstate(state)  # every checkpoint gets the same damage
        words = KINDS[kind][1](rng, folder / f"step-{step}")
        said = said or words
    everywhere = "" if len(steps) == 1 else ", in all checkpoints"
    return Damage(kind, said + everywhere, known=kind in KNOWN)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if not file.is_dir())


def _file(rng: Rng, path: Path) -> Path:
    return rng.choice(_files(path))


# -- bytes --------------------------------------------------------------------------------------


def flip(rng: Rng, path: Path) -> str:
    """Flip one bit of any file."""
    file = _file(rng, path)
    data = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} of {file.name}"


def flip_early(rng: Rng, path: Path) -> str:
    """Flip one bit in the header of a file."""
    file = _file(rng, path)
    data = bytearray(file.read_bytes())
    place, bit = rng.randrange(min(len(data), 600)), rng.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} of {file.name}"


def truncate(rng: Rng, path: Path) -> str:
    """Cut off the end of a file."""
    file = _file(rng, path)
    size = file.stat().st_size
    left = rng.choice([0, 1, 7, 8, size - 1, rng.randrange(size)])
    os.truncate(file, left)
    return f"{file.name} ends after {left} of {size} bytes"


def extend(rng: Rng, path: Path) -> str:
    """Append bytes to a file."""
    file = _file(rng, path)
    more = rng.choice([b"\n", b"\0" * 512, file.read_bytes()])
    with file.open("ab") as end:
        end.write(more)
    return f"{file.name} has {len(more)} bytes too many"


def blank(rng: Rng, path: Path) -> str:
    """Overwrite a block, as if it was never written or belongs to another file."""
    file = _file(rng, path)
    data = bytearray(file.read_bytes())
    first = rng.randrange(len(data))
    count = min(rng.choice([1, 16, 512, 4096]), len(data) - first)
    fill = rng.choice([bytes(count), b"\xff" * count, rng.randbytes(count)])
    if fill == data[first : first + count]:
        fill = bytes(byte ^ 1 for byte in fill)
    data[first : first + count] = fill
    file.write_bytes(data)
    return f"bytes {first} to {first + count} of {file.name}"


# -- files --------------------------------------------------------------------------------------


def lose(rng: Rng, path: Path) -> str:
    """Remove a file."""
    file = _file(rng, path)
    file.unlink()
    return f"{file.name} is gone"


def lose_document(rng: Rng, path: Path) -> str:
    """Remove checkpoint.json."""
    del rng
    (path / DOCUMENT).unlink()
    return f"{DOCUMENT} is gone"


def lose_all(rng: Rng, path: Path) -> str:
    """Remove most files."""
    kept = set(rng.sample(_files(path), rng.randrange(2)))
    for file in _files(path):
        if file not in kept:
            file.unlink()
    return f"nothing is left but {', '.join(file.name for file in kept) or 'the folder'}"


def swap(rng: Rng, path: Path) -> str:
    """Exchange the names of two files."""
    one, two = rng.sample(_files(path), 2)
    aside = path / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    return f"{one.name} and {two.name} are swapped"


def stale(rng: Rng, path: Path) -> str:
    """Replace a file with the one of another checkpoint."""
    file = _file(rng, path)
    others = [f"step-{step}" for step in range(1, STEPS + 1) if f"step-{step}" != path.name]
    other = path.parent / rng.choice(others) / file.name
    if not other.is_file() or other.read_bytes() == file.read_bytes():
        return flip(rng, path)
    shutil.copy(other, file)
    return f"{file.name} is that of {other.parent.name}"


def replace(rng: Rng, path: Path) -> str:
    """Put something that is not a regular file in the place of a file."""
    file = _file(rng, path)
    file.unlink()
    what = rng.choice(["a folder", "a pipe", "a socket", "nowhere", "itself", "/dev/zero"])
    if what == "a folder":
        file.mkdir()
    elif what == "a pipe":
        os.mkfifo(file)
    elif what == "a socket":
        here = os.open(path, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{file.name}")
        os.close(here)
    else:
        file.symlink_to({"nowhere": "gone", "itself": file.name}.get(what, what))
    return f"{file.name} is {what if what.startswith('a ') else f'a link to {what}'}"


def pickle_in(rng: Rng, path: Path) -> str:
    """Replace a tracked file with another kind of object."""
    file = path / "tracked-own.pt"
    value: Any = rng.choice([{0: torch.ones(3)}, [1, 2], Rng(0), torch.ones(2, 2).to_sparse()])
    torch.save(value, file)
    return f"{file.name} holds {type(value).__name__}"


# -- what stands in them ------------------------------------------------------------------------


def _document(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / DOCUMENT).read_bytes()))


_DEEP = "deep"
"""Placeholder for values that Python's JSON writer cannot write."""


def _write(rng: Rng, path: Path, told: dict[str, Any], deep: str = "") -> str:
    """Write a document with a valid checksum, or as version 1 without one; return a description."""
    fields = {k: v for k, v in told.items() if k not in ("format", "version", "crc32")}
    if rng.random() < 0.5:
        whole = {"format": document.FORMAT, "version": document.VERSION} | fields
        text = json.dumps(whole, indent=1).replace(f'"{_DEEP}"', deep)
        body = text.encode().removesuffix(b"\n}") + b",\n"
        end = f' "crc32": "{document.crc_of(body)}"\n}}\n'.encode()
        (path / DOCUMENT).write_bytes(body + end)
        return "summed"
    whole = {"format": document.FORMAT, "version": document.UNSUMMED} | fields
    whole.pop("files", None)
    (path / DOCUMENT).write_text(json.dumps(whole).replace(f'"{_DEEP}"', deep))
    return "version 1"


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document. User states are one value each."""
    found = [place] if place else []
    if len(place) == 2 and place[0] in ("tracked", "written_by"):
        return found
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            found += _places(each, (*place, key))
    return found


def _other_kind(rng: Rng, value: Any) -> Any:
    """Return a value of another JSON type."""
    several: list[Any] = [3, "three", [1, [2]], {"a": {"b": 1}}, None, True, -1.5]
    return rng.choice([v for v in several if type(v) is not type(value) and not _numbers(v, value)])


def _numbers(one: Any, two: Any) -> bool:
    return isinstance(one, int | float) and isinstance(two, int | float)


def _put(told: Any, place: tuple[Any, ...], value: Any) -> Any:
    for key in place[:-1]:
        told = told[key]
    before, told[place[-1]] = told[place[-1]], value
    return before


def _get(told: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        told = told[key]
    return told


def retype(rng: Rng, path: Path) -> str:
    """Change the type of a value. Each field of the document is equally likely."""
    told = _document(path)
    name = rng.choice([key for key in told if key not in ("format", "version", "crc32")])
    place = rng.choice(_places({name: told[name]}))
    before = _get(told, place)
    value = _other_kind(rng, before)
    if before is None or value is None or place[0] == "written_by":
        value = {"a": [1]} if not isinstance(before, dict) else [1]
    _put(told, place, value)
    form = _write(rng, path, told)
    return f"{'.'.join(map(str, place))} is {value!r}, not {str(before)[:40]} ({form})"


def drop(rng: Rng, path: Path) -> str:
    """Remove a field."""
    told = _document(path)
    name = rng.choice([key for key in told if key not in ("format", "version", "crc32", "files")])
    del told[name]
    return f"no {name} ({_write(rng, path, told)})"


def nest(rng: Rng, path: Path) -> str:
    """Nest lists very deeply."""
    told = _document(path)
    levels = rng.choice([101, 450, 900, 10**5])
    before, after = rng.choice([("[", "]"), ('{"$tuple": [', "]}"), ('{"a": ', "}")])
    deep = before * levels + "1" + after * levels
    name = rng.choice(["tracked", "state", "written_by"])
    if name == "state":
        told["state"][next(iter(told["state"]))]["step"] = _DEEP
    else:
        told[name][rng.choice(sorted(told[name]))] = _DEEP
    return f"{name} is {levels} levels deep ({_write(rng, path, told, deep)})"


def nest_raw(rng: Rng, path: Path) -> str:
    """Write very many opening brackets."""
    (path / DOCUMENT).write_text(rng.choice(["[", '{"a":']) * rng.choice([1000, 10**6]))
    return f"{DOCUMENT} is brackets"


def header(rng: Rng, path: Path) -> str:
    """Describe the same bytes with another header, in a checkpoint without header checksums."""
    told = _document(path)
    file = path / rng.choice([name for names in told["sets"].values() for name in names])
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in table if key != "__metadata__"])
    words = _other_header(rng, table, name)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    told.pop("files")
    told = {k: v for k, v in told.items() if k not in ("version", "crc32")}
    (path / DOCUMENT).write_text(json.dumps({"version": document.UNSUMMED} | told))
    return f"the header of {file.name}: {words} (version 1)"


def _other_header(rng: Rng, table: dict[str, Any], name: str) -> str:
    what = rng.choice(["dtype", "shape", "offsets", "name", "metadata", "many"])
    entry = table[name]
    if what == "dtype":
        entry["dtype"] = rng.choice([3, "F31", [], "F64"])
    elif what == "shape":
        entry["shape"] = rng.choice([3, [-1], [2**62, 4], ["a"], [[1]], entry["shape"] + [7]])
    elif what == "offsets":
        entry["data_offsets"] = rng.choice([3, [0], [0, -1], ["a", "b"], [5, 2**62]])
    elif what == "name":
        table[f"{name}.other"] = table.pop(name)
    elif what == "metadata":
        table["__metadata__"] = rng.choice([3, {"a": 1}, [], {"a": {"b": 2}}])
    else:
        for number in range(300_000):
            table[f"t{number}"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return f"{what} of {name}"


KINDS: dict[str, tuple[int, Callable[[Rng, Path], str]]] = {
    "bit": (20, flip),
    "bit of a header": (12, flip_early),
    "cut short": (8, truncate),
    "too long": (5, extend),
    "block": (8, blank),
    "file gone": (6, lose),
    "document gone": (4, lose_document),
    "most files gone": (2, lose_all),
    "swapped": (5, swap),
    "another's file": (4, stale),
    "no file": (10, replace),
    "pickle": (2, pickle_in),
    "type": (14, retype),
    "field gone": (3, drop),
    "nested": (3, nest),
    "brackets": (1, nest_raw),
    "header": (7, header),
}
"""Kinds of damage, with the relative frequency of each."""

KNOWN = ("type", "field gone", "nested", "header", "most files gone")
"""Kinds of damage that `verify` may not find, because checksums are valid or all files are gone."""
