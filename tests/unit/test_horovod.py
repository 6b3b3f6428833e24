"""Horovod's negotiation as tables, its thread on one rank, and steps that a script leaves out."""

import gc
import importlib
import importlib.util
import pickle
import pydoc
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shardwise.horovod as hvd
from shardwise.comm import Solo
from shardwise.comm.base import Handle as Sent
from shardwise.comm.ordered_sums import PLAIN
from shardwise.errors import BadCall, HorovodInternalError, LaunchError
from shardwise.horovod import background, functions, links, mpi_ops, script_checks
from shardwise.horovod.background import BackgroundThread
from shardwise.horovod.coordinator import (
    ADD_PROCESS_SET,
    JOIN,
    REMOVE_PROCESS_SET,
    Coordinator,
    OperationRequest,
    Response,
)
from shardwise.horovod.execution import AgreedOperation, adasum_pair, execute, row_counts
from shardwise.horovod.links import send_up_to
from shardwise.horovod.operation_handle import MARGIN, OperationHandle
from shardwise.horovod.script_checks import ScriptComparison
from shardwise.horovod.streams import StreamEvent
from shardwise.net import authentication, rpc
from shardwise.net.authentication import Seals
from shardwise.net.rpc import Link


def reduction(name, process_set=0, **more):
    return OperationRequest(
        name=name,
        kind="allreduce",
        process_set=process_set,
        shapes=((2,),),
        dtypes=("float32",),
        **more,
    )


def said(responses):
    return [(one.request.name, one.ranks, one.error) for one in responses]


def test_what_all_have_asked_for_is_done_in_the_order_of_that():
    table = Coordinator(2)
    assert table.add_request(0, reduction("a"), 0.0) == []
    assert table.add_request(0, reduction("b"), 0.0) == []
    assert said(table.add_request(1, reduction("b"), 0.0)) == [("b", (0, 1), "")]
    assert said(table.add_request(1, reduction("a"), 0.0)) == [("a", (0, 1), "")]
    assert table.waiting_since is None


def test_joined_ranks_need_not_ask():
    table = Coordinator(3)
    table.add_request(0, reduction("a"), 0.0)
    assert table.add_request(1, OperationRequest(name=JOIN, kind=JOIN), 0.0) == []
    assert said(table.add_request(2, reduction("a"), 0.0)) == [("a", (0, 1, 2), "")]
    gather = OperationRequest(name="g", kind="allgather", shapes=((2,),), dtypes=("float32",))
    table.add_request(0, gather, 0.0)
    (response,) = table.add_request(2, gather, 0.0)
    assert response.ranks == (0, 2)
    assert "cannot be done while rank 1 has joined" in response.error
    assert table.waiting_since is None  # who has joined may wait for as long as others have data
    table.add_request(0, reduction("b"), 0.0)
    assert said(table.add_request(2, OperationRequest(name=JOIN, kind=JOIN), 0.0)) == [
        ("b", (0, 1, 2), "")
    ]
    (last,) = table.add_request(0, OperationRequest(name=JOIN, kind=JOIN), 0.0)
    assert (last.number, last.ranks) == (0, (0, 1, 2))
    assert table.add_request(0, reduction("c"), 0.0) == []  # nobody has joined any more


def test_process_sets_have_tables_of_their_own():
    table = Coordinator(3)
    add = OperationRequest(name=ADD_PROCESS_SET, kind=ADD_PROCESS_SET, splits=(0, 2))
    made = [response for rank in range(3) for response in table.add_request(rank, add, 0.0)]
    assert [response.number for response in made] == [1]
    table.add_request(0, reduction("a", 1), 0.0)
    assert table.add_request(1, reduction("a"), 0.0) == []
    assert said(table.add_request(2, reduction("a", 1), 0.0)) == [("a", (0, 2), "")]
    remove = OperationRequest(name=REMOVE_PROCESS_SET, kind=REMOVE_PROCESS_SET, root=1)
    for rank in range(3):
        responses = table.add_request(rank, remove, 0.0)
    assert (responses[0].number, responses[0].error) == (1, "")
    assert table.members == {0: (0, 1, 2)}


