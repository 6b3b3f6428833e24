"""`hvd.DistributedOptimizer`, compared with a plain process that has all ranks' batches."""

import copy
import warnings
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwise.horovod as hvd
from shardwise.horovod.context import current
from shardwise.horovod.execution import adasum_pair
from tests.distributed.horovod import initialized

STEPS = 4


class Net(nn.Module):
    """Large and small parameters, one with a different memory layout, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 2100)
        self.second = nn.Linear(2100, 8)
        self.norm = nn.LayerNorm(8)
        self.spare = nn.Linear(3, 2)
        self.turned = nn.Parameter(torch.randn(8, 5).t())

    def forward(self, x):
        return self.norm(self.second(self.first(x).relu())) @ self.turned.t()


def models():
    torch.manual_seed(0)
    model = Net().double()
    return model, copy.deepcopy(model)


def batch(step, turn, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    return torch.randn(3, 8, generator=draw, dtype=torch.float64)


def backward(model, step, turn, ranks, scale=1.0):
    for rank in ranks:
        (scale * model(batch(step, turn, rank)).square().mean()).backward()


def train(world, how, *, passes=1, sums=False, clip=None, zeros=False, closure=False):
    """Return the largest difference from the plain process after some steps."""
    model, plain = models()
    ranks = how["process_set"].ranks if "process_set" in how else range(world.size)
    optimizer, expected = (
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, plain)
    )
    scheduler, other = StepLR(optimizer, 2), StepLR(expected, 2)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes, **how)
    assert isinstance(optimizer, torch.optim.AdamW)
    for step in range(STEPS):

        def evaluate(step=step):
            optimizer.zero_grad(set_to_none=not zeros)
            for turn in range(passes):
                backward(model, step, turn, [world.rank])
            return torch.tensor(1.0)

        if closure:
            assert optimizer.step(evaluate) == 1.0
        else:
            evaluate()
        if clip is not None:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        elif not closure:
            optimizer.step()
        scheduler.step()
        expected.zero_grad()
        if len(ranks) > 1:  # as in Horovod, a missing gradient becomes zeros
            for param in plain.spare.parameters():
                param.grad = torch.zeros_like(param)
        for turn in range(passes):
            backward(plain, step, turn, ranks, 1.0 if sums else 1.0 / len(ranks))
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        expected.step()
        other.step()
    return max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


class Halved(hvd.Compression.none):
    """A custom compressor."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


def _parity(world, several):
    with initialized():
        table = [
            ({}, {}),
            ({"op": hvd.Sum}, {"sums": True, "clip": 0.5}),
            ({"gradient_predivide_factor": 3.0}, {"passes": 2, "zeros": True}),
            ({"num_groups": 2}, {"clip": 0.1, "passes": 2}),
            ({"compression": Halved}, {"closure": True}),
        ]
        for how, more in table if several else table[:1]:
            assert train(world, how, **more) < 1e-12, how
        model, _ = models()
        groups = [list(model.norm.parameters()), [model.turned, model.first.weight]]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, groups=groups)
        backward(model, 0, 0, [world.rank])
        optimizer.step()
        if world.size > 2:
            some = hvd.add_process_set([0, world.size - 1])
            if some.included():
                assert train(world, {"process_set": some}) < 1e-12
        _check_narrow(world)


