"""Each collective of shardwise.horovod against what Horovod documents, in all its forms."""

import random
from functools import reduce
from itertools import islice
from operator import mul

import pytest
import torch

import shardwise.horovod as hvd
from tests.distributed.horovod import (
    ALL,
    FLOATS,
    NUMBERS,
    SHAPES,
    SIZES,
    WHOLE,
    initialized,
    values,
)

OFTEN = (2, 3)
"""Numbers of ranks to test often. A single rank is a special case, and four adds nothing new."""

every_size = pytest.mark.parametrize(
    "size", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.full) for n in SIZES]
)


def equal(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected), (found, expected)


def forms_of_allreduce(tensor, **how):
    """Return the result of each form of allreduce. Only in-place forms may change their input."""
    kept = tensor.clone()
    yield hvd.allreduce(tensor, **how)
    yield hvd.synchronize(hvd.allreduce_async(tensor, **how))
    yield from hvd.grouped_allreduce([tensor, tensor], **how)
    yield from hvd.synchronize(hvd.grouped_allreduce_async([tensor], **how))
    equal(tensor, kept)
    for form in (hvd.allreduce_, lambda t, **h: hvd.synchronize(hvd.allreduce_async_(t, **h))):
        changed = tensor.clone()
        assert form(changed, **how) is changed
        yield changed
    for form in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
        changed = [tensor.clone(), tensor.clone().float()]
        found = form(changed, **how)
        assert (found if isinstance(found, list) else hvd.synchronize(found)) == changed
        yield changed[0]


def _allreduce(world):
    with initialized():
        members = range(world.size)
        for dtype in NUMBERS:
            for shape in SHAPES if dtype == torch.float32 else SHAPES[3:4]:
                everyone = [values(rank, shape, dtype) for rank in members]
                total = reduce(torch.add, everyone)
                results = {hvd.Sum: total}
                if dtype in WHOLE:
                    results[hvd.Average] = torch.div(total, world.size, rounding_mode="trunc")
                if not dtype.is_complex:
                    stack = torch.stack(everyone)
                    results |= {hvd.Min: stack.amin(0), hvd.Max: stack.amax(0)}
                    results[hvd.Product] = reduce(mul, everyone)
                for op, expected in results.items():
                    if dtype.is_complex:
                        found = hvd.allreduce(everyone[world.rank], op=op)
                        equal(found, expected)
                        continue
                    few = dtype != torch.float32 and op != hvd.Sum
                    forms = forms_of_allreduce(everyone[world.rank], op=op)
                    for found in islice(forms, 1 if few else None):
                        equal(found, expected)
        for dtype in FLOATS:
            everyone = [values(rank, (7, 3), dtype) for rank in members]
            mean = torch.stack(everyone).double().mean(0).to(dtype)
            for found in forms_of_allreduce(everyone[world.rank]):
                torch.testing.assert_close(found, mean)
            scaled = {"prescale_factor": 0.5, "postscale_factor": 3.0, "op": hvd.Sum}
            for found in forms_of_allreduce(everyone[world.rank], **scaled):
                torch.testing.assert_close(
                    found.double(), mean.double() * 1.5 * world.size, rtol=1e-2, atol=1e-2
                )
        whole = torch.full((4,), 7, dtype=torch.int32)
        equal(
            hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5),
            torch.full((4,), 3 * world.size, dtype=torch.int32),
        )
        equal(hvd.allreduce(torch.ones(3), average=False), torch.full((3,), float(world.size)))
        strided = torch.arange(12.0).view(3, 4).t()
        equal(hvd.allreduce_(strided), torch.arange(12.0).view(3, 4).t())
        half = hvd.allreduce(torch.full((5,), 0.25), compression=hvd.Compression.fp16)
        equal(half, torch.full((5,), 0.25))


@every_size
def test_allreduce(group, size):
    group(size)(_allreduce)


LARGE = {
    torch.float16: 60000.0,
    torch.bfloat16: 3e38,
    torch.float32: 3e38,
    torch.float64: 1.5e308,
    torch.complex64: 3e38,
}


