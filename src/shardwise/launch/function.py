"""Starts the ranks of a run from Python: `shardwise.launch` calls a function on each rank.

settings ─▶ fork or new process ─▶ launch/one_host.py, as `shardwise run` ─▶ one result per rank
"""

from __future__ import annotations

import errno
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any, TextIO

import torch

from shardwise import config
from shardwise.config import values
from shardwise.errors import ConfigError, RankFailed, UsageError
from shardwise.launch import command_line, function_fork, function_rank, one_host, resources
from shardwise.launch.console import STDERR, STDOUT, Console
from shardwise.launch.flags import ON_THIS_HOST, refuse_without_effect
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.worker import Begin, program
from shardwise.net import hosts
from shardwise.net.environment import RANK_VARIABLE
from shardwise.net.hosts import Host
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.python_command import python_words
from shardwise.net.restarts import SAVED, Ending
from shardwise.world.world import has_joined

METHODS = ("auto", "fork", "spawn")

_MEANS_WORKERS = ("num_processes", "nprocs", "nproc_per_node", "world_size", "size", "n", "np")
"""Keywords for the number of workers in Accelerate, torch and `shardwise run`."""

_CALLER = "sw.launch"
"""Names the source of the settings in messages."""


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    start_method: str = "auto",
    restarts: int = 0,
    grace: float = 5.0,
    show: str | Sequence[int] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call `function(*args)` on each of several ranks of this host, and return their results.

    This is `shardwise run` for a function, from a notebook cell, a prompt or a script. The function
    calls `sw.init` itself. Output of ranks is shown with a prefix. Ctrl-C, or the failure of one
    rank, ends all ranks. No process outlives the call.

    Args:
        function: The function that each rank calls.
        *args: Its arguments, the same on every rank.
        workers: The number of ranks. By default one per visible GPU, or 1 without a GPU.
        start_method: `"spawn"` starts new processes, which import `function` and get `args`
            pickled. A script needs `if __name__ == "__main__":` around the call, as with
            multiprocessing. `"fork"` copies this process, so that the function can use everything
            in memory. It is not possible once this process has used CUDA. `"auto"` (the default)
            spawns if a new process can import the function, and forks otherwise, such as for a
            function that is defined in a notebook.
        restarts: Restart all ranks after a failure, at most this many times.
        grace: Seconds between SIGTERM and SIGKILL when the ranks have to end.
        show: The ranks whose output is shown, such as `"0,2-3"` or `[0]`. By default all.
        log_dir: A folder for the output of each rank, as one file per rank.
        **settings: Settings of `shardwise run`, under the names of its flags: `zero=3`,
            `micro_batch_size=8`, `config="run.toml"`. They override all other sources, as flags do.

    Returns:
        The return value of each rank, in the order of ranks. Tensors are on the CPU.

    Raises:
        ConfigError: A setting is unknown or invalid. No rank was started.
        UsageError: The call itself is wrong, such as one inside a rank. No rank was started.
        LaunchError: The ranks cannot be started.
        RankFailed: A rank failed. The message names it and ends with its traceback.
        KeyboardInterrupt: Ctrl-C ended the ranks.

    Example:
        ```python
        import torch, shardwise as sw

        def train(steps):
            world = sw.init(seed=0)
            model = torch.nn.Linear(8, 1).to(world.device)
            engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
            dataset = torch.utils.data.TensorDataset(torch.randn(256, 8))
            for (x,) in sw.Loader(dataset, batch_size=32, shuffle=True):
                engine.backward(model(x).pow(2).mean())
                stats = engine.step()
                if engine.steps == steps:
                    break
            return stats.loss

        if __name__ == "__main__":
            losses = sw.launch(train, 5, workers=2, zero=3)
        ```

    The interface follows Accelerate's `notebook_launcher` and torch's `mp.spawn`.
    """
    _refuse_nested()
    _check_call(function, args)
    flags = _flags(settings)
    if workers is not None:
        size = int(_parsed("workers", workers, values.whole(1, values.MOST_ON_A_HOST)))
    else:
        size = 1 if flags.get("device") == "cpu" else max(1, resources.gpu_count())
    if show is not None and not isinstance(show, str):
        show = ",".join(map(str, show))
    spec = RunSpec(
        words=(_name(function),),
        module=True,  # it is Python, and its ranks are expected to join
        size=size,
        shares=tuple(hosts.spread([Host("localhost", size)], total=size)),
        flags=flags,
        restarts=_parsed("restarts", restarts, values.whole(0)),
        grace=_parsed("grace", grace, values.number(0, values.LONGEST)),
        shown=None if show is None else hosts.ranks(show, size, "show"),
        log_dir=None if log_dir is None else os.fspath(log_dir),
    )
    method = _parsed("start_method", start_method, values.one_of(*METHODS))
    with ExitStack() as stack:
        # One file per rank, opened before anything is started, so that every rank inherits them.
        # Not pipes: a large result would block its rank until somebody reads it.
        results = [_unnamed_file(stack) for _ in range(size)]
        fds = [file.fileno() for file in results]
        begin = _begin(function, args, method, fds, stack)
        console = spec.console(os.environ, _streams())
        ending = one_host.run_begun(spec, console, begin)
        _raise_if_it_failed(ending, console)
        console.say(ending.words)
        return [function_rank.read_result(file) for file in results]


# -- checks before the start -------------------------------------------------------------------


def _refuse_nested() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "sw.launch was called while a new process imported the script. Put the call under "
            '`if __name__ == "__main__":`.'
        )
    # Outside a rank ask only for commands, not for ranks: a notebook may run in a batch job, whose
    # variables do not describe ranks yet.
    is_rank = RANK_VARIABLE in os.environ
    size = (launcher_detection.identify if is_rank else launcher_detection.around_command)().size
    if is_rank or size > 1:
        raise UsageError(
            f"sw.launch was called in one of the {size} ranks of a run, but it starts ranks "
            "itself. Call the function directly here."
        )
    if has_joined():
        raise UsageError(
            "sw.launch was called after sw.init, but its ranks call sw.init themselves. Call "
            "sw.init only in the function, and restart the kernel of a notebook."
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "sw.launch was called outside the main thread, but Python delivers signals such as "
            "Ctrl-C only there. Call it in the main thread."
        )


def _check_call(function: Any, args: tuple[Any, ...]) -> None:
    if not callable(function):
        raise UsageError(
            f"sw.launch takes a function and its arguments, not {function!r}. To run a script: "
            "shardwise run -n 2 train.py"
        )
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            "sw.launch takes a plain function, not a coroutine. Call asyncio.run in a function."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C has no signature
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{_name(function)}{signature} cannot be called with these arguments: {error}."
        ) from None


def _flags(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings as texts of flags. Raises ConfigError."""
    own = list(inspect.signature(launch).parameters)[2:-1]
    flags = {}
    for name, value in settings.items():
        if value is None:
            continue
        if name in ("config", "deepspeed"):
            flags[name] = os.fspath(value)
        elif name in config.FIELDS:
            config.parse(name, value, _CALLER)
            flags[name] = values.as_text(value, config.FIELDS[name].metadata["parse"])
        elif name in _MEANS_WORKERS:
            raise ConfigError(f"{_CALLER}: there is no setting {name!r}. Write workers={value}.")
        else:
            raise config.unknown_key(name, (*own, *config.FIELDS), _CALLER)
    command_line.check_settings(flags)
    refuse_without_effect(ON_THIS_HOST, flags)
    return flags


