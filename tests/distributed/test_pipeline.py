"""Pipelines beyond parity: checkpoints across meshes, transformers models, values read in a plain
loop, refusals."""

import copy
import io
import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, ModelError, UsageError
from tests.distributed.test_tensor import (
    adamw,
    batch,
    check_files,
    check_going_on,
    goes_on,
    gpt,
    plain_losses,
    saves,
    whole,
)
from tests.parity.problems import DeepGPT, SplittableGPT, loss_of

os.environ["HF_HUB_OFFLINE"] = "1"

FULL_MESHES = [
    ({"size": 2, "row": 3}, {"size": 4, "pipeline": 2, "tensor": 2, "row": 0}),
    ({"size": 4, "pipeline": 2, "row": 3}, {"size": 4, "pipeline": 4, "row": 0}),
    ({"size": 4, "pipeline": 2, "row": 2}, {"size": 2, "row": 3}),
    ({"size": 2, "row": 3}, {"size": 8, "pipeline": 4, "tensor": 2, "row": 0}),
    ({"size": 8, "pipeline": 4, "tensor": 2, "row": 0}, {"size": 2, "row": 3}),
]
MESHES = [
    ({"size": 4, "pipeline": 2, "tensor": 2, "row": 0}, {"size": 2, "row": 3}),
    ({"size": 2, "row": 3}, {"size": 4, "pipeline": 4, "row": 0}),
    *(pytest.param(*meshes, marks=pytest.mark.full) for meshes in FULL_MESHES),
]


def _mesh(told):
    return {key: told[key] for key in ("tensor", "pipeline") if key in told}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), MESHES)
def test_resumes_on_another_mesh(group, tmp_path, first, second):
    background = "tensor" in first
    told = group(first["size"], **_mesh(first))(
        saves, tmp_path, first["row"], None, background, limit=120
    )
    path = check_files(told[0], tmp_path)
    results = group(second["size"], **_mesh(second))(goes_on, path, second["row"], None, limit=120)
    check_going_on(told[0], results)


# -- the memory of a rank ------------------------------------------------------------------------


def has(world, row):
    model = gpt(seed=world.rank)
    whole_size = sum(p.numel() for p in model.parameters())
    engine = sw.Engine(model, adamw(model), zero=row)
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    shapes = [tuple(p.shape) for p in model.parameters()]
    engine.close()
    return sum(held.values()), 8 * whole_size, shapes


def test_rank_holds_only_its_layers(group):
    plain = [tuple(p.shape) for p in gpt().parameters()]
    for held, all_of_it, shapes in group(2, pipeline=2)(has, 0):
        assert held < 0.75 * all_of_it
        assert shapes == plain


def built_without_memory(world, row):
    torch.manual_seed(5)
    with sw.on_meta():
        model = SplittableGPT().double()
    engine = sw.Engine(model, adamw(model), zero=row)
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    values = whole(engine, model)
    x = batch(0)
    engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
    loss = engine.step(max_norm=0.5).loss
    engine.close()
    return sum(held.values()), values, loss


@pytest.mark.parametrize("row", [0, 3])
def test_rank_builds_only_its_layers(group, row):
    plain = gpt()
    size = 8 * sum(p.numel() for p in plain.parameters())
    for held, values, loss in group(2, pipeline=2)(built_without_memory, row):
        assert held < 0.75 * size
        assert all(torch.equal(values[k], v) for k, v in plain.state_dict().items())
        assert loss == pytest.approx(plain_losses(1)[0], rel=1e-9)


