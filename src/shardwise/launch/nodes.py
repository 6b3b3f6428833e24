"""Joins the hosts of `shardwise run --nnodes N --survive K`, which the user starts on each host.

    the host of --rdzv-endpoint                            another host
    accepts N - 1 hosts              ◀── its ranks ───────  listens, and joins
    starts a link for each of them   ─── connects ───────▶  starts an agent
    launcher ◀─ pipe ─▶ link         ◀── messages ───────▶  ◀─ pipe ─▶ agent
    the run ends                     ─── exit code ──────▶  ends

The first host runs the launcher for several hosts (ssh/many_hosts.py). A link takes the place of
ssh there: it is a process that connects to another host, and forwards the standard streams of an
agent. Every message is authenticated with the secret in SHARDWISE_SECRET.
"""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import IO, Any

from shardwise.errors import LaunchError
from shardwise.launch.elastic import ElasticRendezvous
from shardwise.launch.signals import Signals
from shardwise.launch.ssh.agent import Agent
from shardwise.launch.ssh.agent import main as run_as_agent
from shardwise.launch.ssh.command import LINK
from shardwise.messages.printable import many, printable
from shardwise.net import authentication, environment, network, rpc
from shardwise.net.hosts import Host

JOIN_LIMIT = 600.0
"""Seconds until all hosts must have joined. Also the default of torch's elastic agent."""

ANSWER_LIMIT = 10.0
"""Seconds within which a connected process must send its first message."""

REACH = 10.0
"""Seconds after which an attempt to reach the first host ends, because it may be silent."""

AGAIN = 0.5
"""Seconds after which a host tries again to reach the first one."""

LOST = 255
"""Exit code of a link whose connection has ended, as of ssh."""

_RUNS_AGENT = "agent"
"""Argument of this module that makes it run an agent instead of a link."""

_OUT, _ERR, _CODE = b"o", b"e", b"c"
"""The first byte of a message to a link: output of the agent, or its exit code."""


@dataclass(frozen=True)
class Node:
    """The report of a host that joins: its number, its slots, and the port for its link.

    `name` is a random name of the process that waits for the link, and part of its role.
    """

    address: str
    number: int | None
    count: int
    port: int
    name: str = ""


@dataclass
class Nodes:
    """The hosts of a run, from the view of the first one.

    Args:
        hosts: The hosts and their slots, by --node-rank or in the order of joining.
        ssh: The command that replaces ssh.
        code: Exit code of the run, which is sent to all hosts at the end.
    """

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    code: int = 1


def find_secret(nnodes: int) -> bytes:
    """Return the secret of the run. Raises LaunchError if the user has not set one."""
    secret = environment.given_secret(os.environ)
    if not secret:
        raise LaunchError(
            f"--survive on {nnodes} hosts needs a secret that is the same on all of them, because "
            f"they start programs for each other. Set {environment.SECRET_VARIABLE} on each host "
            "to the same output of `openssl rand -hex 32`."
        )
    return secret.encode()


