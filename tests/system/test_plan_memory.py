"""The peak memory that is planned is the one that a process takes, within the band of the docs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read of /proc")
@pytest.mark.parametrize("models", [("mlp",), pytest.param(("mlp", "gan"), marks=pytest.mark.full)])
def test_the_peak_of_small_models_is_within_the_band(models):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "plan.py"), *models],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    errors = dict(re.findall(r"^\| (\w+) \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+)% ", done.stdout, re.M))
    assert set(errors) == set(models), done.stdout + done.stderr
    assert all(-2.0 <= float(each) <= 3.0 for each in errors.values()), done.stdout
