"""Any use of a sharded parameter at rest raises a named error; it never gives NaN or old values."""

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import BrokenView, ParameterAccess, UsageError
from tests.distributed.sharded import (
    Stack,
    adamw,
    at_rest,
    batch,
    by_turns,
    every_size,
    on,
    same_weights,
    seeded,
    sharded,
    squares,
    train,
    train_plain,
)

NAMED = r"sharded.*engine\.full_parameters.*engine\.export"


def started():
    model = seeded(Stack)
    return model, sharded(model)


def goes_on(world, engine, model):
    """Assert that the attempts have not changed the training."""
    mine = train(world, engine, model, squares, range(3))
    plain = seeded(Stack)
    theirs = train_plain(plain, adamw(plain), squares, range(3), size=world.size)
    assert torch.allclose(torch.tensor(mine), torch.tensor(theirs))
    same_weights(engine, model, plain)


# -- reading ----------------------------------------------------------------------------------

READS = {
    "sum": lambda p: p.sum(),
    "mean of data": lambda p: p.data.mean(),
    "item": lambda p: p.flatten()[0].item(),
    "tolist": lambda p: p.tolist()[3][2],
    "numpy": lambda p: p.detach().numpy().sum(),
    "array": lambda p: np.asarray(p.detach()).max(),
    "clone": lambda p: p.clone().sum(),
    "contiguous": lambda p: p.detach().contiguous().view(-1)[-1],
    "double": lambda p: p.float().sum(),
    "to": lambda p: p.to(torch.float32).sum(),
    "norm": lambda p: p.norm(),
    "transpose": lambda p: p.t().sum(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).sum(),
    "concatenated": lambda p: torch.cat([p.flatten(), p.flatten()]).sum(),
    "matrix product": lambda p: (p @ p.t()).sum(),
    "iterated": lambda p: sum(float(row.sum()) for row in p),
    "true": lambda p: bool(p[0]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 6).double(), p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "operator": lambda p: torch.ops.aten.sum(p),
    "into another": lambda p: torch.ones(12, 6).double().copy_(p),
    "average": lambda p: torch.ones(12, 6).double().lerp_(p.data, 0.1),
    "as tensor": lambda p: torch.as_tensor(p),
    "as tensor of data": lambda p: torch.as_tensor(p.data).sum(),
    "legacy tensor": lambda p: torch.Tensor(p),
    "saved data": lambda p: torch.save(p.data, io.BytesIO()),
    "deepcopy of data": lambda p: copy.deepcopy(p.data),
    "numpy of data": lambda p: p.data.numpy(),
    "from dlpack": lambda p: np.from_dlpack(p),
    "numpy of it": lambda p: np.asarray(p),
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: p == p,
    "einsum": lambda p: torch.einsum("ij->", p),
    "gradient penalty": lambda p: torch.autograd.grad(p.sum(), p),
    "vmap": lambda p: torch.func.vmap(torch.sum)(p),
    "func.grad": lambda p: torch.func.grad(torch.sum)(p),
    "json": lambda p: p.cpu().tolist(),
}


def reads(world):
    """Each use raises at its own line, names the parameter and says what to write."""
    model, engine = started()
    p = model.blocks[1].up.weight
    for name, read in READS.items():
        with contextlib.suppress(ParameterAccess):
            raise AssertionError(f"{name}: {read(p)}")
        with pytest.raises(ParameterAccess, match=r"blocks\.1\.up\.weight.*full_parameters"):
            read(p)
    goes_on(world, engine, model)


def asks_for_its_form(world):
    """Uses that need no values work as usual."""
    model, engine = started()
    p = model.blocks[1].up.weight
    for form in (p, p.data, p.detach()):
        assert (form.shape, form.numel(), form.dim()) == ((12, 6), 72, 2)
        assert (form.dtype, form.device, len(form)) == (torch.float64, torch.device("cpu"), 12)
        assert "blocks.1.up.weight" in repr(form)
        assert "blocks.1.up.weight" in f"{form}"
        assert torch.equal(torch.zeros_like(form), form.new_zeros(12, 6))
    assert hash(p) == hash(model.blocks[1].up.weight)
    assert p in set(model.parameters())
    assert p is model.blocks[1].up.weight
    assert isinstance(p, nn.Parameter)
    assert len({q.data_ptr() for q in model.parameters()}) == len(list(model.parameters()))
    assert p.requires_grad
    assert p.is_leaf
    assert p.grad is None
    assert model.to("cpu") is model.double()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    goes_on(world, engine, model)
    with engine.full_parameters():
        assert type(p) is nn.Parameter


