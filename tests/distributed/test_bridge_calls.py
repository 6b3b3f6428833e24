"""Accelerate calls that have no effect here, and objects that another Accelerator took over."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UsageError
from tests.distributed.test_accelerate import data, fresh, net, ours, ranks, split, stock

accelerate = pytest.importorskip("accelerate", reason="the accelerate package is not there")


def idle(accelerator):
    """Step and clip without a backward pass. Return the results and the final weights."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = data().tensors
    seen = []
    for train in (False, True, False):
        clip = accelerator.clip_grad_norm_
        optimizer.zero_grad()
        if train:
            seen.append(clip(model.parameters(), 0.01).item())  # of nothing: no limit is left
            accelerator.backward((model(x) - y).square().mean())
        seen += [clip(model.parameters(), 0.1, norm).item() for norm in (2.0, float("inf"))]
        optimizer.step()
        scheduler.step()
        seen += [float(optimizer.step_was_skipped), *scheduler.get_last_lr()]
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return seen, state


def idle_case(world, zero):
    expected, weights = idle(stock(dataloader_config=split()))
    seen, state = idle(ours(zero=zero, dataloader_config=split()))
    assert seen == pytest.approx(expected, rel=1e-5)
    if world.is_main:
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_step_without_gradients_does_nothing(group):
    for zero in (0, 3):
        ranks(group, 2)(idle_case, zero)


def again_case(world):
    """Stock Accelerate would update twice from the same gradients, which are cleared here."""
    accelerator, model = ours(), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data().tensors
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    with pytest.raises(UsageError, match=r"SGD.step\(\) was called again without a backward"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"clip_grad_norm_\(\) was called again without a back"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    optimizer.step()
    accelerator.free_memory()


def test_a_second_step_from_the_same_gradients_is_refused(group):
    ranks(group, 2)(again_case)


class Recomputed(nn.Module):
    """A model whose parameters the graph does not show."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.inner, self.reentrant = net(), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputed_case(world, reentrant):
    accelerator = ours(zero=2)
    first, second = Recomputed(reentrant=reentrant), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    x, _ = data().tensors
    loss = (first(x) + second(x)).square().mean()
    if reentrant:
        with pytest.raises(UsageError, match="use_reentrant=False"):
            accelerator.backward(loss)
    else:
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        assert [engine.steps for engine in accelerator.engines] == [1, 1]
    accelerator.free_memory()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_reentrant_checkpoint_hides_is_refused(group, reentrant):
    ranks(group, 2)(recomputed_case, reentrant)


def whole_case(world, folder):
    """Call save_model inside a full_parameters block, which must remain gathered."""
    accelerator, model, plain = ours(zero=3), net(), net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.full_parameters(model):
        accelerator.save_model(model, folder)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
    accelerator.free_memory()


def test_models_are_saved_inside_a_block_of_whole_weights(group, tmp_path):
    ranks(group, 2)(whole_case, str(tmp_path))


def test_models_in_parts_are_refused_before_a_run_is_joined(monkeypatch):
    """The error is specific, although the run's own check would complain about seeds."""
    from shardwise.bridging.joining import join

    fresh()
    monkeypatch.setenv("SHARDWISE_PIPELINE", "2")
    with pytest.raises(UsageError, match="Lightning cannot be combined with --pipeline 2: it"):
        join({}, "Lightning")


def no_sync_case(world, zero):
    """Use no_sync with sharded gradients, which other libraries reject.

    Here it only saves messages.
    """
    x, y = data().tensors
    accelerator, model, plain = ours(zero=zero), net(), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, size = world.rank, world.size
    for first in (0, 16):
        part = slice(first + rank * 8 // size, first + (rank + 1) * 8 // size)
        other = slice(first + 8 + rank * 8 // size, first + 8 + (rank + 1) * 8 // size)
        with accelerator.no_sync(model):
            accelerator.backward((model(x[part]) - y[part]).square().mean())
        accelerator.backward((model(x[other]) - y[other]).square().mean())
        optimizer.step()
        for begin in (first, first + 8):
            part = slice(begin, begin + 8)
            (plain(x[part]) - y[part]).square().mean().backward()
        alone.step()
        alone.zero_grad()
    with accelerator.full_parameters(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    accelerator.free_memory()


def test_no_sync_in_every_row(group):
    for zero in range(4):
        ranks(group, 2)(no_sync_case, zero)
