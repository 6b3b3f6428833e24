"""`sw.launch` calls a function on ranks that it starts, here and in new processes."""

import gc
import os
import sys
import threading
import time

import pytest
import torch
import torch._dynamo  # forked ranks would each import it with their first optimizer

import shardwise as sw
from shardwise.errors import ConfigError, LaunchError, RankFailed, UsageError
from shardwise.launch import function as launch_function
from tests.distributed.launched import losses_of_training


def children():
    """Return the processes that this one has started and not reaped."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return set(file.read().split())


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that a test leaves neither a process nor a descriptor behind."""
    gc.collect()
    gc.disable()  # descriptors must be closed without it
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    gc.enable()
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


class TestTraining:
    def test_losses_are_those_of_one_process(self):
        ((alone, _),) = sw.launch(losses_of_training, workers=1, start_method="fork")
        found = sw.launch(losses_of_training, workers=2, zero=3, start_method="fork")
        assert [name for _, name in found] == ["ZERO_3", "ZERO_3"]
        for losses, _ in found:
            assert losses == pytest.approx(alone, rel=1e-8)

    @pytest.mark.slow
    def test_new_processes_import_the_function(self):
        found = sw.launch(losses_of_training, 2, workers=2, zero=1)  # auto, as it can be imported
        assert [(len(losses), name) for losses, name in found] == [(2, "ZERO_1")] * 2

    def test_function_of_a_notebook_is_copied_to_new_processes(self):
        pytest.importorskip("cloudpickle")
        offset = 40
        assert sw.launch(lambda add: add + offset, 2, workers=1, start_method="spawn") == [42]

    def test_computations_of_the_caller_do_not_block_those_of_forked_ranks(self):
        """GNU OpenMP hangs in a process that a thread with a pool has forked."""
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            torch.randn(400, 400) @ torch.randn(400, 400)

            def computes():
                torch.set_num_threads(2)
                return (torch.ones(400, 400) @ torch.ones(400, 400)).sum().item()

            found = sw.launch(computes, workers=1, start_method="fork")
        finally:
            torch.set_num_threads(before)
        assert found == [400.0**3]


class TestValues:
    def test_one_per_rank_in_order(self):
        def who(word):
            world = sw.init(quiet=True)
            time.sleep(0.2 * (world.size - world.rank))
            return {"rank": world.rank, "word": word, "x": torch.full((2,), float(world.rank))}

        found = sw.launch(who, "a", workers=3, start_method="fork")
        assert [(each["rank"], each["word"]) for each in found] == [(0, "a"), (1, "a"), (2, "a")]
        assert [each["x"].tolist() for each in found] == [[0, 0], [1, 1], [2, 2]]

    def test_rank_that_exits_well_returns_nothing(self):
        assert sw.launch(lambda: sys.exit(0), workers=1, start_method="fork") == [None]

    def test_value_that_cannot_be_pickled_is_refused(self):
        def generator():
            sw.init(quiet=True)
            return (x for x in [1])

        # The launcher may stop one rank before it reports, and then names the other.
        words = r"^(rank \d of 2: )?The function returned a generator, which cannot"
        with pytest.raises(RankFailed, match=words):
            sw.launch(generator, workers=2, start_method="fork")

    def test_exit_handlers_of_a_rank_run_and_those_of_its_parent_do_not(self, tmp_path):
        import atexit

        def note(name):
            (tmp_path / name).touch()

        def registers():
            atexit.register(note, "rank")

        atexit.register(note, "parent")
        try:
            sw.launch(registers, workers=1, start_method="fork")
        finally:
            atexit.unregister(note)
        assert [path.name for path in tmp_path.iterdir()] == ["rank"]


class TestOutput:
    def test_lines_have_the_rank_in_front_on_the_stream_of_the_caller(self, capsys):
        sw.launch(losses_of_training, workers=2, start_method="fork")
        lines = sorted(capsys.readouterr().out.splitlines())
        assert lines == ["[0] rank 0 has trained", "[1] rank 1 has trained"]

    def test_only_ranks_that_are_shown(self, capsys, tmp_path):
        def says():
            print(f"rank {sw.init(quiet=True).rank}")

        sw.launch(says, workers=2, start_method="fork", show=[1], log_dir=tmp_path)
        assert capsys.readouterr().out == "[1] rank 1\n"
        assert "rank 0" in (tmp_path / "rank0.log").read_text()

    def test_ranks_have_no_input(self):
        with pytest.raises(RankFailed, match="EOFError"):
            sw.launch(lambda: input("?"), workers=2, start_method="fork")