@by_turns(case=[reads, asks_for_its_form])
def test_reading(group, ranks, case):
    on(group, ranks)(case)


# -- copies -----------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
}


def copies_raise(world):
    model, engine = started()
    p = model.blocks[0].up.weight
    for name, make in COPIES.items():
        for value in (p, model, model.blocks, [p], {"model": model}):
            with pytest.raises(UsageError, match=NAMED):
                make(value)
            assert at_rest(p), name
    with pytest.raises(UsageError, match=NAMED):
        copy.copy(p)
    for module in (model, model.blocks[1], model.blocks[1].up):
        with pytest.raises(UsageError, match=NAMED):
            module.state_dict()
    with pytest.raises(UsageError, match=r"load_state_dict.*full_parameters\(write=True\)"):
        model.load_state_dict(seeded(Stack).state_dict())
    with pytest.raises(UsageError, match=r"load_state_dict.*full_parameters\(write=True\)"):
        model.head.load_state_dict(seeded(Stack).head.state_dict())
    goes_on(world, engine, model)


def copies_inside(world):
    """Inside engine.full_parameters every copy is a plain model."""
    model, engine = started()
    plain = seeded(Stack)
    train(world, engine, model, squares, range(2))
    train_plain(plain, adamw(plain), squares, range(2), size=world.size)
    file = io.BytesIO()
    with engine.full_parameters():
        torch.save(model.state_dict(), file)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        twins.append(torch.load(whole, weights_only=False))
        averaged = torch.optim.swa_utils.AveragedModel(model).module
    file.seek(0)
    twins.append(seeded(Stack, 9))
    twins[-1].load_state_dict(torch.load(file))
    for twin in (*twins, averaged):
        for name, value in twin.state_dict().items():
            assert torch.allclose(value, plain.state_dict()[name], rtol=1e-9)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin(batch(0)).sum().backward()
        optimizer.step()
        assert not any(p.isnan().any() for p in twin.parameters())
        copy.deepcopy(twin)
    with pytest.raises(UsageError, match=NAMED):
        copy.deepcopy(model)
    same_weights(engine, model, plain)


def a_part_inside(world):
    """engine.full_parameters(module) gathers the units that contain the module's parameters."""
    model, engine = started()
    with engine.full_parameters(model.blocks[1]):
        assert torch.equal(model.blocks[1].up.weight, seeded(Stack).blocks[1].up.weight)
        assert at_rest(model.blocks[0].up.weight)
        model.blocks[1].state_dict()
        copy.deepcopy(model.blocks[1])
        with pytest.raises(UsageError, match=NAMED):
            model.state_dict()
    goes_on(world, engine, model)


@by_turns(case=[copies_raise, copies_inside, a_part_inside])
def test_copies(group, ranks, case):
    on(group, ranks)(case)


# -- writing ----------------------------------------------------------------------------------


def halved(p):
    p.data = torch.zeros_like(p)


def in_rows(p):
    p[0] = 3.0


WRITES = {
    "clamped": lambda p: p.data.clamp_(-0.01, 0.01),
    "averaged": lambda p: torch._foreach_lerp_([p], [torch.ones_like(p)], 0.5),
    "out": lambda p: torch.add(torch.ones_like(p), 1, out=p),
    "+=": lambda p: p.__iadd__(1),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1.0),
    "one element": in_rows,
    "data.zero_": lambda p: p.data.zero_(),
    "data.fill_": lambda p: p.data.fill_(2.0),
    "detach().fill_": lambda p: p.detach().fill_(2.0),
    "add_": lambda p: p.add_(1.0),
    "data.add_": lambda p: p.data.add_(1.0),
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "data.copy_": lambda p: p.data.copy_(torch.ones_like(p)),
    "clamp_": lambda p: p.clamp_(-1, 1),
    "normal_": lambda p: nn.init.normal_(p),
    "uniform_": lambda p: nn.init.uniform_(p),
    "zeros_": lambda p: nn.init.zeros_(p),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
    "data =": halved,
    "half": lambda p: setattr(p, "data", p.data.half()),
    "numpy": lambda p: p.detach().numpy().fill(1.0),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()).double(), [p]),
    "set_": lambda p: p.set_(torch.ones_like(p)),
    "resize_": lambda p: p.resize_(3, 3),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.ones_like(p))),
}

