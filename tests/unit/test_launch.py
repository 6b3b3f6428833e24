"""Decisions of the launcher as tables: programs, variables of ranks, the rank to blame."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import failure_report, program, resources
from shardwise.launch.failure_report import ExitStatus, Verdict
from shardwise.launch.resources import HostMemory
from shardwise.launch.run_spec import Meeting, RunSpec, rank_environment
from shardwise.launch.signals import SignalSchedule
from shardwise.net import environment, error_file
from shardwise.net.error_file import ErrorReport
from shardwise.net.identity import Identity

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}


class TestEnvironmentOfARank:
    IDENTITY = Identity(
        launcher="shardwise run", rank=1, size=2, local_rank=1, local_size=2, address="h", port=1
    )
    MEETING = Meeting(address="h", port=1, master_port=7)
    SPEC = RunSpec(
        words=("train.py",), size=2, shares=(), flags={"zero": "2"}, run="name", secret="drawn"
    )

    AS_TORCHRUN: ClassVar = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "7",
    }

    def of(self, **base: str) -> dict[str, str]:
        return rank_environment(
            self.SPEC, self.IDENTITY, self.MEETING, base, reports=Path("/r"), cores=8, columns=76
        )

    def test_rank_gets_identity_and_settings(self) -> None:
        values = self.of(HOME="/home/me")
        assert values.pop("GLOO_SOCKET_IFNAME") == ("lo0" if sys.platform == "darwin" else "lo")
        assert values == {
            "HOME": "/home/me",
            "OMP_NUM_THREADS": "4",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "76",
            "SHARDWISE_FLAGS": '{"zero": "2"}',
            "SHARDWISE_LAUNCH_RANK": "1",
            "SHARDWISE_LAUNCH_SIZE": "2",
            "SHARDWISE_LAUNCH_LOCAL_RANK": "1",
            "SHARDWISE_LAUNCH_LOCAL_SIZE": "2",
            "SHARDWISE_LAUNCH_ADDRESS": "h",
            "SHARDWISE_LAUNCH_PORT": "1",
            "SHARDWISE_LAUNCH_REPORTS": "/r",
            "SHARDWISE_LAUNCH_RUN": "name",
            "SHARDWISE_LAUNCH_SECRET": "drawn",
            **self.AS_TORCHRUN,
        }

    def test_rank_gets_variables_of_torchrun(self) -> None:
        """The variables describe this rank, even inside another run."""
        assert self.of(**TORCHRUN).items() >= self.AS_TORCHRUN.items()

    def test_variables_of_user_win_over_defaults(self) -> None:
        values = self.of(OMP_NUM_THREADS="3", GLOO_SOCKET_IFNAME="eth1", SHARDWISE_ZERO="1")
        assert values["OMP_NUM_THREADS"] == "3"
        assert values["GLOO_SOCKET_IFNAME"] == "eth1"
        assert values["SHARDWISE_ZERO"] == "1"

    def test_variables_of_outer_run_are_dropped(self) -> None:
        outer = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "SHARDWISE_LAUNCH_LISTEN_FD": "3"}
        values = self.of(**TORCHRUN, **outer)
        assert not outer.keys() & values.keys()
        assert values.items() >= self.AS_TORCHRUN.items()


class TestProgram:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        (tmp_path / "notes").touch()
        (tmp_path / "pack" / "inner").mkdir(parents=True)
        for name in ("__init__", "__main__", "mod", "inner/deep"):
            (tmp_path / "pack" / f"{name}.py").write_text("raise RuntimeError('executed')")
        return tmp_path

    @pytest.mark.parametrize(
        ("name", "module", "words"),
        [
            ("train.py", False, (sys.executable, "train.py", "-n", "3")),
            ("pack", True, (sys.executable, "-m", "pack", "-n", "3")),
            ("pack.mod", True, (sys.executable, "-m", "pack.mod", "-n", "3")),
            ("pack.inner.deep", True, (sys.executable, "-m", "pack.inner.deep", "-n", "3")),
            ("json.tool", True, (sys.executable, "-m", "json.tool", "-n", "3")),
            ("/bin/sh", False, ("/bin/sh", "-n", "3")),
        ],
    )
    def test_finds_program(self, name: str, module: bool, words: tuple[str, ...]) -> None:
        assert program.command(name, ("-n", "3"), module=module) == words

    @pytest.mark.parametrize(
        ("name", "module", "message"),
        [
            ("trian.py", False, "There is no script trian.py in .* Did you mean train.py"),
            ("none/x.py", False, r"no script none/x.py \(nor a directory none\)"),
            (
                "pack",
                False,
                "pack is a directory: give the path of a script in it, such as pack/__init__.py",
            ),
            ("train", False, "There is no program train on PATH. Did you mean train.py"),
            ("./notes", False, "not executable: run chmod"),
            ("nope", True, "There is no module 'nope' for"),
            ("pack.nope", True, "There is no module 'pack.nope' for"),
            ("pack.mod.nope", True, "There is no module 'pack.mod.nope' for"),
            ("pack.inner", True, "pack.inner is a package without pack.inner.__main__"),
            ("train.py", True, "no module 'train.py' .* the file without -m"),
            ("", True, "There is no module"),
        ],
    )
    def test_missing_program_gets_suggestion(self, name: str, module: bool, message: str) -> None:
        with pytest.raises(LaunchError, match=message):
            program.command(name, (), module=module)


@pytest.mark.parametrize(
    ("present", "listed", "seen"),
    [
        (0, None, 0),
        (0, "0,1", 0),
        (4, None, 4),
        (4, "", 0),
        (4, "-1", 0),
        (4, "2, 3", 2),
        (4, "0,9,1", 1),
        (4, "GPU-8a,GPU-9b", 2),
    ],
)
def test_visible_gpus(present: int, listed: str | None, seen: int) -> None:
    assert resources.visible_gpus(present, listed) == seen


def _report(rank: int, time: float, *, secondary: bool = False, **more: Any) -> ErrorReport:
    return ErrorReport(rank=rank, time=time, secondary=secondary, message="", text="", **more)


def _end(rank: int, code: int, time: float, *, stopped: bool = False) -> ExitStatus:
    return ExitStatus(rank=rank, code=code, time=time, stopped=stopped)


class TestVerdict:
    @pytest.mark.parametrize(
        ("ends", "reports", "judged"),
        [
            # all ranks ended well
            ([_end(0, 0, 5.0), _end(1, 0, 6.0)], [], None),
            # no reports: the first failure
            ([_end(0, 1, 2.0), _end(1, 3, 1.0)], [], Verdict(rank=1, exit_code=3)),
            # a rank that the launcher ended is not to blame
            ([_end(0, -15, 2.0, stopped=True), _end(1, 3, 3.0)], [], Verdict(rank=1, exit_code=3)),
            # a consequence that ended before its cause
            (
                [_end(0, 1, 1.0), _end(1, 1, 2.0)],
                [_report(0, 0.9, secondary=True), _report(1, 0.8)],
                Verdict(rank=1, exit_code=1),
            ),
            # killed without a report; the other rank lost its peer
            (
                [_end(0, 1, 1.0), _end(1, -9, 1.1)],
                [_report(0, 0.9, secondary=True)],
                Verdict(rank=1, exit_code=137),
            ),
            # it raised, and was stopped during its cleanup
            (
                [_end(0, 1, 1.0), _end(1, -15, 2.0, stopped=True)],
                [_report(0, 0.9, secondary=True), _report(1, 0.8)],
                Verdict(rank=1, exit_code=1),
            ),
            # two causes: the earlier one
            (
                [_end(0, 1, 1.0), _end(1, 1, 1.1)],
                [_report(0, 0.9), _report(1, 0.8)],
                Verdict(rank=1, exit_code=1),
            ),
            # it ended with code 0, too early
            (
                [_end(0, 1, 2.0), _end(1, 0, 1.0), _end(2, -15, 3.0, stopped=True)],
                [_report(0, 1.9, secondary=True)],
                Verdict(rank=1, exit_code=1, waiting=0),
            ),
            # the same, but its process was the last to end
            (
                [_end(0, 1, 2.0), _end(1, 0, 2.1)],
                [_report(0, 1.9, secondary=True)],
                Verdict(rank=1, exit_code=1, waiting=0),
            ),
            # an end with code 0 does not hide a failure of another rank
            ([_end(0, 2, 2.0), _end(1, 0, 1.0)], [], Verdict(rank=0, exit_code=2)),
            # all ranks lost each other: a cut connection
            (
                [_end(0, 1, 2.0), _end(1, 1, 1.0)],
                [_report(0, 1.9, secondary=True), _report(1, 1.95, secondary=True)],
                Verdict(rank=0, exit_code=1),
            ),
            # it was stuck, and another rank waited for it: the waiting rank is not to blame
            (
                [_end(0, 1, 2.0), _end(1, -9, 3.0, stopped=True), _end(2, 1, 2.1)],
                [
                    _report(0, 1.9, secondary=True, at_fault=(1,)),
                    _report(2, 1.8, secondary=True),
                ],
                Verdict(rank=1, exit_code=1, waiting=0, late=True),
            ),
            # it was slow, and ended before it arrived; the waiting rank may not know which rank
            (
                [_end(0, -15, 5.0, stopped=True), _end(1, 1, 2.0)],
                [_report(1, 1.9, secondary=True)],
                Verdict(rank=0, exit_code=1, waiting=1, late=True),
            ),
            # the named rank has reported its own failure
            (
                [_end(0, 1, 2.0), _end(1, 1, 3.0)],
                [_report(0, 1.9, secondary=True, at_fault=(1,)), _report(1, 2.9)],
                Verdict(rank=1, exit_code=1),
            ),
        ],
    )
    def test_judge_blames_rank(
        self, ends: list[ExitStatus], reports: list[ErrorReport], judged: Verdict | None
    ) -> None:
        assert failure_report.judge(ends, {found.rank: found for found in reports}) == judged

    @pytest.mark.parametrize(
        ("ends", "reports", "said"),
        [
            ([_end(0, 1, 5), _end(1, 1, 6)], {0: "no", 1: "no"}, "no"),
            ([_end(0, 1, 5), _end(1, 1, 6)], {0: "no", 1: "not"}, ""),
            ([_end(0, 1, 5), _end(1, 1, 6)], {0: "no", 1: ""}, ""),
            ([_end(0, 1, 5), _end(1, -15, 6, stopped=True)], {0: "no"}, "no"),
            ([_end(0, 1, 5), _end(1, -11, 6)], {0: "no"}, ""),
            ([_end(0, 1, 5), _end(1, 0, 6)], {0: "no"}, "no"),
        ],
    )
    def test_common_refusal_of_all_ranks(
        self, ends: list[ExitStatus], reports: dict[int, str], said: str
    ) -> None:
        found = {rank: _report(rank, 5, refusal=text) for rank, text in reports.items()}
        assert failure_report.common_refusal(ends, found) == said

    def test_failure_is_explained_by_primary_error(self) -> None:
        lost = {0: _report(0, 1.0, secondary=True)}
        assert not failure_report.is_explained([_end(0, 1, 1.0)], lost)
        assert failure_report.is_explained([_end(0, 1, 1.0), _end(1, 0, 1.1)], lost)
        assert failure_report.is_explained([_end(0, 1, 1.0), _end(1, 1, 1.1)], lost)

    TRACE = "Traceback (most recent call last):\n  File 'a.py'\nValueError: a"
    GROUP = "  + Exception Group Traceback (most recent call last):\n  | " + TRACE
    LINKED = "\nDuring handling of the above exception, another exception occurred:\n"

    @pytest.mark.parametrize(
        ("tail", "shown"),
        [
            ("", ""),
            ("\n".join(map(str, range(40))), "\n".join(map(str, range(20, 40)))),
            (f"step 1\n{TRACE}\n", TRACE),
            (f"{TRACE}\nstep 2\n{TRACE}", TRACE),
            (f"bar 50%{TRACE}", TRACE),
            (f"x\n{GROUP}", GROUP),
            (f"x\n{TRACE}\n{LINKED}\n{TRACE}", f"{TRACE}\n{LINKED}\n{TRACE}"),
            (
                "x\nFatal Python error: Aborted\n\nThread 1",
                "Fatal Python error: Aborted\n\nThread 1",
            ),
        ],
    )
    def test_last_words(self, tail: str, shown: str) -> None:
        assert failure_report.last_traceback(tail) == shown

    STACK = '{} 0x00007f{:02} (most recent call first):\n  File "a.py", line {} in f\n\n'

    def test_last_words_of_crash_show_two_stacks(self) -> None:
        """faulthandler writes the newest thread first and the main thread last."""
        stacks = [self.STACK.format("Thread", n, n) for n in range(80)]
        stacks[30] = self.STACK.format("Current thread", 30, 30)
        head = "Fatal Python error: Segmentation fault\n\n"
        shown = failure_report.last_words(
            f"step 1\n{head}{''.join(stacks)}Extension modules: numpy._core (total: 1)\n"
        )
        others = "\n\n(78 other threads are left out.)"
        assert shown == f"{head}{stacks[30]}{stacks[79].rstrip()}{others}"

    def test_last_words_ignore_old_traceback(self) -> None:
        lines = "\n".join(map(str, range(400)))
        assert failure_report.last_words(f"{self.TRACE}\n{lines}").splitlines()[0] == "380"
        assert failure_report.last_words(f"{lines}\n{self.TRACE}") == self.TRACE


class TestCause:
    FREE = HostMemory(total=16 * 10**9, available=12 * 10**9, kills=1)

    @pytest.mark.parametrize(
        ("code", "kills", "words"),
        [
            (3, 1, "exit code 3"),
            (137, 1, "exit code 137 (a shell's code for SIGKILL)"),
            (255, 1, "exit code 255"),
            (
                -9,
                1,
                "SIGKILL, by kill -9 or another program: the kernel reports no out-of-memory kill",
            ),
            (-9, 2, "SIGKILL, by the out-of-memory killer, according to the kernel."),
            (
                -9,
                None,
                "SIGKILL, most likely by the out-of-memory killer, or by kill -9. "
                "Its memory had reached 2.5 GB; the host has 16.0 GB, and 12.0 GB are free",
            ),
            (-11, 1, "SIGSEGV: a crash in native code"),
            (-7 if sys.platform == "linux" else -10, 1, "SIGBUS: shared memory may be full"),
            (-6, 1, "SIGABRT: native code aborted"),
            (-15, 1, "SIGTERM: something outside ended it"),
            (-int(signal.SIGUSR1), 1, "SIGUSR1"),
        ],
    )
    def test_described_exit(self, code: int, kills: int | None, words: str) -> None:
        now = HostMemory(total=16 * 10**9, available=12 * 10**9, kills=kills)
        said = failure_report.describe_exit(code, before=self.FREE, now=now, peak=25 * 10**8)
        assert said.startswith(words)
        assert ("To use less memory" in said) == (code == -9 and kills != 1)

    def test_kill_on_full_host_advises_to_use_less_memory(self) -> None:
        """Programs such as systemd-oomd kill processes before the kernel does."""
        full = HostMemory(total=16 * 10**9, available=4 * 10**9, kills=1)
        said = failure_report.describe_exit(-9, before=self.FREE, now=full, peak=3 * 10**9)
        assert "no out-of-memory kill. Its memory had reached 3.0 GB; the host has 16.0" in said
        assert "To use less memory" in said
        line = failure_report.killed_line(1, said)
        assert "reports no out-of-memory kill). The others continue without it (--survive)." in line

    def test_unknown_signal(self) -> None:
        assert (
            failure_report.describe_exit(-200, before=HostMemory(), now=HostMemory(), peak=0)
            == "signal 200"
        )

    def test_host_memory_is_readable(self) -> None:
        memory = resources.host_memory()
        if sys.platform == "linux":
            assert memory.total is not None
            assert memory.available is not None
            assert 0 < memory.available <= memory.total


class TestClosingWords:
    def test_closing_words_end_with_traceback(self) -> None:
        judged = Verdict(rank=1, exit_code=1)
        said = failure_report.closing_words(judged, "exit code 1", "ValueError: boom", size=2)
        assert said == (
            "\nshardwise: rank 1 of 2 failed (exit code 1). Its last output:\n\nValueError: boom\n"
        )

    def test_closing_words_of_killed_rank(self) -> None:
        said = failure_report.closing_words(
            Verdict(rank=1, exit_code=137), "SIGKILL, out", "", size=2
        )
        assert said == "\nshardwise: rank 1 of 2 was ended by SIGKILL, out.\n"

    def test_closing_words_of_rank_that_ended_early(self) -> None:
        judged = Verdict(rank=1, exit_code=1, waiting=0)
        said = failure_report.closing_words(
            judged, "exit code 0", "T", size=2, where="train.py:9: barrier()"
        )
        assert "rank 1 of 2 ended (exit code 0) while the others were still training" in said
        assert said.endswith("Rank 0 was waiting for it here:\n\ntrain.py:9: barrier()\n")

    def test_closing_words_of_late_rank(self) -> None:
        judged = Verdict(rank=1, exit_code=1, waiting=0, late=True)
        said = failure_report.closing_words(
            judged, "SIGKILL", "CollectiveError: rank 1 is stopped", size=2
        )
        assert "rank 1 of 2 did not arrive, and reported nothing until it was ended. Rank 0" in said
        assert said.endswith("\n\nCollectiveError: rank 1 is stopped\n")

    def test_closing_words_of_refusal_are_one_line(self) -> None:
        assert failure_report.refusal_words("Not so.", [1, 0], 2) == "\nshardwise: Not so.\n"
        assert (
            failure_report.refusal_words("Not so.", [1], 2) == "\nshardwise: rank 1 of 2: Not so.\n"
        )

    def test_single_rank_gets_no_closing_words(self) -> None:
        assert (
            failure_report.closing_words(Verdict(rank=0, exit_code=1), "exit code 1", "T", size=1)
            == ""
        )


class TestPlan:
    def test_signals_are_due_in_time_and_new_plan_replaces_old(self) -> None:
        now = [100.0]
        plan = SignalSchedule(clock=lambda: now[0])
        assert (plan.wait(), plan.due(), bool(plan)) == (None, [], False)
        plan.make([(0, signal.SIGINT), (5, signal.SIGTERM), (7, signal.SIGKILL)])
        assert (plan.due(), plan.wait()) == ([signal.SIGINT], 5.0)
        now[0] += 6
        assert (plan.wait(), plan.due(), plan.wait()) == (0.0, [signal.SIGTERM], 1.0)
        plan.make([(0, signal.SIGKILL)])
        assert (plan.due(), bool(plan)) == ([signal.SIGKILL], False)


class TestReport:
    def test_error_report_is_written_and_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(environment.RANK_VARIABLE, "2")
        try:
            raise ValueError("boom")
        except ValueError as error:
            error_file.write(tmp_path, error, "the text")
        found = error_file.read(tmp_path)[2]
        assert (found.message, found.text, found.secondary) == (
            "ValueError: boom",
            "the text",
            False,
        )
        assert found.where.endswith(': raise ValueError("boom")')


def test_command_line_does_not_import_torch() -> None:
    code = "import sys, shardwise.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