def _parsed(name: str, value: Any, parse: values.Parse[Any]) -> Any:
    try:
        return parse(values.as_text(value, parse))
    except ValueError as wanted:
        raise ConfigError(f"{_CALLER}: {name} takes {wanted}, not {value!r}.") from None


def _unnamed_file(stack: ExitStack) -> IO[bytes]:
    return stack.enter_context(tempfile.TemporaryFile())


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


# -- fork, or a new process ---------------------------------------------------------------------


def _begin(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    method: str,
    results: Sequence[int],
    stack: ExitStack,
) -> Begin:
    """Return a function that starts a rank, which calls `function` and writes to `results`.

    Raises UsageError if no start method works, with the reason for each.
    """
    faults: list[str] = []
    pickled = None if method == "fork" else _pickled_by_reference(function, args, faults)
    if pickled is None and method != "spawn":
        # Fork rather than pickle the source: forked ranks see everything that is in memory.
        if not _has_used_cuda():
            call = partial(function_rank.call, partial(function, *args), results)
            return function_fork.fork(call, results, stack)
        faults.append(_USED_CUDA)
    if pickled is None and method != "fork":
        pickled = _pickled_by_value(function, args, faults)
    if pickled is None:
        reasons = "".join(f"\n- {fault}" for fault in faults)
        raise UsageError(f"sw.launch cannot start ranks of {_name(function)}:{reasons}")
    file = _unnamed_file(stack)
    file.write(function_rank.dump_call(pickled))
    file.flush()
    inherited = [file.fileno(), *results]
    begin = program([*python_words(function_rank.__name__), *map(str, inherited)])
    return lambda environ, fds, streams: begin(environ, [*fds, *inherited], streams)


