"""Split layers beyond parity: checkpoints across meshes, whole tensors, modules of torch and
transformers, refusals."""

import copy
import dataclasses
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import BrokenView, ModelError, ModelMismatch, UsageError
from shardwise.parallel.tensor import known_modules, split_trial
from tests.parity.problems import SplittableGPT, loss_of
from tests.tables import each_value

os.environ["HF_HUB_OFFLINE"] = "1"

TIED = {"tokens": "embedding", "head": "colwise_rep"}


def gpt(seed=5):
    torch.manual_seed(seed)
    return SplittableGPT().double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step, rows=8):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(24, (rows, 8), generator=draw)


def train(world, engine, model, steps):
    losses = []
    for step in steps:
        x = world.share(batch(step))
        engine.backward(loss_of(model, x, (x * 5 + 1) % 24))
        losses.append(engine.step(max_norm=0.5).loss)
    return losses


def whole(engine, model):
    with engine.full_parameters():
        return {name: value.clone() for name, value in model.state_dict().items()}


def plain_losses(steps):
    model = gpt()
    optimizer = adamw(model)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = loss_of(model, x, (x * 5 + 1) % 24)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- checkpoints ------------------------------------------------------------------------------


def saves(world, folder, row, plan, background):
    model = gpt(seed=5 + world.rank)
    model.places.requires_grad_(False)
    model.blocks[1].widen.requires_grad_(False)  # a part that is not trained
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=plan, ema_decay=0.9)
    train(world, engine, model, range(3))
    path = engine.save(folder, background=background)
    values, state = whole(engine, model), engine.optimizer_state_dict()
    with engine.ema():
        average = whole(engine, model)
    engine.export(folder / "whole.safetensors")
    after = train(world, engine, model, [3, 4])
    engine.close()
    return str(path), values, average, state, after


def goes_on(world, path, row, plan):
    model = gpt(seed=9)
    model.places.requires_grad_(False)
    model.blocks[1].widen.requires_grad_(False)
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=plan, ema_decay=0.9)
    engine.load(path)
    values, state = whole(engine, model), engine.optimizer_state_dict()
    with engine.ema():
        average = whole(engine, model)
    after = train(world, engine, model, [3, 4])
    engine.close()
    return values, average, state, after


MESHES = [
    pytest.param(  # test_pipeline.py resumes on meshes with stages
        {"size": 4, "tensor": 2, "row": 2},
        {"size": 2, "tensor": 1, "row": 3},
        marks=pytest.mark.full,
    ),
    pytest.param(
        {"size": 2, "tensor": 1, "row": 3},
        {"size": 4, "tensor": 2, "row": 3},
        marks=pytest.mark.full,
    ),
    ({"size": 3, "tensor": 3, "row": 0}, {"size": 2, "tensor": 2, "row": 1}),
]


@pytest.mark.parametrize(("first", "second"), MESHES)
def test_resumes_on_another_mesh(group, tmp_path, first, second):
    plan = TIED if first["tensor"] > 1 else None
    background = first["tensor"] == 3
    told = group(first["size"], tensor=first["tensor"])(
        saves, tmp_path, first["row"], plan, background, limit=120
    )
    path = check_files(told[0], tmp_path)
    plan = TIED if second["tensor"] > 1 else None
    results = group(second["size"], tensor=second["tensor"])(
        goes_on, path, second["row"], plan, limit=120
    )
    check_going_on(told[0], results)


def check_files(told, folder):
    """Check that the files of `saves` have the right values; return the checkpoint's path."""
    path, values, *_ = told
    stock = safetensors.torch.load_file(Path(path) / "model.safetensors")
    assert all(torch.equal(stock[name], value) for name, value in values.items() if name in stock)
    exported = safetensors.torch.load_file(folder / "whole.safetensors")
    assert all(torch.equal(value, values[name]) for name, value in exported.items())
    return path


