"""Memory and step time of adapters on a frozen base, in full precision and in NF4 (QLoRA).

    python benchmarks/frozen_weights.py [--width 1024] [--layers 8] [--tokens 256] [--zero 0]

One worker trains rank-8 adapters on the linear layers of a random Llama in bf16. The weights column
is the size of all parameters between steps. The memory is that of the process after the steps, less
that before the model was built: resident memory on a CPU, the allocator's peak during the steps on
a GPU. Each row runs in a process of its own, on a CPU with one thread.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import figure

SIZES = {"width": 1024, "layers": 8, "tokens": 256, "steps": 5}

WARM_UP = 5
"""Steps before the measurement. Their gathers are compared with writes, which takes time."""


@dataclass
class Measured:
    """The bytes of the parameters and of the process, and the milliseconds of a step."""

    weights: int
    memory: int
    step_ms: float
    cpu_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each format in a process, and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, SIZES)
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--only", choices=("full", "nf4"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only is not None:
        print(json.dumps(asdict(_measure(options, options.only))))
        return 0
    facts = figure.begin()
    words = figure.as_flags(options, (*SIZES, "zero"))
    found: dict[str, Measured] = {}
    for weights in ("full", "nf4"):
        command = [sys.executable, __file__, f"--only={weights}", *words]
        found[weights] = Measured(**figure.result_of(command))
    rows = [
        [
            weights,
            f"{run.weights / figure.MB:.1f} MB",
            f"{run.memory / figure.MB:.0f} MB",
            figure.milliseconds(run.step_ms),
            figure.milliseconds(run.cpu_ms),
        ]
        for weights, run in found.items()
    ]
    title = f"{options.layers} layers of {options.width}, ZERO_{options.zero}"
    head = [title, "weights", "memory", "step, ms", "CPU time of a step, ms"]
    figure.show(*figure.table(head, rows))
    figure.keep(options, facts, runs={name: asdict(run) for name, run in found.items()})
    return 0


def _measure(options: argparse.Namespace, weights: str) -> Measured:
    import peft
    import torch
    import transformers

    import shardwise as sw

    world = sw.init(seed=0, quiet=True)
    on_gpu = world.device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)  # CPU time would include the time that threads spin
    before = torch.cuda.memory_allocated() if on_gpu else figure.memory_of_process("VmRSS")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=8, target_modules="all-linear")
    model = peft.get_peft_model(model, lora).to(world.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(
        model,
        torch.optim.AdamW(trained),
        zero=options.zero,
        frozen_weights=weights,
        activations="recomputed",
    )
    # A parameter without values has a shape and a dtype, but no `nbytes`.
    held = sum(p.shape.numel() * p.dtype.itemsize for p in model.parameters())
    if weights == "nf4":
        narrow = {named.parameter for b in engine._states.parameters.frozen for named in b.named}
        held -= sum(p.shape.numel() * p.dtype.itemsize for p in narrow)
        held += sum(nbytes for _, nbytes in engine._states.parameters.frozen_bytes())
    ids = torch.randint(512, (1, options.tokens), device=world.device)
    seconds, cpu = [], []
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun, used = time.perf_counter(), time.process_time()
        engine.backward(model(input_ids=ids, labels=ids).loss)
        engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
    after = torch.cuda.max_memory_allocated() if on_gpu else figure.memory_of_process("VmRSS")
    return Measured(held, after - before, *(median(t[WARM_UP:]) * 1e3 for t in (seconds, cpu)))


if __name__ == "__main__":
    sys.exit(main())
