"""Accelerate on engines, compared with stock Accelerate in a single process, by ZeRO stage."""

import copy
import gc
import os
import pickle
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.errors import BrokenCheckpoint, UsageError
from shardwise.model.compilation import CompiledForward
from tests.distributed.test_users_optimizer import ScheduleFree

accelerate = pytest.importorskip("accelerate", reason="the accelerate package is not there")

SIZES = [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))]
ROWS = 40
BATCH = 8
ENDS = {"fp32": 1e-5, "fp64": 1e-8}


def ranks(group, size):
    """Return ranks that do not reseed generators, as if an Accelerator had joined the run."""
    return group(size, reseed=False)


def fresh():
    """Forget what an Accelerator before this one was set up for."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    PartialState._reset_state()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def stock(**options):
    """Create stock Accelerate in a single process."""
    fresh()
    return accelerate.Accelerator(cpu=True, **options)


def ours(**options):
    from shardwise.accelerate import Accelerator

    fresh()
    return Accelerator(quiet=True, **options)


def split():
    """Return a config that keeps the global batch and its order on any number of processes."""
    return accelerate.utils.DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, data_seed=7
    )


def net(dtype=torch.float32):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.ModuleDict({"in": nn.Linear(4, 6)})["in"], *blocks, nn.Linear(6, 1)).to(
        dtype
    )


def data(dtype=torch.float32, rows=ROWS):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(x.to(dtype), x.prod(1, keepdim=True).sin().to(dtype))


def train(accelerator, dtype=torch.float32, epochs=2, seed=3):
    """Losses, norms and rates by step, and the weights in the end."""
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    accelerate.utils.set_seed(seed)
    loader = DataLoader(data(dtype), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                norm = torch.zeros(())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            seen += [mean.item(), norm.item(), scheduler.get_last_lr()[0]]
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return seen, state


def parity_case(world, zero, dtype):
    kind = getattr(torch, {"fp32": "float32", "fp64": "float64"}[dtype])
    options = {"gradient_accumulation_steps": 2}
    expected, weights = train(stock(dataloader_config=split(), **options), kind)
    seen, state = train(ours(dataloader_config=split(), zero=zero, **options), kind)
    assert seen == pytest.approx(expected, rel=ENDS[dtype])
    if world.is_main or zero < 3:
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=1e-3, atol=1e-3 * ENDS[dtype] / 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ENDS)
def test_results_of_stock_accelerate(group, size, dtype):
    """With five batches, two per step, the last step has one.

    Its loss is divided as in Accelerate.
    """
    for zero in range(4):
        ranks(group, size)(parity_case, zero, dtype)


def schedule_free(accelerator):
    """Return the losses at the training point and, after each epoch, at the evaluation point."""
    model = net(torch.float64)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    rows = data(torch.float64)
    loader = DataLoader(rows, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for _ in range(2):
        optimizer.train()
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        optimizer.eval()
        with torch.no_grad():
            x, y = rows[:]
            seen.append((model(x) - y).square().mean().item())
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return seen, state


def schedule_free_case(world, zero):
    expected, weights = schedule_free(stock(dataloader_config=split()))
    seen, state = schedule_free(ours(dataloader_config=split(), zero=zero))
    assert seen == pytest.approx(expected, rel=1e-8)
    if world.is_main:
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=1e-8)


@pytest.mark.parametrize("zero", [0, 3])
def test_schedule_free_optimizer_evaluates_at_its_average(group, zero):
    ranks(group, 2)(schedule_free_case, zero)


def own_batches_case(world, zero):
    """Give each process its own batches. The schedule advances by the number of processes."""
    accelerator = ours(zero=zero)
    seen, _ = train(accelerator)
    rates = seen[2::3]
    assert len(rates) == 2 * -(-ROWS // (BATCH * world.size))
    assert rates[0] == pytest.approx(1e-2 * 0.7 ** (world.size // 2))


@pytest.mark.parametrize("size", SIZES)
def test_schedules_go_on_as_theirs(group, size):
    ranks(group, size)(own_batches_case, 1)


class Resumed:
    """A run that saves in the middle of an epoch, and one that resumes from there."""

    def __init__(self, zero, folder, **options):
        self.accelerator = accelerator = ours(zero=zero, gradient_accumulation_steps=2, **options)
        model = nn.Sequential(net(), nn.Dropout(0.3), nn.Linear(1, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        accelerate.utils.set_seed(3, device_specific=True)
        loader = DataLoader(data(), batch_size=2, shuffle=True)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.folder = folder
        self.count = Count()
        accelerator.register_for_checkpointing(self.count)

    def run(self, loader, save_at=None):
        losses = []
        for number, (x, y) in enumerate(loader, 1):
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            self.count.value += 1
            if number == save_at:
                self.accelerator.save_state(self.folder)
        return losses


class Count:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def writes_case(world, zero, folder):
    run = Resumed(zero, folder)
    losses = run.run(run.loader, save_at=4)
    run.accelerator.free_memory()
    return losses


def resumes_case(world, zero, folder):
    run = Resumed(zero, folder)
    torch.manual_seed(99)
    run.accelerator.load_state(folder)
    assert run.count.value == 4
    assert run.scheduler.get_last_lr()[0] == pytest.approx(
        1e-2 * 0.7 ** (2 * world.size // 2), rel=1e-12
    )
    losses = run.run(run.accelerator.skip_first_batches(run.loader, 4))
    run.accelerator.free_memory()
    return losses


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_resumed_in_mid_epoch_without_a_difference(group, tmp_path, zero):
    whole = ranks(group, 2)(writes_case, zero, str(tmp_path))
    rest = ranks(group, 2)(resumes_case, zero, str(tmp_path))
    assert [each[4:] for each in whole] == rest
    assert len(rest[0]) > 2


def loads_case(world, zero, folder):
    run = Resumed(zero, folder)
    run.accelerator.load_state(folder)
    state = run.accelerator.get_state_dict(run.model)
    run.accelerator.free_memory()
    return {name: value.tolist() for name, value in state.items()}


def test_any_row_and_size_loads_it(group, tmp_path):
    ranks(group, 2)(writes_case, 3, str(tmp_path))
    two, _ = ranks(group, 2)(loads_case, 3, str(tmp_path))
    (one,) = ranks(group, 1)(loads_case, 0, str(tmp_path))
    assert one == two


def saves_stock_case(world, folder):
    accelerator = stock()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data().tensors
    for _ in range(3):
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    return model(x).sum().item()


def goes_on_case(world, zero, folder):
    accelerator = ours(zero=zero)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(folder)
    x, y = data().tensors
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    total = model(x).sum().item()
    accelerator.free_memory()
    return total


def test_goes_on_from_a_checkpoint_of_stock_accelerate(group, tmp_path):
    (expected,) = ranks(group, 1)(saves_stock_case, str(tmp_path))
    for zero in (1, 3):
        for total in ranks(group, 2)(goes_on_case, zero, str(tmp_path)):
            assert total == pytest.approx(expected, rel=1e-5)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def incomplete_case(world, folder):
    accelerator = ours(zero=2)
    model = net()
    accelerator.prepare(model, optimizer_of(model))
    accelerator.save_state(folder)
    accelerator.save_state(folder)
    assert [path.name for path in Path(folder).glob("step-*")] == ["step-0"]
    world.barrier()
    if world.is_main:
        (Path(folder) / "shardwise.json").unlink()
    world.barrier()
    with pytest.raises(BrokenCheckpoint, match="its save was killed"):
        accelerator.load_state(folder)
    accelerator.free_memory()


def test_an_incomplete_state_is_refused(group, tmp_path):
    ranks(group, 2)(incomplete_case, str(tmp_path))


def metrics_case(world, zero, rows):
    accelerator = ours(zero=zero)
    model = net()
    loader = DataLoader(data(rows=rows), batch_size=4)
    model, _, loader = accelerator.prepare(model, optimizer_of(model), loader)
    model.eval()
    found = []
    with torch.no_grad():
        for x, y in loader:
            found.append(accelerator.gather_for_metrics((model(x) - y).square()))
    mean = torch.cat(found).mean().item()
    assert len(torch.cat(found)) == rows
    plain = net()
    x, y = data(rows=rows).tensors
    assert mean == pytest.approx((plain(x) - y).square().mean().item(), rel=1e-5)
    accelerator.free_memory()


def test_every_sample_counts_once_in_metrics(group):
    for zero in (0, 3):
        ranks(group, 2)(metrics_case, zero, 21)


def clipping_case(world, zero, how):
    """Clip by other norms, by value, and for some parameters, as torch does in a single process."""
    x, y = data().tensors
    plain, model = net(), net()
    theirs, mine = optimizer_of(plain), optimizer_of(model)
    accelerator = ours(zero=zero)
    model, mine = accelerator.prepare(model, mine)
    part = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
    for _ in range(2):
        (plain(x) - y).square().mean().backward()
        expected = clip(nn.utils, plain, how)
        theirs.step()
        theirs.zero_grad()
        accelerator.backward((model(x[part]) - y[part]).square().mean())
        norm = clip(accelerator, model, how)
        mine.step()
        mine.zero_grad()
        if expected is not None:
            assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    with accelerator.full_parameters(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    accelerator.free_memory()


def clip(library, model, how):
    if how == "value":
        return library.clip_grad_value_(model.parameters(), 0.01)
    if how == "twice":
        library.clip_grad_norm_(model.parameters(), 0.2)
        return library.clip_grad_norm_(model.parameters(), 0.1)
    if how == "then value":
        library.clip_grad_norm_(model.parameters(), 0.1)
        return library.clip_grad_value_(model.parameters(), 0.01)
    if how == "part":
        return library.clip_grad_norm_(model[0].parameters(), 0.01)
    norm = {"largest": float("inf"), "two": 2.0}[how]
    return library.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm)


@pytest.mark.parametrize("how", ["two", "twice", "largest", "part", "value", "then value"])
def test_clipping_as_in_one_process(group, how):
    for zero in (0, 3):
        ranks(group, 2)(clipping_case, zero, how)


def gan(accelerator, generator, critic, steps=3):
    """Train a GAN in which the generator's loss leaves gradients in the critic too."""
    generator, critic = generator, critic
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    generator, critic, opt_g, opt_c = accelerator.prepare(generator, critic, opt_g, opt_c)
    x, _ = data().tensors
    rank, size = accelerator.process_index, accelerator.num_processes
    x = x[rank * ROWS // size : (rank + 1) * ROWS // size]
    losses = []
    for _ in range(steps):
        opt_c.zero_grad()
        fake = generator(x)
        accelerator.backward(critic(fake.detach()).square().mean() + (critic(x[:, :1]) - 1).mean())
        opt_c.step()
        opt_g.zero_grad()
        loss = (critic(generator(x)) - 1).square().mean()
        accelerator.backward(loss)
        opt_g.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    opt_c.zero_grad()
    accelerator.free_memory()
    return losses


def critic():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))


