"""Errors in the same places as in Horovod: each names the requests, and all ranks continue."""

import os
import select
import signal

import numpy as np
import pytest
import torch

import shardwise.horovod as hvd
from shardwise.horovod.context import current
from tests.distributed.horovod import initialized


def _disagree(world):
    with initialized():
        odd = world.rank == 1

        def refused(words, call):
            with pytest.raises(RuntimeError, match=words):
                call()

        shape = (2, 3) if odd else (3, 2)
        refused(
            r"'a' is allreduce of float32 of shape \(3, 2\) on cpu on ranks 0, 2 and allreduce of "
            r"float32 of shape \(2, 3\) on cpu on rank 1: it must be the same",
            lambda: hvd.allreduce(torch.ones(shape), name="a"),
        )
        dtype = torch.float64 if odd else torch.int32
        refused(
            r"int32 of shape \(2\) on cpu on ranks 0, 2 and allreduce of float64",
            lambda: hvd.allreduce(torch.ones(2, dtype=dtype), name="b"),
        )
        op = hvd.Max if odd else hvd.Sum
        refused(
            "allreduce with op Sum on ranks 0, 2 and allreduce with op Max on rank 1",
            lambda: hvd.allreduce(torch.ones(2), name="c", op=op),
        )
        factor = 2.0 if odd else 1.0
        refused(
            "op Sum, scaled by 2 before and 1 after on rank 1",
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=factor),
        )
        refused(
            "broadcast from rank 0 on ranks 0, 2 and broadcast from rank 1 on rank 1",
            lambda: hvd.broadcast(torch.ones(2), int(odd)),
        )
        refused(
            r"allgather of float32 of shape \(\*, 2\).*allgather of float32 of shape \(\*, 3\)",
            lambda: hvd.allgather(torch.ones(world.rank, 3 if odd else 2)),
        )
        refused(
            "'d' is allreduce on ranks 0, 2 and allgather on rank 1",
            lambda: (hvd.allgather if odd else hvd.allreduce)(torch.ones(2), name="d"),
        )
        several = [torch.ones(1)] * (3 if odd else 2)
        refused("allreduce of 2 tensors on.*of 3 tensors", lambda: hvd.grouped_allreduce(several))
        assert hvd.allreduce(torch.ones(2), name="a").tolist() == [1.0, 1.0]


def test_ranks_that_disagree_are_named(group):
    group(3)(_disagree)


def _refused_here(world):
    with initialized():
        handles = [hvd.allreduce_async(torch.ones(9), name="twice")] if world.rank == 0 else []
        if handles:
            with pytest.raises(ValueError, match="'twice' was requested while another operation"):
                hvd.broadcast_async(torch.ones(1), 0, name="twice")
        for words, call in (
            ("needs a power of two", lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum)),
            ("pass only op", lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)),
            ("cannot sum", lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool))),
            ("no rows", lambda: hvd.allgather(torch.tensor(1.0))),
            ("4 rows over 3 ranks", lambda: hvd.alltoall(torch.ones(4))),
            (r"splits \[1, 1, 1\] of 4 rows", lambda: hvd.alltoall(torch.ones(4), [1, 1, 1])),
            ("Average or hvd.Sum, not Max", lambda: hvd.reducescatter(torch.ones(3), op=hvd.Max)),
            ("from rank 7", lambda: hvd.broadcast(torch.ones(3), 7)),
            ("from 0 to 2", lambda: hvd.add_process_set([2, 3])),
            ("model.named_parameters", lambda: hvd.broadcast_parameters(["weight"])),
            ("no tensors", lambda: hvd.grouped_allreduce([])),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        if not handles:
            handles = [hvd.allreduce_async(torch.ones(9), name="twice")]
        hvd.synchronize(handles[0])
        assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (world.rank, 3, world.rank)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.local_size()) == (0, 1, 3)
        assert hvd.is_homogeneous()
        assert hvd.gloo_built()
        assert not hvd.mpi_built()
        hvd.init()  # once more does nothing
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
        hvd.rank()


def test_what_cannot_be_is_refused_at_once(group):
    group(3)(_refused_here)


def _left(world):
    """A rank that has shut down is reported only to ranks that request an operation from it."""
    with initialized():
        others = hvd.add_process_set([0, 1])
        hvd.barrier()
        if world.rank == 2:
            return
        with pytest.raises(RuntimeError, match="'x' cannot be done: rank 2 has shut down"):
            hvd.allreduce(torch.ones(1), name="x")
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=others)
        assert total.item() == 2.0
        hvd.barrier(others)


def test_a_rank_that_shuts_down(group):
    group(3)(_left)


def _numpy(world):
    """Numbers of numpy's are numbers; and a process set ends with hvd.shutdown."""
    with initialized():
        mine = torch.tensor([float(world.rank)])
        assert hvd.broadcast(mine, root_rank=np.int64(1)).item() == 1.0
        assert hvd.allreduce(torch.ones(1), prescale_factor=np.float32(0.5)).item() == 0.5
        some = hvd.add_process_set(np.array([1]))
        assert (some.ranks, some.process_set_id) == ([1], 1)
    with initialized():
        assert some.process_set_id is None  # of another init
        with pytest.raises(ValueError, match="has not been added"):
            hvd.allreduce(torch.ones(1), process_set=some)


def test_numbers_of_numpy_and_a_process_set_kept_too_long(group):
    group(2)(_numpy)


def _answer_of_child(call):
    """Return the result of `call` in a forked child, or the error that it raises."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            said = str(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], 20)[0], "the child hangs"
        return os.read(read, 1 << 16).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)


def _forks(world):
    with initialized():
        held = current().background._lock
        handle = hvd.allreduce_async(torch.ones(2), name="late") if world.rank == 1 else None
        refusal = f"was forked from rank {world.rank} and is not a rank itself"
        with held:  # as by the communication thread at the fork
            for call in (
                lambda: hvd.allreduce(torch.ones(2)),
                hvd.barrier,
                lambda: hvd.broadcast_object(1),
                hvd.join,
            ):
                said = _answer_of_child(call)
                assert said.startswith("HorovodInternalError"), said
                assert refusal in said
            if handle is not None:
                assert refusal in _answer_of_child(lambda: hvd.synchronize(handle))
            assert _answer_of_child(hvd.shutdown) == "None"
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(2), name="late")
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_operations_in_a_forked_child_are_refused(group):
    group(2)(_forks)
