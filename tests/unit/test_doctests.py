"""The examples in docstrings run."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_examples_in_docstrings_run(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.doctests"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"(\d+) examples, 0 failed", ran.stdout)
    assert found is not None
    assert int(found[1]) >= 8
