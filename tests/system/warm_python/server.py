"""A warm process, which has imported the modules that test programs need and forks these programs.

    python server.py SOCKET MODULES ...

It resembles shardwise.tools.warm.fork_server, but its forks are complete programs instead of
ranks that record.
"""

import builtins
import contextlib
import ctypes
import gc
import os
import runpy
import socket
import struct
import sys
import types
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.launch import program
from shardwise.tools.warm.fork_server import PACKAGES, ForkServer
from shardwise.tools.warm.rank_client import FREE

RECORDER = "shardwise.tools.verify.stock.recorder"
"""Imported after `modules`, because it imports torch, which finds only a device that was loaded
before."""


class Listener(socket.socket):
    """Remembers who connected last, by its process number here: a client in a namespace of process
    numbers knows itself by another."""

    asker = 0

    def accept(self) -> tuple[socket.socket, Any]:
        line, address = super().accept()
        found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        Listener.asker = struct.unpack("3i", found)[0]
        return line, address


def main(path: str, *modules: str) -> None:
    """Serve at `path`; a program that was forked returns from here when it has run."""
    reserved = [os.open(os.devnull, os.O_RDONLY) for _ in range(3, FREE)]
    with Listener(socket.AF_UNIX) as listener:
        for name in (*modules, *PACKAGES, RECORDER, "shardwise.tools.verify.script"):
            with contextlib.suppress(ModuleNotFoundError):  # its tests are skipped
                import_module(name)
        # A collection would copy each page that is shared with the programs.
        gc.collect()
        gc.freeze()
        listener.bind(path)
        listener.listen(64)
        words = ForkServer(listener, reserved).serve()
    if words is not None:
        _run(words)


def _run(words: list[str]) -> None:
    """Run a program as `python WORDS` does."""
    _enter_namespaces(Listener.asker)
    _take_variables()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if program.set_up_python(words):
        if not hasattr(sys.modules.get(words[1]), "__path__"):  # of a package, __main__ is run
            sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    recorder = import_module(RECORDER)
    if recorder.VARIABLE in os.environ and "RANK" in os.environ:
        recorder.start(words=words)  # the sitecustomize of `verify --stock` starts it otherwise
    code = compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True)
    main.__dict__.update(__file__=words[0], __builtins__=builtins)
    exec(code, main.__dict__)


def _enter_namespaces(pid: int) -> None:
    """Enter the namespaces of the requesting process: its network, host name and mounts.

    Only a newly started process can enter a different PID namespace. For such hosts, a separate
    warm process runs there.
    """
    folder = os.getcwd()
    if not os.path.exists(f"/proc/{pid}/ns"):
        raise SystemExit(1)  # it is gone already
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind in ("net", "uts", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(theirs) as namespace:
            if setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"could not enter {theirs}")
    os.chdir(folder)  # the mounts there have a different root


def _take_variables() -> None:
    """Set what Python and torch take from the environment at their start."""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    for words in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        action, _, category, *_ = [*words.split(":"), "", ""]
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    import_module("torch").set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
