"""How fast a checkpoint is written, beside a raw write of the same bytes and other ways to save.

    python benchmarks/checkpoint.py --folder DIR [--mb 1000] [--ranks 2] [--repeats 5] [--json FILE]

One state in fp32 (parameters and AdamW's moments), sharded over the ranks. All ways take turns in
each repeat, and each ends with its bytes on the disk (fsync). The table shows medians, of figures
and of the ratios within a repeat. Below it: how long a save in the background holds up training,
beside a copy in memory of what a rank holds, and by how much a rank's resident set grows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
from neighbours import BUSY, Neighbours

HERE = Path(__file__).parent
RAW, OURS = "raw write", "shardwise"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    neighbours = Neighbours()
    facts = machine.describe() | {"disk": str(options.folder)}
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    told = _measured(options)
    console.print(_table(told, options.ranks))
    for line in [*_remarks(told), *_busy(neighbours.share())]:
        console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        whole = {"machine": facts, "ranks": options.ranks} | told
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one group of ranks."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-") as folder:
        written = Path(folder) / "figures.json"
        words = [sys.executable, "-m", "shardwise", "run", "-n", str(options.ranks)]
        words += [str(HERE / "savers.py"), "--folder", folder, "--json", str(written)]
        for name in ("mb", "width", "repeats"):
            words += [f"--{name}", str(getattr(options, name))]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(written.read_text())
        return told


def _table(told: dict[str, Any], ranks: int) -> Table:
    title = f"{told['nbytes'] / 1e9:.2f} GB from {ranks} ranks, on the disk"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("", no_wrap=True)
    for column in ("s", "GB/s", "x raw", "x shardwise"):
        drawn.add_column(column, justify="right")
    for name, took in told["seconds"].items():
        middle = median(took)
        ratios = [f"{_ratio(took, told['seconds'][base]):.2f}" for base in (RAW, OURS)]
        drawn.add_row(name, f"{middle:.3f}", f"{told['nbytes'] / middle / 1e9:.2f}", *ratios)
    return drawn


def _ratio(took: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within a repeat."""
    return median(a / b for a, b in zip(took, base, strict=True))


def _remarks(told: dict[str, Any]) -> list[str]:
    ratio = _ratio(told["held_up"], told["memcpy"])
    lines = [
        f"in the background: training held up for {median(told['held_up']):.3f} s, {ratio:.2f} x a "
        f"copy of what a rank holds (wanted: 1.5); on the disk after "
        f"{median(told['background']):.3f} s"
    ]
    peaks = [peak for peak in told["peaks"] if peak is not None]
    if peaks:
        above = f"{max(peaks) / 1e6:.0f} MB above that of training"
        wanted = f"wanted: a bucket, {told['bucket'] / 1e6:.0f} MB"
        lines.append(f"resident set while saving: {above} ({wanted})")
    return lines


def _busy(others: float | None) -> list[str]:
    if others is None or others <= BUSY:
        return []
    return [f"other processes took {others:.0%} of the machine: take these as indicative only"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="on the disk")
    parser.add_argument("--mb", type=float, default=1000.0, metavar="N", help="10^6 bytes of state")
    parser.add_argument("--width", type=int, default=1024, metavar="N", help="of each layer")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
