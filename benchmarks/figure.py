"""Shared by all commands here: flags, the head of a run, and Markdown tables."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
from workloads import SIZES

GB = 1e9
MB = 1e6


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with --json, whose help is the docstring of the script."""
    summary, _, method = doc.partition("\n\n")
    made = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return made


def add_sizes(flags: argparse.ArgumentParser) -> None:
    """Add a flag for each size of a workload."""
    sizes = flags.add_argument_group("any other configuration: change the named one")
    for name in SIZES:
        sizes.add_argument(f"--{name}", type=positive, metavar="N")


def sizes_in(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that the command line names."""
    return {name: value for name in SIZES if (value := getattr(options, name)) is not None}


def words(text: str) -> list[str]:
    """Parse a flag's value `a,b`; `none` is the empty list."""
    return [word for word in text.split(",") if word not in ("", "none")]


def numbers(text: str) -> list[int]:
    """Parse a flag's value `1,2`."""
    return [int(word) for word in words(text)]


def floats(text: str) -> list[float]:
    """Parse a flag's value `1e-3,0.5`."""
    return [float(word) for word in words(text)]


def positive(text: str) -> int:
    """Parse a flag's value from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def add_numbers(flags: argparse.ArgumentParser, defaults: Mapping[str, int]) -> None:
    """Add a flag for each number from 1 on: `batch_size` becomes --batch-size."""
    for name, value in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        flags.add_argument(flag, type=positive, default=value, metavar="N")


def as_flags(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the flags that give another process the same values of `names`."""
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]


def begin(**more: str) -> dict[str, str]:
    """Print and return the machine, the versions, the commit, the command and the date."""
    facts = machine.describe() | more
    for name, value in facts.items():
        print(f"{name:>9}  {value}")
    print(flush=True)
    return facts


def keep(options: argparse.Namespace, facts: Mapping[str, str], **figures: object) -> None:
    """Write the result file if --json names one."""
    if options.json:
        machine.write_json(options.json, {"machine": facts} | figures)


def parse_unless_worker(
    flags: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    train: Callable[[int], None],
) -> argparse.Namespace:
    """Parse the command line. In a process of `run_workers`, call `train(steps)` and exit."""
    flags.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = flags.parse_args(arguments)
    if options.worker:
        train(options.steps)
        sys.exit()
    return options


def run_workers(script: str, flags: str, steps: int) -> Any:
    """Run `script` on two workers with the `flags` of `shardwise run`, and return its result."""
    command = [sys.executable, "-m", "shardwise", "run", "-n", "2", *flags.split()]
    return result_of([*command, script, "--worker", f"--steps={steps}"])


def result_of(command: Sequence[str], **options: Any) -> Any:
    """Run `command`, and return the JSON object in the last line of its output that has one.

    If the command fails, exit with its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    # A launcher may write the rank in front of the line.
    return json.loads(lines[-1][lines[-1].index("{") :])


def memory_of_process(field: str) -> int:
    """Return the bytes in a field of this process's status: VmRSS now, VmHWM at its largest."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are aligned right.

    Rows may be shorter than `head`: a contender without figures has only a note.
    """
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for row in rows:
        cells = [*row, *[""] * (len(head) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def show(*lines: str) -> None:
    """Print lines at once, also into a pipe: a run may be killed."""
    print(*lines, sep="\n", flush=True)


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    """Return the value in `unit`s, or a dash if it is unknown."""
    return "-" if value is None else format(value / unit, form)


def milliseconds(value: float | None) -> str:
    """Return three figures or so: `712`, `7.1`."""
    return number(value, ".0f" if value is not None and value >= 100 else ".1f")
