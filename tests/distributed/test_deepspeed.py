"""DeepSpeed's API on engines, compared with plain PyTorch that uses DeepSpeed's arithmetic."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import BrokenCheckpoint, CheckpointError, ConfigError, UsageError

SIZES = [1, 2]
STEPS = 3


def ranks(group, size):
    return group(size, reseed=False, quiet=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(step, micro, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(4, 4, generator=draw, dtype=torch.float64)
    return x, x[:, :3].sin()


def loss_of(model, x, y, reduction="mean"):
    return nn.functional.mse_loss(model(x), y, reduction=reduction)


def json_of(zero, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": zero},
    } | more


def plain(size, accumulation, max_norm, *, averages=True):
    """Return losses, norms and weights of a single process that imitates DeepSpeed."""
    from shardwise.deepspeed.schedules import WarmupLR

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=3)
    seen = []
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(size):
                loss = loss_of(model, *batch(step, micro, rank))
                (loss / accumulation / (size if averages else 1)).backward()
                seen.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        seen.append(norm.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return seen, model.state_dict()


def trained(world, config, steps=range(STEPS)):
    """Train the same model with DeepSpeed's API, and leave the engine open."""
    import shardwise.deepspeed as deepspeed

    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine, run(world, engine, steps)


def run(world, engine, steps):
    seen = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, *batch(step, micro, world.rank))
            engine.backward(loss)
            engine.step()
            seen += [float(each) for each in world.gather(loss.detach())]
            last = micro == engine.gradient_accumulation_steps() - 1
            assert engine.was_step_applied() == last
        seen.append(engine.get_global_grad_norm())
    return seen


def close(engine, world):
    engine.destroy()
    if world.size == 1 and dist.is_initialized():
        dist.destroy_process_group()


def parity_case(world, zero, accumulation, max_norm):
    config = json_of(zero, gradient_accumulation_steps=accumulation, gradient_clipping=max_norm)
    expected, weights = plain(world.size, accumulation, max_norm)
    engine, seen = trained(world, config)
    assert seen == pytest.approx(expected, rel=1e-8)
    assert engine.zero_optimization_stage() == zero
    assert not engine.zero_cpu_offload()
    assert engine.autotp_size() == 1
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulation)
    state = engine.module_state_dict()
    if world.is_main:
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=1e-8, atol=1e-10), name
    whole = engine.optimizer_state_dict()
    assert whole["state"][0]["exp_avg"].shape == next(iter(weights.values())).shape
    engine.load_optimizer_state_dict(whole)
    close(engine, world)


@pytest.mark.parametrize("size", SIZES)
def test_arithmetic_is_deepspeeds(group, size):
    for zero in range(4):
        ranks(group, size)(parity_case, zero, 2, 0.05)
    ranks(group, size)(parity_case, 1, 1, 0)


def sum_case(world):
    config = json_of(2, gradient_allreduce_op="sum", gradient_clipping=0)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    expected, _ = plain(world.size, 1, 0, averages=False)
    engine, seen = trained(world, config)
    assert seen == pytest.approx(expected, rel=1e-8)
    assert engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer()
    close(engine, world)


def test_gradients_are_added_up_over_workers(group):
    ranks(group, 2)(sum_case)


def boundary_case(world):
    """Boundaries that the script sets itself, and steps that all are boundaries."""
    expected, _ = plain(world.size, 1, 1.0)
    config = json_of(1, managed_gradient_accumulation=False)
    engine, seen = trained(world, config)
    assert seen == pytest.approx(expected, rel=1e-8)
    close(engine, world)
    engine, _ = trained(world, json_of(2, gradient_accumulation_steps=4), steps=[])
    for step in range(STEPS):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, *batch(step, 0, world.rank)), scale_wrt_gas=False)
        engine.step()
        assert engine.was_step_applied()
        assert engine.get_global_grad_norm() == pytest.approx(expected[(step + 1) * 3 - 1])
    close(engine, world)


def test_boundaries(group):
    ranks(group, 2)(boundary_case)


