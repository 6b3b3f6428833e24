"""A GPT that learns source code: `shardwise run -n 2 --zero 2 examples/language_model.py`.

    shardwise run -n 2 --zero 2 examples/language_model.py
    python examples/language_model.py                         # the same with one worker
    torchrun --nproc-per-node 2 examples/language_model.py    # the same, started by torchrun
    shardwise run -n 2 examples/language_model.py --data my/texts --layers 8 --width 384
    shardwise run -n 2 --context 2 examples/language_model.py  # half of a window each

It learns Python's standard library, or the text of --data, for at most 3 minutes. The losses are
the same for every number of workers and every placement. It prints losses, held-out perplexities, a
text that the model writes, and a table. It writes metrics.jsonl, tensorboard/, loss.png and
model.safetensors into runs/language_model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.panel import Panel
from rich.text import Text
from torch import Tensor
from torch.utils.data import default_collate

import shardwise as sw
from helpers import corpus, gpt, report
from helpers.log import HeldOut, Log, resident_bytes


def main() -> None:
    args = arguments()
    world = sw.init(seed=0)
    text = shared_text(world, args)

    model = gpt.GPT(shape(args, text)).to(world.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    # A warm-up of a single step would divide by zero in OneCycleLR.
    warm_up = max(0.1, 2 / (args.steps + 1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps + 1, pct_start=warm_up, cycle_momentum=False
    )
    engine = sw.Engine(model, optimizer)
    windows, held_out = text.windows(args.context, args.held_out)
    loader = sw.Loader(windows, batch_size=args.batch_size, shuffle=True, collate_fn=with_positions)
    held_out_loader = sw.Loader(held_out, batch_size=args.batch_size, collate_fn=with_positions)
    token_bytes = text.token_bytes.to(world.device)

    with Log(args.out, args.steps, visible=world.is_main) as log:
        log.say(str(text))
        train(
            engine,
            model,
            loader,
            scheduler,
            log,
            evaluate=lambda: evaluate(model, held_out_loader, token_bytes),
            every=args.evaluate_every,
            is_over=time_limit(world, args.minutes),
        )
    resident = world.gather(resident_bytes())

    engine.export(args.out / "model.safetensors")
    with engine.full_parameters():
        if world.is_main:
            show_sample(model, text, args, log)
    if world.is_main:
        close(world, engine, model, args, log, resident)


def train(
    engine: sw.Engine,
    model: gpt.GPT,
    loader: sw.Loader,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    log: Log,
    *,
    evaluate: Callable[[], HeldOut],
    every: int,
    is_over: Callable[[], bool],
) -> None:
    """Train for `log.steps` steps, and evaluate before, after and in between."""
    log.evaluated(evaluate())
    for _ in loader.epochs(log.steps):  # always enough, because an epoch has at least one step
        for step in loader.steps():
            for batch in step:
                engine.forward_backward(
                    partial(gpt.token_loss, model), *batch, weight=count_targets
                )
            stats = engine.step(max_norm=1.0)
            scheduler.step()

            log.trained(
                loss=float(stats.loss),
                tokens=float(stats.weight),
                grad_norm=float(stats.grad_norm),
                learning_rate=scheduler.get_last_lr()[0],
            )
            is_last = log.step == log.steps or is_over()
            if is_last or log.step % every == 0:
                log.evaluated(evaluate())
            if is_last:
                return


def evaluate(model: gpt.GPT, loader: sw.Loader, token_bytes: Tensor) -> HeldOut:
    """Measure `model` on every held-out window once, over all workers."""
    metrics = sw.Metrics()
    model.eval()
    with torch.no_grad():
        for tokens, targets, positions in loader:
            metrics.add(
                n=targets.numel(),
                loss=gpt.token_loss(model, tokens, targets, positions),
                bytes=token_bytes[targets].mean(),
            )
    model.train()
    mean = metrics.compute()
    return HeldOut(loss=float(mean["loss"]), bytes_per_token=float(mean["bytes"]))


def with_positions(samples: list[corpus.Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch of tokens, targets and positions, each (rows, length).

    With --context, a worker gets a part of each window, from which it cannot tell the positions.
    """
    tokens, targets = default_collate(samples)
    return tokens, targets, torch.arange(tokens.size(1)).expand_as(tokens)


def count_targets(tokens: Tensor, targets: Tensor, positions: Tensor) -> int:
    """Return the weight of a micro-batch, which is its number of targets on this worker."""
    del tokens, positions
    return targets.numel()


def shared_text(world: sw.World, args: argparse.Namespace) -> corpus.Corpus:
    """Return the corpus, which the main rank makes once and sends to the others."""
    text: corpus.Corpus | corpus.CorpusError | None = None
    if world.is_main:
        print(f"reading {args.data or 'the standard library'}, learning a tokenizer", flush=True)
        try:
            text = corpus.read(args.data, vocabulary=args.vocabulary)
            text.windows(args.context, args.held_out)
        except corpus.CorpusError as error:
            text = error
    text = world.broadcast_object(text)
    if not isinstance(text, corpus.Corpus):
        world.print(f"language_model: {text}", file=sys.stderr)
        sys.exit(2)
    return text


