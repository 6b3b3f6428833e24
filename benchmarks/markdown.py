"""The tables of a result file as Markdown.

    python benchmarks/markdown.py results/FILE.json
    python benchmarks/markdown.py --short results/FILE.json     # one table of all cases

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
    parser.add_argument("--short", action="store_true", help="times alone, in one table")
    options = parser.parse_args()
    whole = json.loads(options.path.read_text())
    if options.short:
        print(*_short(whole["results"]), sep="\n")
        return
    machine, method = whole["machine"], whole["method"]
    print(f"{machine['machine']}; {machine['system']}; {machine['versions']}; {machine['date']};")
    print(f"commit {machine['commit']}; {method['rounds']} rounds of {method['steps']} steps.")
    print(f"`{machine['command']}`")
    for result in whole["results"]:
        print(*report.markdown(result), sep="\n")


def _short(results: Sequence[Row]) -> list[str]:
    """Return milliseconds and the ratio to DDP of all cases, next to each other."""
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
        rows.append([f"{bold}{label}{bold}", *(_time(each.get(label)) for each in cases.values())])
    head = [f"{name}, {ranks} ranks" for name, ranks in cases]
    return figure.table(["ms/step (x DDP)", *head], rows)


def _time(row: Row | None) -> str:
    if row is None or row["note"]:
        return "-"
    return f"{figure.milliseconds(row['median_ms'])} ({figure.number(row['over_ddp'], '.2f')})"


if __name__ == "__main__":
    main()
