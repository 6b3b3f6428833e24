"""`shardwise run` on several hosts, with real ssh between network namespaces."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.net.restarts import SAVED
from tests.system.conftest import HIDDEN
from tests.system.lab import PORT, Lab
from tests.system.launcher import Launcher, script
from tests.system.warm import WarmPython

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux namespaces"),
]

WARM = pytest.mark.usefixtures("warm_programs")
PASSED_ON = ("PYTHONPATH", "TESTS_WARM")
"""Variables for ranks on other hosts: the place of the sources, and the warm programs."""

MEETING = """
import shardwise as sw
world = sw.init(seed=0)
world.barrier()
world.print("up")
while True:
    world.barrier()
"""

UP = "import time; print('up'); time.sleep(100)"


@pytest.fixture
def shardwise(hosts: Lab, tmp_path: Path) -> Iterator[Launcher]:
    """Yield a launcher on node1, and check that its runs leave nothing on any host."""
    launcher = Launcher(tmp_path, hosts.nodes[0].enter(tmp_path))
    yield launcher
    left = launcher.wait_until_gone()
    launcher.kill_all()
    assert left == []
    assert launcher.folders_left() == []
    assert hosts.left() == []


def over(hosts: Lab, *flags: str) -> list[str]:
    """Return the arguments of a run over ssh between `hosts`."""
    given = {flag.partition("=")[0] for flag in flags}
    names = [name for name in PASSED_ON if name in os.environ and name not in given]
    passed = [word for name in names for word in ("-x", name)]
    return ["run", "--ssh", hosts.ssh, "--ssh-port", str(PORT), *passed, *flags]


@pytest.fixture(scope="module")
def alone(warm: WarmPython) -> str:
    """Return the hash of parameters after training in a single process."""
    said = printed_alone(warm, "parity")
    found = re.search(r"parity (\w+) by", said)
    assert found, said
    return found[1]


@pytest.fixture(scope="module")
def whole(warm: WarmPython) -> tuple[float, float]:
    """Return the result of a single process for the model that other tests split."""
    return trained_to(printed_alone(warm, "parts"))


def printed_alone(warm: WarmPython, name: str) -> str:
    """Return the output of a script in a single process, without a launcher."""
    words, environ = [sys.executable, script(name)], os.environ | warm.environ()
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout


def trained_to(out: str) -> tuple[float, float]:
    """Return the loss and the sum of parameters in the output of a run."""
    found = re.search(r"loss (\S+) sum (\S+) on", out)
    assert found, out
    return float(found[1]), float(found[2])


@WARM
class TestTheSameResult:
    @pytest.mark.full  # as MPICH's below; tests/unit/test_many_hosts.py reads files of both
    def test_two_hosts_from_hostfile_of_open_mpi(
        self, shardwise: Launcher, hosts: Lab, alone: str
    ) -> None:
        (shardwise.folder / "file").write_text("node1 slots=1 # here\n\nnode2 slots=1\n")
        ran = shardwise.run(*over(hosts, "--hostfile", "file"), script("parity"))
        assert ran.code == 0, ran.err
        assert f"[0] parity {alone} by shardwise run of 2" in ran.lines()

    def test_two_hosts_from_hostfile_of_mpich_on_third_host(
        self, shardwise: Launcher, hosts: Lab, alone: str
    ) -> None:
        shardwise.enter = hosts.nodes[2].enter(shardwise.folder)
        (shardwise.folder / "file").write_text("node1:1\nroot@node2:1\n")
        ran = shardwise.run(*over(hosts, "--hostfile", "file"), script("parity"))
        assert ran.code == 0, ran.err
        assert f"[0] parity {alone} by shardwise run of 2" in ran.lines()

    def test_hosts_of_batch_job(self, shardwise: Launcher, hosts: Lab, alone: str) -> None:
        """PBS lists them with one line per slot."""
        (shardwise.folder / "nodes").write_text("node1\nnode2\nnode2\n")
        environ = {"PBS_NODEFILE": str(shardwise.folder / "nodes")}
        ran = shardwise.run(*over(hosts), script("parity"), env=environ)
        assert ran.code == 0, ran.err
        assert f"[0] parity {alone} by shardwise run of 3" in ran.lines()
        assert "shardwise: hosts of PBS (PBS_NODEFILE): node1:1, node2:2" in ran.err

    def test_three_hosts_by_name_and_address(
        self, shardwise: Launcher, hosts: Lab, alone: str
    ) -> None:
        words = over(hosts, "-H", "node1,10.77.0.2,[fd00:77::3]")
        ran = shardwise.run(*words, script("parity"))
        assert ran.code == 0, ran.err
        assert f"[0] parity {alone} by shardwise run of 3" in ran.lines()
        assert "[0] shardwise: 3 workers, 1 of them on node1 (cpu), over gloo" in ran.out


@WARM
class TestARankThatNeverJoins:
    @pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
    def test_rank_that_never_joins_is_named_on_other_host(
        self, shardwise: Launcher, hosts: Lab, rank: int
    ) -> None:
        began = time.monotonic()
        words = over(hosts, "-H", "node1,node2", script("leaves"), str(rank), "joins")
        ran = shardwise.run(*words)
        assert time.monotonic() - began < 120  # and not the 300 s of --timeout
        assert ran.code == 1
        assert (
            f"LaunchError: Rank {rank} of 2 ended with exit code 0 before calling sw.init"
            in ran.err
        )


@WARM
class TestPartsOfAModel:
    """Layers split over hosts by tensor and pipeline parallelism."""

    @pytest.mark.parametrize(
        ("spread", "flags"),
        [
            pytest.param(
                "node1,node2", "--pipeline 2 --schedule zero-bubble", marks=pytest.mark.full
            ),
            pytest.param("node1,node2", "--tensor 2 --sequence-parallel", marks=pytest.mark.full),
            ("node1:2,node2:2", "--tensor 2 --pipeline 2 --sequence-parallel --zero 3"),
            pytest.param("node1:2,node2", "--pipeline 3 --transport gloo", marks=pytest.mark.full),
        ],
    )
    def test_split_model_trains_to_same_loss(
        self,
        shardwise: Launcher,
        hosts: Lab,
        whole: tuple[float, float],
        spread: str,
        flags: str,
    ) -> None:
        ran = shardwise.run(*over(hosts, "-H", spread, *flags.split()), script("parts"))
        assert ran.code == 0, ran.err
        assert trained_to(ran.out) == pytest.approx(whole, rel=1e-8, abs=0)


class TestVerify:
    """`shardwise verify` with a placement on several hosts and the reference on this one."""

    @pytest.mark.full
    def test_exact_mode_has_same_bits(self, shardwise: Launcher, hosts: Lab) -> None:
        flags = (
            *("-H", "node1:1,node2:1", "--zero", "3", "--exact", "2"),
            *("--no-quiet", "--steps", "3"),
        )
        words = ["verify", *over(hosts, *flags)[1:], "--out", "runs", script("exact")]
        ran = shardwise.finish(shardwise.start(*words, env={"OMP_NUM_THREADS": "1"}), 300)
        assert ran.code == 0, ran.out + ran.err
        assert "Equal to the last bit over 3 steps" in ran.out
        log = (shardwise.folder / "runs/verify-logs/02.txt").read_text()
        assert "2 workers, 1 of them on node1" in log

    @pytest.mark.full
    def test_names_host_that_does_not_see_records(
        self, shardwise: Launcher, hosts: Lab, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        out = tmp_path_factory.getbasetemp() / HIDDEN / "runs"
        flags = ("-H", "node1,node3", "--steps", "2", "--out", str(out))
        words = ["verify", *over(hosts, *flags)[1:], script("exact")]
        ran = shardwise.finish(shardwise.start(*words, env={"OMP_NUM_THREADS": "1"}), 300)
        assert ran.code == 1, ran.out + ran.err
        assert f"host node3 does not see {out}" in ran.out
        assert "a folder that all hosts share: --out DIR" in ran.out


class TestWhatRanksAreTold:
    def test_ranks_get_identity_and_passed_variables(self, shardwise: Launcher, hosts: Lab) -> None:
        show = (
            "echo $SHARDWISE_LAUNCH_RANK $SHARDWISE_LAUNCH_LOCAL_RANK $SHARDWISE_LAUNCH_ADDRESS "
            "$GLOO_SOCKET_IFNAME $(hostname) $PWD $SHARDWISE_SEED $GIVEN $TOKEN $UNASKED"
        )
        words = over(hosts, "-H", "node2:2,node1", "-x", "GIVEN=a b", "-x", "TOKEN")
        ran = shardwise.run(
            *words,
            *("sh", "-c", show),
            env={"SHARDWISE_SEED": "7", "TOKEN": "secret", "UNASKED": "no"},
        )
        rest = f"{shardwise.folder} 7 a b secret"
        assert ran.lines() == [
            f"[0] 0 0 10.77.0.2 eth0 node2 {rest}",
            f"[1] 1 1 10.77.0.2 eth0 node2 {rest}",
            f"[2] 2 0 10.77.0.2 eth0 node1 {rest} no",
        ]

    def test_ranks_use_named_interface(self, shardwise: Launcher, hosts: Lab) -> None:
        words = over(hosts, "-H", "node1,node2", "--interface", "eth0")
        ran = shardwise.run(*words, "sh", "-c", "echo $SHARDWISE_LAUNCH_ADDRESS")
        assert ran.lines() == ["[0] 10.77.0.1", "[1] 10.77.0.1"]


def test_command_on_each_host_like_torchrun(shardwise: Launcher, hosts: Lab) -> None:
    show = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $SHARDWISE_FLAGS"
    meeting = ("--nnodes", "2", "--node_rank={}", "--rdzv-endpoint", "node1:29500")
    words = ("run", "--nproc-per-node=2", "--zero", "2", *meeting, "sh", "-c", show)
    started = []
    for number, node in enumerate(hosts.nodes[:2]):
        shardwise.enter = node.enter(shardwise.folder)
        started.append(shardwise.start(*(word.format(number) for word in words)))
    for number, process in enumerate(started):
        ran = shardwise.finish(process)
        assert ran.code == 0, ran.err
        assert ran.lines() == [
            f'{2 * number + local} 4 {local} node1 eth0 {{"zero": "2"}}' for local in (0, 1)
        ]


class TestRefusing:
    def test_names_hosts_that_lack_something(self, shardwise: Launcher, hosts: Lab) -> None:
        bare = over(hosts, "-H", "node1,node2", "--python", "/usr/bin/env")
        ran = shardwise.run(*bare, "true")
        assert (ran.code, ran.out) == (2, "")
        assert "shardwise: The agent on node2 ended (exit code 125): " in ran.err

    def test_a_host_without_the_project(self, shardwise: Launcher, hosts: Lab) -> None:
        (shardwise.folder / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -I -S $@\n")
        (shardwise.folder / "python").chmod(0o755)
        python = str(shardwise.folder / "python")
        ran = shardwise.run(*over(hosts, "-H", "node1,node2", "--python", python), "true")
        assert (ran.code, ran.out) == (2, "")
        assert f"shardwise: {python} on node2 cannot import shardwise.launch.ssh.agent" in ran.err

    def test_a_host_with_another_version(self, shardwise: Launcher, hosts: Lab) -> None:
        source = Path(__file__).parents[2] / "src" / "shardwise"
        old = shardwise.folder / "old" / "shardwise"
        shutil.copytree(source, old, ignore=shutil.ignore_patterns("__pycache__"))
        front = (source / "__init__.py").read_text()
        changed = re.sub(r'__version__ = "[^"]*"', '__version__ = "0.0.1"', front)
        (old / "__init__.py").write_text(changed)
        path = f"PYTHONPATH={old.parent}"
        ran = shardwise.run(*over(hosts, "-H", "node1,node2", "-x", path), "true")
        assert (ran.code, ran.out) == (2, "")
        assert re.match(r"shardwise: node2 has shardwise 0.0.1, this host \d", ran.err)

    def test_a_host_without_the_folder_and_one_without_the_script(
        self, shardwise: Launcher, hosts: Lab, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        hidden = tmp_path_factory.getbasetemp() / HIDDEN
        path = str(hidden / "script.py")
        ran = shardwise.run(*over(hosts, "-H", "node1,node2,node3"), path)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"shardwise: On node3: There is no script {path}")
        (hidden / "sub").mkdir()
        shardwise.enter = hosts.nodes[0].enter(hidden / "sub")
        ran = shardwise.run(*over(hosts, "-H", "node1,node3"), "true")
        assert (ran.code, ran.out) == (2, "")
        assert f"shardwise: node3 has no folder {hidden}/sub, where this run was started" in ran.err

    def test_one_host_by_two_names(self, shardwise: Launcher, hosts: Lab) -> None:
        ran = shardwise.run(*over(hosts, "-H", "node2:2,node1,10.77.0.2"), "true")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            "shardwise: node2 and 10.77.0.2 are the same host: name it once, with all of its "
            "ranks (node2:3).\n"
        )

    def test_hosts_that_cannot_be_reached(self, shardwise: Launcher, hosts: Lab) -> None:
        ran = shardwise.run(*over(hosts, "-H", "node1,nobody@node2,nowhere"), "true")
        assert (ran.code, ran.out) == (2, "")
        assert "ssh to node2 fails: nobody@node2: Permission denied (publickey)" in ran.err
        assert "ssh to nowhere fails: ssh: Could not resolve hostname nowhere" in ran.err


@WARM
class TestDoctor:
    def test_doctor_accepts_connected_hosts(self, shardwise: Launcher, hosts: Lab) -> None:
        ran = shardwise.run("doctor", *over(hosts, "-H", "node1,node2")[1:])
        assert ran.code == 0, ran.out + ran.err
        row = next(line for line in ran.out.splitlines() if "open ports" in line)
        assert row.count("others connect to 10.77.0.") == 2
        assert "Found nothing that would make a run fail." in ran.out

    def test_doctor_reports_missing_route(self, shardwise: Launcher, hosts: Lab) -> None:
        began = time.monotonic()
        with hosts.without_way(2, 3):
            ran = shardwise.run("doctor", *over(hosts, "-H", "node1,node2,node3")[1:])
        assert ran.code == 1, ran.out + ran.err
        assert time.monotonic() - began < 30
        wrong = [line for line in ran.out.splitlines() if "wrong: " in line]
        assert any("node2 cannot connect to node3 at 10.77.0.3, port " in line for line in wrong)
        assert all("Ranks connect to each other at TCP ports" in line for line in wrong)


class TestEnding:
    def sleeping(self, shardwise: Launcher, *words: str) -> "subprocess.Popen[str]":
        """Start a run of two ranks on two hosts, and return it once both are up."""
        process = shardwise.start(*words, "-H", "node1,node2", sys.executable, "-c", UP)
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        return process

    @WARM
    def test_failure_of_remote_rank_shows_traceback(self, shardwise: Launcher, hosts: Lab) -> None:
        ran = shardwise.run(*over(hosts, "-H", "node1,node2"), script("third_step"))
        assert ran.code == 1
        head = "\nshardwise: rank 1 of 2 on node2 failed (exit code 1)."
        live, _, closing = ran.err.partition(head)
        assert "[1] ValueError: no such token in step 3" in live
        assert closing.endswith("\nValueError: no such token in step 3\n")

    def test_ctrl_c_ends_all_hosts(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts))
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process, 30)
        assert ran.code == 130
        assert (
            ran.err == "shardwise: Ctrl-C: stopping 2 ranks. A second one kills them immediately.\n"
        )

    @pytest.mark.full
    def test_ctrl_c_in_training_names_the_checkpoint(self, shardwise: Launcher, hosts: Lab) -> None:
        words = (script("resumes"), "checkpoints", "--epochs", "20", "--pause", "0.2")
        process = shardwise.start(*over(hosts, "-H", "node1,node2"), *words)
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "[0] step 6\n":
            pass
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process, 30)
        assert ran.code == 130, ran.err
        assert "Traceback" not in ran.out + ran.err
        assert "A new start continues from the checkpoint of step 4: " in ran.err
        assert "The last checkpoint is checkpoints/step-4. " in ran.err

    def test_kill_9_of_launcher_ends_all_hosts(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts))
        process.kill()
        assert shardwise.finish(process).code == -signal.SIGKILL
        assert hosts.left() == []

    def test_cut_cable_loses_host(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts, "--host-timeout", "3"))
        began = time.monotonic()
        hosts.cut(2)
        try:
            ran = shardwise.finish(process, 30)
            took = time.monotonic() - began
            assert hosts.left() == []
        finally:
            hosts.mend(2)
        assert ran.code == 1
        assert took < 20
        assert "shardwise: node2 (rank 1) is lost: no sign of life for 3 s" in ran.err

    def stopped_agent(self, hosts: Lab) -> int:
        """Stop the agent of node2 (SIGSTOP), and return its process."""
        (agent,) = hosts.running(2, "-m shardwise.launch.ssh.agent")
        os.kill(agent, signal.SIGSTOP)
        return agent

    def test_names_host_of_stopped_agent(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts, "--host-timeout", "3"))
        agent = self.stopped_agent(hosts)
        for rank in hosts.running(2, UP):
            os.kill(rank, signal.SIGKILL)
        ran = shardwise.finish(process, 30)
        assert ran.code == 1
        assert (
            "shardwise: node2 (rank 1) is lost: no sign of life for 3 s, although the "
            f"connection works. Its agent (process {agent}) may be stopped, or the host overloaded."
        ) in ran.err
        assert hosts.left() == []

    def test_ctrl_c_ends_run_with_stopped_agent(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts, "--host-timeout", "3"))
        self.stopped_agent(hosts)
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process, 30)
        assert ran.code == 130
        assert "shardwise: node2 (rank 1) is lost: no sign of life for 3 s" in ran.err
        assert hosts.left() == []

    def test_reports_killed_agent(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts))
        (agent,) = hosts.running(2, "-m shardwise.launch.ssh.agent")
        os.kill(agent, signal.SIGKILL)
        ran = shardwise.finish(process, 30)
        assert ran.code == 1
        assert re.search(
            r"node2 \(rank 1\) is lost: its agent ended \d\.\d s after its last sign of life",
            ran.err,
        )

    def test_hosts_report_stopped_heartbeat(self, shardwise: Launcher, hosts: Lab) -> None:
        process = self.sleeping(shardwise, *over(hosts, "--host-timeout", "3"))
        (beats,) = hosts.running(1, "heartbeat.py")
        os.kill(beats, signal.SIGSTOP)
        ran = shardwise.finish(process, 30)
        assert ran.code == 1
        assert re.search(r"On node[12]: the agent received nothing from the launcher", ran.err)

    @pytest.mark.full
    def test_warns_of_cut_cable_while_ranks_wait(self, shardwise: Launcher, hosts: Lab) -> None:
        words = over(hosts, "--host-timeout", "60", "--warn-after", "2", "-H", "node1,node2")
        process = shardwise.start(*words, sys.executable, "-c", MEETING)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "[0] up\n"
        hosts.cut(2)
        try:
            said = [next(line for line in process.stderr if "has waited" in line)]
            said += [process.stderr.readline() for _ in range(2)]
        finally:
            hosts.mend(2)
            process.send_signal(signal.SIGINT)
        assert shardwise.finish(process).code == 130
        assert re.search(r"shardwise: rank 0 has waited \d+ s for rank 1\.", said[0])
        assert said[2] == "[0]   rank 1 does not answer: is its host cut off?\n"

    def test_paused_pager_does_not_lose_hosts(self, shardwise: Launcher, hosts: Lab) -> None:
        words = over(hosts, "--host-timeout", "3", "-H", "node1,node2")
        process = shardwise.start(*words, "sh", "-c", "seq 200000; echo end")
        time.sleep(4.5)
        ran = shardwise.finish(process)
        assert ran.code == 0, ran.err
        assert ran.lines()[-2:] == ["[1] 99999", "[1] end"]
        assert ran.out.count("\n") == 400_002


@WARM
class TestFaults:
    def test_failure_of_remote_rank_restarts_all(self, shardwise: Launcher, hosts: Lab) -> None:
        words = over(hosts, "-H", "node1,node2", "--restarts", "2")
        ran = shardwise.run(*words, script("tells"), "fails", "1")
        assert ran.code == 0, ran.err
        assert ran.out.count("[1] started") == 2
        assert ran.err.endswith(
            "shardwise: rank 1 of 2 failed at step 7 (ValueError: bad sample). Restart 1 of 2, "
            "from the beginning, because the script does not call engine.resume(folder): 7 steps "
            "are lost.\n"
        )

    def test_remote_ranks_save_when_asked_to_end(self, shardwise: Launcher, hosts: Lab) -> None:
        process = shardwise.start(*over(hosts, "-H", "node1,node2"), script("tells"), "waits")
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        process.send_signal(signal.SIGTERM)
        ran = shardwise.finish(process, 30)
        assert ran.code == SAVED
        assert ran.err == (
            "shardwise: SIGTERM: stopping 2 ranks.\n"
            "shardwise: SIGTERM: the ranks save after this step. "
            "A second one kills them immediately.\n"
        )


@WARM
def test_timeline_of_two_hosts(shardwise: Launcher, hosts: Lab) -> None:
    """One file per host, with synchronised clocks; they can be read together, and merged."""
    words = over(hosts, "-H", "node1,node2")
    path = shardwise.folder / "t.json"
    asked = {"HOROVOD_TIMELINE": "t.json"}
    ran = shardwise.run(*words, script("timed"), "12", "0.3", env=asked)
    assert ran.code == 0, ran.err
    assert "each other host writes t.HOST.json" in ran.err
    assert sorted(shardwise.folder.glob("t*.json")) == [path, path.with_name("t.node2.json")]
    said = shardwise.run("timeline", "t.json", "--json", "--merge", "whole.json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert (found["slowest"]["rank"], found["slowest"]["kind"]) == (1, "other")
    whole = json.loads((shardwise.folder / "whole.json").read_text())
    for rank in (0, 1):
        assert sum(e["name"] == "backward" and e["pid"] == rank for e in whole) == 12
