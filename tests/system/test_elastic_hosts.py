"""Islands on several hosts, over real ssh: a failed or lost island returns."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.atomic_folders import complete
from shardwise.islands.elastic.hosts import AGENT
from shardwise.net.restarts import SAVED
from tests.system.lab import Lab
from tests.system.launcher import Launcher, script
from tests.system.test_elastic_islands import Watched, back_at, ends, is_away, plain
from tests.system.test_hosts import over
from tests.system.test_restarts import rank_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux namespaces"),
    pytest.mark.usefixtures("warm_programs"),
]


@pytest.fixture
def shardwise(hosts: Lab, tmp_path: Path) -> Iterator[Launcher]:
    """A launcher on node1. Nothing may be left of its runs on any host."""
    launcher = Launcher(tmp_path, hosts.nodes[0].enter(tmp_path))
    (tmp_path / "ck").mkdir()
    yield launcher
    left = launcher.wait_until_gone()
    launcher.close()
    assert left == []
    assert launcher.folders_left() == []
    assert hosts.left() == []


def on(hosts: Lab, where: str, *more: str, islands: int = 2, every: int = 4) -> list[str]:
    """Return the command line of a run of elastic islands on these hosts."""
    shape = ["--equal-every", str(every), "--elastic-islands"]
    shape += [] if "--islands" in more else ["--islands", str(islands)]
    return [*over(hosts, "-H", where), "-x", "TEST_MARK", *shape, *more]


WIDE = 1500
"""Width of a hidden layer that makes islands fetch contributions from host to host."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "rank", "row", "width"),
    [
        ("node1:2,node2:2", 2, "2", WIDE),
        ("node1:2,node2:2", 0, "0", 40),
        ("node1:1,node2:3", 1, "3", WIDE),
        ("node2:1,node3:2,node1:1", 3, "1", WIDE),
    ],
)
def test_a_rank_is_killed(
    shardwise: Launcher, hosts: Lab, where: str, rank: int, row: str, width: int
) -> None:
    """The others continue, the island returns, and all is as in the plain loop without it. One
    island may be on two hosts."""
    island = rank // 2
    more = ["--restarts", "1", "--zero", row, script("island_dies"), "ck", "--width", str(width)]
    ran = shardwise.run(*on(hosts, where, *more, "--die", f"{rank}:6", "--hold", "14"))
    assert ran.code == 0, ran.err
    assert (
        f"shardwise: island {island} has ended at step 6 (rank {rank} of 4 was ended: SIGKILL). "
        f"Island {1 - island} continues without it from the next boundary on. Restarting it (1 "
        "of 1).\n"
    ) in ran.err
    back = back_at(ran, island)
    assert back in (16, 20)
    found = ends(shardwise.folder / "ck")
    assert torch.allclose(found, plain(24, 4, back, island, width), rtol=1e-8, atol=1e-8)


def kill_agent(shardwise: Launcher, hosts: Lab, number: int) -> None:
    """Kill the agent on a host, and nothing else."""
    network = os.readlink(f"/proc/{hosts.nodes[number - 1].pid}/ns/net")
    for pid in hosts.processes():
        with suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if AGENT.encode() in words and os.readlink(f"/proc/{pid}/ns/net") == network:
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError(f"no agent runs on node{number}")


@pytest.mark.parametrize(
    ("how", "width"),
    [
        ("its agent is killed", WIDE),
        pytest.param("its cable is cut", WIDE, marks=pytest.mark.full),
        pytest.param("its cable is cut", 40, marks=pytest.mark.full),
    ],
)
def test_lost_host_returns(shardwise: Launcher, hosts: Lab, how: str, width: int) -> None:
    """Its island is removed when the host stops answering, and returns with the host."""
    cut, epochs = how == "its cable is cut", 60 if how == "its cable is cut" else 16
    flags = ["--host-timeout", "3" if cut else "2", "--restarts", "1", "--islands", "host"]
    more = [script("island_dies"), "ck", "--epochs", str(epochs), "--pause", "0.05"]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1", *flags, *more, "--width", str(width)))
    assert run.reach(6)
    if cut:
        hosts.cut(2)
        try:
            assert run.says("island 1 has ended (node2 (rank 1) is lost: ")
            assert run.says("shardwise: node2 cannot be reached yet. Trying again every")
        finally:
            hosts.mend(2)
    else:
        kill_agent(shardwise, hosts, 2)
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert "island 1 has ended (node2 (rank 1) is lost" in ran.err
    assert "Island 0 continues without it from the next boundary on. Restarting it (1" in ran.err
    back, steps = back_at(ran, 1), 8 * epochs
    gone = next(step for step in range(4, steps, 4) if f"[1] step {step + 4} " not in ran.out)
    found = ends(shardwise.folder / "ck", range(2))
    # The island's output does not show for certain which boundary was its last.
    near = [plain(steps, at, back, 1, width) for at in (gone, gone - 4, gone + 4)]
    assert any(torch.allclose(found, each, rtol=1e-8, atol=1e-8) for each in near)