def whole_weights(engine):
    """Return copies of the full weights, on every rank."""
    import shardwise.deepspeed as deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def checkpoint_case(world, folder):
    """Resume with a different ZeRO stage, with the same result as an uninterrupted run."""
    expected, _ = plain(world.size, 1, 1.0)
    engine, _ = trained(world, json_of(2), steps=range(2))
    assert engine.save_checkpoint(folder, client_state={"epoch": 7, "seen": torch.arange(3)})
    close(engine, world)
    engine, _ = trained(world, json_of(3), steps=[])
    path, client = engine.load_checkpoint(folder)
    assert path.endswith("global_step2")
    assert client["epoch"] == 7
    assert client["seen"].tolist() == [0, 1, 2]
    assert engine.global_steps == 2
    seen = run(world, engine, range(2, STEPS))
    assert seen == pytest.approx(expected[-len(seen) :], rel=1e-8)
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    with pytest.raises(CheckpointError, match="no checkpoint with the tag 'other'"):
        engine.load_checkpoint(folder, "other")
    with pytest.raises(UsageError, match="without running code"):
        engine.save_checkpoint(folder, client_state={"bad": object()})
    before = whole_weights(engine)
    world.barrier()
    if world.is_main:
        next(Path(folder).glob("global_step2/client-2-*.pt")).write_bytes(b"cut")
    world.barrier()
    with pytest.raises(BrokenCheckpoint, match=r"has a damaged client-\*.pt"):
        engine.load_checkpoint(folder)
    assert all(map(torch.equal, before, whole_weights(engine)))
    with pytest.raises(CheckpointError, match="is a checkpoint of engine"):
        engine.load_checkpoint(f"{folder}/global_step2", "step-2")
    world.barrier()
    if world.is_main:
        (Path(folder) / "global_step2/step-2/checkpoint.json").unlink()
    world.barrier()
    with pytest.raises(BrokenCheckpoint, match=r"step-2 lacks checkpoint\.json"):
        engine.load_checkpoint(folder)
    world.barrier()
    if world.is_main:
        (Path(folder) / "latest").write_bytes(b"\xff")
    world.barrier()
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load_checkpoint(folder)
    close(engine, world)


@pytest.mark.parametrize("size", SIZES)
def test_checkpoints_go_on_in_another_stage(group, size, tmp_path):
    ranks(group, size)(checkpoint_case, str(tmp_path))


def whole_case(world):
    import shardwise.deepspeed as deepspeed

    with deepspeed.zero.Init():
        model = net()
    with deepspeed.zero.GatheredParameters(model[0].bias, modifier_rank=0):
        nn.init.constant_(model[0].bias, 0.25)
    engine, *_ = deepspeed.initialize(model=model, config=json_of(3))
    with deepspeed.zero.GatheredParameters(list(model[0].parameters())):
        assert model[0].bias.tolist() == [0.25] * 6
        assert torch.equal(model[0].weight, net()[0].weight)
    last = world.size - 1
    with deepspeed.zero.GatheredParameters(model[2].bias, modifier_rank=last):
        model[2].bias.fill_(world.rank + 1.0)
    full = deepspeed.utils.safe_get_full_fp32_param(model[2].bias)
    assert full.tolist() == [world.size] * 3
    run(world, engine, range(1))
    moments = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    assert moments.shape == model[0].weight.shape
    assert moments.abs().sum() > 0
    engine.backward(loss_of(engine, *batch(0, 0, world.rank)))
    assert deepspeed.utils.safe_get_full_grad(model[0].weight).shape == (6, 4)
    engine.step()
    close(engine, world)


@pytest.mark.parametrize("size", SIZES)
def test_whole_parameters_and_states(group, size):
    ranks(group, size)(whole_case)


