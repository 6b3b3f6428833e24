"""`--context` under Accelerate, the Trainer and Lightning, against plain PyTorch in one process."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.errors import DataError, ModelError, UsageError
from tests.distributed.contexts import WORDS, Model
from tests.distributed.test_context_of_transformers import model_of

ROWS, LENGTH, BATCH, WINDOW, RATE, NORM = 14, 9, 4, 2, 0.3, 0.5
"""Steps of two batches of 4 rows. The last batch of an epoch has 2 rows."""


def ranks(group, size, context):
    """Return ranks that do not reseed generators, as if a bridge had joined the run."""
    return partial(group(size, context=context, reseed=False), limit=300)


def rows(count: int = ROWS) -> list[dict[str, Tensor]]:
    """Return rows with different numbers of labels. Some parts have none."""
    draw = torch.Generator().manual_seed(4)
    found = []
    for number in range(count):
        ids, labels = (torch.randint(WORDS, (LENGTH,), generator=draw) for _ in range(2))
        labels[torch.rand(LENGTH, generator=draw) < 0.3] = -100
        labels[: number % 3 * 3] = -100
        found.append({"ids": ids, "positions": torch.arange(LENGTH), "labels": labels})
    return found


def stacked(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in each]) for name in each[0]}


def first_words(batch: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: each[:, :count] for name, each in batch.items()}


def language_model() -> nn.Module:
    torch.manual_seed(7)
    return Model(4, 2).double()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(epochs: int = 2) -> tuple[nn.Module, list[float]]:
    """Train in plain PyTorch with full steps. Return the model and its losses."""
    model, data, losses = language_model(), rows(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(epochs):
        for first in range(0, ROWS, BATCH * WINDOW):
            batch = stacked(data[first : first + BATCH * WINDOW])
            loss = loss_of(model(batch["ids"], batch["positions"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return model, losses


def assert_equal(ours: dict[str, Tensor], expected: nn.Module, rel: float = 1e-8) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=rel, atol=rel / 100)


# -- Accelerate ------------------------------------------------------------------------------------


def accelerated(world, zero: int) -> tuple[dict[str, Tensor], Tensor, list[float]]:
    """Train and evaluate with Accelerate. Return weights, predictions and mean losses."""
    from tests.distributed.test_accelerate import ours

    accelerator = ours(gradient_accumulation_steps=WINDOW, zero=zero)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    # It advances once per group in each step of the optimizer.
    gamma = 0.9 ** (1 / world.data_size)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    each = BATCH // world.data_size
    loader = DataLoader(rows(), batch_size=each, collate_fn=stacked)
    tests = DataLoader(rows(7), batch_size=each, collate_fn=stacked)
    model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, tests)
    schedule = accelerator.prepare(schedule)
    losses, window = [], []
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch["ids"], batch["positions"]), batch["labels"])
                accelerator.backward(loss)
                count = (batch["labels"] != -100).sum()
                sums = torch.stack([torch.where(count > 0, loss.detach() * count, 0.0), count])
                window.append(accelerator.reduce(sums, "sum"))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), NORM)
                    total, items = torch.stack(window).sum(0).tolist()
                    losses.append(total / items)
                    window.clear()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    model.eval()
    found = []
    for batch in tests:
        with torch.no_grad():
            logits = model(batch["ids"], batch["positions"])
        found.append(accelerator.gather_for_metrics(logits))
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return state, torch.cat(found), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "context", "zero"),
    [(2, 2, 1), (4, 2, 0), pytest.param(4, 4, 3, marks=pytest.mark.full)],
)
def test_accelerate_equals_one_process(group, size, context, zero):
    pytest.importorskip("accelerate", reason="the accelerate package is not there")
    expected, expected_losses = plain()
    with torch.no_grad():
        batch = stacked(rows(7))
        expected_logits = expected(batch["ids"], batch["positions"])
    for rank, (state, logits, losses) in enumerate(ranks(group, size, context)(accelerated, zero)):
        if state or rank == 0:
            assert_equal(state, expected)
        # The script's own sum counts the rows that Accelerate repeats for the second group.
        step = size // context
        assert losses[::step] == pytest.approx(expected_losses[::step], rel=1e-8)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-8, atol=1e-10)


# -- Transformers ----------------------------------------------------------------------------------


def texts(count: int = ROWS) -> list[dict[str, Tensor]]:
    """Return rows of words and labels that the model shifts. Some have padding."""
    found = []
    for number, row in enumerate(rows(count)):
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - number % 3 :] = 0
        labels = row["labels"].where(mask == 1, -100)
        found.append({"input_ids": row["ids"], "attention_mask": mask, "labels": labels})
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of next words that were predicted, from logits of full sequences."""
    logits, labels = map(torch.as_tensor, (prediction.predictions, prediction.label_ids))
    counted = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & counted
    return {"right": float(right.sum() / counted.sum()), "rows": float(len(logits))}


