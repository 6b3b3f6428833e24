"""Trains a language model in a loop with stock Accelerate, like transformers'
run_clm_no_trainer.py: accumulation, checkpoints by epoch, perplexity, save_pretrained on all ranks.

Arguments: the folder with the text, the output folder, the number of rows per process and, to
resume, a checkpoint.
"""

import math
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    default_data_collator,
    get_scheduler,
)

EPOCHS = 2


def blocks(tokenizer, path, length):
    """The words of a text in rows of one length."""
    words = tokenizer(Path(path).read_text(), verbose=False)["input_ids"]
    rows = [words[i : i + length] for i in range(0, len(words) - length + 1, length)]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def groups(model):
    """Two groups of parameters, of which one has weight decay."""
    plain = ("bias", "layer_norm.weight")
    decayed = [p for n, p in model.named_parameters() if not any(end in n for end in plain)]
    other = [p for n, p in model.named_parameters() if any(end in n for end in plain)]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]


def evaluated(accelerator, model, loader, rows):
    """The perplexity of the text in `loader`."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(rows)))
    return math.exp(torch.cat(losses).mean())


def main(folder, output, rows, checkpoint=None):
    warnings.simplefilter("ignore")
    rows = int(rows)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    set_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.resize_token_embeddings(len(tokenizer))
    train = DataLoader(
        blocks(tokenizer, f"{folder}/train.txt", 8), rows, True, collate_fn=default_data_collator
    )
    valid = DataLoader(
        blocks(tokenizer, f"{folder}/valid.txt", 8), rows, collate_fn=default_data_collator
    )
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, 2, 40)
    prepared = accelerator.prepare(model, optimizer, train, valid, scheduler)
    model, optimizer, train, valid, scheduler = prepared
    begun = 0
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        begun = int(checkpoint.rpartition("_")[2]) + 1
    for epoch in range(begun, EPOCHS):
        model.train()
        train.set_epoch(epoch)
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        perplexity = evaluated(accelerator, model, valid, rows)
        accelerator.print("epoch", epoch, "perplexity", f"{perplexity:.4f}")
        accelerator.save_state(f"{output}/epoch_{epoch}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        output, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        loaded = AutoModelForCausalLM.from_pretrained(output)
        finite = all(bool(p.isfinite().all()) and p.numel() for p in loaded.parameters())
        print("saved", loaded.get_input_embeddings().weight.shape[0] == len(tokenizer), finite)
        print("by", type(accelerator).__module__, accelerator.num_processes, os.getcwd() != folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
