"""`sw.Guard` in a loop with DistributedDataParallel and with FSDP2."""

import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

import shardwise as sw
from shardwise.errors import GuardError, UsageError
from tests.distributed.test_guard import EVERY, Model


@contextmanager
def joined(world, path):
    """Join a default process group, as a stock script does, unless the test's ranks have one."""
    if dist.is_initialized():
        assert dist.get_world_size() == world.size
        yield
        return
    store = dist.FileStore(path, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def prepared(kind, **options):
    torch.manual_seed(0)
    inner = Model()
    if kind == "fsdp2":
        fully_shard(inner, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model = inner
    else:
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = sw.Guard(model, optimizer, every=EVERY, **options)
    return inner, model, optimizer, guard


def train(world, model, optimizer, guard, steps, before=None):
    for number in range(1, steps + 1):
        if before is not None:
            before(number)
        torch.manual_seed(number * 7 + world.rank)
        optimizer.zero_grad()
        guard.backward(model(torch.randn(4, 6)).square().mean())
        optimizer.step()
        guard.step()


def flip(tensor):
    local = getattr(tensor, "_local_tensor", tensor).detach()
    local.view(-1).numpy().view(np.uint32)[0] ^= np.uint32(1 << 20)


def flipped_case(world, path, kind, state, memory):
    with joined(world, path):
        _, model, optimizer, guard = prepared(kind, memory=memory)

        def before(number):
            if number == EVERY + 2 and world.rank == 1:
                weight = optimizer.param_groups[0]["params"][0]
                flip(weight if state == "parameter" else optimizer.state[weight]["exp_avg"])

        with pytest.raises(GuardError) as error:
            train(world, model, optimizer, guard, 2 * EVERY, before)
        guard.close()
        return str(error.value), error.value.at_fault, guard.steps


@pytest.mark.parametrize("state", ["parameter", "optimizer state"])
@pytest.mark.parametrize(("kind", "size", "memory"), [("ddp", 3, False), ("fsdp2", 2, True)])
def test_names_the_flipped_tensor_and_rank(group, tmp_path, kind, size, memory, state):
    path = str(tmp_path / "store")
    for message, at_fault, steps in group(size)(flipped_case, path, kind, state, memory):
        assert at_fault == (1,)
        assert steps == 2 * EVERY
        assert f"{state} first.weight" in message


def computed_case(world, path, kind, way):
    with joined(world, path):
        inner, model, optimizer, guard = prepared(kind)

        def before(number):
            if number == EVERY and world.rank == 1:
                getattr(inner.faults.faults, way).append(True)

        with pytest.raises(GuardError) as error:
            train(world, model, optimizer, guard, EVERY, before)
        guard.close()
        return str(error.value), error.value.at_fault


@pytest.mark.parametrize(
    ("kind", "way", "word"),
    [
        ("ddp", "forward", "forward pass"),
        ("ddp", "backward", "gradient"),
        ("fsdp2", "forward", "forward pass"),
    ],
)
def test_second_run_names_the_rank(group, tmp_path, kind, way, word):
    for message, at_fault in group(2)(computed_case, str(tmp_path / "store"), kind, way):
        assert at_fault == (1,)
        assert word in message


def clean_case(world, path, kind, guarded):
    with joined(world, path):
        _, model, optimizer, guard = prepared(kind, memory=guarded)
        if not guarded:
            guard.close()
            guard._every = 10**9
        train(world, model, optimizer, guard, 2 * EVERY + 1)
        guard.close()
        drawn = torch.rand(1).item()
        return [getattr(p, "_local_tensor", p).tolist() for p in model.parameters()], drawn


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_leaves_no_trace(group, tmp_path, kind):
    """The guard reports nothing in correct training, and changes no weight."""
    with_guard = group(2)(clean_case, str(tmp_path / "one"), kind, True)
    assert with_guard == group(2)(clean_case, str(tmp_path / "two"), kind, False)


def slow_case(world, path, kind, phase):
    """Sleep on rank 1 in one phase of each step, and return the lines of the guard."""
    with joined(world, path):
        inner, model, optimizer, guard = prepared(kind, action="warn")
        lines = []
        guard._stragglers._say = lines.append
        delay = 0.1 * (world.rank == 1)
        before = (lambda _: time.sleep(delay)) if phase == "data" else None
        if phase == "forward":
            inner.last.register_forward_pre_hook(lambda *_: time.sleep(delay))
        elif phase == "backward":
            inner.last.register_full_backward_hook(lambda *_: time.sleep(delay))
        elif phase == "update":
            optimizer.register_step_post_hook(lambda *_: time.sleep(delay))
        train(world, model, optimizer, guard, 7 * EVERY, before)
        guard.close()
        return lines


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update"])
def test_names_a_straggler_and_its_phase(group, tmp_path, kind, phase):
    for lines in group(2)(slow_case, str(tmp_path / "store"), kind, phase):
        (line,) = lines
        assert "wait for rank 1 (host " in line
        assert line.endswith(f"Most of the difference is in: {phase}")


class Rows(torch.utils.data.Dataset):
    """Rows of which one has a huge value, or a NaN."""

    def __init__(self, size, bad, value):
        self.rows = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
        self.rows[bad] = value

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def spike_case(world, path, kind, action, value, workers):
    """Train on rows of which one is bad, and return what the guard does."""
    with joined(world, path):
        _, model, optimizer, guard = prepared(kind, action="warn", spikes=action)
        lines = []
        guard._spikes._say = lines.append
        data = Rows(240, 201, value)
        sampler = torch.utils.data.DistributedSampler(
            data, num_replicas=world.size, rank=world.rank, shuffle=False
        )
        loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=workers)
        moved, message = [], ""
        try:
            for x in guard.follow(loader):
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.zero_grad()
                guard.backward(model(x).square().mean() * x.square().max())
                optimizer.step()
                guard.step()
                after = model.parameters()
                moved.append(any(not p.equal(q) for p, q in zip(before, after, strict=True)))
        except GuardError as error:
            message = str(error)
        steps = optimizer.state[next(iter(model.parameters()))]["step"].item()
        guard.close()
        return lines, message, moved, steps


@pytest.mark.parametrize(
    ("kind", "action", "value", "workers"),
    [
        ("ddp", "warn", 300.0, 0),
        ("ddp", "skip", float("nan"), 2),
        ("fsdp2", "skip", 300.0, 0),
        ("fsdp2", "stop", float("nan"), 0),
    ],
)
def test_spike_names_the_samples(group, tmp_path, kind, action, value, workers):
    cases = group(2)(spike_case, str(tmp_path / "store"), kind, action, value, workers)
    for lines, message, moved, steps in cases:
        # Row 201 is the 101st of rank 1, in step 26.
        words = message if action == "stop" else lines[0]
        assert "step 26: the loss is " in words or "step 26: the gradient norm is " in words
        assert "largest loss is that of rank 1" in words
        assert "samples 201, 203, 205, 207" in words
        assert len(lines) == (action != "stop")
        if action == "skip":
            assert moved == [number != 25 for number in range(30)]
            assert steps == 29
        else:
            assert all(moved)
            assert steps == (25 if action == "stop" else 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"action": "halt"}, "stop, warn, restore"),
        ({"spikes": "drop"}, "warn, skip, stop, off"),
    ],
)
def test_refuses_bad_arguments(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=message):
        sw.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def alone_case(world, path, check):
    with joined(world, path):
        check()
    return True