_USED_CUDA = (
    "fork: this process has used CUDA, so a forked process cannot. Restart it (the kernel of a "
    "notebook), and call sw.launch before anything uses CUDA. torch.cuda.is_available() uses it "
    "too, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set. Or write start_method='spawn'."
)


def _has_used_cuda() -> bool:
    """Return whether forked processes could not use CUDA because this one has."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return False
    # Counting GPUs initialises the driver too, and only a forked process can detect that.
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _pickled_by_reference(
    function: Callable[..., Any], args: tuple[Any, ...], faults: list[str]
) -> bytes | None:
    """Pickle a call whose function a new process can import.

    Returns None, and appends a line to `faults`, if it cannot.
    """
    if not _is_importable(function):
        faults.append(
            "spawn: the function is defined in a notebook or at a prompt, so a new process cannot "
            "import it. Put it into a module."
        )
        return None
    try:
        return pickle.dumps((function, args))
    except Exception as error:  # objects may raise anything when they are pickled
        faults.append(
            f"spawn: the function or its arguments cannot be pickled ({error}). Define it at the "
            "top level of a module, and create objects that cannot be pickled inside of it."
        )
        return None


def _is_importable(function: Callable[..., Any]) -> bool:
    """Return whether a new process finds the function under its name in the main module."""
    plain = inspect.unwrap(getattr(function, "func", function))  # `func` of a partial
    if getattr(plain, "__module__", None) != "__main__":
        return True  # pickle checks other modules itself
    script, code = function_rank.main_file(), getattr(plain, "__code__", None)
    # The function may be from the prompt of `python -i train.py` and not from train.py.
    return script is not None and (code is None or os.path.abspath(code.co_filename) == script)


def _pickled_by_value(
    function: Callable[..., Any], args: tuple[Any, ...], faults: list[str]
) -> bytes | None:
    """Pickle a call with everything that it refers to.

    Returns None, and appends a line to `faults`, if that fails.
    """
    if find_spec("cloudpickle") is None:
        faults.append("spawn with its source: pip install cloudpickle")
        return None
    try:
        dumped: bytes = import_module("cloudpickle").dumps((function, args))
    except Exception as error:  # objects may raise anything when they are pickled
        faults.append(f"spawn with its source: cloudpickle cannot pickle it ({error}).")
        return None
    return dumped


# -- output, and the end ------------------------------------------------------------------------


def _streams() -> dict[int, TextIO]:
    """Return the Python streams that replace descriptors 1 and 2, as in a notebook."""
    pairs = (STDOUT, sys.stdout, sys.__stdout__), (STDERR, sys.stderr, sys.__stderr__)
    found = {}
    for fd, stream, original in pairs:
        if stream is not None:
            stream.flush()  # so that earlier output of the caller is shown first
            if stream is not original:
                found[fd] = stream
    return found


def _raise_if_it_failed(ending: Ending, console: Console) -> None:
    """Raise the error for the caller if the run did not succeed."""
    if ending.code == 0:
        return
    if ending.asked is not None:
        console.say(ending.words)
        if ending.code == SAVED:
            sys.exit(SAVED)  # like `shardwise run`: the next start resumes
        if ending.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if ending.asked == signal.SIGPIPE:
            raise BrokenPipeError(errno.EPIPE, console.broken)
        # The signal was meant for this process too. Raise it now that the ranks have ended.
        signal.raise_signal(ending.asked)
    words = ending.words.strip().removeprefix("shardwise: ")
    failure = ending.failure
    said = words or (f"{failure.what} ({failure.why})" if failure else "The ranks were ended.")
    raise RankFailed(said, rank=failure.rank if failure else None, exit_code=ending.code)
