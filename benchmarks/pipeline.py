"""Layers shared out over ranks, schedule by schedule, beside torch's pipelining by hand.

    python benchmarks/pipeline.py [--config A] [--ranks 2] [--microbatches 8] [--stages blocks.5]
        [--json FILE]

All train the same model from the same weights on the same batches, in fp32 with torch's fused
AdamW and one thread per rank, in turns as step_time.py takes them; the run fails when losses
differ in the fourth decimal.

- one process: plain PyTorch, the whole batch at once, one thread;
- its micro-batches: the same in M parts, which is what the stages run between them;
- naive: the layers on N ranks, the batch as one: one rank works while the others wait;
- ours by schedule, and torch.distributed.pipelining by hand (cut into equal blocks, as ours is
  here), which scales its gradients by itself;
- with --stages, ours cut there instead, as `shardwise pipeline-plan` proposes.

*waits* is the part of the ranks' time that is not the work of its micro-batches on one process:
1 - (its micro-batches) / (N x step); beside it the formula, (N - 1) / (M + N - 1), for stages that
take equal time and messages that take none. The update of the parameters is in both.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import contenders
import machine
import workloads
from contenders import Contender
from crew import Crew
from figures import AGREE, Line, disagreement, ratio
from neighbours import Neighbours
from rounds import Plan, measure
from workloads import Gpt

BY_HAND = ("GPipe", "1F1B")
SIZES = ("width", "layers", "vocabulary", "sequence", "batch")


def takers(
    workload: Gpt, ranks: int, micros: int, schedules: Sequence[str], stages: Sequence[str]
) -> list[Contender]:
    """Everyone, the two of one process first; with `stages` ours once more, cut there."""

    def ours(key: str, label: str, *, alone: bool = False, **settings: Any) -> Contender:
        return Contender(
            key=key, label=label, module="pipeline", options=settings, alone=alone, one_batch=True
        )

    each = workload.layers // ranks
    cut = [f"blocks.{each * number}" for number in range(1, ranks)]
    found = [
        contenders.PLAIN,
        ours("micros", f"its {micros} micro-batches", alone=True, microbatches=micros),
        ours("naive", "naive, one batch", microbatches=1, stages=cut),
    ]
    for name in schedules:
        settings: dict[str, Any] = {"schedule": name, "microbatches": micros}
        if name != "interleaved":
            settings["stages"] = cut
        found.append(ours(name, f"Shardwise {name}", **settings))
        if stages and name != "interleaved":
            label = f"Shardwise {name}, {', '.join(stages)}"
            found.append(ours(f"{name}-cut", label, **settings | {"stages": list(stages)}))
    return found + [
        Contender(
            key=f"torch-{name}",
            label=f"torch {name}, by hand",
            module="torch_pipeline",
            options={"schedule": name, "microbatches": micros},
            one_batch=True,
        )
        for name in BY_HAND
    ]


@dataclass(frozen=True)
class Figures:
    """What a line of the table says, from all lines."""

    lines: dict[str, Line]
    ranks: int
    micros: int

    def waits(self, line: Line) -> float | None:
        """The part of the time that ranks wait; see the top of this file."""
        of_one = ratio(self.lines["micros"], line, self.ranks)
        return None if of_one is None or line.key in ("plain", "micros") else 1 - of_one

    @property
    def formula(self) -> float:
        """What a schedule of one stage per rank cannot avoid."""
        return (self.ranks - 1) / (self.micros + self.ranks - 1)

    def speed(self, line: Line) -> float | None:
        """Times as fast as one process."""
        return ratio(self.lines["plain"], line)

    def disagreement(self) -> float:
        """The largest difference between two losses of a step."""
        return disagreement(list(self.lines.values()))

    def table(self, title: str) -> Table:
        """As rich draws it."""
        drawn = Table(box=SIMPLE, title=title, title_justify="left", title_style="bold")
        drawn.add_column("", no_wrap=True)
        for name in ("ms/step", "x as fast", "waits", "MB/rank, peak", "loss"):
            drawn.add_column(name, justify="right")
        for line in self.lines.values():
            if line.note:
                drawn.add_row(line.label, line.note.splitlines()[0][:60], *[""] * 4)
                continue
            waits, peak = self.waits(line), line.peak
            drawn.add_row(
                line.label,
                f"{line.median:.0f}",
                f"{self.speed(line):.2f}",
                "-" if waits is None else f"{waits:.0%}",
                "-" if peak is None else f"{peak / 1e6:.0f}",
                f"{median(line.losses[-1:]):.4f}",
            )
        return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 when a contender failed or the losses differ."""
    options = _parser().parse_args(arguments)
    named = workloads.CONFIGURATIONS[options.config]
    assert isinstance(named, Gpt)
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    workload = replace(named, **given)
    console = Console(width=None if sys.stdout.isatty() else 110)
    about = machine.describe()
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    neighbours = Neighbours()
    with console.status("") as status:
        lines = measure(
            takers(
                workload, options.ranks, options.microbatches, options.schedules, options.stages
            ),
            Plan(rounds=options.rounds, steps=options.steps),
            lambda who: Crew(who, workload, options.ranks, options.limit),
            lambda turn: status.update(turn),
        )
    figures = Figures({line.key: line for line in lines}, options.ranks, options.microbatches)
    title = f"{workload.describe()} · {options.ranks} ranks, {options.microbatches} micro-batches"
    console.print(figures.table(title))
    told = figures.disagreement()
    console.print(
        f"(N - 1) / (M + N - 1) = {figures.formula:.0%}; losses agree to {told:.1e}; other "
        f"processes took {neighbours.share() or 0:.0%} of the machine",
        highlight=False,
        soft_wrap=True,
    )
    for line in lines:
        if line.note:
            console.print(f"{line.label}: {line.note}", markup=False, soft_wrap=True)
    if options.json:
        rows = [
            {
                "label": line.label,
                "rounds": line.rounds,
                "waits": figures.waits(line),
                "speed": figures.speed(line),
                "losses": line.losses,
                "note": line.note,
            }
            for line in lines
        ]
        machine.write_json(options.json, {"machine": about, "title": title, "lines": rows})
    return 1 if told >= AGREE or any(line.note for line in lines) else 0


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="A", choices=["A", "C"])
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument(
        "--schedules",
        type=lambda text: text.split(","),
        default=["gpipe", "1f1b", "interleaved", "zero-bubble"],
        metavar="NAMES",
    )
    parser.add_argument(
        "--stages",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAMES",
        help="modules at which stages begin, for ours once more",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed, per round")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="per turn")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, metavar="N", help="in place of the named one's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
