"""Trains on long sequences, and measures one worker's activations, peak memory and step times.

`context.py` starts it. A step has one sequence per context group.

    activations   bytes of the tensors that a forward pass creates and leaves for the backward pass
    peak          the most bytes of living tensors during a step, with parameters, gradients and
                  optimizer state, and this rank's part (Pss) of the memory that ranks share
    seconds       wall-clock time of each step, and the CPU time of the process

A dispatch mode counts bytes, which takes some time. With --count, it is active in the forward pass
of one more step. With --limit it is always active, and no times are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import llama
import shardwise as sw
from plan_measure import TensorBytes, part_of_shared
from workloads import Llama

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from helpers import gpt

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, labels and positions, each (rows, length)."""

GROWTH = 2.5
"""Largest ratio of two lengths in the search for the longest one."""


class GroupedBlock(llama.Block):
    """A Llama block whose attention receives fewer key heads than query heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class LongLlama(llama.LlamaModel):
    """A Llama-like model that takes its positions from the batch."""

    def __init__(self, size: Llama) -> None:
        super().__init__(size)
        for block in self.blocks:
            block.__class__ = GroupedBlock

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # (rows, 1, length, head width / 2)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class LongGpt(gpt.GPT):
    """The model of examples/language_model.py, which takes its positions from the batch."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self.cosine[positions][:, None], self.sine[positions][:, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.linear(self.norm(x), self.embedding.weight)


def build(args: argparse.Namespace, longest: int) -> nn.Module:
    """Return the model for sequences of at most `longest` tokens, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads}
    if args.model == "gpt":
        return LongGpt(gpt.Shape(vocabulary=args.vocabulary, context=longest, **sizes))
    inner = 8 * args.width // 3
    more = {"kv_heads": args.kv_heads, "inner": inner, "vocabulary": args.vocabulary}
    return LongLlama(Llama(name="long", sequence=longest, batch=1, **sizes, **more))


def draw(args: argparse.Namespace, length: int) -> Batch:
    """Return one whole sequence of `length` tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(args.vocabulary, (1, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(length)[None]


@dataclass
class Measured:
    """The figures of one sequence length on this rank, in bytes and seconds."""

    length: int
    activations: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Training:
    """A way to train: `share` returns this rank's part of a batch, `backward` and `step` train on
    it, and `step` returns the loss of the whole batch."""

    model: nn.Module
    share: Callable[[Batch], Batch]
    backward: Callable[[Tensor], None]
    step: Callable[[], float]
    block: Callable[[Batch], contextlib.AbstractContextManager[object]]
    largest: Callable[[int], int]
    """Returns the largest of all ranks' values."""

    def forward(self, part: Batch) -> Tensor:
        """Return the mean loss of the labels of `part`."""
        inputs, labels, positions = part
        scores = self.model(inputs, positions)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def ours(model: nn.Module) -> Training:
    """Return the training with Shardwise's engine."""
    world = sw.init(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = sw.Engine(model, optimizer)

    def step() -> float:
        return float(engine.step().loss)

    return Training(
        model,
        world.share,
        engine.backward,
        step,
        lambda _: contextlib.nullcontext(),
        lambda value: int(max(world.gather(value))),
    )


def torchs(model: nn.Module) -> Training:
    """Return the training with torch's `context_parallel`, over Gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[Tensor] = []

    def block(batch: Batch) -> contextlib.AbstractContextManager[object]:
        # It cuts the tensors in place while the block runs.
        return context_parallel(mesh, buffers=list(batch), buffer_seq_dims=[1, 1, 1])

    def backward(loss: Tensor) -> None:
        losses.append(loss.detach() / size)
        (loss / size).backward()

    def step() -> float:
        loss = losses.pop()
        dist.all_reduce(loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return Training(model, lambda batch: batch, backward, step, block, int)


def measure(
    training: Training,
    args: argparse.Namespace,
    length: int,
    tensors: TensorBytes | None,
    *,
    warm_up: bool = True,
) -> Measured:
    """Train on sequences of `length`. With `tensors`, also measure the peak.

    With `warm_up`, there is one more step before the others. In it, the engine tests the model.
    """
    found = Measured(length)
    for number in range(0 if warm_up else 1, args.steps + 1):
        if tensors:
            tensors.peak = tensors.current
        started, used = time.perf_counter(), time.process_time()
        found.losses.append(_step(training, args, length))
        if number:
            found.seconds.append(time.perf_counter() - started)
            found.cpu_seconds.append(time.process_time() - used)
            if tensors:
                found.peak = max(found.peak, tensors.peak + part_of_shared())
    if args.count:
        _step(training, args, length, found)
    return found


def _step(
    training: Training, args: argparse.Namespace, length: int, counted: Measured | None = None
) -> float:
    """Train one step, and return its loss. With `counted`, count the activations."""
    whole = draw(args, length)
    with training.block(whole):
        part = training.share(whole)
        with TensorBytes() if counted else contextlib.nullcontext() as tensors:
            loss = training.forward(part)
            if counted:
                counted.activations = tensors.current
        training.backward(loss)
    return training.step()


def search(training: Training, args: argparse.Namespace, tensors: TensorBytes) -> list[Measured]:
    """Train on longer and longer sequences until the peak of a rank exceeds `--limit` MB.

    The lengths only grow, because buffers of the transport never shrink.
    """
    found: list[Measured] = []
    limit, length = args.limit * 1e6, args.lengths[0]
    while True:
        each = measure(training, args, length, tensors, warm_up=not found)
        # All ranks search on, and stop, together.
        each.peak = training.largest(each.peak)
        found.append(each)
        if each.peak > limit or length >= args.longest:
            return found
        step = GROWTH * length - length
        if len(found) > 1:
            before = found[-2]
            slope = (each.peak - before.peak) / (length - before.length)
            if slope > 0:
                step = min(step, (limit - each.peak) / slope)
        length = min(args.longest, length + max(args.grain, int(step) // args.grain * args.grain))


def measured(args: argparse.Namespace, *, by_torch: bool = False) -> list[dict[str, Any]]:
    """Measure all lengths, and return the figures of this rank."""
    torch.set_num_threads(1)
    longest = args.longest if args.limit else max(args.lengths)
    tensors = TensorBytes() if args.limit else None
    with tensors or contextlib.nullcontext():
        training = (torchs if by_torch else ours)(build(args, longest))
        if args.limit:
            assert tensors is not None
            found = search(training, args, tensors)
        else:
            found = [measure(training, args, length, tensors) for length in args.lengths]
    return [asdict(each) for each in found]


def measured_by_torch(rank: int, size: int, store: str, args: argparse.Namespace) -> None:
    """Train with torch's `context_parallel` on this rank."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    measured(args, by_torch=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count the activations' bytes")
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--steps", type=int, default=1, help="measured steps per length")
    parser.add_argument("--limit", type=float, default=0, help="search up to this peak, in MB")
    parser.add_argument("--longest", type=int, default=2**15, help="end of the search")
    parser.add_argument("--grain", type=int, default=256, help="tokens between two lengths")
    parser.add_argument("--model", choices=("llama", "gpt"), default="llama")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    return parser.parse_args(words)
