"""The planned peak of tensors equals the measured one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="shared memory is of /proc"
)
@pytest.mark.parametrize("models", [("mlp",), pytest.param(("mlp", "gan"), marks=pytest.mark.full)])
def test_planned_peak_equals_the_measured_peak(models):
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
    assert all(abs(float(each)) <= 0.1 for each in errors.values()), done.stdout
