"""torch's optimizers compared with plain PyTorch in fp64: every class and its options.

Users change groups, parameters and state during training. Users' own optimizers are here, too.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn, optim

import shardwise as sw
from shardwise.errors import ModelError
from tests.unit.test_optimizer_trial import Own

ROWS = [0, 1, 2, 3]
STEPS = 7

SGD = partial(optim.SGD, lr=0.1)
MOMENTUM = partial(SGD, momentum=0.9)
ADAM = partial(optim.Adam, lr=1e-2)
RMSPROP = partial(optim.RMSprop, lr=1e-3)

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": SGD,
    "sgd momentum": partial(MOMENTUM, weight_decay=1e-2),
    "sgd dampening": partial(MOMENTUM, dampening=0.3),
    "sgd nesterov": partial(MOMENTUM, nesterov=True, maximize=True, lr=1e-3),
    "sgd fused": partial(MOMENTUM, fused=True),
    "sgd foreach": partial(MOMENTUM, foreach=True),
    "sgd tensor lr": lambda params: MOMENTUM(params, lr=torch.tensor(0.1)),
    "adam": partial(ADAM, weight_decay=1e-2),
    "adam amsgrad": partial(ADAM, amsgrad=True),
    "adam maximize": partial(ADAM, maximize=True),
    "adam fused": partial(ADAM, fused=True),
    "adam foreach": partial(ADAM, foreach=True),
    "adam tensor lr": lambda params: ADAM(params, lr=torch.tensor(1e-2)),
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw amsgrad": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2, lr_decay=1e-2),
    "adagrad begun": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adagrad fused": partial(optim.Adagrad, lr=1e-2, fused=True),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=1e-2),
    "nadam": partial(optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=1e-2),
    "radam": partial(optim.RAdam, lr=1e-2),
    "asgd": partial(optim.ASGD, lr=1e-2, t0=3, lambd=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "rmsprop": RMSPROP,
    "rmsprop centered": partial(RMSPROP, centered=True, momentum=0.9),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
}


def _adagrad_grows():
    """Whether torch's own Adagrad trains a group that is added later; in 2.9 it has no state."""
    first, added = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = optim.Adagrad([first])
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


ADAGRAD_GROWS = _adagrad_grows()


