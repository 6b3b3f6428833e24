"""Starts and stops the fork servers from which the ranks of short runs are forked."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.launch import program
from shardwise.launch.orphan_reaper import LAST_WAIT, end_within
from shardwise.net.python_command import python_words
from shardwise.tools.warm import rank_client
from shardwise.tools.warm.fork_server import PACKAGES
from shardwise.tools.warm.rank_client import SERVERS, socket_path

SERVER = "shardwise.tools.warm.fork_server"
CLIENT = Path(rank_client.__file__)

LARGE_PACKAGES = {
    *("accelerate", "datasets", "lightning", "matplotlib", "peft", "pytorch_lightning", "scipy"),
    *("sklearn", "torchvision", "transformers", "trl"),
}
"""Packages that are slow to import and independent of a rank's environment variables."""

_SETS_VARIABLES = re.compile(r"environ|putenv|dotenv")


class WarmRanks:
    """Context manager for the warm processes from which ranks are forked (see fork_server.py).

    Args:
        words: The script and its arguments, or -m MODULE and its arguments.
        module: The module that each rank runs. Its `main` gets the arguments passed to `words`.
        environ: Environment variables of the warm processes. Each rank gets its client's instead.
        packages: Modules to import. Default: PACKAGES, and the LARGE_PACKAGES that the script
            imports.
        prepare: A function, as MODULE:NAME, that the warm processes call before they import the
            script's packages.
        servers: Number of warm processes.
    """

    def __init__(
        self,
        words: Sequence[str],
        module: str,
        environ: Mapping[str, str],
        *,
        packages: Sequence[str] | None = None,
        prepare: str = "",
        servers: int = SERVERS,
    ) -> None:
        self._module = module
        before = PACKAGES if packages is None else packages
        large = large_imports(words) if packages is None else ()
        imports = " ".join(filter(None, (*before, module, prepare, *large)))
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-warm-"))
        self._processes = [
            self._start(server, imports, environ)
            for server in range(servers if sys.platform == "linux" else 0)
        ]

    def _start(
        self, server: int, imports: str, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # Listen before the process exists, so that a rank that connects while torch is still being
        # imported waits in the backlog.
        with socket.socket(socket.AF_UNIX) as listener:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                # A short name: see rank_client.py.
                listener.bind(socket_path(f"/proc/self/fd/{folder}", server))
            finally:
                os.close(folder)
            listener.listen(64)
            return subprocess.Popen(
                [*python_words(SERVER), str(listener.fileno()), imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches only the runs
                env=dict(environ),
                pass_fds=[listener.fileno()],
            )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def are_running(self) -> bool:
        """Whether there are warm processes. They exist only on Linux."""
        return bool(self._processes)

    def words(
        self, server: int, arguments: Sequence[str], *, module: str | None = None
    ) -> list[str]:
        """Return the command line that starts a rank: the script, then `arguments`.

        If `module` is set, the process runs this module instead of the ranks' module.
        """
        return [str(CLIENT), str(self._folder), str(server), module or self._module, *arguments]

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        # Standard input of all processes is closed first, so that they exit in parallel.
        for process in self._processes:
            end_within(process, LAST_WAIT)
        shutil.rmtree(self._folder, ignore_errors=True)


def large_imports(words: Sequence[str]) -> list[str]:
    """Return the LARGE_PACKAGES that the script imports and that can be imported in advance.

    Packages read environment variables such as HF_HOME on import. The result is therefore empty if
    the script, or a module in its folder, sets environment variables. A package is left out if the
    folder contains a module with the same name, because the script would import that module.
    """
    name = next((word for word in words if program.is_script(word)), "")
    packages: set[str] = set()
    for text in own_sources(name):
        # The variables may affect any package, so import nothing in advance.
        if _SETS_VARIABLES.search(text):
            return []
        packages |= {each for each in LARGE_PACKAGES if program.imports(text, each)}
    return sorted(packages - _modules_beside(name).keys())


def own_sources(name: str) -> Iterator[str]:
    """Yield the source of the script `name`, and of each module in its folder that it imports."""
    beside, texts = _modules_beside(name), [program.text_of(name)]
    while texts:
        text = texts.pop()
        yield text
        for each in [each for each in beside if program.imports(text, each)]:
            path = beside.pop(each)
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            texts.append("\n".join(program.text_of(str(file)) for file in files))


def _modules_beside(name: str) -> dict[str, Path]:
    """Return the modules and packages in a script's folder and in the working directory."""
    folders = [folder for folder in (Path(name).parent, Path()) if folder.is_dir()]
    paths = (path for folder in folders for path in folder.iterdir())
    return {
        path.stem: path
        for path in paths
        if path.stem.isidentifier() and (path.suffix == ".py" or path.is_dir())
    }
