"""Compiles the device's library once for each torch, and loads it before torch is imported."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "phantom"

COMPILER = "g++"
FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


class NotBuilt(Exception):
    """No compiler is installed, or it does not accept the source."""


def why_not() -> str:
    """Return why this system or its torch cannot have a simulated device; "" if it can."""
    if sys.platform != "linux":
        return f"the simulated device needs Linux, and this is {sys.platform}"
    if "+cpu" not in version("torch"):
        return "the simulated device needs a torch without CUDA (+cpu)"
    return ""


@functools.cache
def library() -> Path:
    """Return the library for this source and this torch, building it if necessary.

    Raises NotBuilt.
    """
    torch = _torch()
    known = hashlib.sha256(SOURCE.read_bytes() + f"{FLAGS} {version('torch')} {torch}".encode())
    path = FOLDER / f"{known.hexdigest()[:16]}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        include = torch / "include"
        headers = ("-isystem", include, "-isystem", include / "torch/csrc/api/include")
        libraries = ("-Wl,--no-as-needed", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10")
        _compile(*FLAGS, *headers, SOURCE, "-o", own, *libraries, f"-Wl,-rpath,{torch / 'lib'}")
        own.rename(path)
    return path


def _compile(*words: str | Path) -> None:
    if shutil.which(COMPILER) is None:
        raise NotBuilt(f"the simulated device needs {COMPILER}, and there is none")
    ran = subprocess.run([COMPILER, *words], capture_output=True, text=True)
    if ran.returncode != 0:
        raise NotBuilt(f"{COMPILER} does not take the simulated device's source:\n{ran.stderr}")


def load() -> ctypes.CDLL:
    """Load the library, before torch is imported: torch looks for a GPU only once."""
    assert "torch" not in sys.modules, "load the simulated device before torch"
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