class Net(nn.Module):
    """A model whose layers run as each forward says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.out = nn.Linear(5, 3)

    def forward(self, x, layers=(0, 1, 2, 3)):
        for number in layers:
            x = self.layers[number](x).tanh()
        return self.out(x)


def late(step, net, optimizer):
    return (0, 2) if step < 3 else (0, 1, 2, 3)


def by_turns(step, net, optimizer):
    return [(0, 1, 2), (0, 2), (3,)][step % 3]


def unfrozen(step, net, optimizer):
    for number in (1, 2):
        net.layers[number].requires_grad_(step >= 3)
    return (0, 1, 2, 3)


def frozen_and_back(step, net, optimizer):
    net.layers[1].requires_grad_(not 2 <= step < 4)
    net.layers[3].requires_grad_(step >= 4)
    return (0, 1, 2, 3)


def new_group(step, net, optimizer):
    net.layers[1].requires_grad_(step >= 3)
    if step == 3:
        optimizer.add_param_group({"params": list(net.layers[1].parameters()), "lr": 5e-3})
    return (0, 1, 2, 3)


def edited(step, net, optimizer):
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = group["lr"] * (0.7 + 0.1 * number)
        if step > 2 and (group.get("momentum") or isinstance(optimizer, optim.SGD)):
            group["momentum"] = 0.8
        if step > 2 and "betas" in group:
            group["betas"] = (0.8, 0.9)
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * step
    return (0, 1, 2, 3)


STORIES = [late, by_turns, unfrozen, frozen_and_back, new_group, edited]


def members(net, story):
    """Return the parameter groups of the optimizer: matrices, and vectors."""
    own = {id(p) for p in net.layers[1].parameters()} if story is new_group else set()
    params = [p for p in net.parameters() if id(p) not in own]
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2]},
    ]


def made(name, story):
    torch.manual_seed(3)
    net = Net().double()
    return net, OPTIMIZERS[name](members(net, story))


def batch(step):
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randn(6, 5, generator=draw, dtype=torch.float64)


def plain_steps(net, optimizer, story, steps):
    for step in steps:
        layers = story(step, net, optimizer)
        optimizer.zero_grad()
        net(batch(step), layers).square().mean().backward()
        optimizer.step()


def engine_steps(world, net, optimizer, story, steps, zero):
    engine = None
    for step in steps:
        layers = story(step, net, optimizer)
        if engine is None:
            engine = sw.Engine(net, optimizer, zero=zero, bucket_mb=0.0005)
        engine.backward(net(world.share(batch(step)), layers).square().mean())
        engine.step()
    engine.close()
    world.engines = 0


def apart(net, optimizer, plain, reference):
    """Return the relative difference of weights and optimizer state."""
    worst = 0.0
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        a, b = optimizer.state.get(mine, {}), reference.state.get(theirs, {})
        assert set(a) == set(b)
        for x, y in [(mine, theirs), *((a[key], b[key]) for key in a)]:
            x, y = torch.as_tensor(x).detach().double(), torch.as_tensor(y).detach().double()
            worst = max(worst, float((x - y).abs().max() / (y.abs().max() + 1e-12)))
    return worst


def story_case(world, zero, story, before, until, names=tuple(OPTIMIZERS)):
    """Compare an optimizer with plain PyTorch: its own steps `before` the engine, then the engine.

    The engine ends after `until`, and another one follows. Returns the differences beyond rounding.
    """
    far = {}
    for name in names:
        if story is new_group and name.startswith("adagrad") and not ADAGRAD_GROWS:
            continue
        net, optimizer = made(name, story)
        plain_steps(net, optimizer, story, range(before))
        engine_steps(world, net, optimizer, story, range(before, until), zero)
        if until < STEPS:
            engine_steps(world, net, optimizer, story, range(until, STEPS), zero)
        plain, reference = made(name, story)
        for group in reference.param_groups:
            group["fused"] = False  # torch's own SGD cannot start late there
        plain_steps(plain, reference, story, range(STEPS))
        if (distance := apart(net, optimizer, plain, reference)) > 1e-8:
            far[name] = distance
    return far


FEW = [
    (0, late, 0, STEPS),
    (1, unfrozen, 2, 5),
    (2, by_turns, 2, STEPS),
    (3, frozen_and_back, 0, 4),
    (2, new_group, 1, 5),
    (3, edited, 2, 6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "story", "before", "until"), FEW)
def test_as_plain_pytorch(group, zero, story, before, until):
    """Each optimizer runs two of the stories, and each story a third of the optimizers."""
    names = list(OPTIMIZERS)[STORIES.index(story) % 3 :: 3]
    assert group(2)(story_case, zero, story, before, until, names, limit=120)[0] == {}


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zero", ROWS)
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("before", "until"), [(0, STEPS), (2, 5)])
def test_as_plain_pytorch_at_all_sizes(group, size, zero, story, before, until):
    assert group(size)(story_case, zero, story, before, until, limit=300)[0] == {}


def after_a_warm_up(p, g, step):
    return g if step <= 3 else g * float(p.norm() / g.norm())


def at_a_value_that_no_trial_has(p, g, step):
    return g * float(p.norm()) if abs(float(p.abs().max()) - 0.7) < 0.3 else g


def own_case(world, zero, looks):
    torch.manual_seed(3)
    net, plain = Net().double(), Net().double()
    plain.load_state_dict(net.state_dict())
    optimizer, reference = Own(net.parameters(), looks), Own(plain.parameters(), looks)
    engine_steps(world, net, optimizer, late, range(STEPS), zero)
    plain_steps(plain, reference, late, range(STEPS))
    return apart(net, optimizer, plain, reference)


@pytest.mark.parametrize(
    ("size", "zero", "looks"),
    [
        (1, 0, after_a_warm_up),
        (2, 2, after_a_warm_up),
        (1, 3, at_a_value_that_no_trial_has),
        (2, 0, at_a_value_that_no_trial_has),
    ],
)
def test_tensors_stay_whole_if_only_a_trial_allows_cuts(group, size, zero, looks):
    assert max(group(size)(own_case, zero, looks)) < 1e-8


class Averaging(optim.Optimizer):
    """A user's optimizer: it uses a mean of gradients, and counts in a tensor of one dim."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state |= {"mean": torch.zeros_like(p), "count": torch.zeros(1)}
                    state["count"] += 1
                    state["mean"].lerp_(p.grad, 1 / float(state["count"]))
                    p.sub_(group["lr"] * state["mean"])


def resumed_case(world, zero, folder, first, last):
    torch.manual_seed(3)
    net, plain = Net().double(), Net().double()
    plain.load_state_dict(net.state_dict())
    optimizer, reference = Averaging(net.parameters()), Averaging(plain.parameters())
    frozen_and_back(first, net, optimizer)
    engine = sw.Engine(net, optimizer, zero=zero, bucket_mb=0.0005)
    assert engine.resume(folder) == first
    for step in range(first, last):
        frozen_and_back(step, net, optimizer)
        engine.backward(net(world.share(batch(step))).square().mean())
        engine.step()
    engine.save(folder)
    engine.close()
    world.engines = 0
    plain_steps(plain, reference, frozen_and_back, range(last))
    return apart(net, optimizer, plain, reference)


