"""`shardwise run --survive` in torchrun, which starts the command on each host."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.cli import main as cli
from shardwise.errors import LaunchError
from shardwise.launch import nodes
from shardwise.launch.elastic import ElasticRendezvous
from shardwise.net import torchrun_store
from shardwise.net.hosts import Host
from shardwise.net.identity import Identity
from shardwise.net.torchrun_store import HostStore

SECRET = b"of these hosts, long enough"

VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}
"""Of the second of two hosts, with one command on each."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """Start a store as torchrun does, and set its variables."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(made.port)}
    for name, value in (VARIABLES | place).items():
        monkeypatch.setenv(name, value)
    return made


def identity(rank: int) -> Identity:
    return Identity(launcher="torchrun", rank=rank, size=2, address="node1", port=29500)


def meeting(rank: int, host: str = "127.0.0.1") -> ElasticRendezvous:
    """Return the rendezvous of a host whose command is `rank`."""
    place = ElasticRendezvous.of("2", f"{host}:29500", rank, "run")
    return replace(place, store=HostStore(identity(rank)))


@contextmanager
def first_host(host: str = "127.0.0.1") -> Iterator[list[object]]:
    """Wait for the other host in a thread. Yield a list for the hosts, or for the error."""
    found: list[object] = []

    def accept() -> None:
        place = meeting(0, host)
        try:
            assert place.store is not None
            with place.store.telling_others(), nodes.accepted(place, SECRET, 1, []) as met:
                met.code = 7
                found.append(met.hosts)
        except LaunchError as error:
            found.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield found
    finally:
        thread.join(10)
    assert found


@pytest.mark.usefixtures("store")
def test_hosts_join_at_the_port_of_rank_0_once() -> None:
    with first_host() as found:
        assert nodes.serve(meeting(1), SECRET, 1, [], 10.0) == 7
    assert found == [(Host("localhost", 1), Host("127.0.0.1", 1))]
    for rank in (0, 1):
        with pytest.raises(LaunchError, match="already started, and a lost host cannot join it"):
            run(rank)


def run(rank: int) -> None:
    place = meeting(rank)
    if rank == 0:
        with nodes.accepted(place, SECRET, 1, []):
            pass
    nodes.serve(place, SECRET, 1, [], 10.0)


@pytest.mark.usefixtures("store")
def test_a_port_of_an_earlier_start_is_not_used() -> None:
    HostStore(identity(0)).publish(1)
    with first_host() as found, pytest.raises(LaunchError, match="a host has failed"):
        run(1)
    assert "already started" in str(found)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("store")
def test_a_host_that_fails_before_it_joins_ends_the_others(rank: int) -> None:
    began = time.monotonic()
    failing = HostStore(identity(rank))

    def fail() -> None:
        with suppress(LaunchError), failing.telling_others():
            raise LaunchError("no secret")

    reason = f"The run cannot start, because a host has failed. {socket.gethostname()}: no secret"
    if rank == 1:
        with first_host() as found:
            fail()
        assert found == [reason]
    else:
        thread = threading.Timer(0.2, fail)
        thread.start()
        with pytest.raises(LaunchError, match=re.escape(reason)):
            run(1)
        thread.join()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
@pytest.mark.usefixtures("store")
def test_the_first_host_may_have_an_address_of_a_router(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with first_host(host):
        assert nodes.serve(meeting(1), SECRET, 1, [], 10.0) == 7
    assert "waiting for 1 other host at 0.0.0.0, port" in capsys.readouterr().err


def test_what_the_store_cannot_provide(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = HostStore(identity(1))
    with pytest.raises(LaunchError, match=r"rank 0 has not sent its port .* within 0\.1 s"):
        ours.port(0.1)
    store.set("start 0/shardwise run: port", "-1; DROP")
    with pytest.raises(LaunchError, match="'-1; DROP' was not written by rank 0"):
        ours.port(0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = str(closed.getsockname()[1])
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr(torchrun_store, "_CONNECT", 0.5)
    with pytest.raises(LaunchError, match="This host cannot connect to torchrun's store at node1"):
        HostStore(identity(0))


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        (
            {"LOCAL_WORLD_SIZE": "2"},
            [],
            "torchrun --nproc-per-node 1 -m shardwise run --nproc-per-node 2 --survive 1 train.py",
        ),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            [],
            "--max-restarts 0 for torchrun, and --restarts 3 after shardwise run",
        ),
        ({"WORLD_SIZE": "3"}, [], "torchrun has started this command 3 times on 2 hosts. With"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, [], "torchrun has no store for this command"),
        ({}, [], "torchrun was started several times on this host (MASTER_ADDR=127.0.0.1)"),
        ({}, ["--node-rank", "0"], "--node-rank is a flag of torchrun here: write it before -m"),
        ({}, ["-H", "node1"], "shardwise run was started 2 times"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_torchrun_cannot_start_is_refused(
    changed: dict[str, str],
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "--survive", "1", *words, str(tmp_path / "train.py")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--survive on 2 hosts needs a secret"),
        (["--show", "0"], "torchrun cannot be combined with -H, --hostfile or --show: with torch"),
        (["-x", "KEY"], "-x KEY: the hosts would send its value"),
        (["--ssh", "rsh"], "--ssh rsh has no effect in a run that is started on each host"),
    ],
)
def test_other_hosts_learn_of_an_error_in_the_command(
    words: list[str],
    message: str,
    store: dist.TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.net.network.is_loopback", lambda _: False)
    monkeypatch.delenv("SHARDWISE_SECRET", raising=False)
    for name, value in {"RANK": "0", "GROUP_RANK": "0", "KEY": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "--survive", "1", *words, str(tmp_path / "train.py")]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(LaunchError, match=re.escape(message)):
        HostStore(identity(1)).port(10)
    assert not store.check(["start 0/shardwise run: port"])