def copied_case(world, folder):
    """Copy weights as adapter scripts do, and save them as a plain fp32 state_dict."""
    import shardwise.deepspeed as deepspeed
    from shardwise.deepspeed import zero_to_fp32
    from shardwise.deepspeed.zero import ZeroParamStatus

    config = json_of(3, bf16={"enabled": True})
    del config["scheduler"]  # its first rate is 0
    engine, *_ = deepspeed.initialize(model=net().float(), config=config)
    run_in(engine, torch.bfloat16, world.rank)
    weight = engine.module[0].weight
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert (weight.ds_shape, weight.ds_numel) == ((6, 4), 24)
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.ds_status == ZeroParamStatus.AVAILABLE
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        copied = weight.data.clone()
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is not None) == world.is_main
    assert whole is None or torch.equal(whole["0.weight"], copied)
    engine.save_checkpoint(folder)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state["0.weight"].dtype == torch.float32
    assert not torch.equal(state["0.weight"], copied.float())
    assert torch.equal(state["0.weight"].bfloat16(), copied)
    whole = zero_to_fp32.load_state_dict_from_zero_checkpoint(net().float(), folder)
    assert torch.equal(whole[0].weight, state["0.weight"])
    written = Path(folder) / f"whole-{world.rank}"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, written, "5GB")
    found = torch.load(written / "pytorch_model.bin")
    assert all(torch.equal(found[name], value) for name, value in state.items())
    with pytest.raises(UsageError, match="one file"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, written, "0.01KB")
    with pytest.raises(UsageError, match="lazy_mode"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    engine.destroy()
    assert not hasattr(weight, "ds_id")
    close(engine, world)


def run_in(engine, dtype, rank):
    x, y = (each.to(dtype) for each in batch(0, 0, rank))
    engine.backward((engine(x) - y).square().mean())
    engine.step()


def test_weights_are_copied_out_as_scripts_do(group, tmp_path):
    ranks(group, 2)(copied_case, str(tmp_path))


def scaled_case(world, zero):
    """loss.backward() and engine.scale(loss).backward() are engine.backward(loss)."""
    import shardwise.deepspeed as deepspeed

    seen = []
    for way in ("engine", "scale", "loss", "gradient"):
        model = net()
        engine, *_ = deepspeed.initialize(
            model=model, config=json_of(zero, gradient_accumulation_steps=2)
        )
        for micro in range(2):
            loss = loss_of(engine, *batch(0, micro, world.rank))
            match way:
                case "engine":
                    engine.backward(loss)
                case "scale":
                    (2 * engine.scale(loss / 2)).backward()
                case "loss":
                    loss.backward()
                case "gradient":
                    errors = loss_of(engine, *batch(0, micro, world.rank), reduction="none")
                    errors.backward(torch.full_like(errors, 1 / errors.numel()))
            engine.step()
        with deepspeed.zero.GatheredParameters(model[0].weight):
            seen.append((engine.get_global_grad_norm(), model[0].weight.tolist()))
        engine.destroy()
    for norm, weights in seen[1:]:
        assert norm == pytest.approx(seen[0][0], rel=1e-12)
        assert torch.allclose(torch.tensor(weights), torch.tensor(seen[0][1]), rtol=1e-9)
    close(engine, world)


def test_every_way_to_write_a_backward_is_the_same(group):
    for zero in (1, 3):
        ranks(group, 2)(scaled_case, zero)


def one_loss_case(world, zero):
    """Run one loss.backward() for several engines. A model without an engine uses torch's own."""
    import shardwise.deepspeed as deepspeed

    seen = []
    for way in ("engine", "loss"):
        engines = [deepspeed.initialize(model=net(), config=json_of(zero))[0] for _ in range(2)]
        beside = net()
        for step in range(2):
            x, y = batch(step, 0, world.rank)
            losses = [(number + 1) * loss_of(e, x, y) for number, e in enumerate(engines)]
            if way == "loss":
                sum(losses).backward()
            else:
                for each, loss in zip(engines, losses, strict=True):
                    each.backward(loss)
            for each in engines:
                each.step()
            beside.zero_grad()
            loss_of(beside, x, y).backward()
        seen.append([each.get_global_grad_norm() for each in engines])
        gradient = beside[0].weight.grad.clone()
        for each in engines:
            each.destroy()
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)
    assert seen[0][0] != pytest.approx(seen[0][1], rel=1e-3)
    beside.zero_grad()
    loss_of(beside, *batch(1, 0, world.rank)).backward()
    assert torch.equal(beside[0].weight.grad, gradient)
    close(engines[0], world)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_backward_reaches_all_engines_of_its_loss_and_no_other_model(group, zero):
    ranks(group, 2)(one_loss_case, zero)


def second_order_case(world):
    import shardwise.deepspeed as deepspeed

    engine, *_ = deepspeed.initialize(model=net(), config=json_of(1))
    try:
        loss_of(engine, *batch(0, 0, world.rank)).backward(create_graph=True)
    finally:
        close(engine, world)


def test_a_backward_that_keeps_a_graph_of_gradients_is_refused(group):
    for kind, message in ranks(group, 2).errors(second_order_case):
        assert kind == "UsageError"
        assert "without the engine" in message


def seeded_case(world):
    import random

    import numpy as np

    from shardwise.deepspeed import utils

    found = []
    for _ in range(2):
        utils.set_random_seed(3)
        found.append((random.random(), np.random.rand(), torch.rand(2).tolist()))
    assert found[0] == found[1]