def check_going_on(told, results):
    """Check that `goes_on` has loaded the state of `saves`, and trains in the same way."""
    _, values, average, state, after = told
    for mine, mean, kept, losses in results:
        assert all(torch.equal(mine[name], value) for name, value in values.items())
        assert all(torch.equal(mean[name], value) for name, value in average.items())
        for number, entries in state["state"].items():
            for key, value in entries.items():
                assert torch.equal(kept["state"][number][key], value), (number, key)
        assert losses == pytest.approx(after, rel=1e-9)


# -- whole tensors ----------------------------------------------------------------------------


def writes(world, row):
    model = gpt()
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=TIED)
    train(world, engine, model, [0])
    x = batch(7)
    before = model(x).detach()
    for copies in (model.state_dict, lambda: copy.deepcopy(model.blocks)):
        with pytest.raises(UsageError, match=r"a part of it.*full_parameters"):
            copies()
    with engine.full_parameters():
        twin = copy.deepcopy(model)
    assert type(twin.head) is nn.Linear
    assert twin.head.weight.shape == (25, 16)
    with engine.full_parameters(), torch.no_grad():
        assert torch.allclose(model(x), before, rtol=1e-10)  # the plain forward
        assert model.blocks[0].attend.n_head == 4
    with engine.full_parameters(write=True), torch.no_grad():
        if world.is_main:
            model.blocks[0].widen.weight.mul_(2.0)
            model.norm.weight.mul_(3.0)
    values = whole(engine, model)
    train(world, engine, model, [1])
    engine.close()
    assert type(model.head) is nn.Linear
    assert type(model.blocks[0].attend.qkv) is nn.Linear
    return values


@pytest.mark.parametrize("row", [0, 3])
def test_reads_and_writes_whole_tensors(group, row):
    first, *others = group(4, tensor=2)(writes, row)
    plain = group(1)(writes_plain)[0]
    for values in (first, *others):
        for name, value in plain.items():
            assert torch.allclose(values[name], value, rtol=1e-9, atol=1e-12), name


def writes_plain(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model))
    train(world, engine, model, [0])
    with engine.full_parameters(write=True), torch.no_grad():
        model.blocks[0].widen.weight.mul_(2.0)
        model.norm.weight.mul_(3.0)
    values = whole(engine, model)
    engine.close()
    return values


# -- trials --------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two linear maps with something between them."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.down(BETWEEN[self.between](self, self.up(x)))


BETWEEN = {
    "an activation": lambda pair, h: h.tanh(),
    "a norm over all features": lambda pair, h: nn.functional.layer_norm(h, h.shape[-1:]),
    "a softmax": lambda pair, h: h.softmax(-1),
    "a width": lambda pair, h: h.view(*h.shape[:-1], 2, 4).flatten(-2),
    "a parameter that is not split": lambda pair, h: h * pair.scale,
    "half of the features": lambda pair, h: h.roll(1, -1),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_finds_only_splits_that_compute_the_same(between):
    model = nn.Sequential(nn.Embedding(5, 6), Pair(between), nn.Flatten())
    found = known_modules.find([model], [""], 2, set())
    wanted = ["1"] if between == "an activation" else []
    assert [group.name for group in found] == wanted


def test_finds_a_pair_after_an_embedding():
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    (group,) = known_modules.find([model], [""], 2, set())
    assert [cut.name for cut in group.splits] == ["1", "3"]


# -- modules of torch and transformers -----------------------------------------------------------


def encoder():
    layer = nn.TransformerEncoderLayer(12, 3, 18, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.append = nn.MultiheadAttention(12, 3, dropout=0.0, kdim=5, vdim=7)
    return model


def encoder_loss(model, x):
    padding = torch.zeros(x.shape[:2], dtype=torch.double)
    padding[:, -1] = float("-inf")
    out = model(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]).double(),
                src_key_padding_mask=padding)  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    masks = torch.randn(3, 6, 6, generator=draw, dtype=torch.double).repeat(
        x.shape[0], 1, 1
    )  # one for each head
    mixed, weights = model.append(
        *(part.transpose(0, 1) for part in (out, x[..., :5], x[..., :7])), attn_mask=masks
    )
    return mixed.square().mean() + weights.square().mean()


