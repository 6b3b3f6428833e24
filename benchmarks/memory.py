"""What each row and tier holds in memory, beside the formulas of the ZeRO paper.

    python benchmarks/memory.py --disk FOLDER [--ranks 2] [--rows 0,1,2,3] [--precision fp32,bf16]
        [--activations kept,recomputed] [--allocators pinned,usual] [--transport gloo]
        [--json FILE] [--plot FILE]

A GPT whose states outweigh its activations trains a few steps on each row and tier, every case in
processes of its own. `state` is what a rank holds, as the engine says it, wherever it rests;
`formula` is the same by formulas.py, and the run fails when they differ by more than 2 % and the
padding. `resident` is the kernel's own count of anonymous and shared pages per rank, less what the
rank held before it had a model: between two steps, and the highest of samples within two more. The
part of the formula that no disk holds stands beside it.

glibc keeps what is freed, unless its threshold for mappings is pinned: with `pinned` the resident
set is what is in use, with `usual` what a user sees.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

import formulas
import machine
import memory_report
from contenders import Contender
from crew import Crew, CrewFailed
from memory_report import Line
from neighbours import Neighbours
from rounds import weigh
from workloads import Gpt, check

WARM_UP = 3
"""Steps before anything is weighed: moments appear in the first, buffers settle in the second."""

ALLOCATORS: dict[str, dict[str, str]] = {
    "pinned": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "usual": {},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table, before it is measured."""

    zero: int
    tier: str
    precision: str
    activations: str
    allocator: str
    transport: str

    @property
    def name(self) -> str:
        """The case in words; what is usual is left out."""
        unusual = (self.precision, "fp32"), (self.activations, "kept"), (self.allocator, "pinned")
        said = [word for word, usual in unusual if word != usual]
        return ", ".join([f"ZERO_{self.zero}", self.tier, *said])

    def contender(self, disk: str) -> Contender:
        """What a crew starts."""
        names = {"optimizer": "offload_optimizer", "parameters": "offload_params"}
        offloaded = formulas.OFFLOADED[self.tier]
        settings = {"precision": self.precision, "activations": self.activations}
        settings |= {names[state]: f"nvme:{disk}" for state in offloaded}
        return Contender(
            key=self.name,
            label=self.name,
            module="shardwise",
            options={"zero": self.zero, "transport": self.transport, **settings},
            environment=ALLOCATORS[self.allocator],
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and print one table; 1 when a state is not what its formula says."""
    parser = _parser()
    options = parser.parse_args(arguments)
    workload = _workload(options)
    try:
        check(workload, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    console, facts = _console(), machine.describe()
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    neighbours, lines = Neighbours(), []
    for case in _cases(options):
        with console.status(case.name):
            try:
                lines.append(_measure(case, workload, options))
            except CrewFailed as error:
                raise SystemExit(f"{case.name}: {error}") from None
    console.print(memory_report.table(workload, options.ranks, lines))
    for remark in memory_report.remarks(lines, neighbours.share()):
        console.print(remark, highlight=False, soft_wrap=True)
    _write(facts, workload, lines, options)
    return 1 if any(line.is_wrong for line in lines) else 0


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every legal product of what was asked for; tiers of a row stand together."""
    whole = product(
        options.precision, options.activations, options.allocators, options.rows, formulas.OFFLOADED
    )
    for precision, activations, allocator, zero, tier in whole:
        if formulas.is_legal(zero, tier):
            yield Case(
                zero=zero,
                tier=tier,
                precision=precision,
                activations=activations,
                allocator=allocator,
                transport=options.transport,
            )


def _measure(case: Case, workload: Gpt, options: argparse.Namespace) -> Line:
    contender = case.contender(str(options.disk.resolve()))
    with Crew(contender, workload, options.ranks, options.limit) as crew:
        told = crew.take(WARM_UP).told
        weights = weigh(crew)
    says = [rank["bytes"] for rank in told]
    by_formula = formulas.held(
        case.zero, case.tier, case.precision, says[0]["numel"], options.ranks
    )
    return Line(
        name=case.name,
        state=max(rank["all"] for rank in says),
        formula=sum(by_formula.values()),
        padding=says[0]["padding"],
        in_memory=formulas.in_memory(case.zero, case.tier, by_formula),
        resident=_less(weights.resident, weights.empty),
        peak=_less(weights.peak, weights.empty),
    )


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _write(
    facts: dict[str, str], workload: Gpt, lines: Sequence[Line], options: argparse.Namespace
) -> None:
    if options.json:
        whole = memory_report.as_json(facts, workload, options.ranks, lines)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.plot:
        caption = f"{workload.describe()}, {options.ranks} ranks · {facts['machine']}"
        memory_report.plot(lines, options.plot, caption)


def _console() -> Console:
    """The screen; written to a file, the table keeps a width that fits it."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _workload(options: argparse.Namespace) -> Gpt:
    names = ("width", "layers", "vocabulary", "sequence", "batch")
    return Gpt(name="memory", **{name: getattr(options, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disk", type=Path, required=True, metavar="FOLDER", help="not on tmpfs")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--rows", type=_rows, default=[0, 1, 2, 3], metavar="0,1,2,3")
    several: dict[str, tuple[Any, str]] = {
        "precision": (formulas.BYTES, "fp32"),
        "activations": (("kept", "recomputed"), "kept"),
        "allocators": (ALLOCATORS, "pinned"),
    }
    for name, (known, default) in several.items():
        parser.add_argument(
            f"--{name}", type=_words(known), default=[default], metavar=",".join(known)
        )
    parser.add_argument("--transport", choices=("auto", "shared", "gloo"), default="auto")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="per case")
    sizes = {"width": 640, "layers": 8, "vocabulary": 8192, "sequence": 32, "batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    return parser


def _words(known: Any) -> Any:
    """A parser of several words, all of them `known`."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(
                f"there is no {unknown[0]!r}; there are {', '.join(known)}"
            )
        return words

    return parse


def _rows(text: str) -> list[int]:
    rows = [int(word) for word in text.split(",")]
    if not set(rows) <= {0, 1, 2, 3}:
        raise argparse.ArgumentTypeError(f"{text}: rows are 0, 1, 2 and 3")
    return rows


if __name__ == "__main__":
    sys.exit(main())
