"""A DeepSpeed JSON that Accelerate and the Trainer are given, without the package deepspeed."""

import dataclasses
import json
import os
from importlib import import_module

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from tests.distributed.test_accelerate import fresh, ours, ranks
from tests.distributed.test_transformers_trainer import arguments, figures, gpt2, stock, texts

pytest.importorskip("accelerate", reason="the accelerate package is not there")
pytest.importorskip("transformers", reason="the transformers package is not there")

STEPS, ACCUMULATION, ROWS = 4, 2, 4
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
JSON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "bf16": {"enabled": "auto"},
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step, micro, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(ROWS, 4, generator=draw)
    return x, x[:, :3].sin()


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def plain(size):
    """Return losses and learning rates of a single process that imitates DeepSpeed."""
    from shardwise.deepspeed.schedules import WarmupLR

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=0.01, warmup_num_steps=3)
    seen = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            for rank in range(size):
                loss = loss_of(model, *batch(step, micro, rank))
                (loss / ACCUMULATION / size).backward()
                seen.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def accelerate_case(world):
    import_module("shardwise.accelerate")  # lets accelerate.utils have the dummies
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    plugin = DeepSpeedPlugin(hf_ds_config=JSON | {"optimizer": OPTIMIZER, "scheduler": SCHEDULER})
    accelerator = ours(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    model = net()
    optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, warmup_num_steps=3)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert [each.placement.level for each in accelerator.engines] == [2]
    seen = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = loss_of(model, *batch(step, micro, world.rank))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 7.0)  # the JSON's counts
                optimizer.step()
                for _ in range(step % 3):  # steps with the optimizer, not when the loop calls step
                    schedule.step()
                optimizer.zero_grad()
            seen += [float(each) for each in world.gather(loss.detach())]
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(plain(world.size), rel=1e-5)
    accelerator.free_memory()
    fresh()


@pytest.mark.parametrize("size", [1, 2])
def test_accelerate_trains_as_the_json_says(group, size):
    ranks(group, size)(accelerate_case)


VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
}


def launched_case(world):
    """Set the variables of `accelerate launch --use_deepspeed --zero_stage 3 ...`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        accelerator = ours()
        again = type(accelerator)(quiet=True)
        assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    for each in (accelerator, again, type(accelerator)(quiet=True)):
        assert each.gradient_accumulation_steps == 3
        assert each._settings["zero"] == 3
    model = net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (engine,) = accelerator.engines
    assert engine.placement.level == 3
    assert engine.placement.tier("optimizer").kind == "cpu"
    accelerator.free_memory()
    with pytest.raises(ConfigError, match="accumulation_steps 4, but Accelerator has 2: wri"):
        refused(JSON | {"gradient_accumulation_steps": 4}, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="computes in fp32, but Accelerator has mixed_precisio"):
        refused(JSON | {"bf16": {"enabled": False}}, mixed_precision="bf16")
    fresh()


def accumulation_case(world):
    """Combine GradientAccumulationPlugin with the config's own number of steps."""
    from accelerate.utils import GradientAccumulationPlugin

    for tree, given in ((JSON, 3), (JSON | {"gradient_accumulation_steps": 3}, 1)):
        plugin = GradientAccumulationPlugin(num_steps=given, sync_with_dataloader=False)
        accelerator = refused(tree, gradient_accumulation_plugin=plugin)
        assert accelerator.gradient_accumulation_steps == 3
        assert not accelerator.gradient_state.sync_with_dataloader
    plugin = GradientAccumulationPlugin(num_steps=2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 3, but Accelerator has 2"):
        refused(JSON | {"gradient_accumulation_steps": 3}, gradient_accumulation_plugin=plugin)
    fresh()


def test_a_plugin_of_accumulation_beside_the_json(group):
    ranks(group, 1)(accumulation_case)


def both_case(world, folder):
    """Test settings in both the config and the script, and keys that these loops do not support."""
    from shardwise.bridging.deepspeed_json import without_effect
    from shardwise.transformers.deepspeed_argument import job_of

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=r"optimizer\.type, .* to prepare\(\).*DummyOptim"):
        refused(JSON | {"optimizer": OPTIMIZER}).prepare(model, optimizer)
    with pytest.raises(ConfigError, match=r"scheduler\.type, .* to prepare\(\).*DummyScheduler"):
        refused(JSON | {"scheduler": SCHEDULER}).prepare(model, schedule)
    tree = JSON | {"gradient_clipping": "auto"}
    for section, given in (("optimizer", (optimizer, None)), ("scheduler", (None, schedule))):
        more = {section: {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}[section]}
        with pytest.raises(ConfigError, match=rf"{section}\.type, .* to the Trainer"):
            trainer_of(folder, tree | more, 4, given)
    with pytest.raises(ConfigError, match="gradient_allreduce_op sum, but this loop averages"):
        refused(JSON | {"gradient_allreduce_op": "sum"})
    with pytest.raises(ConfigError, match="gradient_allreduce_op sum, but this loop averages"):
        trainer_of(folder, tree | {"gradient_allreduce_op": "sum"}, 4)
    plain = arguments(folder, deepspeed=tree)
    assert without_effect(job_of(plain)) == ""
    tree |= {
        "dataloader_drop_last": True,
        "managed_gradient_accumulation": False,
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": False},
        "checkpoint": {"tag_validation": "Fail"},
    }
    assert without_effect(job_of(arguments(folder, deepspeed=tree))) == (
        "managed_gradient_accumulation, dataloader_drop_last, tensorboard, "
        "checkpoint.tag_validation"
    )
    fresh()


