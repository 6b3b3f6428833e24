"""Talks to the agent of one host, over ssh unless it is this one: the launcher's side."""

import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise import __version__
from shardwise.errors import LaunchError
from shardwise.launch import orphan_reaper
from shardwise.launch.console import STDERR, STDOUT
from shardwise.launch.local_workers import HostTask
from shardwise.launch.screen import Lines, Tail
from shardwise.launch.ssh import command, protocol
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.ssh.remote_desk import RemoteDesk
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.worker_output import LIVE
from shardwise.net import network
from shardwise.net.hosts import Share

READ_SIZE = 2**16
LAST_WAIT = 6.0
"""Seconds that an agent has to end, its reaper's patience included, once its ranks ran."""

FIRST_WAIT = 1.0
"""The same for one that started none, or that is stopped."""

SLACK = 2.0
"""Seconds beyond the time-out of a host: its agent sends a sign of life every second."""


class RemoteHost:
    """The connection to the agent for the ranks of `share`.

    `hello` and `ready` are its messages about itself and about the program, None until they come;
    `fault` is why it will not run, None while all is well. `say` shows lines that a login prints.
    `is_here` says whether this is that host, None where that is to be found out, which may take a
    while.
    """

    def __init__(
        self,
        options: SshOptions,
        share: Share,
        say: Callable[[bytes], None],
        *,
        is_here: bool | None = None,
    ) -> None:
        self.share = share
        self.hello: protocol.Message | None = None
        self.ready: protocol.Message | None = None
        self.fault: str | None = None
        self.is_here = network.is_here(share.host) if is_here is None else is_here
        self._options = options
        self._supervisor: Supervisor | None = None
        self._left: set[int] = set()
        self._errors = Tail()
        self._say = say
        self._lines = Lines(f"{share.host.name}: ".encode())
        self._offset = 0.0
        self._heard = time.monotonic()
        self._is_silent = False
        self._unsent = b""
        self.desk: RemoteDesk | None = None
        """Its desk, where islands may end and come back."""
        kinds = {**protocol.FROM_AGENT, **protocol.FROM_ISLANDS}
        self._receiver = protocol.MessageReader(
            kinds, self._take, lambda noise: say(self._lines.feed(noise))
        )
        self._process = _start(
            command.agent_words(sys.executable)
            if self.is_here
            else command.ssh_command(options, share.host)
        )

    @property
    def group(self) -> int:
        """The process group of the ssh, or of the agent that is here."""
        return self._process.pid

    @property
    def input_fd(self) -> int:
        """What is written here reaches the agent."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Read what comes from the host, whenever `selector` says so."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._selector = selector
        os.set_blocking(self._process.stderr.fileno(), False)
        # An agent that is stopped reads nothing, which must not stop the launcher too.
        os.set_blocking(self.input_fd, False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self._read)
        selector.register(self._process.stderr, selectors.EVENT_READ, self._read_errors)

    def disconnect(self) -> None:
        """Read and send no more."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(KeyError, ValueError):  # it has ended, or was closed, before
                self._selector.unregister(stream)

    def check(self, **values: Any) -> None:
        """Ask whether the run can start there."""
        self.send("check", patience=self._options.patience, **values)

    def start(self, task: HostTask, supervisor: Supervisor) -> None:
        """Start the ranks; from now on their messages go to `supervisor`."""
        self._supervisor = supervisor
        self.send("start", task=asdict(task))

    def serve(self, desk: RemoteDesk, supervisor: Supervisor, **values: Any) -> None:
        """Open the desk of that host, which `desk` leads to; islands' messages go to
        `supervisor`."""
        self.desk, self._supervisor = desk, supervisor
        self._left.update(self.share.numbers)
        self.send("serve", **values)

    def start_island(self, task: HostTask, ranks: Collection[int], **about: Any) -> None:
        """Start those ranks of an island that are there."""
        self._left.difference_update(ranks)
        self.send("start_island", task=asdict(task), **about)

    def reap(self) -> None:
        """Do nothing: the agent reports the ends of its ranks, and its own output ends with it."""

    def send_signal(self, number: signal.Signals, part: int = 0) -> None:
        """Send a signal to the ranks there, those of an island where `part` says which."""
        self.send("signal", number=int(number), part=part)

    def ask_to_end(self, number: signal.Signals, part: int = 0) -> None:
        """Pass on to the ranks there that someone wants them to end."""
        self.send("ask", number=int(number), part=part)

    def ended_well(self, rank: int, part: int = 0) -> None:
        """Let the ranks there know that `rank`, of any host, ended with code 0."""
        self.send("ended", rank=rank, part=part)

    def resize(self, window: tuple[int, int]) -> None:
        """Send the new rows and columns of the terminal."""
        self.send("resize", window=window)

    def look(self) -> float | None:
        """Give the host up if its agent has been silent for too long.

        Returns the seconds until then, None where the agent need not say anything.
        """
        if self._supervisor is None or self.fault is not None:
            return None
        # ssh watches the connection itself, and so notices first where that is cut.
        limit = self._options.patience + SLACK
        left = self._heard + limit - time.monotonic()
        if left > 0:
            return left
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], 0)[0]:  # it was us who stood still
            return 0.0
        self._is_silent = True
        pid = self.hello["pid"] if self.hello else 0
        self.give_up(command.silent_host(self._options, self.share, pid))
        return None

    def close(self) -> None:
        """Tell the agent that the run is over."""
        self.send("close")
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._stop_sending()
            self._process.stdin.close()

    def wait(self, since: float) -> None:
        """Wait for the end of the agent, asked for at `since`; kill one that is too late."""
        is_brief = self._supervisor is None or self._is_silent
        until = since + (FIRST_WAIT if is_brief else LAST_WAIT)
        orphan_reaper.end_within(self._process, until - time.monotonic())
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    @property
    def has_ended(self) -> bool:
        """Whether the ssh, or the agent that is here, has ended."""
        return self._process.poll() is not None

    def is_gone(self) -> bool:
        """Whether nothing is left of ssh and what it started on its options."""
        return not orphan_reaper.signal_group(self.group, 0)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the agent, now or once it reads."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._unsent += protocol.encode(kind, **values)
            self._write()

    def _write(self) -> None:
        """Write what the connection takes now; the selector says when it takes more."""
        waiting = self.input_fd in self._selector.get_map()
        try:
            self._unsent = self._unsent[os.write(self.input_fd, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its end is noticed where its output ends
            self._unsent = b""
        if self._unsent and not waiting:
            self._selector.register(self.input_fd, selectors.EVENT_WRITE, self._write)
        elif waiting and not self._unsent:
            self._stop_sending()

    def _stop_sending(self) -> None:
        """Drop what is unsent."""
        self._unsent = b""
        with suppress(KeyError):  # nothing is unsent
            self._selector.unregister(self.input_fd)

    def _read(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), READ_SIZE)
        if data:
            self._heard = time.monotonic()
            self._hear(data)
            return
        self._selector.unregister(self._process.stdout)
        code = self._code()
        self._read_errors()
        said = self._errors.text()
        if self._supervisor is None:
            self.give_up(command.start_failure(self._options, self.share.host, code, said))
        else:
            silent = time.monotonic() - self._heard
            self.give_up(command.lost_host(self._options, self.share, code, said, silent))

    def _hear(self, data: bytes) -> None:
        """Take bytes of the agent; one that breaks the protocol is heard no more."""
        assert self._process.stdout is not None
        try:
            self._receiver.feed(data)
        except protocol.ProtocolError as fault:
            self._selector.unregister(self._process.stdout)
            self.give_up(
                f"{self.share.host.name} says what no agent of shardwise {__version__} "
                f"does: {fault}. Install the same version on all hosts, and see what else writes "
                "to the output there."
            )

    def _code(self) -> int | None:
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:  # it closed its output, and goes on
            return None

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        if self._process.stderr.fileno() not in self._selector.get_map():
            return
        with suppress(BlockingIOError):
            data = os.read(self._process.stderr.fileno(), READ_SIZE)
            self._errors.feed(data)
            if not data:
                self._selector.unregister(self._process.stderr)

    def _take(self, message: protocol.Message) -> None:
        kind = message["kind"]
        if self._is_given_up and kind != "output":
            return
        if kind not in protocol.FROM_ISLANDS:
            getattr(self, f"_on_{kind}")(message)
            return
        self._started(message["rank"] if kind in protocol.OF_A_RANK else None)
        if self.desk is None:
            raise protocol.ProtocolError("it tells of islands, of which this run has none")
        self.desk.hear(message)

    def _on_hello(self, message: protocol.Message) -> None:
        self.hello = message
        self._offset = time.time() - message["time"]
        if message["version"] != __version__:
            self.fault = (
                f"{self.share.host.name} has shardwise {message['version']}, this host "
                f"{__version__}. Install the same version on all hosts."
            )

    def _on_ready(self, message: protocol.Message) -> None:
        self.ready = message

    def _on_refused(self, message: protocol.Message) -> None:
        self.give_up(f"On {self.share.host.name}: {message['why']}")

    def _on_output(self, message: protocol.Message) -> None:
        rank, stream = message["rank"], message["stream"]
        if stream not in (LIVE, STDOUT, STDERR):
            raise protocol.ProtocolError(f"output on stream {stream}")
        self._started(rank).hear(rank, stream, protocol.bytes_of(message["data"]))

    def _on_end(self, message: protocol.Message) -> None:
        rank_exit = protocol.rank_exit(message, self._offset)
        supervisor = self._started(rank_exit.end.rank)
        self._left.add(rank_exit.end.rank)
        supervisor.left(rank_exit)

    def _on_saves(self, message: protocol.Message) -> None:
        self._started().saves_first(protocol.signal_of(message["number"]))

    def _started(self, rank: int | None = None) -> Supervisor:
        """The supervisor. Raises ProtocolError for a rank that was not started there."""
        if self._supervisor is None or (rank is not None and rank not in self.share.numbers):
            raise protocol.ProtocolError("it tells of ranks that were not started there")
        return self._supervisor

    @property
    def _is_given_up(self) -> bool:
        """Whether its islands are lost, and may be about to start again elsewhere: what it says of
        their ranks is of an earlier life."""
        return self.desk is not None and self.fault is not None

    def give_up(self, why: str) -> None:
        """Take the host for lost, and say why."""
        if self.fault is not None:
            return
        self.fault = why
        gone = [rank for rank in self.share.numbers if rank not in self._left]
        if self._supervisor is not None and gone:
            self._supervisor.lost(gone, why)


def _start(words: list[str]) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(
            f"{words[0]} cannot be started: {error.strerror}. Install an ssh client, or name it "
            "with --ssh."
        ) from None
