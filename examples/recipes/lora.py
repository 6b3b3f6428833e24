"""Fine-tune a transformer with LoRA adapters.

    shardwise run -n 2 --zero 3 examples/recipes/lora.py

Uses a GPT-2 with random weights, so that it runs offline. Prints the loss, and writes the
adapters to adapters.pt.
"""

import argparse
import inspect

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import shardwise as sw

world = sw.init(seed=0)
# For a real model: GPT2LMHeadModel.from_pretrained("gpt2")
base = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        # Without dropout the result is the same on every number of workers.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
)
lora = LoraConfig(
    r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True
)
model = get_peft_model(base, lora)
trained = [p for p in model.parameters() if p.requires_grad]
engine = sw.Engine(model, torch.optim.AdamW(trained, lr=1e-2))

text = torch.tensor([min(ord(letter), 127) for letter in inspect.getsource(argparse)[:20_000]])
rows = text[: len(text) // 33 * 33].view(-1, 33)
loader = sw.Loader(TensorDataset(rows), batch_size=16, shuffle=True)

for epoch in loader.epochs(4):
    metrics = sw.Metrics()
    for (tokens,) in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step(max_norm=1.0)
        metrics.add(loss=loss.detach())
    world.print(f"epoch {epoch}: loss {metrics.compute()['loss']:.4f}")

with engine.full_parameters():  # whole tensors: with --zero 3 each worker holds a part
    adapters = {k: v.clone() for k, v in get_peft_model_state_dict(model).items()}
if world.is_main:
    torch.save(adapters, "adapters.pt")
world.print(f"{len(adapters)} adapter tensors in adapters.pt")