def torch_modules(world, by_tokens):
    """Compare TransformerEncoderLayer and MultiheadAttention, in training and torch's fast
    inference."""
    torch.manual_seed(3)
    model, plain = encoder().double(), encoder().double()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, sequence_parallel=by_tokens)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert model.layers[0].self_attn.num_heads < 3
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, 12, generator=draw, dtype=torch.double)
        rows = world.share(x)
        engine.backward(encoder_loss(model, rows))
        stats = engine.step()
        optimizer.zero_grad()
        loss = encoder_loss(plain, x)
        loss.backward()
        optimizer.step()
        assert stats.loss == pytest.approx(loss.item(), rel=1e-9)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), rtol=1e-8)
    for each in (model, plain):
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            each.layers[0].self_attn(x, x, x, is_causal=True)
    engine.close()
    return True


@pytest.mark.parametrize("by_tokens", [False, True])
def test_modules_of_torch(group, by_tokens):
    assert all(group(2, tensor=2)(torch_modules, by_tokens))


def mistral():
    """Compare a model that is in no table; its attention is split because of its tp_plan."""
    import transformers

    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config), "model.layers.0"


def hugging(world, make, by_tokens):
    from tests.distributed import test_sharded_transformers as others

    make = mistral if make == "mistral" else getattr(others, make)
    (model, _), (plain, _) = (others.built(make) for _ in range(2))
    for each in (model, plain):
        each.train()
    optimizer = others.sgd(plain)
    engine = sw.Engine(model, others.sgd(model), zero=3, sequence_parallel=by_tokens)
    cut = [p for p, q in zip(model.parameters(), plain.parameters(), strict=True)
           if p.data.shape != q.shape]  # fmt: skip
    assert len(cut) >= 8
    for step in range(2):
        x = others.text(step)
        rows = world.share(x)
        engine.backward(model(input_ids=rows, labels=rows, use_cache=False).loss)
        stats = engine.step()
        optimizer.zero_grad()
        loss = plain(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        optimizer.step()
        # These models compute norms and the loss in fp32 in every dtype.
        assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    engine.close()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), name
    return True


@each_value(make=["gpt2", "llama", "t5", "mistral"], by_tokens=[False, True])
def test_transformers(group, make, by_tokens):
    pytest.importorskip("transformers")
    assert all(group(2, tensor=2)(hugging, make, by_tokens, limit=120))


# -- the loss over a split vocabulary ---------------------------------------------------------


def split_loss(world, row):
    """Compare with torch's loss, with ignored targets, for each reduction."""
    plan = {"tokens": "embedding", "head": "colwise"}
    model, plain = gpt(), gpt()
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=plan)
    optimizer = adamw(plain)
    for step, reduction in enumerate(["mean", "sum", "none"]):
        x = batch(step)
        y = ((x * 5 + 1) % 24).masked_fill(x % 3 == 0, -1)
        rows, targets = world.share(x), world.share(y)
        scores = model(rows).transpose(1, 2)
        assert scores.shape[-1] < 25
        options = {"ignore_index": -1, "reduction": reduction}
        loss = sw.cross_entropy(scores, targets, model.head, **options)
        assert loss.shape == (targets.shape if reduction == "none" else ())
        count = int((targets != -1).sum())
        weight = count if reduction == "mean" else len(rows)
        engine.backward(loss.sum() if reduction != "none" else loss.sum(1).mean(), weight=weight)
        stats = engine.step()
        theirs = sw.cross_entropy(plain(x).transpose(1, 2), y, plain.head, **options)
        theirs = theirs.sum(1).mean() if reduction == "none" else theirs
        theirs.backward()
        if reduction == "sum":  # of each replica: the mean over rows of the replicas' sums
            theirs = theirs / world.data_size
            for parameter in plain.parameters():
                parameter.grad /= world.data_size
        optimizer.step()
        optimizer.zero_grad()
        assert stats.loss == pytest.approx(theirs.item(), rel=1e-9)
    with pytest.raises(UsageError, match="takes the scores exactly as the head returned them"):
        sw.cross_entropy(torch.zeros(2, 25).double(), torch.zeros(2).long(), model.head)
    x = batch(9)
    with engine.full_parameters(), torch.no_grad():
        assert torch.allclose(model(x), plain(x), rtol=1e-8)
    engine.close()
    return True