@contextmanager
def accepted(
    meeting: ElasticRendezvous, secret: bytes, count: int, command: Sequence[Any]
) -> Iterator[Nodes]:
    """Wait on the first host until all others have joined. At the end, send them `Nodes.code`.

    Args:
        meeting: The number of hosts, and the address where they join.
        secret: The secret of the run.
        count: Number of slots on this host.
        command: The program and the settings, which must be the same on all hosts.

    Raises:
        LaunchError: A host does not join in time, or does not fit.
    """
    assert meeting.host is not None
    joined: dict[rpc.Connection, Node] = {}
    with ExitStack() as stack:
        result = Nodes((), ())
        # Also if this host raises an error, so that the others do not wait for it.
        stack.push(lambda _, error, __: _send_code(joined, result.code, error))
        address = _listen_address(meeting)
        instead = "Write another port in --rdzv-endpoint, the same on all hosts."
        until = time.monotonic() + JOIN_LIMIT
        # torchrun's store is at the port of `meeting`.
        listener = network.listen(address, 0 if meeting.store else meeting.port, instead)
        port = listener.getsockname()[1]
        with listener, rpc.Acceptor(listener, secret, _join_role(port)) as acceptor:
            others = f"{many(meeting.most - 1, 'other host')} at {address}, port {port}"
            print(f"shardwise: waiting for {others}", file=sys.stderr, flush=True)
            if meeting.store is not None:
                meeting.store.publish(port)
            while len(joined) < meeting.most - 1:
                connection = acceptor.accept(min(until, time.monotonic() + AGAIN))
                if connection is None:
                    if meeting.store is not None:
                        meeting.store.check()
                    if time.monotonic() < until:
                        continue
                    raise LaunchError(
                        f"Only {len(joined) + 1} of {meeting.most} hosts have joined within "
                        f"{JOIN_LIMIT:g} s. Run the same command on each host."
                    )
                try:
                    node = _described(connection, command)
                except LaunchError as error:
                    _send_code([connection], result.code, error)
                    raise
                if node is None:
                    connection.close()
                    continue
                # A command may have been ended and started again. Its host may also have lost
                # power, so that the former connection still seems to be open.
                for former, known in list(joined.items()):
                    if known.address == node.address or _has_ended(former):
                        former.close()
                        del joined[former]
                joined[connection] = node
        found = [Node("", meeting.node_rank, count, 0), *joined.values()]
        result.hosts, result.ssh = _hosts(found), _link_words(found)
        if meeting.store is not None:
            meeting.store.mark_started()
        yield result


def _join_role(port: int) -> bytes:
    return f"join {port}".encode()


def _agent_role(name: str) -> bytes:
    return f"agent {name}".encode()


def _listen_address(meeting: ElasticRendezvous) -> str:
    """Return the address of --rdzv-endpoint. For a loopback address, return all interfaces.

    Also if torchrun has started this command, and reaches this host by an address of a router.
    """
    assert meeting.host is not None
    is_here = meeting.store is None or network.is_here(Host(meeting.host))
    try:
        found = str(socket.getaddrinfo(meeting.host, meeting.port)[0][4][0])
    except OSError as error:
        if not is_here:
            return "0.0.0.0"
        raise LaunchError(
            f"{meeting.host} ({meeting.origin}) is the name of this host, but has no address: "
            f"{error.strerror}. Write an address at which the other hosts reach this one."
        ) from None
    # Some systems resolve a host's own name to 127.0.1.1, which other hosts cannot reach.
    if not is_here or ip_address(found.partition("%")[0]).is_loopback:
        return "::" if ":" in found else "0.0.0.0"
    return found


def _described(connection: rpc.Connection, command: Sequence[Any]) -> Node | None:
    """Return a host's report, or None if it has ended. Raises LaunchError if it differs."""
    try:
        address = str(connection.socket.getpeername()[0])
        connection.socket.settimeout(ANSWER_LIMIT)
        message = connection.receive()
    except (OSError, authentication.Forged):
        return None
    if message is None:
        return None
    said = rpc.decode(message)
    if said.get("command") != rpc.decode(rpc.encode(command)):
        raise LaunchError(
            f"{address} has joined with another command, or without one: {said.get('command')}. "
            f"This host has: {command}. Run the same command on each host."
        )
    return Node(address, said["number"], said["count"], said["port"], said["name"])


def _has_ended(connection: rpc.Connection) -> bool:
    """Return whether a host that has joined has closed its connection. It sends nothing else."""
    return bool(select.select([connection.socket], [], [], 0)[0])


def _hosts(found: Sequence[Node]) -> tuple[Host, ...]:
    """Order the hosts by --node-rank, or as they have joined."""
    numbers = [node.number for node in found]
    given = [number for number in numbers if number is not None]
    if given and len(set(given)) < len(numbers):
        raise LaunchError(
            f"--node-rank must be a different number on each host, not {numbers}. Or leave it out "
            "on all of them."
        )
    ordered = sorted(found, key=lambda node: node.number or 0)  # stable: in order of arrival
    return tuple(Host(node.address or "localhost", node.count) for node in ordered)


