"""The package watch: wait graphs, hang reports, and questions between ranks."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import attrgetter

import pytest

import shardwise
from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import authentication, rpc
from shardwise.watch import hang_report, process_status, wait_graph
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import Abort, RankStatus, named
from shardwise.watch.waits import Waits
from shardwise.world import batch_rows, initialize, world


def waits(rank, *missing, verb="engine.backward", line="train.py:71", **more):
    fields = {"call": "reduce-scatter (call 12)", "missing": missing, "seconds": 60.4, **more}
    return RankStatus(rank=rank, verb=verb, line=line, **fields)


def _has(room, qualified):
    try:
        return bool(attrgetter(qualified)(room))
    except AttributeError:
        return False


def busy(rank, verb="", line="train.py:30", **more):
    return RankStatus(rank=rank, verb=verb, line=line, **more)


STOPPED = "is stopped (T)"


@pytest.mark.parametrize(
    ("missing", "world", "found", "said"),
    [
        (
            [3],
            {3: waits(3, 1), 1: STOPPED},
            (1,),
            "rank 3, blocked by rank 1, which did not join. Rank 1 is stopped (T).",
        ),
        ([1], {1: STOPPED}, (1,), "rank 1, which did not join. Rank 1 is stopped (T)."),
        (
            [1, 2],
            {1: busy(1), 2: waits(2, 1)},
            (1,),
            "ranks 1, 2, blocked by rank 1, which did not join. "
            "Rank 1 is in no collective, at train.py:30.",
        ),
        (
            [1],
            {1: waits(1, 0, verb="engine.save", line="train.py:88")},
            (1,),
            "rank 1, which did not join. "
            "Rank 1 is in engine.save (train.py:88): reduce-scatter (call 12), for rank 0.",
        ),
    ],
)
def test_the_rank_that_blocks_rank_0_is_named(missing, world, found, said):
    followed = wait_graph.find_blocking_ranks(
        0, missing, lambda ranks: {rank: world[rank] for rank in ranks}
    )
    assert followed.ranks == found
    assert wait_graph.describe_wait(missing, followed) == said


def test_finds_a_rank_that_has_aborted_with_its_reason():
    abort = Abort(rank=2, text="Rank 2 of 3 waited for rank 1.", lost=False)
    world = {2: waits(2, 1, abort=abort)}
    assert (
        wait_graph.find_blocking_ranks(
            0, [2], lambda ranks: {rank: world[rank] for rank in ranks}
        ).abort
        == abort
    )


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([2], "rank 2"),
        ([2, 0], "ranks 0, 2"),
        ([5, 3, 4, 0], "ranks 0, 3-5"),
        ([1, 2], "ranks 1, 2"),
    ],
)
def test_ranks_are_named_in_rows(ranks, said):
    assert named(ranks) == said


class TestHangReport:
    def test_a_stopped_rank(self):
        stack = ("train.py:71 in main: engine.backward(loss)",)
        seen = {rank: waits(rank, 1, step=11, stack=stack) for rank in (0, 2, 3)} | {1: STOPPED}
        assert hang_report.wait_warning(seen, 300.0) == (
            "shardwise: ranks 0, 2, 3 have waited 60 s in step 12 for rank 1. "
            "The run ends after 300 s (--timeout).\n"
            "  ranks 0, 2, 3 are in engine.backward (train.py:71): reduce-scatter (call 12), "
            "for rank 1\n"
            "  rank 1 is stopped (T)\n"
            "  stack of ranks 0, 2, 3, innermost last:\n"
            "    train.py:71 in main: engine.backward(loss)\n"
        )

    def test_a_save_under_if_is_main_in_plain_words(self):
        save = waits(0, 1, 2, 3, verb="engine.save", line="train.py:88")
        seen = {0: save} | {rank: waits(rank, 0) for rank in (1, 2, 3)}
        assert (
            "Rank 0 is in engine.save (train.py:88), ranks 1-3 are in engine.backward "
            "(train.py:71): is the call under `if is_main`?\n"
        ) in hang_report.wait_warning(seen, 300.0)

    def test_another_rank_in_another_call(self):
        seen = {0: waits(0, 1), 1: waits(1, 0, verb="world.barrier", line="train.py:9")}
        seen[2] = seen[0]
        assert hang_report.call_difference(seen).endswith(
            "rank 1 is in world.barrier (train.py:9): is the call under an `if`?"
        )

    def test_a_forward_that_other_ranks_skip(self):
        """Each worker decides with its own random number."""
        seen = {0: waits(0, 1), 1: waits(1, 0, verb="forward", line="train.py:9")}
        said = hang_report.call_difference(seen)
        assert "rank 1 is in forward (train.py:9): do some ranks skip a forward" in said
        assert "world.alike()" in said
        assert "engine.uneven()" in said
        assert "is_main" not in said
        seen[1] = waits(1, 0, verb="engine.save", line="train.py:9")
        seen[2] = waits(2, 0, verb="forward", line="train.py:5")
        assert "is the call under" in hang_report.call_difference(seen)

    def test_a_rank_in_an_endless_loop(self):
        seen = {0: waits(0, 1), 1: busy(1)}
        assert hang_report.call_difference(seen) == ""
        said = hang_report.wait_warning(seen, 300.0)
        assert said.startswith("shardwise: rank 0 has waited 60 s for rank 1.")
        assert "  rank 1 is in no collective, at train.py:30\n" in said

    def test_no_warning_if_no_rank_waits(self):
        assert hang_report.wait_warning({0: busy(0), 1: busy(1)}, 300.0) == ""


class TestWhereabouts:
    def frame(self):
        """Return the innermost frame of user code inside our function inside a hook of torch."""
        scope: dict[str, object] = {"sys": sys}
        library = next(one for one in process_status._libraries() if "site-packages" in one)
        source = {
            f"{library}torch/hook.py": "def hook():\n    return sys._getframe()\n",
            f"{process_status.OURS}engine.py": (
                "class Engine:\n    def backward(self):\n        return self._go()\n"
                "    def _go(self):\n        return hook()\n"
            ),
            "train.py": "def main():\n\n    return Engine().backward()\n",
        }
        for name, text in source.items():
            exec(compile(text, name, "exec"), scope)
        return scope["main"]()

    def test_the_users_line_and_the_verb(self):
        frame = self.frame()
        assert process_status.users_line(frame) == "train.py:3"
        assert process_status.library_call(frame) == "engine.backward"
        names = [line.split(" in ")[1].split(":")[0] for line in process_status.stack_lines(frame)]
        assert names[-4:] == ["main", "backward", "_go", "hook"]

    @pytest.mark.parametrize(
        ("files", "verb"),
        [
            (["lightning/sharing.py"], ""),
            (["lightning/sharing.py", "engine/initial_values.py"], ""),
            (["lightning/sharing.py", "torch/nn/modules/module.py", "model/units.py"], "forward"),
            (["torch/nn/modules/module.py", "model/units.py"], "forward"),
        ],
        ids=str,
    )
    def test_calls_of_a_bridge_are_a_forward_only_in_a_module(self, files, verb):
        scope: dict[str, object] = {"sys": sys}
        call = "sys._getframe()"
        for number, file in reversed(list(enumerate(files))):
            folder = "/lib/site-packages/" if file.startswith("torch") else process_status.OURS
            source = f"def call{number}():\n    return {call}\n"
            exec(compile(source, f"{folder}{file}", "exec"), scope)
            call = f"call{number}()"
        exec(compile(f"def main():\n    return {call}\n", "train.py", "exec"), scope)
        assert process_status.library_call(scope["main"]()) == verb

    def test_libraries_of_another_interpreter_are_no_lines_of_the_user(self):
        """A venv that uses packages of another interpreter has torch in that one's folder."""
        scope: dict[str, object] = {"sys": sys}
        file = "/elsewhere/lib/python3/site-packages/torch/nn/modules/module.py"
        exec(compile("def inner():\n    return sys._getframe()\n", file, "exec"), scope)
        exec(compile("def main():\n    return inner()\n", "train.py", "exec"), scope)
        assert process_status.users_line(scope["main"]()) == "train.py:2"

    def test_a_deep_stack_keeps_the_users_lines(self):
        source = "def down(left):\n    return down(left - 1) if left else sys._getframe()\n"
        scope: dict[str, object] = {"sys": sys}
        exec(compile(source, f"{process_status.OURS}deep.py", "exec"), scope)
        exec(compile("def main():\n    return down(50)\n", "train.py", "exec"), scope)
        lines = process_status.stack_lines(scope["main"]())
        assert len(lines) <= 2 * process_status.DEPTH + 1
        at = next(i for i, line in enumerate(lines) if line.startswith("train.py:2 in main"))
        assert "deep.py:2 in down" in lines[at + 1]
        assert lines[at + 2] == "..."

    @pytest.mark.parametrize(
        ("qualified", "said"),
        [
            ("Engine.save", "engine.save"),
            ("Engine.__init__", "sw.Engine"),
            ("World.barrier", "world.barrier"),
            ("Metrics.compute", "metrics.compute"),
            ("Residency._before.<locals>.hook", "forward"),
            ("init", "sw.init"),
            ("leave", "the end of the script"),
            ("Alike.__iter__", "world.alike"),
        ],
    )
    def test_verbs_are_those_of_the_user(self, qualified, said):
        assert process_status._as_called(qualified) == said

    def test_the_names_that_are_looked_for_exist(self):
        """A class or function that is renamed would be reported as a forward."""
        rooms = (shardwise, world, initialize, batch_rows)
        for qualified in (*process_status.OBJECTS, *process_status.FUNCTIONS):
            found = [attrgetter(qualified)(room) for room in rooms if _has(room, qualified)]
            assert found, qualified

    def test_a_thread_without_frames(self):
        assert (process_status.users_line(None), process_status.library_call(None)) == ("", "")
        assert process_status.stack_lines(None) == []