@pytest.mark.full
def test_refuses_hosts_that_cannot_reach_each_other(shardwise: Launcher, hosts: Lab) -> None:
    """The run is rejected before any work is lost."""
    with hosts.without_way(2, 3):
        ran = shardwise.run(*on(hosts, "node1:1,node2:1,node3:2", script("island_dies"), "ck"))
    assert (ran.code, ran.out) == (2, "")
    assert "node2 cannot fetch from node3, at port " in ran.err
    assert "Allow connections between them" in ran.err


@pytest.mark.full
def test_lost_connection_between_hosts(shardwise: Launcher, hosts: Lab) -> None:
    """The launcher still reaches all hosts. It removes the island that cannot fetch."""
    flags = ["--host-timeout", "2"]
    more = [script("island_dies"), "ck", "--epochs", "10", "--pause", "0.1", "--width", str(WIDE)]
    words = on(hosts, "node1:1,node2:1,node3:1", *flags, *more, islands=3)
    run = Watched(shardwise, *words)
    assert run.reach(6)
    with hosts.without_way(2, 3):
        assert run.says("shardwise: island 1 has ended")
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert "island 1 has ended (node2 cannot fetch from node3, at port " in ran.err
    assert "Islands 0, 2 continue without it" in ran.err
    ends(shardwise.folder / "ck", (0, 2))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_while_a_host_is_away(
    shardwise: Launcher, hosts: Lab, number: signal.Signals
) -> None:
    flags = ["--host-timeout", "2", "--restarts", "1"]
    more = [script("island_dies"), "ck", "--epochs", "60", "--pause", "0.1"]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1", *flags, *more))
    assert run.reach(6)
    hosts.cut(2)
    try:
        assert run.says("island 1 has ended")
        run.process.send_signal(number)
        ran = run.finish()
    finally:
        hosts.mend(2)
    if number == signal.SIGTERM:
        assert ran.code == SAVED, ran.err
        (last,) = complete(shardwise.folder / "ck")
        assert last.step % 4 == 0
    else:
        assert ran.code == 128 + number


@pytest.mark.full
def test_a_run_that_ends_while_a_host_is_away(shardwise: Launcher, hosts: Lab) -> None:
    """The run does not wait for an island that cannot return."""
    flags = ["--host-timeout", "2", "--restarts", "1"]
    more = [script("island_dies"), "ck", "--epochs", "10", "--pause", "0.1"]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1", *flags, *more))
    assert run.reach(6)
    hosts.cut(2)
    try:
        ran = run.finish()
    finally:
        hosts.mend(2)
    assert ran.code == 0, ran.err
    assert is_away(ran, 1)
    ends(shardwise.folder / "ck", range(1))