def gan_case(world, zero):
    expected = gan(stock(), net(), critic())
    accelerator = ours(zero=zero)
    assert gan(accelerator, net(), critic()) == pytest.approx(expected, rel=1e-5)


def test_several_models_with_optimizers_of_their_own(group):
    for zero in (0, 2, 3):
        ranks(group, 2)(gan_case, zero)


def two_optimizers(accelerator):
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rest = torch.optim.Adam(model[1:].parameters(), lr=1e-2)
    model, first, rest = accelerator.prepare(model, first, rest)
    x, y = data().tensors
    losses = []
    for _ in range(3):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        first.step()
        rest.step()
        first.zero_grad()
        rest.zero_grad()
        losses.append(loss.item())
    return losses, model, first


def two_optimizers_case(world, zero):
    expected, *_ = two_optimizers(stock())
    accelerator = ours(zero=zero)
    losses, model, first = two_optimizers(accelerator)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(accelerator.engines) == 1
    x, y = data().tensors
    accelerator.backward((model(x) - y).square().mean())
    first.step()
    with pytest.raises(UsageError, match=r"before Adam was stepped: .* step together"):
        accelerator.backward((model(x) - y).square().mean())
    accelerator.free_memory()


def test_the_optimizers_of_one_model_step_together(group):
    for zero in (0, 3):
        ranks(group, 2)(two_optimizers_case, zero)


