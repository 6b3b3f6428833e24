"""Trains a tiny language model with the library that the argument names, and prints losses.

The script is an ordinary one: it says nothing about workers. `--adopt` splits its sequences.
"""

import sys
import warnings

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

RATE, ROWS, BATCH = 0.01, 16, 4


def model_of():
    """A Llama with grouped-query attention."""
    set_seed(3)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def rows():
    """Rows of 33 sorted words, which are also the labels."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(50, (ROWS, 33), generator=draw).sort(1).values
    return [{"input_ids": row, "labels": row} for row in words]


def by_accelerate():
    from accelerate import Accelerator

    accelerator, model = Accelerator(), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train, test = (DataLoader(rows()[:n], BATCH, shuffle=n == ROWS) for n in (ROWS, 6))
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _ in range(2):
        for batch in train:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in test:
        with torch.no_grad():
            logits = model(**batch).logits
        logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
        )
        losses.append(each.mean(1))
    accelerator.print("losses", *torch.cat(losses).tolist())


def by_transformers():
    arguments = TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=BATCH, learning_rate=RATE,
        gradient_accumulation_steps=2, per_device_eval_batch_size=BATCH, eval_strategy="epoch",
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model_of(), arguments, train_dataset=rows(), eval_dataset=rows()[:6])
    trainer.train()
    if trainer.is_world_process_zero():
        kinds = ("loss", "grad_norm", "eval_loss")
        print(
            "losses", *(h[kind] for h in trainer.state.log_history for kind in kinds if kind in h)
        )


def by_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model_of()

        def step(self, name, batch):
            loss = self.model(**batch).loss
            count = int((batch["shift_labels"] != -100).sum())
            self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=count)
            return loss

        def training_step(self, batch, index):
            return self.step("loss", batch)

        def validation_step(self, batch, index):
            self.step("val_loss", batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", gradient_clip_val=1.0, **off)
    data = rows()
    for row in data:
        # The label of a part's last token is in the next part, so shift labels before the split.
        shifted = torch.nn.functional.pad(row["labels"][1:], (0, 1), value=-100)
        row["shift_labels"] = shifted
    trainer.fit(Module(), DataLoader(data, BATCH), DataLoader(data[:6], BATCH))
    if trainer.is_global_zero:
        print("losses", *(float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {
        "accelerate": by_accelerate,
        "transformers": by_transformers,
        "lightning": by_lightning,
    }[sys.argv[1]]()
