"""Asks a PMIx server for the number of ranks.

PRRTE's prterun, and PALS with --pmi=pmix, set only PMIX_RANK, the rank's own number. The process
that started the rank is a PMIx server, which knows everything else. We load the same library file
that the server has loaded, so that client and server have the same version. The request runs in a
child process, so that the script can still initialise MPI later.

PMIx standard 4.1: PMIx_Init, PMIx_Get and PMIx_Finalize (section 5), pmix_proc_t and pmix_value_t
(section 3.2).
"""

import ctypes
import ctypes.util
import subprocess
import sys
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net.identity import Identity
from shardwise.net.launchers import processes
from shardwise.net.launchers.signs import refusal
from shardwise.net.launchers.variables import Environ, RankVariables
from shardwise.net.python_command import python_words

PMIX = RankVariables(
    launcher="PMIx",
    rank="PMIX_RANK",
    size="PMIX_JOB_SIZE",
    local_rank="PMIX_LOCAL_RANK",
    local_size="PMIX_LOCAL_SIZE",
    job=("PMIX_NAMESPACE",),
)
"""PMIx sets the rank and the namespace. The other names are ours, for the server's replies."""

_SAYS_RANK = {"OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID"}
"""Variables of launchers that are always innermost. If one is set, the server is not asked."""

_SAYS_SIZE = {"SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "PMI_SIZE"}
"""Variables of launchers that may be the server, and that provide the size without a request.

In a rank of PRRTE they describe PRRTE's daemon.
"""

KEYS = {
    PMIX.size: (b"pmix.job.size", False),
    "PMIX_LOCAL_SIZE": (b"pmix.local.size", False),
    "PMIX_LOCAL_RANK": (b"pmix.lrank", True),
}
"""Maps each variable to the server's key, and whether it describes this rank (not the job)."""

LIMIT = 20.0
"""Seconds to wait for the server's reply."""

_WILDCARD = 2**32 - 2
_UINT16 = 13
"""PMIX_UINT16, the type of a local rank. Sizes have 32 bits."""


def read(environ: Environ) -> Identity | None:
    """Read PMIX_RANK and the server's replies. Return None if there are no replies, or under PALS.

    Raises LaunchError for a rank of PRRTE whose server did not reply.
    """
    # In a rank of PRRTE, the variables of PALS or a scheduler describe PRRTE's daemon, which is one
    # task on each host. They must not be mistaken for the rank's.
    if PMIX.size in environ:
        is_pals = "PALS_RANKID" in environ and not _is_prrte(environ)
        return None if is_pals else PMIX.read(environ)
    if _is_prrte(environ) and not _SAYS_RANK & environ.keys():
        names = ("PMIX_RANK", "PMIX_NAMESPACE")
        raise LaunchError(refusal([f"{name}={environ[name]}" for name in names if name in environ]))
    return None


def _is_prrte(environ: Environ) -> bool:
    return environ.get("PMIX_NAMESPACE", "").startswith(("prterun", "prte"))


def ask(environ: Environ) -> dict[str, str]:
    """Return the PMIx server's replies as variables, or {} if there is no server."""
    if not {"PMIX_RANK", "PMIX_NAMESPACE"} <= environ.keys() or _SAYS_RANK & environ.keys():
        return {}
    if not _is_prrte(environ) and _SAYS_SIZE & environ.keys():
        return {}
    rank = environ["PMIX_NAMESPACE"], environ["PMIX_RANK"]
    if rank not in _answers:
        _answers[rank] = _answer(environ)
    return _answers[rank]


_answers: dict[tuple[str, str], dict[str, str]] = {}
"""Cached replies by namespace and rank, because each request starts a process."""


def _answer(environ: Environ) -> dict[str, str]:
    library = _loaded_above() or ctypes.util.find_library("pmix")
    if library is None:
        return {}
    try:
        done = subprocess.run(
            [*python_words(__name__, sys.executable), library],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}  # `read` then raises an error
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in lines if name in KEYS}


def _loaded_above() -> str | None:
    """Return the path of the PMIx library in the nearest ancestor process that has loaded one."""
    for pid, _ in processes.ancestors():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # another user's process
            continue
        for line in maps.splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            if Path(path).name.startswith("libpmix.so"):
                return path
    return None


class _Process(ctypes.Structure):
    """The C structure pmix_proc_t."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """The C structure pmix_value_t, restricted to unsigned integers."""

    _fields_ = (("type", ctypes.c_uint16), ("number", ctypes.c_uint64))


def main(path: str) -> None:
    """Print the server's replies as NAME=number, using the PMIx library at `path`."""
    library = ctypes.CDLL(path)
    me = _Process()
    if library.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0)):
        sys.exit(1)
    everyone = _Process(me.nspace, _WILDCARD)
    for name, (key, is_own) in KEYS.items():
        value = ctypes.POINTER(_Value)()
        who = ctypes.byref(me if is_own else everyone)
        if not library.PMIx_Get(who, key, None, ctypes.c_size_t(0), ctypes.byref(value)):
            bits = 16 if value.contents.type == _UINT16 else 32
            print(f"{name}={value.contents.number & (2**bits - 1)}")
    library.PMIx_Finalize(None, ctypes.c_size_t(0))


if __name__ == "__main__":
    main(sys.argv[1])