def _check_narrow(world):
    """Check that gradients sent as fp16 return in the parameters' dtype, close to the mean."""
    model, plain = models()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    backward(model, 0, 0, [world.rank])
    optimizer.synchronize()
    backward(plain, 0, 0, range(world.size), 1 / world.size)
    torch.testing.assert_close(model.turned.grad, plain.turned.grad, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_as_one_process(group, size):
    group(size)(_parity, size < 4)


def _order(world):
    with initialized():
        model, _ = models()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        backward(model, 0, 0, [world.rank])
        with pytest.raises(AssertionError, match=r"before optimizer\.step"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match=r"more than backward_passes_per_step \(1\) times"):
            backward(model, 0, 0, [world.rank])
        optimizer.synchronize()
        reduced = model.turned.grad.clone()
        with pytest.warns(UserWarning, match=r"called without optimizer.skip_synchronize\(\)"):
            optimizer.step()
        assert torch.equal(model.turned.grad, reduced)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.set_backward_passes_per_step(2)
            for turn in range(2):
                backward(model, 0, turn, [world.rank])
            optimizer.step()
        extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [extra]})
        (extra * world.rank).sum().backward()
        (extra * world.rank).sum().backward()
        optimizer.synchronize()
        assert extra.grad.tolist() == [float(world.size - 1)] * 3
        for wrong, words in (
            ({"named_parameters": [("a", extra)]}, "lacks 9 of the optimizer's"),
            ({"named_parameters": [("a", p) for p in model.parameters()]}, "names twice: a"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
            ({"backward_passes_per_step": 0}, "must be 1 or more, not 0"),
            ({"groups": [[extra], [extra]]}, "twice, or one"),
            ({}, "already a DistributedOptimizer"),
        ):
            with pytest.raises(ValueError, match=words):
                hvd.DistributedOptimizer(optimizer, **wrong)


def test_calls_in_a_wrong_order_are_errors(group):
    group(2)(_order)


def _left_out(world):
    """Skip a batch after its gradients were reduced. Only the next batch's gradients count."""
    with initialized(), warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

        def leave_out():
            (world.rank * weight).sum().backward()
            optimizer.synchronize()

        leave_out()
        (world.rank * weight).sum().backward()  # no zero_grad before this, so it adds to the mean
        optimizer.step()
        leave_out()
        optimizer.zero_grad()
        if world.rank:
            (world.rank * weight).sum().backward()
        optimizer.step()
        leave_out()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        return weight.item()


def test_gradients_after_a_batch_that_was_left_out_are_reduced(group):
    # the mean of 0 and 1 is added to 0.5, then to nothing, then to 0.5
    assert group(2)(_left_out) == [-2.5, -2.5]


def _anew(world):
    """Check that an optimizer recreated for the same parameters is the one that reduces them."""
    with initialized():
        weight = nn.Parameter(torch.zeros(2))

        def made(**how):
            return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **how)

        def step(optimizer):
            optimizer.zero_grad()
            (world.rank * weight).sum().backward()
            optimizer.step()

        first = made()
        step(first)
        second = made()
        step(second)
        assert weight.tolist() == [-1.0, -1.0]
        with pytest.raises(AssertionError, match="A newer hvd"):
            first.step()
        dead = ref(second)
        del second
        assert dead() is None  # only the script holds a reference
        last = made(op=hvd.Adasum)
        with pytest.raises(ValueError, match="already a DistributedOptimizer"):
            hvd.DistributedOptimizer(last, op=hvd.Adasum)


def test_an_optimizer_made_anew(group):
    group(2)(_anew)


def _nothing_yet(world):
    """Check that a value that is None at first is broadcast like any other state."""
    with initialized():
        state = hvd.elastic.TorchState(epoch=0, best=None)
        assert not hasattr(state, "model")
        assert state.best is None
        state.best = world.rank + 0.5
        state.sync(root_rank=1)
        assert state.best == 1.5
        state.best = None
        state.restore()
        return state.best


def test_a_state_of_which_nothing_is_known_yet(group):
    assert group(2)(_nothing_yet) == [1.5, 1.5]


def _counted(world):
    """Return the progress reports from which the launcher decides when to give up on a run."""
    with initialized(), pytest.MonkeyPatch.context() as patch:
        told = []
        for what in ("stepped", "kept"):
            patch.setattr(
                current().world.progress,
                what,
                lambda _, number, what=what: told.append((what, number)),
            )
        state = hvd.elastic.TorchState(epoch=0)
        state.commit()
        state.commit()
        weight = nn.Parameter(torch.ones(2))
        for how in ({}, {"op": hvd.Adasum}):
            optimizer = torch.optim.SGD([weight], lr=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, **how)

            def closure(optimizer=optimizer):
                optimizer.zero_grad()
                loss = weight.sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        state.commit()
        return told


def test_every_way_to_get_on_is_counted(group):
    by_commits = [("stepped", 1), ("kept", 1), ("stepped", 2), ("kept", 2)]
    by_steps = [("kept", 0), ("stepped", 1), ("stepped", 2), ("kept", 2)]
    assert group(2)(_counted) == [by_commits + by_steps] * 2


