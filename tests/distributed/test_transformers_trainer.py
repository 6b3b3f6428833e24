"""The Hugging Face Trainer on engines, compared with the stock Trainer in a single process."""

import os
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from shardwise.errors import UsageError
from tests.distributed.test_accelerate import fresh, ranks
from tests.distributed.test_users_optimizer import ScheduleFree

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("accelerate", reason="the accelerate package is not there")
transformers = pytest.importorskip("transformers", reason="the transformers package is not there")

ROWS, LENGTH, WORDS = 24, 10, 40
STOCK = transformers.TrainingArguments._setup_devices
"""The property that looks up the rank, before shardwise.transformers makes it join the run."""


def gpt2(dropout=0.0):
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts(rows=ROWS, seed=1):
    """Return rows whose labels differ in length, so that a mean of means is not the mean."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(2, WORDS, (rows, LENGTH), generator=draw)
    labels = words.clone()
    for row in range(rows):
        labels[row, 3 + row % 7 :] = -100
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def arguments(folder, **options):
    kept = {
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
    }
    return transformers.TrainingArguments(str(folder), **kept | options)


def batches(rows):
    return {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}


def quietly():
    warnings.simplefilter("default")  # of transformers and torch, about each other
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def stock(folder, total, model=None, **options):
    """Create a stock Trainer in a single process, with batches of `total` rows."""
    quietly()
    fresh()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            patch.delenv(name)
        patch.setattr(transformers.TrainingArguments, "_setup_devices", STOCK)
        return transformers.Trainer(
            gpt2() if model is None else model,
            arguments(folder, **batches(total), **options),
            train_dataset=texts(),
            eval_dataset=texts(7, seed=2),
        )


def ours(world, folder, each, model=None, zero=0, kind=None, data=None, **options):
    import shardwise.transformers

    quietly()
    fresh()
    trainer = kind or shardwise.transformers.Trainer
    return trainer(
        model=gpt2() if model is None else model,
        args=arguments(folder, **batches(each), **options),
        train_dataset=texts() if data is None else data,
        eval_dataset=texts(7, seed=2),
        zero=zero,
        quiet=True,
    )


def figures(trainer, *others):
    names = ("loss", "grad_norm", "learning_rate", *others)
    return [[float(log[n]) for n in names] for log in trainer.state.log_history if "loss" in log]


def parity_case(world, zero, folder):
    """Train with clipping and a schedule on token means over all workers and micro-batches."""
    accumulate = {"gradient_accumulation_steps": 2}
    plain = stock(folder, 4, **accumulate)
    plain.train()
    expected = figures(plain)
    loss = plain.evaluate(texts(8, seed=2))["eval_loss"]
    logits = torch.from_numpy(plain.predict(texts(7, seed=2)).predictions)
    trainer = ours(world, folder, 4 // world.size, zero=zero, **accumulate)
    trainer.train()
    seen = figures(trainer)
    assert len(seen) == len(expected) == 6
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    with trainer.accelerator.full_parameters(trainer.model):
        for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    mean = trainer.evaluate(texts(8, seed=2))["eval_loss"]
    predicted = torch.from_numpy(trainer.predict(texts(7, seed=2)).predictions)
    trainer.accelerator.free_memory()
    assert mean == pytest.approx(loss, rel=1e-4)
    assert torch.allclose(predicted, logits, rtol=1e-3, atol=1e-3)
    return mean, float(predicted.sum())


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
def test_results_of_the_stock_trainer(group, size, tmp_path):
    for zero in (0, 1, 2, 3):
        found = ranks(group, size)(parity_case, zero, str(tmp_path))
        assert all(each == found[0] for each in found)


def schedule_free_case(world, zero, folder):
    """The Trainer calls the optimizer's `train` before a step and its `eval` before evaluation."""
    options = {"eval_strategy": "epoch", "max_grad_norm": 0.0}
    seen = []
    for make in (
        lambda: stock(folder, 4, **options),
        lambda: ours(world, folder, 2, zero=zero, **options),
    ):
        trainer = make()
        trainer.eval_dataset = texts(8, seed=2)  # whole batches of both trainers
        optimizer = ScheduleFree(trainer.model.parameters(), lr=0.05)
        trainer.optimizer = optimizer
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer.train()
        logs = [log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history]
        seen.append([float(value) for value in logs if value is not None])
    trainer.accelerator.free_memory()
    assert seen[1] == pytest.approx(seen[0], rel=1e-4), seen
    assert len(seen[0]) == 2 * 6 + 2


