"""Kills or stops ranks while they train, and records how and when the other ranks notice.

`serve` runs in a process that is forked from the warm one. It receives lists of cases, forks the
ranks of each case from itself, because only their parent can read their exit codes, and sends the
outcomes. Each case of a list starts after the fault of the previous one, while that case waits.
"""

import json
import os
import random
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

VICTIM, FAULTY_STEP, STEPS = 1, 3, 6
SECONDS_OF_SOME_STEPS = 0.2
"""Seconds within which a fault at a random moment has happened. The ranks train until it does."""

PHASES = ("backward", "step", "gather", "between")


@dataclass(frozen=True)
class Case:
    """A fault to inject. `phase` is one of PHASES, or "anywhere": then `seed` selects the moment.

    `number` is the signal. `hosts`, if given, assigns each rank to a simulated host.
    """

    phase: str
    number: int
    transport: str
    zero: int
    timeout: float
    seed: int = 0
    hosts: tuple[int, ...] = ()
    size: int = 3


@dataclass(frozen=True)
class Outcome:
    """The error that a surviving rank raised, and the seconds between the fault and that error.

    `code` is the exit code of its process, negative for a signal.
    """

    rank: int
    kind: str
    message: str
    seconds: float
    code: int


# -- in a rank ------------------------------------------------------------------------------------


def _train(case: Case, rank: int, told: int, faults: int) -> NoReturn:
    """Train until an error, which is written to the descriptor `told`.

    Fault times go to `faults`.
    """
    import torch

    import shardwise as sw
    from shardwise.world import world as worlds

    torch.set_num_threads(1)
    said: dict[str, Any] = {"kind": "", "message": "", "time": 0.0}
    try:
        world = sw.init(
            seed=0, device="cpu", quiet=True, transport=case.transport, timeout=case.timeout
        )
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Tanh()) for _ in range(4))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        engine = sw.Engine(model, optimizer, zero=case.zero, bucket_mb=0.03)
        world.barrier()
        fault = _Fault(case, faults)
        if rank == VICTIM:
            fault.prepare(model, engine)
        while fault.step < STEPS or case.phase == "anywhere":
            engine.backward(model(torch.randn(8, 96)).square().mean())
            engine.step()
            if rank == VICTIM and case.phase == "between":
                fault.when_due()
            fault.step += 1
    except Exception as error:
        said = {"kind": type(error).__name__, "message": str(error), "time": time.monotonic()}
    os.write(told, json.dumps(said).encode())
    os.close(told)
    worlds.leave()
    os._exit(3 if said["kind"] else 0)


class _Fault:
    """The signal that the victim sends to itself in the middle of the phase."""

    def __init__(self, case: Case, told: int) -> None:
        self.step = 0
        self._case = case
        self._told = told

    def strike(self) -> None:
        os.write(self._told, str(time.monotonic()).encode())
        os.kill(os.getpid(), self._case.number)

    def when_due(self, *_: Any) -> None:
        if self.step == FAULTY_STEP:
            self.strike()

    def prepare(self, model: Any, engine: Any) -> None:
        """Install the fault in the middle of the phase."""
        if self._case.phase == "gather":
            model[2].register_forward_pre_hook(self.when_due)
        elif self._case.phase == "backward":
            model[2].register_forward_hook(self._in_backward)
        elif self._case.phase == "step":
            self._in_update(engine._states.optimizer.inners)
        elif self._case.phase == "anywhere":
            moment = random.Random(self._case.seed).random() * SECONDS_OF_SOME_STEPS
            threading.Timer(moment, self.strike).start()

    def _in_backward(self, module: Any, given: Any, made: Any) -> None:
        made.register_hook(self.when_due)

    def _in_update(self, inners: Any) -> None:
        """Strike when some buckets are updated and being gathered, and others are not.

        If nothing is gathered, all buckets are updated in a single call.
        """
        calls = Counter[int]()
        last = 2 if self._case.zero in (1, 2) else 1

        def broken(update: Any, *args: Any) -> Any:
            calls[self.step] += 1
            if calls[self.step] == last:
                self.when_due()
            return update(*args)

        for inner in inners:
            inner.step = partial(broken, inner.step)


# -- in the process that forks them ---------------------------------------------------------------


def run(cases: list[Case]) -> list[list[Outcome]]:
    """Return, for each case, the outcomes of all ranks except the victim.

    Leaves no process behind.
    """
    return [_ends(*started) for started in [(case, *_start(case)) for case in cases]]


def _start(case: Case) -> tuple[list[tuple[int, int]], int]:
    """Fork the ranks, wait for the fault, and return its descriptor and the results of `_fork`."""
    read, write = os.pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        ranks = [_fork(case, rank, listener, write) for rank in range(case.size)]
    os.close(write)
    select.select([read], [], [])  # the fault, or the exit of all ranks
    return ranks, read


def _ends(case: Case, ranks: list[tuple[int, int]], read: int) -> list[Outcome]:
    victim, fd = ranks.pop(VICTIM)
    said = [json.loads(_read_all(fd) or '{"kind": "Died"}') for _, fd in ranks]
    codes = [_ended(pid) for pid, _ in ranks]
    os.kill(victim, signal.SIGKILL)
    _ended(victim)
    os.close(fd)
    moment = float(_read_all(read) or "nan")
    others = [rank for rank in range(case.size) if rank != VICTIM]
    return [
        Outcome(rank, one["kind"], one.get("message", ""), one.get("time", 0.0) - moment, code)
        for rank, one, code in zip(others, said, codes, strict=True)
    ]


def _fork(case: Case, rank: int, listener: socket.socket, faults: int) -> tuple[int, int]:
    """Return a rank's process id, and the descriptor to which the rank writes its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    prefix, size = "SHARDWISE_LAUNCH_", str(case.size)
    os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}LOCAL_RANK": str(rank)}
    os.environ |= {f"{prefix}SIZE": size, f"{prefix}LOCAL_SIZE": size}
    os.environ |= {f"{prefix}ADDRESS": "127.0.0.1"}
    os.environ |= {f"{prefix}PORT": str(listener.getsockname()[1])}
    if rank == 0:
        os.environ[f"{prefix}LISTEN_FD"] = str(listener.fileno())
    else:
        listener.close()
    if case.hosts:
        name = f"host{case.hosts[rank]}"
        socket.gethostname = lambda: name
    try:
        _train(case, rank, write, faults)
    finally:
        os._exit(1)


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def _ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve(connection: Connection, environ: Mapping[str, str]) -> None:
    """Run the cases that arrive on the connection, until it closes."""
    os.environ.clear()
    os.environ.update(environ)
    with suppress(EOFError):
        while True:
            connection.send(run(connection.recv()))
