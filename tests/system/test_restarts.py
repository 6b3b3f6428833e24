"""Survived faults: restarts, saves before a requested end, and full disks."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.checkpoint.atomic_folders import complete
from shardwise.net.restarts import SAVED
from tests.system.components import need
from tests.system.launcher import Launcher, Ran, script
from tests.system.warm import WarmPython

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

WARM = pytest.mark.usefixtures("warm_programs")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython) -> str:
    """Return the result of an undisturbed run."""
    words = ("run", "-n", "2", script("resumes"), "checkpoints")
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    return hash_of(launcher.run(*words, env=dict(warm.environ())))


def hash_of(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    (line,) = (line for line in ran.lines() if line.startswith("[0] hash"))
    return line


def started_at(ran: Ran) -> list[int]:
    """Return the first step of each start, in order."""
    return [int(step) for step in re.findall(r"\[0\] start (\d+)", ran.out)]


def reach(process: "subprocess.Popen[str]", line: str) -> None:
    """Wait until rank 0 has printed `line`."""
    assert process.stdout is not None
    while (printed := process.stdout.readline()) and printed != f"[0] {line}\n":
        pass
    assert printed, "it ended before"


def rank_of(shardwise: Launcher, rank: int) -> int:
    """Return the process of a rank."""
    mark = f"SHARDWISE_LAUNCH_RANK={rank}".encode()
    return next(
        pid
        for pid in sorted(shardwise.left())
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )


class TestRestarts:
    @WARM
    @pytest.mark.parametrize("row", [pytest.param("0", marks=pytest.mark.full), "3"])
    def test_restart_after_kill_has_same_bits(
        self, shardwise: Launcher, undisturbed: str, row: str
    ) -> None:
        words = [script("resumes"), "checkpoints", "--die", "7"]
        ran = shardwise.run("run", "-n", "2", "--restarts", "2", "--zero", row, *words)
        assert hash_of(ran) == undisturbed
        assert started_at(ran) == [0, 4]
        lines = [line for line in ran.err.splitlines() if line.startswith("shardwise: ")]
        assert lines == [
            "shardwise: rank 1 of 2 was ended at step 7 (SIGKILL). Restart 1 of 2, from "
            "the checkpoint of step 4: 3 steps are lost."
        ]

    @WARM
    def test_gives_up_after_failures_at_same_step(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", "--max-restarts", "9", script("tells"), "fails", "9")
        assert ran.code == 1
        assert ran.out.count("[1] started") == 3
        line = "shardwise: rank 1 of 2 failed at step 7 (ValueError: bad sample). Restart "
        assert ran.err.count(f"\n{line}") == 2
        assert ran.err.endswith(
            "ValueError: bad sample\n\nshardwise: 3 failures in a row at step 7, without a newer "
            "checkpoint in between: not restarting.\n"
        )

    @WARM
    def test_names_an_error_whose_text_is_not_utf8(self, shardwise: Launcher) -> None:
        """Such as a file name in Latin-1, which os.listdir returns with a surrogate."""
        name = os.fsdecode(b"caf\xe9.jpg")
        words = ("run", "-n", "2", "--restarts", "1", "--log-dir", "logs", script("tells"))
        ran = shardwise.run(*words, "fails", "2", name)
        assert ran.code == 1
        said = "rank 1 of 2 failed at step 7 (ValueError: caf\\udce9.jpg). Restart 1 of 1"
        assert said in ran.err
        assert "shardwise: rank 1 of 2 failed (exit code 1)." in ran.err
        log = (shardwise.folder / "logs" / "rank1.log").read_text()
        assert log.count("tells.py fails 2 caf\\udce9.jpg\n") == 2

    def test_run_ended_by_user_does_not_restart(self, shardwise: Launcher) -> None:
        words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
        process = shardwise.start("run", "--restarts", "3", *words)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        ran = shardwise.finish(process)
        assert (ran.code, ran.out) == (128 + signal.SIGTERM, "")


class TestAskedToEnd:
    @WARM
    @pytest.mark.parametrize(
        ("saved", "said"),
        [
            (
                (),
                " without a save. A new start continues from the beginning, because the script "
                "does not call engine.resume(folder): 7 steps are lost. To save before the end, "
                "send SIGTERM instead.",
            ),
            (
                ("runs/step-5",),
                " without a save. A new start continues from the beginning, because the script "
                "does not call engine.resume(folder): 7 steps are lost. The last checkpoint is "
                "runs/step-5. To save before the end, send SIGTERM instead.",
            ),
            (("runs/step-7",), ". The last checkpoint is runs/step-7."),
        ],
        ids=["nothing saved", "saved two steps before", "saved in the last step"],
    )
    def test_ctrl_c_reports_resume_point(
        self, shardwise: Launcher, saved: tuple[str, ...], said: str
    ) -> None:
        process = shardwise.start("run", "-n", "2", script("tells"), "waits", *saved)
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process)
        assert ran.code == 130
        assert ran.err.endswith(f"shardwise: Ctrl-C ended the run at step 7{said}\n")

    def test_signal_to_launcher_saves(self, shardwise: Launcher) -> None:
        """All ranks save between two steps, and their DataLoader workers do not interfere."""
        words = ["run", "-n", "2", "--restarts", "1", script("resumes"), "checkpoints"]
        process = shardwise.start(*words, "--workers", "1", "--pause", "0.1")
        reach(process, "step 5")
        process.send_signal(signal.SIGTERM)
        ran = shardwise.finish(process)
        assert ran.code == SAVED, ran.err
        assert "shardwise: SIGTERM: the ranks save after this step. A second one kills" in ran.err
        (saved,) = re.findall(r"SIGTERM: saved checkpoints/step-(\d+), ending with", ran.err)
        assert complete(shardwise.folder / "checkpoints")[-1].step == int(saved) in range(6, 9)

    @WARM
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_launcher_waits_for_save(self, shardwise: Launcher, number: signal.Signals) -> None:
        process = shardwise.start("run", "--grace", "0", "-n", "2", script("tells"), "waits")
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        process.send_signal(number)
        assert shardwise.finish(process).code == SAVED

    @WARM
    def test_signal_to_one_rank_saves_all(self, shardwise: Launcher, undisturbed: str) -> None:
        """The other ranks learn of it in the next step, and the resumed run has the same bits."""
        words = ["run", "-n", "2", "--zero", "2", "--restarts", "1", script("resumes")]
        ran = shardwise.run(*words, "checkpoints", "--die", "6", "--signal", str(signal.SIGTERM))
        assert (ran.code, started_at(ran)) == (SAVED, [0]), ran.err
        assert "SIGTERM: saved checkpoints/step-7, ending with exit code 75. The same" in ran.err
        assert hash_of(shardwise.run(*words, "checkpoints")) == undisturbed

    @pytest.mark.full
    def test_signal_to_one_island_saves_all(self, shardwise: Launcher) -> None:
        """Other islands learn of it at the next boundary, and the resumed run has the same bits.

        So does a run after a kill between two boundaries.
        """
        words = ["run", "-n", "2", "--islands", "2", "--equal-every", "3", "--wire", "int8"]
        undisturbed = shardwise.run(*words, script("resumes"), "first")
        words += ["--restarts", "1", script("resumes"), "checkpoints"]
        ran = shardwise.run(*words, "--die", "4", "--signal", str(signal.SIGTERM))
        assert (ran.code, started_at(ran)) == (SAVED, [0]), ran.err
        assert "SIGTERM: saved checkpoints/step-6, ending with exit code 75. The same" in ran.err
        (shardwise.folder / "checkpoints/died").unlink()
        killed = shardwise.run(*words, "--die", "11")
        assert (hash_of(killed), started_at(killed)) == (hash_of(undisturbed), [6, 8])

    @WARM
    def test_kill_before_save_is_no_success(self, shardwise: Launcher) -> None:
        words = ["run", "-n", "2", script("resumes"), "checkpoints", "--pause", "60"]
        process = shardwise.start(*words)
        reach(process, "step 1")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "the ranks save after this step" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert shardwise.finish(process).code == 128 + signal.SIGTERM
        assert complete(shardwise.folder / "checkpoints") == []

    @WARM
    def test_exit_code_75_of_script_becomes_1(self, shardwise: Launcher) -> None:
        (shardwise.folder / "own.py").write_text("import sys\nsys.exit(75)\n")
        ran = shardwise.run("run", "-n", "2", "own.py")
        assert ran.code == 1
        assert "failed (exit code 75)" in ran.err
        assert "the script itself ended with exit code 75. The run ends with 1" in ran.err

    @pytest.mark.full
    def test_second_signal_ends_single_process(self, shardwise: Launcher) -> None:
        """A process without a launcher. A second signal ends it immediately."""
        command = [sys.executable, script("resumes"), "checkpoints", "--pause"]
        options = {"cwd": shardwise.folder, "text": True, "env": shardwise.environ()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*command, "60"], **options, **pipes)
        assert process.stdout is not None
        while "step 1" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert shardwise.finish(process).code == -signal.SIGTERM


SMALL = """
set -e
mkdir small
mount -t tmpfs -o size=80k none small
shift
"$@"
ls -A small > left
"""


def on_a_small_disk(shardwise: Launcher, *words: str) -> Ran:
    """Run `shardwise WORDS` with a disk of 80 KB at `small`, which is removed with the run."""
    need("unshare", None if shutil.which("unshare") else "unshare is not installed")
    (shardwise.folder / "small.sh").write_text(SMALL)
    able = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    need("unshare", None if able.returncode == 0 else "may not make a mount namespace")
    shardwise.enter = ["unshare", "--mount", "sh", "small.sh", "-"]
    return shardwise.run(*words)


@WARM
class TestAFullDisk:
    """The disk has room for two checkpoints of a model of width 64, but not for a third one."""

    WORDS = (script("resumes"), "small", "--width", "64")

    @pytest.mark.parametrize("flags", [[], pytest.param(["--background"], marks=pytest.mark.full)])
    def test_full_disk_stops_training(self, shardwise: Launcher, flags: list[str]) -> None:
        ran = on_a_small_disk(shardwise, "run", "-n", "2", *self.WORDS, *flags)
        assert ran.code == 1
        assert "[0] hash" not in ran.out
        assert re.search(
            r"shardwise: Rank [01]: The checkpoint of step 12 was not written: No space left on "
            r"device \(.*\)\. It needs [\d,]+ bytes, and [\d,]+ are free\. Free some space",
            ran.err,
        )

    def test_full_disk_continues_training(self, shardwise: Launcher, undisturbed: str) -> None:
        ran = on_a_small_disk(
            shardwise, "run", "-n", "2", "--save-failure", "continue", *self.WORDS
        )
        assert "after 15" in hash_of(ran)
        assert "are intact. Training continues." in ran.err
        assert (shardwise.folder / "left").read_text().split() == ["step-4", "step-8"]
