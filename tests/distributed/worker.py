"""One rank of a warm group: it joins once, then runs the cases that its group sends.

group.py forks it from a process that has imported torch, and passes one end of a connection and
keyword arguments for `shardwise.init`. The argument `hosts` lists the simulated host of each rank.
A message is ("run", pickled (function, args)), ("sync",) or ("end",). End of file means that the
session has died.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SECONDS_A_COLLECTIVE_MAY_WAIT = 60


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A rank's outcome for a case: a pickled result, or an error message.

    `calls` is the number of collectives that this rank has started. If it differs between ranks,
    the group cannot be used again.
    """

    result: bytes = b""
    error: tuple[str, str] | None = None
    module: str = ""
    """Module of the error's type."""
    trace: str = ""
    secondary: bool = False
    calls: int = 0


def main(
    connection: Connection, printed: int, environ: Mapping[str, str], settings: dict[str, Any]
) -> None:
    """Run as a rank. `printed` is the descriptor to which stdout and stderr are redirected."""
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the session, which stops the ranks
    # As in a user's process on Linux. Otherwise each DataLoader worker would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    serve(connection, settings)


def serve(connection: Connection, settings: dict[str, Any]) -> None:
    """Join the group that the environment describes, and run cases until the connection closes."""
    world = _join(settings)
    # Imported objects are never garbage, so collections between cases need not visit them.
    gc.collect()
    gc.freeze()
    connection.send("ready")
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message[0] == "end":
            return
        if message[0] == "sync":
            world.barrier()
            connection.send("in step")
        else:
            connection.send(_run(world, message[1]))


def _join(settings: dict[str, Any]) -> Any:
    import torch

    import shardwise.world.initialize

    hosts = settings.pop("hosts", None)
    if hosts is not None:
        name = f"host{hosts[int(os.environ['SHARDWISE_LAUNCH_RANK'])]}"
        socket.gethostname = lambda: name
    torch.set_num_threads(1)
    world = shardwise.world.initialize.init(
        **{"seed": 0, "device": "cpu", "quiet": True, "timeout": SECONDS_A_COLLECTIVE_MAY_WAIT}
        | settings
    )
    world.first_settings = world.settings  # type: ignore[attr-defined]
    return world


def _run(world: Any, case: bytes) -> Outcome:
    """Run one case in a world with the state it has after init, treating warnings as errors."""
    from shardwise.errors import CollectiveError
    from shardwise.model import activation_offload
    from shardwise.states.storage import storage

    environ = dict(os.environ)
    # Cases set these to use several spans, or to offload small tensors.
    span, least = storage.SPAN, activation_offload.LEAST
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch compares num_workers with the cores of this machine
            warnings.filterwarnings("ignore", "This DataLoader will create")
            # Python 3.12 warns of what torch's DataLoader does by default
            warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork")
            _reset(world)
            function, args = pickle.loads(case)
            done = {"result": pickle.dumps(function(world, *args))}
    except BaseException as error:
        done = {
            "error": (type(error).__name__, str(error)),
            "module": type(error).__module__,
            "trace": traceback.format_exc(),
            "secondary": isinstance(error, CollectiveError),
        }
    finally:
        os.environ.clear()
        os.environ.update(environ)
        storage.SPAN, activation_offload.LEAST = span, least
    return Outcome(calls=getattr(world.collectives, "_calls", 0), **done)


def _reset(world: Any) -> None:
    import torch

    from shardwise.world import randomness
    from shardwise.world.common_calls import CommonCalls
    from shardwise.world.current_batch import CurrentBatch

    gc.collect()
    world.current_batch, world.engines = CurrentBatch(), 0
    world.calls = CommonCalls()
    world.seed, world.settings = 0, world.first_settings
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    randomness.seed_everything(0)
    random.seed(0)