class Plain(torch.optim.SGD):
    """A user's optimizer whose zero_grad has no options."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


def _own(world):
    with initialized():
        weight = nn.Parameter(torch.full((2,), float(world.rank)))
        hvd.broadcast_parameters([weight], root_rank=1)
        assert weight.tolist() == [1.0, 1.0]
        optimizer = hvd.DistributedOptimizer(Plain([weight], lr=1.0))
        (world.rank * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad.tolist() == [0.0, 0.0]
        # 4 of the 5 samples are read, and the ranks share the rest
        sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": 4})
        assert list(sampler) == [4]


def test_what_a_user_has_without_names_and_options(group):
    group(2)(_own)


def _state(world):
    """Train on rank 1 only, so that the other ranks have no state."""
    with initialized():
        model, _ = models()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank + 1))
        if world.rank == 1:
            backward(model, 0, 0, [0])
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_parameters(list(model.named_parameters()), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] == 0.2
        state = optimizer.state_dict()["state"]
        norms = [float(s["exp_avg_sq"].sum()) for s in state.values()]
        return float(model.turned.detach().sum()), float(state[0]["step"]), norms


def test_parameters_and_state_of_one_rank_on_all(group):
    first, *others = group(3)(_state)
    assert first[1] == 1.0
    assert all(other == first for other in others)


def _adasum(world):
    with initialized():
        ranks = [torch.randn(33, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        ranks = ranks[: world.size]
        expected = [row.double() for row in ranks]
        while len(expected) > 1:
            expected = [adasum_pair(*expected[i : i + 2]) for i in range(0, len(expected), 2)]
        found = hvd.allreduce(ranks[world.rank], op=hvd.Adasum)
        torch.testing.assert_close(found, expected[0].float())
        same = hvd.allreduce(ranks[0], op=hvd.Adasum)  # same direction: the mean
        torch.testing.assert_close(same, ranks[0])
        apart = torch.eye(world.size)[world.rank]  # orthogonal: the sum
        torch.testing.assert_close(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(world.size))

        model, plain = models()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        backward(model, 0, 0, [world.rank])
        optimizer.step()
        changes = []
        for rank in range(world.size):
            plain.zero_grad()
            backward(plain, 0, 0, [rank])
            changes.append(-0.1 * plain.turned.grad.reshape(-1))
        while len(changes) > 1:
            changes = [adasum_pair(*changes[i : i + 2]) for i in range(0, len(changes), 2)]
        expected = plain.turned + changes[0].view_as(plain.turned)
        torch.testing.assert_close(model.turned, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_adasum(group, size):
    group(size)(_adasum)


def _uneven(world):
    """Give rank 1 one more batch. The mean counts the joined ranks as zeros."""
    with initialized():
        model, plain = models()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(2 + (world.rank == 1)):
            optimizer.zero_grad()
            backward(model, step, 0, [world.rank])
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            expected.zero_grad()
            backward(plain, step, 0, range(world.size) if step < 2 else [1], 1 / world.size)
            expected.step()
        torch.testing.assert_close(model.turned, plain.turned)
        return last


def test_uneven_batches_and_join(group):
    assert group(3)(_uneven) == [1, 1, 1]


def _norm(world):
    """Normalise across all ranks as over the full batch. A copy of the module does too."""
    with initialized():
        whole = torch.randn(world.size * 3, 4, 2, generator=torch.Generator().manual_seed(1))
        whole = whole.double().requires_grad_()
        norm = copy.deepcopy(hvd.SyncBatchNorm(4).double())
        plain = nn.BatchNorm1d(4).double()
        mine = whole.detach()[3 * world.rank : 3 * world.rank + 3].requires_grad_()
        weight = torch.arange(24.0 * world.size).view_as(whole).double()
        out = norm(mine)
        (out * weight[3 * world.rank : 3 * world.rank + 3]).sum().backward()
        expected = plain(whole)
        (expected * weight).sum().backward()
        share = slice(3 * world.rank, 3 * world.rank + 3)
        torch.testing.assert_close(out, expected[share])
        torch.testing.assert_close(mine.grad, whole.grad[share])
        torch.testing.assert_close(norm.running_var, plain.running_var)
        total = hvd.allreduce(norm.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(total, plain.weight.grad)


@pytest.mark.parametrize("size", [1, 3])
def test_sync_batch_norm(group, size):
    group(size)(_norm)
