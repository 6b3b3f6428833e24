"""Hosts that join a run with `--nnodes` and `--survive`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main as cli
from shardwise.errors import LaunchError
from shardwise.launch import nodes
from shardwise.launch.elastic import ElasticRendezvous
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.ssh import protocol
from shardwise.net import environment, network

SECRET = b"of these hosts, long enough"
COMMAND = [["train.py"], False, {"survive": "1"}, 2]


def meeting(number: int | None, port: int) -> ElasticRendezvous:
    return ElasticRendezvous(
        fewest=2, most=2, host="127.0.0.1", port=port, node_rank=number, name="run"
    )


def meet(
    numbers: tuple[int | None, int | None], command: list[Any], secret: bytes = SECRET
) -> tuple[nodes.Nodes, Callable[[], int | str]]:
    """Let two hosts join, of which the second has `command`. Return what each has found."""
    with network.reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
    ended: list[int | str] = []

    def join() -> None:
        try:
            ended.append(nodes.serve(meeting(numbers[1], port), secret, 3, command))
        except LaunchError as error:
            ended.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()

    def how() -> int | str:
        thread.join(10)
        return ended[0]

    try:
        with nodes.accepted(meeting(numbers[0], port), SECRET, 2, COMMAND) as found:
            found.code = 7
            return found, how
    except LaunchError as error:
        assert how() == 1
        raise error


def test_hosts_have_ranks_in_the_order_of_their_numbers() -> None:
    for numbers, firsts in (((0, 1), [0, 2]), ((1, 0), [3, 0]), ((None, None), [0, 2])):
        found, how = meet(numbers, COMMAND)
        shares = {share.host.name: share for share in found.shares}
        assert [shares["localhost"].first, shares["127.0.0.1"].first] == firsts
        assert [shares["localhost"].count, shares["127.0.0.1"].count] == [2, 3]
        assert how() == 7, "the exit code of the run"


def test_hosts_with_the_same_number_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"--node-rank must be a different number .*\[0, 0\]"):
        meet((0, 0), COMMAND)


def test_a_host_with_another_command_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"has joined with another command.*other\.py"):
        meet((0, 1), [["other.py"], *COMMAND[1:]])


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
    met = nodes.Nodes(nodes._shares(found), nodes._link_words(found))
    monkeypatch.setattr(nodes, "accepted", lambda *_: nullcontext(met))
    monkeypatch.setattr("shardwise.launch.start.many_hosts.run", run)
    monkeypatch.setenv(environment.SECRET_VARIABLE, SECRET.decode())
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-endpoint", "localhost:1", "--survive", "1"]
    assert cli.main(["run", *words, str(tmp_path / "train.py")]) == 0
    assert len(sent) == 2
    assert not any(SECRET in each for each in sent)


def test_hosts_derive_the_same_secret_for_a_run() -> None:
    ours = {environment.SECRET_VARIABLE: SECRET.decode()}
    drawn = environment.derived_secret(ours, "run 1")
    assert drawn == environment.derived_secret(dict(ours), "run 1")
    assert drawn != environment.derived_secret(ours, "run 2")
    assert SECRET.decode() not in drawn
    with pytest.raises(LaunchError, match="This host has no SHARDWISE_SECRET"):
        environment.derived_secret({}, "run 1")
