"""Unusual optimizers compared with plain PyTorch in fp64.

They keep state outside of parameters, wrap another optimizer, or have methods.
"""

import copy
import importlib
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from tests.tables import each_value

STEPS = 5


class WarmUp(optim.Optimizer):
    """Counts its steps in a list, in a number, and in an object."""

    def __init__(self, params, lr=0.3):
        super().__init__(params, {"lr": lr})
        self.seen, self.count, self.schedule = [], 0, Schedule()

    @torch.no_grad()
    def step(self, closure=None):
        self.seen.append(1)
        self.count += 1
        self.schedule.steps += 1
        warm = min(1.0, (len(self.seen) + self.count + self.schedule.steps) / 12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * warm)


class Schedule:
    def __init__(self):
        self.steps = 0


class Lookahead(optim.Optimizer):
    """A wrapper like many that are published: it shares the groups of its inner optimizer."""

    def __init__(self, base):
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups, self.slow, self.count = base, base.param_groups, {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.count % 2 == 0:
                self.slow.setdefault(p, p.clone()).lerp_(p, 0.5)
                p.copy_(self.slow[p])


class ByPosition(optim.Optimizer):
    """Keeps its momentum in a list, made for its parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.buffers = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, buffer in zip(self.param_groups[0]["params"], self.buffers, strict=True):
            buffer.mul_(0.9).add_(p.grad)
            p.sub_(buffer, alpha=self.param_groups[0]["lr"])


class SharedCount(optim.Optimizer):
    """Has state that belongs to no parameter."""

    def __init__(self, params, lr=0.3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        common = self.state["common"]
        common["count"] = common.get("count", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / common["count"])


MAKE = {
    "attributes": WarmUp,
    "wrapper": lambda params: Lookahead(optim.AdamW(params, lr=0.05)),
    "by position": ByPosition,
    "common state": SharedCount,
}


def made(make):
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    return x, model, make(model.parameters())


def plain_losses(make, steps=STEPS):
    x, model, optimizer = made(make)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def engine_losses(world, make, **settings):
    x, model, optimizer = made(make)
    engine = sw.Engine(model, optimizer, bucket_mb=0.0001, **settings)
    mine, losses = world.share(x), []
    for _ in range(STEPS):
        engine.backward((model(mine) - mine).square().mean())
        losses.append(engine.step().loss)
    engine.close()
    world.engines = 0
    return losses, optimizer


def kept(optimizer):
    return {
        name: len(value) if isinstance(value, (list, dict)) else getattr(value, "steps", value)
        for name, value in vars(optimizer).items()
        if name in ("seen", "count", "schedule", "slow")
    }


def losses_case(world, name, settings):
    losses, optimizer = engine_losses(world, MAKE[name], **settings)
    wanted, reference = plain_losses(MAKE[name])
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert kept(optimizer) == kept(reference)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", MAKE)
def test_optimizer_with_more_than_state_trains_as_in_one_process(group, size, name):
    group(size)(losses_case, name, {"zero": 0})


@pytest.mark.parametrize(("size", "zero"), [(1, 3), (2, 1), (2, 3)])
def test_copies_of_a_sharded_optimizer_count_in_attributes_once_a_step(group, size, zero):
    group(size)(losses_case, "attributes", {"zero": zero})


class Mixed(nn.Module):
    """Has parameters of three dtypes."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 6).double()
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x):
        turned = torch.view_as_real(self.narrow(x.float()) * self.turn)
        return self.wide(turned.sum(-1).double())


def dtypes_case(world):
    torch.manual_seed(0)
    x, model = torch.randn(8, 6), Mixed()
    alone = copy.deepcopy(model)
    engine = sw.Engine(model, WarmUp(model.parameters(), lr=0.05), zero=0)
    optimizer, mine = WarmUp(alone.parameters(), lr=0.05), world.share(x)
    for _ in range(STEPS):
        engine.backward(model(mine).square().mean())
        engine.step()
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_users_optimizer_updates_parameters_of_several_dtypes(group, size):
    group(size)(dtypes_case)


def refused_case(world, name):
    x, model, optimizer = made(MAKE[name])
    with pytest.raises(ModelError) as error:
        sw.Engine(model, optimizer, zero=2)
    world.engines = 0
    # It stays a plain model and optimizer.
    model(x).sum().backward()
    optimizer.step()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrapper", "Lookahead is a wrapper around another optimizer, the AdamW in"),
        ("by position", "ByPosition cannot update a float32 tensor"),
    ],
)
def test_refuses_to_shard_an_optimizer_that_cannot_be_copied(group, name, words):
    for message in group(2)(refused_case, name):
        assert words in message
        assert "--zero 0" in message


