"""The user's optimizer object: its counters, hooks and options work on all ranks."""

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelMismatch, UsageError
from tests.distributed.test_engine import batch, mlp, same_weights


class Counting(torch.optim.Optimizer):
    """Counts in its parameter group, as ScheduleFree does; in a tensor and as a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0, "total": torch.zeros(())})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


def counting_case(world, zero):
    model, plain = mlp(), mlp()
    optimizer, reference = Counting(model.parameters()), Counting(plain.parameters())
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.0005, quiet=True)
    for step in range(4):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        reference.zero_grad()
        plain(batch(step)).square().mean().backward()
        reference.step()
    group = engine.optimizer_state_dict()["param_groups"][0]
    assert (group["k"], group["total"].item()) == (4, 4)
    engine.close()
    same_weights(model, plain)


@pytest.mark.parametrize("zero", [0, 1])
def test_what_an_optimizer_counts_in_its_groups(group, zero):
    group(2)(counting_case, zero)


def hooks_case(world):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def note(name):
        # torch calls its hooks with the optimizer as the first of the arguments of step.
        return lambda face, args, kwargs: calls.append((name, face, args == (optimizer,), kwargs))

    optimizer.register_step_post_hook(note("after"))
    engine = sw.Engine(model, optimizer, zero=1, bucket_mb=0.0005, quiet=True)
    optimizer.register_step_pre_hook(note("before"))
    for step in range(2):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
    assert calls == [("before", optimizer, True, {}), ("after", optimizer, True, {})] * 2
    optimizer.register_step_pre_hook(lambda *given: given[1:])
    engine.backward(model(batch(2)).square().mean())
    with pytest.raises(UsageError, match="returned new arguments for step"):
        engine.step()
    engine.close()
    assert len(optimizer._optimizer_step_pre_hooks) == 2


def test_hooks_of_the_optimizer_are_called_once_a_step(group):
    group(2)(hooks_case)


def options_case(world, zero):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=zero, quiet=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.1 + world.rank
    engine.backward(model(batch(0)).square().mean())
    with pytest.raises(ModelMismatch, match=r"lr of group 0 of SGD is 0\.1 on rank 0 and 1\.1 on"):
        engine.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.1
    engine.backward(model(batch(0)).square().mean())
    engine.step()
    engine.close()


@pytest.mark.parametrize("zero", [0, 1])
def test_options_that_differ_between_ranks_are_named(group, zero):
    group(2)(options_case, zero)


def state_case(world, zero, loaded):
    """Only rank `loaded` has trained before: rank 0's state wins, as its parameters do."""
    model, plain = mlp(), mlp()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        if loaded == (0 if each is plain else world.rank):
            each(batch(9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = sw.Engine(model, optimizers[0], zero=zero, quiet=True)
    for step in range(2):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        optimizers[1].zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizers[1].step()
    engine.close()
    same_weights(model, plain)


@pytest.mark.parametrize(("zero", "loaded"), [(0, 0), (1, 0), (0, 1)])
def test_optimizer_state_starts_from_rank_0(group, zero, loaded):
    group(2)(state_case, zero, loaded)
