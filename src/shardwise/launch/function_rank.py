"""Runs the function of `sw.launch` as one rank, and sends its value back.

    python -m shardwise.launch.function_rank CALL RESULT ...   a new process: the descriptor of the
                                                               pickled call, and one for each rank
    function_fork.py                                           a forked process

Calls and results are files without a name, which only these processes can open.
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
    """Call `function`, and write its value to the descriptor of this rank.

    An error is reported like one of a script. Raises SystemExit with the exit code then.
    """
    try:
        value = function()
        _send(value, results[int(os.environ[RANK_VARIABLE])])
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            trace = trace.tb_next  # begin with the user's function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _send(value: Any, fd: int) -> None:
    import torch  # slow to import, and not needed if the call fails

    os.ftruncate(fd, 0)  # an earlier start of the run may have written here
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "wb", closefd=False) as file:
        try:
            torch.save(value, file)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UsageError(
                f"The function returned a {type(value).__name__}, which cannot be sent to the "
                f"caller of sw.launch: {error}. Return numbers, tensors, or lists and dicts of "
                "them."
            ) from None


def received(file: Any) -> Any:
    """Return the value that a rank wrote to `file`, with tensors on the CPU; None without one."""
    import torch

    if file.seek(0, os.SEEK_END) == 0:  # sys.exit(0) in the function
        return None
    file.seek(0)
    # The file has no name, and only the ranks of this run inherited it.
    return torch.load(file, map_location="cpu", weights_only=False)


# -- a new process -----------------------------------------------------------------------------


def main(call_fd: str, *results: str) -> None:
    """Load the call, and be the rank."""
    with open(int(call_fd), "rb", closefd=False) as file:
        length = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), length, 0)
        while len(data) < length:  # one call reads 2 GB at most
            data += os.pread(file.fileno(), length - len(data), len(data))
    call(_loaded(data), [int(fd) for fd in results])


def _loaded(data: bytes) -> Callable[[], Any]:
    """Load the pickled call, after the main module of the caller that it may refer to."""
    preparation, pickled = pickle.loads(data)
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined] # as in every process that is spawned
    try:
        spawn.prepare(preparation)
        function, arguments = pickle.loads(pickled)
    except (AttributeError, ImportError) as error:
        raise LaunchError(
            f"A new process cannot load the function of sw.launch, or its arguments: {error}. "
            "Import everything that they use from a module, or write start_method='fork'."
        ) from error
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    return partial(function, *arguments)


def dumped(pickled: bytes) -> bytes:
    """Return the input of `main`: the pickled function and arguments, and the main module."""
    return pickle.dumps((_preparation(), pickled))


def _preparation() -> dict[str, Any]:
    """Return the data that multiprocessing's `prepare` needs to import our main module.

    Its own function for that also settles the start method of this process, which is the user's.
    """
    main_module = sys.modules["__main__"]
    found = {"sys_path": sys.path, "sys_argv": sys.argv, "orig_dir": os.getcwd()}
    spec, path = getattr(main_module, "__spec__", None), main_file()
    if spec is not None:
        found["init_main_from_name"] = spec.name
    elif path is not None:
        found["init_main_from_path"] = path
    return found


def main_file() -> str | None:
    """Return the script that this process runs; None in a notebook and at a prompt."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
