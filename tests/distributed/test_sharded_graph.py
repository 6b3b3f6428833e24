"""Sharded parameters and autograd: every use of a graph matches a single process."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ParameterAccess, UsageError
from tests.distributed.sharded import (
    WIDTH,
    Block,
    FailingBackward,
    Stack,
    adamw,
    agree,
    at_rest,
    batch,
    buffers_made,
    by_turns,
    every_size,
    gathered,
    on,
    same_figures,
    same_weights,
    seeded,
    sharded,
    squares,
    train,
    train_plain,
)

# -- losses of every kind ---------------------------------------------------------------------


def two_forwards(model, x, step, rank):
    return (model(x) - model(x.flip(1)).detach()).square().mean() + model(x + 1).mean()


def gradient_penalty(model, x, step, rank):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().sum(1).mean()


def gradient_of_a_gradient(model, x, step, rank):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return bend.square().mean()


def gradient_aside(model, x, step, rank):
    """Use a gradient with respect to the inputs, without training on it."""
    y = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(y).square().sum(), y)
    return model(x + 0.1 * slope).square().mean()


def outputs_by_parts(model, x, step, rank):
    """Call the model in parts, alone and together with the loss."""
    hidden = model.blocks[0](model.stem(x))
    return model.head(model.blocks[2](hidden)).square().mean() + hidden.mean()


def saved_elsewhere(model, x, step, rank):
    """Put the user's own saved-tensor hooks around the engine's."""
    with torch.autograd.graph.save_on_cpu():
        return model(x).square().mean()


@by_turns(
    loss_of=[
        two_forwards,
        gradient_penalty,
        gradient_of_a_gradient,
        gradient_aside,
        outputs_by_parts,
        saved_elsewhere,
    ]
)
def test_losses(group, ranks, loss_of):
    on(group, ranks)(agree, Stack, loss_of)


# -- backwards --------------------------------------------------------------------------------


def several_micro_batches(world):
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        x = world.share(batch(step))
        for part in x[:1], x[1:]:
            if len(part):
                loss = model(part).square().mean()
                engine.backward(loss, weight=len(part), same_items=False)
            else:
                engine.backward(model(x).square().mean(), weight=0)
        engine.step()
        train_plain(plain, optimizer, squares, [step], size=world.size)
    same_weights(engine, model, plain)


def two_forwards_first(world):
    """Run both forward passes before both backward passes, in reverse order."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        x = world.share(batch(step))
        losses = [model(x).square().mean(), model(x * 2).mean()]
        for loss in reversed(losses):
            engine.backward(loss, weight=len(x), same_items=False)
        engine.step()
        optimizer.zero_grad()
        x = batch(step)
        (0.5 * (plain(x).square().mean() + plain(x * 2).mean())).backward()
        optimizer.step()
    same_weights(engine, model, plain)


def backward_twice(world):
    """Run two backward passes through one graph."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        x = world.share(batch(step))
        out = model(x)
        engine.backward(out.square().mean(), weight=len(x), retain_graph=True)
        engine.backward(out.mean(), weight=len(x), same_items=False)
        engine.step()
        optimizer.zero_grad()
        out = plain(batch(step))
        (0.5 * (out.square().mean() + out.mean())).backward()
        optimizer.step()
    same_weights(engine, model, plain)


class Aside(Block):
    """Keeps a tensor for the loss that it does not return."""

    def forward(self, x):
        self.aside = self.norm(x).square().sum()
        return super().forward(x)


class AsideStack(Stack):
    def __init__(self):
        super().__init__(block=Aside)


def two_forwards_aside(world):
    """Run both forward passes first, and use tensors that the blocks did not return."""
    model, plain = seeded(AsideStack), seeded(AsideStack)
    engine, optimizer = sharded(model), adamw(plain)

    def losses_of(model, x):
        for part in (x, x + 1):
            model(part)
            yield sum(block.aside for block in model.blocks) / len(x)

    for step in range(4):
        x = world.share(batch(step))
        for loss in list(losses_of(model, x)):
            engine.backward(loss, weight=len(x), same_items=False)
        engine.step()
        optimizer.zero_grad()
        (0.5 * sum(losses_of(plain, batch(step)))).backward()
        optimizer.step()
    same_weights(engine, model, plain)


BACKWARDS = [several_micro_batches, two_forwards_first, two_forwards_aside, backward_twice]


@by_turns(case=BACKWARDS)
def test_backwards(group, ranks, case):
    on(group, ranks)(case)


def step_in_between(world):
    """A graph from before a step cannot be used after it."""
    model, plain = seeded(Stack), seeded(Stack)
    engine = sharded(model)
    old = model(batch(0)).square().mean()
    train(world, engine, model, squares, [0])
    with pytest.raises(UsageError, match=r"before the last change of its parameters"):
        engine.backward(old)
    kept = model(batch(0)).square().mean()
    engine.backward(kept, retain_graph=True)
    engine.step()
    with pytest.raises(UsageError, match=r"before the last change of its parameters"):
        engine.backward(kept)
    # The failed backward leaves no state.
    mine = train(world, engine, model, squares, range(1, 3))
    optimizer = adamw(plain)
    train_plain(plain, optimizer, squares, [0], size=world.size)
    optimizer.zero_grad()
    plain(batch(0)).square().mean().backward()
    optimizer.step()
    theirs = train_plain(plain, optimizer, squares, range(1, 3), size=world.size)
    assert same_figures(mine, theirs)
    same_weights(engine, model, plain)


def frozen_step_in_between(world):
    """A frozen unit counts as changed, too, because full_parameters may have changed it."""
    model = seeded(Stack)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    engine = sharded(model)
    x = batch(0).requires_grad_()
    (slope,) = torch.autograd.grad(model.blocks[0](x).square().sum(), x, create_graph=True)
    train(world, engine, model, squares, [0])
    with pytest.raises(UsageError, match=r"before the last change of its parameters"):
        torch.autograd.grad(slope.square().sum(), x)
    train(world, engine, model, squares, [1])


@by_turns(case=[step_in_between, frozen_step_in_between])
def test_a_step_between_forward_and_backward(group, ranks, case):
    on(group, ranks)(case)


# -- values that outlive their unit -----------------------------------------------------------


class Giving(Block):
    """Returns its result and its own weight."""

    def forward(self, x):
        return super().forward(x), self.up.weight, self.down.weight.t()[:2]


class Given(Stack):
    """Uses views of the blocks' weights outside the blocks."""

    def __init__(self):
        super().__init__(block=Giving)

    def forward(self, x):
        x, views = self.stem(x), []
        for block in self.blocks:
            x, _, view = block(x)
            views.append(view)
        return self.head(x) + sum(view.square().sum() for view in views)


