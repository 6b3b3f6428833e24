"""Step time of the bridges, next to their libraries over DDP and FSDP2 and to the engine alone.

    python benchmarks/bridges.py --ranks 2,4 --rows 0,3 --rounds 5 --steps 10 \\
        --json benchmarks/results/today-bridges.json

All train the same model from the same weights on the same batches by the method of step_time.py.
`x DDP` is the step over that of the same library with DDP, `x FSDP` over its FSDP2, or over torch's
own loop with FSDP2 if the library has none on the CPU (transformers' Trainer), and `x engine` over
the loop of `sw.Engine` in the same row. Libraries that own the loop exchange batches between two
threads (contenders/libraries.py), with every engine.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import contenders
import figure
import machine
import report
import workloads
from contenders import LIBRARIES, PEERS
from crew import Crew
from figures import Line, ratio
from neighbours import Neighbours
from report import Result
from rounds import Budget, Plan, measure

COLUMNS: report.Columns = (
    ("ms/step", lambda row: figure.milliseconds(row["median_ms"])),
    ("x DDP", lambda row: figure.number(row["over_its_ddp"], ".3f")),
    ("x FSDP", lambda row: figure.number(row["over_its_fsdp"], ".3f")),
    ("x engine", lambda row: figure.number(row["over_engine"], ".3f")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a contender failed or the losses differ."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if alien := [name for name in options.libraries if name not in LIBRARIES]:
        parser.error(f"No such library: {', '.join(alien)}. There are {', '.join(LIBRARIES)}.")
    try:
        sizes = figure.sizes_in(options)
        (workload,) = workloads.named([options.config], sizes, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(rounds=options.rounds, steps=options.steps)
    own = [*PEERS["ddp"], contenders.FSDP2, *map(contenders.row, options.rows)]
    bridged = [
        each for name in options.libraries for each in contenders.bridged(name, options.rows)
    ]
    takers = [contenders.PLAIN, *own, *bridged]
    facts = figure.begin()
    results: list[dict[str, Any]] = []
    for ranks in options.ranks:
        neighbours, before = Neighbours(), len(results)

        def kept(
            lines: list[Line], size: int = ranks, watch: Neighbours = neighbours, at: int = before
        ) -> None:
            result = Result(
                workload=workload,
                ranks=size,
                lines=lines,
                cores=machine.cores(),
                others=watch.share(),
            )
            results[at:] = [as_json(result)]
            figure.keep(options, facts, method=asdict(plan), results=results)

        measure(
            takers,
            plan,
            lambda who, size=ranks: Crew(who, workload, size, options.limit),
            lambda turn, size=ranks: print(f"{size} ranks, {turn}", file=sys.stderr, flush=True),
            kept,
            Budget(60 * options.minutes / len(options.ranks)),
        )
        figure.show(*report.markdown(results[-1], COLUMNS))
    faults = report.faults(results)
    figure.show(*(f"FAILED {fault}" for fault in faults))
    return 1 if faults else 0


def as_json(result: Result) -> dict[str, Any]:
    """Return all figures, and the ratios that the tables show."""
    written = result.as_json()
    for line, row in zip(result.lines, written["contenders"], strict=True):
        library, _, zero = line.key.rpartition("-")
        prefix = f"{library}-" if library in LIBRARIES else ""
        sharded = result.line(f"{prefix}fsdp2") or result.line("fsdp2")
        engine = result.line(f"shardwise-{zero}") if prefix and zero.isdigit() else None
        row["over_its_ddp"] = ratio(line, result.line(f"{prefix}ddp"))
        row["over_its_fsdp"] = ratio(line, sharded)
        row["over_engine"] = ratio(line, engine)
    return written


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--config", choices=list(workloads.CONFIGURATIONS), default="A")
    add("--libraries", type=figure.words, default=list(LIBRARIES), metavar="fabric,...")
    add("--ranks", type=figure.numbers, default=[2, 4], metavar="2,4")
    add("--rows", type=figure.numbers, default=[0, 3], metavar="0,3")
    add("--rounds", type=figure.positive, default=5, metavar="N")
    add("--steps", type=figure.positive, default=10, metavar="N", help="timed, per round")
    add("--minutes", type=float, default=math.inf, metavar="M", help="for all; leave out the rest")
    add("--limit", type=float, default=300.0, metavar="S", help="per turn")
    figure.add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
