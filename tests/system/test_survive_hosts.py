"""With `--survive` on several hosts, over real ssh: ranks, hosts and cables are lost."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.disk import wait_until
from tests.random_losses.hosts import COMMAND, HostRunner
from tests.random_losses.reference import STEPS, check
from tests.system.lab import Lab
from tests.system.launcher import Launcher, Ran, script
from tests.system.test_hosts import over
from tests.system.warm import WarmPython

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux namespaces"),
    pytest.mark.usefixtures("warm_programs"),
]


@pytest.fixture
def shardwise(hosts: Lab, tmp_path: Path) -> Iterator[Launcher]:
    """Yield a launcher on node1, and check that its runs leave nothing on any host."""
    launcher = Launcher(tmp_path, hosts.nodes[0].enter(tmp_path))
    yield launcher
    left = launcher.wait_until_gone()
    launcher.close()
    assert left == []
    assert launcher.folders_left() == []
    assert hosts.left() == []


def survive(
    shardwise: Launcher,
    hosts: Lab,
    where: str,
    *words: str,
    zero: int = 0,
    most: int = 1,
    flags: tuple[str, ...] = (),
) -> Ran:
    """Run the script on the hosts in `where`. `words` are its arguments."""
    given = ["-H", where, "--survive", str(most), "--zero", str(zero), *flags]
    return shardwise.run(*over(hosts, *given), script("survives"), *words)


def ends(shardwise: Launcher, ran: Ran, kind: str, left: list[int]) -> None:
    """Check that the ranks in `left` have finished, with the undisturbed result."""
    assert ran.code == 0, ran.err
    size = len(left)
    for place, rank in enumerate(left):
        assert f"rank {rank} is {place} of {size} after step {STEPS}" in ran.out
    check(shardwise.folder, kind, left)


KILLS = [
    # hosts, --zero, loop, optimizer, kill, remaining ranks
    ("node1:2,node2:2", 2, "plain", "adamw", "2:reduce:6", [0, 1, 3]),
]
MORE_KILLS = [
    ("node1,node2", 0, "steps", "sgd", "1:backward:4", [0]),
    ("node2,node1,node3", 3, "steps", "adamw", "0:exchange:5", [1, 2]),
    ("node1:2,node2", 1, "steps", "sgd", "0:publish:5", [1, 2]),
    ("node1:2,node2:2", 3, "steps", "sgd", "1:gathered:5", [0, 2, 3]),
    ("node1,node2:2", 0, "plain", "sgd", "0:begun:4:TERM", [1, 2]),
]


@pytest.mark.parametrize(
    ("where", "zero", "loop", "kind", "kill", "left"),
    [*KILLS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_KILLS)],
)
def test_a_rank_is_killed(
    shardwise: Launcher,
    hosts: Lab,
    where: str,
    zero: int,
    loop: str,
    kind: str,
    kill: str,
    left: list[int],
) -> None:
    ran = survive(shardwise, hosts, where, loop, kind, "out", kill, zero=zero)
    assert "shardwise: --survive: the run ends if this host is lost" in ran.err
    ends(shardwise, ran, kind, left)


@pytest.mark.parametrize(
    ("where", "zero", "loop", "kind", "kill", "left"),
    [
        ("node2:2,node1:2", 3, "plain", "sgd", "0:reduce:6:HOST", [2, 3]),
        pytest.param(
            *("node1:2,node2:2", 2, "steps", "adamw", "3:backward:5:HOST", [0, 1]),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_host_is_lost(
    shardwise: Launcher,
    hosts: Lab,
    where: str,
    zero: int,
    loop: str,
    kind: str,
    kill: str,
    left: list[int],
) -> None:
    """The second copies of its states are on another host."""
    ran = survive(shardwise, hosts, where, loop, kind, "out", kill, zero=zero)
    assert re.search(r"node2 \(ranks .*\) is lost: .* The others continue", ran.err), ran.err
    hosts.clear()
    ends(shardwise, ran, kind, left)


@pytest.mark.parametrize(
    ("where", "size", "spares", "zero", "kills", "left"),
    [
        ("node1,node2,node3", 2, 1, 2, ["1:backward:2"], [0, 2]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("node1:2,node2:2,node3:2", 4, 2, 2, ["2:reduce:2:HOST"], [0, 1, 4, 5]),
                ("node2,node1,node3:2", 2, 2, 1, ["0:reduce:2", "2:enter:-1"], [1, 3]),
                # The first spare is lost after it has joined, on a host that has no other rank.
                ("node1,node2:2,node3", 3, 1, 3, ["1:forward:1", "3:refilled:-1:HOST"], [0, 2]),
            ]
        ),
    ],
)
def test_spares_on_other_hosts_replace_lost_ranks(
    shardwise: Launcher,
    hosts: Lab,
    where: str,
    size: int,
    spares: int,
    zero: int,
    kills: list[str],
    left: list[int],
) -> None:
    flags = ("-n", str(size), "--spares", str(spares), "-x", f"TESTS_RANKS={size}")
    words = ["steps", "adamw", "out", *kills]
    ran = survive(shardwise, hosts, where, *words, zero=zero, most=1, flags=flags)
    hosts.clear()
    ends_with_spares(shardwise, ran, size, left)


def ends_with_spares(shardwise: Launcher, ran: Ran, size: int, left: list[int]) -> None:
    """Check that `left` have finished. Those from `size` on have joined as spares."""
    assert ran.code == 0, ran.err
    found = re.findall(rf"rank (\d+) is (\d+) of {len(left)} after step {STEPS}", ran.out)
    order = [int(rank) for rank, _ in sorted(found, key=lambda each: int(each[1]))]
    assert sorted(order) == left, ran.out + ran.err
    check(shardwise.folder, "adamw", order, joined={rank for rank in left if rank >= size})


@pytest.mark.parametrize(
    ("zero", "kill", "left"),
    [
        (3, "3:backward:4", [0, 1]),
        # A reduction is in progress: ranks of the other host wait for it in a thread.
        pytest.param(2, "1:reduce:6", [0, 2], marks=pytest.mark.full),
        pytest.param(2, "2:backward:5:HOST", [0, 1], marks=pytest.mark.full),
    ],
)
def test_exact_run_keeps_its_bits(
    shardwise: Launcher, hosts: Lab, zero: int, kill: str, left: list[int]
) -> None:
    """After the loss of one rank, the other rank of its host leaves."""
    flags = ("--exact", "4")
    words = ["steps", "adamw"]
    alone = shardwise.run("run", "-n", "1", *flags, script("survives"), *words, "alone")
    assert alone.code == 0, alone.err
    shutil.rmtree(shardwise.folder / "checkpoints")
    ran = survive(shardwise, hosts, "node1:2,node2:2", *words, "out", kill, zero=zero, flags=flags)
    hosts.clear()
    assert ran.code == 0, ran.err
    undisturbed = torch.load(shardwise.folder / "alone-0.pt")
    found = {path.stem: torch.load(path) for path in shardwise.folder.glob("out-*.pt")}
    assert sorted(found) == [f"out-{rank}" for rank in left]
    for each in found.values():
        assert each["losses"] == undisturbed["losses"]
        assert torch.equal(each["weights"], undisturbed["weights"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "zero", "kind", "kill", "left"),
    [
        (("--tensor", "2"), 2, "split", "1:backward:4", [2, 3]),
        (("--tensor", "2"), 2, "split", "2:backward:5:HOST", [0, 1]),
        (("--pipeline", "2", "--stages", "2"), 1, "stages", "3:forward:4", [0, 1]),
    ],
)
def test_a_replica_is_lost(
    shardwise: Launcher,
    hosts: Lab,
    axes: tuple[str, ...],
    zero: int,
    kind: str,
    kill: str,
    left: list[int],
) -> None:
    words = ("steps", kind, "out", kill)
    ran = survive(shardwise, hosts, "node1:2,node2:2", *words, zero=zero, flags=axes)
    hosts.clear()
    ends(shardwise, ran, kind, left)


def on_each_host(
    shardwise: Launcher,
    hosts: Lab,
    *words: str,
    count: int = 2,
    torchrun: bool = False,
    ranks: int = 0,
) -> list[Ran]:
    """Start the same command on `count` hosts, and return how each has ended.

    With `torchrun`, it is torchrun that starts `shardwise run` on each host. `ranks` is the number
    of ranks of a run with spares.
    """
    started = []
    meeting = ("--nnodes", str(count), "--rdzv-endpoint", "node1:29500")
    environ = {"SHARDWISE_SECRET": "of these hosts, long enough", "TESTS_RANKS": str(ranks)}
    for number in reversed(range(count)):  # the first host may start last
        shardwise.enter = hosts.nodes[number].enter(shardwise.folder)
        if torchrun:
            agent = (sys.executable, "-m", "torch.distributed.run", *meeting)
            one = ("--nproc-per-node", "1", "--node-rank", str(number), "--no-python")
            shardwise.enter += [*agent, *one]
        ours = () if torchrun else meeting
        started.append(shardwise.start("run", *ours, *words, env=environ))
    return [shardwise.finish(process) for process in reversed(started)]


@pytest.mark.parametrize(
    ("kill", "left"),
    [
        ("2:reduce:6", [0, 1, 3]),
        pytest.param("2:backward:5:HOST", [0, 1], marks=pytest.mark.full),
    ],
)
def test_command_was_started_on_each_host(
    shardwise: Launcher, hosts: Lab, kill: str, left: list[int]
) -> None:
    flags = ("--nproc-per-node", "2", "--survive", "1", "--zero", "2", "--host-timeout", "3")
    words = (script("survives"), "plain", "adamw", "out", kill)
    ran, other = on_each_host(shardwise, hosts, *flags, *words)
    hosts.clear()
    ends(shardwise, ran, "adamw", left)
    assert other.code == (-9 if "HOST" in kill else 0), other.err
    if "HOST" in kill:  # nothing there could remove its agent's folder
        (folder,) = shardwise.folders_left()
        shutil.rmtree(folder)


def test_torchrun_starts_the_command_on_each_host(shardwise: Launcher, hosts: Lab) -> None:
    flags = ("--nproc-per-node", "2", "--survive", "1", "--zero", "2", "--host-timeout", "3")
    words = (script("survives"), "plain", "adamw", "out", "2:reduce:6")
    ran, other = on_each_host(shardwise, hosts, *flags, *words, torchrun=True)
    ends(shardwise, ran, "adamw", [0, 1, 3])
    assert other.code == 0, other.err


@pytest.mark.full
def test_a_host_with_torchrun_is_lost(shardwise: Launcher, hosts: Lab) -> None:
    """torchrun waits 300 s for the lost host after the run, so this test ends it."""

    def end_torchrun() -> None:
        files = [shardwise.folder / f"out-{rank}.pt" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files), 100)
        wait_until(lambda: len(hosts.running(1, "survives.py")) == 1, 100)
        shardwise.started[-1].kill()

    thread = threading.Thread(target=end_torchrun)
    thread.start()
    flags = ("--nproc-per-node", "2", "--survive", "1", "--zero", "2", "--host-timeout", "3")
    words = (script("survives"), "plain", "adamw", "out", "2:backward:5:HOST")
    try:
        ran, _ = on_each_host(shardwise, hosts, *flags, *words, torchrun=True)
    finally:
        thread.join()
        hosts.clear()
    assert "After the run, torchrun may wait up to 300 s for this host" in ran.err
    check(shardwise.folder, "adamw", [0, 1])
    for folder in shardwise.folders_left():  # of the lost agent
        shutil.rmtree(folder)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_spares_wait_on_a_host_that_has_joined(
    shardwise: Launcher, hosts: Lab, torchrun: bool
) -> None:
    flags = ("-n", "2", "--survive", "1", "--spares", "1", "--zero", "2", "--host-timeout", "3")
    words = (*flags, script("survives"), "steps", "adamw", "out", "1:backward:2")
    ran, *others = on_each_host(shardwise, hosts, *words, count=3, torchrun=torchrun, ranks=2)
    ends_with_spares(shardwise, ran, 2, [0, 2])
    assert [other.code for other in others] == [0, 0], others


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.full),
    ],
)
def test_workers_of_a_host_that_has_joined_leave_after_a_signal(
    shardwise: Launcher, hosts: Lab, number: signal.Signals
) -> None:
    """After SIGUSR1, all workers save and exit."""

    def terminate() -> None:
        wait_until((shardwise.folder / "cut").exists, 60)
        shardwise.started[0].send_signal(number)
        time.sleep(0.5)
        (shardwise.folder / "is-cut").touch()

    thread = threading.Thread(target=terminate)
    thread.start()
    flags = ("--nproc-per-node", "2", "--survive", "1", "--zero", "2", "--host-timeout", "3")
    words = (script("survives"), "plain", "adamw", "out", "2:backward:5:CUT")
    try:
        ran, other = on_each_host(shardwise, hosts, *flags, *words)
    finally:
        thread.join()
    assert f"shardwise: {number.name} for the workers of this host" in other.err
    if number == signal.SIGUSR1:
        assert (ran.code, other.code) == (75, 75)
        assert "SIGUSR1: saved checkpoints/step-" in ran.err
        return
    ends(shardwise, ran, "adamw", [0, 1])
    assert other.code == 0, other.err


@pytest.mark.full
def test_cable_of_a_host_that_has_joined_is_cut(shardwise: Launcher, hosts: Lab) -> None:
    thread = threading.Thread(target=cut_when_asked, args=(hosts, shardwise.folder, 2))
    thread.start()
    flags = ("--nproc-per-node", "2", "--survive", "1", "--zero", "2", "--host-timeout", "3")
    words = ("--timeout", "60", script("survives"), "steps", "sgd", "out", "2:backward:5:CUT")
    try:
        ran, other = on_each_host(shardwise, hosts, *flags, *words)
    finally:
        thread.join()
        hosts.mend(2)
    ends(shardwise, ran, "sgd", [0, 1])
    assert "Lost the connection to node1, where the launcher of this run is" in other.err


def cut_when_asked(hosts: Lab, folder: Path, number: int) -> None:
    """Cut the cable of a node once a rank has reached its moment."""
    wait_until((folder / "cut").exists, 60)
    hosts.cut(number)
    (folder / "is-cut").touch()


@pytest.mark.parametrize(
    ("where", "zero", "most", "number", "rank", "left"),
    [
        pytest.param("node1:2,node2:2", 2, 1, 2, 2, [0, 1], marks=pytest.mark.full),
        # Gloo connects over IPv4 here.
        pytest.param(*("[fd00:77::1]:1,[fd00:77::2]:1", 0, 1, 2, 1, [0]), marks=pytest.mark.full),
        # The launcher's host continues, although the other part has more hosts.
        pytest.param("node1,node2,node3", 0, 2, 1, 0, [0], marks=pytest.mark.full),
    ],
)
def test_a_cable_is_cut(
    shardwise: Launcher,
    hosts: Lab,
    where: str,
    zero: int,
    most: int,
    number: int,
    rank: int,
    left: list[int],
) -> None:
    thread = threading.Thread(target=cut_when_asked, args=(hosts, shardwise.folder, number))
    thread.start()
    flags = ("--host-timeout", "3", "--timeout", "60")
    words = ("steps", "adamw", "out", f"{rank}:backward:5:CUT")
    try:
        ran = survive(shardwise, hosts, where, *words, zero=zero, most=most, flags=flags)
        # The ranks of the lost hosts end by themselves.
        assert hosts.left() == []
    finally:
        thread.join()
        hosts.mend(number)
    assert re.search(r"(node2|fd00:77::2) \(ranks? .*\) is lost: ", ran.err), ran.err
    ends(shardwise, ran, "adamw", left)


@pytest.mark.full
def test_the_only_rank_of_a_host_is_stopped(shardwise: Launcher, hosts: Lab) -> None:
    """Its agent kills it, because no other rank sees its process."""
    flags = ("--host-timeout", "3", "--timeout", "16")
    words = ("steps", "sgd", "out", "2:reduce:3:STOP")
    ran = survive(shardwise, hosts, "node1:2,node2", *words, zero=2, flags=flags)
    ends(shardwise, ran, "sgd", [0, 1])


@pytest.mark.full
def test_all_ranks_of_a_host_leave_after_sigterm(shardwise: Launcher, hosts: Lab) -> None:
    leaves = ["2:backward:6:TERM", "3:backward:6:TERM"]
    ran = survive(shardwise, hosts, "node1:2,node2:2", "steps", "adamw", "out", *leaves, zero=2)
    assert "SIGTERM: this worker leaves after step" in ran.err
    ends(shardwise, ran, "adamw", [0, 1])


@pytest.mark.full
def test_a_signal_to_a_host_may_reach_one_rank_later(shardwise: Launcher, hosts: Lab) -> None:
    """Two ranks that leave alone would be more losses than --survive 1 allows."""
    leaves = ["1:backward:6:TERM", "2:backward:6:TERM", "3:backward:7:TERM"]
    ran = survive(shardwise, hosts, "node1,node2:3", "steps", "sgd", "out", *leaves)
    ends(shardwise, ran, "sgd", [0])


@pytest.mark.full
def test_two_hosts_are_more_than_one_loss(shardwise: Launcher, hosts: Lab) -> None:
    kills = ["1:reduce:5:HOST", "2:reduce:5:HOST"]
    ran = survive(shardwise, hosts, "node1,node2,node3", "steps", "sgd", "out", *kills)
    hosts.clear()
    if ran.code:
        assert "2 workers were lost at once (ranks 1, 2), more than --survive 1" in ran.err
    else:  # the second was lost after the others had agreed
        ends(shardwise, ran, "sgd", [0])


@pytest.mark.full
@pytest.mark.parametrize("seed", [3, 4])
def test_the_end_equals_that_of_one_process(
    hosts: Lab, tmp_path: Path, warm: WarmPython, seed: int
) -> None:
    runner = HostRunner(tmp_path, warm.environ(), hosts)
    assert not (told := COMMAND.failures(runner, [seed])), told
