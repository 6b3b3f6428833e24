"""The tables of a result file as Markdown.

    python benchmarks/markdown.py results/FILE.json
    python benchmarks/markdown.py --short results/FILE.json     # one table of all cases
    python benchmarks/markdown.py --scaling results/FILE.json   # one table, with speed-ups
    python benchmarks/markdown.py --bridges results/FILE.json

README.md of this folder and docs/speed.md show its output between their marks.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import figure
import report
from report import Row


def main() -> None:
    """Print the head of the run and one table per case, or the short one."""
    parser = argparse.ArgumentParser(description="The tables of a result file as Markdown.")
    parser.add_argument("path", type=Path, help="the file that step_time.py wrote to --json")
    parser.add_argument("--short", action="store_true", help="ms and x DDP, in one table")
    parser.add_argument("--scaling", action="store_true", help="ms and speed-up, in one table")
    parser.add_argument("--bridges", action="store_true", help="ratios within each library")
    options = parser.parse_args()
    whole = json.loads(options.path.read_text())
    if options.short or options.scaling:
        print(*_short(whole["results"], options.scaling), sep="\n")
        return
    machine, method = whole["machine"], whole["method"]
    print(f"{machine['machine']}; {machine['system']}; {machine['versions']}; {machine['date']};")
    print(f"commit {machine['commit']}; {method['rounds']} rounds of {method['steps']} steps.")
    print(f"`{machine['command']}`")
    for result in whole["results"]:
        columns = report.BRIDGES if options.bridges else report.ON_CPU
        print(*report.markdown(result, columns), sep="\n")


def _short(results: Sequence[Row], scaling: bool) -> list[str]:
    """Return milliseconds and a ratio of all cases, next to each other: to DDP, or with `scaling`
    how many times faster than one process."""
    cases = {
        (result["configuration"]["name"], result["ranks"]): {
            row["label"]: row for row in result["contenders"]
        }
        for result in results
    }
    cases = dict(sorted(cases.items()))
    rows = []
    for label in dict.fromkeys(label for lines in cases.values() for label in lines):
        bold = "**" if label.startswith("Shardwise") else ""
        rows.append(
            [f"{bold}{label}{bold}", *(_time(each.get(label), scaling) for each in cases.values())]
        )
    head = [f"{name}, {ranks} ranks" for name, ranks in cases]
    return figure.table([f"ms/step ({'speed-up' if scaling else 'x DDP'})", *head], rows)


def _time(row: Row | None, scaling: bool) -> str:
    if row is None or row["note"]:
        return "-"
    over = 1 / row["over_plain"] if scaling else row["over_ddp"]
    return f"{figure.milliseconds(row['median_ms'])} ({figure.number(over, '.2f')})"


if __name__ == "__main__":
    main()
