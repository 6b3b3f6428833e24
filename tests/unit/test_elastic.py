"""Command lines and variables of torch's elastic agent, as tables."""

import socket
import sys
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import elastic
from shardwise.launch.elastic import ElasticRendezvous

ALONE = ElasticRendezvous(fewest=1, most=1, host=None, port=0, node_rank=None, name="run")
TWO = ElasticRendezvous(fewest=2, most=2, host="node1", port=29500, node_rank=None, name="run")


class TestMeeting:
    @pytest.mark.parametrize(
        ("nnodes", "endpoint", "node_rank", "found"),
        [
            ("1", None, None, ALONE),
            ("2", "node1:29500", None, TWO),
            ("2:4", "[fd00::1]:80", None, (2, 4, "fd00::1", 80, None)),
            ("2", "10.0.0.1:1", 1, (2, 2, "10.0.0.1", 1, 1)),
            ("1:1", None, 0, (1, 1, None, 0, 0)),
        ],
    )
    def test_reads_meeting_from_flags(
        self, nnodes: str, endpoint: str | None, node_rank: int | None, found: Any
    ) -> None:
        if isinstance(found, tuple):
            names = ("fewest", "most", "host", "port", "node_rank")
            found = ElasticRendezvous(**dict(zip(names, found, strict=True)), name="run")
        assert ElasticRendezvous.of(nnodes, endpoint, node_rank, "run") == found

    @pytest.mark.parametrize(
        ("nnodes", "endpoint", "node_rank", "message"),
        [
            ("0", None, None, "--nnodes takes a number of hosts, or MIN:MAX such as 2:4, not '0'"),
            ("4:2", "h:1", None, "MIN:MAX such as 2:4, not '4:2'"),
            ("two", None, None, "MIN:MAX such as 2:4, not 'two'"),
            ("2:", None, None, "MIN:MAX such as 2:4, not '2:'"),
            ("2", None, None, "--nnodes 2: the hosts need an address to connect to. Add"),
            ("2", "node1", None, r"--rdzv-endpoint takes HOST:PORT, .*, not 'node1'"),
            ("2", "node1:0", None, r"--rdzv-endpoint takes HOST:PORT, .*, not 'node1:0'"),
            ("2", ":29500", None, r"--rdzv-endpoint takes HOST:PORT, .*, not ':29500'"),
            ("2", "node1:1", 2, "--node-rank 2 does not fit --nnodes 2: it needs a fixed number"),
            ("1:2", "node1:1", 0, "--node-rank 0 does not fit --nnodes 1:2"),
        ],
    )
    def test_refuses_flags(
        self, nnodes: str, endpoint: str | None, node_rank: int | None, message: str
    ) -> None:
        with pytest.raises(LaunchError, match=message):
            ElasticRendezvous.of(nnodes, endpoint, node_rank, "run")


class TestWords:
    HEAD = (sys.executable, "-P", "-m", "torch.distributed.run")

    @pytest.mark.parametrize(
        ("meeting", "more", "middle"),
        [
            (ALONE, {}, ["--nnodes=1:1", "--nproc-per-node=4", "--standalone", "--max-restarts=0"]),
            (
                TWO,
                {"address": "10.0.0.2", "restarts": 3},
                [
                    *("--nnodes=2:2", "--nproc-per-node=4", "--rdzv-backend=c10d"),
                    *("--rdzv-endpoint=node1:29500", "--rdzv-id=run"),
                    *("--max-restarts=3", "--local-addr=10.0.0.2"),
                ],
            ),
            (
                ElasticRendezvous.of("2", "[fd00::1]:80", 1, "run"),
                {"log_dir": "logs"},
                [
                    *("--nnodes=2:2", "--nproc-per-node=4", "--rdzv-backend=static"),
                    *("--rdzv-endpoint=[fd00::1]:80", "--rdzv-id=run", "--node-rank=1"),
                    *("--max-restarts=0", "--log-dir=logs", "--tee=3"),
                ],
            ),
        ],
    )
    def test_agent_command(
        self, meeting: ElasticRendezvous, more: dict[str, Any], middle: list[str]
    ) -> None:
        given = {"per_host": 4, "restarts": 0, "address": None, "log_dir": None} | more
        found = elastic.agent_command(meeting, ("python", "t.py", "-n"), **given)
        assert found == [*self.HEAD, *middle, "--no-python", "python", "t.py", "-n"]


class TestPlace:
    def test_own_address_is_on_route_to_meeting_host(self) -> None:
        assert elastic.own_address(ALONE, None) is None
        here = ElasticRendezvous.of("1", "127.0.0.1:1", None, "run")
        assert elastic.own_address(here, None) == "127.0.0.1"

    def test_loopback_address_is_not_given_to_others(self) -> None:
        assert (
            elastic.own_address(ElasticRendezvous.of("2", "127.0.0.1:1", None, "run"), None) is None
        )

    def test_own_address_is_on_named_interface(self) -> None:
        loopback = socket.if_nameindex()[0][1]
        assert elastic.own_address(TWO, loopback) == "127.0.0.1"

    def test_agent_environment(self) -> None:
        told = elastic.agent_environment({"GLOO_SOCKET_IFNAME": "ib0"}, {"zero": "2"}, "eth0")
        assert told == {
            "GLOO_SOCKET_IFNAME": "ib0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "SHARDWISE_FLAGS": '{"zero": "2"}',
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        assert "NCCL_SOCKET_IFNAME" not in elastic.agent_environment({}, {}, None)


def test_warns_about_open_agent() -> None:
    alone = elastic.open_agent_warning(ALONE, {})
    assert "listens on all interfaces without authentication" in alone
    assert "SHARDWISE_SECRET" not in alone
    assert "set the same SHARDWISE_SECRET on all hosts" in elastic.open_agent_warning(TWO, {})
    assert "SHARDWISE_SECRET" not in elastic.open_agent_warning(TWO, {"SHARDWISE_SECRET": "s" * 32})