ERRORS = (ParameterAccess, BrokenView)


def writes(world, at):
    """Each write raises immediately or at the engine's next call. No value is lost silently."""
    refused, engine = {}, None
    for name, write in WRITES.items():
        if engine is None:
            model, engine = started()
            train(world, engine, model, squares, [0])
        p = model.get_parameter(at)
        try:
            with torch.no_grad():
                write(p)
        except ERRORS as error:
            refused[name] = type(error).__name__
            continue
        loss = model(batch(1)).square().mean()
        with contextlib.suppress(BrokenView):
            engine.backward(loss)
            raise AssertionError(f"{name} was lost")
        refused[name] = "later"
        del model, loss
        engine = None
    assert set(refused) == set(WRITES), set(WRITES) - set(refused)


@by_turns(at=["blocks.1.up.weight", "stem.bias"])
def test_writing_at_rest(group, ranks, at):
    on(group, ranks)(writes, at)


def writes_between(world):
    """Write, in the ways above, to units that remain gathered between forward and backward."""
    for name, write in WRITES.items():
        model, engine = started()
        model(batch(0))
        p = model.stem.bias
        assert not at_rest(p)
        assert torch.equal(p, seeded(Stack).stem.bias)  # read as usual
        if name == "numpy":  # writes by code that holds the memory itself are not detected
            continue
        with pytest.raises(ERRORS, match=r"was (written|replaced)"):  # noqa: PT012
            with torch.no_grad():
                write(p)
            engine.backward(model(batch(1)).square().mean())


@every_size
def test_writing_between_forward_and_backward(group, ranks):
    on(group, ranks)(writes_between)


def reads_between(world):
    """A penalty on parameters that remain gathered trains as in plain PyTorch."""
    model, engine = started()
    plain = seeded(Stack)
    x = batch(0)
    out = model(world.share(x)).square().mean()
    engine.backward(out + model.stem.bias.view(-1)[1:].square().sum())
    stats = engine.step()
    loss = plain(x).square().mean() + plain.stem.bias[1:].square().sum()
    loss.backward()
    assert stats.loss == pytest.approx(loss.item())
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert stats.grad_norm == pytest.approx(norm.item())


@every_size
def test_reading_between_forward_and_backward(group, ranks):
    on(group, ranks)(reads_between)


class Writing(Stack):
    """Writes to its weights in forward; such a write would be lost."""

    def forward(self, x):
        with torch.no_grad():
            self.write(self.stem.weight)
        return super().forward(x)


class Scaling(Writing):
    def write(self, weight):
        weight.mul_(0.5)


class Replacing(Writing):
    def write(self, weight):
        weight.data = weight * 0.5


class Halving(Writing):
    def write(self, weight):
        weight.data.mul_(0.5)


class HalvingInUnit(Stack):
    def forward(self, x):
        self.blocks[1].up.register_forward_pre_hook(self.write)
        return super().forward(x)

    def write(self, module, args):
        module.weight.data.mul_(0.5)


def writes_in_forward(world, make):
    model = seeded(make)
    engine = sharded(model)
    loss = model(batch(0)).square().mean()
    with pytest.raises(BrokenView, match=r"full_parameters\(.*write=True\)"):  # noqa: PT012
        engine.backward(loss)
        engine.step()


def writes_in_evaluation(world, make):
    model = seeded(make)
    engine = sharded(model)
    with torch.no_grad():
        model(batch(0))
    with pytest.raises(BrokenView, match=r"full_parameters\(.*write=True\)"), torch.no_grad():
        engine.backward(torch.ones((), requires_grad=True))