def hooks_case(world, zero, folder):
    """Run save and load hooks, which must see full weights."""
    accelerator = ours(zero=zero)
    model = net()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    seen = []

    def save(models, weights, path):
        weights.pop()
        seen.append(sum(p.sum().item() for p in models[0].parameters()))

    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(folder)
    assert seen == [pytest.approx(sum(p.sum().item() for p in net().parameters()), rel=1e-5)]
    accelerator.free_memory()


def test_hooks_see_whole_weights(group, tmp_path):
    ranks(group, 2)(hooks_case, 3, str(tmp_path))


def refusals_case(world):
    from accelerate.local_sgd import LocalSGD

    accelerator = ours()
    model, other = net(), net()
    model, optimizer = accelerator.prepare(model, optimizer_of(other))
    x, y = data().tensors
    loss = (model(x) - y).square().mean()
    with pytest.raises(UsageError, match="nothing to train: SGD has parameters of a model"):
        accelerator.backward(loss)
    with pytest.raises(UsageError, match=r"SGD.step\(\) trains nothing"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"create_graph=\.\.\."):
        accelerator.backward(loss, create_graph=True)
    accelerator.free_memory()
    accelerator = ours(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    with accelerator.accumulate(model):
        accelerator.backward((model(x) - y).square().mean())
        with pytest.raises(UsageError, match=r"only if accelerator\.sync_gradients\."):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"save_state\(\) between .*accelerator\.sync_gradients\."):
        accelerator.save_state("nowhere")
    with (
        pytest.raises(UsageError, match="even_batches on"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    with pytest.raises(UsageError, match=r"step together.*--islands 2 --equal-every 8"):
        LocalSGD(accelerator, model, local_sgd_steps=8)
    assert not LocalSGD(accelerator, model, local_sgd_steps=8, enabled=False).enabled
    accelerator.free_memory()
    with pytest.raises(UsageError, match=r"Accelerator\(parallelism_config=.*--zero 0 to 3"):
        ours(parallelism_config=accelerate.ParallelismConfig())
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    with pytest.raises(UsageError, match="ACCELERATE_USE_FSDP asks for FSDP"):
        ours()


def test_what_cannot_be_had_says_what_to_write(group):
    ranks(group, 2)(refusals_case)


def precision_case(world, zero):
    """bf16 of Accelerate is the engine's preset: its forward computes in bf16."""
    accelerator = ours(mixed_precision="bf16", zero=zero)
    model = net()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    x, y = data().tensors
    out = model(x)
    assert (seen, out.dtype) == ([torch.bfloat16], torch.float32)
    accelerator.backward((out - y).square().mean())
    optimizer.step()
    assert accelerator.engines[0].settings.precision == "bf16-mixed"
    accelerator.free_memory()
    fp32 = ours(zero=zero)
    model = net()
    fp32.prepare(model, optimizer_of(model))
    assert fp32.engines[0].settings.precision == "fp32"
    fp32.free_memory()


def test_mixed_precision_is_the_engines(group):
    for zero in (0, 3):
        ranks(group, 2)(precision_case, zero)


def compiled_case(world):
    accelerator = ours(dynamo_backend="inductor")
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about its own code
        assert accelerator.prepare(model, optimizer_of(model))[0] is model
    assert accelerator.engines[0].settings.compile
    assert all(isinstance(block.forward, CompiledForward) for block in model[1:4])
    accelerator.free_memory()
    with pytest.raises(UsageError, match="dynamo_backend='cudagraphs'"):
        ours(dynamo_backend="cudagraphs")


def test_units_are_compiled_where_it_is_asked_for(group):
    ranks(group, 1)(compiled_case)  # each rank would import torch's compiler


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(*data(rows=12).tensors, strict=True))


def stream_case(world, zero):
    """Rank 0 reads, and gives every rank its part."""
    accelerator = ours(zero=zero)
    model = net()
    loader = DataLoader(Stream(), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    seen = []
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        seen += accelerator.gather_for_metrics(x).tolist()
    assert seen == data(rows=12).tensors[0].tolist()
    assert accelerator.engines[0].steps == 12 // (3 * world.size)
    accelerator.free_memory()


def test_data_without_a_length(group):
    for zero in (0, 3):
        ranks(group, 2)(stream_case, zero)


def named_case(world, zero, folder):
    """Save to numbered folders and remove the oldest; save models for other libraries."""
    import safetensors.torch

    config = accelerate.utils.ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = ours(zero=zero, project_config=config)
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    x, y = data().tensors
    for _ in range(3):
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        accelerator.save_state()
    kept = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/plain")
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    accelerator.load_state()
    again = accelerator.get_state_dict(model)
    world.barrier()
    names = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert accelerator.engines[0].steps == 3
    if world.is_main:
        saved = safetensors.torch.load_file(f"{folder}/plain/model.safetensors")
        for name, value in net().state_dict().items():
            assert torch.equal(again[name], kept[name])
            assert torch.equal(saved[name], kept[name])
            assert saved[name].shape == value.shape
    accelerator.free_memory()


@pytest.mark.parametrize("zero", [0, 3])
def test_numbered_checkpoints_and_whole_models(group, tmp_path, zero):
    ranks(group, 2)(named_case, zero, str(tmp_path))


def without_optimizer_case(world, zero):
    """Clip parameters without an optimizer, which would silently change the norm."""
    accelerator = ours(zero=zero)
    model = net()
    said = pytest.warns(UserWarning, match="in no optimizer") if world.is_main else nullcontext()
    with said:
        model, optimizer = accelerator.prepare(model, optimizer_of(model[1:]))
    x, y = data().tensors
    accelerator.backward((model(x) - y).square().mean())
    for norm in (2, float("inf")):
        with pytest.raises(UsageError, match=r"of 0\.weight and 1 more, which no prepared optim"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm)
    with pytest.raises(UsageError, match=r"clip_grad_value_ of 0\.weight"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match="needs a norm above 0"):
        accelerator.clip_grad_norm_(model[1:].parameters(), 0.0)
    accelerator.clip_grad_norm_(model[1:].parameters(), 1.0)
    model[0].requires_grad_(False)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.free_memory()


def test_clipping_names_parameters_without_an_optimizer(group):
    for zero in (0, 3):
        ranks(group, 2)(without_optimizer_case, zero)


def by_hand_case(world, accumulation):
    """Train a model that is prepared without an optimizer, as with DistributedDataParallel.

    Its gradients are those that a single process would have. An unprepared model has plain
    gradients.
    """
    accelerator = ours(gradient_accumulation_steps=accumulation, zero=3)
    torch.manual_seed(world.rank)  # the values of rank 0 become everyone's
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    model = accelerator.prepare(model)
    expected = copy.deepcopy(model)
    weights = [p.tolist() for p in model.parameters()]
    assert world.gather(weights) == [weights] * world.size
    x, y = data(rows=8).tensors
    for micro in range(accumulation):
        part = slice(4 * micro, 4 * micro + 4)
        ((expected(x[part]) - y[part]).square().mean() / accumulation).backward()
        with accelerator.accumulate(model):
            own = (model(world.share(x[part])) - world.share(y[part])).square().mean()
            accelerator.backward(own)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, atol=1e-7)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.item() == pytest.approx(
        nn.utils.clip_grad_norm_(expected.parameters(), 1e-3).item(), rel=1e-5
    )
    accelerator.clip_grad_value_(model.parameters(), 1e-6)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-6
    plain = nn.Linear(1, 1)
    accelerator.backward(plain(torch.full((1, 1), 1.0 + world.rank)).sum())
    assert plain.weight.grad.item() == pytest.approx((1.0 + world.rank) / accumulation)
    accelerator.free_memory()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_without_an_optimizer_has_averaged_gradients(group, accumulation):
    ranks(group, 2)(by_hand_case, accumulation)


def branch_case(world):
    """Train a layer that only one worker's loss reaches."""
    accelerator = ours()
    layers = accelerator.prepare(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]))
    accelerator.backward(layers[world.rank](torch.ones(1, 1)).sum())
    assert [p.grad.item() for p in (layers[0].weight, layers[1].weight)] == [0.5, 0.5]
    assert layers[2].weight.grad is None
    accelerator.free_memory()


