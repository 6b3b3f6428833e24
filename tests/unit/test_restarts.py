"""Restarts of failed runs, the recorded progress of ranks, and signals that end a run."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.errors import LaunchError
from shardwise.launch.failure_report import unsaved_line
from shardwise.launch.supervisor import Supervisor
from shardwise.net import progress, restarts
from shardwise.net.environment import RANK_VARIABLE, REPORTS_VARIABLE
from shardwise.net.progress import Progress, ProgressWriter
from shardwise.net.restarts import Ending, Failure, Restarts
from shardwise.world.preemption import Preemption


def failure(step: int, kept: int = 0, *, resumes: bool = True) -> Failure:
    told = Progress(step=step, kept=kept, resumes=resumes)
    return Failure(what="rank 1 of 2 was ended", why="SIGKILL", progress=told)


def launched(folder: Path) -> ProgressWriter:
    return ProgressWriter({REPORTS_VARIABLE: str(folder), RANK_VARIABLE: "3"})


class TestTheLine:
    @pytest.mark.parametrize(
        ("failed", "said"),
        [
            (failure(57, 40), "at step 57 (SIGKILL). Restart 1 of 3, from the checkpoint"),
            (failure(57, 40), "of step 40: 17 steps are lost.\n"),
            (failure(41, 40), ": 1 step is lost.\n"),
            (failure(57), "from the beginning: there is no checkpoint yet, and 57 steps are lost"),
            (failure(57, 40, resumes=False), "not call engine.resume(folder): 57 steps are lost"),
            (failure(0), "before the first step (SIGKILL). Restart 1 of 3, from the begin"),
            (Failure(what="x", why="y", progress=None), "x before the first step (y). Restart"),
        ],
    )
    def test_line_names_cause_and_loss(self, failed: Failure, said: str) -> None:
        again, line = Restarts(3).after(failed)
        assert again
        assert said in line
        assert line.startswith("shardwise: ")
        assert line.count("\n") == 1

    def test_restarts_are_limited(self) -> None:
        several = Restarts(2)
        assert several.after(failure(1))[0]
        assert several.after(failure(2))[0]
        assert several.after(failure(3)) == (
            False,
            "\nshardwise: the limit of 2 restarts (--restarts) is reached.\n",
        )
        assert Restarts(0).after(failure(1)) == (False, "")

    def test_gives_up_after_failures_at_same_step(self) -> None:
        several = Restarts(9)
        assert several.after(failure(7, 4))[0]
        assert several.after(failure(7, 4))[0]
        assert several.after(failure(7, 6))[0], "there was a newer checkpoint"
        assert several.after(failure(7, 6))[0]
        again, line = several.after(failure(7, 6))
        assert not again
        assert "3 failures in a row at step 7, without a newer checkpoint" in line

    def test_restarts_of_islands_count(self) -> None:
        several = Restarts(2)
        several.island_started()
        assert (several.number, several.is_spent) == (2, False)
        assert "Restart 2 of 2" in several.after(failure(1))[1]
        assert several.is_spent
        assert "the limit of 2 restarts (--restarts) is reached." in several.after(failure(9))[1]


class TestUnsaved:
    def test_one_of_two_engines_was_never_saved(self) -> None:
        told = Progress(step=6, kept=0, resumes=True, checkpoint="/runs/step-4", checkpoint_at=8)
        assert unsaved_line(signal.SIGTERM, told) == (
            "shardwise: SIGTERM ended the run at step 6 without a save. A new start continues with "
            "one engine from the beginning, because it has no checkpoint: 6 steps are lost. The "
            "last checkpoint is /runs/step-4.\n"
        )
        first = unsaved_line(signal.SIGTERM, replace(told, checkpoint_at=0))
        assert "continues from the beginning: 6 steps are lost. The last" in first

    def test_path_is_printable_and_relative(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = f"{tmp_path.resolve()}/a\x1b[31m\nb\udce9/step-6"
        line = unsaved_line(signal.SIGINT, Progress(step=6, kept=6, checkpoint=path))
        assert line.endswith(r"The last checkpoint is a\x1b[31m\nb\udce9/step-6." + "\n")

    def test_newest_checkpoint_of_all_ranks_is_named(self) -> None:
        """Only the main rank records a save."""

        def newest(found: dict[int, tuple[str, int]]) -> str:
            exits = {
                rank: SimpleNamespace(
                    progress=Progress(step=12, kept=0, checkpoint=path, checkpoint_at=moment)
                )
                for rank, (path, moment) in found.items()
            }
            combined = Supervisor._progress(SimpleNamespace(_exits=exits))  # type: ignore[arg-type]
            assert combined is not None
            return combined.checkpoint

        assert newest({1: ("step-4", 4), 0: ("step-10", 14)}) == "step-10"
        assert newest({0: ("step-4", 4), 2: ("step-10", 14), 1: ("", 0)}) == "step-10"
        # The main rank saved before any further step.
        assert newest({1: ("old/step-4", 4), 0: ("new/step-4", 4)}) == "new/step-4"
        assert newest({0: ("", 0), 1: ("step-0", 0)}) == "step-0"


class TestRepeated:
    def test_repeats_until_success(self) -> None:
        endings = [Ending(code=1, words="why", failure=failure(3, 2)), Ending(code=0)]
        said: list[str] = []
        assert restarts.repeated(Restarts(1), lambda: endings.pop(0), said.append) == 0
        assert "".join(said).count("\n") == 1
        assert "why" not in said

    def test_last_words_are_shown_at_end(self) -> None:
        said: list[str] = []
        code = restarts.repeated(
            Restarts(1), lambda: Ending(code=7, words="why\n", failure=failure(3)), said.append
        )
        assert code == 7
        limit = "shardwise: the limit of 1 restart (--restarts) is reached.\n"
        assert "".join(said).endswith(f"why\n\n{limit}")

    def test_refused_restart_ends_run(self) -> None:
        endings = [Ending(code=7, failure=failure(3))]

        def once() -> Ending:
            if endings:
                return endings.pop()
            raise LaunchError("node2 is gone.")

        said: list[str] = []
        assert restarts.repeated(Restarts(3), once, said.append) == 7
        assert "the restart failed. node2 is gone." in said[-1]


class TestProgress:
    def test_progress_round_trips(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert progress.read(tmp_path, 3) is None
        writer = launched(tmp_path)
        assert progress.read(tmp_path, 3) == Progress(step=0, kept=0)
        writer.stepped(0, 9)
        writer.stepped(1, 9)
        writer.kept(0, 6)
        monkeypatch.chdir(tmp_path)
        writer.kept(1, 4, Path("runs/step-40"))
        writer.kept(1, 4, Path("runs/step-4"))
        monkeypatch.chdir("/")
        writer.saves_when_asked(saves=True)
        writer.resumes()
        told = Progress(
            step=9,
            kept=4,
            saves_when_asked=True,
            resumes=True,
            checkpoint=str(tmp_path.resolve() / "runs/step-4"),
            checkpoint_at=18,
        )
        assert progress.read(tmp_path, 3) == told
        writer.stepped(progress.ENGINES, 99)
        writer.ended()
        assert progress.read(tmp_path, 3) == Progress(**{**vars(told), "ended": True})

    def test_path_that_is_too_long_replaces_an_older_one(self, tmp_path: Path) -> None:
        writer = launched(tmp_path)
        writer.used(Path("/runs/step-4"))
        writer.used(Path("/" + "r" * 4096))
        assert progress.read(tmp_path, 3) == Progress(step=0, kept=0)

    def test_forked_child_records_nothing(self, tmp_path: Path) -> None:
        writer = launched(tmp_path)
        writer.kept(0, 5, Path("/runs/step-5"))
        before = progress.read(tmp_path, 3)
        if not (child := os.fork()):
            writer.kept(0, 99, Path("/evaluations/step-99"))
            os._exit(0)
        os.waitpid(child, 0)
        assert progress.read(tmp_path, 3) == before

    def test_disk_that_takes_a_part_of_the_record(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:1000], at))
        with pytest.raises(LaunchError, match=r"No space left on device\. Free some space"):
            launched(tmp_path)

    def test_progress_without_launcher(self) -> None:
        ProgressWriter({}).stepped(0, 1)


class Engine:
    """An object that saves, like an engine."""

    def __init__(self, *, ready: bool = True) -> None:
        self.is_ready, self.saved = ready, 0

    def ready(self) -> bool:
        return self.is_ready

    def save(self) -> Path:
        self.saved += 1
        return Path("there/step-3")


@pytest.fixture
def asked() -> Iterator[tuple[Preemption, list[str]]]:
    said: list[str] = []
    preemption = Preemption(ProgressWriter({}), lambda line, **_: said.append(line))
    yield preemption, said
    preemption.agreed = 0
    preemption.forget()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


class TestPreemption:
    def test_signal_ends_run_between_two_steps(self, asked: tuple[Preemption, list[str]]) -> None:
        preemption, said = asked
        first, second = Engine(), Engine(ready=False)
        for engine in (first, second):
            preemption.heed(engine.ready, engine.save)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.asked == signal.SIGUSR1
        preemption.before_batch(None)  # the others do not know yet
        preemption.agreed = preemption.asked
        preemption.before_batch(None)  # the second engine is within a step
        assert (first.saved, second.saved) == (0, 0)
        second.is_ready = True
        with pytest.raises(SystemExit) as raised:
            preemption.before_batch(None)
        assert raised.value.code == restarts.SAVED
        assert (first.saved, second.saved) == (1, 1)
        assert said[0].startswith("shardwise: SIGUSR1: saved there/step-3 and there/step-3, ending")

    def test_keeps_signal_handler_of_user(self, asked: tuple[Preemption, list[str]]) -> None:
        preemption, _ = asked
        seen: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        try:
            engine = Engine()
            preemption.heed(engine.ready, engine.save)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen == [signal.SIGTERM]
        assert preemption.asked == 0

    def test_ended_run_is_not_saved(self, asked: tuple[Preemption, list[str]]) -> None:
        preemption, said = asked
        over, other = Engine(), Engine()
        for engine in (over, other):
            preemption.heed(engine.ready, engine.save)
        preemption.leave_out(over.save)
        preemption.agreed = signal.SIGTERM
        with pytest.raises(SystemExit):
            preemption.leave_between_steps()
        assert (over.saved, other.saved, len(said)) == (0, 1, 1)

    def test_signals_are_only_handled_in_main_thread(
        self, asked: tuple[Preemption, list[str]]
    ) -> None:
        preemption, _ = asked
        engine = Engine()
        thread = threading.Thread(target=preemption.heed, args=(engine.ready, engine.save))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