def test_what_waits_in_a_process_set_ends_with_it():
    table = Coordinator(3)
    for rank in range(3):
        table.add_request(
            rank, OperationRequest(name=ADD_PROCESS_SET, kind=ADD_PROCESS_SET, splits=(0, 1)), 0.0
        )
    table.add_request(0, reduction("a", 1), 0.0)
    for rank in range(3):
        responses = table.add_request(
            rank, OperationRequest(name=REMOVE_PROCESS_SET, kind=REMOVE_PROCESS_SET, root=1), 0.0
        )
    assert not responses[0].is_bad_call
    ended = ("a", (0,), "allreduce 'a' cannot be done: process set 1 was removed.")
    assert said(responses) == [ended, (REMOVE_PROCESS_SET, (0, 1, 2), "")]
    assert table.stalled(99.0, 1.0) == []
    (refused,) = table.add_request(1, reduction("a", 1), 0.0)
    assert (refused.ranks, "process set 1 does not exist" in refused.error) == ((1,), True)


def test_a_tensor_may_have_any_name():
    table = Coordinator(2)
    table.add_request(0, OperationRequest(name=JOIN, kind=JOIN), 0.0)
    assert said(table.add_request(1, reduction(JOIN), 0.0)) == [(JOIN, (0, 1), "")]
    assert said(table.add_request(1, OperationRequest(name=JOIN, kind=JOIN), 0.0)) == [
        (JOIN, (0, 1), "")
    ]


def test_ranks_that_have_left_and_those_that_do_not_come():
    table = Coordinator(3)
    table.add_request(0, reduction("a"), 10.0)
    table.add_request(2, reduction("a"), 11.0)
    assert table.stalled(60.0, 60.0) == []
    ((request, missing),) = table.stalled(71.0, 60.0)
    assert (request.name, missing) == ("a", [1])
    assert table.stalled(72.0, 60.0) == []
    (late,) = table.time_out(320.0, 300.0)
    assert late.ranks == (0, 2)
    assert late.error.startswith("allreduce 'a' waited 300 s for rank 1. Every rank must request")
    table.add_request(0, reduction("b"), 0.0)
    (gone,) = table.remove_rank(1, "rank 1 is gone")
    assert said([gone]) == [("b", (0,), "allreduce 'b' cannot be done: rank 1 is gone")]
    (at_once,) = table.add_request(2, reduction("c"), 0.0)
    assert "rank 1 is gone" in at_once.error


def test_responses_are_sent_as_json():
    request = reduction("a", scale=(0.5, 2.0), note={"state": "3"})
    response = Response(ranks=(0, 1), request=request, rows=[[1], [2]], number=4)
    assert Response.from_json(response.as_json()) == response


def test_a_process_set_that_there_is_can_never_be_added():
    table = Coordinator(2)
    for rank in range(2):
        responses = table.add_request(
            rank, OperationRequest(name=ADD_PROCESS_SET, kind=ADD_PROCESS_SET, splits=(0, 1)), 0.0
        )
    assert responses[0].is_bad_call
    assert Response.from_json(responses[0].as_json()) == responses[0]


def test_a_call_that_cannot_be_is_both_errors_of_horovods():
    assert issubclass(BadCall, ValueError)
    assert issubclass(BadCall, RuntimeError)
    assert not issubclass(BadCall, HorovodInternalError)  # which a script may try again after
    assert not issubclass(HorovodInternalError, ValueError)


@pytest.mark.parametrize("name", hvd.__all__)
def test_help_is_there_before_init(name):
    assert not hvd.is_initialized()
    assert pydoc.render_doc(getattr(hvd, name))


@pytest.mark.parametrize("module", [mpi_ops, functions])
def test_modules_of_horovods_names_have_the_same(module):
    for name in module.__all__:
        assert getattr(module, name) is getattr(hvd, name)


