"""Buffers of gradients: their readers, and their number."""

import copy
import gc
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import shardwise as sw
from shardwise.comm import shared_work
from shardwise.states.gradients import bucket
from tests.distributed.sharded import batch
from tests.tables import each_value

WIDE = 160
"""Features, so many that a bucket does not fit into a message."""


@contextmanager
def reading_late():
    """A transport whose messages move only while this rank waits, the latest call first."""
    until, move = shared_work.GroupWork.until, shared_work.GroupWork.move
    waiting = []

    def late_until(self, call, stage):
        waiting.append(call)
        try:
            until(self, call, stage)
        finally:
            waiting.pop()

    def late_move(self):
        for call in reversed(list(self._alive.values()) if waiting else []):
            if call.stage == shared_work.HALFWAY:
                time.sleep(0.01)
            self._move(call)

    shared_work.GroupWork.until, shared_work.GroupWork.move = late_until, late_move
    try:
        yield
    finally:
        shared_work.GroupWork.until, shared_work.GroupWork.move = until, move


def slow_reader_case(world, slow_rank):
    """Run two reduced backwards in a step while one rank is slow.

    No rank may add the second sum to a buffer while another rank still copies the first one from
    it.
    """
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(2))).double()
    plain = copy.deepcopy(model)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with reading_late() if world.rank == slow_rank else nullcontext():
        for step in range(4):
            xs = [batch(10 * step + k, rows=6, width=WIDE) for k in range(2)]
            for x in xs:
                engine.backward(model(world.share(x)).square().mean())
            engine.step()
            optimizer.zero_grad()
            (sum(plain(x).square().mean() for x in xs) / 2).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_reader_gets_its_sum(group, slow):
    group(2, transport="shared")(slow_reader_case, slow)


# -- memory -------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Layers; the last one is used in every other step, so its bucket, the first, is often late."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
        self.extra = nn.Linear(512, 512)

    def forward(self, x, use):
        for layer in self.body:
            x = layer(x).tanh()
        return self.extra(x) if use else x


def resident():
    """Return the resident MB of this rank."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024


def borrowed_case(world):
    torch.manual_seed(2)
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=2, bucket_mb=1.0)
    used = []
    for step in range(16):
        x = world.share(batch(step, rows=4, width=512)).float()
        engine.backward(model(x, step % 2 == 0).square().mean())
        engine.step()
        used.append(resident())
    engine.close()
    assert used[-1] - used[8] < 30, used


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_number_of_borrowed_buffers_is_bounded(group, transport):
    group(2, transport=transport)(borrowed_case)


class Mixed(nn.Module):
    """Large and small gradients of several kinds.

    One has other strides, one is missing in some steps, and one belongs to a unit that is used
    twice.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.twice = nn.Linear(6, 6)
        self.rarely = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x, step):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.twice, x, use_reentrant=True).tanh()
        if step % 3:
            x = self.rarely(x)
        picture = x[:, :3, None, None].expand(-1, -1, 4, 6)
        return self.head(x).square().mean() + self.conv(picture).square().mean()


def straight_case(world, row, precision, smallest):
    """Train with gradients of at least `smallest` elements sent without a copy."""
    usual = bucket.SENT_APART, bucket.SMALL
    bucket.SENT_APART, bucket.SMALL = smallest, 10
    sent = []
    launch = bucket.GradientBucket.launch

    def counting(self):
        sent.extend(self._uncopied)
        launch(self)

    bucket.GradientBucket.launch = counting
    try:
        torch.manual_seed(3)
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        engine = sw.Engine(model, optimizer, zero=row, precision=precision, bucket_mb=3e-4)
        losses, norms = [], []
        for step in range(7):
            for _ in range(1 + (step in (2, 5))):  # 16-bit gradients add up in fp32 from then on
                x = world.share(batch(step, rows=5, width=6).float()).requires_grad_()
                engine.backward(model(x.to(model.head.weight.dtype), step).float())
            stats = engine.step(max_norm=1e3)  # not reached
            losses.append(stats.loss)
            norms.append(stats.grad_norm)
        with engine.full_parameters():
            values = {name: value.clone() for name, value in model.state_dict().items()}
        engine.close()
        return losses, norms, values, len(sent)
    finally:
        bucket.SENT_APART, bucket.SMALL = usual
        bucket.GradientBucket.launch = launch


@each_value(precision=["fp32", "bf16"], row=[0, 1, 2, 3], size=[2, 3])
def test_gradients_sent_without_a_copy_give_the_same_bits(group, precision, row, size):
    ranks = group(size, transport="gloo")
    case = straight_case, row, precision
    for (losses, norms, values, none), (again, nearly, others, some) in zip(
        ranks(*case, 1 << 18), ranks(*case, 20), strict=True
    ):
        assert (none, some > 10) == (0, True)
        assert losses == again
        assert norms == pytest.approx(nearly, rel=1e-6)
        assert all(torch.equal(values[name], others[name]) for name in values)


def empty_case(world, row):
    """A parameter without elements, in a separate bucket."""
    model = nn.Linear(6, 2)
    empty = nn.Parameter(torch.zeros(0))
    groups = [{"params": model.parameters()}, {"params": [empty], "lr": 0.2}]
    engine = sw.Engine(model, torch.optim.SGD(groups, lr=0.1), zero=row)
    for step in range(4):
        x = world.share(batch(step, rows=4, width=6).float())
        engine.backward(model(x).square().mean() + (empty.sum() if step > 1 else 0))
        engine.step()
    engine.close()


@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_bucket_without_elements(group, row, transport):
    group(2, transport=transport)(empty_case, row)


def interrupted_case(world):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=2, bucket_mb=1e-4)
    x = torch.randn(8, 16)
    engine.backward(model(x).square().mean())
    engine.step()
    queue = engine._states.gradients.queues[0]
    push = queue.push

    def interrupted(launch):
        push(launch)
        queue.push = push
        raise KeyboardInterrupt

    queue.push = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.backward(model(x).square().mean())
    engine.zero_grad()
    buffers = [buffer for spare in queue._spare.values() for buffer in spare]
    assert buffers
    assert len({id(buffer) for buffer in buffers}) == len(buffers)
    engine.backward(model(x).square().mean())
    engine.step()
    engine.close()


def test_interrupted_launch_returns_its_buffer_once(group):
    group(2)(interrupted_case)
