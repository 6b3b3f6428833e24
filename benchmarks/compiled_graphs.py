"""Graphs and graph breaks of compiled units, with each kind of parallelism.

    python benchmarks/compiled_graphs.py [--steps 20] [--only "--tensor 2"]

Two workers train a GPT of two blocks with `--compile` and the backend aot_eager; with `--tensor`, a
Llama-like model whose feed-forward networks are split. Each fifth batch is shorter. The blocks are
of one class, so they share their graphs. A block without graph breaks has one graph for each time
that it is compiled. "Compiled" is the largest number of graphs of one piece of code. Reasons of
graph breaks are torch's own.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import figure
import shardwise as sw
from context_worker import LongGpt, LongLlama
from shardwise.parallel.tensor import compiled_units
from workloads import Llama

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import Block, Shape

AGAIN = "--activations recomputed"
BY_TOKENS = "--tensor 2 --sequence-parallel"
RUNS = ("", "--zero 3", AGAIN, "--tensor 2", "--tensor 2 --zero 3", f"--tensor 2 {AGAIN}",
        BY_TOKENS, f"{BY_TOKENS} {AGAIN}",
        "--expert 2", f"--expert 2 {AGAIN}", "--context 2", f"--context 2 {AGAIN}")  # fmt: skip
SHAPE = Shape(vocabulary=64, context=32, layers=2, width=32, heads=4)
SPLIT = Llama(name="tiny", width=32, layers=2, heads=4, kv_heads=2, inner=64, vocabulary=64,
              sequence=32, batch=8)  # fmt: skip
PLAN = {"blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each set of flags, and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"steps": 20})
    parser.add_argument("--only", choices=RUNS, metavar="FLAGS", help="one set of flags")
    options = figure.parse_unless_worker(parser, arguments, _train)
    facts = figure.begin()
    rows, found = [], {}
    for flags in RUNS if options.only is None else [options.only]:
        told = found[flags] = figure.run_workers(__file__, f"--compile {flags}", options.steps)
        reasons = "; ".join(told["reasons"]) or "none"
        rows.append([flags or "data parallel", *map(str, told["counts"]), reasons])
    head = ["flags", "compiled", "graphs", "graph breaks", "reasons"]
    figure.show(*figure.table(head, rows))
    figure.keep(options, facts, runs=found)
    return 0


class ExpertBlock(Block):
    """A block with a mixture of experts instead of the feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        experts = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(4))
        self.experts = sw.MoE(nn.Linear(shape.width, 4, bias=False), experts)
        del self.widen, self.narrow

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.experts(self.network_norm(x))


def _train(steps: int) -> None:
    compiled_units.BACKEND = "aot_eager"
    torch.compile = partial(torch.compile, backend=compiled_units.BACKEND)
    world = sw.init(seed=0, quiet=True)
    is_split = world.settings.tensor > 1
    model = LongLlama(SPLIT) if is_split else LongGpt(SHAPE)
    if world.settings.expert > 1:
        model.blocks = nn.ModuleList(ExpertBlock(SHAPE) for _ in range(SHAPE.layers))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = sw.Engine(model, optimizer, tensor_plan=PLAN if is_split else None)
    for step in range(steps):
        tokens = torch.randint(64, (4 if step % 5 == 4 else 8, 17))
        positions = torch.arange(16).expand(len(tokens), 16)
        ids, labels, places = world.share((tokens[:, :-1], tokens[:, 1:], positions))
        scores = model(ids, places)
        engine.backward(nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))
        engine.step()
    if world.is_main:
        counters = torch._dynamo.utils.counters
        breaks = counters["graph_break"]
        # The name of a compilation is "code/number".
        names = {each.compile_id for each in torch._dynamo.utils.get_compilation_metrics()}
        by_code = Counter(name.split("/")[0] for name in names if name)
        counts = [max(by_code.values()), counters["stats"]["unique_graphs"], sum(breaks.values())]
        print(json.dumps({"counts": counts, "reasons": [text.splitlines()[0] for text in breaks]}))


if __name__ == "__main__":
    sys.exit(main())