@pytest.mark.parametrize(("size", "row"), [(4, 1), (2, 3)])
def test_loss_over_a_split_vocabulary(group, size, row):
    assert all(group(size, tensor=2)(split_loss, row))


def head_input(model, x):
    """Run `model`, and return the input of its head."""
    inputs = []
    handle = model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x)
    handle.remove()
    return inputs[0]


def chunked_loss(world, row):
    """Compare the loss without all scores with torch's, over a head that may be split."""
    plan = {"tokens": "embedding", "head": "colwise"} if world.mesh.tensor > 1 else None
    model, plain = gpt(), gpt()
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=plan)
    optimizer = adamw(plain)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "chunk": 5}
    options["class_weight"] = torch.linspace(0.5, 2, 25).double()
    for step in range(3):
        x = batch(step)
        y = ((x * 5 + 1) % 24).masked_fill(x % 3 == 0, -100)
        hidden = head_input(model, world.share(x))
        engine.backward(sw.chunked_cross_entropy(hidden, world.share(y), model.head, **options))
        stats = engine.step()
        theirs = sw.chunked_cross_entropy(head_input(plain, x), y, plain.head, **options)
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert stats.loss == pytest.approx(theirs.item(), rel=1e-9)
    with engine.full_parameters(), torch.no_grad():
        assert torch.allclose(model(batch(9)), plain(batch(9)), rtol=1e-8)
    engine.close()
    return True


@pytest.mark.parametrize(("size", "tensor", "row"), [(4, 2, 1), (2, 2, 3), (2, 1, 3)])
def test_chunked_loss(group, size, tensor, row):
    assert all(group(size, tensor=tensor)(chunked_loss, row))


# -- data -------------------------------------------------------------------------------------


def reads(world):
    """The ranks of a replica get the same share, and count once in a mean."""
    loader = sw.Loader(list(range(7)), batch_size=7)
    metrics = sw.Metrics()
    with torch.no_grad():
        batches = [x.tolist() for x in loader]
        metrics.add(n=len(batches[0]), mean=sum(batches[0]) / len(batches[0]))
    assert metrics.compute() == {"mean": 3.0}
    place = (world.data_rank, world.data_size, world.tensor_rank, world.tensor_size)
    return place, batches, world.share(torch.arange(5)).tolist()


def test_ranks_of_a_replica_get_the_same_data(group):
    rows = [([[0, 1, 2]], [0, 1]), ([[3, 4, 5, 6]], [2, 3, 4])]
    assert group(4, tensor=2)(reads) == [
        ((data, 2, part, 2), *rows[data]) for data in range(2) for part in range(2)
    ]


# -- randomness -------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        hidden = self.inner(torch.ones_like(self.up(x)))
        out = self.outer(torch.ones_like(self.down(hidden)))
        self.masks += [hidden.detach() != 0, out.detach() != 0]
        return out.sum() + self.down.bias.sum() + self.up.weight.sum()


def masks(world):
    model = Dropped()
    plan = {"up": "colwise", "down": "rowwise"}
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), tensor_plan=plan)
    for _ in range(2):
        engine.backward(model(torch.ones(4, 8)))
        engine.step()
    engine.close()
    return model.masks