@pytest.mark.full
def test_the_host_of_the_last_island_is_lost(shardwise: Launcher, hosts: Lab) -> None:
    """The run ends with the report, and all hosts must answer before it restarts."""
    shardwise.enter = hosts.nodes[0].enter(shardwise.folder)
    flags = ["--host-timeout", "2"]
    more = [script("island_dies"), "ck", "--epochs", "60", "--pause", "0.1"]
    run = Watched(shardwise, *on(hosts, "node2:1,node3:1", *flags, *more))
    assert run.reach(6)
    hosts.cut(2)
    try:
        assert run.says("island 0 has ended")
        hosts.cut(3)
        ran = run.finish()
    finally:
        hosts.mend(2)
        hosts.mend(3)
    assert ran.code == 1, ran.err
    assert "node3 (rank 1) is lost: " in ran.err


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_a_random_rank_is_killed_at_a_random_moment(
    shardwise: Launcher, hosts: Lab, seed: int
) -> None:
    """Once or twice, in a random row and on random hosts. In the end all ranks agree."""
    draw = random.Random(seed)
    where = draw.choice(["node1:2,node2:2", "node2:1,node3:3", "node3:1,node1:2,node2:1"])
    islands, every = draw.choice([2, 2, 4]), draw.choice([1, 2, 4])
    flags = ["--restarts", "3", "--zero", str(draw.randrange(4))]
    flags += draw.choice([[], ["--outer", "nesterov:0.7,0.9"], ["--wire", "int8"]])
    more = [script("island_dies"), "ck", "--epochs", "8", "--pause", "0.03", "--hold", "40"]
    more += ["--width", str(draw.choice([40, WIDE, 4 * WIDE]))]
    more += draw.choice([[], ["--measure"], ["--save", "3"], ["--measure", "--save", "5"]])
    run = Watched(shardwise, *on(hosts, where, *flags, *more, islands=islands, every=every))
    assert run.reach(draw.randint(1, 30))
    time.sleep(draw.random() * 0.1)
    first = draw.randrange(4)
    os.kill(rank_of(shardwise, first), draw.choice([signal.SIGKILL, signal.SIGSEGV]))
    if draw.random() < 0.4 and run.reach(draw.randint(41, 55)):
        time.sleep(draw.random() * 0.1)
        with suppress(StopIteration, ProcessLookupError):
            os.kill(rank_of(shardwise, draw.randrange(4)), signal.SIGKILL)
    ran = run.finish()
    print("seed", seed, *(line for line in ran.err.splitlines() if "shardwise: " in line))
    assert ran.code == 0, ran.err
    size = 4 // islands
    assert f"shardwise: island {first // size} has ended at step " in ran.err
    assert f"shardwise: island {first // size} has returned, from step " in ran.err
    away = {island for island in range(islands) if is_away(ran, island)}
    assert len(away) <= 1
    ends(shardwise.folder / "ck", [rank for rank in range(4) if rank // size not in away])


def agent_of(hosts: Lab, node: int) -> int:
    """Return the process number of the agent on a node."""
    space = os.readlink(f"/proc/{hosts.nodes[node - 1].pid}/ns/net")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            leads = (folder / "stat").read_text().rpartition(")")[2].split()[3] == folder.name
            if leads and AGENT.encode() in words and os.readlink(folder / "ns/net") == space:
                return int(folder.name)
    raise AssertionError(f"there is no agent on node{node}")


@pytest.mark.full
def test_lost_connection_between_hosts_returns(shardwise: Launcher, hosts: Lab) -> None:
    """The host that was given up is still alive and reports ends, which are not a second
    failure."""
    flags = ["--host-timeout", "2", "--restarts", "1"]
    more = [script("island_dies"), "ck", "--epochs", "40", "--pause", "0.1", "--width", str(WIDE)]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1,node3:1", *flags, *more, islands=3))
    assert run.reach(6)
    with hosts.without_way(2, 3):
        assert run.says("shardwise: island 1 has ended")
        assert run.says("Trying again every 2 s: node2 cannot fetch from node3")
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert back_at(ran, 1) > 6
    assert ran.err.count("has ended") == 1
    ends(shardwise.folder / "ck", range(3))


@pytest.mark.full
def test_an_agent_is_killed(shardwise: Launcher, hosts: Lab) -> None:
    """Its ranks end with it, and its island returns through a new agent."""
    flags = ["--host-timeout", "3", "--restarts", "1"]
    more = [script("island_dies"), "ck", "--epochs", "40", "--pause", "0.1"]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1", *flags, *more))
    assert run.reach(6)
    os.kill(agent_of(hosts, 2), signal.SIGKILL)
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert "shardwise: island 1 has ended (node2 (rank 1) is lost" in ran.err
    assert back_at(ran, 1) > 6
    ends(shardwise.folder / "ck", range(2))


@pytest.mark.full
@pytest.mark.parametrize("what", ["agent", "cable"])
def test_host_does_not_answer_for_a_while(shardwise: Launcher, hosts: Lab, what: str) -> None:
    """The launcher waits for a stopped agent, and for a cable that is reconnected in time."""
    flags = ["--host-timeout", "4", "--restarts", "1"]
    more = [script("island_dies"), "ck", "--pause", "0.1"]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1", *flags, *more))
    assert run.reach(6)
    if what == "agent":
        agent = agent_of(hosts, 2)
        os.kill(agent, signal.SIGSTOP)
        time.sleep(6)
        os.kill(agent, signal.SIGCONT)
    else:
        hosts.cut(2)
        time.sleep(1)
        hosts.mend(2)
    ran = run.finish()
    assert (ran.code, ran.err.count("has ended")) == (0, 0), ran.err
    ends(shardwise.folder / "ck", range(2))


@pytest.mark.full
def test_two_of_three_hosts_are_lost_at_once(shardwise: Launcher, hosts: Lab) -> None:
    """Both return to the remaining one."""
    flags = ["--host-timeout", "3", "--restarts", "4"]
    more = [script("island_dies"), "ck", "--epochs", "80", "--pause", "0.1", "--width", str(WIDE)]
    run = Watched(shardwise, *on(hosts, "node1:1,node2:1,node3:1", *flags, *more, islands=3))
    assert run.reach(6)
    hosts.cut(2)
    hosts.cut(3)
    try:
        assert run.says("shardwise: island 1 has ended")
        assert run.says("shardwise: island 2 has ended")
    finally:
        hosts.mend(2)
        hosts.mend(3)
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert back_at(ran, 1) > 6
    assert back_at(ran, 2) > 6
    ends(shardwise.folder / "ck", range(3))


@pytest.mark.full
def test_host_is_lost_while_its_island_is_admitted(shardwise: Launcher, hosts: Lab) -> None:
    """The others continue, and admit it again."""
    flags = ["--host-timeout", "2", "--restarts", "2"]
    more = [script("island_dies"), "ck", "--epochs", "80", "--pause", "0.1", "--slow-load", "4"]
    words = on(hosts, "node1:1,node2:1", *flags, *more, "--die", "1:6")
    run = Watched(shardwise, *words)
    assert run.read("[1] loads")
    hosts.cut(2)
    try:
        assert run.says("island 1 has ended (node2 (rank 1) is lost")
    finally:
        hosts.mend(2)
    ran = run.finish()
    assert ran.code == 0, ran.err
    assert back_at(ran, 1) > 6
    ends(shardwise.folder / "ck", range(2))
