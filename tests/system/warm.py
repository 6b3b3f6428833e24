"""Warm interpreters: programs of tests are forked from a process that has imported torch.

Importing torch, and its compiler with the first optimizer, is most of the time of a short program.
With `environ` in its environment every script that Python runs is such a fork, whoever starts it:
`shardwise run`, mpirun, another script, on a host of a namespace too. How programs start, and how a
rank finds the process of its launcher, is tested by those that are not; nor are those whose own
children a signal must not reach: it is passed on to all that a program has started.
A fork has the umask, the limits of resources and the cores of its server, not those of who asked.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.tools.verify.rank_client import SERVERS, socket_path
from tests.disk import wait_until

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "warm_python"
START_LIMIT = 240.0


class WarmPython:
    """Warm processes that have imported `modules` first, where they are there; made when asked for.

    Of two, each has a seed of `hash` of its own: rank 0 is forked from another one than rank 1.
    A program enters the network, name and mounts of who asked for it. Where those have process
    numbers of their own too, `enter` are the words that start a warm process there.
    """

    def __init__(self, *modules: str, processes: int = SERVERS, enter: Sequence[str] = ()) -> None:
        self._modules = modules
        self._enter = enter
        self._processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="tests-warm-")
        self._servers: list[subprocess.Popen[bytes]] = []

    def environ(self) -> Mapping[str, str]:
        """The variables of programs that are forked."""
        if sys.platform != "linux":  # elsewhere they start one by one
            return {}
        if not self._servers:
            self._start()
        folders = filter(None, (str(FOLDER), os.environ.get("PYTHONPATH")))
        return {"TESTS_WARM": self._folder.name, "PYTHONPATH": os.pathsep.join(folders)}

    def close(self) -> None:
        """End the processes and what is left of their programs."""
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