def writes(world, row):
    model = gpt()
    engine = sw.Engine(model, adamw(model), zero=row)
    x = batch(7)

    def loss():
        return loss_of(model, x, (x * 5 + 1) % 24)

    engine.backward(loss())
    engine.step()
    with engine.full_parameters(write=True), torch.no_grad():
        if world.rank == 0:
            for p in model.parameters():
                p.mul_(0.5)
            model.tokens.weight.add_(0.25)
        inner = loss()
    after = engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
    engine.step()
    with torch.no_grad():
        read = loss().item()
    values = whole(engine, model)
    with engine.full_parameters(), torch.no_grad():
        plain = loss().item()
    engine.close()
    return float(after), read, plain, values, type(inner).__name__


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 3])
def test_written_tied_weights_are_sent_again(group, row):
    model = gpt()
    optimizer = adamw(model)
    x = batch(7)
    loss_of(model, x, (x * 5 + 1) % 24).backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model.tokens.weight.add_(0.25)
    optimizer.zero_grad()
    wanted = loss_of(model, x, (x * 5 + 1) % 24)
    wanted.backward()
    optimizer.step()
    for after, read, plain, values, kind in group(4, pipeline=2)(writes, row):
        assert after == pytest.approx(wanted.item(), rel=1e-9)
        assert kind == "Tensor"
        assert read == pytest.approx(plain, rel=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=1e-8, atol=1e-10)


# -- values in a plain loop -------------------------------------------------------------------


def evaluates(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model))
    metrics = sw.Metrics()
    found = []
    model.eval()
    with torch.no_grad():
        for step in range(3):
            x = batch(step)
            scores = model(x)
            y = (x * 5 + 1) % 24
            hits = scores.argmax(1) == y
            found.append([hits.sum().item(), float(hits.float().mean()), list(scores.shape)])
            metrics.add(hits.numel(), accuracy=hits.float().mean())
            assert bool((scores.amax() > -1e9).all())
    found.append(metrics.compute()["accuracy"])
    engine.close()
    return found


def test_plain_loop_reads_values_on_all_ranks(group):
    model = gpt().eval()
    wanted = []
    with torch.no_grad():
        for step in range(3):
            x = batch(step)
            scores = model(x)
            hits = scores.argmax(1) == (x * 5 + 1) % 24
            wanted.append([hits.sum().item(), float(hits.float().mean()), list(scores.shape)])
    for found in group(2, pipeline=2)(evaluates):
        assert found[:3] == wanted
        assert found[3] == pytest.approx(sum(w[1] for w in wanted) / 3)


def passes_on(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model))
    with torch.no_grad():
        scores = model(batch(0))
    gathered = world.gather(scores)
    copied, file = copy.deepcopy(scores), io.BytesIO()
    torch.save(scores, file)
    file.seek(0)
    loaded = torch.load(file)
    engine.close()
    return [*gathered, copied, loaded]


def test_outputs_can_be_gathered_copied_and_saved(group):
    """Like a plain tensor, on every worker."""
    with torch.no_grad():
        wanted = gpt()(batch(0))
    for found in group(2, pipeline=2)(passes_on):
        assert [type(each) for each in found] == [torch.Tensor] * 4
        assert all(torch.allclose(each, wanted, rtol=1e-9) for each in found)


# -- kinds of models -----------------------------------------------------------------------------


class Skips(nn.Module):
    """All later layers use the output of the first layer and a mask. There are a shared activation,
    a parameter outside of layers, an output that is a view, and an integer buffer."""

    def __init__(self):
        super().__init__()
        self.act = nn.GELU()
        self.scale = nn.Parameter(torch.ones(12))
        self.down = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(24, 12) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 1)

    def forward(self, x, *, mask):
        kept = []
        for layer in self.down:
            x = self.act(layer(x * mask)) * self.scale
            kept.append(x)
        for layer, earlier in zip(self.up, reversed(kept), strict=True):
            x = self.act(layer(torch.cat([x, earlier], -1))) + kept[0]
        return self.head(self.norm(x).transpose(0, 1).T).squeeze(-1)


def skip_problem():
    torch.manual_seed(3)
    model = Skips().double()
    x, mask = torch.randn(12, 12).double(), (torch.rand(12, 12) > 0.2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), x, mask


def skips(world, schedule, micros):
    model, optimizer, x, mask = skip_problem()
    engine = sw.Engine(model, optimizer, schedule=schedule, microbatches=micros)
    losses = []
    for _ in range(4):
        loss = engine.forward_backward(lambda x, m: model(x, mask=m).square().mean(), x, mask)
        engine.step()
        losses.append(float(loss))
    values = whole(engine, model)
    engine.close()
    return losses, values


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_skip_connections(group, schedule):
    """BatchNorm sees micro-batches, like with gradient accumulation."""
    model, optimizer, x, mask = skip_problem()
    wanted = []
    for _ in range(4):
        parts = [
            model(a, mask=m).square().mean() for a, m in zip(x.chunk(2), mask.chunk(2), strict=True)
        ]
        loss = sum(parts) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses, values in group(2, pipeline=2)(skips, schedule, 2):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=1e-8, atol=1e-10)