class GivenWhole(Given):
    """Uses the weight itself when it is already at rest."""

    def forward(self, x):
        x, weight, _ = self.blocks[0](self.stem(x))
        return self.head(x) + weight.sum()


class Keeping(torch.autograd.Function):
    """Keeps the weight in ctx, not among the tensors that autograd saves."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        assert not weight.isnan().any()
        return grad @ ctx.weight, grad.t() @ x


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Keeping.apply(x, self.linear.weight).tanh() + self.linear.bias


def custom():
    return nn.Sequential(*(Custom() for _ in range(3)))


def weight_at_rest(world):
    model = seeded(GivenWhole)
    engine = sharded(model)
    with pytest.raises(ParameterAccess, match=r"blocks\.0\..* was read \(sum\)"):
        squares(model, batch(0), 0, 0)
    assert engine is not None


def stashed_views(world):
    """A view that a hook keeps is unchanged by later gathers.

    If ranks share memory, it follows its parameter instead.
    """
    model = seeded(Stack)
    stash = {}

    def keep(module, args, output):
        number = [*model.blocks].index(module)
        stash.setdefault(number, []).append((module.up.weight.detach(), module.up.weight.clone()))

    for block in model.blocks:
        block.register_forward_hook(keep)
    engine = sharded(model)
    train(world, engine, model, squares, range(4))
    with engine.full_parameters():
        for number, views in stash.items():
            assert len(views) == 4
            for view, copy in views:
                present = model.blocks[number].up.weight
                assert torch.equal(view, copy if gathered(engine) else present)
    kept = buffers_made(engine)
    stash.clear()
    for block in model.blocks:
        block._forward_hooks.popitem(last=False)
    train(world, engine, model, squares, range(3))
    made = buffers_made(engine)
    train(world, engine, model, squares, range(3))
    assert buffers_made(engine) == made >= kept


@every_size
def test_views_of_weights_as_outputs(group, ranks):
    on(group, ranks)(agree, Given)


@every_size
def test_returned_weight_is_at_rest(group, ranks):
    on(group, ranks)(weight_at_rest)


@every_size
def test_custom_functions(group, ranks):
    on(group, ranks)(agree, custom)


@every_size
def test_stashed_views(group, ranks):
    on(group, ranks)(stashed_views)


# -- backwards that nobody announces ----------------------------------------------------------


class Opaque:
    """An output type that no code can look into."""

    def __init__(self, value):
        self.value = value


class OpaqueStack(Stack):
    """A module without visible tensors: its weight is first reached in backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2))

    def forward(self, x):
        return Opaque(nn.functional.rms_norm(super().forward(x), (2,), self.scale) * self.scale)


def opened(out):
    return out.value if isinstance(out, Opaque) else out


def two_graphs(model, x):
    """Compute the gradient of a second graph after a backward over the first one."""
    first, second = (opened(model(part)).square().mean() for part in (x, x.flip(0) + 1))
    yield first
    (slope,) = torch.autograd.grad(second, model.stem.weight, retain_graph=True)
    with torch.no_grad():
        model(x)
    (again,) = torch.autograd.grad(second, model.stem.weight)
    assert torch.equal(slope, again)
    yield slope


def slopes(world, kind):
    model, plain = seeded(kind), seeded(kind)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(3):
        mine, theirs = (two_graphs(m, batch(step)) for m in (model, plain))
        engine.backward(next(mine))
        next(theirs).backward()
        assert torch.allclose(next(mine), next(theirs))
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert all(at_rest(p) for p in model.parameters())
    same_weights(engine, model, plain)