def shape(args: argparse.Namespace, text: corpus.Corpus) -> gpt.Shape:
    """Return the sizes of the model from the flags."""
    return gpt.Shape(
        vocabulary=len(text.tokenizer.tokens),
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
    )


def time_limit(world: sw.World, minutes: float) -> Callable[[], bool]:
    """Return a function that tells whether `minutes` are over. All ranks get the same answer."""
    deadline = time.monotonic() + 60 * minutes
    return lambda: world.any(time.monotonic() > deadline)


def show_sample(model: gpt.GPT, text: corpus.Corpus, args: argparse.Namespace, log: Log) -> None:
    """Print the model's continuation of the prompt."""
    prompt = list(text.tokenizer.encode(f"\n{args.prompt}".encode()))
    written = gpt.continue_text(model, prompt, args.sample, seed=0)
    sample = Text(args.prompt, style="bold").append(text.tokenizer.decode(written), "not bold")
    log.say(Panel(sample, title="the model writes", title_align="left"))


def close(
    world: sw.World,
    engine: sw.Engine,
    model: gpt.GPT,
    args: argparse.Namespace,
    log: Log,
    resident: list[int],
) -> None:
    """Draw the curves and print the closing table."""
    first, last = log.curves.held_out[0][1], log.curves.held_out[-1][1]
    workers = f"{world.size} on {world.device.type}, started by {world.launcher}"
    parameters = f"{model.number_of_parameters / 1e6:.2f}M parameters"
    report.draw(
        log.curves,
        args.out / "loss.png",
        subtitle=f"{parameters} · {log.tokens:,.0f} tokens in {log.seconds:,.0f} s · "
        f"{world.size} worker{'s' * (world.size > 1)} · {engine.placement.name}",
    )
    if log.step < log.steps:
        log.say(f"stopped at step {log.step} of {log.steps}: --minutes {args.minutes:g} are over")
    rows = {
        "workers": workers,
        "placement": engine.placement.name,
        "model": parameters,
        "trained": f"{log.step} steps, {log.tokens:,.0f} tokens, {log.seconds:,.1f} s",
        "tokens/s": f"{log.tokens / log.seconds:,.0f}",
        "held-out perplexity": f"{first.perplexity:,.1f} → {last.perplexity:,.1f} per token",
        "held-out bits": f"{first.bits_per_byte:.3f} → {last.bits_per_byte:.3f} per byte",
        "resident set": report.resident_line(resident),
        "files": report.files_lines(args.out),
    }
    log.say(report.table(rows))


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(
        description="A GPT learns Python's standard library, or the text of --data."
    )
    size = parser.add_argument_group("model")
    number = "(default %(default)s)"
    whole: dict[str, Any] = {"type": positive(int), "metavar": "N"}
    size.add_argument("--layers", default=6, help=f"blocks {number}", **whole)
    size.add_argument("--width", default=256, help=f"numbers per token {number}", **whole)
    size.add_argument("--heads", default=4, help=f"attention heads {number}", **whole)
    size.add_argument("--context", default=128, help=f"tokens in a window {number}", **whole)
    size.add_argument("--vocabulary", default=2048, help=f"distinct tokens {number}", **whole)
    training = parser.add_argument_group("training")
    some: dict[str, Any] = {"type": positive(float), "metavar": "X"}
    training.add_argument("--steps", default=300, help=f"number of steps {number}", **whole)
    training.add_argument("--batch-size", default=16, help=f"windows per step {number}", **whole)
    training.add_argument("--lr", default=2e-3, help=f"peak learning rate {number}", **some)
    training.add_argument("--minutes", default=3.0, help=f"time limit in minutes {number}", **some)
    text = parser.add_argument_group("text")
    path: dict[str, Any] = {"type": Path, "metavar": "PATH"}
    text.add_argument("--data", help="a file or folder of text (default: Python's library)", **path)
    text.add_argument("--held-out", default=128, help=f"windows to evaluate {number}", **whole)
    text.add_argument(
        "--evaluate-every", default=50, help=f"steps between evaluations {number}", **whole
    )
    text.add_argument("--prompt", default="def", help=f"start of the sample {number}")
    text.add_argument("--sample", default=160, help=f"tokens in the sample {number}", **whole)
    text.add_argument("--out", default="runs/language_model", help=f"folder {number}", **path)
    args = parser.parse_args()
    if args.width % (2 * args.heads):
        parser.error(
            f"--width {args.width} must be a multiple of 2 x --heads, which is {2 * args.heads}."
        )
    if not 256 <= args.vocabulary <= 2**16:
        parser.error(f"--vocabulary must be from 256 to 65536, not {args.vocabulary}.")
    return args


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a parser of numbers above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
        return value

    return parse


if __name__ == "__main__":
    main()