def test_dropout_agrees_on_replicated_activations(group):
    told = group(4, tensor=2)(masks)
    inner, outer = ([each[0] for each in told], [each[1] for each in told])
    for replica in (0, 2):
        assert torch.equal(outer[replica], outer[replica + 1])
        assert not torch.equal(inner[replica], inner[replica + 1])
        assert not torch.equal(told[replica][1], told[replica][3])  # new numbers in each step
    assert not torch.equal(outer[0], outer[2])


class Rates(nn.Module):
    """Blocks with dropout inside the pair, in one also after it, another dropout, and a head."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 17), nn.Dropout(0.5), nn.Linear(17, 8), nn.Dropout(after))
            for after in (0.0, 0.5, 0.0)
        )
        self.last, self.head = nn.Dropout(0.5), nn.Linear(8, 5)
        self.checkpointed = checkpointed

    def body(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.last(x)

    def forward(self, x):
        return self.head(self.body(x))


def rates(plan, *, checkpointed=False, **settings):
    torch.manual_seed(2)
    model = Rates(checkpointed=checkpointed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, tensor_plan=plan, **settings)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=draw, dtype=torch.double)
    return model, engine, x, torch.randint(5, (6,), generator=draw)


def recomputes(world, plan, how):
    model, engine, x, y = rates(plan, **how)
    told = []
    for _ in range(2):
        for last in (False, True):
            engine.backward(sw.cross_entropy(model(x), y, model.head), last=last)
        stats = engine.step(max_norm=1e9)
        told += [stats.loss, stats.grad_norm]
    told += [value.sum().item() for value in whole(engine, model).values()]
    engine.close()
    return told


@each_value(plan=[None, {"head": "colwise"}], options=[{}, {"sequence_parallel": True, "zero": 3}])
def test_recomputation_repeats_random_numbers(group, plan, options):
    kept, ours, theirs = (
        group(2, tensor=2)(recomputes, plan, how | options)[0]
        for how in ({}, {"activations": "recomputed"}, {"checkpointed": True})
    )
    assert ours == pytest.approx(kept, rel=1e-9)
    assert theirs == pytest.approx(kept, rel=1e-9)


def drawn(world):
    """Return the output of the dropout before a split head in two forwards of one step."""
    model, engine, x, y = rates({"head": "colwise"})
    seen = []
    model.last.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    for last in (False, True):
        engine.backward(sw.cross_entropy(model(x), y, model.head), last=last)
    engine.close()
    return seen


def test_the_loss_ends_the_region_of_a_split_head(group):
    first, second = group(2, tensor=2)(drawn)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def looks_first(world, looks):
    model, engine, x, y = rates({"head": "colwise"})
    model.eval()
    hidden = model.body(x)
    if looks:
        with torch.no_grad():
            model.head(hidden)
            assert not model.head._replica._inputs, "a forward without gradients holds its input"
    engine.backward(sw.cross_entropy(model.head(hidden), y, model.head))
    norm = engine.step(max_norm=1e9).grad_norm
    engine.close()
    return norm


def test_forward_without_gradients_shares_nothing(group):
    plain, looked = (group(2, tensor=2)(looks_first, looks) for looks in (False, True))
    assert looked == pytest.approx(plain, rel=1e-9)


class Noisy(nn.Module):
    """Draws random numbers by functions only, more on the rank with the wider part."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 17), nn.Linear(17, 8)

    def forward(self, x):
        hidden = nn.functional.dropout(self.up(x), 0.3, self.training)
        return nn.functional.dropout(self.down(hidden), 0.3, self.training)


def drops_by_function(world):
    torch.manual_seed(1)
    model = Noisy()
    plan = {"up": "colwise", "down": "rowwise"}
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), tensor_plan=plan)
    out = model(torch.ones(4, 8))
    engine.backward(out.sum())
    engine.close()
    return out.detach()


def test_functional_dropout_agrees(group):
    first, second = group(2, tensor=2)(drops_by_function)
    assert torch.equal(first, second)


# -- gradients that are not finite ---------------------------------------------------------------