@by_turns(kind=[Stack, OpaqueStack])
def test_gradients_of_a_second_graph(group, ranks, kind):
    on(group, ranks)(slopes, kind)


def bends_of_slopes(world):
    """Use the graph of a recorded backward pass after other forward passes."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(3):
        for m, backward in ((model, engine.backward), (plain, torch.Tensor.backward)):
            x = batch(step).requires_grad_()
            (slope,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
            with torch.no_grad():
                m(batch(9))
            m(batch(8))  # the result is not used
            (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
            backward(bend.square().mean())
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert all(at_rest(p) for p in model.parameters())
    same_weights(engine, model, plain)


def bend_after_a_failure(world):
    """Use a recorded backward pass after another one has failed."""
    model, plain = seeded(Stack), seeded(Stack)
    engine = sharded(model)
    bends = []
    for m, backward in ((model, engine.backward), (plain, torch.Tensor.backward)):
        x = batch(0).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
        with pytest.raises(KeyError):
            backward(FailingBackward.apply(m(batch(1))).sum())
        bends += torch.autograd.grad(slope.square().sum(), x)
    assert torch.allclose(*bends)


@by_turns(case=[bends_of_slopes, bend_after_a_failure])
def test_graphs_over_a_recorded_backward(group, ranks, case):
    on(group, ranks)(case)


# -- hooks around a forward -------------------------------------------------------------------


class Turned(nn.Module):
    """Autograd saves conjugated weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.turn = nn.Parameter(torch.rand(WIDTH, dtype=torch.complex128))

    def forward(self, x):
        return (self.linear(x) * self.turn.conj()).conj()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Turned() for _ in range(3))

    def forward(self, x):
        x = x.to(torch.complex128)
        for block in self.blocks:
            x = block(x)
        return x.abs()


def half_moved_by_others(model, x, step, rank):
    """Let the user's own hooks move saved tensors in one of two forward passes."""
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().mean()
    return loss + model(x + 1).square().mean()


@every_size
def test_saved_tensors_moved_by_other_hooks(group, ranks):
    on(group, ranks)(agree, Complex, half_moved_by_others)


# -- several at once --------------------------------------------------------------------------


def pair():
    torch.manual_seed(0)
    a, b = Stack(2), Stack(2)
    b.stem = nn.Linear(2, WIDTH)
    return a.double(), b.double()


def features_matched(world):
    """A generator learns from a value inside another engine's unit.

    Its backward reaches that unit through no output.
    """
    (g, d), (pg, pd) = pair(), pair()
    eg, ed = sharded(g), sharded(d)
    og, od = adamw(pg), adamw(pd)
    features = {}
    for model in (d, pd):
        model.blocks[1].norm.register_forward_hook(
            lambda module, args, output, model=model: features.update({model: output})
        )

    def inside(critic, made):
        critic(made)
        return features[critic].square().mean()

    for step in range(4):
        x = world.share(batch(step))
        ed.backward(d(g(x).detach()).square().mean(), weight=len(x))
        ed.step()
        eg.backward(inside(d, g(x)), weight=len(x))
        eg.step()
        x = batch(step)
        od.zero_grad()
        pd(pg(x).detach()).square().mean().backward()
        od.step()
        og.zero_grad()
        inside(pd, pg(x)).backward()
        og.step()
    same_weights(eg, g, pg)
    same_weights(ed, d, pd)


def models_together(world):
    """One engine for two models, whose losses reach one or both."""
    (a, b), (pa, pb) = pair(), pair()
    engine = sw.Engine([a, b], adamw(nn.ModuleList([a, b])), zero=3, bucket_mb=0.001)
    optimizer = adamw(nn.ModuleList([pa, pb]))
    for step in range(5):
        x = world.share(batch(step))
        out = a(x)
        engine.backward(b(out.detach() if step % 2 == 0 else out).square().mean(), weight=len(x))
        engine.step()
        optimizer.zero_grad()
        out = pa(batch(step))
        pb(out.detach() if step % 2 == 0 else out).square().mean().backward()
        optimizer.step()
    same_weights(engine, a, pa)
    same_weights(engine, b, pb)


def adversaries(world):
    """Two engines; the loss of each passes through the other's model."""
    (g, d), (pg, pd) = pair(), pair()
    eg, ed = sharded(g), sharded(d)
    og, od = adamw(pg), adamw(pd)
    for step in range(4):
        x = world.share(batch(step))
        rows = len(x)
        ed.backward((d(x[:, :2]) - d(g(x).detach())).square().mean(), weight=rows)
        ed.step()
        eg.backward(d(g(x)).square().mean(), weight=rows)
        eg.step()
        x = batch(step)
        od.zero_grad()
        (pd(x[:, :2]) - pd(pg(x).detach())).square().mean().backward()
        od.step()
        og.zero_grad()
        pd(pg(x)).square().mean().backward()
        og.step()
    same_weights(eg, g, pg)
    same_weights(ed, d, pd)


@by_turns(case=[models_together, adversaries, features_matched])
def test_several_models_and_engines(group, ranks, case):
    on(group, ranks)(case)