class WithoutHead(SplittableGPT):
    """Computes scores with the embedding's weight, outside of all modules."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, x):
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight).transpose(1, 2)


def without_head():
    torch.manual_seed(5)
    model = WithoutHead().double()
    return model, adamw(model)


def trains_without_head(world, row, schedule, in_turn):
    model, optimizer = without_head()
    engine = sw.Engine(model, optimizer, zero=row, schedule=schedule, microbatches=2)
    losses = []
    for step in range(4):
        x = batch(step)
        if in_turn:
            engine.backward(loss_of(model, x, (x * 5 + 1) % 24))
        else:
            engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
        losses.append(engine.step(max_norm=0.5).loss)
        if step == 1:
            with torch.no_grad():
                losses.append(loss_of(model, x, x % 24).item())
    values = whole(engine, model)
    engine.close()
    return losses, values


@pytest.mark.parametrize(
    ("row", "schedule", "in_turn"),
    [(0, "1f1b", False), (3, "1f1b", False), (0, "zero-bubble", False), (1, "interleaved", False),
     (3, "1f1b", True)],
)  # fmt: skip
def test_weight_used_outside_of_its_module(group, row, schedule, in_turn):
    model, optimizer = without_head()
    wanted = []
    for step in range(4):
        x = batch(step)
        loss = loss_of(model, x, (x * 5 + 1) % 24)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
        if step == 1:
            with torch.no_grad():
                wanted.append(loss_of(model, x, x % 24).item())
    for losses, values in group(2, pipeline=2)(trains_without_head, row, schedule, in_turn):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=1e-8, atol=1e-10)


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "use_cache": False}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, **sizes,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, **sizes,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).double()
    config = transformers.T5Config(
        d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, **sizes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double()


def trains_transformers(world, name, schedule, row):
    model = of_transformers(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, schedule=schedule, microbatches=2, zero=row)
    losses = []
    for step in range(3):
        x = batch(step) + 1
        engine.forward_backward(lambda x: model(input_ids=x, labels=x).loss, x)
        losses.append(engine.step(max_norm=1.0).loss)
    values = whole(engine, model)
    engine.close()
    return losses, values


@pytest.mark.parametrize(
    ("name", "schedule", "row"),
    [("gpt2", "1f1b", 0), ("llama", "interleaved", 1), ("t5", "1f1b", 3), ("t5", "zero-bubble", 2)],
)
def test_models_of_transformers(group, name, schedule, row):
    model = of_transformers(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for step in range(3):
        x = batch(step) + 1
        loss = sum(model(input_ids=part, labels=part).loss for part in x.chunk(2)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses, values in group(2, pipeline=2)(trains_transformers, name, schedule, row):
        assert losses == pytest.approx(wanted, rel=1e-6)  # their scores are fp32
        for key, value in model.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-6)


class Drops(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(4)))


def drops(world):
    torch.manual_seed(0)
    model = Drops()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), microbatches=2)
    x = torch.ones(4, 64)
    masks = []
    for block in model:
        block[1].register_forward_hook(lambda m, a, out: masks.append((out != 0).tolist()))
    seen = []
    for _ in range(2):
        engine.forward_backward(lambda x: model(x).mean() + torch.rand(()) * 0, x)
        engine.step()
        seen.append(float(torch.rand(())))
    engine.close()
    return masks, seen


def test_dropout_differs_by_stage_and_draws_outside_agree(group):
    first, second = group(2, pipeline=2)(drops)
    again, _ = group(2, pipeline=2)(drops)
    everything = [str(mask) for mask in first[0] + second[0]]
    assert len(everything) == 16
    assert len(set(everything)) == 16
    assert first[1] == second[1]
    assert again == first


# -- refusals ------------------------------------------------------------------------------------


def refused(world, settings, stages=None):
    torch.manual_seed(0)
    model = DeepGPT()
    try:
        engine = sw.Engine(model, adamw(model), **settings)
    except (ConfigError, ModelError) as error:
        return str(error)
    engine.close()
    return "taken"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"stages": ("blocks.9",)}, "'blocks.9' matches no layer. A stage begins at one of tokens"),
        ({"stages": ("blocks.*",)}, "'blocks.\\*' matches 6 layers"),
        ({"stages": ("blocks.1", "blocks.2")}, "gives 3 stages.*name 1, or 3"),
        ({"stages": ("blocks.1", "blocks.2", "blocks.3")}, "takes one stage per worker"),
        ({"stages": ("tokens",)}, "takes the first module of each stage except the first one"),
        ({"compile": True}, "--pipeline 2 cannot be combined with --compile"),
        ({"schedule": "zero-bubble", "zero": 3}, "write --zero 2, or --schedule 1f1b"),
        ({"units": ("tokens",), "stages": ("norm",)}, "taken"),
        ({"stages": ("head",)}, "Stage 1 \\(head\\) has nothing to train"),
    ],
    ids=str,
)
def test_rejects_settings(group, settings, hint):
    for said in group(2, pipeline=2)(refused, settings):
        assert re.search(hint, said), said


def misused(world, how):
    model = gpt()
    several = how in ("odd", "failing, two stages on each")
    options = {"schedule": "interleaved" if several else "1f1b"}
    engine = sw.Engine(model, adamw(model), microbatches=5 if how == "odd" else 2, **options)
    x = batch(0)
    told = ""
    try:
        if how == "item":
            engine.forward_backward(lambda x: model(x).mean() * model(x).sum().item(), x)
        elif how == "other":
            engine.forward_backward(lambda x: x.double().mean(), x)
        elif how == "ragged":
            engine.forward_backward(lambda x, y: model(x).mean(), x, x[:3])
        elif how == "vector":
            engine.forward_backward(lambda x: model(x).mean((1, 2)), x)
        elif how == "odd":
            engine.forward_backward(lambda x: model(x).mean(), x)
        elif how == "copy":
            with engine.full_parameters():
                plain = copy.deepcopy(model)
            assert torch.isfinite(plain(x)).all()
            copy.deepcopy(model)
        elif how == "state":
            model.state_dict()
        elif how == "whole":
            with engine.full_parameters(), torch.enable_grad():
                engine.backward(model(x).mean())
        elif how.startswith("failing"):
            rounds = []

            def fails(x):
                rounds.append(0)
                loss = model(x).mean()
                if len(rounds) == 3:  # in the second micro-batch, after the trial
                    raise UsageError("in the middle")
                return loss

            engine.forward_backward(fails, x)
        elif how == "uneven":
            with engine.uneven():
                raise AssertionError("entered")
        elif how == "set":

            def loss(x):
                told = torch.zeros(3, dtype=torch.double)
                told[0] = model(x).mean()
                return told.sum()

            engine.forward_backward(loss, x)
    except (UsageError, ConfigError) as error:
        told = str(error)
    losses = []
    for step in range(0 if how == "odd" else 2):  # the engine continues
        x = batch(step)
        engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
        losses.append(engine.step(max_norm=0.5).loss)
    assert losses == pytest.approx(plain_losses(len(losses)), rel=1e-9)
    engine.close()
    return told


@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ("item", "values cannot be read"),
        ("other", "that no layer of the model computed"),
        ("ragged", "tensors of the same first dimension above 0, not \\[3, 8\\]"),
        ("vector", "loss_of must return a scalar loss"),
        ("odd", "does not support 5 micro-batches.*multiple of 2"),
        ("copy", "A copy of a model is not possible when this worker has only some of its layers"),
        (
            "state",
            "state_dict\\(\\) of a model is not possible when this worker has only some",
        ),
        ("whole", "engine.backward inside engine.full_parameters"),
        ("failing", "in the middle"),
        ("failing, two stages on each", "in the middle"),
        ("uneven", "no worker has all layers.*engine.full_parameters"),
        ("set", "__setitem__ writes a value that only one stage has"),
    ],
)
def test_names_misuse_and_continues(group, how, hint):
    for said in group(2, pipeline=2)(misused, how):
        assert re.search(hint, said), said


class Backwards(nn.Module):
    """Registers its layers in a different order from the one in which it runs them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.body(x))


