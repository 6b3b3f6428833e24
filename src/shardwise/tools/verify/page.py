"""Writes the result of a verification as JSON, and as an HTML page with plots."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.tools.report.output import write_json
from shardwise.tools.report.page import write_page
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.comparing import Comparison
from shardwise.tools.verify.report import VerifyReport, as_json, largest
from shardwise.tools.verify.verdicts import TOLERANCE


def write(report: VerifyReport, folder: Path, json_file: Path | None) -> None:
    """Write verify.json, verify.png and verify.html to `folder`, and the JSON to `json_file`."""
    text = json.dumps(as_json(report), indent=2, allow_nan=False)
    (folder / "verify.json").write_text(text + "\n")
    write_json(text, json_file)
    from shardwise.tools.verify import plots  # imports matplotlib, which takes half a second

    drawn = [
        plots.DrawnResult(
            label=str(result.placement),
            verdict=result.verdict,
            losses=result.losses,
            own=result.own,
            wide=result.wide,
        )
        for result in report.results
    ]
    write_page(
        folder / "verify.html",
        "shardwise.tools.verify",
        command=report.command,
        verdict=report.verdict,
        reference=report.reference,
        steps=report.plan.steps,
        is_stock=False,
        report=report,
        machine=report.machine(),
        picture=plots.draw(report.command, drawn, folder),
        tolerance=verdicts.format_difference(TOLERANCE),
        results=[
            {
                "placement": str(result.placement),
                "verdict": result.verdict,
                "sentences": verdicts.sentences(result),
                "rows": rows_of(result.judged),
                "in_fp64": result.wide is not None,
            }
            for result in report.results
        ],
    )


def rows_of(comparison: Comparison) -> list[tuple[str, str, str, int]]:
    """Return the name, kind, difference and step of each of the tensors that differ most."""
    return [
        # Users number steps from 0. Show the state before the first step as 0 as well.
        (each.name, each.kind, verdicts.format_difference(each.relative), max(number - 1, 0))
        for number, each in largest(comparison)
    ]