@pytest.fixture
def no_horovod(monkeypatch):
    """Simulate that Horovod is not installed, and undo its import after the test."""
    before = {name for name in sys.modules if name.partition(".")[0] == "horovod"}
    assert not before
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_horovod")
def test_imports_of_horovod_are_answered():
    for _ in range(2):
        hvd.install_as_horovod()
    top = importlib.import_module("horovod")
    assert top.torch is importlib.import_module("horovod.torch") is hvd
    assert importlib.import_module("horovod.torch.mpi_ops") is mpi_ops
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert importlib.util.find_spec("horovod") is not None
    assert top.__version__ == hvd.__version__
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.tensorflow"):
        importlib.import_module("horovod.tensorflow")


@pytest.mark.usefixtures("no_horovod")
def test_horovod_itself_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", type(sys)("horovod"))
    with pytest.raises(BadCall, match="was imported before"):
        hvd.install_as_horovod()


def test_what_cannot_travel_is_told(solo, monkeypatch):
    hvd.init()
    try:
        assert hvd.broadcast_object({"a": 1}) == {"a": 1}
        with pytest.raises(BadCall, match=r"lock.* send plain values"):
            hvd.allgather_object(threading.Lock())
        monkeypatch.setattr(functions, "pickler", pickle)
        with pytest.raises(BadCall, match=r"function cannot be sent .* pip install cloudpickle"):
            hvd.broadcast_object(lambda: 1)
    finally:
        hvd.shutdown()


def test_steps_of_ours_are_not_looked_at(monkeypatch):
    said = []
    monkeypatch.setattr(script_checks, "write_warning", said.append)
    watcher = script_checks.ScriptWatcher(0, said.append, lambda: False)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    try:
        with watcher.paused():
            for _ in range(3):
                optimizer.step()
        optimizer.step()
        assert said == []
        optimizer.step()
        assert said == [script_checks.WRAP]
    finally:
        watcher.close()


def test_rows_are_dealt_as_evenly_as_can_be():
    assert row_counts(7, 3) == [3, 2, 2]
    assert row_counts(1, 4) == [1, 0, 0, 0]


def test_adasum_of_two():
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double()
    # a.b = 1, |a|^2 = 1, |b|^2 = 2: half of a, three quarters of b
    assert adasum_pair(a, b).tolist() == [1.25, 0.75]
    assert adasum_pair(a, torch.zeros(2).double()).tolist() == [1.0, 0.0]


def test_adasum_is_scaled():
    request = reduction("a", op="Adasum", scale=(0.5, 6.0))
    job = AgreedOperation(request, [torch.ones(2)], Solo(), (0,), [[2]])
    assert execute(job)[0].tolist() == [3.0, 3.0]


class OfOneDevice(Solo):
    """Simulated ranks on a GPU, for machines that have none."""

    small_device = torch.device("cuda:0")

    def all_reduce(self, buffer, how=PLAIN):
        buffer.mul_(3)
        self.buffer = buffer
        return super().all_reduce(buffer, how)


@pytest.mark.parametrize("in_place", [True, False])
def test_tensors_of_the_host_travel_by_way_of_the_device(monkeypatch, in_place):
    moves, to = [], torch.Tensor.to

    def moved(tensor, there, *more):
        if not isinstance(there, torch.device):
            return to(tensor, there, *more)
        moves.append(there.type)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", moved)
    group, given = OfOneDevice(), torch.ones(2)
    (result,) = execute(
        AgreedOperation(reduction("a", op="Sum"), [given], group, (0,), [[2]], in_place=in_place)
    )
    assert moves[0] == "cuda"
    assert group.buffer.data_ptr() not in (given.data_ptr(), result.data_ptr())
    assert result.tolist() == [3.0, 3.0]
    assert (given.tolist() == [3.0, 3.0]) == in_place