def _large(world):
    """Sums that are finite only where values are scaled before they are added."""
    with initialized():
        for dtype, value in LARGE.items():
            mine = torch.full((3 * world.size, 2), value, dtype=dtype)
            for factor in (0.25, 0.3):
                scaled = {"op": hvd.Sum, "prescale_factor": factor}
                wide = torch.full_like(mine, value).to(torch.complex128) * factor * world.size
                expected = wide.to(dtype) if dtype.is_complex else wide.real.to(dtype)
                assert expected.isfinite().all()
                for found in (
                    hvd.allreduce(mine, **scaled),
                    hvd.allreduce_(mine.clone(), **scaled),
                    hvd.grouped_allreduce([mine, mine[:1]], **scaled)[0],
                    hvd.allreduce(mine, prescale_factor=factor, postscale_factor=world.size),
                ):
                    torch.testing.assert_close(found, expected)
                found = hvd.reducescatter(mine, **scaled)
                torch.testing.assert_close(found, expected[:3])
            equal(mine, torch.full_like(mine, value))
        nothing = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.0)
        equal(nothing, torch.zeros(2))
        beyond = {"prescale_factor": 1e60, "postscale_factor": 1e-60}  # of fp32
        few = torch.tensor([0.0, 1.0])
        torch.testing.assert_close(hvd.allreduce(few, **beyond), few)
        turned = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=-3.0)
        equal(turned, torch.full((2,), -3.0 * world.size))
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=4.0)
        (3e38 * weight).sum().backward()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((2,), -3e38))
        if world.size == 2:  # at right angles: the sum
            mine = torch.tensor([3e38, 3e38 if world.rank else -3e38])
            found = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.25)
            torch.testing.assert_close(found, torch.tensor([1.5e38, 0.0]))


@pytest.mark.parametrize(("size", "settings"), [(2, {}), (3, {}), (2, {"transport": "gloo"})])
def test_values_are_scaled_before_they_are_added(group, size, settings):
    group(size, **settings)(_large)