def skipped(world, row):
    """A NaN in one rank's part stops all ranks. If skipped, all keep their state."""
    model = gpt()
    engine = sw.Engine(model, adamw(model), zero=row, tensor_plan=TIED, nonfinite="skip")
    before = whole(engine, model)
    x = world.share(batch(0))

    def spoil(grad):
        return grad.index_fill(1, torch.tensor([0]), float("nan")) if world.rank == 3 else grad

    layer = model.blocks[0].widen
    plain = layer.forward

    def spoiled(value):
        out = plain(value)
        out.register_hook(lambda g: spoil(g.flatten(0, 1)).view_as(g))
        return out

    layer.forward = spoiled
    engine.backward(loss_of(model, x, (x * 5 + 1) % 24))
    stats = engine.step()
    assert stats.skipped
    after = whole(engine, model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    del layer.forward
    losses = train(world, engine, model, [0])
    engine.close()
    return losses


@pytest.mark.parametrize("row", [0, 2])
def test_all_ranks_skip_a_step_that_is_not_finite(group, row):
    for losses in group(4, tensor=2)(skipped, row):
        assert losses == pytest.approx(plain_losses(1), rel=1e-9)


def half(world, precision, by_tokens):
    model = gpt().float()
    options = {"precision": precision, "sequence_parallel": by_tokens}
    engine = sw.Engine(model, adamw(model), zero=2, **options)
    losses = train(world, engine, model, range(4))
    engine.close()
    return losses


@each_value(precision=["bf16-mixed", "bf16", "fp16-mixed"], by_tokens=[False, True])
def test_sixteen_bits(group, precision, by_tokens):
    for losses in group(4, tensor=2)(half, precision, by_tokens):
        assert losses == pytest.approx(plain_losses(4), rel=3e-2)


# -- refusals ------------------------------------------------------------------------------------


def refused(world, plan, make, text, error=ModelError, **settings):
    model = make()
    with pytest.raises(error, match=text):
        sw.Engine(model, adamw(model), tensor_plan=plan, **settings)
    return True


def out_of_range(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model), tensor_plan={"tokens": "embedding", "head": "colwise"})
    x = batch(0)
    scores = model(x).transpose(1, 2)
    for wrong in (25, -1):
        with pytest.raises(IndexError, match=r"index out of range in self.*of 25"):
            model(x.index_fill(1, torch.tensor([3]), wrong))
        with pytest.raises(IndexError, match=r"Target out of bounds.*of 25"):
            sw.cross_entropy(scores, x.index_fill(1, torch.tensor([3]), wrong), model.head)
    engine.close()
    return True


def test_rejects_indices_out_of_range_like_torch(group):
    assert all(group(2, tensor=2)(out_of_range))


def small():
    return nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 4))


REFUSED = [
    ({"blocks.*.nothing": "colwise"}, gpt, r"no module matches 'blocks\.\*\.nothing'.*tokens"),
    ({"blocks.*.widen": "colwise", "blocks.0.*": "whole"}, gpt, r"widen matches both .* and"),
    ({"head": "sideways"}, gpt, r"style 'sideways'.*colwise: .*rowwise"),
    ({"head": "colwise_rep"}, gpt, r"shared with a split module.*Split both in the same way"),
    ({"norm": "colwise"}, gpt, r"norm is a LayerNorm"),
    (None, small, r"found nothing to split in Sequential"),
    ({"0": "colwise"}, small, r"cannot split 0 of 1 output features.*cannot be spread over 2"),
    ({"*": "whole"}, gpt, "found nothing to split in SplittableGPT"),
    ({"blocks.*.attend": sw.Attention(qkv="up", out="proj", heads="n_head")}, gpt, "no linear map"),
]


@pytest.mark.parametrize(("plan", "make", "text"), REFUSED)
def test_names_modules_that_cannot_be_split(group, plan, make, text):
    assert all(group(2, tensor=2)(refused, plan, make, text))


# -- less visible cases --------------------------------------------------------------------------


