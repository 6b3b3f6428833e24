"""Sums that a rank computes from the parts that others send: bytes sent, and waits."""

import pytest
import torch

from shardwise.comm import Sum
from shardwise.layout.bucket_layout import even_cuts
from shardwise.states.gradients.bucket import GradientBucket
from shardwise.states.gradients.reduction_queue import COPIED, IN_FLIGHT
from tests.phantom import cases

LONG = 1 << 17


def rows_of(world, numel, dtype):
    """Return the values that each rank contributes."""
    draw = torch.Generator().manual_seed(3)
    return list(torch.randn(world.size, numel, generator=draw).to(dtype))


def narrow(world, verb, numel, dtype):
    """Return the bytes sent in a 16-bit sum, by dtype; assert that the sum is rounded once."""
    from tests.phantom import collectives

    rows = rows_of(world, numel, dtype)
    wanted = sum(row.float() for row in rows).to(dtype)
    buffer = rows[world.rank].to(world.device)
    cuts = even_cuts(numel, world.size)
    own = slice(cuts[world.rank], cuts[world.rank + 1])
    collectives.sent.clear()
    group = world.collectives
    handle = group.all_reduce(buffer) if verb == "all" else group.reduce_scatter(buffer, cuts)
    handle.wait()
    assert torch.equal(buffer.cpu()[own], wanted[own])
    assert verb == "scatter" or torch.equal(buffer.cpu(), wanted)
    return dict(collectives.sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [LONG, LONG + 1])
def test_16_bit_sums_send_16_bits(phantom, numel, dtype):
    """An all-reduce sends the parts once, and then the sum of each rank's interval."""
    for rank, sent in enumerate(phantom(2, narrow, "scatter", numel, dtype)):
        assert sent == {dtype: 2 * numel}, rank
    for rank, sent in enumerate(phantom(2, narrow, "all", numel, dtype)):
        first, end = even_cuts(numel, 2)[rank : rank + 2]
        assert sent == {dtype: 2 * numel + 2 * (end - first)}


def test_a_short_sum_takes_one_message(phantom):
    for sent in phantom(2, narrow, "all", 64, torch.bfloat16):
        assert sent == {torch.float32: 4 * 64}


def unheld(world, how):
    """Return whether the current stream waits for NCCL before the sum is used, and after."""
    from tests.phantom.streams import Device

    def waits():
        seen = Device.order.moment(Device.current())
        return sum(count for name, count in seen.items() if name.startswith("NCCL"))

    buffers = [row.to(world.device) for row in rows_of(world, LONG, torch.bfloat16)]
    found = [waits()]
    handles = [world.collectives.all_reduce(buffer, how) for buffer in buffers]
    for handle in handles:
        handle.advance()
    found.append(waits())
    for handle in handles:
        handle.wait()
    found.append(waits())
    return found


@pytest.mark.parametrize("how", [Sum(), Sum(in_tree=True)], ids=["as they come", "in the tree"])
def test_stream_waits_only_when_the_sum_is_used(phantom, how):
    for before, advanced, done in phantom(2, unheld, how):
        assert advanced == before
        assert done > before


def of_nccl(seen):
    """Count the collectives among the work that happened before."""
    return sum(count for name, count in seen.items() if name.startswith("NCCL"))


def of_copies(seen):
    """Count the work on the copy streams among the work that happened before."""
    return sum(count for name, count in seen.items() if name.startswith("stream "))


def waits_of_backward(world, count, settings):
    """Return for each bucket what its launch waits for, and what was started by its end.

    `count` counts collectives or copies.
    """
    from tests.phantom.streams import Device

    order, real, found = Device.order, GradientBucket.launch, []

    def launch(self):
        waited = count(order.moment(Device.current()))
        real(self)
        found.append((waited, count(order.everything())))

    torch.manual_seed(0)
    model = cases.Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"zero": 2, "precision": "bf16", "bucket_mb": 0.004} | settings
    engine = cases.sw.Engine(model, optimizer, **settings)
    GradientBucket.launch = launch
    try:
        for step in range(2):
            found.clear()
            x, y = world.share(cases.batch(world, step))
            engine.backward(cases.loss_of(model, x.to(next(model.parameters()).dtype), y))
            engine.step()
    finally:
        GradientBucket.launch = real
    engine.close()
    return found


def test_backward_waits_for_the_bucket_whose_buffer_it_borrows_and_no_later_one(phantom):
    for found in phantom(2, waits_of_backward, of_nccl, {}):
        assert len(found) > 2 * IN_FLIGHT
        for number, (waited, _) in enumerate(found[IN_FLIGHT:], IN_FLIGHT):
            _, asked = found[number - IN_FLIGHT]
            assert waited <= asked, f"bucket {number} waits for one after {number - IN_FLIGHT}"
        assert found[-1][0] > found[0][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_backward_does_not_wait_for_the_copy_that_it_has_just_started(phantom, ranks):
    """Sums are copied to the host in the time of at least one more bucket."""
    # In fp32, NCCL computes all sums, so the other streams run only copies.
    settings = {"offload_optimizer": "cpu", "precision": "fp32"}
    for found in phantom(ranks, waits_of_backward, of_copies, settings):
        assert len(found) > 2 * (IN_FLIGHT + COPIED)
        for number in range(1, len(found)):
            (waited, _), (_, started) = found[number], found[number - 1]
            assert waited <= started, f"bucket {number} waits for a copy that it has started"
        assert found[-1][0] > found[0][0]


@pytest.mark.parametrize("numel", [LONG, 64])
def test_waits_for_a_sum_on_another_stream(phantom, numel):
    for total in phantom(2, cases.summed_elsewhere, numel):
        assert total == 3.0 * numel


def test_sum_without_a_wait_is_in_order(phantom):
    phantom(2, cases.summed_in_vain, LONG)


def ahead(world, sums):
    """Return the peak bytes of sums whose host never waits for the device."""
    from tests.phantom.streams import Device

    buffer = torch.ones(LONG, dtype=torch.bfloat16, device=world.device)
    torch.cuda.synchronize()
    Device.order.begin()
    before = Device.order.most_active_nbytes()
    for _ in range(sums):
        world.collectives.reduce_scatter(buffer, even_cuts(LONG, world.size)).wait()
    return Device.order.most_active_nbytes() - before


def test_memory_does_not_grow_with_how_far_the_host_runs_ahead(phantom):
    """Each sum reuses the memory of the previous one."""
    assert phantom(2, ahead, 8) == phantom(2, ahead, 1)
