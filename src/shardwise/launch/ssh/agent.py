"""Implements the agent, which the launcher starts on each host to run that host's ranks.

    launcher                  agent
        <- hello              versions, clock, own address
    check ->                  checks that the program exists, chooses address and port
        <- ready | refused
    start ->                  starts the ranks
        <- output, end, saves, met, joined, members ...
    signal, ask, resize, ended, lost, members, clear ->
    close ->                  exits, as after a lost connection or a timeout

The agent reads from its standard input and writes to its standard output, which ssh connects to the
launcher. If the agent exits for any reason, its orphan reaper kills the ranks.
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
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.errors import LaunchError
from shardwise.launch import failure_report, program, worker
from shardwise.launch.local_workers import LocalWorkers, RankExit
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import protocol
from shardwise.launch.worker import WorkerStreams
from shardwise.net import environment, network

IN, OUT = 0, 1
FIRST_PATIENCE = 60.0
"""Seconds of silence after which the launcher is considered lost, until it sends its own limit."""

BEAT = 1.0
"""Seconds between two heartbeats to the launcher."""

LOOK = 0.2
"""Seconds between two checks whether this host's ranks have met or joined others (`--survive`)."""

REAPER_SLACK = 3.0
"""Seconds that the reaper waits beyond the launcher's timeout before it assumes that this process
is stopped. The launcher should notice first, because it reports the reason."""

FULL = 2**20
"""Maximum number of unsent bytes. Beyond it, the agent stops reading the output of ranks."""