def test_what_is_in_the_json_and_in_the_script(group, tmp_path):
    ranks(group, 1)(both_case, str(tmp_path))


def refused(tree, **options):
    from accelerate.utils import DeepSpeedPlugin

    return ours(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=tree), **options)


def test_variables_of_accelerate_launch(group):
    ranks(group, 1)(launched_case)


def trainer_of(folder, tree, each, optimizers=(None, None), **options):
    import shardwise.transformers

    fresh()
    return shardwise.transformers.Trainer(
        model=gpt2(),
        args=arguments(folder, deepspeed=tree, per_device_train_batch_size=each, **options),
        train_dataset=texts(),
        optimizers=optimizers,
        quiet=True,
    )


def trainer_case(world, folder):
    """With the trainer's own optimizer and schedule, the result is the stock Trainer's."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 4}
    before = stock(folder, 4, **options)
    before.train()
    trainer = trainer_of(folder, JSON | {"gradient_clipping": "auto"}, 4 // world.size, **options)
    trainer.train()
    (engine,) = trainer.accelerator.engines
    assert engine.placement.level == 2
    for mine, theirs in zip(figures(trainer), figures(before), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    trainer.accelerator.free_memory()


def test_the_trainer_takes_settings_of_the_json(group, tmp_path):
    ranks(group, 2)(trainer_case, str(tmp_path))


def launched_trainer_case(world, folder):
    """With `accelerate launch`, the config belongs to the Trainer and not to its Accelerator."""
    options = {"gradient_accumulation_steps": 3, "max_steps": 2, "max_grad_norm": 0.1}
    before = stock(folder, 4, **options)
    before.train()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        trainer = trainer_of(folder, None, 4, **options)
        trainer.train()
        assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    (engine,) = trainer.accelerator.engines
    assert engine.placement.level == 3
    for mine, theirs in zip(figures(trainer), figures(before), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    trainer.accelerator.free_memory()
    fresh()


def test_the_trainer_under_accelerate_launch(group, tmp_path):
    ranks(group, 1)(launched_trainer_case, str(tmp_path))


def kept_case(world, folder):
    """Copy TrainingArguments, which keep a config that may be given as text."""
    import transformers

    import shardwise.transformers
    from shardwise.transformers.deepspeed_argument import job_of, take_json

    once = transformers.TrainingArguments.__post_init__
    take_json()
    assert transformers.TrainingArguments.__post_init__ is once
    tree = JSON | {"gradient_clipping": "auto"}
    kept = arguments(folder, deepspeed=json.dumps(tree))
    assert kept.deepspeed == tree
    copies = (
        dataclasses.replace(kept, learning_rate=1.0),
        type(kept)(
            **{name: value for name, value in kept.to_dict().items() if name != "logging_dir"}
        ),
    )
    for each in (kept, *copies):
        assert job_of(each).settings["zero"] == 2
    with pytest.raises(ConfigError, match=r"is not valid JSON"):
        arguments(folder, deepspeed='{"zero_optimization": ')
    kept.deepspeed_plugin = object()
    with pytest.raises(UsageError, match=r"Import shardwise\.transformers before"):
        shardwise.transformers.Trainer(model=gpt2(), args=kept, quiet=True)
    fresh()


def test_copies_of_arguments_keep_the_json(group, tmp_path):
    ranks(group, 1)(kept_case, str(tmp_path))


SAYS = [
    ({"gradient_clipping": 0.5}, {"max_grad_norm": 2.0}, r"gradient_clipping 0.5, but .*has 2"),
    ({"lr": 1e-2}, {"learning_rate": 3e-4}, r"optimizer.params.lr 0.01, but .*rate=.*has 0.0003"),
    ({"betas": [0.9, 0.95]}, {}, r"betas \[0.9, 0.95\], but .*adam_beta1=.*has \[0.9, 0.999\]"),
    ({"eps": 1e-6}, {}, r"eps 1e-06, but .*adam_epsilon=.*has 1e-08"),
    ({"weight_decay": 0.1}, {}, r"weight_decay 0.1, but .*weight_decay=.*has 0.0"),
    ({"warmup_max_lr": 0.5}, {}, r"warmup_max_lr 0.5, but .*learning_rate=.*has 0.01"),
    ({"warmup_num_steps": 7}, {}, r"warmup_num_steps 7, but .*warmup_steps=.*has 2"),
]
"""Config keys by their last word, conflicting arguments, and the expected message."""


def contradictions_case(world, folder):
    from shardwise.transformers.deepspeed_argument import job_of

    for keys, options, words in SAYS:
        (name,) = keys
        section = "optimizer" if name in ("lr", "betas", "eps", "weight_decay") else "scheduler"
        tree = JSON | {"gradient_clipping": "auto"}
        if name in tree:
            tree |= keys
        else:
            tree[section] = {"type": {"optimizer": "AdamW", "scheduler": "WarmupLR"}[section]}
            tree[section]["params"] = keys
        with pytest.raises(ConfigError, match=words):
            job_of(arguments(folder, deepspeed=tree, **options), steps=10)
    same = {"type": "AdamW", "params": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}}
    tree = JSON | {"gradient_clipping": 0.5, "optimizer": same}
    assert job_of(arguments(folder, deepspeed=tree)).clipping == 0.5
    fresh()


def test_a_json_that_contradicts_the_arguments(group, tmp_path):
    ranks(group, 1)(contradictions_case, str(tmp_path))


def optimizer_case(world, folder):
    """Use the config's optimizer and schedule, with values for "auto" from the arguments."""
    from shardwise.deepspeed.schedules import WarmupLR

    tree = JSON | {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "gradient_clipping": 0.5}
    trainer = trainer_of(folder, tree, 4, max_steps=4, weight_decay=0.2)
    trainer.train()
    assert isinstance(trainer.lr_scheduler, WarmupLR)
    (held,) = trainer.optimizer.param_groups
    assert held["weight_decay"] == 0.2
    rates = [rate for _, _, rate in figures(trainer)]
    assert rates[-1] == pytest.approx(0.01)
    assert rates == sorted(rates)
    trainer.accelerator.free_memory()
    with pytest.raises(ConfigError, match=r"gradient_clipping 0.5, but .*max_grad_norm=.*has 2"):
        trainer_of(folder, tree, 4, max_grad_norm=2.0)
    fresh()


def test_the_trainer_takes_the_optimizer_of_the_json(group, tmp_path):
    ranks(group, 1)(optimizer_case, str(tmp_path))
