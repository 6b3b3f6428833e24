"""Step times of pipeline schedules, compared with torch's own pipelining.

    python benchmarks/pipeline.py [--config A] [--ranks 2] [--microbatches 8] [--stages blocks.5]
        [--json FILE]

All train the same model from the same weights on the same batches, in fp32 with torch's fused
AdamW and one thread per rank, by the method of step_time.py.

- one process: plain PyTorch, the whole batch at once, one thread
- its micro-batches: the same in M parts, which is the work of all stages together
- naive: the layers on N ranks and the batch in one piece, so one rank works while the others wait
- Shardwise with each schedule, and torch.distributed.pipelining (both cut into equal blocks; torch
  scales its gradients itself)
- with --stages, Shardwise with these cuts instead, as `shardwise pipeline-plan` proposes

*waits* is the part of the ranks' time that is not the work of its micro-batches on one process:
1 - (its micro-batches) / (N x step); the formula below the table, (N - 1) / (M + N - 1), is for
stages that take equal time and messages that take none. The update of the parameters is in both.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import contenders
import figure
import report
import workloads
from contenders import Contender
from report import Result, Row
from rounds import Plan
from workloads import Gpt

BY_HAND = ("GPipe", "1F1B")

COLUMNS: report.Columns = (
    ("ms/step", lambda row: figure.milliseconds(row["median_ms"])),
    ("x as fast", lambda row: figure.number(row["speed"], ".2f")),
    ("waits", lambda row: figure.number(row["waits"], ".0%")),
    ("MB/rank, peak", lambda row: figure.number(row["peak_bytes"], ".0f", figure.MB)),
    ("loss", lambda row: figure.number(row["losses"][-1] if row["losses"] else None, ".4f")),
)


def takers(
    workload: Gpt, ranks: int, micros: int, schedules: Sequence[str], stages: Sequence[str]
) -> list[Contender]:
    """Return all contenders, the two of one process first; with `stages` ours also cut there."""

    def taker(key: str, label: str, build: str, alone: bool = False, **options: Any) -> Contender:
        return Contender(
            key=key, label=label, build=build, options=options, alone=alone, one_batch=True
        )

    ours = "ours:pipelined"
    each = workload.layers // ranks
    cut = [f"blocks.{each * number}" for number in range(1, ranks)]
    found = [
        contenders.PLAIN,
        taker("micros", f"its {micros} micro-batches", ours, alone=True, microbatches=micros),
        taker("naive", "naive, one batch", ours, microbatches=1, stages=cut),
    ]
    for name in schedules:
        settings: dict[str, Any] = {"schedule": name, "microbatches": micros}
        if name != "interleaved":  # it has several stages on each rank
            settings["stages"] = cut
        found.append(taker(name, f"Shardwise {name}", ours, **settings))
        if stages and name != "interleaved":
            label = f"Shardwise {name}, {', '.join(stages)}"
            found.append(taker(f"{name}-cut", label, ours, **settings | {"stages": list(stages)}))
    build = "torch_peers:pipeline"
    return found + [
        taker(f"torch-{n}", f"torch {n}, by hand", build, schedule=n, microbatches=micros)
        for n in BY_HAND
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if a contender failed or the losses differ."""
    options = _parser().parse_args(arguments)
    ranks, micros = options.ranks, options.microbatches
    configuration = workloads.CONFIGURATIONS[options.config]
    workload = workloads.changed(configuration, figure.sizes_in(options))
    assert isinstance(workload, Gpt)
    facts = figure.begin()
    result = report.measured(
        Result(workload=workload, ranks=ranks),
        takers(workload, ranks, micros, options.schedules, options.stages),
        Plan(rounds=options.rounds, steps=options.steps),
        options.limit,
    )
    rows = {row["key"]: row for row in result["contenders"]}
    for row in rows.values():
        row["speed"] = row["over_plain"] and 1 / row["over_plain"]
        row["waits"] = _waits(row, rows["micros"], ranks)
    figure.show(workload.describe(), *report.markdown(result, COLUMNS))
    formula = (ranks - 1) / (micros + ranks - 1)
    figure.show(f"{micros} micro-batches: (N - 1) / (M + N - 1) = {formula:.0%}.")
    figure.keep(options, facts, title=workload.describe(), lines=result["contenders"])
    faults = report.faults([result])
    figure.show(*(f"FAILED {fault}" for fault in faults))
    return 1 if faults else 0


def _waits(row: Row, micros: Row, ranks: int) -> float | None:
    """Return the part of the time that ranks wait; see the top of this file."""
    if row["key"] in ("plain", "micros") or not row["rounds_ms"]:
        return None
    # Within a round, and then the median: as all ratios.
    pairs = zip(micros["rounds_ms"], row["rounds_ms"], strict=False)
    return 1 - median(median(work) / (ranks * median(steps)) for work, steps in pairs)


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    every = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    add("--config", default="A", choices=["A", "C"])
    add("--ranks", type=figure.positive, default=2, metavar="N")
    add("--microbatches", type=figure.positive, default=8, metavar="M")
    add("--schedules", type=figure.words, default=every, metavar="NAMES")
    add("--stages", type=figure.words, default=[], metavar="NAMES", help="modules where ours begin")
    add("--rounds", type=figure.positive, default=3, metavar="N")
    add("--steps", type=figure.positive, default=5, metavar="N", help="timed, per round")
    add("--limit", type=float, default=120.0, metavar="S", help="per turn")
    figure.add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
