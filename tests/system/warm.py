"""Warm interpreters: test programs are forked from a process that has already imported torch.

Importing torch, and its compiler with the first optimizer, takes most of the run time of a short
program. With `environ` in the environment, every script that Python runs is such a fork. It may be
started by `shardwise run`, mpirun or another script, even on a host in a namespace.

Do not use it to test how programs start or find their launcher's process, or if a signal must not
reach a program's children, because signals are forwarded to all of them. A fork has the umask,
resource limits and cores of its server, not of the process that requested it.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from shardwise.tools.warm.rank_client import SERVERS, socket_path
from tests.disk import wait_until

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "warm_python"
START_LIMIT = 240.0


def start_quickly(environ: MutableMapping[str, str]) -> None:
    """Add the folder of our sitecustomize to the PYTHONPATH of programs that tests start."""
    folders = filter(None, (str(FOLDER), environ.get("PYTHONPATH")))
    environ["PYTHONPATH"] = os.pathsep.join(folders)


class WarmPython:
    """Warm processes, which start when `environ` is first called.

    They import `modules` first, if those are installed. With two processes, ranks 0 and 1 are
    forked from different ones, so they have different seeds of `hash`. A program enters the
    network, name and mounts of the process that requests it. If that process is in another PID
    namespace, `enter` is the beginning of a command that starts a warm process there.
    """

    def __init__(self, *modules: str, processes: int = SERVERS, enter: Sequence[str] = ()) -> None:
        self._modules = modules
        self._enter = enter
        self._processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="tests-warm-")
        self._servers: list[subprocess.Popen[bytes]] = []

    def environ(self) -> Mapping[str, str]:
        """Return the variables that make programs start as forks."""
        if sys.platform != "linux":  # elsewhere programs start as usual
            return {}
        if not self._servers:
            self._start()
        return {"TESTS_WARM": self._folder.name, "PYTHONPATH": os.environ["PYTHONPATH"]}

    def close(self) -> None:
        """End the warm processes and the remaining programs."""
        for server in self._servers:
            server.communicate()
        self._folder.cleanup()

    def _start(self) -> None:
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        sockets = [socket_path(self._folder.name, server) for server in range(SERVERS)]
        command = [*self._enter, sys.executable, str(FOLDER / "server.py")]
        self._servers = [
            subprocess.Popen(
                [*command, path, *self._modules],
                stdin=subprocess.PIPE,
                env=os.environ | environ,
                start_new_session=True,
            )
            for path in sockets[: self._processes]
        ]
        for path in sockets[self._processes :]:
            os.symlink(sockets[0], path)
        wait_until(lambda: all(map(os.path.exists, sockets)), START_LIMIT)
