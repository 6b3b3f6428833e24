"""Implements `shardwise.launch`, which starts ranks from Python and calls a function on each.

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
"""Names of the argument for the number of workers in Accelerate, torch and `shardwise run`."""

_CALLER = "sw.launch"
"""Source of the settings, as shown in error messages."""


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
    """Call `function(*args)` on several ranks of this host, and return their results.

    This is the equivalent of `shardwise run` for a function in a notebook cell, at a prompt or in a
    script. The function calls `sw.init` itself. Each rank's output is shown with a prefix. If a
    rank fails or the user presses Ctrl-C, all ranks are stopped. No process outlives the call.

    Args:
        function: The function that each rank calls.
        *args: Arguments of the function, the same on every rank.
        workers: Number of ranks. By default one per visible GPU, or 1 without a GPU.
        start_method: How to start the ranks.

            - `"spawn"` starts new processes, which import `function` and unpickle `args`. As with
              multiprocessing, a script must put the call under `if __name__ == "__main__":`.
            - `"fork"` copies this process, so that the function can use everything in memory. Not
              possible once this process has used CUDA.
            - `"auto"` (the default) spawns if a new process can import the function. Otherwise it
              forks, for example if the function is defined in a notebook.
        restarts: Maximum number of times to restart all ranks after a failure.
        grace: Seconds between SIGTERM and SIGKILL when the ranks are stopped.
        show: Ranks whose output is shown, such as `"0,2-3"` or `[0]`. By default all.
        log_dir: Folder for the ranks' output, with one file per rank.
        **settings: Settings of `shardwise run`, named after its flags, such as `zero=3`,
            `micro_batch_size=8` or `config="run.toml"`. Like flags, they override all other
            sources.

    Returns:
        The return value of each rank, ordered by rank, with tensors on the CPU.

    Raises:
        ConfigError: A setting is unknown or invalid. No rank was started.
        UsageError: The call is not possible here, for example inside a rank. No rank was started.
        LaunchError: The ranks cannot be started.
        RankFailed: A rank failed. The message names the rank and ends with its traceback.
        KeyboardInterrupt: The user pressed Ctrl-C, and the ranks were stopped.

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
    if flags.get("spares", "0") != "0":
        raise ConfigError(
            f"spares={flags['spares']} is not supported by sw.launch, which returns one result of "
            "each worker. Write a script, and start it with shardwise run -n N --survive K "
            "--spares S."
        )
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
        # Open one file per rank before starting any rank, so that all ranks inherit them. Pipes
        # would not do, because a rank with a large result would block until the pipe is read.
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
    # Outside a rank, detect only launchers that start a command once per rank. A notebook may run
    # in a batch job, whose variables do not describe ranks.
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
        # Report wrong arguments here, once, rather than as a failure of every rank.
        signature.bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{_name(function)}{signature} cannot be called with these arguments: {error}."
        ) from None


def _flags(settings: Mapping[str, Any]) -> dict[str, str]:
    """Convert settings to flag values. Raises ConfigError if a setting is not valid."""
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
    """Return a function that starts a rank. The rank calls `function` and writes its result.

    Raises UsageError if no start method works, with the reason for each.

    Args:
        function: The function to call.
        args: The function's arguments.
        method: Start method, one of METHODS.
        results: Descriptors of the files for the ranks' results.
        stack: Closes the files that are opened here.
    """
    faults: list[str] = []
    pickled = None if method == "fork" else _pickled_by_reference(function, args, faults)
    if pickled is None and method != "spawn":
        # Prefer forking to pickling the source, because forked ranks share everything in memory.
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
    """Return whether this process has used CUDA. Forked processes then cannot use it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return False
    # Counting GPUs initialises the driver too, but torch can detect that only in a forked process.
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _pickled_by_reference(
    function: Callable[..., Any], args: tuple[Any, ...], faults: list[str]
) -> bytes | None:
    """Pickle the call with a reference to `function`, which the new process imports.

    If that is not possible, appends the reason to `faults` and returns None.
    """
    if not _is_importable(function):
        faults.append(
            "spawn: the function is defined in a notebook or at a prompt, so a new process cannot "
            "import it. Put it into a module."
        )
        return None
    try:
        return pickle.dumps((function, args))
    except Exception as error:  # pickling a user's object may raise any exception
        faults.append(
            f"spawn: the function or its arguments cannot be pickled ({error}). Define it at the "
            "top level of a module, and create objects that cannot be pickled inside of it."
        )
        return None


def _is_importable(function: Callable[..., Any]) -> bool:
    plain = inspect.unwrap(getattr(function, "func", function))  # `func` of a partial
    if getattr(plain, "__module__", None) != "__main__":
        return True  # pickle itself checks functions in other modules
    script, code = function_rank.main_file(), getattr(plain, "__code__", None)
    # With `python -i train.py` the function may be defined at the prompt, not in train.py.
    return script is not None and (code is None or os.path.abspath(code.co_filename) == script)


def _pickled_by_value(
    function: Callable[..., Any], args: tuple[Any, ...], faults: list[str]
) -> bytes | None:
    """Pickle the call with the code of `function` and everything that the code refers to.

    If that is not possible, appends the reason to `faults` and returns None.
    """
    if find_spec("cloudpickle") is None:
        faults.append("spawn with its source: pip install cloudpickle")
        return None
    try:
        dumped: bytes = import_module("cloudpickle").dumps((function, args))
    except Exception as error:  # pickling a user's object may raise any exception
        faults.append(f"spawn with its source: cloudpickle cannot pickle it ({error}).")
        return None
    return dumped


# -- output and errors --------------------------------------------------------------------------


def _streams() -> dict[int, TextIO]:
    """Return the Python streams to write to instead of descriptors 1 and 2, as in a notebook."""
    pairs = (STDOUT, sys.stdout, sys.__stdout__), (STDERR, sys.stderr, sys.__stderr__)
    found = {}
    for fd, stream, original in pairs:
        if stream is not None:
            stream.flush()  # so that earlier output of the caller appears first
            if stream is not original:
                found[fd] = stream
    return found


def _raise_if_it_failed(ending: Ending, console: Console) -> None:
    """Raise the error that describes `ending`, unless the run succeeded."""
    if ending.code == 0:
        return
    if ending.asked is not None:
        console.say(ending.words)
        if ending.code == SAVED:
            sys.exit(SAVED)  # the same exit code as `shardwise run`, because a restart can resume
        if ending.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if ending.asked == signal.SIGPIPE:
            raise BrokenPipeError(errno.EPIPE, console.broken)
        # The signal was meant for this process too. Raise it now that the ranks have exited.
        signal.raise_signal(ending.asked)
    words = ending.words.strip().removeprefix("shardwise: ")
    failure = ending.failure
    said = words or (f"{failure.what} ({failure.why})" if failure else "The ranks were ended.")
    raise RankFailed(said, rank=failure.rank if failure else None, exit_code=ending.code)