NOTE = {"weights": "w", "state": "0", "samples": "", "rate": "", "device": ""}


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {}, []),
        ({"weights": "other"}, {}, [script_checks.BROADCAST]),
        ({"state": "2"}, {}, [script_checks.BROADCAST_STATE]),
        ({"samples": "x"}, {"samples": "y"}, []),
        ({"samples": "x"}, {"samples": "x"}, [script_checks.SHARD]),
        ({"rate": "unscaled"}, {"rate": "unscaled"}, [script_checks.SCALE]),
        ({"device": "node1 cuda:0"}, {"device": "node1 cuda:0"}, [script_checks.PIN]),
        ({"device": "node1 cuda:0"}, {"device": "node2 cuda:0"}, []),
    ],
)
def test_steps_left_out_are_seen_once(first, second, found):
    comparison = ScriptComparison()
    notes = {0: NOTE | first, 1: NOTE | second}
    assert list(comparison.compare(notes)) == found
    assert list(comparison.compare(notes)) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"bucket_mb": (1.0, "flag"), "timeout": (9.0, "flag"), "quiet": (True, "flag")}, ""),
        ({"zero": (0, "flag"), "tensor": (1, "flag"), "precision": ("fp32", "environment")}, ""),
        ({"zero": (2, "flag")}, "zero=2 (flag) has no effect on what hvd.DistributedOptimizer "),
        (
            {"overlap": (False, "file c.toml"), "seed": (1, "flag"), "exact": (4, "environment")},
            "overlap=False (file c.toml), exact=4 (environment) have no effect on what hvd.",
        ),
    ],
)
def test_settings_that_only_the_engine_acts_upon(given, told):
    line = script_checks.idle_settings_line(given)
    assert line.startswith(told)
    assert bool(line) == bool(told)
    assert not line or line.endswith(" or train with sw.Engine: docs/from_horovod.md.")


def test_settings_without_effect_are_told_once(solo, monkeypatch, capfd):
    monkeypatch.setenv("SHARDWISE_FLAGS", '{"zero": "2", "offload_optimizer": "cpu"}')
    for _ in range(2):  # the second time as after an elastic restart
        hvd.init()
        hvd.shutdown()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("shardwise: zero=2 (flag), offload_optimizer=cpu (flag) have no ")


def test_settings_of_an_engine_that_was_made_have_effect(solo, monkeypatch, capfd):
    monkeypatch.setenv("SHARDWISE_ZERO", "2")
    solo.engines = 1
    hvd.init()
    hvd.shutdown()
    assert capfd.readouterr().err == ""


def test_a_path_that_several_ranks_of_a_host_write():
    comparison = ScriptComparison()
    assert list(comparison.compare_save(0, ["node1", "/a", "train.py:3"])) == []
    assert list(comparison.compare_save(1, ["node2", "/a", "train.py:3"])) == []
    (line,) = comparison.compare_save(2, ["node1", "/a", "train.py:3"])
    assert line.startswith("ranks 0, 2 all write /a (train.py:3)")
    assert list(comparison.compare_save(3, ["node1", "/a", "train.py:3"])) == []


@contextmanager
def thread_of_one_rank():
    thread = BackgroundThread(Solo(), {}, torch.device("cpu"), timeout=5.0, warn_after=5.0)
    try:
        yield thread
    finally:
        thread.close()


class Lent(Sent):
    """A buffer that other ranks read until `read` is set. None: a rank exited while it read."""

    def __init__(self, read):
        super().__init__()
        self._read = read

    def reusable(self):
        if self._read is None:
            raise RuntimeError("rank 1 was lost while it still read")
        self._read.wait(5.0)


def lending(monkeypatch, read):
    def performed(job):
        job.sent.append(Lent(read))
        return list(job.tensors)

    monkeypatch.setattr(background, "execute", performed)


