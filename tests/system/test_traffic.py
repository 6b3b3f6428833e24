"""Measures the traffic between ranks on two hosts that are connected by a separate network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.launcher import LIMIT, script
from tests.system.namespaces import TwoHosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_programs"),
]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    two = TwoHosts()
    yield two
    two.close()


def told(hosts: TwoHosts, name: str = "traffic", **environ: str) -> list[dict[str, Any]]:
    """Return the output of both hosts for a run with two ranks each."""
    ranks = [hosts.start(rank // 2, rank, 4, script(name), environ) for rank in range(4)]
    ended = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, ended
    assert not any("Traceback" in err for _, err in ended), ended
    lines = [json.loads(out) for out, _ in ended if out]
    assert len(lines) == 2
    return lines


def test_a_host_sends_what_the_formula_says(hosts: TwoHosts) -> None:
    """Each of two hosts sends half of the model in a reduce-scatter and half in an all-gather.

    The number of ranks does not matter. Sharded parameters are gathered for forward and for
    backward.
    """
    for host in told(hosts):
        assert host["transport"] == "shared memory in each of 2 hosts, gloo between"
        for row, times in {"0": 1.0, "2": 1.0, "3": 1.5}.items():
            assert times <= host["rows"][row] <= 1.03 * times


def test_over_gloo_alone_every_rank_sends_for_itself(hosts: TwoHosts) -> None:
    for host in told(hosts, SHARDWISE_TRANSPORT="gloo", ROWS="2"):
        assert host["transport"] == "gloo"
        assert host["rows"]["2"] > 1.9


@pytest.mark.full
@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_islands_send_nothing_between_two_boundaries(
    hosts: TwoHosts, wire: str, tmp_path: Path
) -> None:
    """Islands send nothing between boundaries, and the bytes given by the formula at each boundary.

    The measurement includes message headers and the network's own traffic, such as repeated address
    requests and late acknowledgements on a busy host.
    """
    for host in told(hosts, "islands_traffic", WIRE=wire, MEETING=str(tmp_path)):
        assert host["between"] < 500
        assert 1 <= host["boundary"] <= 1.03
