"""Hosts that join a run with `--nnodes` and `--survive`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main as cli
from shardwise.errors import LaunchError
from shardwise.launch import nodes
from shardwise.launch.elastic import ElasticRendezvous
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.ssh import command, protocol
from shardwise.launch.ssh.command import LINK
from shardwise.net import environment, network, rpc
from shardwise.net.hosts import Host, Share

SECRET = b"of these hosts, long enough"
COMMAND = [["train.py"], False, {"survive": "1"}, 2]


def meeting(number: int | None, port: int) -> ElasticRendezvous:
    return ElasticRendezvous(
        fewest=2, most=2, host="127.0.0.1", port=port, node_rank=number, name="run"
    )


def meet(numbers: tuple[int | None, int | None], given: list[Any]) -> tuple[nodes.Nodes, int]:
    """Join two hosts, and return the result of each. `given` is the command of the second."""
    with network.reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
    met: list[nodes.Nodes | LaunchError] = []

    def accept() -> None:
        try:
            with nodes.accepted(meeting(numbers[0], port), SECRET, 2, COMMAND) as found:
                found.code = 7
                met.append(found)
        except LaunchError as error:
            met.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    code = nodes.serve(meeting(numbers[1], port), SECRET, 3, given, 10.0)
    thread.join(10)
    (found,) = met
    if isinstance(found, LaunchError):
        assert code == 1
        raise found
    return found, code


def test_hosts_are_in_the_order_of_their_numbers() -> None:
    here, other = Host("localhost", 2), Host("127.0.0.1", 3)
    ordered = {(0, 1): (here, other), (1, 0): (other, here), (None, None): (here, other)}
    for numbers, expected in ordered.items():
        found, code = meet(numbers, COMMAND)
        assert found.hosts == expected
        assert code == 7, "the exit code of the run"


def test_hosts_with_the_same_number_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"--node-rank must be a different number .*\[0, 0\]"):
        meet((0, 0), COMMAND)


def test_a_host_with_another_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"has joined with another command.*other\.py"):
        meet((0, 1), [["other.py"], *COMMAND[1:]])
    assert "the first host has failed: 127.0.0.1 has joined with" in capsys.readouterr().err


def test_no_secret_is_sent_to_other_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages between hosts are authenticated, but not encrypted."""
    sent: list[bytes] = []

    def run(spec: RunSpec, _: object) -> int:
        specs = [spec.for_share(share) for share in spec.shares]
        sent.extend(protocol.encode("check", spec=asdict(each)) for each in specs)
        assert spec.secret == ""
        return 0

    joined = nodes.Node("10.0.0.2", None, 1, 4321)
    found = [nodes.Node("", None, 1, 0), joined]
    met = nodes.Nodes(nodes._hosts(found), nodes._link_words(found))
    monkeypatch.setattr(nodes, "accepted", lambda *_: nullcontext(met))
    monkeypatch.setattr("shardwise.launch.start.many_hosts.run", run)
    monkeypatch.setenv(environment.SECRET_VARIABLE, SECRET.decode())
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-endpoint", f"{socket.gethostname()}:1", "--survive", "1"]
    assert cli.main(["run", *words, str(tmp_path / "train.py")]) == 0
    assert len(sent) == 2
    assert not any(SECRET in each for each in sent)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [(0, 2, ()), (2, 2, ()), (4, 2, ())]),
        (["-n", "5"], [(0, 2, ()), (2, 2, ()), (4, 1, ())]),
        (["--spares", "2"], [(0, 2, ()), (2, 2, ()), (4, 2, (6, 7))]),
        (["-n", "4", "--spares", "2"], [(0, 2, ()), (2, 2, ()), (0, 0, (4, 5))]),
        (["-n", "3", "--spares", "2"], [(0, 2, ()), (2, 1, (3,)), (0, 0, (4,))]),
        (["-n", "7"], "-n 7: 3 hosts with 6 slots in total. Increase --nproc-per-node, or w"),
        (["-n", "2"], "-n 2: 2 hosts of 3 would have no workers and no spares"),
        (["-n", "2", "--spares", "4"], "--spares 4 on other hosts needs workers on at least two"),
    ],
)
def test_workers_and_spares_are_divided_among_the_slots(
    words: list[str],
    expected: list[tuple[int, int, tuple[int, ...]]] | str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As with -H."""
    specs: list[RunSpec] = []
    met = nodes.Nodes(tuple(Host(name, 2) for name in ("a", "b", "c")), ("link",))
    monkeypatch.setattr(nodes, "accepted", lambda *_: nullcontext(met))
    run = lambda spec, _: specs.append(spec) or 0  # noqa: E731
    monkeypatch.setattr("shardwise.launch.start.many_hosts.run", run)
    monkeypatch.setenv(environment.SECRET_VARIABLE, SECRET.decode())
    (tmp_path / "train.py").touch()
    place = ["--nnodes", "3", "--rdzv-endpoint", f"{socket.gethostname()}:1", "--survive", "1"]
    code = cli.main(["run", *place, "--nproc-per-node", "2", *words, str(tmp_path / "train.py")])
    if isinstance(expected, str):
        assert code == 2
        assert expected in capsys.readouterr().err
        return
    (spec,) = specs
    assert [(share.first, share.count, share.spares) for share in spec.shares] == expected


def test_the_number_of_workers_of_a_single_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    words = ["run", "--nnodes", "1", "-n", "4", "--survive", "1", "--device", "cpu", "--dry-run"]
    assert cli.main([*words, str(tmp_path / "train.py")]) == 0
    assert capsys.readouterr().out.startswith("4 ranks on 1 host;")
    assert cli.main([*words, "--nproc-per-node", "1", str(tmp_path / "train.py")]) == 2
    assert "-n 4: 1 host with 1 slot in total. Increase" in capsys.readouterr().err


def test_hosts_derive_the_same_secret_for_a_run() -> None:
    ours = {environment.SECRET_VARIABLE: SECRET.decode()}
    drawn = environment.derived_secret(ours, "run 1")
    assert drawn == environment.derived_secret(dict(ours), "run 1")
    assert drawn != environment.derived_secret(ours, "run 2")
    assert SECRET.decode() not in drawn
    with pytest.raises(LaunchError, match="This host has no SHARDWISE_SECRET"):
        environment.derived_secret({}, "run 1")


@contextmanager
def waiting(host: str, most: int) -> Iterator[tuple[int, list[nodes.Nodes | str]]]:
    """Wait for hosts in a thread, as the first host. Yield its port, and a list for its results."""
    with network.reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
    place = replace(meeting(None, port), host=host, fewest=most, most=most)
    found: list[nodes.Nodes | str] = []

    def accept() -> None:
        try:
            with nodes.accepted(place, SECRET, 1, COMMAND) as met:
                found.append(met)
        except LaunchError as error:
            found.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    yield port, found
    thread.join(20)
    assert found


def join(port: int, source: str, link_port: int) -> rpc.Connection:
    """Join from the address `source`, as a host whose agent is reached at `link_port`."""
    until = time.monotonic() + 10
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), 5, (source, 0))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until, "the first host does not listen"
            time.sleep(0.05)
    connection = rpc.prove(peer, SECRET, nodes._join_role(port), until)
    said = {"command": COMMAND, "number": None, "count": 1, "port": link_port, "name": "n"}
    connection.send(rpc.encode(said))
    return connection


@pytest.mark.parametrize("closes", [True, False])
def test_a_host_that_joins_again_counts_once(closes: bool) -> None:
    """Its command was ended and started again, or it has lost power in between."""
    with ExitStack() as stack:
        port, found = stack.enter_context(waiting("127.0.0.1", 3))
        again = "127.0.0.4" if closes else "127.0.0.2"
        for source, link_port in (("127.0.0.2", 1111), (again, 2222), ("127.0.0.3", 3333)):
            assert found == []
            connection = join(port, source, link_port)
            time.sleep(0.2)
            if link_port == 1111 and closes:
                connection.close()
            stack.callback(connection.close)
    (met,) = found
    assert isinstance(met, nodes.Nodes)
    assert met.ssh[-2:] == (f"{again}=2222=n", "127.0.0.3=3333=n")


def test_a_host_whose_own_name_is_a_loopback_address_can_be_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Debian resolves it to 127.0.1.1."""
    with waiting("127.0.1.1", 2) as (port, found):
        join(port, "127.0.0.2", 1111).close()  # connects to another address
    assert isinstance(found[0], nodes.Nodes)
    assert f"shardwise: waiting for 1 other host at 0.0.0.0, port {port}" in capsys.readouterr().err


def test_advice_for_a_first_host_that_cannot_listen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        place = replace(meeting(None, taken.getsockname()[1]), host="127.0.0.1")
        with (
            pytest.raises(LaunchError, match=r"is in use .*Write another port in --rdzv-endpoint"),
            nodes.accepted(place, SECRET, 1, COMMAND),
        ):
            pass
    place = replace(place, host="no-such-host.invalid")
    with (
        pytest.raises(LaunchError, match=r"has no address: .* Write an address at which the other"),
        nodes.accepted(place, SECRET, 1, COMMAND),
    ):
        pass


def test_a_proof_for_another_host_is_refused() -> None:
    """An attacker cannot relay a link to a host that it was not meant for."""
    listener = rpc.listen("127.0.0.1")
    place = listener.getsockname()
    server = rpc.Server(listener, SECRET, nodes._agent_role("b"), lambda _: None, name="agent")
    until = time.monotonic() + 10
    with pytest.raises(rpc.Unproven):
        rpc.connect(place, SECRET, nodes._agent_role("a"), until)
    rpc.connect(place, SECRET, nodes._agent_role("b"), until).close()
    server.close()


def test_advice_names_no_ssh_between_hosts_that_have_joined() -> None:
    share = Share(Host("10.0.0.2", 1), 1, 1)
    spec = RunSpec(words=(), size=2, shares=(share,), ssh=("python", "-m", LINK))
    said = [
        command.advice_for(spec, share.host),
        command.silent_host(spec, share, 7),
        *(command.start_failure(spec, share.host, code, "") for code in (1, 255)),
    ]
    assert not any("ssh 1" in each or "-m shardwise.launch.nodes" in each for each in said), said


def test_a_signal_before_the_workers_start_ends_the_command() -> None:
    with network.reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]

    def accept() -> None:
        with nodes.accepted(meeting(None, port), SECRET, 2, COMMAND):
            os.kill(os.getpid(), signal.SIGTERM)
            ended.wait(10)

    ended = threading.Event()
    thread = threading.Thread(target=accept)
    thread.start()
    try:
        code = nodes.serve(meeting(None, port), SECRET, 3, COMMAND, 10.0)
    finally:
        ended.set()
        thread.join(10)
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize("patience", [2.0, 10.0, 300.0])
def test_a_silent_first_host_is_lost_after_host_timeout(patience: float) -> None:
    found = nodes._keepalive(patience)
    seconds = found["TCP_KEEPIDLE"] + found["TCP_KEEPCNT"] * found["TCP_KEEPINTVL"]
    assert patience <= seconds <= patience + 2


def test_a_forged_answer_of_the_first_host_is_like_a_lost_connection() -> None:
    def answer(listener: socket.socket) -> None:
        role = nodes._join_role(listener.getsockname()[1])
        with rpc.Acceptor(listener, SECRET, role) as acceptor:
            connection = acceptor.accept(time.monotonic() + 10)
        assert connection is not None
        with connection:
            connection.receive()
            connection.socket.sendall(bytes(100))

    with rpc.listen("127.0.0.1") as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(LaunchError, match=r"Lost the connection to 127\.0\.0\.1"):
            nodes.serve(meeting(1, listener.getsockname()[1]), SECRET, 1, COMMAND, 10.0)
        thread.join(10)


def test_a_silent_first_host_is_reported_while_a_host_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "REACH", 0.1)
    monkeypatch.setattr(nodes, "JOIN_LIMIT", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(LaunchError, match="cannot be reached: timed out"),
    ):
        nodes.serve(meeting(1, listener.getsockname()[1]), SECRET, 1, COMMAND, 10.0)
    assert "shardwise: waiting for 127.0.0.1:" in capsys.readouterr().err