@pytest.mark.parametrize("zero", [0, 3])
def test_schedule_free_optimizer_evaluates_at_its_average(group, tmp_path, zero):
    ranks(group, 2)(schedule_free_case, zero, str(tmp_path))


class InDouble(torch.nn.Module):
    """A loss that is computed in fp64, unlike the losses of transformers' own models."""

    accepts_loss_kwargs = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(WORDS, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, WORDS)
        self.seen = []
        self.double()

    def forward(self, input_ids, labels):
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        logits = self.head(hidden).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, input_ids.roll(-1, 1).flatten())
        if self.training:
            self.seen.append(loss.detach())
        return {"loss": loss, "logits": hidden.mean((1, 2))}


def doubles_case(world, folder):
    options = {"gradient_accumulation_steps": 2}

    def made(kind, each, **settings):
        quietly()
        fresh()
        given = arguments(folder, **batches(each), **options)
        sets = {"train_dataset": texts(), "eval_dataset": texts(8, seed=2)}
        return kind(InDouble(), given, **sets, **settings)

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            patch.delenv(name)
        patch.setattr(transformers.TrainingArguments, "_setup_devices", STOCK)
        plain = made(transformers.Trainer, 4)
    plain.train()
    expected, loss = figures(plain), plain.evaluate()["eval_loss"]

    import shardwise.transformers

    for zero in range(4):
        kind = shardwise.transformers.Trainer
        trainer = made(kind, 4 // world.size, zero=zero, quiet=True)
        trainer.train()
        for mine, theirs in zip(figures(trainer), expected, strict=True):
            assert mine[1:] == pytest.approx(theirs[1:], rel=1e-8)
        losses = trainer.accelerator.gather(torch.stack(trainer.model.seen))
        means = losses.view(world.size, -1).mean(0)
        assert means.tolist() == pytest.approx([x.item() for x in plain.model.seen], rel=1e-8)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
        with trainer.accelerator.full_parameters(trainer.model):
            for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=1e-7, atol=1e-8)
        trainer.accelerator.free_memory()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_results_in_fp64(group, size, tmp_path):
    """Test clipping, accumulation and a schedule with each ZeRO stage.

    The Trainer logs losses in fp32.
    """
    ranks(group, size)(doubles_case, str(tmp_path))


def recomputed_case(world, zero, folder):
    options = {"max_steps": 3}
    plain = stock(folder, 4, **options)
    plain.train()
    trainer = ours(
        world, folder, 4 // world.size, zero=zero, gradient_checkpointing=True, **options
    )
    forwards = []
    trainer.model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    trainer.train()
    assert len(forwards) == 6, "two for each of three steps"
    for mine, theirs in zip(figures(trainer), figures(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    trainer.accelerator.free_memory()


def test_activations_recomputed_by_their_flag(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(recomputed_case, zero, str(tmp_path))


def saves_case(world, zero, folder):
    trainer = ours(
        world, folder, 4, model=gpt2(0.2), zero=zero, save_strategy="steps", save_steps=2,
        save_total_limit=None,
    )  # fmt: skip
    trainer.train()
    seen = figures(trainer)
    trainer.accelerator.free_memory()
    return seen


def resumes_case(world, zero, folder):
    trainer = ours(world, folder, 4, model=gpt2(0.2), zero=zero)
    torch.rand(10)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert trainer.state.global_step == 6
    seen = figures(trainer)
    trainer.accelerator.free_memory()
    return seen


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 3])
def test_resumed_in_mid_epoch_without_a_difference(group, tmp_path, zero):
    whole = ranks(group, 2)(saves_case, zero, str(tmp_path))
    assert ranks(group, 2)(resumes_case, zero, str(tmp_path)) == whole


def other_size_case(world, folder):
    trainer = ours(world, folder, 8, model=gpt2(0.2), zero=1)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    seen = figures(trainer)
    trainer.accelerator.free_memory()
    return len(seen), seen[1]


def test_resumed_on_another_number_of_workers(group, tmp_path):
    (before, _) = ranks(group, 2)(saves_case, 3, str(tmp_path))
    ((steps, second),) = ranks(group, 1)(other_size_case, str(tmp_path))
    assert (steps, second) == (6, before[1])


def whole_weights_case(world, zero, folder):
    """Check that from_pretrained reads the trained weights, with each ZeRO stage."""
    trainer = ours(world, folder, 4, zero=zero, max_steps=2)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    with trainer.accelerator.full_parameters(trainer.model):
        kept = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    world.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    trainer.accelerator.save_state(f"{folder}/state")
    world.barrier()
    engines = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/state/step-2")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, kept[name]), name
        assert torch.equal(engines.state_dict()[name], value), name
    trainer.accelerator.free_memory()


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 3])
def test_saved_models_are_whole(group, tmp_path, zero):
    ranks(group, 2)(whole_weights_case, zero, str(tmp_path))