def plain_texts(kind: str) -> tuple[list[Any], list[float], nn.Module]:
    """Train in plain PyTorch with full steps.

    Return losses and norms, the metrics of an evaluation, and the model.
    """
    model, data, figures = model_of(kind), texts(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(2):
        for first in range(0, ROWS, BATCH * WINDOW):
            optimizer.zero_grad()
            loss = model(**stacked(data[first : first + BATCH * WINDOW])).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            figures.append((loss.item(), norm.item()))
    with torch.no_grad():
        batch = stacked(texts(7))
        output = model.eval()(**batch)
    found = accuracy(SimpleNamespace(predictions=output.logits, label_ids=batch["labels"]))
    return figures, [output.loss.item(), found["right"], found["rows"]], model


def trainer_of(world: Any, kind: str, folder: str, base: Any = None, **options: Any) -> Any:
    """Return a Trainer on engines."""
    import transformers

    import shardwise.transformers
    from tests.distributed.test_accelerate import fresh
    from tests.distributed.test_transformers_trainer import quietly

    quietly()
    fresh()
    each = BATCH // world.data_size
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    settings = {
        name: options.pop(name) for name in ("zero", "compute_loss_func") if name in options
    }
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=2,
        logging_steps=1,
        include_num_input_tokens_seen="all",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        max_grad_norm=NORM,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=WINDOW,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        dataloader_pin_memory=False,
        **options,
    )
    return shardwise.transformers.on(base or transformers.Trainer)(
        model,
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(7),
        compute_metrics=accuracy,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        quiet=True,
        **settings,
    )


def metrics_of(evaluated: dict[str, float]) -> list[float]:
    return [evaluated[f"eval_{name}"] for name in ("loss", "right", "rows")]


