"""One accelerator: step time, MFU, memory, launches and host synchronisations, of all in one run.

    python benchmarks/device.py [--config resnet50,gpt-125m,gpt-1.3b] [--rows 0,1,2,3] \\
        [--precision bf16-mixed,bf16,fp32] [--peers ddp,fsdp2] [--compile] [--rounds 3] \\
        [--steps 10] [--budget 520] [--json FILE]
    python benchmarks/device.py --offload --config gpt-1.3b --precision bf16-mixed

A table per model and precision: plain PyTorch, DDP, FSDP2 and each row of Shardwise, every one in
a process of its own per round, so that one that runs out of memory harms nobody: it "does not fit".
All start from the same weights, train the same batches and use torch's fused AdamW. With --offload
states rest on the host: ours, beside FSDP2's and DeepSpeed's, and beside bare copies.

Steps are timed by events of the device, without a wait between them; then two more are profiled.
Twenty come before them: until then, ranks of ZERO_3 agree on their order of gathers.
Launches and synchronisations are those of a step, peak GB is what torch has allocated at most, MFU
the FLOPs of a step by torch's counter over what the device can do (peaks.py). fp32 has TF32 off,
for convolutions too; tf32 has it on. In bf16 plain PyTorch and DDP keep no fp32 masters (8 bytes of
a parameter); FSDP2 and Shardwise do.

All tables get a first round before one gets a second, each begun by another contender. --budget
ends the run in time: turns that would not end by then are left out, and named. Ranks in place of
one (--ranks N) train on a GPU each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import contenders
import crew
import device_report
import machine
import peaks
import workloads
from contenders import Contender
from crew import Crew, CrewFailed
from device_report import DeviceResult
from figures import Line
from rounds import Budget, Plan, take_round
from step_time import numbers, positive, words
from workloads import SIZES, Setting

TRACED = 2
"""Steps that are profiled."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a contender failed or the losses differ."""
    parser = _parser()
    options = parser.parse_args(arguments)
    budget = Budget(options.budget)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    facts = machine.describe() | {"device": "cpu"}
    try:
        takers = _contenders(options)
        workloads_of_run = _workloads(options)
        if options.device == "cuda":
            facts |= machine.describe_device(crew.PYTHON)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    results = [
        DeviceResult(
            workload=workload,
            setting=setting,
            ranks=options.ranks,
            device=facts["device"],
            flops=peaks.flops(workload),
            lines=[Line(taker.key, taker.label) for taker in takers],
        )
        for workload in workloads_of_run
        for setting in _settings(options)
    ]
    try:
        _measure(results, takers, facts, options, budget, console)
    except KeyboardInterrupt:
        console.print("Interrupted; what was measured is written.")
    return _show(results, options, console)


def _measure(
    results: Sequence[DeviceResult],
    takers: Sequence[Contender],
    facts: dict[str, str],
    options: argparse.Namespace,
    budget: Budget,
    console: Console,
) -> None:
    """Round after round of all tables; figures are written after each table's."""
    plan = Plan(rounds=options.rounds, steps=options.steps, warm_up=options.warm_up)
    for number in range(plan.rounds):
        for result in results:
            _round(number, result, takers, plan, options.limit, budget, console)
            if options.json:
                method = asdict(plan) | {"traced_steps": TRACED, "budget": options.budget}
                tables = [device_report.as_json(each) for each in results]
                written = {"machine": facts, "method": method, "results": tables}
                machine.write_json(options.json, written)


def _round(
    number: int,
    result: DeviceResult,
    takers: Sequence[Contender],
    plan: Plan,
    limit: float,
    budget: Budget,
    console: Console,
) -> None:
    """One round of one table."""
    setting, ranks = result.setting, result.ranks

    def start(taker: Contender) -> Crew:
        return Crew(taker, result.workload, ranks, limit, setting, budget.until)

    def told(turn: str) -> None:
        words = f"{budget.left():5.0f} s left  {result.workload.name}, {setting.describe()}, {turn}"
        console.print(words, highlight=False, soft_wrap=True, style="dim")

    lines = {line.key: line for line in result.lines}
    look = look_at_cpu if setting.device == "cpu" else look_at_gpu
    take_round(number, takers, lines, plan, start, told, look, budget)