def best_case(world, zero, only_model, folder):
    """Treat the highest loss as the best, so that the best checkpoint is not the last one."""
    trainer = ours(
        world, folder, 4, zero=zero, warmup_steps=0, max_steps=4, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, save_only_model=only_model,
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    losses = [log["eval_loss"] for log in history if "eval_loss" in log]
    assert losses[-1] < max(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6)
    trainer.accelerator.free_memory()


@pytest.mark.parametrize("only_model", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_best_model_is_loaded_at_the_end(group, tmp_path, only_model):
    for zero in (0, 3):
        ranks(group, 2)(best_case, zero, only_model, str(tmp_path / str(zero)))


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.T5ForConditionalGeneration(config)


def generates_case(world, zero, folder):
    """Generate sequences that need a different number of forward passes on each rank."""
    from shardwise.transformers import on

    quietly()
    fresh()
    model, plain = t5(), t5()
    options = {"predict_with_generate": True, "generation_max_length": 6 + 5 * world.rank}
    args = transformers.Seq2SeqTrainingArguments(
        folder, report_to=[], disable_tqdm=True, use_cpu=True, max_steps=2, save_strategy="no",
        dataloader_pin_memory=False, per_device_train_batch_size=2, **options,
    )  # fmt: skip
    rows = [{"input_ids": t["input_ids"], "labels": t["input_ids"]} for t in texts(8)]
    trainer = on(transformers.Seq2SeqTrainer)(
        model=model, args=args, train_dataset=rows, eval_dataset=rows[:5], zero=zero, quiet=True
    )
    trainer.train()
    before = dict(vars(trainer.model))
    found = trainer.predict(rows[:5]).predictions
    state = trainer.accelerator.get_state_dict(model)
    if world.is_main:
        plain.load_state_dict(state)
        words = torch.stack([row["input_ids"] for row in rows[:5]])
        expected = plain.eval().generate(input_ids=words, max_length=6)
        assert found[:5, : expected.shape[1]].tolist() == expected.tolist()
    assert "generate" not in before.keys() | vars(trainer.model).keys()
    stock_generate = model.generate
    model.generate = own = lambda *given, **named: stock_generate(*given, **named)
    assert trainer.predict(rows[:5]).predictions.tolist() == found.tolist()
    assert vars(model)["generate"] is own
    trainer.accelerator.free_memory()


def generates_first_case(world, zero, folder):
    """Generate with a model that another Trainer's engine trains meanwhile."""
    import shardwise.transformers

    quietly()
    fresh()
    model = t5()
    args = transformers.Seq2SeqTrainingArguments(
        folder, report_to=[], disable_tqdm=True, use_cpu=True, max_steps=1, save_strategy="no",
        dataloader_pin_memory=False, per_device_train_batch_size=2, predict_with_generate=True,
        generation_max_length=6 + 5 * world.rank,
    )  # fmt: skip
    rows = [{"input_ids": t["input_ids"], "labels": t["input_ids"]} for t in texts(8)]

    def trainer():
        return shardwise.transformers.Seq2SeqTrainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows[:5], zero=zero, quiet=True
        )

    first, second = trainer(), trainer()
    first.train()
    second.train()
    assert not first.accelerator.engines
    found = first.predict(rows[:5]).predictions.tolist()
    assert found == second.predict(rows[:5]).predictions.tolist()
    second.accelerator.free_memory()


def test_generation_by_a_trainer_whose_model_another_one_trains(group, tmp_path):
    ranks(group, 2)(generates_first_case, 3, str(tmp_path))


def test_generation_inside_an_evaluation(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(generates_case, zero, str(tmp_path))


def lora(rank=2, modules_to_save=None):
    import peft

    config = peft.LoraConfig(
        r=rank, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM",
        lora_dropout=0.0, modules_to_save=modules_to_save,
    )  # fmt: skip
    quietly()
    model = gpt2()
    torch.manual_seed(7)
    return peft.get_peft_model(model, config)


def lora_case(world, zero, folder):
    import peft

    trainer = ours(
        world, folder, 4, model=lora(), zero=zero, max_steps=4, save_strategy="steps", save_steps=2
    )
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    loss = trainer.evaluate()["eval_loss"]
    trainer.accelerator.free_memory()
    world.barrier()
    assert sorted(path.name for path in Path(f"{folder}/adapter").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]
    loaded = peft.PeftModel.from_pretrained(gpt2(), f"{folder}/adapter")
    again = ours(world, folder, 4, model=loaded.merge_and_unload(), zero=zero)
    assert again.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    resumed = ours(world, folder, 4, model=lora(), zero=zero, max_steps=4)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert resumed.evaluate()["eval_loss"] == loss
    with resumed.accelerator.full_parameters(resumed.model, write=True):
        resumed.model.merge_adapter()
    assert resumed.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    resumed.accelerator.free_memory()


def whole_modules_case(world, folder):
    """Train modules that PEFT trains and saves completely, next to the adapters."""
    import peft

    model = lora(modules_to_save=["ln_f"])
    trainer = ours(
        world, folder, 4, model=model, zero=3, max_steps=2, save_strategy="steps", save_steps=2
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.model.save_pretrained(f"{folder}/adapter", is_main_process=world.is_main)
    with pytest.raises(UsageError, match="is sharded"):
        trainer.model.state_dict()
    with trainer.accelerator.full_parameters(trainer.model):
        right = {
            name.replace("modules_to_save.default.", ""): value.clone()
            for name, value in trainer.model.state_dict().items()
            if "ln_f.modules_to_save" in name
        }
    trainer.accelerator.free_memory()
    world.barrier()
    assert len(right) == 2
    for saved in ("adapter", "checkpoint-2"):
        found = safetensors.torch.load_file(f"{folder}/{saved}/adapter_model.safetensors")
        for name, value in right.items():
            assert torch.equal(found[name], value)
    loaded = peft.PeftModel.from_pretrained(gpt2(), f"{folder}/checkpoint-2")
    again = ours(world, folder, 4, model=loaded, zero=3)
    assert again.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    again.accelerator.free_memory()


def test_modules_that_peft_saves_whole(group, tmp_path):
    pytest.importorskip("peft", reason="the peft package is not there")
    for size in (1, 2):
        ranks(group, size)(whole_modules_case, str(tmp_path / str(size)))


def test_adapters_of_peft(group, tmp_path):
    pytest.importorskip("peft", reason="the peft package is not there")
    for zero in (0, 3):
        ranks(group, 2)(lora_case, zero, str(tmp_path / str(zero)))


def nf4_case(world, zero, folder):
    """Train, save and merge adapters on a base in 4 bits, next to a stock Trainer."""
    import shardwise.transformers
    from tests.distributed.test_frozen_nf4 import round_to_nf4

    rounded = lora()
    for name, parameter in rounded.named_parameters():
        if name.endswith(("c_attn.base_layer.weight", "c_proj.weight", "c_fc.weight")):
            round_to_nf4(parameter)
    plain = stock(folder, 4, model=rounded, max_steps=3)
    plain.train()
    kind = partial(shardwise.transformers.Trainer, frozen_weights="nf4")
    trainer = ours(world, folder, 4 // world.size, lora(), zero, kind, max_steps=3)
    trainer.train()
    torch.testing.assert_close(figures(trainer), figures(plain), rtol=1e-4, atol=1e-6)
    trainer.save_model(f"{folder}/adapter")
    world.barrier()
    saved = safetensors.torch.load_file(f"{folder}/adapter/adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    trainer.accelerator.free_memory()
    merged, expected = (t.model.merge_and_unload().state_dict() for t in (trainer, plain))
    torch.testing.assert_close(dict(merged), dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero", [0, 3])
def test_adapters_of_peft_on_a_base_in_4_bits(group, tmp_path, zero):
    pytest.importorskip("peft", reason="the peft package is not there")
    ranks(group, 2)(nf4_case, zero, str(tmp_path))


def prepared_case(world, folder):
    """Convert a trainer of a custom class that other code created."""
    from shardwise.transformers import on, prepare_trainer

    class Own(transformers.Trainer):
        pass

    quietly()
    fresh()
    args = arguments(folder, per_device_train_batch_size=4, max_steps=2)
    trainer = Own(model=gpt2(), args=args, train_dataset=texts())
    assert prepare_trainer(trainer, zero=2, quiet=True) is trainer
    assert isinstance(trainer, Own)
    trainer.train()
    (engine,) = trainer.accelerator.engines
    assert (engine.steps, engine.placement.name) == (2, "ZERO_2")
    assert on(type(trainer)) is type(trainer)
    trainer.train()  # continue training with a new engine
    trainer.accelerator.free_memory()


def test_a_trainer_that_is_made_already(group, tmp_path):
    ranks(group, 2)(prepared_case, str(tmp_path))


def second_case(world, zero, folder):
    """Let a second Trainer take over the model. The first one can still save the full model."""
    model = gpt2()
    first = ours(world, folder, 4, model=model, zero=zero, max_steps=2)
    first.train()
    second = ours(world, folder, 4, model=model, zero=zero, max_steps=2)
    second.train()
    assert (len(first.accelerator.engines), len(second.accelerator.engines)) == (0, 1)
    first.save_model(f"{folder}/whole")
    second.accelerator.free_memory()
    world.barrier()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/whole")
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_second_trainer_takes_the_model_over(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(second_case, zero, str(tmp_path / str(zero)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(texts())


def stream_case(world, zero, folder):
    """Rank 0 reads and sends every rank its part, so the steps match a single process.

    After the last row it restarts, as the stock Trainer does.
    """
    trainer = ours(world, folder, 4 // world.size, zero=zero, max_steps=7, data=Stream())
    trainer.train()
    order = {"train_sampling_strategy": "sequential", "max_steps": 7}
    plain = stock(folder, 4, **order)
    plain.train()
    for mine, theirs in zip(figures(trainer), figures(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    trainer.accelerator.free_memory()


def test_data_without_a_length(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(stream_case, zero, str(tmp_path))


class Padding:
    """Pads the rows of a batch, and records their numbers in `data`."""

    def __init__(self, data):
        self.numbers = {id(row["input_ids"]): number for number, row in enumerate(data)}
        self.batches = []

    def __call__(self, rows):
        self.batches.append([self.numbers[id(row["input_ids"])] for row in rows])
        pad = torch.nn.utils.rnn.pad_sequence
        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": pad(ids, batch_first=True),
            "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
            "labels": pad(ids, batch_first=True, padding_value=-100),
        }


def grouped_case(world, zero, folder):
    """Group texts by their length, and train a stock Trainer on the same batches in that order."""
    import shardwise.transformers

    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 30, (ROWS,), generator=draw).tolist()
    data = [{"input_ids": torch.randint(2, WORDS, (n,), generator=draw)} for n in lengths]
    quietly()
    fresh()
    padding = Padding(data)
    strategy = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1}
    trainer = shardwise.transformers.Trainer(
        model=gpt2(), args=arguments(folder, **batches(2), **strategy), train_dataset=data,
        data_collator=padding, zero=zero, quiet=True,
    )  # fmt: skip
    trainer.train()
    seen = figures(trainer)
    trainer.accelerator.free_memory()
    steps = [[*a, *b] for a, b in zip(*world.gather(padding.batches), strict=True)]
    assert sorted(number for step in steps for number in step) == list(
        range(ROWS)
    )  # each text once
    pairs = [pair for step in steps for pair in (step[:2], step[2:])]  # one per rank
    apart = sum(abs(lengths[a] - lengths[b]) for a, b in pairs) / len(pairs)
    assert apart < 7  # 9 in random order
    plain = stock(folder, 4, train_sampling_strategy="sequential", num_train_epochs=1)
    plain.train_dataset = [data[number] for step in steps for number in step]
    plain.data_collator = Padding(data)
    plain.train()
    for mine, theirs in zip(seen, figures(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    return steps


def test_texts_grouped_by_length(group, tmp_path):
    ranks(group, 2)(grouped_case, 3, str(tmp_path))


def packed_case(world, zero, folder):
    """Pack texts with TRL's SFTTrainer, and compare with the stock one in a single process."""
    import datasets
    import tokenizers
    import trl

    import shardwise.transformers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    draw = torch.Generator().manual_seed(4)
    counts = torch.randint(2, 15, (48,), generator=draw).tolist()
    texts = [torch.randint(2, WORDS, (n,), generator=draw).tolist() for n in counts]
    data = datasets.Dataset.from_dict({"text": [" ".join(f"w{n}" for n in t) for t in texts]})

    def trained(kind, **options):
        quietly()
        fresh()
        kept = {name: value for name, value in options.items() if name not in ("zero", "quiet")}
        args = trl.SFTConfig(
            str(folder), packing=True, max_length=16, learning_rate=1e-2, num_train_epochs=1,
            logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
            dataloader_pin_memory=False, per_device_train_batch_size=2, bf16=False,
            gradient_checkpointing=False, **kept,
        )  # fmt: skip
        model = gpt2()
        model.config.use_cache = False
        extra = {name: options[name] for name in ("zero", "quiet") if name in options}
        trainer = kind(
            model=model, args=args, train_dataset=data, processing_class=tokenizer, **extra
        )
        trainer.train()
        # Otherwise, TRL averages these over the workers' batches or over micro-batches.
        others = ("entropy", "mean_token_accuracy", "num_tokens")
        found = figures(trainer, *(others if world.data_size == 1 else ()))
        found = found, len(trainer.train_dataset)
        if extra:
            trainer.accelerator.free_memory()
        return found

    seen, rows = trained(shardwise.transformers.on(trl.SFTTrainer), zero=zero, quiet=True)
    assert rows < 40  # 48 texts share rows
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            patch.delenv(name)
        patch.setattr(transformers.TrainingArguments, "_setup_devices", STOCK)
        expected, _ = trained(trl.SFTTrainer, gradient_accumulation_steps=world.data_size)
    assert len(seen) == len(expected) > 3
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_texts_packed_by_trl(group, tmp_path):
    pytest.importorskip("trl", reason="the trl package is not there")
    for zero in (0, 3):
        ranks(group, 2)(packed_case, zero, str(tmp_path))


def test_parts_of_sequences_in_trl(group, tmp_path):
    pytest.importorskip("trl", reason="the trl package is not there")
    group(2, context=2, reseed=False)(packed_case, 2, str(tmp_path), limit=300)


def resized_case(world, zero, folder):
    """Resize the embeddings before training, and after it, when the model is plain again."""
    model = gpt2()
    model.resize_token_embeddings(WORDS + 3)
    trainer = ours(world, folder, 4, model=model, zero=zero, max_steps=1)
    trainer.train()
    with pytest.raises(UsageError, match=r"resize_token_embeddings.*free_memory"):
        model.resize_token_embeddings(WORDS + 9)
    trainer.save_model(f"{folder}/saved")
    state = trainer.accelerator.get_state_dict(model)
    trainer.accelerator.free_memory()
    world.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert loaded.get_input_embeddings().weight.shape == (WORDS + 3, 16)
    for name, value in state.items():
        assert torch.equal(loaded.state_dict()[name], value), name
    model.resize_token_embeddings(WORDS + 9)
    again = ours(world, folder, 4, model=model, zero=zero, max_steps=1)
    again.train()
    again.accelerator.free_memory()
    assert model.get_input_embeddings().weight.shape == (WORDS + 9, 16)


def test_embeddings_of_more_words(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(resized_case, zero, str(tmp_path / str(zero)))


def refusals_case(world, folder):
    with pytest.raises(
        UsageError, match="auto_find_batch_size is not supported on several workers"
    ):
        ours(world, folder, 4, auto_find_batch_size=True)
    shutil.rmtree(folder, ignore_errors=True)


def test_what_cannot_be_had_says_what_to_write(group, tmp_path):
    ranks(group, 2)(refusals_case, str(tmp_path / "out"))