def test_set_random_seed_seeds_all_generators(group):
    ranks(group, 1)(seeded_case)


def bf16_case(world, zero):
    """Round weights before creating masters. Outputs are bf16, as the module computed them."""
    import shardwise.deepspeed as deepspeed

    model = net().float()
    reference = copy.deepcopy(model).bfloat16()
    config = json_of(zero, bf16={"enabled": True})
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    x, y = (each.bfloat16() for each in batch(0, 0, world.rank))
    output = engine(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, reference(x))
    engine.backward((output - y).square().mean())
    engine.step()
    assert engine.was_step_applied()
    assert engine.bfloat16_enabled()
    assert optimizer is engine.optimizer
    close(engine, world)


def test_bf16_begins_as_deepspeed_does(group):
    for zero in (0, 3):
        ranks(group, 2)(bf16_case, zero)


def several_case(world):
    """Train two engines with separate optimizers. A loss of one must not change the other."""
    import shardwise.deepspeed as deepspeed

    one, other = net(), net()
    first, *_ = deepspeed.initialize(model=one, config=json_of(1))
    second, *_ = deepspeed.initialize(
        model=other,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        config={"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0},
    )
    run(world, first, range(2))
    assert torch.equal(other[0].weight, net()[0].weight)
    assert second.get_lr() == [0.1]
    run(world, second, range(1))
    assert not torch.equal(other[0].weight, net()[0].weight)
    first.destroy()
    close(second, world)


def test_several_engines(group):
    ranks(group, 2)(several_case)


def data_case(world, folder):
    """Give each worker its share of training_data, and write metrics to files."""
    import shardwise.deepspeed as deepspeed

    rows = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(16, 1))
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=rows, config=config)
    assert len(loader) == 2
    mine = torch.cat([x for (x,) in loader])
    every = torch.cat([each.flatten() for each in world.gather(mine)])
    assert sorted(every.tolist()) == list(range(16))
    for (x,) in deepspeed.utils.RepeatingLoader(loader):
        engine.backward(engine(x).square().mean())
        engine.step()
        if engine.global_steps == 3:
            break
    if world.is_main:
        with open(f"{folder}/job/Train_Samples_lr.csv") as file:
            assert file.read().split() == ["step,lr", "8,0.01", "16,0.01", "24,0.01"]
    close(engine, world)


def test_data_and_values_that_are_written(group, tmp_path):
    ranks(group, 2)(data_case, str(tmp_path))


class PipelineModule(torch.nn.Sequential):
    """A module of the name that DeepSpeed's pipelines have."""


def refusals_case(world):
    import shardwise.deepspeed as deepspeed

    model = net()
    for options, words in (
        ({}, "has no JSON"),
        ({"config": json_of(0) | {"train_batch_size": 3}}, "do not multiply out"),
        ({"config": json_of(0, optimizer={"type": "Adm"})}, "no optimizer 'Adm'"),
        ({"config": json_of(0, scheduler={"type": "Warmup"})}, "no schedule 'Warmup'"),
        (
            {"config": json_of(0, optimizer={"type": "Adam", "params": {"lrr": 1}})},
            "optimizer Adam: .*lrr",
        ),
        ({"config": json_of(0), "mpu": object()}, "groups of ranks"),
        ({"config": json_of(0, data_parallel_size=7)}, "7, but this run has 2 replica"),
        ({"config": json_of(0), "model": PipelineModule()}, "PipelineModule of another library"),
        ({"config": json_of(0) | {"tensor_parallel": {"autotp_size": 3}}}, "does not divide 2"),
    ):
        with pytest.raises((ConfigError, UsageError), match=words):
            deepspeed.initialize(**{"model": model} | options)
    with pytest.raises(AssertionError, match=r"needs a torch\.nn\.Module, not None"):
        deepspeed.initialize(model=None, config=json_of(0))
    engine, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": world.size})
    assert engine(torch.zeros(1, 4).double()).shape == (1, 3)
    with pytest.raises(UsageError, match="without an optimizer"):
        engine.step()
    with pytest.raises(AttributeError, match="nor its module has an attribute"):
        engine.nothing  # noqa: B018 asks for it
    close(engine, world)


def test_refusals_name_what_is_wrong(group):
    ranks(group, 2)(refusals_case)