def _gathers(world):
    with initialized():
        for dtype in ALL:
            for inner in ((), (2, 0), (3,))[-1 if world.size == 4 else 0 :]:
                rows = [rank + 1 if rank else 0 for rank in range(world.size)]
                everyone = [values(r, (count, *inner), dtype) for r, count in enumerate(rows)]
                mine, expected = everyone[world.rank], torch.cat(everyone)
                equal(hvd.allgather(mine), expected)
                equal(hvd.synchronize(hvd.allgather_async(mine)), expected)
                for found in (
                    hvd.grouped_allgather([mine, mine[:0]]),
                    hvd.synchronize(hvd.grouped_allgather_async([mine, mine[:0]])),
                ):
                    equal(found[0], expected)
                    equal(found[1], expected[:0])
            for root in {0, world.size - 1}:
                for shape in SHAPES if dtype == torch.bool else SHAPES[3:4]:
                    expected = values(root, shape, dtype)
                    mine = values(world.rank, shape, dtype)
                    equal(hvd.broadcast(mine, root), expected)
                    equal(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
                    equal(mine, values(world.rank, shape, dtype))
                    changed = mine.clone()
                    assert hvd.broadcast_(changed, root) is changed
                    equal(changed, expected)
                    assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
                    equal(mine, expected)
        strided = torch.arange(6).view(2, 3).t() + world.rank
        equal(hvd.broadcast_(strided, 0), torch.arange(6).view(2, 3).t())
        assert hvd.broadcast_object({"of": world.rank}, world.size - 1) == {"of": world.size - 1}
        told = hvd.allgather_object("x" * world.rank)
        assert told == ["x" * rank for rank in range(world.size)]


@every_size
def test_allgather_and_broadcast(group, size):
    group(size)(_gathers)


def _exchanges(world):
    size, rank = world.size, world.rank
    with initialized():
        for dtype in ALL:
            # rank r sends r + s rows to rank s
            everyone = [values(r, (sum(r + s for s in range(size)), 2), dtype) for r in range(size)]
            sent = [one.split([r + s for s in range(size)]) for r, one in enumerate(everyone)]
            expected = torch.cat([sent[r][rank] for r in range(size)])
            counts = torch.tensor([r + rank for r in range(size)], dtype=torch.int32)
            splits = torch.tensor([rank + s for s in range(size)], dtype=torch.int32)
            for found in (
                hvd.alltoall(everyone[rank], splits),
                hvd.synchronize(hvd.alltoall_async(everyone[rank], splits.tolist())),
            ):
                equal(found[0], expected)
                equal(found[1], counts)
            even = [values(r, (3 * size,), dtype) for r in range(size)]
            expected = torch.cat([one[3 * rank : 3 * rank + 3] for one in even])
            equal(hvd.alltoall(even[rank]), expected)
            equal(hvd.synchronize(hvd.alltoall_async(even[rank])), expected)
        for dtype in NUMBERS:
            for rows in (0, 1, 8) if dtype == torch.float32 else (7,):
                everyone = [values(r, (rows, 3), dtype) for r in range(size)]
                total = reduce(torch.add, everyone)
                mine = torch.tensor_split(total, size)[rank]
                given = everyone[rank].clone()
                equal(hvd.reducescatter(given, op=hvd.Sum), mine)
                equal(hvd.synchronize(hvd.reducescatter_async(given, op=hvd.Sum)), mine)
                for found in (
                    hvd.grouped_reducescatter([given, given], op=hvd.Sum),
                    hvd.synchronize(hvd.grouped_reducescatter_async([given, given], op=hvd.Sum)),
                ):
                    equal(found[0], mine)
                    equal(found[1], mine)
                equal(given, everyone[rank])
                if not dtype.is_complex:
                    found = hvd.reducescatter(given, postscale_factor=2.0).double()
                    expected = mine.double() / size
                    expected = 2 * (expected.trunc() if dtype in WHOLE else expected)
                    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@every_size
def test_alltoall_and_reducescatter(group, size):
    group(size)(_exchanges)


def _gradients(world):
    """Check Horovod's rules: gradients of an average are averaged, of a sum summed, of others
    averaged.
    """
    size, rank = world.size, world.rank
    with initialized():
        x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)

        def grad_of(out, weight):
            x.grad = None
            (out * weight).sum().backward()
            return x.grad

        mean = (size - 1) / 2
        ranks = torch.full((4, 3), float(rank), dtype=torch.float64)
        torch.testing.assert_close(grad_of(hvd.allreduce(x), ranks), torch.full_like(x, mean))
        summed = grad_of(hvd.allreduce(x, op=hvd.Sum), ranks)
        torch.testing.assert_close(summed, torch.full_like(x, mean * size))
        first, second = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
        expected = torch.full_like(x, 3 * mean * size)
        torch.testing.assert_close(grad_of(first + second, ranks), expected)

        rows = torch.arange(4.0 * size).view(-1, 1).double()
        expected = rows[4 * rank : 4 * rank + 4].expand(4, 3)
        torch.testing.assert_close(grad_of(hvd.allgather(x), rows), expected)
        torch.testing.assert_close(
            grad_of(hvd.broadcast(x, size - 1), ranks),
            torch.full_like(x, mean if rank == size - 1 else 0.0),
        )
        x = torch.ones(2 * size, 3, dtype=torch.float64, requires_grad=True)
        back = grad_of(hvd.alltoall(x), float(rank))
        torch.testing.assert_close(back[:, 0], torch.arange(size).double().repeat_interleave(2))
        for op, times in ((hvd.Average, 1), (hvd.Sum, size)):
            back = grad_of(hvd.reducescatter(x, op=op), float(rank))
            expected = times * torch.arange(size).double().repeat_interleave(2)
            torch.testing.assert_close(back[:, 0], expected)


@every_size
def test_gradients_flow(group, size):
    group(size)(_gradients)