def followed_samples():
    """An evaluation leaves no samples. Persistent workers may have started before."""
    model = nn.Linear(3, 1)
    guard = sw.Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = torch.utils.data.DataLoader(
        torch.arange(24.0).view(8, 3), 4, num_workers=1, persistent_workers=True
    )
    next(iter(loader))
    for _ in guard.follow(loader):
        pass
    assert guard._spikes._samples == []
    for number, x in enumerate(guard.follow(loader)):
        guard.backward(model(x).sum())
        assert guard._spikes._samples == list(range(4 * number, 4 * number + 4))
        guard.step()
    guard.close()


def overflows():
    """A loss scale that is too large is no spike, but a loss that is not finite is one."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    guard = sw.Guard(model, optimizer, spikes="stop", scaler=scaler)
    before = model.weight.detach().clone()

    def step(x):
        optimizer.zero_grad()
        # The scaled loss is finite, and its gradient overflows.
        guard.backward(scaler.scale(model(x * 1e6).mean() * 1e-6))
        scaler.step(optimizer)
        scaler.update()
        guard.step()

    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    before = model.weight.detach().clone()
    step(torch.full((2, 3), 1e4))
    assert model.weight.equal(before)
    assert scaler.get_scale() == 2.0**119
    with pytest.raises(GuardError, match="the loss is nan"):
        step(torch.full((2, 3), torch.nan))
    guard.close()


def norms_in_16_bits():
    model = nn.Linear(300, 300, bias=False).half()
    guard = sw.Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    model.weight.grad = torch.full_like(model.weight, 1000.0)
    guard._spikes.after_backward(torch.zeros(()))
    assert guard._spikes._squares[0].sqrt().item() == pytest.approx(300 * 1000, rel=1e-3)
    guard.close()


def distributed_losses():
    model = nn.Linear(3, 1)
    guard = sw.Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    loss = DTensor.from_local(torch.tensor(2.0), init_device_mesh("cpu", (1,)), [Replicate()])
    guard._spikes.after_backward(torch.tensor(1.0))
    guard._spikes.after_backward(loss)
    guard._spikes.before_step(1)
    assert [type(each) for each in guard._spikes._losses] == [torch.Tensor] * 2
    assert sum(map(float, guard._spikes._losses)) == 3.0
    guard.close()


@pytest.mark.parametrize(
    "check", [followed_samples, overflows, norms_in_16_bits, distributed_losses]
)
def test_reads_one_process(group, tmp_path, check):
    assert group(1)(alone_case, str(tmp_path / "store"), check) == [True]
