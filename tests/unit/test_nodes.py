"""Hosts that join a run with `--nnodes` and `--survive`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import nodes
from shardwise.launch.elastic import ElasticRendezvous
from shardwise.net import network

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