def runs_backwards(world):
    model = Backwards()
    engine = sw.Engine(model, adamw(model))
    try:
        engine.forward_backward(lambda x: model(x).mean(), torch.ones(4, 8))
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_rejects_layers_that_run_in_another_order(group):
    for said in group(2, pipeline=2)(runs_backwards):
        assert "head is on stage 0 and takes the output of the later stage 1" in said


def test_forward_backward_without_a_pipeline(group):
    for losses in group(2)(one_worker_share):
        assert losses == pytest.approx(plain_losses(3), rel=1e-9)


def one_worker_share(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model), microbatches=3)
    losses = []
    for step in range(3):
        x = world.share(batch(step))
        engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
        losses.append(engine.step(max_norm=0.5).loss)
    engine.close()
    return losses


def fails_on_one(world):
    model = gpt()
    engine = sw.Engine(model, adamw(model), microbatches=2)
    x = batch(0)
    engine.forward_backward(lambda x: loss_of(model, x, (x * 5 + 1) % 24), x)
    engine.step()

    def bad(x):
        if world.rank == 1:
            raise ZeroDivisionError("in the second stage")
        return loss_of(model, x, (x * 5 + 1) % 24)

    engine.forward_backward(bad, x)


def test_failed_stage_ends_the_others_in_time(group):
    with pytest.raises(AssertionError, match="in the second stage"):
        group(2, pipeline=2, timeout=10)(fails_on_one, limit=40)