def test_a_result_is_handed_out_once_no_other_rank_reads_it(monkeypatch):
    read = threading.Event()
    lending(monkeypatch, read)
    with thread_of_one_rank() as thread:
        handle = thread.submit(OperationHandle(reduction("a"), [torch.ones(2)], in_place=True))
        with pytest.raises(HorovodInternalError, match="not answered"):
            handle.wait(0.2 - MARGIN)
        assert not handle.is_done
        read.set()
        assert handle.wait(5.0)[0].tolist() == [1.0, 1.0]


def test_a_rank_lost_while_it_reads_ends_the_wait(monkeypatch):
    lending(monkeypatch, None)
    with thread_of_one_rank() as thread:
        handle = thread.submit(OperationHandle(reduction("a"), [torch.ones(2)], in_place=True))
        with pytest.raises(HorovodInternalError, match="'a' failed: rank 1 was lost"):
            handle.wait(5.0)
        began = time.monotonic()
        with pytest.raises(HorovodInternalError, match="rank 1 was lost"):
            thread.call(list)
        assert time.monotonic() - began < 4.0  # and not the time-out of a thread that has ended


def test_a_rank_that_leaves_first_does_what_was_agreed_on():
    began, held = threading.Event(), threading.Event()

    def hold():
        began.set()
        held.wait(5.0)

    with thread_of_one_rank() as thread:
        holding = threading.Thread(target=thread.call, args=(hold,))
        holding.start()
        began.wait(5.0)
        handle = thread.submit(OperationHandle(reduction("a", op="Sum"), [torch.ones(2)]))
        release = threading.Timer(0.1, held.set)
        release.start()
    holding.join()
    assert handle.wait(5.0)[0].tolist() == [1.0, 1.0]


def test_what_is_sent_need_not_be_all():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer, seals = socket.create_connection(listener.getsockname()), Seals(b"one", b"other")
        link = Link(rpc.Connection(peer, seals))
        with listener.accept()[0]:  # which does not read
            link.send({"do": "this"})
            upto = {1: link.queued_bytes}
            link.send({"do": "that" * (1 << 23)})
            waiting = threading.Thread(target=send_up_to, args=(upto, {1: link}))
            waiting.start()
            waiting.join(5.0)
            assert (waiting.is_alive(), link.has_unsent) == (False, True)
        link.close()


class OnGpu:
    """A stand-in for a result on a GPU."""

    is_cuda = True
    device = torch.device("cuda:1")

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_a_result_is_kept_for_the_stream_that_waits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    handle, result = OperationHandle(reduction("a")), OnGpu()
    handle.succeed([result], StreamEvent())
    handle.wait(0.0)
    assert result.streams == ["stream of cuda:1"]


class Owned(Dataset[int]):
    """A custom dataset, which may open its files at the first read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("a dataset of the user's own is read by the user's loader alone")


def test_only_tensors_are_looked_at():
    gc.collect()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def samples(dataset):
        reading = iter(DataLoader(dataset))
        found = script_checks.describe_rank(optimizer, averages=True, asked_size=True)["samples"]
        del reading
        return found

    numbers = torch.arange(4.0)
    assert samples(Owned()) == ""
    assert samples(TensorDataset(numbers)) == samples(TensorDataset(numbers.clone())) != ""
    assert samples(numbers + 1) not in ("", samples(numbers))


def test_idle_connections_do_not_keep_rank_0_waiting():
    known = b"what all ranks know"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        host, port = listener.getsockname()
        held = [socket.create_connection((host, port)) for _ in range(20)]
        began = time.monotonic()
        others = [pool.submit(links.connect, host, port, known, rank, 20.0) for rank in (1, 2)]
        found = links.accept(listener, known, 3, 20.0)
        assert time.monotonic() - began < links.HELLO_SECONDS
        assert sorted(found) == [1, 2]
        for link in (*found.values(), *(other.result() for other in others), *held):
            link.close()


def test_who_does_not_connect_to_rank_0_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(b"\0" * authentication.CLAIM + b"1\n")
        with pytest.raises(LaunchError, match=r"rank\(s\) \[1\] did not connect"):
            links.accept(listener, b"what all ranks know", 2, 0.5)
        stranger.close()
