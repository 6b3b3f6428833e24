"""The tables of a result file as Markdown: `python benchmarks/markdown.py results/FILE.json`.

What stands between the marks in README.md is the output of this command and nothing else.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import milliseconds
from residents import MB

HEAD = "| {} | ms/step | x DDP | x limit | MB/rank, peak | MB, all ranks | loss |"
RULE = "|---|--:|--:|--:|--:|--:|--:|"


def main(path: Path) -> None:
    """Print the head of the run and one table per case."""
    whole = json.loads(path.read_text())
    machine, method = whole["machine"], whole["method"]
    print(f"{machine['machine']}; {machine['system']}; {machine['versions']}; {machine['date']};")
    print(f"commit {machine['commit']}; {method['rounds']} rounds of {method['steps']} steps.")
    print(f"`{machine['command']}`")
    for result in whole["results"]:
        print("", *_table(result), sep="\n")


def _table(result: dict[str, Any]) -> Iterator[str]:
    title = f"{result['configuration']['name']}, {result['ranks']} ranks"
    if result["limit_ms"] is not None:
        title += f" (limit {milliseconds(result['limit_ms'])} ms)"
    yield HEAD.format(title)
    yield RULE
    yield from map(_row, result["contenders"])
    others = result["share_of_other_processes"]
    yield f"\nLosses agree to {result['loss_disagreement']:.1e}; other processes took " + (
        f"{_number(others, '.0%')} of the machine."
    )


def _row(line: dict[str, Any]) -> str:
    if line["note"]:
        return f"| {line['label']} | {line['note'].splitlines()[0]} | | | | | |"
    peak = line["memory_bytes_per_rank"]["peak"]
    everyone = line.get("peak_bytes_of_all_ranks")
    cells = [
        line["label"],
        milliseconds(line["median_ms"]),
        _number(line["over_ddp"], ".2f"),
        _number(line["over_limit"], ".2f"),
        _number(None if peak is None else peak / MB, ".0f"),
        _number(None if everyone is None else everyone / MB, ".0f"),
        _number(line["losses"][-1] if line["losses"] else None, ".4f"),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
