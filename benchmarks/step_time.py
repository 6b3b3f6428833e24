"""Step time and memory of every row of Shardwise and of its peers, in one run.

    python benchmarks/step_time.py --config A,C,R --ranks 2,4 --rows 0,1,2,3 --disk DIR \\
        --peers apart,ddp,zro,fsdp2,deepspeed,accelerate,lightning \\
        --json benchmarks/results/today.json --plot today.png
    python benchmarks/step_time.py --config A --ranks 1,2,4,8 --peers ddp,fsdp2     # strong scaling
    python benchmarks/step_time.py --config A --rows 0,3 --peers ddp,fsdp2 \\
        --libraries accelerate,trainer,fabric,lightning --steps 10                  # the bridges
    python benchmarks/step_time.py --config small --keep --rounds 20 --steps 20     # the hot path
    python benchmarks/step_time.py --device cuda --config gpt2-124m --precision bf16-mixed,fp32

All train the same model from the same weights on the same batches with torch's fused AdamW; the run
fails if two losses differ after the same number of steps (on CPUs, in the fourth decimal).

A machine is never quiet, and it drifts by more than the contenders differ. So they take turns: in
each round every contender starts, warms up, takes a few timed steps and leaves, another one first
each time. Figures are medians over the rounds, ratios are taken within a round. Each turn has a
fresh start, because the luck of a start (the place of buffers, the size of pages) would otherwise
look like a property of the contender; because idle threads of others disturb; and
because ten contenders at four ranks do not fit into memory. --keep holds all of them alive between
their turns: quicker, for a look.

A step lasts from the moment the last rank ended one to the moment the last rank ended the next.
The limit is the step of one process with one thread on the whole batch, divided by the cores that
the ranks can use: the time that remains if nothing but the arithmetic costs anything.

With --libraries `x DDP` is the step over that of the same library with DDP, `x FSDP` over its
FSDP2, and `x engine` over the loop of `sw.Engine` in the same row.

On a GPU (--device cuda) steps are timed by events of the device, without a wait between them; then
two more are profiled. Launches and synchronisations are those of a step, peak GB is the most that
torch has allocated, MFU the FLOPs of a step by torch's counter over the device's peak (peaks.py).
fp32 has TF32 off, for convolutions too; tf32 has it on. In bf16 plain PyTorch and DDP keep no fp32
masters (8 bytes of a parameter); FSDP2 and Shardwise do.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import contenders
import crew
import figure
import machine
import peaks
import report
import rounds
import workloads
from contenders import Contender
from report import Result
from rounds import Budget, Plan
from workloads import Setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a contender failed or the losses differ."""
    parser = _parser()
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.ranks = options.ranks or ([1] if on_gpu else [2, 4])
    try:
        takers = _contenders(options)
        configurations = workloads.named(options.config, figure.sizes_in(options), options.ranks)
        facts = machine.describe_device(crew.PYTHON) if on_gpu else {"device": "cpu"}
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'shardwise[examples]'.")
    facts = figure.begin(**facts)
    # Twenty steps on a GPU, in which ranks of ZERO_3 agree on their order of gathers.
    warm_up = options.warm_up or (20 if on_gpu else rounds.WARM_UP)
    plan = Plan(rounds=options.rounds, steps=options.steps, keep=options.keep, warm_up=warm_up)
    cases = [
        (workload, ranks, setting)
        for workload in configurations
        for ranks in options.ranks
        for setting in _settings(options, ranks)
    ]
    results: list[dict[str, Any]] = []
    method = asdict(plan) | {"traced_steps": rounds.TRACED}
    budget = Budget(60 * options.minutes)

    def kept(result: dict[str, Any]) -> None:
        figure.keep(options, facts, method=method, results=[*results, result])

    try:
        for workload, ranks, setting in cases:
            flops = peaks.flops(workload) if setting != Setting() else 0
            result = Result(
                workload=workload, ranks=ranks, setting=setting, device=facts["device"], flops=flops
            )
            found = report.measured(result, takers, plan, options.limit, kept, budget)
            figure.show(f"{workload.describe()}; {setting.describe()}")
            figure.show(*report.markdown(found, _columns(options)), "")
            results.append(found)
            if options.plot:
                import plot  # matplotlib is only needed for this

                plot.save(results, options.plot, f"{facts['machine']} · {facts['versions']}")
    except KeyboardInterrupt:
        print("Interrupted; the figures so far are written.")
    faults = report.faults(results)
    figure.show(*(f"FAILED {fault}" for fault in faults))
    return 1 if faults else 0


def _columns(options: argparse.Namespace) -> report.Columns:
    if options.libraries:
        return report.BRIDGES
    return report.ON_GPU if options.device == "cuda" else report.ON_CPU


def _contenders(options: argparse.Namespace) -> list[Contender]:
    """Return the contenders of a table: one process first, for the limit. Raises ValueError."""
    # By default all peers; on a GPU the peers that need no setup there.
    peers = ["ddp", "fsdp2"] if options.device == "cuda" else list(contenders.PEERS)
    chosen = contenders.chosen(peers if options.peers is None else options.peers)
    ours = [contenders.row(zero, over) for over in options.transport for zero in options.rows]
    if options.timeline:
        ours = [each for taker in ours for each in (taker, contenders.timed(taker))]
    if options.disk:
        disk = f"nvme:{options.disk.resolve()}"
        ours += [contenders.offloaded(zero, disk) for zero in options.rows if zero]
    for library in options.libraries:
        ours += contenders.bridged(library, options.rows)
    return [contenders.PLAIN, *chosen, *ours]


def _settings(options: argparse.Namespace, ranks: int) -> list[Setting]:
    # On CPUs each rank has one thread, so that the limit means the same at every number of ranks.
    threads = max(1, machine.cores() // ranks) if options.device == "cuda" else 1
    compiled = "inductor" if options.compile else ""
    return [
        Setting(device=options.device, precision=precision, compiled=compiled, threads=threads)
        for precision in options.precision
    ]


def _precisions(text: str) -> list[str]:
    named = figure.words(text)
    if unknown := [name for name in named if name not in workloads.PRECISIONS]:
        known = ", ".join(workloads.PRECISIONS)
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not among {known}")
    return named


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--config", type=figure.words, default=["A", "C", "R"], metavar="A,C,R")
    add("--ranks", type=figure.numbers, metavar="2,4", help="default 2,4; on a GPU 1")
    add("--rows", type=figure.numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    add("--transport", type=figure.words, default=["auto"], metavar="auto,gloo")
    add("--disk", type=Path, metavar="DIR", help="rows with states on a disk too")
    add("--timeline", action="store_true", help="rows with a timeline that is recorded too")
    add("--peers", type=figure.words, metavar="ddp,...", help="default all; on a GPU ddp,fsdp2")
    add("--libraries", type=figure.words, default=[], metavar="fabric,...", help="the bridges")
    add("--rounds", type=figure.positive, default=5, metavar="N")
    add("--steps", type=figure.positive, default=5, metavar="N", help="timed, per round")
    add("--warm-up", type=figure.positive, metavar="N", help="steps before them: 3, on a GPU 20")
    add("--keep", action="store_true", help="hold all alive between their turns")
    add("--limit", type=float, default=300.0, metavar="S", help="per turn, then fail")
    add("--minutes", type=float, default=math.inf, help="for all; later turns are left out")
    add("--plot", type=Path, metavar="FILE", help="draw them (PNG, SVG or PDF)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", type=_precisions, default=["fp32"], metavar="P,Q")
    add("--compile", action="store_true", help="each block, by inductor")
    figure.add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