def test_gradients_of_a_layer_that_some_workers_use_are_averaged_too(group):
    ranks(group, 2)(branch_case)


def pickled_case(world, exact):
    accelerator = ours(exact_mean=exact)
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.state.__dict__ == accelerator.state.__dict__
    assert again.world is world
    seen, _ = train(again) if not exact else (None, None)
    assert pickle.dumps(accelerator) == pickle.dumps(accelerator)  # hashes of functions need it
    model = net()
    accelerator.prepare(model, optimizer_of(model))
    assert pickle.loads(pickle.dumps(accelerator)).engines == []
    assert len(accelerator.engines) == 1
    accelerator.free_memory()
    if seen is not None:
        assert seen == train(ours())[0]


@pytest.mark.parametrize("exact", [False, True])
def test_an_accelerator_is_pickled_without_what_it_trains(group, exact):
    ranks(group, 2)(pickled_case, exact)


def dropped_case(world):
    """Check that a dropped model is freed, and that a copy has no engine."""
    accelerator, model = ours(), net()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    copied, seen = copy.deepcopy(model), weakref.ref(model)
    assert accelerator.is_trained(model)
    assert not accelerator.is_trained(copied)
    del accelerator, model, _
    gc.collect()
    assert seen() is None


def test_models_that_are_dropped_are_freed(group):
    ranks(group, 1)(dropped_case)