def mean_loss(world):
    """The last batch of an epoch has fewer rows than micro-batches. F.mse_loss is called by
    name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatches=4)
    x, y = torch.randn(11, 4).double(), torch.randn(11, 1).double()
    losses = []
    for rows in (slice(0, 8), slice(8, 11)):
        loss = engine.forward_backward(lambda a, b: F.mse_loss(model(a), b), x[rows], y[rows])
        losses.append((float(loss), engine.step().loss))
    engine.close()
    return losses


def test_fewer_rows_than_micro_batches(group):
    plain = group(1)(mean_loss)[0]
    for losses in group(2, pipeline=2)(mean_loss):
        for mine, wanted in zip(losses, plain, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-9)


# -- unusual models ------------------------------------------------------------------------------


class Odd(nn.Module):
    """Ties two weights crosswise, has a scale outside of layers, a table created in the first
    forward, a BatchNorm of buffers only, and a bias in the second half that depends on no input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bias = nn.Embedding(1, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.back, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.back.weight, self.out.weight = self.second.weight, self.first.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.table = None

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 6, dtype=x.dtype)
        x = x * self.scale.exp() * self.table
        x = self.back(x) + self.bias(torch.zeros((), dtype=torch.long))
        return self.out(self.norm(x))


def odd_problem():
    torch.manual_seed(2)
    model = Odd().double()
    # AdamW would turn rounding errors before the BatchNorm into steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.randn(8, 6).double()


STAGES = ("bias",)
CROSSWISE = ("second", "back", "out")
"""Each of two workers uses a weight that the other owns."""


def trains_odd(world, schedule, row):
    model, optimizer, x = odd_problem()
    engine = sw.Engine(
        model,
        optimizer,
        schedule=schedule,
        microbatches=2,
        zero=row,
        stages=CROSSWISE if schedule == "interleaved" else STAGES,
    )
    losses = []
    for step in range(4):
        if step == 2:
            model.first.requires_grad_(False)
            model.first.weight.requires_grad_(True)
        engine.forward_backward(lambda x: (model(x) - x).square().mean(), x)
        losses.append(engine.step().loss)
    values = whole(engine, model)
    engine.close()
    return losses, values


@pytest.mark.parametrize(
    ("schedule", "row"), [("1f1b", 0), ("zero-bubble", 1), ("1f1b", 3), ("interleaved", 2)]
)
def test_unusual_model(group, schedule, row):
    model, optimizer, x = odd_problem()
    wanted = []
    for step in range(4):
        if step == 2:
            model.first.requires_grad_(False)
            model.first.weight.requires_grad_(True)
        loss = sum((model(part) - part).square().mean() for part in x.chunk(2)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses, values in group(2, pipeline=2)(trains_odd, schedule, row):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=1e-8, atol=1e-10)