def hooks_case(world, settings):
    calls = []

    def before(optimizer, args, kwargs):
        calls.append(("before", type(optimizer).__name__, first.detach().clone()))

    def after(optimizer, args, kwargs):
        calls.append(("after", type(optimizer).__name__, first.detach().clone()))

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        x, model, optimizer = made(lambda params: optim.AdamW(params, lr=0.05))
        first = model[0].weight
        engine = sw.Engine(model, optimizer, bucket_mb=0.0001, **settings)
        mine = world.share(x)
        for _ in range(2):
            start = first.detach().clone()
            engine.backward((model(mine) - mine).square().mean())
            engine.step()
            (when, _, old), (then, _, new) = calls[-2:]
            assert (when, then) == ("before", "after")
            assert torch.equal(old, start)
            assert torch.equal(new, first)
        engine.close()
        assert [name for _, name, _ in calls] == ["AdamW"] * 4
    finally:
        for handle in handles:
            handle.remove()
        world.engines = 0


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 2)])
def test_global_step_hooks_run_once_per_step_around_the_update(group, size, zero):
    group(size)(hooks_case, {"zero": zero})


def wrapper_hooks_case(world):
    calls = []
    handle = register_optimizer_step_post_hook(lambda o, *_: calls.append(type(o).__name__))
    try:
        plain_losses(MAKE["wrapper"], steps=2)
        wanted, calls[:] = list(calls), []
        engine_losses(world, MAKE["wrapper"], zero=0)
        assert calls[: len(wanted)] == wanted == ["AdamW", "Lookahead"] * 2
    finally:
        handle.remove()


def test_global_step_hooks_run_for_the_optimizer_in_a_wrapper(group):
    group(1)(wrapper_hooks_case)


class ScheduleFree(optim.Optimizer):
    """Trains at one point and evaluates at another; `eval` and `train` move between them."""

    def __init__(self, params, lr=0.3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            c = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def _move(self, mode, weight):
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in (p for p in group["params"] if "z" in self.state[p]):
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["train_mode"] = mode


class Swapping(optim.SGD):
    """Keeps an average in its state, and swaps it with the parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("average", p.clone()).lerp_(p, 0.3)

    @torch.no_grad()
    def swap(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            before = p.data.clone()  # the step uses parameters before it uses state
            p.data.copy_(self.state[p]["average"])
            self.state[p]["average"].copy_(before)
        return len(self.state)

    eval = train = swap


METHODS = {
    "schedule-free": ScheduleFree,
    "swap": lambda params: Swapping(params, lr=0.3, momentum=0.5),
}


def trained_with_methods(model, optimizer, step, value):
    """Return losses at the training point and at the evaluation point, in turn."""
    losses = []
    for number in range(STEPS):
        optimizer.train() if number and number % 2 == 0 else None
        losses.append(step())
        if number % 2:
            optimizer.eval()
            losses.append(value())
    return losses


def plain_methods(name):
    x, model, optimizer = made(METHODS[name])

    def step():
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return trained_with_methods(
        model, optimizer, step, lambda: (model(x) - x).square().mean().item()
    )


def methods_case(world, name, settings):
    x, model, optimizer = made(METHODS[name])
    engine = sw.Engine(model, optimizer, bucket_mb=0.0001, **settings)
    mine = world.share(x)

    def step():
        engine.backward((model(mine) - mine).square().mean())
        return engine.step().loss

    def value():
        with torch.no_grad():
            return (model(x) - x).square().mean().item()

    losses = trained_with_methods(model, optimizer, step, value)
    engine.close()
    world.engines = 0
    assert losses == pytest.approx(plain_methods(name), rel=1e-10)
    assert "eval" not in vars(optimizer)


@each_value(name=METHODS, rows=[(1, 0), (2, 0), (2, 1), (1, 3), (2, 3)])
def test_methods_of_the_optimizer_use_its_whole_state(group, name, rows):
    size, zero = rows
    group(size)(methods_case, name, {"zero": zero})


def narrow_case(world, zero):
    """`eval` and `train` change 16-bit parameters and their masters."""
    _, model, optimizer = made(ScheduleFree)
    engine = sw.Engine(model, optimizer, zero=zero, precision="bf16")
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    engine.backward(model(x).float().square().mean())
    engine.step()
    key = "fp32_master_weights"
    before = engine.optimizer_state_dict()[key]
    optimizer.eval()
    moved = engine.optimizer_state_dict()
    optimizer.train()
    after = engine.optimizer_state_dict()[key]
    for number, value in before.items():
        wanted = value.lerp(moved["state"][number]["z"], 1 - 1 / 0.9)
        assert torch.allclose(moved[key][number], wanted, rtol=1e-6)
        assert torch.allclose(after[number], value, rtol=1e-5, atol=1e-7)
    engine.close()
    world.engines = 0


@pytest.mark.parametrize("zero", [0, 2])
def test_methods_of_the_optimizer_see_masters(group, zero):
    group(2)(narrow_case, zero)


def too_early_case(world):
    x, model, optimizer = made(ScheduleFree)
    engine = sw.Engine(model, optimizer, zero=2)
    optimizer.train()  # it uses no state, so it may be called at any time
    engine.backward(model(world.share(x)).square().mean())
    with pytest.raises(UsageError, match=r"ScheduleFree.eval\(\) between engine.backward and"):
        optimizer.eval()
    assert type(optimizer.param_groups[0]) is dict
    engine.step()
    optimizer.eval()
    engine.close()
    world.engines = 0


def test_refuses_method_that_uses_state_inside_a_step(group):
    group(2)(too_early_case)


class Helped(optim.Optimizer):
    """An optimizer whose step calls a public method, which uses the groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.25})
        self.fails = False

    def step(self, closure=None):
        for _ in self.param_groups:
            self.apply_all()

    @torch.no_grad()
    def apply_all(self):
        if self.fails:
            raise ValueError("no update")
        for p in (p for group in self.param_groups for p in group["params"]):
            assert p.dtype == torch.float32
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(p.grad, alpha=0.25)


