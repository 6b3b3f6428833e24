"""Tensors split by tokens across a replica: every operation matches the full tensor."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.tensor.region_collectives import reduce_scatter_to_sequence
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.sequence_parallel import SequenceShard, gather_nested, token_sharding
from tests.tables import each_value

ROWS, LENGTH, WIDTH = 2, 5, 6
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).tanh()))


class Model(nn.Module):
    def __init__(self, count=3, norm=nn.LayerNorm):
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def built(norm=nn.LayerNorm, plan=PLAN, count=3, **settings):
    torch.manual_seed(0)
    model = Model(count, norm).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sequence_parallel": True} | settings
    return model, sw.Engine(model, optimizer, tensor_plan=plan, **settings)


def some(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.double)


# -- operations ----------------------------------------------------------------------------------

WEIGHT, OTHER = some(WIDTH, seed=1), some(ROWS, LENGTH, WIDTH, seed=2)

OPERATIONS = {
    "x + 1": (lambda x, w, o: x + 1, True),
    "2 / x": (lambda x, w, o: 2 / (x + 9), True),
    "2 ** x": (lambda x, w, o: 2**x, True),
    "x ** 2": (lambda x, w, o: x**2, True),
    "a bias": (lambda x, w, o: x + w, True),
    "a scale first": (lambda x, w, o: w * x, True),
    "a replicated tensor": (lambda x, w, o: o * x, True),
    "a replicated tensor of fewer dimensions": (lambda x, w, o: x + o[0], True),
    "a column of a replicated tensor": (lambda x, w, o: x * o[..., :1], True),
    "one row for all tokens": (lambda x, w, o: x - o[:, :1], True),
    "itself": (lambda x, w, o: x * x.sigmoid(), True),
    "where": (lambda x, w, o: torch.where(o > 0, x, w), True),
    "in place": (lambda x, w, o: (x * 1).add_(w).mul_(o), True),
    "layer norm": (lambda x, w, o: F.layer_norm(x, (WIDTH,), w, w), True),
    "rms norm": (lambda x, w, o: F.rms_norm(x, (WIDTH,), w), True),
    "a norm by hand": (
        lambda x, w, o: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        True,
    ),
    "another dtype": (lambda x, w, o: x.float().to(torch.double), True),
    "the mean": (lambda x, w, o: x.mean(), False),
    "over tokens": (lambda x, w, o: x.softmax(1), False),
    "a norm over tokens": (lambda x, w, o: F.layer_norm(x, (LENGTH, WIDTH)), False),
    "one token": (lambda x, w, o: x[:, 2], False),
    "another shape": (lambda x, w, o: x.reshape(-1, WIDTH) @ w, False),
    "in place, into a replicated tensor": (lambda x, w, o: (o * 1).add_(x), False),
    "concatenated to a replicated tensor": (lambda x, w, o: torch.cat([o, x], 1), False),
    "a shift": (lambda x, w, o: x + x.roll(1, 1), True),
    "more dimensions": (lambda x, w, o: x + o[:, :1, :1, None], True),
    "the transpose": (lambda x, w, o: x.transpose(1, 2).cumsum(-1), False),
    "a token written": (lambda x, w, o: written(x * 1, w), True),
    "a view written": (lambda x, w, o: viewed(x * 1, w), True),
    "a view taken before": (lambda x, w, o: taken_before(x * 1, o), False),
    "an activation in place": (lambda x, w, o: F.leaky_relu(x * 1, 0.1, inplace=True) * o, True),
    "the out argument": (lambda x, w, o: into(x * 1, w), True),
    "to the same dtype": (lambda x, w, o: o.float().to(x) * w.type_as(x) + x.mean(), False),
    "a hook": (lambda x, w, o: hooked(x * 1) * o, True),
}


def written(x, w):
    x[:, 1] = w
    x[..., :2] *= 3
    return x + 1


def viewed(x, w):
    x.view(-1, WIDTH).add_(w)
    return x * w


def taken_before(x, o):
    flat = x.flatten(0, 1)
    x += 1
    x.masked_fill_(o > 1, 0.5)
    return flat * o.flatten(0, 1)


def into(x, w):
    with torch.no_grad():
        torch.add(x, 1, out=x)
    return x * w


def hooked(x):
    x.register_hook(lambda grad: grad / grad.norm())
    return x


def done(world, name):
    """Return value and gradients of an operation, on split tokens and on the full tensor."""
    operation, stays = OPERATIONS[name]
    draws = ReplicaRandomness(world.tensor.rank, torch.device("cpu"))
    told = []
    for by_tokens in (True, False):
        x, w, o = (
            value.clone().requires_grad_() for value in (some(ROWS, LENGTH, WIDTH), WEIGHT, OTHER)
        )
        value = x
        if by_tokens:
            parts = token_sharding(x, world.tensor)
            share = reduce_scatter_to_sequence(x / world.size, world.tensor, parts)
            value = SequenceShard(share, world.tensor, draws, parts)
            assert value.shape == x.shape
        found = operation(value, w, o)
        assert isinstance(found, SequenceShard) == (by_tokens and stays)
        found = gather_nested(found)
        (found * some(*found.shape, seed=3)).sum().backward()
        # `x` was divided, and each rank has its part of the gradient.
        grad = x.grad * (world.size if by_tokens else 1)
        told.append([found.detach(), grad, w.grad, o.grad])
    return told


@each_value(name=OPERATIONS, size=[2, 3])
def test_operation_equals_the_whole(group, name, size):
    for ours, wanted in group(size, tensor=size)(done, name):
        for one, other in zip(ours, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)


# -- models --------------------------------------------------------------------------------------


def kept(world, by_tokens):
    """Return the number of tokens that the norms see, and the bytes that forward keeps."""
    model, engine = built(sequence_parallel=by_tokens)
    seen, bytes_of = [], {}
    model.blocks[2].norm.register_forward_hook(
        lambda module, args, out: seen.append((args[0].local if by_tokens else args[0]).shape[1])
    )

    def pack(tensor):
        storage = tensor.untyped_storage()
        bytes_of[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = some(ROWS, LENGTH, WIDTH)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert type(out) is torch.Tensor
    engine.backward(out.square().mean())
    engine.step()
    engine.close()
    assert not model._forward_hooks
    return seen[0], sum(bytes_of.values())


def test_norms_run_on_a_ranks_tokens_and_save_less(group):
    whole, parts = (group(2, tensor=2)(kept, by_tokens) for by_tokens in (False, True))
    assert [tokens for tokens, _ in whole] == [LENGTH, LENGTH]
    assert [tokens for tokens, _ in parts] == [3, 2]
    assert all(less < more for (_, less), (_, more) in zip(parts, whole, strict=True))


def dropped(world):
    """Return ones after dropout: between split layers, and replicated."""
    model, engine = built()
    seen = []
    for block in model.blocks:
        block.drop.p = 0.5
        block.down.register_forward_hook(lambda module, args, out: out * 0 + 1)
        block.drop.register_forward_hook(lambda module, args, out: seen.append(out.full() != 0))
    whole = nn.Dropout(0.5)
    model(some(ROWS, 4, WIDTH))
    after = whole(torch.ones(64)) != 0
    engine.close()
    return torch.stack(seen), after


def test_dropout_differs_between_ranks_tokens(group):
    (first, after), (second, other) = group(2, tensor=2)(dropped)
    assert torch.equal(first, second)  # the gathered tensor is the same object
    assert torch.equal(after, other)  # all ranks continue with the same numbers
    assert not torch.equal(first[:, :, :2], first[:, :, 2:])
    assert not torch.equal(first[0], first[1])


def reads(world):
    model, engine = built(count=1)
    model.eval()
    with torch.no_grad():
        one = model(some(ROWS, 1, WIDTH))  # fewer tokens than ranks, so all ranks have them
        row = model(some(WIDTH))
        five = model(some(ROWS, LENGTH, WIDTH))
    with engine.full_parameters(), torch.no_grad():
        assert torch.allclose(one, model(some(ROWS, 1, WIDTH)))
        assert torch.allclose(row, model(some(WIDTH)))
        assert torch.allclose(five, model(some(ROWS, LENGTH, WIDTH)))
    engine.close()
    return True


def test_tensor_with_too_few_tokens_stays_whole(group):
    assert all(group(2, tensor=2)(reads))


class Masked(nn.Module):
    """Adds a mask with the tokens' dtype to the scores of a rank's heads (as in Meta's Llama)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.n_head = 2
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, x, mask):
        q, k, v = (
            each(x).view(*x.shape[:2], -1, WIDTH // 2).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        chances = (q @ k.transpose(-2, -1) + mask.type_as(x)).softmax(-1)
        return self.o((chances @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = self.tokens(x)
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
        return x + self.attend(x * x.square().mean(-1, keepdim=True).rsqrt(), mask)


def attends(world):
    torch.manual_seed(1)
    model = Masked().double()
    plan = {"tokens": "embedding"}
    plan |= {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, tensor_plan=plan, sequence_parallel=True)
    told = []
    for step in range(2):
        x = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * (step + 2)) % 7
        engine.backward(model(x).square().mean())
        stats = engine.step(max_norm=1.0)
        told += [stats.loss, stats.grad_norm]
    engine.close()
    return told


def test_mask_for_a_ranks_heads_is_whole(group):
    alone = group(1)(attends)[0]
    for told in group(2, tensor=2)(attends):
        assert told == pytest.approx(alone, rel=1e-10)


@dataclass
class Given:
    """An output object that torch's pytree does not know."""

    hidden: torch.Tensor


class Returning(Model):
    def forward(self, x):
        return {"all": [Given(super().forward(x))]}


def gives(world):
    torch.manual_seed(0)
    model = Returning().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, tensor_plan=PLAN, sequence_parallel=True)
    given = model(some(ROWS, LENGTH, WIDTH))["all"][0].hidden
    assert type(given) is torch.Tensor
    alone = model.blocks[0](
        some(ROWS, LENGTH, WIDTH)
    )  # otherwise nothing would gather it at the end
    assert type(alone) is torch.Tensor
    model.blocks[1].drop.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(some(ROWS, LENGTH, WIDTH))
    replica = model.blocks[0].up._replica
    assert (replica.running_forwards, replica._inputs, replica.randomness.in_region) == (
        0,
        {},
        False,
    )
    engine.close()
    return True


def test_model_outputs_are_whole(group):
    assert all(group(2, tensor=2)(gives))


def penalised(world, tensor):
    """Add a penalty on the gradient of the input, so that backward runs twice."""
    model, engine = built(sequence_parallel=tensor > 1)
    x = some(ROWS, LENGTH, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    engine.backward(grad.square().sum() * 100)
    norm = engine.step(max_norm=1e9).grad_norm
    engine.close()
    return norm


def test_backward_can_be_differentiated(group):
    alone = group(1)(penalised, 1)[0]
    for norm in group(2, tensor=2)(penalised, 2):
        assert norm == pytest.approx(alone, rel=1e-9)


# -- functions that cannot run on a part ---------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * weight * grad, (2 * x * grad).flatten(0, -2).sum(0)


class Own(nn.Module):
    """A norm in a custom autograd function."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Doubled.apply(x, self.weight)


def trained(world, plan, row):
    model, engine = built(Own, plan | PLAN, zero=row)
    told = []
    for step in range(3):
        engine.backward(model(some(ROWS, LENGTH, WIDTH, seed=step)).square().mean())
        stats = engine.step(max_norm=1.0)
        told += [stats.loss, stats.grad_norm]
    engine.close()
    return told


def test_module_in_the_plan_runs_on_its_tokens(group):
    plan = {"blocks.*.norm": "sequence_parallel"}
    alone = group(1)(trained, plan, 0)[0]
    for row in (0, 3):
        for told in group(2, tensor=2)(trained, plan, row):
            assert told == pytest.approx(alone, rel=1e-10)


def strays(world, how):
    model, engine = built(Own) if how == "function" else built()
    if how == "reentrant":
        for block in model.blocks:
            block.forward = lambda x, plain=block.forward: checkpoint(plain, x, use_reentrant=True)
    with pytest.raises(UsageError, match=r"split by tokens.*autograd.Function.*sequence_parallel"):
        engine.backward(model(some(ROWS, LENGTH, WIDTH).requires_grad_()).square().mean())
    engine.close()
    return True


@pytest.mark.parametrize("how", ["function", "reentrant"])
def test_rejects_functions_that_lose_the_graph(group, how):
    assert all(group(2, tensor=2)(strays, how))


def refuses(world):
    with pytest.raises(ModelError, match=r"blocks.0 is a Block with submodules.*Name those"):
        built(plan={"blocks.*": "sequence_parallel"})
    return True


def test_rejects_modules_with_submodules(group):
    assert all(group(2, tensor=2)(refuses))
