"""Sharded parameters under autocast: no cast of a weight is kept from forward to backward."""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.states.parameters import saved_references
from tests.distributed.sharded import by_turns, every_size, on, sharded

full = pytest.mark.full

WIDE, ROWS, BLOCKS = 64, 6, 3


class Wide(nn.Module):
    """Layers that save only their input for backward; the first one is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Convolved(nn.Module):
    """A convolution with channels-last weights, and a manually split layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2)
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        x = x.view(-1, 4, 4, 4)
        for block in self.blocks:
            x = block(x)
        up, down = self.head.weight.chunk(2)
        return torch.cat([x.flatten(1) @ up.T, nn.functional.linear(x.flatten(1), down)], 1)


def inputs(step, rows=ROWS):
    return torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(step))


def bytes_kept(world, dtype):
    """Return the tensors that autograd saves in a forward, except references to parameters."""
    torch.manual_seed(3)
    model = Wide()
    engine = sharded(model, precision=dtype)
    for step in range(2):
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(inputs(step))
        engine.backward(out.square().mean(), weight=ROWS)
        engine.step()
    engine.close()
    return sum(storage.nbytes() for storage in kept.values())


@every_size
@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-mixed", 2)])
def test_only_activations_are_kept(group, ranks, precision, width):
    """Each layer's input, in the dtype of its computation."""
    layers = BLOCKS + 2
    activations = layers * ROWS * WIDE * width
    for kept in on(group, ranks)(bytes_kept, precision):
        assert kept == activations


class Once(Wide):
    """A model that calls each block once."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CastWeights(TorchDispatchMode):
    """Records all weights that are cast to 16 bits inside the block, while their memory exists."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        is_cast = func == torch.ops.aten._to_copy.default and made.dtype == torch.bfloat16
        if is_cast and made.shape == (WIDE, WIDE):
            self.storages.append(StorageWeakRef(made.untyped_storage()))
        return made

    def alive(self):
        return sum(not storage.expired() for storage in self.storages)


def casts_at_once(world, make):
    """Return the maximum number of casts of weights when a forward enters a layer.

    By training step, and in an evaluation.
    """
    torch.manual_seed(3)
    model = make()
    engine = sharded(model, precision="bf16-mixed")
    most = []
    for layer in [*model.blocks, model.head]:
        layer.register_forward_pre_hook(lambda *_: most.append(max(most.pop(), casts.alive())))
    for step in range(4):
        most.append(0)
        with CastWeights() as casts, torch.set_grad_enabled(step < 3):
            loss = model(inputs(step)).square().mean()
        if step < 3:
            engine.backward(loss, weight=ROWS)
            engine.step()
    engine.close()
    return most


@every_size
def test_forward_keeps_the_casts_of_one_unit(group, ranks):
    """From the second step on: the first one shows that no weight is used again later."""
    for most in on(group, ranks)(casts_at_once, Once):
        assert most == [BLOCKS, 0, 0, 0]


def test_casts_that_are_used_again_are_kept(group):
    """If it were cast twice, the gradients of a weight would be added in another precision."""
    for most in group(2, transport="gloo")(casts_at_once, Wide):
        assert most == [BLOCKS, BLOCKS, BLOCKS, 0]


def trained(world, make, precision):
    torch.manual_seed(3)
    model = make()
    engine = sharded(model, precision=precision)
    told = []
    for step in range(3):
        for part in range(2):
            x = world.share(inputs(10 * step + part, 7))
            engine.backward(model(x).square().mean(), weight=len(x))
        told.append(engine.step().loss)
    with engine.full_parameters():
        found = [value.clone() for value in model.state_dict().values()]
    engine.close()
    return told, found


def with_the_bits_of_kept_casts(world, make, precision):
    """A repeated cast is identical to the cast that would otherwise have been stored."""
    losses, values = trained(world, make, precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_references, "cast_parameter", lambda cast: None)
        patch.setattr(saved_references.CastCache, "leave_unit", lambda self, number: None)
        wanted, kept = trained(world, make, precision)
    assert losses == wanted
    for a, b in zip(values, kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("fp16-mixed", marks=full)])
@by_turns(make=[Wide, Once, Convolved])
def test_repeated_cast_is_equal(group, ranks, make, precision):
    on(group, ranks)(with_the_bits_of_kept_casts, make, precision)


class Adapter(nn.Module):
    """A frozen layer next to a trained one."""

    def __init__(self):
        super().__init__()
        self.base, self.own = nn.Linear(WIDE, WIDE).requires_grad_(False), nn.Linear(WIDE, WIDE)

    def forward(self, x):
        return torch.relu(self.base(x) + self.own(x))


class Adapted(nn.Module):
    """Half of its weights are frozen, as usual with adapters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Compiled(Once):
    """Compiles each block, so that autocast runs inside the compiled graph."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def by_precision():
    return {"precision": "bf16-mixed"}, contextlib.nullcontext, contextlib.nullcontext


def users_own():
    """Autocast around forward only, as torch's documentation recommends."""
    return {}, functools.partial(torch.autocast, "cpu", torch.bfloat16), contextlib.nullcontext


def around_ours():
    """Use the engine's autocast inside the user's."""
    return {"precision": "bf16-mixed"}, *users_own()[1:]


def users_own_without_a_cache():
    kept = functools.partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    return {}, kept, contextlib.nullcontext


def around_steps():
    """Use autocast around the entire loop, where its cache is outdated after each step."""
    return {}, contextlib.nullcontext, functools.partial(torch.autocast, "cpu", torch.bfloat16)


def by_row(world, make, how, zero):
    """Return losses and values of a training under a user's or the engine's autocast."""
    settings, forward, loop = how()
    torch.manual_seed(3)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine = sw.Engine(model, optimizer, zero=zero, quiet=True, **settings)
    losses = []
    with loop():
        for step in range(4):
            for part in range(2):
                x = world.share(inputs(10 * step + part, 7))
                with forward():
                    loss = model(x).float().square().mean()
                engine.backward(loss, weight=len(x), last=part == 1)
            losses.append(engine.step().loss)
    with engine.full_parameters():
        values = [value.clone() for value in model.state_dict().values()]
    engine.close()
    return losses, values


def same_in_each_row(world, make, how):
    """Placements with replicated and with sharded parameters give identical bits."""
    with warnings.catch_warnings():
        if make is Compiled:
            warnings.simplefilter("ignore")  # torch's compiler warns about its own code
        wanted, kept = by_row(world, make, how, 2)
        losses, values = by_row(world, make, how, 3)
    assert losses == wanted
    assert all(map(torch.equal, values, kept))
    assert len(set(losses)) == len(losses)


HOW = [by_precision, users_own, around_ours, users_own_without_a_cache, around_steps]
OFTEN = [(Adapted, by_precision), (Compiled, by_precision), (Wide, around_steps)]


@pytest.mark.parametrize(
    ("make", "how"),
    [
        pytest.param(make, how, marks=() if (make, how) in OFTEN else full)
        for make in (Wide, Once, Convolved, Adapted, Compiled)
        for how in HOW
    ],
)
def test_sharded_and_whole_parameters_have_the_same_bits_under_any_cast(group, make, how):
    group(2, transport="gloo")(same_in_each_row, make, how)
