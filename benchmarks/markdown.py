"""The tables of a result file as Markdown.

    python benchmarks/markdown.py results/FILE.json
    python benchmarks/markdown.py --short results/FILE.json     # one table of all cases

What stands between the marks in README.md of this folder, and in docs/speed.md, is its output.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from report import milliseconds
from residents import MB

HEAD = "| {} | ms/step | x DDP | x limit | MB/rank, peak | MB, all ranks | loss |"
RULE = "|---|--:|--:|--:|--:|--:|--:|"


def main() -> None:
    """Print the head of the run and one table per case, or the short one."""
    parser = argparse.ArgumentParser(description="The tables of a result file as Markdown.")
    parser.add_argument("path", type=Path, help="what step_time.py wrote to --json")
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
        print("", *_table(result), sep="\n")


def _short(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Milliseconds and the ratio to DDP of all cases, side by side."""
    results = sorted(results, key=_case)
    yield f"| ms/step (x DDP) | {' | '.join('{}, {} ranks'.format(*_case(r)) for r in results)} |"
    yield f"|---|{'--:|' * len(results)}"
    by_case = [{line["label"]: line for line in result["contenders"]} for result in results]
    for label in dict.fromkeys(label for lines in by_case for label in lines):
        cells = [_time(lines.get(label)) for lines in by_case]
        bold = "**" if label.startswith("Shardwise") else ""
        yield f"| {bold}{label}{bold} | {' | '.join(cells)} |"


def _case(result: dict[str, Any]) -> tuple[str, int]:
    return result["configuration"]["name"], result["ranks"]


def _time(line: dict[str, Any] | None) -> str:
    if line is None or line["note"]:
        return "-"
    return f"{milliseconds(line['median_ms'])} ({_number(line['over_ddp'], '.2f')})"


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
    main()