def _handles(world):
    """Request 100 operations in a different order on each rank, and wait for them in yet another
    order.
    """
    with initialized():
        order = list(range(100))
        random.Random(world.rank).shuffle(order)
        tensors = {n: torch.full((n * 37,), float(n + world.rank)) for n in order}
        handles = {n: hvd.allreduce_async(tensors[n], name=f"t{n}", op=hvd.Sum) for n in order}
        random.Random(7 * world.rank).shuffle(order)
        added = sum(range(world.size))
        for n in order:
            expected = torch.full((n * 37,), float(n * world.size + added))
            equal(hvd.synchronize(handles[n]), expected)
            assert hvd.poll(handles[n])


@pytest.mark.parametrize("size", [2, 4])
def test_handles_are_waited_for_in_any_order(group, size):
    group(size)(_handles)


def _sets(world):
    """Add and remove three overlapping sets, and run operations on them concurrently."""
    with initialized():
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2, 3])]
        assert [s.process_set_id for s in sets] == [1, 2, 3]
        mine = [s for s in sets if s.included()]
        x = torch.arange(6.0).view(2, 3) + world.rank
        handles = [hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=s) for s in mine]
        handles.reverse()
        for one, handle in zip(reversed(mine), handles, strict=True):
            expected = len(one.ranks) * torch.arange(6.0).view(2, 3) + sum(one.ranks)
            equal(hvd.synchronize(handle), expected)
        for one in mine:
            place = one.ranks.index(world.rank)
            assert (one.rank(), one.size()) == (place, len(one.ranks))
            ranks = torch.tensor(one.ranks)
            equal(hvd.allgather(torch.tensor([world.rank]), process_set=one), ranks)
            root = one.ranks[-1]
            equal(hvd.broadcast(torch.tensor(world.rank), root, process_set=one), ranks[-1])
            equal(hvd.alltoall(torch.full((one.size(),), world.rank), process_set=one), ranks)
            spread = torch.arange(one.size()).float()
            equal(hvd.reducescatter(spread, process_set=one), spread[place : place + 1])
            assert hvd.allgather_object(world.rank, process_set=one) == one.ranks
            hvd.barrier(process_set=one)
        with pytest.raises(ValueError, match=r"process set 1 already has the ranks \[0, 1\]"):
            hvd.add_process_set([1, 0])
        outside = next(s for s in sets if not s.included())
        with pytest.raises(ValueError, match=r"allreduce on ProcessSet\(.*does not belong"):
            hvd.allreduce(x, process_set=outside)
        assert outside.rank() == -1
        assert hvd.remove_process_set(sets[0])
        assert not hvd.remove_process_set(sets[0])
        with pytest.raises(ValueError, match="has not been added"):
            hvd.allreduce(x, process_set=sets[0])
        again = hvd.add_process_set([0, 1])
        assert again.process_set_id == 4
        if again.included():
            hvd.barrier(again)
        assert hvd.global_process_set.size() == 4


def test_process_sets(group):
    group(4)(_sets)


def _joined(world):
    """Rank r has r + 1 batches; afterwards all are in step again, also without names."""
    with initialized():
        sums = []
        for _ in range(world.rank + 1):
            sums.append(hvd.allreduce(torch.ones(3), op=hvd.Sum)[0].item())
            hvd.grouped_allreduce_([torch.ones(2), torch.ones(2, dtype=torch.int64)])
        last = hvd.join()
        equal(hvd.allreduce(torch.ones(3)), torch.ones(3))
        if world.rank == 0:
            assert hvd.join() > 0 or world.size == 1  # which of the others is last is a race
        else:
            with pytest.raises(RuntimeError, match=r"cannot be done while rank 0 has joined: allg"):
                hvd.allgather(torch.ones(1))
            hvd.join()
        return sums, last


@every_size
def test_join(group, size):
    for rank, (sums, last) in enumerate(group(size)(_joined)):
        assert sums == [float(size - batch) for batch in range(rank + 1)]
        assert last == size - 1


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"transport": "gloo"}),
        pytest.param(4, {"hosts": [0, 0, 1, 1]}, marks=pytest.mark.full),
    ],
)
def test_other_transports(group, size, settings):
    ranks = group(size, **settings)
    ranks(_exchanges)
    ranks(_handles)
    ranks(_joined)