def trained_by_trainer(world: Any, kind: str, folder: str, options: dict[str, Any]) -> Any:
    """Train and evaluate with a Trainer. Return figures, metrics by time, and weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # loss functions compute in fp32
        trainer = trainer_of(world, kind, folder, eval_strategy="epoch", **options)
        before = metrics_of(trainer.evaluate())  # without an engine, on whole sequences
        trainer.train()
        prompts = [{n: v for n, v in row.items() if n != "labels"} for row in texts(7)]
        assert trainer.predict(prompts).metrics.keys().isdisjoint({"test_loss"})
    tokens = 2 * ROWS * LENGTH
    assert trainer.state.num_input_tokens_seen == tokens or world.data_size > 1
    flops = 6 * tokens * trainer.model.num_parameters(exclude_embeddings=True)
    assert trainer.state.total_flos == pytest.approx(flops) or world.data_size > 1
    logs = [log for log in trainer.state.log_history if "loss" in log]
    between = [metrics_of(log) for log in trainer.state.log_history if "eval_loss" in log]
    with trainer.accelerator.full_parameters(trainer.model):
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.accelerator.free_memory()
    return [(log["loss"], log["grad_norm"]) for log in logs], [before, between[-1]], state


@pytest.mark.parametrize(
    ("kind", "size", "context", "options"),
    [
        ("GPT2", 2, 2, {"zero": 2}),
        pytest.param("Llama", 4, 2, {"zero": 3}, marks=pytest.mark.full),
        pytest.param("Llama", 4, 4, {"zero": 3}, marks=pytest.mark.full),
        pytest.param("Llama", 2, 2, {"gradient_checkpointing": True}, marks=pytest.mark.full),
        pytest.param("Bert", 2, 2, {}, marks=pytest.mark.full),
    ],
)
def test_trainer_equals_one_process(group, tmp_path, kind, size, context, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        figures, after, model = plain_texts(kind)
        with torch.no_grad():
            before = model_of(kind).eval()(**stacked(texts(7))).loss.item()
    everyone = ranks(group, size, context)(trained_by_trainer, kind, str(tmp_path), options)
    for ours, evaluated, state in everyone:
        assert ours == [pytest.approx(each, rel=1e-6) for each in figures]  # logged in fp32
        assert evaluated[0][0] == pytest.approx(before, rel=1e-8)
        assert evaluated[1] == pytest.approx(after, rel=1e-8)
        assert_equal(state, model)


def refused_by_trainer(world: Any, folder: str) -> dict[str, str]:
    """Return the errors of Trainers whose losses would be wrong."""
    import transformers

    class Shifts(transformers.Trainer):
        """Shifts labels outside of the model, so each part but the last loses a label."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            loss = loss_of(logits[:, :-1], labels[:, 1:])
            return (loss, logits) if return_outputs else loss

    class Divides(Shifts):
        """As `Shifts`, but divides a sum by the number of labels that it was given."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**inputs).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch
            return (loss, logits) if return_outputs else loss

    # TRL is not installed here. Its classes are found by the names of their modules.
    names = {"__module__": "trl.trainer.any"}
    trl = {
        name: type(name, (transformers.Trainer,), names) for name in ("SFTTrainer", "DPOTrainer")
    }

    def error_of(**options: Any) -> str:
        try:
            trainer_of(world, "GPT2", folder, **options).train()
        except (UsageError, ModelError, DataError) as error:
            return str(error)
        return ""

    return {
        "smoothing": error_of(label_smoothing_factor=0.1),
        "function": error_of(compute_loss_func=lambda *a, **k: None),
        "override": error_of(base=Shifts),
        "sft": error_of(base=trl["SFTTrainer"]),
        "dpo": error_of(base=trl["DPOTrainer"]),
        "sum": error_of(base=Divides),
    }


def test_trainer_refuses_losses_outside_of_the_model(group, tmp_path):
    for errors in ranks(group, 2, 2)(refused_by_trainer, str(tmp_path)):
        assert errors["smoothing"].startswith("label_smoothing_factor cannot be combined")
        assert errors["function"].startswith("compute_loss_func cannot be combined")
        assert "compute_loss must not shift labels" in errors["override"]
        assert errors["sft"].startswith("compute_metrics of SFTTrainer cannot be combined")
        assert errors["dpo"].startswith("DPOTrainer of TRL cannot be combined with --context 2")
        assert "compute_loss must not shift labels" in errors["sum"]


# -- Lightning -------------------------------------------------------------------------------------


def module_of(kind: str) -> Any:
    """Return a LightningModule that has a model, or that is one."""
    import lightning.pytorch as pl

    class Steps(pl.LightningModule):
        def step(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
            logits = self(batch["ids"], batch["positions"])
            return loss_of(logits, batch["labels"]), int((batch["labels"] != -100).sum())

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss, count = self.step(batch)
            self.log("loss", loss, on_epoch=True, batch_size=count, sync_dist=True)
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            loss, count = self.step(batch)
            self.log("val_loss", loss, batch_size=count, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    class Outer(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.model(*inputs)

    class Itself(Steps):
        def __init__(self) -> None:
            super().__init__()
            for name, child in language_model().named_children():
                setattr(self, name, child)

        forward = Model.forward

    class Unweighted(Outer):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss, _ = self.step(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

    return {"outer": Outer, "itself": Itself, "unweighted": Unweighted}[kind]()


def trained_by_lightning(world: Any, kind: str, zero: int) -> Any:
    """Train with Lightning's Trainer. Return weights, and the loss of a validation."""
    from shardwise.lightning import ShardwiseStrategy
    from tests.distributed.test_lightning import calm, trainer

    with calm():
        made = trainer(
            ShardwiseStrategy(zero=zero, quiet=True),
            max_epochs=2,
            accumulate_grad_batches=WINDOW,
            gradient_clip_val=NORM,
            num_sanity_val_steps=0,
        )
        module = module_of(kind)
        each = BATCH // world.data_size
        loaders = [
            DataLoader(rows(count), batch_size=each, collate_fn=stacked) for count in (ROWS, 7)
        ]
        try:
            made.fit(module, *loaders)
        except UsageError as error:
            return str(error)
    state = {n.removeprefix("model."): v.clone() for n, v in module.state_dict().items()}
    names = ("val_loss", "loss_step", "loss_epoch")
    return state, [float(made.callback_metrics[name]) for name in names]