def several_losses(world, how):
    model = gpt()
    engine = sw.Engine(model, adamw(model))
    x, z = batch(0), batch(1)
    if how == "one forward":
        scores = model(x)
        engine.backward(scores.square().mean(), retain_graph=True, last=False)
        engine.backward(F.cross_entropy(scores, (x * 5 + 1) % 24))
    else:
        with torch.no_grad():
            model(z)
        model(z)  # recorded but never used
        first, second = model(x).square().mean(), loss_of(model, z, (z * 5 + 1) % 24)
        engine.backward(first, last=False)
        engine.backward(second)
    engine.step()
    values = whole(engine, model)
    engine.close()
    return values


@pytest.mark.parametrize("how", ["one forward", "two forwards"])
def test_several_losses_in_a_plain_loop(group, how):
    model = gpt()
    optimizer = adamw(model)
    x, z = batch(0), batch(1)
    scores = model(x)
    second = z if how == "two forwards" else x
    again = scores if how == "one forward" else model(z)
    loss = scores.square().mean() + F.cross_entropy(again, (second * 5 + 1) % 24)
    (loss / 2).backward()
    optimizer.step()
    for values in group(2, pipeline=2)(several_losses, how):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=1e-8, atol=1e-10)


def ignores(world):
    """Run a last micro-batch without items that count, so that its mean is NaN."""
    model = gpt()
    engine = sw.Engine(model, adamw(model), microbatches=2)
    x = batch(0)
    y = (x * 5 + 1) % 24
    y[4:] = -100
    loss = engine.forward_backward(
        lambda x, y: loss_of(model, x, y), x, y, weight=lambda x, y: (y != -100).sum()
    )
    stats = engine.step(max_norm=0.5)
    engine.close()
    return float(loss), stats.loss, stats.grad_norm


def test_micro_batch_without_weight(group):
    model = gpt()
    x = batch(0)[:4]
    loss = loss_of(model, x, (x * 5 + 1) % 24)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for found in group(2, pipeline=2)(ignores):
        assert found == pytest.approx((loss.item(), loss.item(), norm), rel=1e-9)


def what_is_said(world, how):
    model = gpt()
    known = list(model.parameters())
    if how == "outside":
        known.append(nn.Parameter(torch.zeros(3)))
    if how == "head only":
        known = [p for block in model.blocks[1:] for p in block.parameters()]
    options = {}
    if how == "recomputed":
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        known, options = list(model.parameters()), {"activations": "recomputed"}
    engine = None
    try:
        engine = sw.Engine(model, torch.optim.AdamW(known), microbatches=2, **options)
        x = batch(0)
        if how == "mask":
            engine.forward_backward(lambda x: model(x).transpose(1, 2)[x > 3].mean(), x)
        elif how == "mask in a plain loop":
            model(x).transpose(1, 2)[x > 3].mean()
        elif how == "in place":
            hits = torch.zeros((), dtype=torch.long)
            hits.add_((model(x).argmax(1) == x).sum())
        elif how == "kept":
            kept = []

            def loss(x):
                kept.append(model(x).argmax(1))
                return loss_of(model, x, x % 24)

            engine.forward_backward(loss, x)
            kept[-1].sum().item()
    except (ModelError, ConfigError, UsageError) as error:
        return str(error)
    finally:
        if engine is not None:
            engine.close()
    return "taken"


@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ("outside", "is in no model, so with --pipeline"),
        ("head only", "Stage 0 .* has nothing to train"),
        ("recomputed", "which has no repeated blocks, again as one"),
        ("mask", "has a shape or number that depends on values"),
        ("mask in a plain loop", "has a shape or number that depends on values"),
        ("in place", "add_ writes a value that only one stage has"),
        ("kept", "used after engine.forward_backward"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*trainable parameter")
def test_refusals_are_raised_on_all_ranks(group, how, hint):
    for said in group(2, pipeline=2)(what_is_said, how):
        assert re.search(hint, said), said
