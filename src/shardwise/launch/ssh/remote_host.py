"""Implements the launcher's connection to one host's agent, over ssh unless it is this host."""

import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise import __version__
from shardwise.errors import LaunchError
from shardwise.launch import orphan_reaper
from shardwise.launch.console import STDERR, STDOUT
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.screen import Lines, Tail
from shardwise.launch.ssh import command, protocol
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.worker import WorkerStreams
from shardwise.launch.worker_output import LIVE
from shardwise.net import network
from shardwise.net.hosts import Share

READ_SIZE = 2**16
LAST_WAIT = 6.0
"""Seconds to wait until an agent with ranks exits, which includes the patience of its reaper."""

FIRST_WAIT = 1.0
"""Seconds to wait until an agent exits if it has not started ranks or is stopped."""

ENDS_WITHIN = orphan_reaper.PATIENCE + 1.0
"""Seconds from the end of an agent until its reaper has ended the ranks."""

SLACK = 2.0
"""Seconds beyond `--host-timeout` before the launcher declares a host lost."""


class RemoteHost:
    """The connection to the agent on one host.

    Args:
        spec: The run.
        share: The host's ranks.
        say: Called with lines that the host prints during login.
        is_here: Whether the host is this one. None to detect this, which may be slow.

    Attributes:
        hello: The agent's message about its host, or None until it arrives.
        ready: The agent's message that ranks can be started, or None until it arrives.
        fault: The reason why the host was declared lost, or None while it works.
        have_met: True if the host's ranks have met those of the other hosts (`--survive`).
        joined: The host's spares that have joined the other ranks.
        relay: Called with the addresses that spares on other hosts need, after their generation.
    """

    kinds = protocol.FROM_AGENT
    """The kinds of messages that the agent may send."""

    def __init__(
        self,
        spec: RunSpec,
        share: Share,
        say: Callable[[bytes], None],
        *,
        is_here: bool | None = None,
    ) -> None:
        self.share = share
        self.hello: protocol.Message | None = None
        self.ready: protocol.Message | None = None
        self.fault: str | None = None
        self.have_met = False
        self.joined: set[int] = set()
        self.relay: Callable[[int, str], None] = lambda generation, text: None
        self.is_here = network.is_here(share.host) if is_here is None else is_here
        self._spec = spec
        self._supervisor: Supervisor | None = None
        self._left: set[int] = set()
        self._errors = Tail()
        self._say = say
        self._lines = Lines(f"{share.host.name}: ".encode())
        self._offset = 0.0
        self._last_sign = time.monotonic()
        """Arrival time of the last data from the agent."""
        self._is_silent = False
        self._unsent = b""
        self._receiver = protocol.MessageReader(
            self.kinds, self._take, lambda noise: say(self._lines.feed(noise))
        )
        self._process = _start(
            command.agent_words(spec, sys.executable)
            if self.is_here
            else command.ssh_command(spec, share.host)
        )

    @property
    def group(self) -> int:
        """The process group of ssh, or of the agent if it runs on this host."""
        return self._process.pid

    @property
    def advice(self) -> str:
        """What to check if the host does not answer."""
        return command.advice_for(self._spec, self.share.host)

    @property
    def input_fd(self) -> int:
        """The descriptor of the agent's standard input."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Register the agent's output and error streams with `selector`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._selector = selector
        os.set_blocking(self._process.stderr.fileno(), False)
        # A stopped agent does not read its input. That must not block the launcher.
        os.set_blocking(self.input_fd, False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self._read)
        selector.register(self._process.stderr, selectors.EVENT_READ, self._read_errors)

    def disconnect(self) -> None:
        """Unregister the agent's streams from the selector."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(KeyError, ValueError):  # not registered any more, or closed
                self._selector.unregister(stream)

    def check(self, **values: Any) -> None:
        """Send the spec to the agent, and ask whether its ranks can be started."""
        self.send("check", spec=asdict(self._spec.for_share(self.share)), **values)

    def start(self, meeting: Meeting, streams: WorkerStreams, supervisor: Supervisor) -> None:
        """Start the ranks. Messages about them are then passed to `supervisor`."""
        self._supervisor = supervisor
        self.send("start", meeting=asdict(meeting), streams=asdict(streams))

    def reap(self) -> None:
        """No-op, because the agent reports when its ranks exit."""

    def send_signal(self, number: signal.Signals, part: int = 0) -> None:
        """Send a signal to the host's ranks in `part`."""
        self.send("signal", number=int(number), part=part)

    def ask_to_end(self, number: signal.Signals, part: int = 0) -> None:
        """Ask the host's ranks in `part` to stop. Some save before they exit."""
        self.send("ask", number=int(number), part=part)

    def ended_well(self, rank: int, part: int = 0) -> None:
        """Tell the host's ranks in `part` that `rank`, on any host, has exited with code 0."""
        self.send("ended", rank=rank, part=part)

    def mark_lost(self, ranks: Sequence[int]) -> None:
        """Tell the host's ranks that `ranks`, on any host, no longer exist."""
        self.send("lost", ranks=list(ranks))

    def set_members(self, generation: int, text: str) -> None:
        """Pass on the addresses of the ranks that the host's spares can join."""
        self.send("members", generation=generation, text=text)

    def clear_away(self, rank: int) -> None:
        """Kill the processes of `rank`, including those that it left behind."""
        self.send("clear", rank=rank)

    def resize(self, window: tuple[int, int]) -> None:
        """Send the new size of the terminal (rows, columns)."""
        self.send("resize", window=window)

    def look(self) -> float | None:
        """Declare the host lost if its agent has been silent for too long.

        Returns the seconds until the next check, or None if no further check is needed.
        """
        if self._supervisor is None or self.fault is not None:
            return None
        # Wait a bit longer than ssh, which detects a broken connection itself and knows the reason.
        limit = self._spec.patience + SLACK
        left = self._last_sign + limit - time.monotonic()
        if left > 0:
            return left
        assert self._process.stdout is not None
        # If there are unread messages, the launcher was stopped, not the agent.
        if select.select([self._process.stdout], [], [], 0)[0]:
            return 0.0
        self._is_silent = True
        pid = self.hello["pid"] if self.hello else 0
        self.give_up(command.silent_host(self._spec, self.share, pid))
        return None

    def close(self) -> None:
        """Tell the agent to exit, because the run has finished."""
        self.send("close")
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._stop_sending()
            self._process.stdin.close()

    def wait(self, since: float) -> None:
        """Wait until the agent exits, and kill it if that takes too long.

        Args:
            since: Time at which the agent was asked to exit, on the monotonic clock.
        """
        is_brief = self._supervisor is None or self._is_silent
        until = since + (FIRST_WAIT if is_brief else LAST_WAIT)
        orphan_reaper.end_within(self._process, until - time.monotonic())
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    @property
    def has_ended(self) -> bool:
        """True if ssh, or the agent if it runs on this host, has exited."""
        return self._process.poll() is not None

    def is_gone(self) -> bool:
        """Return whether ssh and its helpers, such as a ProxyCommand, have all exited."""
        return not orphan_reaper.signal_group(self.group, 0)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the agent. It is queued until the connection accepts it."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._unsent += protocol.encode(kind, **values)
            self._write()

    def _write(self) -> None:
        """Write as much as the connection accepts now. The selector calls this again later."""
        waiting = self.input_fd in self._selector.get_map()
        try:
            self._unsent = self._unsent[os.write(self.input_fd, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # `_read` reports that the agent has exited
            self._unsent = b""
        if self._unsent and not waiting:
            self._selector.register(self.input_fd, selectors.EVENT_WRITE, self._write)
        elif waiting and not self._unsent:
            self._stop_sending()

    def _stop_sending(self) -> None:
        """Discard unsent messages, and unregister the agent's input from the selector."""
        self._unsent = b""
        with suppress(KeyError):  # registered only while there are unsent messages
            self._selector.unregister(self.input_fd)

    def _read(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), READ_SIZE)
        if data:
            self._last_sign = time.monotonic()
            self._feed(data)
            return
        # The output was closed, so the agent or ssh has exited or is about to. Wait a second for
        # the exit code, which shows which of them it was.
        self._selector.unregister(self._process.stdout)
        code = None
        with suppress(subprocess.TimeoutExpired):  # it has closed its output but is still running
            code = self._process.wait(1.0)
        self._read_errors()
        said = self._errors.text()
        if self._supervisor is None:
            self.give_up(command.start_failure(self._spec, self.share.host, code, said))
        else:
            silent = time.monotonic() - self._last_sign
            why = command.lost_host(self._spec, self.share, code, said, silent)
            has_ended = command.shows_end(self._spec, code, said, silent)
            self.give_up(why, has_ended=has_ended)

    def _feed(self, data: bytes) -> None:
        """Parse bytes from the agent. Declare the host lost if they violate the protocol."""
        assert self._process.stdout is not None
        try:
            self._receiver.feed(data)
        except protocol.ProtocolError as fault:
            self._selector.unregister(self._process.stdout)
            self.give_up(
                f"{self.share.host.name} sent something that is not a message of shardwise "
                f"{__version__}: {fault}. Install the same version on all hosts, and check what "
                "else writes to the standard output there."
            )

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
        getattr(self, f"_on_{message['kind']}")(message)

    def _on_hello(self, message: protocol.Message) -> None:
        self.hello = message
        # Errors from several hosts are sorted by time, so correct for differences between clocks.
        self._offset = time.time() - message["time"]
        # The protocol may differ between versions, so do not even try to start ranks.
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

    def _on_met(self, message: protocol.Message) -> None:
        self.have_met = True

    def _on_joined(self, message: protocol.Message) -> None:
        self._started(message["rank"])
        self.joined.add(message["rank"])

    def _on_members(self, message: protocol.Message) -> None:
        self.relay(message["generation"], message["text"])

    def _started(self, rank: int | None = None) -> Supervisor:
        """Return the supervisor. Raises ProtocolError if `rank` was not started on this host."""
        if self._supervisor is None or (rank is not None and rank not in self.share.every):
            raise protocol.ProtocolError("a message about a rank that was not started there")
        return self._supervisor

    def give_up(self, why: str, *, has_ended: bool = False) -> None:
        """Declare the host lost.

        Args:
            why: The reason, as a sentence.
            has_ended: True if its agent has certainly exited.
        """
        if self.fault is not None:
            return
        self.fault = why
        # If all ranks had already exited, the loss of the host does not affect the run.
        gone = [rank for rank in self.share.every if rank not in self._left]
        if self._supervisor is not None and gone:
            # `kill` below ends an agent on this host.
            after = self._seconds_until_gone(has_ended=has_ended or self.is_here)
            self._supervisor.lost(gone, why, after)
        if self._spec.survives:
            # The run continues, so the host must not reconnect: without the connection, it ends its
            # ranks.
            self._process.kill()

    def _seconds_until_gone(self, *, has_ended: bool) -> float:
        """Return the seconds after which this host has certainly ended its ranks."""
        if has_ended:
            return ENDS_WITHIN
        # The agent may not notice that the connection is closed, and wait for --host-timeout.
        silent = time.monotonic() - self._last_sign
        return max(ENDS_WITHIN, self._spec.lost_after - silent)


def _start(words: list[str]) -> "subprocess.Popen[bytes]":
    # Start a new session, so that Ctrl-C does not kill ssh before the agent has been asked to exit.
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
