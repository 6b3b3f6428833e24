"""Compares the evaluation results that the ranks report with the reference's results.

These are the numbers that the script prints during an evaluation, and the scalars that it reduces.
The comparison is only meaningful if the training itself agrees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardwise.tools.verify.stock.findings import CLOSE, Finding
from shardwise.tools.verify.stock.stock_runs import StockRecords

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.(\d+))?(?:e[-+]?\d+)?(?![\w.]*\w)")
LEAST = 1e-5
"""Relative difference above which two means count as different."""


def findings(reference: StockRecords, made: StockRecords) -> list[Finding]:
    """Return at most one mistake in the evaluation results that the ranks report."""
    return list(_unweighted(reference, made))[:1] or list(_multiplied(reference, made))[:1]


def _unweighted(reference: StockRecords, made: StockRecords) -> Iterator[Finding]:
    """Check for an unweighted average of the ranks' means even though their row counts differ."""
    theirs = _reported(reference)
    for entries in zip(*(facts["reduced"] for facts in made.ranks), strict=False):
        rows = [entry["rows"] for entry in entries]
        if len(set(rows)) == 1 or len({len(entry["values"]) for entry in entries}) > 1:
            continue
        for values in zip(*(entry["values"] for entry in entries), strict=True):
            plain = math.fsum(values) / len(values)
            weighed = math.fsum(v * n for v, n in zip(values, rows, strict=True)) / sum(rows)
            if abs(plain - weighed) <= LEAST * abs(weighed):
                continue
            # The reference reports the mean over all rows, so the ranks' values are means.
            if any(_are_close(weighed, value, digits) for value, digits in theirs):
                yield Finding(
                    "metrics averaged unweighted",
                    f"An evaluation averages the means of ranks that have {min(rows)} to "
                    f"{max(rows)} rows. The result is {plain:.6g}, but the mean over all rows is "
                    f"{weighed:.6g}. Reduce sums and counts over ranks, and divide once.",
                )
                return


def _multiplied(reference: StockRecords, made: StockRecords) -> Iterator[Finding]:
    """Check for printed numbers that are N times or 1/N of the reference's, for N ranks."""
    size = len(made.ranks)
    pairs = zip(reference.ranks[0]["printed"], made.ranks[0]["printed"], strict=False)
    for one, two in pairs:
        if NUMBER.sub("#", one["text"]) != NUMBER.sub("#", two["text"]):
            return  # the runs print different lines
        numbers = zip(_numbers(one["text"]), _numbers(two["text"]), strict=True)
        for (theirs, digits), (ours, _) in numbers:
            for factor, words in ((size, f"{size} times"), (1 / size, f"1/{size} of")):
                # An integer may be a number of ranks or rows. A time may be twice another one by
                # chance, so at least 3 digits have to agree.
                if abs(theirs) * 10**digits < 100 or not digits:
                    continue
                if _are_close(theirs * factor, ours, digits - 1):
                    yield Finding(
                        "metric multiplied by the ranks",
                        f'The ranks report {words} the value of one process: "{two["text"]}", not '
                        f'"{one["text"]}". Sum over ranks, and divide once by the number of items.',
                    )
                    return


def _reported(records: StockRecords) -> list[tuple[float, int]]:
    """Return the evaluation results that a run reports, each with its number of decimals."""
    facts = records.ranks[0]
    numbers = [each for line in facts["printed"] for each in _numbers(line["text"])]
    return numbers + [(value, 9) for each in facts["reduced"] for value in each["values"]]


def _numbers(text: str) -> list[tuple[float, int]]:
    """Return the numbers in a line, each with its number of decimals."""
    return [(float(match[0]), len(match[1] or "")) for match in NUMBER.finditer(text)]


def _are_close(one: float, two: float, digits: int) -> bool:
    """Return whether two numbers agree to `digits` decimals, and to a relative 1e-3."""
    if not digits:
        return False
    return abs(one - two) <= max(10.0**-digits, 1e-7 * abs(two)) and abs(one - two) <= CLOSE * abs(
        two
    )