def look_at_cpu(line: Line, ranks: Crew) -> None:
    """Nothing: no profile says what a CPU was asked for."""


def look_at_gpu(line: Line, ranks: Crew) -> None:
    """Profile some more steps, and write what was seen of the GPU into the line."""
    try:
        stint = ranks.take(TRACED, traced=True)
    except CrewFailed as error:  # the times stay: some systems let nobody profile
        line.device["not_profiled"] = str(error)
    else:
        device_report.look(line, TRACED, stint.told, stint.seen)


def _show(results: Sequence[DeviceResult], options: argparse.Namespace, console: Console) -> int:
    """Print the tables, and what is wrong; the exit code."""
    found: list[str] = []
    for result in results:
        console.print(device_report.table(result, offloaded=options.offload))
        for remark in device_report.remarks(result):
            console.print(remark, highlight=False, soft_wrap=True, markup=False)
        console.print()
        found += device_report.faults(result)
    for fault in found:
        console.print(fault, style="red", highlight=False, soft_wrap=True, markup=False)
    return 1 if found else 0


def _contenders(options: argparse.Namespace) -> list[Contender]:
    known = _PEERS
    if options.offload:
        known = {"copies": contenders.copies(options.copy_mb)} | contenders.OFFLOADED
    peers = options.peers
    if peers is None:
        peers = list(known) if options.offload else ["ddp", "fsdp2"]
    if unknown := [peer for peer in peers if peer not in known]:
        raise ValueError(f"No such peer: {', '.join(unknown)}. There are {', '.join(known)}.")
    if options.compile and options.offload:
        raise ValueError("--compile and --offload are tables of their own.")
    ours = [contenders.on_host(z) if options.offload else contenders.row(z) for z in options.rows]
    return [contenders.PLAIN, *(line for peer in peers for line in known[peer]), *ours]


_PEERS = {name: contenders.PEERS[name][:1] for name in ("ddp", "fsdp2")} | {
    "deepspeed": contenders.PEERS["deepspeed"]
}
"""On one device FSDP2 without resharding is the same."""


def _workloads(options: argparse.Namespace) -> list[workloads.Workload]:
    known = workloads.ON_A_DEVICE
    if unknown := [name for name in options.config if name not in known]:
        raise ValueError(
            f"No such configuration: {', '.join(unknown)}. There are {', '.join(known)}."
        )
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    chosen = [workloads.changed(known[name], given) for name in options.config]
    for workload in chosen:
        workloads.check(workload, options.ranks)
    return chosen


def _settings(options: argparse.Namespace) -> list[Setting]:
    threads = max(1, machine.cores() // options.ranks)
    common: dict[str, Any] = {"device": options.device, "threads": threads}
    common["compiled"] = "inductor" if options.compile else ""
    return [Setting(precision=precision, **common) for precision in options.precision]


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="with a GPU each")
    parser.add_argument("--config", type=words, default=list(workloads.ON_A_DEVICE), metavar="A,B")
    parser.add_argument(
        "--precision", type=_precisions, default=["bf16-mixed", "bf16", "fp32"], metavar="P,Q"
    )
    parser.add_argument("--rows", type=numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--peers", type=words, metavar="ddp,fsdp2,deepspeed")
    parser.add_argument("--compile", action="store_true", help="each block, by inductor")
    parser.add_argument("--offload", action="store_true", help="with states on the host")
    parser.add_argument("--copy-mb", type=positive, default=512, metavar="N", help="a bare copy's")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="timed, per round")
    parser.add_argument(
        "--warm-up", type=positive, default=20, metavar="N", help="steps before them"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="S", help="seconds, for all"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="S", help="per turn, then fail"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    sizes = parser.add_argument_group("any other configuration: change the named ones")
    for name in SIZES:
        sizes.add_argument(f"--{name}", type=positive, metavar="N")
    return parser


def _precisions(text: str) -> list[str]:
    named = words(text)
    if unknown := [name for name in named if name not in workloads.PRECISIONS]:
        known = ", ".join(workloads.PRECISIONS)
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not among {known}")
    return named


if __name__ == "__main__":
    sys.exit(main())