def helped_case(world):
    """Train in 16 bits; a step shows masters, and the second one fails and is repeated."""
    _, model, optimizer = made(Helped)
    engine = sw.Engine(model, optimizer, zero=0, precision="bf16")
    for fails in (False, True, False):
        optimizer.fails = fails
        x = torch.ones(4, 6, dtype=torch.bfloat16)
        engine.backward(model(x).float().square().mean())
        if fails:
            with pytest.raises(ValueError, match="no update"):
                engine.step()
        else:
            engine.step()
    counts = [state["steps"] for state in engine.optimizer_state_dict()["state"].values()]
    assert counts == [2] * len(list(model.parameters()))
    engine.close()
    world.engines = 0


def test_step_of_the_optimizer_may_call_its_own_methods(group):
    group(2)(helped_case)


def reading_case(world, zero):
    """User code reads momentum, clears it, and replaces another state."""
    ends = []
    for with_engine in (False, True):
        x, model, optimizer = made(lambda params: optim.SGD(params, lr=0.1, momentum=0.9))
        engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.0001) if with_engine else None
        seen = []
        for number in range(6):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            (loss.backward(), optimizer.step()) if engine is None else (
                engine.backward(loss),
                engine.step(),
            )
            seen.append(sum(s["momentum_buffer"].sum().item() for s in optimizer.state.values()))
            if zero == 0:  # sharded parameters cannot be copied
                seen.append(len(copy.deepcopy(optimizer).state))
            if number == 2:
                for state in optimizer.state.values():
                    state["momentum_buffer"].mul_(-1)
            if number == 4:
                optimizer.state = defaultdict(dict)
        state = optimizer.state_dict()["state"]
        seen += [state[number]["momentum_buffer"].norm().item() for number in state]
        if engine is not None:
            engine.close()
            world.engines = 0
        seen += [p.norm().item() for p in model.parameters()]
        seen.append(type(optimizer.state).__name__)
        ends.append(seen)
    assert ends[1][:-1] == pytest.approx(ends[0][:-1], rel=1e-10)
    assert ends[1][-1] == ends[0][-1]


@pytest.mark.parametrize("zero", [0, 3])
def test_state_is_read_and_written_as_in_one_process(group, zero):
    group(1)(reading_case, zero)


def refused_state_case(world):
    _, model, optimizer = made(lambda params: optim.SGD(params, lr=0.1, momentum=0.9))
    engine = sw.Engine(model, optimizer, zero=1)
    for use in (len, dict, lambda state: state[model[0].weight], lambda state: state.clear()):
        with pytest.raises(UsageError, match=r"engine\.optimizer_state_dict"):
            use(optimizer.state)
    engine.close()
    world.engines = 0


def test_refuses_use_of_state_on_one_of_several_workers(group):
    group(2)(refused_state_case)


def redundancy_case(world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about torch.jit.script
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    _, model, optimizer = made(lambda params: zero(params, optimizer_class=optim.Adam, lr=0.1))
    with pytest.raises(ModelError, match=r"optim\.Adam\(params\), and --zero 1"):
        sw.Engine(model, optimizer)
    world.engines = 0


def test_refuses_optimizer_that_communicates_itself(group):
    group(2)(redundancy_case)
