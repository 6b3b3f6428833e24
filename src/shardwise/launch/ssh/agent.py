"""The agent that the launcher starts on each of several hosts: it runs the ranks of this host.

    launcher                  agent
        <- hello              versions, clock, where it was reached
    check ->                  is the program here? which address, which port?
        <- ready | refused
    start ->                  the ranks run           (of islands: see agent_islands.py)
        <- output, end, saves ...
    signal, ask, resize, ended ->
    close ->                  it ends, as it does when the connection ends or falls silent

It reads its standard input and writes its standard output, which ssh carries. Whatever happens,
its orphan reaper ends the ranks when it ends.
"""

import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.errors import LaunchError
from shardwise.launch import failure_report, program
from shardwise.launch.local_workers import HostTask, LocalWorkers, RankExit
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import protocol
from shardwise.launch.ssh.agent_islands import AgentIslands
from shardwise.launch.worker import WorkerStreams
from shardwise.net import network

IN, OUT = 0, 1
FIRST_PATIENCE = 60.0
"""Seconds without a heartbeat after which the launcher is lost, until it says its own number."""

BEAT = 1.0
"""Seconds between two signs of life."""

REAPER_SLACK = 3.0
"""Seconds beyond the patience after which the reaper takes this process for stopped: the launcher
notices it first, and says so."""

FULL = 2**20
"""Bytes on their way to the launcher beyond which the ranks' output waits in its pipes."""


