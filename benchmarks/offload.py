"""How fast states are updated on each tier, beside what their disk and their memory can do.

    python benchmarks/offload.py --folder DIR [--gb 1] [--mb 48] [--ranks 2] [--repeats 5]
        [--steps 3] [--peers none] [--json FILE]

Two tables from one run, in whose repeats all take turns. Sweeps: one process reads every byte of a
state through the nvme tier, updates it and writes it back; rates count bytes read and written
together. Updates: the whole update of a GPT's step by the engine, on each tier, with one thread
per rank, beside torch's fused AdamW in one process with as many threads, and beside DeepSpeed.
The tables show medians, of figures and of the ratios within a repeat.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
import updates
from neighbours import Neighbours, remark
from shardwise.tiers.direct_io import CHUNK, mount_of
from sweeps import Sweep, Work, contenders
from updates import Line, Updates
from workloads import Gpt, check

Seconds = dict[str, list[float]]
"""For each contender, what each of its sweeps took."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contenders and print the two tables; 1 when one failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    workload = _workload(options)
    try:
        check(workload, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    console, work, neighbours = _console(), _work(options), Neighbours()
    facts = machine.describe() | {"disk": f"{work.folder}, {mount_of(work.folder).kind}"}
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(dir=work.folder, prefix="offload-") as folder:
        takers = updates.contenders(
            str(Path(folder).resolve()), options.ranks, options.peers == "deepspeed"
        )
        field = Updates(takers, workload, options.ranks)
        seconds = _measure(work, field, options, console)
    lines = list(field.lines.values())
    plain = [work.moved / took for took in next(iter(seconds.values()))]
    console.print(_table(work, seconds))
    console.print(updates.table(lines, workload.parameters, options.ranks, plain))
    for line in _remarks(lines, neighbours.share()):
        console.print(line, highlight=False, markup=False)
    if options.json:
        whole = {"machine": facts, "workload": asdict(workload), "ranks": options.ranks}
        whole |= {"bytes_per_sweep": work.moved, "sweeps_s": seconds}
        whole |= {"updates": [asdict(line) for line in lines]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if any(line.note.startswith("failed") for line in lines) else 0


def _remarks(lines: Sequence[Line], others: float | None) -> Iterator[str]:
    """Why a line is empty, and whether the machine was quiet."""
    yield from (f"{line.label}: {line.note}" for line in lines if line.note)
    yield remark(others)


def _measure(work: Work, field: Updates, options: argparse.Namespace, console: Console) -> Seconds:
    """One turn of each to warm up (and to write every block once), then the timed ones."""
    with ExitStack() as stack:
        status = stack.enter_context(console.status("sweeps"))
        sweeps = {n: stack.enter_context(enter(work)) for n, enter in contenders().items()}
        for sweep in sweeps.values():
            sweep()
        stack.enter_context(field.started(options.limit, status.update))
        seconds: Seconds = {name: [] for name in sweeps}
        for repeat in range(options.repeats):
            status.update(f"repeat {repeat + 1} of {options.repeats}")
            for name, sweep in sweeps.items():
                seconds[name].append(_time(sweep))
            field.turn(options.steps)
    return seconds


def _time(sweep: Sweep) -> float:
    begun = time.perf_counter()
    own = sweep()
    return time.perf_counter() - begun if own is None else own


def _table(work: Work, seconds: Seconds) -> Table:
    title = f"Sweeps of {work.count} records of {work.record / 1e6:.0f} MB: read, updated, written"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("", no_wrap=True)
    for column in ("s/sweep", "GB/s", "x plain"):
        drawn.add_column(column, justify="right")
    plain = next(iter(seconds.values()))
    for name, took in seconds.items():
        ratio = median(p / t for p, t in zip(plain, took, strict=True))
        middle = median(took)
        row = (f"{middle:.3f}", f"{work.moved / middle / 1e9:.2f}", f"{ratio:.2f}")
        drawn.add_row(name, *row)
    return drawn


def _console() -> Console:
    """The screen; written to a file, the tables keep a width that fits them."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _work(options: argparse.Namespace) -> Work:
    record = max(1, options.mb * 10**6 // CHUNK) * CHUNK
    count = max(1, round(options.gb * 1e9 / record))
    return Work(folder=options.folder, record=record, count=count)


def _workload(options: argparse.Namespace) -> Gpt:
    """A model with few tokens: what is between two updates should not take long."""
    sizes = {name: getattr(options, name) for name in ("width", "layers", "vocabulary")}
    return Gpt(name="updates", sequence=8, batch=options.ranks, **sizes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="on the disk")
    parser.add_argument("--gb", type=float, default=1.0, metavar="N", help="bytes of state, swept")
    parser.add_argument("--mb", type=int, default=48, metavar="N", help="bytes of a record")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of the updates")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="updates in a repeat")
    parser.add_argument("--peers", choices=("deepspeed", "none"), default="deepspeed")
    for name, default in {"width": 512, "layers": 8, "vocabulary": 16384}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="per turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
