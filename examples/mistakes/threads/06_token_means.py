"""Each micro-batch is averaged over its own tokens, and the means are averaged.

Tokens of short texts count more than others. Seen in transformers#34191 with accumulation, and in
torchtitan#1842 and verl#3994 over ranks.
"""

import sys
from itertools import islice

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

right = "--right" in sys.argv
WINDOW = 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
torch.manual_seed(0)
lengths = torch.randint(4, 40, (256,)).tolist()
texts = [torch.randint(1, 20, (length,)).sort().values for length in lengths]
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20))
loader = DataLoader(texts, batch_size=4, collate_fn=lambda s: pad_sequence(s, batch_first=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
micro_batches = iter(loader)
while window := list(islice(micro_batches, WINDOW)):
    tokens = sum((each[:, 1:] > 0).sum() for each in window)
    tokens = accelerator.reduce(tokens, "sum")
    total = 0.0
    for each in window:
        with accelerator.accumulate(model):
            logits = model(each[:, :-1]).flatten(0, 1)
            how = "sum" if right else "mean"
            loss = cross_entropy(logits, each[:, 1:].flatten(), ignore_index=0, reduction=how)
            if right:  # prepare and backward divide by the ranks and the window
                loss = loss / tokens * accelerator.num_processes * WINDOW
            total += accelerator.reduce(loss.detach(), "mean") / WINDOW
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {total:.5f}")
accelerator.end_training()
