"""Errors of the launcher before any rank starts."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.launch import failure_report, flags
from shardwise.launch.worker_output import WorkerLog
from shardwise.net import hosts

SCRIPT = "train.py"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SCRIPT).touch()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "a", "--stages", "b"], "--stages is given twice: give one list"),
        (["-H", "a", "-H", "b"], "-H is given twice: give one list"),
        (["--ssh", "x"], "--ssh x has no effect in a run on this host alone"),
        (["--host-timeout", "20"], "--host-timeout 20.0 has no effect"),
        (["--rendezvous", "a:1"], "--rendezvous a:1 has no effect"),
        (["--rdzv-id", "x"], "--rdzv-id x has no effect"),
        (["--nnodes", "1", "--grace", "0"], "--grace 0.0 has no effect in a run with --nnodes"),
        (["--grace", "nan"], "--grace takes a number of 0 or more"),
        (["--host-timeout", "nan"], "--host-timeout takes a number of 2 or more"),
        (["--nproc-per-node", "0"], "--nproc-per-node takes an integer of 1 or more"),
        (["-n", "99999"], "99999 ranks on one host: the limit is"),
        (["-H", "a", "--ssh", "'x"], "--ssh 'x cannot be read as a command: no closing quot"),
        (["--elastic-islands"], "--elastic-islands with --islands 1: write the number"),
        (["--elastic-islands", "--islands", "host"], "with --islands host: write the number"),
        (["-n", "3", "--elastic-islands", "--islands", "2"], "--islands 2 does not divide 3"),
        (["-n", "300", "--elastic-islands", "--islands", "300"], "at most 253 islands"),
        (
            ["-n", "2", "--elastic-islands", "--islands", "2", "--behind", "1"],
            "--behind 1 cannot be combined with --elastic-islands",
        ),
        (
            ["-n", "2", "--elastic-islands", "--islands", "2", "--late", "3"],
            "--late 3 cannot be combined with --elastic-islands",
        ),
        (
            ["-H", "a:2,b:1", "--elastic-islands", "--islands", "host"],
            "--islands host needs the same number of workers on every host, but these have 2, 1",
        ),
        (
            ["--nnodes", "1", "--elastic-islands"],
            "--elastic-islands needs ranks that shardwise run starts itself",
        ),
        (["-H", "a" * 300], "is too long for a host name"),
        (["-x", "RANK=1"], "shardwise run sets"),
        (["-x", "A=1", "-x", "A=2"], "-x A is given twice"),
        (
            ["--nnodes", "2:4", "--rdzv-endpoint", "h:1", "--survive", "1"],
            "a fixed number of hosts, and continues if some are lost. Write --nnodes 4",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:1", "--survive", "1"],
            "--survive on 2 hosts needs a secret that is the same on all of them",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "localhost:1", "--survive", "1"],
            "--rdzv-endpoint localhost: every host would take itself for this one",
        ),
        (
            ["--nnodes", "2", "--survive", "1", "--ssh", "rsh"],
            "--ssh rsh has no effect in a run that is started on each host",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:1", "--survive", "1", "-x", "KEY=secret"],
            "-x KEY: the hosts would send its value to each other",
        ),
        (
            ["-H", "h1:2,h2", "-n", "2", "--survive", "1", "--spares", "1"],
            "--spares 1 on other hosts needs workers on at least two hosts",
        ),
        (
            ["-H", "h1:3", "-n", "2", "--survive", "1", "--spares", "1"],
            "--spares 1 on other hosts needs workers on at least two hosts",
        ),
        (["--log-dir", "\x1b[31m/" + "a" * 300], r"not '\x1b[31m/aaa"),
    ],
)
def test_refusal_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--dry-run", *words, SCRIPT]) == 2
    told = capsys.readouterr().err
    assert message in told.replace("\\\\", "\\")
    assert told.startswith("shardwise: ")
    assert told.count("\n") == 1


def test_user_may_set_master_port_in_slurm_allocation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allocation = {"JOB_ID": "19", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "NTASKS": "2"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    asked = ["run", "--dry-run", "-x", "MASTER_PORT=29500"]
    assert cli.main([*asked, SCRIPT]) == 0
    assert capsys.readouterr().out.startswith("srun --nodes=2 ")
    for told_otherwise in (["--port", "29501"], ["-H", "n1"], ["--nnodes", "1"]):
        assert cli.main([*asked, *told_otherwise, SCRIPT]) == 2
        assert "shardwise run sets" in capsys.readouterr().err


def test_our_launcher_starts_ranks_of_slurm_allocation_with_survive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allocation = {"JOB_ID": "19", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "NTASKS": "4"}
    for name, value in (allocation | {"TASKS_PER_NODE": "2(x2)"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert cli.main(["run", "--dry-run", "--survive", "1", SCRIPT]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4 ranks on 2 hosts; rank 0 listens on n1")
    assert "srun --nodes=1 --ntasks=1 --overlap --unbuffered" in shown.out
    assert "--nodelist=n2 sh -c 'cd " in shown.out
    assert "hosts of Slurm (SLURM_JOB_NODELIST): n1:2, n2:2" in shown.err


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "started 4 times: PMI says PMI_RANK=0, PMI_SIZE=4."),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "started 2 times: the environment says RANK=1, WORLD_SIZE=2.",
        ),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, "one of several (PMIX_NAMESPACE=a"),
    ],
)
def test_refuses_command_in_each_rank_of_launcher(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    said: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--dry-run", SCRIPT]) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setenv("SHARDWISE_ALONE", "1")
    assert cli.main(["run", "--dry-run", SCRIPT]) == 0


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        # a single pod may start ranks
        ({"JOB_COMPLETION_INDEX": "0"}, []),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, ["-n", "8"]),
        (
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8"}
            | {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ["-n", "8"],
        ),
        # the first host of several starts the ranks of all
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}, ["-H", "a,b"]),
        ({"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "2"}, ["-H", "a,b"]),
        # a number for later
        ({"WORLD_SIZE": "4"}, []),
        # no list of hosts, and a number of ranks
        ({"PBS_NODEFILE": "/gone"}, ["-n", "2"]),
        ({"PBS_NODEFILE": ""}, []),
    ],
)
def test_accepts_command_inside_services(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], words: list[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--dry-run", *words, SCRIPT]) == 0


@pytest.mark.parametrize(
    ("lines", "words", "said"),
    [
        (["n1", "n2"], ["-n", "4"], "4 ranks on 2 hosts"),
        (["n1"] * 2, ["-n", "4"], "4 ranks on 1 host"),
        (["n1"] * 4 + ["n2"] * 4, ["-n", "6"], "6 ranks on 2 hosts"),
        (["n1"] * 4 + ["n2"] * 4, ["--nproc-per-node", "1"], "2 ranks on 2 hosts"),
    ],
)
def test_number_of_ranks_in_batch_job(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    words: list[str],
    said: str,
) -> None:
    Path("nodes").write_text("\n".join(lines))
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    assert cli.main(["run", "--dry-run", *words, SCRIPT]) == 0
    assert said in capsys.readouterr().out


def test_only_first_skypilot_node_starts_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    for rank, said in (("0", "2 ranks on 2 hosts"), ("1", "node 0 of 2 starts the ranks")):
        monkeypatch.setenv("SKYPILOT_NODE_RANK", rank)
        assert cli.main(["run", "--dry-run", SCRIPT]) == 0
        assert said in capsys.readouterr().out


def test_last_of_repeated_flags_wins(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["-n", "2", "--zero", "1", "-n", "1", "--zero", "3"]
    assert cli.main(["run", "--dry-run", *given, SCRIPT]) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 rank on 1 host")
    assert "settings: zero=3\n" in told


def test_refuses_removed_working_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    assert cli.main(["run", str(tmp_path / SCRIPT)]) == 2
    assert "no longer exists" in capsys.readouterr().err


def test_flags_without_effect_exist() -> None:
    known = {each.name for each in cli._run_command().params}
    assert {name for several in flags.NO_EFFECT.values() for name in several} <= known


@pytest.mark.parametrize("text", ["a:0", "a:4097", "a:" + "9" * 5000, "a:²"])
def test_refuses_impossible_slots(text: str) -> None:
    with pytest.raises(hosts.LaunchError, match=r"slots|too long"):
        hosts.from_list(text)


def test_os_error_becomes_sentence() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a")
    assert failure_report.os_error_sentence(error) == (
        "a: No space left on device; free some space on that disk."
    )
    assert (
        failure_report.os_error_sentence(OSError("odd")) == "odd. Check that this file can be used."
    )


def test_unwritable_log_does_not_end_run() -> None:
    log = WorkerLog.__new__(WorkerLog)
    log.fault, log._path, log._lines = "", Path("/dev/full"), {}
    with open("/dev/full", "ab", buffering=0) as log._file:
        log.feed(1, b"a\n")
        log.feed(1, b"b\n")
    assert log.fault == "the log /dev/full ends here: No space left on device."