@by_turns(
    make=[Scaling, Replacing, Halving, HalvingInUnit],
    case=[writes_in_forward, writes_in_evaluation],
)
def test_writing_in_forward(group, ranks, make, case):
    on(group, ranks)(case, make)


def writes_while_reading(world, name):
    """engine.full_parameters() without write=True rejects writes inside the block."""
    model, engine = started()
    with (
        pytest.raises(BrokenView, match=r"full_parameters\(.*write=True\)"),
        engine.full_parameters(),
        torch.no_grad(),
    ):
        WRITES[name](model.blocks[0].up.weight)
    goes_on(world, engine, model)


@by_turns(name=["add_", "data.copy_", "data =", "vector", "zero_"])
def test_writing_in_a_block_for_reading(group, ranks, name):
    on(group, ranks)(writes_while_reading, name)


# -- writing in full_parameters ---------------------------------------------------------------


def written_inside(world, write):
    model, engine = started()
    plain = seeded(Stack)
    optimizer = adamw(plain)
    train(world, engine, model, squares, range(2))
    train_plain(plain, optimizer, squares, range(2), size=world.size)
    with engine.full_parameters(model.blocks[1], write=True), torch.no_grad():
        WRITES[write](model.blocks[1].up.weight)
    with torch.no_grad():
        WRITES[write](plain.blocks[1].up.weight)
    same_weights(engine, model, plain)
    train(world, engine, model, squares, range(2, 4))
    train_plain(plain, optimizer, squares, range(2, 4), size=world.size)
    same_weights(engine, model, plain)


@by_turns(write=["mul_", "data.copy_", "one element"])
def test_writing_inside(group, ranks, write):
    on(group, ranks)(written_inside, write)


def replaced_inside(world):
    model, engine = started()
    with (
        pytest.raises(BrokenView, match=r"storage of blocks\.0\.up\.weight was replaced"),
        engine.full_parameters(write=True),
    ):
        model.blocks[0].up.weight.data = torch.ones(12, 6).double()


def loaded_inside(world):
    model, engine = started()
    other = seeded(Stack, 11)
    with engine.full_parameters(write=True):
        model.load_state_dict(other.state_dict())
    same_weights(engine, model, other)
    mine = train(world, engine, model, squares, range(3))
    theirs = train_plain(other, adamw(other), squares, range(3), size=world.size)
    assert torch.allclose(torch.tensor(mine), torch.tensor(theirs))


def masters_follow(world, write):
    """Writes to 16-bit parameters reach their masters."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    engine = sw.Engine(model, optimizer, zero=3, precision="bf16")
    with engine.full_parameters(write=True), torch.no_grad():
        for p in model.parameters():
            WRITES[write](p)
    engine.backward(model(batch(0).float()).square().mean())
    engine.step()
    with engine.full_parameters():
        assert all(torch.allclose(p.float(), torch.ones(()), rtol=1e-2) for p in model.parameters())


@every_size
def test_refuses_replacement_inside_a_block(group, ranks):
    on(group, ranks)(replaced_inside)


@every_size
def test_loading_inside(group, ranks):
    on(group, ranks)(loaded_inside)


@by_turns(write=["fill_", "data.copy_"])
def test_masters_follow(group, ranks, write):
    on(group, ranks)(masters_follow, write)


# -- calling a part ---------------------------------------------------------------------------


def parts_by_themselves(world):
    """A unit, a part of the rest, and the model can be called; a part of a unit cannot."""
    model, engine = started()
    plain = seeded(Stack)
    x = batch(0)
    with torch.no_grad():
        assert torch.equal(model.blocks[1](x), plain.blocks[1](x))
        assert torch.equal(model.head(model.stem(x)), plain.head(plain.stem(x)))
        with pytest.raises(ParameterAccess, match=r"blocks\.1\.up\.weight was read \(linear\)"):
            model.blocks[1].up(x)
    with engine.full_parameters(), torch.no_grad():
        assert torch.equal(model.blocks[1].up(x), plain.blocks[1].up(x))
        assert torch.equal(model(x), plain(x))
    goes_on(world, engine, model)


@every_size
def test_calling_parts(group, ranks):
    on(group, ranks)(parts_by_themselves)
