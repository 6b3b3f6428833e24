"""One process of exact_mean.py: `python exact_mean_worker.py WHO CASE ...`; rank 0 prints the
gradient norms of each case, by step, as JSON.

WHO is plain (PyTorch, the whole batch of a step at once), stock (the library's default) or ours
(with exact_mean=True).
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROWS, LENGTH, WORDS = 21, 8, 13
WINDOW, STEP = 2, 16
"""Steps of 16 rows in two micro-batches, and one of 5."""
ENDLESS = 1e9
"""A norm for clipping that changes nothing."""

Batch = dict[str, Tensor]


class Pixels(nn.Module):
    """A model whose loss is a mean over samples, and that takes no number of items."""

    accepts_loss_kwargs = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, input_ids: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.net(input_ids).mean((1, 2)), target)}


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str, **options: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_hidden_layers=1, hidden_size=8,
        num_attention_heads=2, intermediate_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


@dataclass(frozen=True)
class Case:
    """A model, the kind of its labels, and the library that trains it."""

    label: str
    model: Callable[[], nn.Module]
    labels: str
    by: str = "Trainer"


CASES = {
    "gpt2": Case("GPT-2, words", gpt2, "words"),
    "masked": Case("BERT, masked words", lambda: bert("BertForMaskedLM"), "words"),
    "classes": Case(
        "BERT, classes", lambda: bert("BertForSequenceClassification", num_labels=2), "class"
    ),
    "samples": Case("own model, samples", Pixels, "target"),
    "accelerate": Case("own model, samples", Pixels, "target", "Accelerate"),
    "accelerate-words": Case("GPT-2, words", gpt2, "words", "Accelerate"),
    "lightning": Case("own model, samples", Pixels, "target", "Lightning"),
    "lightning-words": Case("GPT-2, words", gpt2, "words", "Lightning"),
    "fabric": Case("own model, samples", Pixels, "target", "Fabric"),
    "fabric-words": Case("GPT-2, words", gpt2, "words", "Fabric"),
}


def rows(labels: str) -> Iterator[Batch]:
    """Yield rows that differ in their number of labels."""
    draw = torch.Generator().manual_seed(1)
    for number in range(ROWS):
        words = torch.randint(2, WORDS, (LENGTH,), generator=draw)
        if labels == "words":
            kept = torch.arange(LENGTH) < 2 + number % 6
            yield {"input_ids": words, "labels": words.where(kept, -100)}
        elif labels == "class":
            yield {"input_ids": words, "labels": words[0] % 2}
        else:
            yield {"input_ids": words, "target": words.float().mean().sin()}


def collate(items: list[Batch]) -> Batch:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def loader_of(case: Case, size: int) -> DataLoader[Batch]:
    """Return micro-batches of one of `size` ranks."""
    rank_batch = STEP // WINDOW // size
    return DataLoader(list(rows(case.labels)), batch_size=rank_batch, collate_fn=collate)


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def plain(case: Case) -> list[float]:
    model, _ = made(case)
    data, norms = list(rows(case.labels)), []
    for first in range(0, ROWS, STEP):
        model.zero_grad()
        model(**collate(data[first : first + STEP]))["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), ENDLESS).item())
    return norms


def by_trainer(case: Case, ours: bool, size: int) -> list[float]:
    import transformers

    kind, options = transformers.Trainer, {}
    if ours:
        import shardwise.transformers

        kind, options = shardwise.transformers.Trainer, {"exact_mean": True, "quiet": True}
    arguments = transformers.TrainingArguments(
        "trained", num_train_epochs=1, logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", max_grad_norm=ENDLESS, remove_unused_columns=False,
        train_sampling_strategy="sequential", gradient_accumulation_steps=WINDOW,
        per_device_train_batch_size=STEP // WINDOW // size, dataloader_pin_memory=False,
    )  # fmt: skip
    model, optimizer = made(case)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = kind(
        model=model, args=arguments, train_dataset=list(rows(case.labels)), data_collator=collate,
        optimizers=(optimizer, schedule), **options,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]


def by_accelerate(case: Case, ours: bool, size: int) -> list[float]:
    from accelerate import Accelerator

    kind, options = Accelerator, {}
    if ours:
        from shardwise.accelerate import Accelerator as kind  # noqa: N813

        options = {"exact_mean": True, "quiet": True}
    accelerator = kind(cpu=True, gradient_accumulation_steps=WINDOW, **options)
    model, optimizer = made(case)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(case, size))
    norms = []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            weight = {"weight": counted(batch)} if ours and case.labels == "words" else {}
            accelerator.backward(model(**batch)["loss"], **weight)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), ENDLESS).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def counted(batch: Batch) -> Tensor:
    """Return the number of labels that a causal model predicts."""
    return batch["labels"][:, 1:].ne(-100).sum()


def by_lightning(case: Case, ours: bool, size: int) -> list[float]:
    import lightning.pytorch as pl

    norms = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.made = made(case)

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(pl.utilities.grad_norm(self, 2)["grad_2.0_norm_total"].item())

        def configure_optimizers(self) -> Any:
            return self.made

    options: dict[str, Any] = {"devices": size, "strategy": "ddp" if size > 1 else "auto"}
    if ours:
        from shardwise.lightning import ShardwiseStrategy

        exact = counted if case.labels == "words" else True
        options = {"devices": 1, "strategy": ShardwiseStrategy(exact_mean=exact, quiet=True)}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=WINDOW,
        **options,
    )  # fmt: skip
    trainer.fit(Module(), loader_of(case, size))
    return norms


def by_fabric(case: Case, ours: bool, size: int) -> list[float]:
    from lightning.fabric import Fabric

    options: dict[str, Any] = {"devices": size, "strategy": "ddp" if size > 1 else "auto"}
    if ours:
        from shardwise.lightning import ShardwiseFabricStrategy

        options = {"devices": 1, "strategy": ShardwiseFabricStrategy(exact_mean=True, quiet=True)}
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    model, optimizer = fabric.setup(*made(case))
    loader = fabric.setup_dataloaders(loader_of(case, size))
    norms = []
    for number, batch in enumerate(loader, 1):
        is_last = number % WINDOW == 0 or number == len(loader)
        with fabric.no_backward_sync(model, enabled=not is_last):
            weight = {"weight": counted(batch)} if ours and case.labels == "words" else {}
            loss = model(**batch)["loss"]
            # The engine knows the window, and finds the mean in the loss's graph as it is.
            fabric.backward(loss if ours else loss / WINDOW, **weight)
        if is_last:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=ENDLESS).item())
            optimizer.step()
            optimizer.zero_grad()
    if ours:
        fabric.strategy.training.close()
    return norms


LOOPS = {
    "Trainer": by_trainer,
    "Accelerate": by_accelerate,
    "Lightning": by_lightning,
    "Fabric": by_fabric,
}


def norms_of(who: str, case: Case, size: int) -> list[float]:
    """Return the norms of a case by step."""
    if who == "plain":
        return plain(case)
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # it keeps the setup of the case before
    return LOOPS[case.by](case, who == "ours", size)


def main(who: str, *names: str) -> None:
    """Print the norms of the cases by `who`."""
    warnings.simplefilter("ignore")
    size = int(os.environ.get("SIZE", "1"))
    found = {name: norms_of(who, CASES[name], size) for name in names}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"norms": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
