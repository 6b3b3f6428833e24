"""Compiled units with --tensor 2, with and without --sequence-parallel: time, bytes, activations.

    python benchmarks/compiled_tokens.py [--rounds 3] [--steps 10]

Two workers train a Llama-like model whose layers are all split. Each set of flags starts again in
each round. The first three steps, in which units are compiled, are not measured. "Sent" counts the
bytes that each worker sends to the other in a step in collectives of its replica, as in a ring.
"Kept" counts the bytes of the tensors that a forward pass leaves for the backward pass, without
parameters, on the first worker.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import figure
import shardwise as sw
from compiled_graphs import PLAN
from context_worker import LongLlama
from shardwise.comm import Collectives
from workloads import Llama

RUNS = ("--tensor 2", "--tensor 2 --sequence-parallel", "--tensor 2 --compile",
        "--tensor 2 --compile --sequence-parallel")  # fmt: skip
SIZE = Llama(name="tokens", width=256, layers=4, heads=8, kv_heads=4, inner=704, vocabulary=512,
             sequence=256, batch=4)  # fmt: skip
ATTENTION = sw.Attention(qkv=("query", "key", "value"), out="out", heads="heads",
                         kv_heads="kv_heads")  # fmt: skip
WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each set of flags in each round, and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"rounds": 3, "steps": 10})
    options = figure.parse_unless_worker(parser, arguments, _train)
    facts = figure.begin()
    found: dict[str, list[dict[str, float]]] = {flags: [] for flags in RUNS}
    for _ in range(options.rounds):
        for flags, rounds in found.items():
            rounds.append(figure.run_workers(__file__, flags, options.steps))
    rows = [
        [
            flags,
            f"{median(each['ms'] for each in rounds):.0f}",
            f"{rounds[0]['sent'] / figure.MB:.1f}",
            f"{rounds[0]['kept'] / figure.MB:.1f}",
        ]
        for flags, rounds in found.items()
    ]
    figure.show(*figure.table(["flags", "ms per step", "MB sent", "MB kept"], rows))
    figure.keep(options, facts, runs=found)
    return 0


def _count_bytes(group: Collectives, counts: dict[str, int]) -> None:
    """Have the collectives of `group` count the bytes that this rank sends."""

    def count(name: str, factor: int) -> None:
        run: Callable[..., Any] = getattr(group, name)

        def counted(flat: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts["sent"] += factor * flat.nbytes * (group.size - 1) // group.size
            return run(flat, *args, **kwargs)

        setattr(group, name, counted)

    for name, factor in {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.items():
        count(name, factor)


def _train(steps: int) -> None:
    torch.set_num_threads(1)
    world = sw.init(seed=0, quiet=True)
    model = LongLlama(SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = sw.Engine(model, optimizer, tensor_plan=PLAN | {"blocks.*": ATTENTION})
    memories = {p.untyped_storage().data_ptr() for p in model.parameters()}
    counts, times, kept = {"sent": 0}, [], {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in memories:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    _count_bytes(world.tensor, counts)
    positions = torch.arange(SIZE.sequence).expand(SIZE.batch, SIZE.sequence)
    for step in range(WARM_UP + steps):
        tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.sequence + 1))
        counts["sent"] = 0
        began = time.perf_counter()
        counting = saved_tensors_hooks(pack, lambda value: value)
        with counting if step == WARM_UP - 1 else nullcontext():
            scores = model(tokens[:, :-1], positions)
        engine.backward(nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()))
        sent = counts["sent"]
        engine.step()
        times.append(time.perf_counter() - began)
    ms = 1e3 * median(times[WARM_UP:])
    if world.is_main:
        print(json.dumps({"ms": ms, "sent": sent, "kept": sum(kept.values())}))


if __name__ == "__main__":
    sys.exit(main())