def plain_steps() -> tuple[nn.Module, list[float]]:
    """Train in plain PyTorch with a constant rate.

    Return the model, and the losses of a validation, the last batch and the last epoch.
    """
    model, data = language_model(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(2):
        total = count = 0.0
        for first in range(0, ROWS, BATCH * WINDOW):
            batch = stacked(data[first : first + BATCH * WINDOW])
            optimizer.zero_grad()
            logits = model(batch["ids"], batch["positions"])
            last = loss_of(logits[BATCH:], batch["labels"][BATCH:]).item()
            loss = loss_of(logits, batch["labels"])
            loss.backward()
            items = (batch["labels"] != -100).sum().item()
            total, count = total + loss.item() * items, count + items
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
    with torch.no_grad():
        batch = stacked(rows(7))
        loss = loss_of(model(batch["ids"], batch["positions"]), batch["labels"])
    return model, [loss.item(), last, total / count]


@pytest.mark.parametrize(
    ("kind", "size", "context", "zero"),
    [
        ("outer", 2, 2, 1),
        pytest.param("outer", 4, 2, 3, marks=pytest.mark.full),
        pytest.param("outer", 4, 4, 2, marks=pytest.mark.full),
        pytest.param("itself", 2, 2, 3, marks=pytest.mark.full),
    ],
)
def test_lightning_equals_one_process(group, kind, size, context, zero):
    pytest.importorskip("lightning", reason="the lightning package is not there")
    expected, losses = plain_steps()
    # With two groups, Lightning's sampler repeats no sample, but its last batches have other rows.
    known = slice(None) if size == context else slice(1)
    for state, found in ranks(group, size, context)(trained_by_lightning, kind, zero):
        assert_equal(state, expected)
        assert found[known] == pytest.approx(losses[known], rel=1e-6)  # logged in fp32


def test_lightning_refuses_means_of_unknown_tokens(group):
    pytest.importorskip("lightning", reason="the lightning package is not there")
    for error in ranks(group, 2, 2)(trained_by_lightning, "unweighted", 0):
        assert error.startswith("self.log('loss', ..., sync_dist=True)")


def trained_by_fabric(world: Any, zero: int) -> Any:
    """Train with Fabric. Return weights."""
    from lightning.fabric import Fabric

    from shardwise.lightning import ShardwiseFabricStrategy
    from tests.distributed.test_lightning import calm

    with calm():
        fabric = Fabric(accelerator="cpu", strategy=ShardwiseFabricStrategy(zero=zero, quiet=True))
        fabric.launch()
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        wrapped, optimizer = fabric.setup(model, optimizer)
        each = BATCH * WINDOW // world.data_size
        loader = DataLoader(rows(), batch_size=each, collate_fn=stacked)
        loader = fabric.setup_dataloaders(loader)
        for _ in range(2):
            for batch in loader:
                logits = wrapped(batch["ids"], batch["positions"])
                fabric.backward(loss_of(logits, batch["labels"]))
                fabric.clip_gradients(wrapped, optimizer, max_norm=NORM)
                optimizer.step()
                optimizer.zero_grad()
        assert fabric.all_reduce(torch.tensor(world.rank + 1.0), reduce_op="mean") > 1
        state = fabric.strategy.get_module_state_dict(model)
        fabric.strategy.training.close()
    return state


@pytest.mark.parametrize(
    ("size", "context", "zero"),
    [
        (2, 2, 1),
        pytest.param(4, 2, 3, marks=pytest.mark.full),
        pytest.param(4, 4, 3, marks=pytest.mark.full),
    ],
)
def test_fabric_equals_one_process(group, size, context, zero):
    pytest.importorskip("lightning", reason="the lightning package is not there")
    expected, _ = plain_steps()
    for rank, state in enumerate(ranks(group, size, context)(trained_by_fabric, zero)):
        if state or rank == 0:
            assert_equal(state, expected)


# -- refusals --------------------------------------------------------------------------------------


def refused_by_accelerate(world: Any) -> dict[str, str]:
    """Return the errors of uses of an Accelerator that would be wrong."""
    from tests.distributed.test_accelerate import ours

    def prepared(collate: Any = stacked, order: Any = None, **options: Any) -> Any:
        accelerator = ours(**options)
        model = language_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = DataLoader(rows(), batch_size=4, collate_fn=collate, sampler=order)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def error_of(call: Any) -> str:
        try:
            call()
        except (UsageError, ModelError, DataError) as error:
            return str(error)
        return ""

    def other_samples() -> None:
        order = [number + world.rank for number in range(4)]
        for _ in prepared(order=order)[3]:
            pass

    def a_loss() -> None:
        accelerator, model, _, loader = prepared()
        for batch in loader:
            logits = model(batch["ids"], batch["positions"])
            accelerator.gather_for_metrics(loss_of(logits, batch["labels"]).detach().repeat(4))

    def objects() -> None:
        accelerator, *_, loader = prepared()
        for _ in loader:
            accelerator.gather_for_metrics(["a", "b", "c", "d"])

    def a_shift() -> None:
        accelerator, model, _, loader = prepared()
        for batch in loader:
            logits = model(batch["ids"], batch["positions"])
            accelerator.backward(loss_of(logits[:, :-1], batch["labels"][:, 1:]))

    def in_eval_mode() -> None:
        accelerator, model, _, loader = prepared()
        model.eval()
        for batch in loader:
            model.train()
            logits = model(batch["ids"], batch["positions"])
            accelerator.backward(loss_of(logits, batch["labels"]))

    def of_one_length() -> None:
        accelerator, *_, loader = prepared(lambda each: first_words(stacked(each), 8))
        for _ in loader:
            accelerator.gather_for_metrics(torch.arange(16).view(4, 4))

    def an_unreadable_mean() -> None:
        accelerator, model, _, loader = prepared()
        for batch in loader:
            logits = model(batch["ids"], batch["positions"])
            accelerator.backward(logits.mean((1, 2)).square().mean())

    def without_an_optimizer() -> None:
        accelerator = ours()
        model, loader = accelerator.prepare(
            language_model(), DataLoader(rows(), batch_size=4, collate_fn=stacked)
        )
        for batch in loader:
            logits = model(batch["ids"], batch["positions"])
            accelerator.backward(loss_of(logits, batch["labels"]))

    def read_by_one_worker() -> None:
        prepared(dataloader_config=dispatching())

    def dispatching() -> Any:
        from accelerate.utils import DataLoaderConfiguration

        return DataLoaderConfiguration(dispatch_batches=True)

    calls = (
        *(other_samples, a_loss, objects, a_shift, in_eval_mode, of_one_length, an_unreadable_mean),
        *(without_an_optimizer, read_by_one_worker),
    )
    errors = {call.__name__: error_of(call) for call in calls}
    # The values are as long as the part of worker 0, but not as that of worker 1.
    accelerator, *_, loader = prepared()
    values = torch.arange(16).view(4, 4)
    next(iter(loader))
    errors["values"] = str(torch.equal(accelerator.gather_for_metrics(values), values))
    # Workers with different seeds read the same samples, and keep drawing different numbers.
    accelerator, model = ours(), language_model()
    torch.manual_seed(world.rank)
    *_, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        DataLoader(rows(), batch_size=4, collate_fn=stacked, shuffle=True),
    )
    for _ in loader:
        pass
    errors["drawn"] = str(torch.rand(()).item())
    return errors


def test_accelerate_refuses_by_name(group):
    pytest.importorskip("accelerate", reason="the accelerate package is not there")
    everyone = ranks(group, 2, 2)(refused_by_accelerate)
    assert len({errors["drawn"] for errors in everyone}) == 2
    for errors in everyone:
        assert "have read different samples" in errors["other_samples"]
        assert errors["a_loss"].startswith("gather_for_metrics got values of shape (4,)")
        assert errors["objects"].startswith("gather_for_metrics of objects")
        assert "leaves out the last of this worker's tokens" in errors["a_shift"]
        assert "it is unknown whether they are values per token" in errors["of_one_length"]
        assert errors["values"] == "True"
        assert "write model.train() before the loop" in errors["in_eval_mode"]
        assert "Pass this worker's number of tokens" in errors["an_unreadable_mean"]
        # Engines of the calls before still exist.
        assert "outside of the engine's model" in errors["without_an_optimizer"]
        assert "dispatch_batches" in errors["read_by_one_worker"]
