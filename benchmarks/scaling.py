"""Strong scaling: the same batch on more and more ranks, next to one process.

    python benchmarks/scaling.py --config A --ranks 1,2,4,8 --rows 0,3 --peers ddp,fsdp2 \\
        --rounds 5 --steps 5 --json FILE --plot FILE

The total batch stays as it is; every rank has one thread. In each round everyone takes a turn at
every number of ranks. Speed-up is the step of one plain process over the contender's of the same
round; a machine can give no more than it has cores, which the plot shows as a line.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import contenders
import figure
import machine
import workloads
from contenders import PLAIN, Contender
from crew import Crew
from figures import Line, ratio
from neighbours import Neighbours, remark
from rounds import Plan, take_round
from workloads import Gpt

BATCH = 8
"""Rows of a total batch that 8 ranks can cut."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 1 if a contender failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    workload = workloads.CONFIGURATIONS[options.config]
    if isinstance(workload, Gpt):
        workload = replace(workload, batch=BATCH)
    workload = workloads.changed(workload, figure.sizes_in(options))
    try:
        peers = contenders.chosen(options.peers, contenders.PEERS)
        for ranks in options.ranks:
            workloads.check(workload, ranks)
    except ValueError as error:
        parser.error(str(error))
    takers = [*peers, *map(contenders.row, options.rows)]
    facts, neighbours = figure.begin(), Neighbours()
    # Each number of ranks is a contender of its own, so that ratios are taken within a round.
    sizes = {f"{taker.key} {n}": n for n in options.ranks for taker in takers} | {PLAIN.key: 1}
    field = [PLAIN, *(_at(taker, n) for n in options.ranks for taker in takers)]
    lines = {taker.key: Line(taker.key, taker.label) for taker in field}
    plan = Plan(rounds=options.rounds, steps=options.steps)
    for number in range(options.rounds):
        take_round(
            number,
            field,
            lines,
            plan,
            lambda taker: Crew(taker, workload, sizes[taker.key], options.limit),
            lambda turn: print(turn, file=sys.stderr, flush=True),
            look=lambda line, crew: None,
        )
        curves = {
            taker.key: {
                "label": taker.label,
                "note": "; ".join(lines[key].note for key in _keys(taker, options) if key in lines),
                "ms": {sizes[key]: lines[key].per_round for key in _keys(taker, options)},
            }
            for taker in [PLAIN, *takers]
        }
        figure.keep(options, facts, configuration=workloads.told(workload), contenders=curves)
    speed_up = {
        taker.label: {
            sizes[key]: ratio(lines[PLAIN.key], lines[key]) for key in _keys(taker, options)
        }
        for taker in [PLAIN, *takers]
    }
    rows = []
    for taker in [PLAIN, *takers]:
        times = {sizes[key]: lines[key].median for key in _keys(taker, options)}
        faster = speed_up[taker.label]
        rows.append(
            [taker.label]
            + [
                f"{figure.milliseconds(times[n])} ({faster[n]:.2f})" if faster.get(n) else ""
                for n in options.ranks
            ]
        )
    head = [f"{n} ranks" if n > 1 else "1 rank" for n in options.ranks]
    figure.show(*figure.table([f"{workload.name}, ms/step (speed-up)", *head], rows))
    figure.show("", remark(neighbours.share()))
    if options.plot:
        import plot  # matplotlib is only needed for this

        del speed_up[PLAIN.label]
        caption = f"{facts['machine']}, {workload.name}"
        plot.scaling(speed_up, machine.cores(), options.plot, caption)
    failed = [line for line in lines.values() if line.note.startswith("failed")]
    figure.show(*(f"FAILED {line.label}: {line.note}" for line in failed))
    return 1 if failed else 0


def _at(taker: Contender, ranks: int) -> Contender:
    return replace(taker, key=f"{taker.key} {ranks}", label=f"{taker.label}, {ranks} ranks")


def _keys(taker: Contender, options: argparse.Namespace) -> list[str]:
    return [taker.key] if taker is PLAIN else [f"{taker.key} {n}" for n in options.ranks]


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--config", default="A", choices=list(workloads.CONFIGURATIONS))
    add("--ranks", type=figure.numbers, default=[1, 2, 4, 8], metavar="1,2,4,8")
    add("--rows", type=figure.numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    add("--peers", type=figure.words, default=["ddp", "fsdp2"], metavar="ddp,...")
    add("--rounds", type=figure.positive, default=5, metavar="N")
    add("--steps", type=figure.positive, default=5, metavar="N", help="timed, per turn")
    add("--limit", type=float, default=300.0, metavar="S", help="per turn")
    add("--plot", type=Path, metavar="FILE", help="draw them (PNG, SVG or PDF)")
    figure.add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
