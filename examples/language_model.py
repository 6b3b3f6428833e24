"""A GPT learns the source text of Python's standard library, or your own.

    shardwise run -n 2 --zero 2 examples/language_model.py
    python examples/language_model.py                         # the same, alone
    torchrun --nproc-per-node 2 examples/language_model.py    # the same, by torchrun
    shardwise run -n 2 examples/language_model.py --data my/texts --layers 8 --width 384

The losses are the same for every number of workers and every placement. Into --out go
metrics.jsonl, tensorboard/, loss.png and model.safetensors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

import corpus
import gpt
import report
import shardwise as sw
from log import Log, resident_bytes


def main() -> None:
    args = arguments()
    world = sw.init(seed=0)
    text = shared_corpus(world, args)

    model = gpt.GPT(shape(args, len(text.tokenizer.tokens))).to(world.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(
        corpus.Windows(text.training, args.context), batch_size=args.batch_size, shuffle=True
    )
    held_out = sw.Loader(
        corpus.spread(corpus.Windows(text.held_out, args.context), args.held_out),
        batch_size=args.batch_size,
    )
    token_bytes = text.token_bytes.to(world.device)
    deadline = time.monotonic() + 60 * args.minutes

    with Log(args.out, args.steps, visible=world.is_main) as log:
        log.say(str(text))
        log.evaluated(evaluate(model, held_out, token_bytes))
        train(
            engine,
            model,
            loader,
            scheduler,
            log,
            evaluate=lambda: evaluate(model, held_out, token_bytes),
            is_over=lambda: world.any(time.monotonic() > deadline),
        )
    ...