def _link_words(found: Sequence[Node]) -> tuple[str, ...]:
    places = [f"{node.address}={node.port}={node.name}" for node in found[1:]]
    return (sys.executable, "-P", "-m", LINK, *places)


def _send_code(
    connections: Iterable[rpc.Connection], code: int, error: BaseException | None
) -> None:
    """Send the exit code of the run to other hosts, and the error that has ended it here."""
    for connection in connections:
        with suppress(OSError):  # the host is lost
            connection.socket.settimeout(ANSWER_LIMIT)
            connection.send(rpc.encode({"code": code, "error": str(error or "")}))
        connection.close()


def serve(
    meeting: ElasticRendezvous, secret: bytes, count: int, command: Sequence[Any], patience: float
) -> int:
    """Join the first host, and run this host's ranks for it. Return the exit code of the run.

    A signal to this process is passed to the ranks (see `NodeAgent`). A second one ends them.

    Args:
        meeting: See `accepted`, also for the next arguments and the errors.
        secret: The secret of the run.
        count: Number of slots on this host.
        command: The program and the settings.
        patience: Seconds after which a first host that does not respond is considered lost.
    """
    assert meeting.host is not None
    agents: list[subprocess.Popen[bytes]] = []
    with _reach(meeting, secret) as connection, Signals() as signals:
        listener = rpc.listen(str(connection.socket.getsockname()[0]))
        port = listener.getsockname()[1]
        name = secrets.token_hex()
        run_agent = partial(_run_agent, agents)
        server = rpc.Server(listener, secret, _agent_role(name), run_agent, name="shardwise-agent")
        message = {"command": command, "number": meeting.node_rank, "count": count, "port": port}
        message["name"] = name
        connection.send(rpc.encode(message))
        # If the first host loses power, its socket seems to stay open.
        connection.socket.settimeout(None)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _keepalive(patience).items():
            if hasattr(socket, option):
                connection.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        code = _wait(connection, signals, agents)
        server.close()
    if code is None:
        raise LaunchError(
            f"Lost the connection to {meeting.host}, where the launcher of this run is. This host "
            "has ended its ranks."
        )
    return code


def _keepalive(patience: float) -> dict[str, int]:
    """Return socket options that end a silent connection after about `patience` seconds."""
    first, next_ones = max(1, round(patience / 2)), max(1, round(patience / 6))
    return {"TCP_KEEPIDLE": first, "TCP_KEEPINTVL": next_ones, "TCP_KEEPCNT": 3}


def _wait(
    connection: rpc.Connection, signals: Signals, agents: Sequence["subprocess.Popen[bytes]"]
) -> int | None:
    """Wait for the exit code of the run. Returns None if the connection is lost."""
    is_asked, fd = False, connection.socket.fileno()
    while True:
        ready = select.select([fd, signals.fd], [], [])[0]
        for number in signals.arrived():
            if number in (signal.SIGCHLD, signal.SIGWINCH):
                continue
            running = [agent for agent in agents if agent.poll() is None]
            if is_asked or not running:
                return 128 + number
            is_asked = True
            words = f"{number.name} for the workers of this host. Again to end them."
            print(f"shardwise: {words}", file=sys.stderr, flush=True)
            for agent in running:
                agent.send_signal(number)
        if fd in ready:
            answer = None
            # As if it had closed the connection.
            with suppress(OSError, authentication.Forged):
                answer = connection.receive()
            if answer is None:
                return None
            said = rpc.decode(answer)
            if said["error"]:
                words = f"shardwise: the first host has failed: {printable(said['error'])}"
                print(words, file=sys.stderr, flush=True)
            return int(said["code"])


class NodeAgent(Agent):
    """The agent of a host that has joined, which `serve` passes signals to.

    After SIGUSR1, all ranks of the run save and exit, as after this signal to the launcher. Other
    signals make the ranks of this host leave after their step.
    """

    def on_end_signal(self, number: signal.Signals) -> None:
        if not self._parts:
            super().on_end_signal(number)
        for workers in self._parts.values():
            if number == signal.SIGUSR1:
                workers.ask_to_end(number)
            else:
                workers.ask_to_leave()