def unfreezes(world):
    """Every rank keeps its part of split layers when a parameter group is added."""
    model = gpt()
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.norm.requires_grad_(True).parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer)
    before = whole(engine, model)
    optimizer.add_param_group({"params": list(model.blocks[1].requires_grad_(True).parameters())})
    after = whole(engine, model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.close()
    return True


def test_unfreezing_split_layers_keeps_their_parts(group):
    assert all(group(4, tensor=2)(unfreezes))


def test_every_kind_of_pair_is_tried():
    def pair(between):
        return nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8))

    model = nn.ModuleList([pair(each) for each in (nn.ReLU(), nn.Softmax(-1), nn.ReLU())])
    assert [each.name for each in known_modules.find([model], [""], 2, set())] == ["0", "2"]


def asks_for_a_part(world, row):
    """A block about some modules leaves no forward half plain and half split."""
    model = gpt()
    engine = sw.Engine(model, adamw(model), zero=row)
    x = batch(3)
    with torch.no_grad():
        wanted = gpt()(x)
        for module in (model.norm, model.blocks[0].widen, model.blocks[1]):
            with engine.full_parameters(module):
                assert torch.allclose(model(x), wanted, rtol=1e-9)
        with engine.full_parameters(model.blocks[0].widen):
            assert model.state_dict()["blocks.1.widen.weight"].shape == (23, 16)
        with engine.full_parameters(model.norm), pytest.raises(UsageError, match="a part of it"):
            model.state_dict()
    engine.close()
    return True


@pytest.mark.parametrize("row", [0, 3])
def test_gathers_some_modules(group, row):
    assert all(group(2, tensor=2)(asks_for_a_part, row))


def starves(world):
    """All ranks split in the same way, even if a trial does not end in time on one rank."""
    model = gpt()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(split_trial, "LIMIT", 0.0)
        engine = sw.Engine(model, adamw(model))
    shapes = world.gather(model.blocks[0].attend.n_head)
    engine.close()
    other = gpt()
    plan = {"blocks.0.widen": "whole"} if world.rank else {"blocks.1.widen": "whole"}
    with pytest.raises(ModelMismatch, match=r"ranks split different layers.*the same tensor_plan"):
        sw.Engine(other, adamw(other), tensor_plan=plan)
    with pytest.raises(ModelMismatch, match=r"rank 0 has .*rank 1 has .*no module matches"):
        sw.Engine(other, adamw(other), tensor_plan={"nothing": "whole"} if world.rank else {})
    return shapes


def test_ranks_agree_on_what_is_split(group):
    assert group(2, tensor=2)(starves) == [[2, 2]] * 2


def left_alone(world):
    """A rejected split leaves the model unchanged."""
    attend = sw.Attention(qkv=("q", "k", "v"), out="proj", heads="n_head")
    twice = {"blocks.1.attend": attend, "blocks.1.attend.q": "colwise"}
    for plan, text in (
        ({"tokens": "embedding"}, "is shared with"),
        (twice, "would be split twice"),
    ):
        model, plain = gpt(), gpt()
        with pytest.raises(ModelError, match=text):
            sw.Engine(model, adamw(model), tensor_plan=plan)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    return True


def test_refused_split_leaves_the_model_whole(group):
    assert all(group(2, tensor=2)(left_alone))


def minds_a_map(world):
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(12, 3, 18, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 5, 12).double()
    wanted = model(x)
    with pytest.raises(ModelError, match="out_proj is split, but self_attn, which uses its weight"):
        sw.Engine(model, adamw(model), tensor_plan={"self_attn.out_proj": "colwise_rep"})
    engine = sw.Engine(model, adamw(model), tensor_plan={"self_attn.out_proj": "whole"})
    assert torch.allclose(model(x), wanted, rtol=1e-9)
    assert model.self_attn.in_proj_weight.shape == (36, 12)
    assert model.linear1.weight.data.shape == (9, 12)
    engine.close()
    return True


def test_plan_for_a_map_of_known_attention_leaves_it_whole(group):
    assert all(group(2, tensor=2)(minds_a_map))