def test_the_oldest_wait_that_keeps_a_rank_from_going_on():
    kept = Waits()
    with kept.helping(), kept.noted("all-gather (call 1)", lambda: [3]):
        assert kept.longest() is None
        assert [wait.call for wait in kept.all()] == ["all-gather (call 1)"]
    with kept.noted("barrier (call 2)", lambda: [1]):
        with kept.noted("all-gather (call 3)", lambda: [2]):
            assert kept.longest().call == "all-gather (call 3)"
        assert kept.longest().call == "barrier (call 2)"
        assert kept.longest().missing() == [1]
    assert kept.all() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_state_of_a_process():
    process = subprocess.Popen(["sleep", "60"])
    begun = process_status.process_start(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process_status.process_state(process.pid, begun) == "stopped (T)"
    assert (
        process_status.process_state(process.pid, begun + 1) == "ended"
    )  # another process with the same PID
    process.kill()
    process.wait()
    assert process_status.process_state(process.pid, begun) == "ended"


@pytest.fixture
def pair() -> Iterator[tuple[StatusServer, StatusServer]]:
    """Return the status servers of two ranks, both in this process."""
    both = StatusServer(0, 2, b"known"), StatusServer(1, 2, b"known")
    places = [one.listen("127.0.0.1", f"host{one.rank}") for one in both]
    for one in both:
        one.start(places)
    yield both
    for one in both:
        one.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "shardwise-status" not in names


class TestStatusServer:
    def test_a_rank_is_asked_where_it_is(self, pair):
        zero, one = pair
        with one.waits.noted("barrier (call 7)", lambda: [0]):
            found = zero.ask([0, 1], stack=True)
        assert (found[1].call, found[1].missing) == ("barrier (call 7)", (0,))
        assert "test_watch.py" in found[0].line
        assert found[1].stack

    def test_other_ranks_learn_why_a_rank_aborted(self, pair):
        zero, one = pair
        one.announce_abort(PeerLost("Rank 1 of 2 lost rank 7."))
        error = zero.error_of_another("Rank 0 of 2")
        assert isinstance(error, PeerLost)
        assert str(error) == "Rank 0 of 2 aborted because rank 1 failed: Rank 1 of 2 lost rank 7."
        assert one.error_of_another("Rank 1 of 2") is None
        zero.announce_abort(CollectiveError("later"))
        assert one.abort.text == "Rank 1 of 2 lost rank 7."

    def test_a_rank_that_has_ended(self, pair):
        zero, one = pair
        one.close()
        assert zero.ask([1]) == {1: "does not answer: is its host cut off?"}

    def test_answers_nothing_without_the_secret(self, pair):
        place = pair[0]._places[1]
        with socket.create_connection((place.address, place.port)) as stranger:
            stranger.settimeout(5)
            claim = authentication.Proof(b"guessed", b"status", stranger.recv(authentication.NONCE))
            stranger.sendall(claim.words + b'{"ask": "where"}\n')
            with suppress(ConnectionResetError):  # the connection was closed before it was read
                assert stranger.recv(100) == b""
        assert pair[0].ask([1])[1].rank == 1

    def test_a_stranger_in_the_place_of_a_dead_rank_cannot_pass_a_proof_on(self, pair):
        """Rank 0 asks rank 1, but a stranger listens there and forwards to rank 0 itself."""
        zero, _ = pair
        place = zero._places[0]
        with socket.create_server(("127.0.0.1", 0)) as stranger, ThreadPoolExecutor(1) as pool:
            port = stranger.getsockname()[1]
            zero._places[1] = replace(zero._places[1], address="127.0.0.1", port=port)
            asked = pool.submit(zero.ask, [1])
            victim, _ = stranger.accept()
            with victim, socket.create_connection((place.address, place.port)) as server:
                server.settimeout(5)
                victim.sendall(server.recv(authentication.NONCE))
                server.sendall(victim.recv(authentication.CLAIM, socket.MSG_WAITALL))
                with suppress(ConnectionResetError):
                    assert server.recv(100) == b""
            assert isinstance(asked.result()[1], str)

    def test_a_silent_connection_does_not_block_others(self, pair):
        place = pair[0]._places[1]
        with ExitStack() as stack:
            for _ in range(2 * rpc.MOST):
                stack.enter_context(socket.create_connection((place.address, place.port)))
            assert pair[0].ask([1])[1].rank == 1
