"""`shardwise run` as a user calls it: real processes, real signals, a real terminal."""

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from shardwise import config
from shardwise.cli import main as cli
from shardwise.launch.failure_report import unjoined_copies
from shardwise.launch.resources import host_memory
from tests.system.control_group import little_memory
from tests.system.launcher import LIMIT, Launcher, Ran, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

WARM = pytest.mark.usefixtures("warm_programs")
"""For tests of reports about programs. Tests of how programs start and stop do not use it."""


_OURS = """
import torch, shardwise as sw
world = sw.init(seed=0)
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(16, 4))
for (x,) in sw.Loader(data, batch_size=4):
    engine.backward(model(x).square().mean())
    engine.step()
"""


class TestStarting:
    def identities(self, ran: Ran) -> list[tuple[int, int, int, list[str]]]:
        assert ran.code == 0, ran.err
        told = [json.loads(line.partition("{")[1] + line.partition("{")[2]) for line in ran.lines()]
        assert all(one["launcher"] == "shardwise run" for one in told)
        return sorted(
            (one["rank"], one["size"], one["local_rank"], one["arguments"]) for one in told
        )

    @pytest.mark.parametrize(
        "count",
        [["-n", "2"], ["-n2"], ["-np", "2"], ["--nproc-per-node", "2"], ["--nproc_per_node=2"]],
    )
    def test_each_rank_gets_its_identity(self, shardwise: Launcher, count: list[str]) -> None:
        ran = shardwise.run("run", *count, script("identity"), "-n", "7", "--zero", "9", "--", "x")
        arguments = ["-n", "7", "--zero", "9", "--", "x"]
        assert self.identities(ran) == [(0, 2, 0, arguments), (1, 2, 1, arguments)]

    def test_one_rank_without_gpu(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", script("identity"), env={"CUDA_VISIBLE_DEVICES": ""})
        assert self.identities(ran) == [(0, 1, 0, [])]

    def test_runs_module_in_current_folder(self, shardwise: Launcher) -> None:
        (shardwise.folder / "pack").mkdir()
        (shardwise.folder / "pack" / "mod.py").write_text(Path(script("identity")).read_text())
        ran = shardwise.run("run", "-n", "2", "-m", "pack.mod", "--epochs", "3")
        assert self.identities(ran) == [(rank, 2, rank, ["--epochs", "3"]) for rank in (0, 1)]

    def test_ssh_program_may_print_greeting(self, shardwise: Launcher) -> None:
        way = shardwise.folder / "reach"
        way.write_text('#!/bin/sh\necho Welcome!\nfor last; do :; done\nexec sh -c "$last"\n')
        way.chmod(0o755)
        ran = shardwise.run("run", "-H", "else:2", "--ssh", str(way), script("identity"), "-v")
        assert self.identities(ran) == [(rank, 2, rank, ["-v"]) for rank in (0, 1)]
        assert ran.err == "else: Welcome!\n" + unjoined_copies(2)

    @pytest.mark.parametrize(
        "words",
        [
            ["doctor"],
            ["run", "-n", "1", "--adopt", "accelerate", "scripts/theirs.py"],
            *(
                pytest.param(words, marks=pytest.mark.full)
                for words in (
                    ["plan", "--on", "2xH100", "scripts/ours.py"],
                    ["verify", "-n", "2", "--steps", "2", "scripts/ours.py"],
                    ["scale", "-n", "1", "--steps", "2", "scripts/ours.py"],
                    ["pipeline-plan", "-n", "2", "scripts/ours.py"],
                )
            ),
        ],
        ids=lambda words: words[0],
    )
    def test_planted_modules_do_not_run(self, shardwise: Launcher, words: list[str]) -> None:
        """Somebody else may write to a shared directory. Only the script's own one is searched."""
        for name in ("shardwise", "torch", "numpy"):
            planted = f"open({str(shardwise.folder / 'ran')!r}, 'a').write({name!r})\n"
            (shardwise.folder / f"{name}.py").write_text(planted)
        scripts = shardwise.folder / "scripts"
        scripts.mkdir()
        (scripts / "helper.py").write_text("HERE = 1\n")
        (scripts / "theirs.py").write_text("import helper, accelerate\nprint('up', helper.HERE)\n")
        (scripts / "ours.py").write_text(f"import helper\n{_OURS}")
        start = [str(Path(sys.executable).with_name("shardwise")), *words]
        ran = subprocess.run(
            start, cwd=shardwise.folder, env=shardwise.environ(), capture_output=True, text=True
        )
        assert not (shardwise.folder / "ran").exists(), ran.stderr
        assert "No module named" not in ran.stdout + ran.stderr
        if words[0] == "run":
            assert (ran.returncode, ran.stdout) == (0, "up 1\n")

    def test_runs_any_program(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", "echo", "-n", "hi")
        assert (ran.lines(), ran.err) == (["[0] hi", "[1] hi"], "")

    def test_ranks_get_flags_but_not_outer_run(self, shardwise: Launcher) -> None:
        ran = shardwise.run(
            *("run", "-n", "1", "--zero", "2", "--no-overlap", "--config", "c.toml", "env"),
            env={"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "OMP_NUM_THREADS": "3"}
            | {"MASTER_PORT": "1", "SHARDWISE_ALONE": "1"},  # a separate run in each outer rank
            **self.config(shardwise, "seed = 1"),
        )
        values = dict(line.split("=", 1) for line in ran.lines() if "=" in line)
        flags = {"zero": "2", "overlap": "off", "config": "c.toml"}
        assert json.loads(values["SHARDWISE_FLAGS"]) == flags
        ours = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        assert {name: values.get(name) for name in ours} == ours
        assert values["OMP_NUM_THREADS"] == "3"
        assert "SHARDWISE_ALONE" not in values

    def config(self, shardwise: Launcher, text: str) -> dict[str, str]:
        (shardwise.folder / "c.toml").write_text(text)
        return {}

    def test_only_rank_0_reads_input(self, shardwise: Launcher) -> None:
        with (shardwise.folder / "input").open("w+") as given:
            given.write("to all")
            given.seek(0)
            ran = shardwise.run("run", "-n", "2", script("reader"), stdin=given)
        assert ran.lines() == ["[0] read 'to all'", "[1] read ''"]


class TestOutput:
    def test_streams_stay_separate_and_lines_have_ranks(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("streams"))
        assert ran.lines() == ["[0] last 0", "[0] out 0", "[1] last 1", "[1] out 1"]
        assert ran.err.endswith(unjoined_copies(2))
        first, *said = sorted(ran.err.removesuffix(unjoined_copies(2)).splitlines(), reverse=True)
        assert "streams.py imports neither shardwise nor horovod. Unless one of" in first
        assert said == ["[1] err 1", "[0] err 0"]

    def test_closed_stderr_loses_only_errors(self, shardwise: Launcher) -> None:
        command = [sys.executable, "-m", "shardwise", "run", "-n", "2", str(script("streams"))]
        closing = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
        done = subprocess.run(closing, capture_output=True, text=True, timeout=60, check=False)
        lines = sorted(done.stdout.splitlines())
        assert (done.returncode, lines) == (
            0,
            ["[0] last 0", "[0] out 0", "[1] last 1", "[1] out 1"],
        )

    @WARM
    def test_reports_ranks_that_never_joined(self, shardwise: Launcher) -> None:
        assert shardwise.run("run", "-n", "2", script("streams")).err.endswith(unjoined_copies(2))
        assert shardwise.run("run", "-n", "1", script("streams")).err == "err 0\n"
        assert unjoined_copies(2) not in shardwise.run("run", "-n", "2", script("parity")).err

    def test_shows_some_ranks_and_logs_all(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "3", "--show", "1-2", "--log-dir", "l", script("streams"))
        assert ran.lines() == ["[1] last 1", "[1] out 1", "[2] last 2", "[2] out 2"]
        assert ran.err.endswith(unjoined_copies(3))
        *said, _ = sorted(ran.err.removesuffix(unjoined_copies(3)).splitlines())
        assert said == ["[1] err 1", "[2] err 2"]
        for rank in range(3):
            head, *kept = (shardwise.folder / "l" / f"rank{rank}.log").read_text().splitlines()
            assert head.endswith(f"rank {rank} of 3  {script('streams')}")
            assert sorted(kept) == [f"err {rank}", f"last {rank}", f"out {rank}"]

    def test_hidden_rank_has_last_output_in_report(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", "--show", "0", script("third_step"))
        assert "\n[1] " not in f"\n{ran.out}\n{ran.err}"
        assert ran.err.endswith("\nValueError: no such token in step 3\n")

    def test_logged_single_rank_has_no_prefix_and_reads_input(self, shardwise: Launcher) -> None:
        words = ("run", "-n", "1", "--log-dir", "deep/er", "sh", "-c", "cat; echo oh >&2")
        process = shardwise.start(*words, stdin=subprocess.PIPE)
        out, err = process.communicate("in", timeout=LIMIT)
        assert (process.returncode, out, err) == (0, "in\n", "oh\n")
        assert (shardwise.folder / "deep" / "er" / "rank0.log").read_text().count("\n") == 3

    def test_dry_run_prints_commands(self, shardwise: Launcher) -> None:
        words = ("-H", "localhost:2,192.0.2.1:2", "--zero", "2", "none.py", "-v")
        ran = shardwise.run("run", "--dry-run", *words)
        lines = ran.out.splitlines()
        assert (ran.code, ran.err) == (0, "")
        assert lines[0].startswith("4 ranks on 2 hosts; rank 0 listens on localhost")
        assert lines[1].split() == ["localhost", "ranks", "0-1", "here"]
        assert lines[2].split()[:4] == ["192.0.2.1", "ranks", "2-3", "ssh"]
        assert lines[3] == f"each rank: {sys.executable} none.py -v"
        assert "settings: zero=2" in lines

    def test_single_rank_has_no_prefix(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "1", script("streams"))
        assert (ran.out, ran.err) == ("out 0\nlast 0", "err 0\n")

    def test_large_output_is_complete_and_ordered(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", "seq", "100000")
        assert ran.out.count("\n") == 200_000
        for rank in (0, 1):
            mine = re.findall(rf"^\[{rank}\] (\d+)$", ran.out, re.MULTILINE)
            assert mine == [str(number) for number in range(1, 100_001)]

    def test_leftover_process_does_not_block_end(self, shardwise: Launcher) -> None:
        began = time.monotonic()
        ran = shardwise.run("run", "-n", "2", script("orphan"))
        assert (ran.code, ran.lines()) == (0, ["[0] left", "[1] left"])
        assert time.monotonic() - began < 45

    def test_run_ends_when_output_is_closed(self, shardwise: Launcher) -> None:
        process = shardwise.start("run", "-n", "2", "yes")
        assert process.stdout is not None
        process.stdout.read(100)
        process.stdout.close()
        process.stdout = None
        assert shardwise.finish(process).code == 128 + signal.SIGPIPE

    def test_progress_bar_survives_lines_of_other_ranks(self, shardwise: Launcher) -> None:
        code, seen = on_terminal(shardwise, "run", "-n", "2", script("bar"))
        zero, one = "\x1b[36m[0]\x1b[0m ", "\x1b[35m[1]\x1b[0m "
        assert code == 0
        assert f"{zero}terminal True 76\r\n" in seen
        assert f"{one}terminal False 76\r\n" in seen
        bars = re.findall(r"\r\x1b\[2K" + re.escape(zero) + r"bar (\d)", seen)
        assert bars == [str(step) for step in range(1, 9)]
        made_room = r"\r\x1b\[0m\x1b\[J" + re.escape(f"{one}hello\r\n{zero}bar 4")
        assert re.search(made_room, seen), repr(seen)
        assert seen.replace("\r\n", "\n").endswith(f"{zero}bar 8\n{unjoined_copies(2)}")

    def test_no_color_variable(self, shardwise: Launcher) -> None:
        code, seen = on_terminal(shardwise, "run", "-n", "2", script("bar"), env={"NO_COLOR": "1"})
        assert code == 0
        assert "[1] hello\r\n" in seen
        assert "\x1b[36m" not in seen


def on_terminal(
    shardwise: Launcher, *words: str, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run on a terminal of 80 columns; return the exit code and the output on the terminal."""
    ours, theirs = os.openpty()
    import termios

    termios.tcsetwinsize(theirs, (24, 80))
    environ = {"TERM": "xterm", **(env or {})}
    process = shardwise.start(*words, stdout=theirs, stderr=theirs, stdin=theirs, env=environ)
    os.close(theirs)
    seen = b""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(timeout=LIMIT), seen.decode()


def _refused_in_one_line(shardwise: Launcher, line: str, said: str) -> None:
    (shardwise.folder / "early.py").write_text(line)
    ran = shardwise.run("run", "-n", "2", "early.py")
    assert (ran.code, ran.out) == (1, "")
    # On a slow machine, the launcher may stop a rank before it has reported the same error.
    assert re.match(rf"\nshardwise: (rank \d of 2: )?{re.escape(said)}", ran.err)
    assert ran.err.endswith(f"early.py:1: {line}]\n")
    assert ran.err.count("\n") == 2


class TestFailing:
    def test_report_ends_with_traceback(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("third_step"))
        assert ran.code == 1
        assert "[0] step 2" in ran.lines()
        live, _, closing = ran.err.partition("\nshardwise: rank 1 of 2 failed (exit code 1).")
        assert "[1] ValueError: no such token in step 3" in live
        assert 'in train_one_step\n    raise ValueError(f"no such token' in closing
        assert closing.endswith("\nValueError: no such token in step 3\n")

    @WARM
    def test_slow_cleanup_is_still_blamed(self, shardwise: Launcher) -> None:
        """The launcher stopped the rank during its cleanup after its own error."""
        ran = shardwise.run("run", "-n", "2", script("slow_to_leave"))
        assert ran.code == 1
        assert "\nshardwise: rank 0 of 2 failed (exit code 1). Its last output:" in ran.err
        assert ran.err.endswith("\nValueError: no such token\n")

    def test_help_of_script_is_not_reported(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("identity"), "--help")
        assert (ran.code, ran.err) == (0, "")

    @WARM
    def test_blames_cause_not_consequence(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("init_third"))
        live, _, closing = ran.err.partition("\nshardwise: rank 1 of 2 failed (exit code 1).")
        assert "[0] PeerLost: " in live
        assert "[rank" not in ran.err  # torch's prefix next to ours
        assert "PeerLost" not in closing
        assert closing.endswith("\nValueError: no such token in step 3\n")
        assert ran.code == 1

    @WARM
    def test_common_refusal_is_shown_once(self, shardwise: Launcher) -> None:
        flags = ("--tensor", "2", "--exact", "4", "--log-dir", "l")
        ran = shardwise.run("run", "-n", "2", *flags, script("exact"))
        assert (ran.code, ran.out) == (1, "")
        said = ran.err.removeprefix("\nshardwise: --exact 4 cannot be combined with --tensor 2")
        assert said.endswith('device="cpu")]\n')
        assert said.count("\n") == 1
        for rank in range(2):
            log = (shardwise.folder / "l" / f"rank{rank}.log").read_text()
            assert log.count("Traceback (most recent call last):") == 1

    @WARM
    def test_refusal_before_init_is_one_line(self, shardwise: Launcher) -> None:
        line = "import shardwise as sw; sw.Metrics()"
        _refused_in_one_line(shardwise, line, "Call world = shardwise.init() first")

    def test_refusal_of_bridge_before_init_is_one_line(self, shardwise: Launcher) -> None:
        line = "import shardwise.horovod as hvd; hvd.rank()"
        _refused_in_one_line(shardwise, line, "Horovod has not been initialized")

    @WARM
    def test_refusal_of_one_rank_has_traceback(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("refused_second"))
        live, _, closing = ran.err.partition("\nshardwise: rank 1 of 2 failed (exit code 1).")
        assert ran.code == 1
        assert "[0] PeerLost: " in live
        assert "[1] Traceback (most recent call last):" in live
        assert "\nTraceback (most recent call last):" in closing
        assert "errors.ConfigError: the script: zero takes an integer from 0 to 3" in closing

    @WARM
    def test_blames_rank_that_ends_early(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("early"))
        assert ran.code == 1
        assert (
            "shardwise: rank 1 of 2 ended (exit code 0) while the others were still training"
        ) in ran.err
        assert ran.err.endswith("early.py:9: world.barrier()\n")

    @WARM
    @pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
    def test_blames_rank_that_ends_before_init(self, shardwise: Launcher, rank: int) -> None:
        began = time.monotonic()
        ran = shardwise.run("run", "-n", "2", script("leaves"), str(rank), "joins")
        assert time.monotonic() - began < 120  # and not the 300 s of --timeout
        assert ran.code == 1
        assert (
            f"LaunchError: Rank {rank} of 2 ended with exit code 0 before calling sw.init"
            in ran.err
        )
        assert f"shardwise: rank {rank} of 2 ended (exit code 0)" in ran.err

    def test_rank_may_end_if_none_joins(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("leaves"), "1", "alone")
        assert (ran.code, ran.out) == (0, "[0] done\n")

    def test_killed_rank_gets_likely_cause(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", script("killed"))
        assert ran.code == 137
        # The kernel's counter of out-of-memory kills is not readable everywhere.
        knows = host_memory().kills is not None
        cause = "kill -9 or another program" if knows else "the out-of-memory killer, or by kill -9"
        who = "" if knows else "most likely "
        assert f"rank 1 of 2 was ended by SIGKILL, {who}by {cause}" in ran.err

    # test_loader.py also kills a worker.
    @pytest.mark.parametrize("killed", ["rank", pytest.param("worker", marks=pytest.mark.full)])
    def test_killed_process_leaves_no_sockets(self, shardwise: Launcher, killed: str) -> None:
        words = ("run", "-n", "2", "--device", "cpu", script("workers_killed"), killed)
        # The path of a socket has at most 107 bytes.
        with tempfile.TemporaryDirectory() as short:
            ran = shardwise.run(*words, env={"TMPDIR": short})
            left = os.listdir(short)
        assert left == []
        assert ran.lines() == ["[0] reading", "[1] reading"], ran.err
        assert ran.code == (137 if killed == "rank" else 1)
        assert "rank 1 of 2" in ran.err
        assert shardwise.wait_until_gone() == []

    def test_names_out_of_memory_killer(self, shardwise: Launcher) -> None:
        with contextlib.ExitStack() as stack:
            try:
                shardwise.enter = stack.enter_context(little_memory(300 << 20))
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            ran = shardwise.run("run", "-n", "2", script("grows"))
            assert not shardwise.wait_until_gone()
        assert ran.code == 137
        assert "rank 1 of 2 was ended by SIGKILL, by the out-of-memory killer, according" in ran.err
        assert "To use less memory: a smaller --micro-batch-size" in ran.err

    def test_exit_code_is_that_of_failed_rank(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "2", "--grace", "0.5", script("stubborn"))
        assert ran.code == 7
        assert "rank 0 of 2 failed (exit code 7)" in ran.err

    def test_crash_in_native_code_shows_python_lines(self, shardwise: Launcher) -> None:
        crash = "import faulthandler; faulthandler._sigsegv()"
        ran = shardwise.run("run", "-n", "2", sys.executable, "-c", crash)
        assert ran.code == 128 + signal.SIGSEGV
        assert "was ended by SIGSEGV: a crash in native code" in ran.err
        assert ran.err.endswith('File "<string>", line 1 in <module>\n')

    @pytest.mark.parametrize(
        "shell",
        [
            pytest.param(False, marks=pytest.mark.full, id="by itself"),
            pytest.param(True, id="under a shell"),
        ],
    )
    def test_explains_rank_aborted_by_nccl_watchdog(self, shardwise: Launcher, shell: bool) -> None:
        command = [sys.executable, script("nccl_aborted")]
        if shell:
            command = ["sh", "-c", f"{shlex.join(command)}; exit $?"]
        ran = shardwise.run("run", "-n", "2", *command)
        assert ran.code == 1
        # The script of the test counts as user code.
        assert ran.err.endswith(
            "shardwise: rank 1 of 2 did not arrive, and reported nothing until it was ended. "
            "Rank 0 was waiting for it:\n\nCollectiveError: Rank 0 of 2 waited 600 s in "
            "all-reduce number 7 over NCCL for a rank that did not arrive. Every rank must make "
            "the same calls in the same order. --timeout sets how long to wait, --warn-after when "
            "to show the ranks' lines. [" + script("nccl_aborted") + ":11: os.abort()]\n"
        )

    def test_single_rank_gets_no_report(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "-n", "1", sys.executable, "-c", "raise SystemExit('no')")
        assert (ran.code, ran.err) == (1, "no\n")


class TestStopping:
    def reading(self, shardwise: Launcher, *flags: str) -> "subprocess.Popen[str]":
        """Start two ranks with two DataLoader workers each, and return once all of them read."""
        process = shardwise.start("run", "-n", "2", *flags, script("workers"))
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] reading\n", "[1] reading\n"}
        assert len(shardwise.left()) >= 1 + 2 + 4
        return process

    def test_ctrl_c_leaves_nothing(self, shardwise: Launcher) -> None:
        process = self.reading(shardwise)
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process)
        assert ran.code == 130
        said = "shardwise: Ctrl-C: stopping 2 ranks. A second one kills them immediately."
        assert ran.err.splitlines()[1:] == [said]  # the first line warns of two copies
        assert shardwise.wait_until_gone(limit=1.0) == []

    def test_ctrl_c_in_the_imports_shows_no_traceback(self) -> None:
        """Ctrl-C is handled from the start of `main`, before which almost nothing is imported."""
        lines = f"""
            import os, signal, sys
            sys.path.insert(0, {str(Path(config.__file__).parents[2])!r})
            known = set(sys.modules)
            from shardwise.__main__ import main
            print(sorted(set(sys.modules) - known), flush=True)

            class Interrupts:
                def find_spec(self, name, path, target=None):
                    os.kill(os.getpid(), signal.SIGINT)

            sys.meta_path.insert(0, Interrupts())
            main()
        """
        # Without site, because files of other packages could import modules there.
        words = [sys.executable, "-I", "-S", "-c", textwrap.dedent(lines)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
        assert ran.stdout == "['shardwise', 'shardwise.__main__']\n"
        assert (ran.returncode, ran.stderr) == (-signal.SIGINT, "")

    def test_kill_9_of_the_launcher_leaves_nothing(self, shardwise: Launcher) -> None:
        process = self.reading(shardwise)
        process.kill()
        assert shardwise.finish(process).code == -signal.SIGKILL
        assert shardwise.wait_until_gone() == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_signal_ends_ranks(self, shardwise: Launcher, number: signal.Signals) -> None:
        process = self.sleeping(shardwise)
        process.send_signal(number)
        ran = shardwise.finish(process)
        assert ran.code == 128 + number
        assert f"shardwise: {number.name}: stopping 2 ranks." in ran.err

    def test_second_ctrl_c_kills_immediately(self, shardwise: Launcher) -> None:
        process = self.sleeping(shardwise, "--grace", "100")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        ran = shardwise.finish(process)
        assert ran.code == 130
        assert ran.err.endswith("shardwise: Ctrl-C again: killing 2 ranks.\n")

    def sleeping(self, shardwise: Launcher, *flags: str) -> "subprocess.Popen[str]":
        """Start ranks that ignore Ctrl-C, and return once they are up."""
        deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up'); time.sleep(60)"
        process = shardwise.start("run", "-n", "2", *flags, sys.executable, "-c", deaf)
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        return process


class TestRefusing:
    """Errors before any rank starts: one line, and exit code 2."""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["run", "-n", "0", "x.py"], "-n takes an integer of 1 or more, not '0'"),
            (["run", "-n", "-2", "x.py"], "-n takes an integer of 1 or more"),
            (["run", "-n", "two", "x.py"], "-n takes an integer, not 'two'"),
            (["run", "-n", "2", "--nproc-per-node", "3", "x.py"], "-n 2 and --nproc-per-node 3"),
            (["run", "-H", "h1", "--hostfile", "f", "x.py"], "-H h1 and --hostfile f: give one"),
            (
                ["run", "--hostfile", "bad.hosts", "x.py"],
                "bad.hosts:2: 'slot=2' is not an option of host h2",
            ),
            (["run", "-n", "2", "--show", "2", "x.py"], "--show 2: the 2 ranks of this run are 0"),
            (["run", "-x", "NO_SUCH", "x.py"], "-x NO_SUCH: this variable is not set here"),
            (
                ["run", "--interface", "no0", "train.py"],
                "--interface no0: this host has no such interface",
            ),
            (["run", "--log-dir", "train.py", "train.py"], "--log-dir train.py cannot be written"),
            (["run", "--node-rank", "0", "train.py"], "--node-rank needs --nnodes, the number"),
            (
                ["run", "--restarts", "-1", "train.py"],
                "--restarts takes an integer of 0 or more",
            ),
            (
                ["run", "--nnodes", "2", "-n", "4", "train.py"],
                "-n 4 cannot be combined with",
            ),
            (
                ["run", "--nnodes", "2", "-H", "h1", "train.py"],
                "--nnodes cannot be combined with",
            ),
            (["run", "trian.py"], "There is no script trian.py in .* Did you mean train.py?"),
            (["run", "-m", "no.such"], "There is no module 'no' for"),
            (["run", "temporary"], "temporary is a directory"),
            (["run", "nosuchprogram"], "There is no program nosuchprogram on PATH"),
            (["run"], "No script given"),
            (["run", "--shard", "gradients", "train.py"], "sharded gradients need a sharded opt"),
            (["run", "--zero", "7", "train.py"], "--zero takes an integer from 0 to 3"),
            (["run", "--batch-size", "2", "train.py"], "If it is the script's own, write it after"),
            (["run", "--zreo", "2", "train.py"], "no flag --zreo. Did you mean --zero?"),
            (["run", "--bucket-mb", "big", "train.py"], "--bucket-mb takes a number above 0"),
            (["run", "--config", "bad.toml", "train.py"], "no setting 'zreo'. Did you mean zero?"),
            (["run", "--config", "none.toml", "train.py"], "none.toml cannot be read"),
            (["scale", "-n", "1,2", "trian.py"], "There is no script trian.py in"),
            (["pipeline-plan", "--pipeline", "2", "trian.py"], "There is no script trian.py in"),
            (["train.py", "-n", "2"], "no command 'train.py'. Did you mean: shardwise run train"),
            (["env"], "no command 'env'. Did you mean: shardwise run env"),
            (
                ["budget", "train.py"],
                "no command 'budget'. The commands are: checkpoint, deepspeed, doctor",
            ),
        ],
    )
    def test_error_is_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        words: list[str],
        message: str,
    ) -> None:
        """Runs in this process, unlike the tests below."""
        (tmp_path / "train.py").write_text("import shardwise\nprint('started')")
        (tmp_path / "bad.toml").write_text("zreo = 2")
        (tmp_path / "bad.hosts").write_text("h1 slots=2\nh2 slot=2\n")
        (tmp_path / "temporary").mkdir()
        monkeypatch.chdir(tmp_path)
        code = cli.main(words)
        out, err = capfd.readouterr()
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert re.match(f"shardwise: .*{message}", err), err

    def test_refuses_misspelled_variable(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "true", env={"SHARDWISE_ZREO": "2"})
        assert ran.code == 2
        assert "variable SHARDWISE_ZREO: there is no setting 'zreo'. Did you mean zero?" in ran.err

    def test_refuses_port_in_use(self, shardwise: Launcher) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ran = shardwise.run("run", "--port", str(port), "true")
        assert ran.code == 2
        assert f"Port {port} on 127.0.0.1 is in use by another process" in ran.err

    def test_uses_given_port(self, shardwise: Launcher) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ran = shardwise.run("run", "--port", str(port), "env")
        assert f"SHARDWISE_LAUNCH_PORT={port}" in ran.lines()


class TestHelp:
    def test_help_fits_one_screen(self, shardwise: Launcher) -> None:
        ran = shardwise.run("run", "--help")
        lines = ran.out.splitlines()
        assert ran.code == 0
        assert "shardwise run -n 4 --zero 2 train.py" in lines[0]
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 100
        places = [
            lines.index(name) for name in ("Where", "Spread", "Precision", "Recover", "Watch")
        ]
        assert places == sorted(places)

    def test_help_all_shows_all_flags(self, shardwise: Launcher) -> None:
        usual, all_flags = (shardwise.run("run", flag) for flag in ("--help", "--help-all"))
        assert usual.code == all_flags.code == 0
        assert "--bucket-mb" not in usual.out
        assert "shardwise run --help-all" in usual.out
        assert all(config.flag(name)[2:] in all_flags.out for name in config.FIELDS)

    def test_prints_version(self, shardwise: Launcher) -> None:
        assert re.fullmatch(r"shardwise \d+\.\d+\.\d+\n", shardwise.run("--version").out)

    def test_no_arguments_list_commands(self, shardwise: Launcher) -> None:
        ran = shardwise.run()
        assert ran.code == 0
        assert re.search(r"run +Train on N workers exactly as on one\.", ran.out)


def test_warns_of_flag_after_script(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "run", str(script), "--zero=2", "-n", "1", "--epochs"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--zero=2 -n follows the script" in done.stderr
    assert "--epochs" not in done.stderr


def test_option_of_script_is_not_mentioned(shardwise: Launcher) -> None:
    """No warning about `--seed` if the script itself has this option."""
    path = shardwise.folder / "takes.py"
    path.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--seed', type=int)\nprint(parser.parse_args().seed)\n"
    )
    ran = shardwise.run("run", str(path), "--seed", "3")
    assert (ran.out, ran.err) == ("3\n", "")


@WARM
def test_keyword_of_engine_may_give_flag_its_effect(
    shardwise: Launcher,
) -> None:
    """An idle flag raises an error once the engine exists; other sources only warn."""
    path = shardwise.folder / "gives.py"
    path.write_text(
        "import sys, torch, shardwise as sw\nworld = sw.init(device='cpu', quiet=True)\n"
        "model = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "engine = sw.Engine(model, optimizer, zero=int(sys.argv[1]) if sys.argv[1:] else None)\n"
        "world.print(engine.placement.level)\n"
    )
    flag = ("run", "-n", "2", "--shard-within", "host", str(path))
    taken = shardwise.run(*flag, "2")
    assert (taken.code, taken.out, taken.err) == (0, "[0] 2\n", "")
    refused = shardwise.run(*flag)
    assert refused.code == 1
    assert "--shard-within host has no effect when nothing is sharded" in refused.err
    (shardwise.folder / "shared.toml").write_text('schedule = "gpipe"\n')
    shared = {"SHARDWISE_SHARD_WITHIN": "host", "SHARDWISE_CONFIG": "shared.toml"}
    told = shardwise.run("run", "-n", "2", str(path), env=shared)
    assert (told.code, told.out) == (0, "[0] 0\n")
    lines = [line.partition(" has no effect here")[0] for line in told.err.splitlines()]
    sources = ("schedule=gpipe (file shared.toml)", "shard_within=host (environment)")
    assert lines == [f"[0] shardwise: {source}" for source in sources]


@WARM
@pytest.mark.parametrize("backend", ["", "'gloo'"])
def test_process_group_of_script_is_kept(shardwise: Launcher, backend: str) -> None:
    """A process group that the script or a library creates before sw.init stays in use."""
    path = shardwise.folder / "first.py"
    path.write_text(
        "import os\nimport torch.distributed as dist\n"
        f"dist.init_process_group({backend})\n"
        "import shardwise as sw\nworld = sw.init(device='cpu')\nassert sw.world() is world\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')\n"
        "print(world.gather([os.environ[name] for name in names])[1 - world.rank])\n"
    )
    ran = shardwise.run("run", "-n", "2", str(path))
    assert ran.code == 0, ran.err
    told = [f"[{1 - rank}] {[str(rank), '2', str(rank), '2', '127.0.0.1']}" for rank in (1, 0)]
    assert ran.lines() == told


@WARM
def test_plain_torch_script_gets_no_warning(shardwise: Launcher) -> None:
    """No warning about copies for ranks that join each other without us."""
    path = shardwise.folder / "plain.py"
    path.write_text(
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "ones = torch.ones(1)\ndist.all_reduce(ones)\nprint(ones.item())\n"
        "dist.destroy_process_group()\n"
    )
    ran = shardwise.run("run", "-n", "2", str(path))
    assert (ran.code, ran.lines(), ran.err) == (0, ["[0] 2.0", "[1] 2.0"], "")


@WARM
def test_second_step_without_engine_warns(shardwise: Launcher) -> None:
    path = shardwise.folder / "without.py"
    path.write_text(
        "import sys, torch, shardwise as sw\nworld = sw.init(device='cpu')\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    world.print('step', step, file=sys.stderr)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    ran = shardwise.run("run", "-n", "2", str(path))
    said = [line.split(":")[0] for line in ran.err.splitlines()]
    assert said == ["[0] step 0", "[0] step 1", "[0] shardwise", "[0] step 2"]
    assert "SGD.step() without an sw.Engine: each of the 2 workers" in ran.err


def test_script_for_accelerate_gets_hint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n    from accelerate import Accelerator\n")  # never called
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "train.py trains with accelerate alone" in done.stderr
    assert "shardwise run --adopt accelerate" in done.stderr


@WARM
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_forked_child_keeps_its_exit_code(shardwise: Launcher, transport: str) -> None:
    (shardwise.folder / "forks.py").write_text(
        "import os, sys, torch, shardwise as sw\n"
        "world = sw.init(seed=0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "engine = sw.Engine(model, torch.optim.Adam(model.parameters()), quiet=True)\n"
        "for moment in 'training', 'closed':\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.exit(3)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "    world.print(moment, *world.gather(code))\n"
        "    if moment == 'training':\n"
        "        engine.backward(model(torch.ones(2, 4)).mean())\n"
        "        engine.step()\n"
        "        engine.close()\n"
    )
    ran = shardwise.run("run", "-n", "2", "--transport", transport, "forks.py")
    assert ran.code == 0, ran.err
    assert ran.lines() == ["[0] closed 3 3", "[0] training 3 3"]