class Agent:
    """Runs this host's ranks, as instructed by the launcher."""

    kinds = protocol.TO_AGENT
    """The kinds of messages that the agent accepts. The method `on_KIND` handles each."""

    def __init__(self, signals: Signals, stack: ExitStack) -> None:
        self._signals = signals
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._out = b""
        self._paused = False
        self._listener: socket.socket | None = None
        self._place = ("", 0)
        """Address and port of the listener, as seen from other hosts."""
        self._spec: RunSpec | None = None
        self._command: tuple[str, ...] = ()
        self._parts: dict[int, LocalWorkers] = {}
        """The ranks by part. All ranks are in part 0 unless parts start independently."""
        self._former: list[LocalWorkers] = []
        """Workers of earlier starts, which may have left processes behind."""
        self._starts = count()
        self._awaits_meeting = False
        """True while this host's ranks have not met the others in a run with `--survive`."""
        self._joined: set[int] = set()
        """Spares of this host that have joined the other ranks."""
        self._sent_members = self._members = -1
        """The generation of the addresses that spares need, as last sent and received."""
        self._patience = FIRST_PATIENCE
        self._last_sign = time.monotonic()
        """Arrival time of the last data from the launcher."""
        self._open = True
        self._receiver = protocol.MessageReader(self.kinds, self._obey, lambda noise: None)

    def run(self) -> None:
        """Handle messages until the launcher closes the connection or is silent for too long."""
        # If the launcher stops reading, that must not block this loop, which watches the ranks.
        for fd in (IN, OUT):
            os.set_blocking(fd, False)
        self._selector.register(IN, selectors.EVENT_READ, self._read)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_signals)
        self._send("hello", **_hello(os.environ))
        beat_at = time.monotonic()
        while self._open:
            now = time.monotonic()
            if now >= beat_at:
                if not self._out:  # unsent data serves as a heartbeat too
                    self._out = protocol.HEARTBEAT
                    self._write()
                if self._parts:
                    self._reaper.beat()
                beat_at = now + BEAT
            self._report_meeting()
            has_spares = self._report_spares()
            left = min(self._last_sign + self._patience, beat_at) - now
            left = min(left, LOOK) if self._awaits_meeting or has_spares else left
            for key, _ in self._selector.select(max(0.0, left)):
                self._guarded(key.data)
            # The system may reuse the ids of processes that have exited, so unregister them from
            # the reaper soon.
            self._former = [each for each in self._former if not each.release()]
            for workers in self._parts.values():
                workers.release()
                workers.kill_stopped()
            # If there are unread messages, this process was stopped, not the launcher.
            is_silent = time.monotonic() > self._last_sign + self._patience
            if is_silent and not select.select([IN], [], [], 0)[0]:
                why = f"the agent received nothing from the launcher for {self._patience:g} s"
                self._send("refused", why=f"{why}, so it ends its ranks.")
                return

    def _obey(self, message: protocol.Message) -> None:
        kind = message.pop("kind")
        self._guarded(partial(getattr(self, f"on_{kind}"), **message))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call a handler, and report its errors to the launcher."""
        try:
            call()
        except protocol.ProtocolError:
            raise
        except LaunchError as error:
            self._send("refused", why=str(error))
        except OSError as error:
            self._send("refused", why=failure_report.os_error_sentence(error))

    def on_check(self, *, spec: dict[str, Any], listens: bool, address: str, towards: str) -> None:
        """Check that the program and the network interface exist, and open ports if necessary.

        Args:
            spec: Fields of the RunSpec, with this host's share.
            listens: True if ranks connect to this host, so that it must listen.
            address: Address to listen on if the run has no interface. "" if unknown.
            towards: Another host. If `address` is unknown, this host listens on the local address
                of the route to that host.
        """
        # Store the spec for `start`, so that it is sent only once.
        found = protocol.build(RunSpec, spec)
        if not found.words or len(found.shares) != 1:
            raise protocol.ProtocolError("a check without a program or a share")
        secret = found.secret or environment.derived_secret(os.environ, found.run)
        self._spec = found = replace(found, secret=secret)
        self._patience = found.patience
        self._command = program.command(found.words[0], found.words[1:], module=found.module)
        if found.interface is not None:
            address = network.address_of_interface(found.interface)
        ports = {"port": found.port, "master_port": 0}
        if listens:
            address = address or network.address_towards(towards)
            self._listener = self._stack.enter_context(network.listen(address, found.port))
            spare = self._stack.enter_context(network.reserve_port(address))
            ports = {"port": self._listener.getsockname()[1], "master_port": spare.getsockname()[1]}
            self._place = address, ports["port"]
        self._send("ready", address=address, **ports)

    def on_start(self, meeting: dict[str, Any], streams: dict[str, Any]) -> None:
        """Start the ranks. `meeting` and `streams` hold the fields of Meeting and WorkerStreams."""
        self._run_part(0, meeting, streams, LocalWorkers, self._listener)
        if self._listener is not None:
            self._listener.close()
        self._awaits_meeting = self._spec is not None and self._spec.survives

    def _report_meeting(self) -> None:
        """Report once that this host's ranks have met those of the other hosts."""
        if not self._awaits_meeting:
            return
        assert self._spec is not None
        if self._parts[0].have_met(self._spec.share.numbers):
            self._awaits_meeting = False
            self._send("met")

    def _report_spares(self) -> bool:
        """Report which spares have joined, and new addresses. Return whether the run has spares."""
        if self._spec is None or not self._spec.spares or 0 not in self._parts:
            return False
        workers = self._parts[0]
        for rank in workers.joined_spares():
            if rank not in self._joined:
                self._joined.add(rank)
                self._send("joined", rank=rank)
        # The main rank writes them on its host. The launcher sends them to the other hosts.
        generation, text = workers.members()
        if generation > self._sent_members:
            self._sent_members = generation
            self._send("members", generation=generation, text=text)
        return True

    def on_members(self, generation: int, text: str) -> None:
        # After the main rank was lost, messages from its host and from that of the next main rank
        # arrive in any order.
        if generation > self._members:
            self._members = generation
            for workers in self._parts.values():
                workers.set_members(text)

    def _run_part(
        self,
        part: int,
        meeting: dict[str, Any],
        streams: dict[str, Any],
        make: Callable[..., LocalWorkers],
        listener: socket.socket | None,
    ) -> None:
        """Start the ranks of `part`, as the workers that `make` creates."""
        if self._spec is None:
            raise protocol.ProtocolError("a start before a check")
        place = protocol.build(Meeting, meeting)
        place = replace(
            place, interface=network.interface_of(network.address_towards(place.address))
        )
        folder = self._folder / f"start-{next(self._starts)}"
        folder.mkdir(mode=0o700)
        workers = make(
            self._spec,
            place,
            protocol.build(WorkerStreams, streams),
            worker.program(self._command),
            folder,
            self._reaper,
            self._selector,
            self._hear,
            self._left,
            self._saves,
        )
        self._former += [self._parts[part]] if part in self._parts else []
        self._parts[part] = workers
        workers.start(listener)
        if self._paused:  # `start` has begun to read output
            workers.pause()

    @cached_property
    def _folder(self) -> Path:
        """Folder for the ranks' error files."""
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

    def on_lost(self, ranks: list[int]) -> None:
        for workers in self._parts.values():
            workers.mark_lost(ranks)

    def on_clear(self, rank: int) -> None:
        for workers in self._parts.values():
            workers.clear_away(rank)

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
        self._report_meeting()
        self._report_spares()
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
        self._last_sign = time.monotonic()
        self._open = bool(data)
        self._receiver.feed(data)

    def _send(self, kind: str, **values: Any) -> None:
        self._out += protocol.encode(kind, **values)
        self._write()

    def _write(self) -> None:
        """Write as much as the connection accepts now. The selector calls this again later."""
        waiting = OUT in self._selector.get_map()
        try:
            self._out = self._out[os.write(OUT, self._out) :]
        except BlockingIOError:
            pass
        except OSError:  # the connection is gone
            self._open, self._out = False, b""
        if self._out and not waiting:
            self._selector.register(OUT, selectors.EVENT_WRITE, self._write)
        elif waiting and not self._out:
            self._selector.unregister(OUT)
        # Apply backpressure: if the launcher is slow, ranks block on full pipes, as on a slow
        # terminal. Otherwise their output would fill this process's memory.
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
                self.on_end_signal(number)

    def on_end_signal(self, number: signal.Signals) -> None:
        """Handle a signal that ends this process by default: end the ranks."""
        self._open = False


def _hello(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the first message, which describes this host."""
    torch = None
    with suppress(PackageNotFoundError):
        torch = version("torch")
    # SSH_CONNECTION holds the client's address and port, then the server's.
    here = (environ.get("SSH_CONNECTION", "").split(" ") + [""] * 3)[2]
    return {
        "version": __version__,
        "torch": torch,
        "python": ".".join(map(str, sys.version_info[:3])),
        "time": time.time(),
        "address": here,
        "machine": _machine(),
        "pid": os.getpid(),
    }


def _machine() -> str | None:
    """Return text that identifies this host or container, or None if unknown."""
    try:
        # The network and mount namespaces distinguish containers on the same machine.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt")]
    except OSError:
        return None
    return " ".join([boot, *spaces])


def main(kind: type[Agent] = Agent) -> None:
    """Run one agent of class `kind` until its run ends."""
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            kind(signals, stack).run()
        except protocol.ProtocolError as fault:
            sys.exit(
                f"shardwise: the launcher sent something that this version does not know: {fault}."
            )


if __name__ == "__main__":
    main()