class TestFailures:
    def test_names_the_rank_and_ends_with_its_traceback(self):
        def fails():
            world = sw.init(quiet=True)
            if world.rank == 1:
                raise ValueError("the data is bad")
            world.barrier()

        with pytest.raises(RankFailed, match=r"^rank 1 of 2 failed \(exit code 1\)") as caught:
            sw.launch(fails, workers=2, start_method="fork")
        assert str(caught.value).endswith("ValueError: the data is bad")
        assert "function_rank" not in str(caught.value)
        assert (caught.value.rank, caught.value.exit_code) == (1, 1)

    def test_killed_rank_is_named(self):
        def dies():
            world = sw.init(quiet=True)
            if world.rank == 0:
                os.kill(os.getpid(), 9)
            world.barrier()

        with pytest.raises(RankFailed, match="rank 0 of 2 was ended by SIGKILL") as caught:
            sw.launch(dies, workers=2, start_method="fork")
        assert caught.value.exit_code == 137

    def test_restarts_all_ranks(self, tmp_path, capsys):
        def fails_once():
            world = sw.init(quiet=True)
            world.barrier()
            if world.is_main and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise ValueError("once")
            world.barrier()
            return world.rank

        found = sw.launch(fails_once, workers=2, start_method="fork", restarts=1)
        assert found == [0, 1]
        assert "Restart 1 of 1" in capsys.readouterr().err


class TestRefusals:
    """No process is started, because the function would leave a file."""

    @pytest.fixture
    def function(self, tmp_path):
        yield lambda: (tmp_path / "called").touch()
        assert not (tmp_path / "called").exists()

    @pytest.mark.parametrize(
        ("keywords", "error", "said"),
        [
            ({"zreo": 3}, ConfigError, r"no setting 'zreo'. Did you mean zero\?"),
            ({"worker": 3}, ConfigError, r"no setting 'worker'. Did you mean workers\?"),
            ({"num_processes": 3}, ConfigError, "Write workers=3."),
            ({"hosts": "a:1"}, ConfigError, "--hosts is only a flag of shardwise run"),
            ({"zero": 7}, ConfigError, "takes an integer from 0 to 3"),
            ({"micro_batch_size": 0}, ConfigError, "sw.launch: micro_batch_size takes"),
            ({"workers": 0}, ConfigError, "sw.launch: workers takes an integer"),
            (
                {"start_method": "forkserver"},
                ConfigError,
                "start_method takes one of auto, fork",
            ),
            ({"workers": 2, "show": [2]}, LaunchError, "show 2: the 2 ranks"),
            ({"rendezvous": "a:1"}, LaunchError, "has no effect"),
            ({"config": "/no/such.toml"}, ConfigError, "/no/such.toml"),
        ],
    )
    def test_settings_are_checked_first(self, function, keywords, error, said):
        with pytest.raises(error, match=said):
            sw.launch(function, **{"workers": 1, "start_method": "fork"} | keywords)

    def test_arguments_are_checked_first(self, function):
        with pytest.raises(UsageError, match="cannot be called with these arguments: too many"):
            sw.launch(function, 1, workers=1)
        with pytest.raises(UsageError, match=r"takes a function .*, not 'train\.py'"):
            sw.launch("train.py", workers=1)

    def test_fork_after_cuda_was_used(self, function, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(UsageError, match=r"has used CUDA.*Restart it.*start_method='spawn'"):
            sw.launch(function, workers=1, start_method="fork")

    def test_cuda_was_used_and_the_function_cannot_be_copied(self, function, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(launch_function, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"(?s)be pickled.*used CUDA.*pip install cloud"):
            sw.launch(function, workers=1)

    def test_cuda_driver_that_only_a_forked_process_finds_used(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        assert launch_function._has_used_cuda()
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
        assert not launch_function._has_used_cuda()

    def test_inside_a_rank(self, function):
        def nested():
            sw.launch(function, workers=2)

        with pytest.raises(RankFailed, match="called in one of the 2 ranks of a run"):
            sw.launch(nested, workers=2, start_method="fork")

    def test_under_another_launcher(self, function, monkeypatch):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        with pytest.raises(UsageError, match="called in one of the 2 ranks of a run"):
            sw.launch(function, workers=2, start_method="fork")

    def test_in_a_process_that_has_joined_a_run(self, function, monkeypatch):
        monkeypatch.setattr(launch_function, "has_joined", lambda: True)
        with pytest.raises(UsageError, match=r"sw\.launch was called after sw\.init"):
            sw.launch(function, workers=2, start_method="fork")

    def test_in_another_thread(self, function):
        raised = []

        def launches():
            try:
                sw.launch(function, workers=1, start_method="fork")
            except UsageError as error:
                raised.append(str(error))

        thread = threading.Thread(target=launches)
        thread.start()
        thread.join()
        assert "Call it in the main thread." in raised[0]


def test_package_of_the_launcher_stays_importable():
    from shardwise.launch import program

    assert sw.launch is sys.modules["shardwise.launch"]
    assert sw.launch.program is program