def one_step(accelerator, model, optimizer):
    x, y = data().tensors
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()


def taken_over_case(world, zero):
    """Let a second Accelerator continue from the state of the first."""
    x, y = data().tensors
    plain = net()
    alone = optimizer_of(plain)
    for _ in range(3):
        alone.zero_grad()
        (plain(x) - y).square().mean().backward()
        alone.step()
    model, first, second = net(), ours(zero=zero), ours(zero=zero)
    model, optimizer = first.prepare(model, optimizer_of(model))
    one_step(first, model, optimizer)
    model, optimizer = second.prepare(model, optimizer)
    assert (len(first.engines), len(second.engines)) == (0, 1)
    one_step(second, model, optimizer)
    with pytest.raises(UsageError, match="another Accelerator or Trainer has prepared the model"):
        first.backward((model(x) - y).square().mean())
    model, optimizer = first.prepare(model, optimizer)
    one_step(first, model, optimizer)
    with second.full_parameters(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    first.free_memory()


def test_another_accelerator_takes_a_model_over(group):
    for zero in (0, 3):
        ranks(group, 2)(taken_over_case, zero)


def parts_case(world):
    with pytest.raises(UsageError, match="cannot be combined with --tensor 2: it gives every"):
        ours()


def test_models_in_parts_are_refused(group):
    group(2, tensor=2)(parts_case)


def frozen_case(world, zero):
    """Use a teacher without an optimizer, and a model with frozen layers. Neither changes."""
    accelerator = ours(zero=zero)
    teacher, model = net().requires_grad_(False), net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    teacher, model, optimizer = accelerator.prepare(teacher, model, optimizer)
    x, _ = data().tensors
    before = teacher[0].weight.clone()
    accelerator.backward((model(x) - teacher(x) - 1).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with accelerator.full_parameters(model):
        assert torch.equal(model[0].weight, before)
        assert not torch.equal(model[-1].weight, teacher[-1].weight)
    accelerator.free_memory()


def test_frozen_models_and_layers(group):
    for zero in (0, 3):
        ranks(group, 2)(frozen_case, zero)