class Agent:
    """The part of a run that is on this host."""

    def __init__(self, signals: Signals, stack: ExitStack) -> None:
        self._signals = signals
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._out = b""
        self._paused = False
        self._listener: socket.socket | None = None
        self._parts: dict[int, LocalWorkers] = {}
        """The ranks that run here, together as part 0, or each island by itself."""
        self._former: list[LocalWorkers] = []
        """Islands that were started anew, of which something may be left."""
        self._starts = count()
        self._islands = AgentIslands(self._send, self._selector, stack, self._run_part)
        self._patience = FIRST_PATIENCE
        self._heard = time.monotonic()
        self._open = True
        kinds = {**protocol.TO_AGENT, **protocol.TO_ISLANDS}
        self._receiver = protocol.MessageReader(kinds, self._obey, lambda noise: None)

    def run(self) -> None:
        """Obey the launcher until it closes the connection, or falls silent."""
        for fd in (IN, OUT):
            os.set_blocking(fd, False)
        self._selector.register(IN, selectors.EVENT_READ, self._read)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_signals)
        self._send("hello", **_hello(os.environ))
        beat_at = time.monotonic()
        while self._open:
            now = time.monotonic()
            if now >= beat_at:
                self._beat()
                beat_at = now + BEAT
            left = min(self._heard + self._patience, beat_at) - now
            for key, _ in self._selector.select(max(0.0, left)):
                self._guarded(key.data)
            # Others may get the numbers of processes that have ended, and must not end with ours.
            self._former = [each for each in self._former if not each.release()]
            for workers in self._parts.values():
                workers.release()
            if time.monotonic() > self._heard + self._patience and not _has_come():
                why = f"nothing has come from the launcher for {self._patience:g} s"
                self._send("refused", why=f"{why}, so the ranks there are ended.")
                return

    def _beat(self) -> None:
        """Send the launcher and the reaper a sign of life."""
        if not self._out:  # else the launcher has not read what was sent before
            self._out = protocol.HEARTBEAT
            self._write()
        if self._parts:
            self._reaper.beat()

    def _obey(self, message: protocol.Message) -> None:
        kind = message.pop("kind")
        obeys = self._islands if kind in protocol.TO_ISLANDS else self
        self._guarded(partial(getattr(obeys, f"on_{kind}"), **message))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Do something; what goes wrong with it is the launcher's to tell."""
        try:
            call()
        except protocol.ProtocolError:
            raise
        except LaunchError as error:
            self._send("refused", why=str(error))
        except OSError as error:
            self._send("refused", why=failure_report.os_error_sentence(error))

    def on_check(
        self,
        *,
        words: list[str],
        module: bool,
        patience: float,
        interface_name: str | None,
        listens: bool,
        address: str,
        towards: str,
        port: int,
    ) -> None:
        """Find the program and the interface; where rank 0 `listens`, do so for it.

        That is at the interface's address, else at `address`, else where it leads `towards`.
        """
        if not words:
            raise protocol.ProtocolError("nothing is to be run")
        self._patience = patience
        command = program.command(words[0], tuple(words[1:]), module=module)
        if interface_name is not None:
            address = network.address_of_interface(interface_name)
        where = {"port": port, "master_port": 0}
        if listens:
            address = address or network.address_towards(towards)
            self._listener = self._stack.enter_context(network.listen(address, port))
            self._islands.listener = self._listener
            spare = self._stack.enter_context(network.reserve_port(address))
            where = {"port": self._listener.getsockname()[1], "master_port": spare.getsockname()[1]}
            self._islands.place = address, where["port"]
        self._send("ready", command=command, address=address, **where)

    def on_start(self, task: dict[str, Any]) -> None:
        """Start the ranks."""
        self._run_part(0, task, LocalWorkers, self._listener)
        if self._listener is not None:
            self._listener.close()

    def _run_part(
        self,
        part: int,
        task: dict[str, Any],
        make: Callable[..., LocalWorkers],
        listener: socket.socket | None,
    ) -> None:
        """Start the ranks of a part, which `make` makes of what LocalWorkers take."""
        streams = task.pop("outlet", None)
        outlet = protocol.build(WorkerStreams, streams if isinstance(streams, dict) else {})
        checked = protocol.build(HostTask, task, outlet=outlet)
        leads = network.interface_of(network.address_towards(checked.address))
        given = replace(checked, command=tuple(checked.command), interface=leads)
        folder = self._folder / f"start-{next(self._starts)}"
        folder.mkdir(mode=0o700)
        sinks = self._hear, self._left, self._saves
        workers = make(given, folder, self._reaper, self._selector, *sinks)
        self._former += [self._parts[part]] if part in self._parts else []
        self._parts[part] = workers
        workers.start(listener)
        if self._paused:
            workers.pause()

    @cached_property
    def _folder(self) -> Path:
        """Where the error files of ranks are."""
        return Path(tempfile.mkdtemp(prefix="shardwise-"))

    @cached_property
    def _reaper(self) -> OrphanReaper:
        limit = self._patience + REAPER_SLACK
        return self._stack.enter_context(OrphanReaper(self._folder, limit))

    def on_signal(self, number: int, part: int) -> None:
        if part in self._parts:
            self._parts[part].send_signal(protocol.signal_of(number))

    def on_ask(self, number: int, part: int) -> None:
        if part in self._parts:
            self._parts[part].ask_to_end(protocol.signal_of(number))

    def on_ended(self, rank: int, part: int) -> None:
        if part in self._parts:
            self._parts[part].ended_well(rank)

    def on_resize(self, window: tuple[int, int]) -> None:
        for workers in self._parts.values():
            workers.resize(window)

    def on_close(self) -> None:
        for workers in self._parts.values():
            workers.release()
        self._open = False

    def _hear(self, rank: int, stream: int, data: bytes) -> None:
        self._send("output", rank=rank, stream=stream, data=protocol.text_of(data))

    def _left(self, rank_exit: RankExit) -> None:
        report, progress = (
            found and asdict(found) for found in (rank_exit.report, rank_exit.progress)
        )
        self._send(
            "end",
            end=asdict(rank_exit.end),
            how=rank_exit.how,
            report=report,
            progress=progress,
            alone=rank_exit.alone,
        )

    def _saves(self, number: signal.Signals) -> None:
        self._send("saves", number=int(number))

    def _read(self) -> None:
        try:
            data = os.read(IN, 2**16)
        except BlockingIOError:
            return
        self._heard = time.monotonic()
        self._open = bool(data)
        self._receiver.feed(data)

    def _send(self, kind: str, **values: Any) -> None:
        self._out += protocol.encode(kind, **values)
        self._write()

    def _write(self) -> None:
        """Write what the connection takes now, and come back for the rest."""
        waiting = OUT in self._selector.get_map()
        try:
            self._out = self._out[os.write(OUT, self._out) :]
        except BlockingIOError:
            pass  # it takes none of it now; the selector says when
        except OSError:  # nobody reads: the connection is gone
            self._open, self._out = False, b""
        if self._out and not waiting:
            self._selector.register(OUT, selectors.EVENT_WRITE, self._write)
        elif waiting and not self._out:
            self._selector.unregister(OUT)
        if self._parts and self._paused != (len(self._out) > FULL):
            self._paused = not self._paused
            for workers in self._parts.values():
                (workers.pause if self._paused else workers.listen)()

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            if number == signal.SIGCHLD:
                for workers in self._parts.values():
                    workers.reap()
            elif number != signal.SIGWINCH:
                self._open = False


def _has_come() -> bool:
    """Whether there is something to read that the launcher has said, while we stood still."""
    return bool(select.select([IN], [], [], 0)[0])


def _hello(environ: Mapping[str, str]) -> dict[str, Any]:
    """Build the first message: what the launcher wants to know of this host."""
    here = (environ.get("SSH_CONNECTION", "").split(" ") + [""] * 3)[2]
    return {
        "version": __version__,
        "torch": _version("torch"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "time": time.time(),
        "address": here,
        "machine": _machine(),
        "pid": os.getpid(),
    }


def _machine() -> str | None:
    """Return what agents on one and the same host have in common; None where nothing does."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt")]
    except OSError:
        return None
    return " ".join([boot, *spaces])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Serve one run."""
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            Agent(signals, stack).run()
        except protocol.ProtocolError as fault:
            sys.exit(
                f"shardwise: this agent is told what no launcher of its version says: {fault}."
            )


if __name__ == "__main__":
    main()
