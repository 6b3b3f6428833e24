"""docs/context.md shows the figures of the result file, which meet the goal for memory."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = re.compile(
    r"<!-- context: begin \(output of python (\S+ --show (\S+))\) -->\n(.*?)\n"
    r"<!-- context: end -->",
    re.S,
)


def test_docs_show_the_results() -> None:
    found = MARKS.search((ROOT / "docs" / "context.md").read_text())
    assert found is not None
    words, result, shown = found.groups()
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.strip() == done.stdout.strip()
    lines = json.loads((ROOT / result).read_text())["lines"]
    whole = {x["model"]: x["activations"] for x in lines if x["label"] == "one worker"}
    parts = [x for x in lines if x["label"].endswith("ulysses")]
    assert {x["size"] for x in parts} == {2, 4}
    for x in parts:
        assert x["size"] * x["activations"] <= 1.1 * whole[x["model"]]
