"""Calls the function of `sw.launch` in a rank, and returns its result to the launcher.

    python -m shardwise.launch.function_rank CALL RESULT ...   in a new process
    function_fork.py                                           in a forked process

CALL is the file descriptor of the pickled call. Each RESULT is the file descriptor for one rank's
result. The files have no name, so no other process can open them.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import process, spawn
from typing import Any

from shardwise.errors import LaunchError, UsageError
from shardwise.net.environment import RANK_VARIABLE

# -- a rank ------------------------------------------------------------------------------------


def call(function: Callable[[], Any], results: Sequence[int]) -> None:
    """Call `function`, and write its result to this rank's descriptor.

    If `function` raises an error, reports the error as for a script, and raises SystemExit with the
    exit code.

    Args:
        function: The function to call.
        results: Descriptors for the results of all ranks.
    """
    try:
        value = function()
        _send(value, results[int(os.environ[RANK_VARIABLE])])
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            trace = trace.tb_next  # start the traceback at the user's function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _send(value: Any, fd: int) -> None:
    import torch  # imported here, because it is slow and not needed if the call fails

    os.ftruncate(fd, 0)  # this rank may have written a result before a restart
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "wb", closefd=False) as file:
        try:
            torch.save(value, file)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UsageError(
                f"The function returned a {type(value).__name__}, which cannot be sent to the "
                f"caller of sw.launch: {error}. Return numbers, tensors, or lists and dicts of "
                "these."
            ) from None


def read_result(file: Any) -> Any:
    """Return the result that a rank wrote to `file`, with tensors on the CPU.

    Returns None if the rank wrote no result.
    """
    import torch

    if file.seek(0, os.SEEK_END) == 0:  # the function called sys.exit(0)
        return None
    file.seek(0)
    # Unpickling is safe, because the file is unnamed and only this run's ranks inherited it.
    return torch.load(file, map_location="cpu", weights_only=False)


# -- a new process -----------------------------------------------------------------------------


def main(call_fd: str, *results: str) -> None:
    """Load the pickled call and run it.

    Args:
        call_fd: Descriptor of the file with the call.
        results: Descriptors for the results of all ranks.
    """
    with open(int(call_fd), "rb", closefd=False) as file:
        # Use pread, because all ranks share the file position.
        length = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), length, 0)
        while len(data) < length:  # a single call reads at most 2 GB
            data += os.pread(file.fileno(), length - len(data), len(data))
    call(_load(data), [int(fd) for fd in results])


def _load(data: bytes) -> Callable[[], Any]:
    """Import the caller's main module, and load the pickled call, which may refer to it."""
    preparation, pickled = pickle.loads(data)
    current = process.current_process()
    # multiprocessing sets this in the processes that it spawns. It makes `sw.launch` raise an error
    # if the main module calls it while it is imported.
    current._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(preparation)
        function, arguments = pickle.loads(pickled)
    except (AttributeError, ImportError) as error:
        raise LaunchError(
            f"A new process cannot load the function of sw.launch or its arguments: {error}. "
            "Import everything that they use from a module, or write start_method='fork'."
        ) from error
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    return partial(function, *arguments)


def dump_call(pickled: bytes) -> bytes:
    """Return the input for `main`: the pickled call, and how to import the main module."""
    return pickle.dumps((_preparation(), pickled))


def _preparation() -> dict[str, Any]:
    """Return the arguments with which multiprocessing's `prepare` imports the main module."""
    # multiprocessing's own function would also set the start method of this process, which the user
    # may still want to choose.
    main_module = sys.modules["__main__"]
    found = {"sys_path": sys.path, "sys_argv": sys.argv, "orig_dir": os.getcwd()}
    spec, path = getattr(main_module, "__spec__", None), main_file()
    if spec is not None:
        found["init_main_from_name"] = spec.name
    elif path is not None:
        found["init_main_from_path"] = path
    return found


def main_file() -> str | None:
    """Return the path of the script that this process runs, or None if it is not a script."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