def _reach(meeting: ElasticRendezvous, secret: bytes) -> rpc.Connection:
    """Connect to the first host, which may start later than this one."""
    assert meeting.host is not None
    until, is_first = time.monotonic() + JOIN_LIMIT, True
    port = meeting.port if meeting.store is None else meeting.store.port(JOIN_LIMIT)
    where = f"{meeting.host}:{port}"
    while True:
        if meeting.store is not None:
            meeting.store.check()
        try:
            soon = min(until, time.monotonic() + REACH)
            return rpc.connect((meeting.host, port), secret, _join_role(port), soon)
        except rpc.Unproven as error:
            raise LaunchError(
                f"{where} does not accept this host: {error}. Set the same "
                f"{environment.SECRET_VARIABLE} on all hosts."
            ) from None
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"{where} ({meeting.origin}) cannot be reached: {error}. Run the same command "
                    "there, and check the address."
                ) from None
            if is_first:
                words = f"shardwise: waiting for {where} ({meeting.origin}): {error}"
                print(words, file=sys.stderr, flush=True)
                is_first = False
            time.sleep(AGAIN)


def _run_agent(agents: list["subprocess.Popen[bytes]"], connection: rpc.Connection) -> None:
    """Run an agent until it ends, forward its standard streams, and append it to `agents`."""
    connection.socket.settimeout(None)
    theirs, ours = connection.socket.getpeername(), connection.socket.getsockname()
    # From this variable of sshd, an agent learns its own address.
    variable = f"{theirs[0]} {theirs[1]} {ours[0]} {ours[1]}"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-P", "-m", LINK, _RUNS_AGENT],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        bufsize=0,
        start_new_session=True,  # Ctrl-C must not kill it before its ranks
        env={**os.environ, "SSH_CONNECTION": variable},
    ) as agent:
        agents.append(agent)
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        lock = threading.Lock()
        errors = _start(_send_stream, agent.stderr, _ERR, connection, lock)
        _start(_write_input, connection, agent.stdin)
        _send_stream(agent.stdout, _OUT, connection, lock)
        errors.join()
        code = agent.wait()
        connection.send(_CODE + str(code if code >= 0 else 128 - code).encode())


def _send_stream(
    stream: IO[bytes], kind: bytes, connection: rpc.Connection, lock: threading.Lock
) -> None:
    while data := stream.read(2**16):
        with lock, suppress(OSError):  # without a connection, the agent ends soon
            connection.send(kind + data)


def _write_input(connection: rpc.Connection, stdin: IO[bytes]) -> None:
    """Forward the launcher's messages to the agent. Its input ends with the connection."""
    with suppress(OSError, authentication.Forged), stdin:
        while data := connection.receive():
            stdin.write(data)


def _start(target: Any, *given: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=given, daemon=True)
    thread.start()
    return thread


def link(words: Sequence[str]) -> int:
    """Run a link, which takes ssh's arguments, and return the exit code of the agent."""
    address = words[words.index("--") - 1]
    places = (word.split("=") for word in words)
    port, name = next(place[1:] for place in places if place[0] == address)
    secret, until = find_secret(2), time.monotonic() + ANSWER_LIMIT
    try:
        connection = rpc.connect((address, int(port)), secret, _agent_role(name), until)
        connection.socket.settimeout(None)
        _start(_send_input, connection)
        while message := connection.receive():
            kind, data = message[:1], message[1:]
            if kind == _CODE:
                return int(data)
            os.write(1 if kind == _OUT else 2, data)
    except (OSError, authentication.Forged) as error:
        sys.stderr.write(f"{error}\n")
        return LOST
    # With a reason, because the agent may still run if only the other process has ended.
    sys.stderr.write("the connection has ended\n")
    return LOST


def _send_input(connection: rpc.Connection) -> None:
    with suppress(OSError):
        while data := os.read(0, 2**16):
            connection.send(data)
        connection.socket.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1:] == [_RUNS_AGENT]:
        run_as_agent(NodeAgent)
    else:
        os._exit(link(sys.argv[1:]))
