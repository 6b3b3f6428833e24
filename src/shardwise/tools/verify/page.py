"""Writes what a verification found: as JSON, and as a page with its plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwise.messages.printable import as_utf8
from shardwise.tools.report import plot_look
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.report import Report, as_json, largest
from shardwise.tools.verify.verdicts import TOLERANCE


def write(report: Report, folder: Path, json_file: Path | None) -> None:
    """verify.json, verify.png and verify.html in `folder`, and the JSON in `json_file` too."""
    text = json.dumps(as_json(report), indent=2, allow_nan=False) + "\n"
    (folder / "verify.json").write_text(text)
    if json_file is not None and str(json_file) == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        json_file.write_text(text)
    from shardwise.tools.verify import plots  # half a second, which nobody waits for before

    picture = plots.draw(report, folder)
    (folder / "verify.html").write_bytes(as_utf8(_page(report, picture)))


def _page(report: Report, picture: str) -> str:
    """The page: one file, which fetches nothing. `picture` is the plots as SVG."""
    return plot_look.render_page(
        "shardwise.tools.verify",
        report=report,
        machine=report.machine(),
        picture=picture,
        tolerance=verdicts.figure(TOLERANCE),
        results=[
            {
                "placement": str(result.placement),
                "verdict": result.verdict,
                "sentences": verdicts.sentences(result),
                "rows": [
                    (each.name, each.kind, verdicts.figure(each.relative), max(number - 1, 0))
                    for number, each in largest(result.judged)
                ],
                "in_fp64": result.wide is not None,
            }
            for result in report.results
        ],
    )