def nests(world, row, folder):
    """Nested blocks gather like a single block, and writes that would be lost raise an error."""
    model = gpt()
    engine = sw.Engine(model, adamw(model), zero=row)
    wanted = gpt().state_dict()
    with engine.full_parameters():
        with engine.full_parameters(model.blocks[0]):
            engine.export(folder / "whole.safetensors")
        assert torch.equal(model.blocks[0].widen.weight, wanted["blocks.0.widen.weight"])
        assert model.state_dict().keys() == wanted.keys()
        with (
            pytest.raises(UsageError, match="pass write=True to the outer block"),
            engine.full_parameters(write=True),
        ):
            pass
    with (
        pytest.raises(BrokenView, match="write"),
        engine.full_parameters(model.blocks[0]),
        torch.no_grad(),
    ):
        model.blocks[0].widen.weight.mul_(2.0)
    kept = whole(engine, model)
    assert all(torch.equal(kept[name], value) for name, value in wanted.items())
    with engine.full_parameters(write=True), torch.no_grad():
        with engine.full_parameters(write=True):
            model.blocks[0].widen.weight.mul_(2.0)
        model.blocks[0].widen.weight.mul_(2.0)
    kept = whole(engine, model)
    assert torch.equal(kept["blocks.0.widen.weight"], 4.0 * wanted["blocks.0.widen.weight"])
    assert model.blocks[0].widen.out_features < 23
    engine.close()
    return True


@pytest.mark.parametrize("row", [0, 3])
def test_nested_blocks_of_whole_tensors(group, tmp_path, row):
    assert all(group(2, tensor=2)(nests, row, tmp_path))
    exported = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    wanted = gpt().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in exported.items())


def infers(world, plan):
    """torch's fused inference of a layer is disabled if any part of the layer is split."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    x = torch.randn(2, 5, 8).double()
    with torch.no_grad():
        wanted = model(x)
        engine = sw.Engine(model, adamw(model), tensor_plan=plan)
        assert torch.allclose(model.eval()(x), wanted, rtol=1e-9)
    engine.close()
    assert model.layers[0].activation_relu_or_gelu == 1
    return True


UNFUSED = [
    {"layers.*.self_attn": "whole", "layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"},
    {"layers.*.linear1": "whole"},
]


@pytest.mark.parametrize("plan", UNFUSED)
def test_fused_inference_is_off_if_a_plan_splits(group, plan):
    assert all(group(2, tensor=2)(infers, plan))


class WithLatecomer(nn.Module):
    """Its split layers are frozen, and one parameter is used only in the last step."""

    def __init__(self):
        super().__init__()
        self.gpt, self.late = gpt().float(), nn.Parameter(torch.ones(8))
        self.gpt.blocks.requires_grad_(False)


def comes_late(world):
    model = WithLatecomer()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.SGD(trained, lr=0.1), bucket_mb=1e-5)
    norms = []
    for step in range(3):
        x = batch(step)
        loss = loss_of(model.gpt, x, (x * 5 + 1) % 24)
        engine.backward(loss + model.late.sum() if step == 2 else loss)
        norms.append(engine.step(max_norm=1e9).grad_norm)
    engine.close()
    return norms


def test_late_gradients_with_frozen_split_layers(group):
    one, other = group(2, tensor=2)(comes_late)
    assert one == other
    assert one == pytest.approx(group(1)(comes_late)[0], rel=1e-5)


def batches_of_workers(world):
    world.settings = dataclasses.replace(world.settings, batch="worker")
    loader = sw.Loader(list(range(12)), batch_size=3)
    scheduler = sw.lr.ScaledLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), steps_per_epoch=1, warmup_epochs=0
    )
    return loader.batch_size, [len(x) for x in loader], scheduler.multiplier


def test_batches_per_worker_count_per_replica(group):
    assert group(4, tensor=2)(batches_of_workers) == [(6, [3, 3], 2.0)] * 4