def test_users_own_optimizer_at_other_sizes(group, tmp_path):
    case, folder = resumed_case, str(tmp_path)
    assert max(group(1)(case, 0, folder, 0, 3)) < 1e-8
    assert max(group(2)(case, 2, folder, 3, 5)) < 1e-8
    assert max(group(3)(case, 0, folder, 5, 6)) < 1e-8
    assert max(group(2)(case, 3, folder, 6, 7)) < 1e-8


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))
        self.out = nn.Linear(5, 3).double()

    def forward(self, x, layers=()):
        return self.out((x.to(torch.complex128) @ self.weight).abs())


def thawed(step, net, optimizer):
    net.out.requires_grad_(step >= 3)


def complex_case(world, zero, make):
    net, plain = Complex(), Complex()
    optimizer, reference = make(net.parameters()), make(plain.parameters())
    engine_steps(world, net, optimizer, thawed, range(STEPS), zero)
    plain_steps(plain, reference, thawed, range(STEPS))
    assert torch.allclose(net.weight, plain.weight, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["adam", "sgd momentum", "adagrad begun"])
def test_complex_parameters_with_state(group, name):
    group(2)(complex_case, 1, OPTIMIZERS[name])


def turned_on(step, net, optimizer):
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 * (step >= 3)
    return (0, 1, 2, 3)


def momentum_case(world, zero):
    """Older versions of torch saved such a state of an SGD without momentum."""
    net, optimizer = made("sgd", late)
    for p in net.parameters():
        optimizer.state[p] = {"momentum_buffer": None}
    engine_steps(world, net, optimizer, turned_on, range(5), zero)
    engine_steps(world, net, optimizer, turned_on, range(5, STEPS), zero)
    plain, reference = made("sgd", late)
    plain_steps(plain, reference, turned_on, range(STEPS))
    return apart(net, optimizer, plain, reference)


@pytest.mark.parametrize("zero", [0, 2])
def test_momentum_turned_on_later(group, zero):
    assert max(group(2)(momentum_case, zero)) < 1e-8


def frozen_average_case(world, zero, folder, first, last, frozen):
    """Train steps `first` to `last` of a run that freezes layers; return the last averages.

    Layer 1 is frozen from step 2 to 5, and layer 3 until step 4. The `frozen` layers are frozen
    before the engine is made.
    """
    torch.manual_seed(3)
    net, averages, decay = Net().double(), None, 0.9
    plain = Net().double()
    plain.load_state_dict(net.state_dict())
    mine, theirs = (MOMENTUM(module.parameters()) for module in (net, plain))

    def story(step, module):
        module.layers[1].requires_grad_(not 2 <= step < 6)
        module.layers[3].requires_grad_(step >= 4)

    story(first if frozen else 1, net)
    engine = sw.Engine(net, mine, zero=zero, bucket_mb=0.0005, ema_decay=decay)
    engine.resume(folder)
    averages = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for step in range(last):
        story(step, plain)
        theirs.zero_grad()
        plain(batch(step)).square().mean().backward()
        theirs.step()
        for name, p in plain.named_parameters():
            averages[name].lerp_(p.detach(), 1 - decay)
        if step >= first:
            story(step, net)
            engine.backward(net(world.share(batch(step))).square().mean())
            engine.step()
    with engine.ema(), engine.full_parameters():
        for name, p in net.named_parameters():
            assert torch.allclose(p, averages[name], rtol=1e-8, atol=1e-12), name
    engine.save(folder)
    engine.close()
    world.engines = 0


@pytest.mark.parametrize(("zero", "other"), [(0, 3), (3, 1)])
def test_frozen_parameters_keep_their_average(group, tmp_path, zero, other):
    folder = str(tmp_path)
    group(2)(frozen_average_case, zero, folder, 0, 5, False)
    group(1)(frozen_average_case, other, folder, 5, 8, True)


def refused_case(world):
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(ModelError, match=r"SparseAdam takes sparse gradients.*sparse=False"):
        sw.Engine(table, optim.SparseAdam(list(table.parameters())))

    class ByName(Own):
        def step(self, closure=None):
            raise KeyError("weight")

    with pytest.raises(ModelError, match=r"ByName cannot update.*KeyError: 'weight'"):
        sw.Engine(table, ByName(table.parameters(), None), zero=1)
    world.engines = 0


def test_refuses_optimizers_that_no_trial_can_run(group):
    group(1)(refused_case)
