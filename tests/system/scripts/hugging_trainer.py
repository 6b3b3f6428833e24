"""A script for the stock Trainer, which knows nothing of us: prints its losses."""

import sys

import torch
import transformers

folder = sys.argv[1]
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
config = transformers.GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
transformers.set_seed(1)
words = torch.randint(2, 40, (16, 8))
rows = [{"input_ids": row, "labels": row} for row in words]
arguments = transformers.TrainingArguments(
    folder, max_steps=3, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
    per_device_train_batch_size=2, dataloader_pin_memory=False,
)  # fmt: skip
trainer = transformers.Trainer(
    model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=rows
)
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    print("saved", sum(p.numel() for p in loaded.parameters()))
    print("losses", *(log["loss"] for log in trainer.state.log_history if "loss" in log))
    print("ranks", arguments.world_size, [base.__name__ for base in type(trainer).__mro__][:2])
