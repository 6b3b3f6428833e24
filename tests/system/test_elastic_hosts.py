"""Islands over several hosts, by real ssh: one that ends, or whose host is lost, comes back."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.system.lab import Lab, lab
from tests.system.launcher import Launcher, script
from tests.system.test_elastic_islands import Watched, back_at, ends, is_away, plain, words
from tests.system.test_hosts import over
from tests.system.test_restarts import rank_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux namespaces"),
    pytest.mark.usefixtures("warm_programs"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts."""
    hidden = tmp_path_factory.mktemp("hidden")
    with lab(tmp_path_factory.mktemp("lab"), 3, hidden) as found:
        yield found


@pytest.fixture
def shardwise(hosts: Lab, tmp_path: Path) -> Iterator[Launcher]:
    """A launcher on node1; nothing may be left of its runs on any host."""
    launcher = Launcher(tmp_path, hosts.nodes[0].enter(tmp_path))
    (tmp_path / "ck").mkdir()
    yield launcher
    left = launcher.wait_until_gone()
    launcher.kill_all()
    assert left == []
    assert launcher.folders_left() == []
    assert hosts.left() == []


def on(hosts: Lab, where: str, *more: str, islands: int = 2, every: int = 4) -> list[str]:
    """The words of a run of elastic islands on these hosts."""
    shape = ["--islands", str(islands), "--equal-every", str(every), "--elastic-islands"]
    return [*over(hosts, "-H", where), *shape, *more]


@pytest.mark.parametrize(
    ("where", "rank", "row"),
    [
        ("node1:2,node2:2", 2, "2"),
        pytest.param("node1:2,node2:2", 0, "0", marks=pytest.mark.full),
        pytest.param("node1:1,node2:3", 1, "3", marks=pytest.mark.full),
        pytest.param("node2:1,node3:2,node1:1", 3, "1", marks=pytest.mark.full),
    ],
)
def test_a_rank_is_killed(
    shardwise: Launcher, hosts: Lab, where: str, rank: int, row: str
) -> None:
    """The others go on, the island comes back, and all is as in the plain loop without it; also
    where an island is on two hosts."""
    island = rank // 2
    more = ["--restarts", "1", "--zero", row, script("island_dies"), "ck"]
    ran = shardwise.run(*on(hosts, where, *more, "--die", f"{rank}:6", "--hold", "14"))
    assert ran.code == 0, ran.err
    assert (
        f"shardwise: island {island} has ended at step 6 (rank {rank} of 4 was ended: SIGKILL). "
        f"Island {1 - island} goes on without it, from the next boundary on. Starting it again, 1 "
        "of 1.\n"
    ) in ran.err
    back = back_at(ran, island)
    assert back in (16, 20)
    found = ends(shardwise.folder / "ck")
    assert torch.allclose(found, plain(24, 4, back, island), rtol=1e-8, atol=1e-8)
