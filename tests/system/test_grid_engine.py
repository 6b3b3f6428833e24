"""A real Grid Engine cell of two hosts: its jobs train as one process does."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disk import wait_until
from tests.system import grid_engine as cells
from tests.system.components import need
from tests.system.grid_engine import DAEMONS, GridEngine
from tests.system.test_launchers import EXAMPLES, MPICH, OPEN_MPI, SETTINGS, mpirun, notes
from tests.system.warm import WarmPython

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces as on Linux"),
]

LOSSES = str(EXAMPLES / "same_losses.py")
VENV = f"VENV={Path(sys.executable).parents[1]}"
WARM_SERVER = "warm_python/server.py"
FOUR = ("-pe", "mpi", "4")
"""Two slots on each host."""


@pytest.fixture(scope="module")
def cell() -> Iterator[GridEngine]:
    need("gridengine", cells.missing())
    with (
        tempfile.TemporaryDirectory(prefix="grid-engine-") as folder,
        cells.grid_engine(Path(folder)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def warm_on_hosts(cell: GridEngine) -> Iterator[dict[str, str]]:
    """Yield the variables of warm programs, whose process is in the PID namespace of the hosts."""
    warm = WarmPython(processes=1, enter=cell.enter())
    try:
        yield dict(warm.environ())
    finally:
        warm.close()


@pytest.fixture(scope="module")
def expected(cell: GridEngine, warm_on_hosts: dict[str, str]) -> list[str]:
    """Return the losses of one plain process."""
    ran = cell.run(sys.executable, LOSSES, env=SETTINGS | warm_on_hosts)
    assert ran.stdout.startswith("1 worker(s)"), ran.stderr
    return steps(ran.stdout)


def steps(text: str) -> list[str]:
    """Return the lines with the loss of a step, without the prefix of the rank."""
    found = [f"step {line.partition('step ')[2]}" for line in text.splitlines() if "step" in line]
    assert len(found) == 5, text
    return found


@pytest.fixture
def job(
    cell: GridEngine, tmp_path: Path, warm_on_hosts: dict[str, str]
) -> Iterator[Callable[..., str]]:
    """Runs a job script in a new folder, with the submitter's environment, and returns its output.
    Checks that no job leaves a process."""

    def submit(*words: str) -> str:
        flags = ("-V", "-v", VENV, "-cwd", "-j", "y", "-o", "out")
        ran = cell.batch(*flags, *words, cwd=tmp_path, env=SETTINGS | warm_on_hosts)
        written = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
        assert ran.returncode == 0, ran.stdout + ran.stderr + written
        assert notes(tmp_path) == []
        return written

    yield submit
    assert left(cell) == []


def left(cell: GridEngine, limit: float = 8.0) -> list[str]:
    """Return the processes that jobs leave on the hosts after `limit` seconds."""
    until = time.monotonic() + limit
    while True:
        shown = cell.run("ps", "-A", "-o", "comm=,args=").stdout.splitlines()
        found = [line for line in shown if line.split()[0] not in (*DAEMONS, "ps")]
        found = [line for line in found if WARM_SERVER not in line]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def job_script(folder: Path, *lines: str) -> str:
    made = folder / "job.sh"
    made.write_text("\n".join(("#!/bin/sh", 'PATH="$VENV/bin:$PATH"', *lines, "")))
    return str(made)


def test_example_trains_on_two_hosts_with_equal_losses(
    job: Callable[..., str], expected: list[str]
) -> None:
    """`shardwise run` finds the hosts in PE_HOSTFILE, and reaches them by `qrsh -inherit`."""
    example = str(EXAMPLES / "cluster" / "grid_engine.sh")
    passed = ("-x", "TESTS_WARM", "-x", "PYTHONPATH")
    out = job(*FOUR, example, *passed, "--zero", "2", LOSSES)
    assert "4 worker(s), ZERO_2" in out
    assert steps(out) == expected


@pytest.mark.parametrize(
    ("component", "name"), [OPEN_MPI, pytest.param(*MPICH, marks=pytest.mark.full)]
)
def test_mpirun_trains_on_two_hosts_with_equal_losses(
    job: Callable[..., str], expected: list[str], tmp_path: Path, component: str, name: str
) -> None:
    """mpirun reads PE_HOSTFILE itself, and starts its daemon on the other host by qrsh."""
    # MPICH's ranks meet by the process that has started them. A warm program has another parent.
    cold = "env -u TESTS_WARM" if component == "mpich" else ""
    words = f"{mpirun(component)} -n 4 {cold} python {LOSSES}"
    out = job(*FOUR, job_script(tmp_path, words))
    assert "4 worker(s)" in out
    assert steps(out) == expected


def test_tasks_of_an_array_job_train_alone(
    job: Callable[..., str], expected: list[str], tmp_path: Path
) -> None:
    """SGE_TASK_ID numbers independent jobs. It is not a rank."""
    made = job_script(tmp_path, f'python {LOSSES} >"out.$SGE_TASK_ID"')
    job("-t", "1-2", made)
    for task in (1, 2):
        out = (tmp_path / f"out.{task}").read_text()
        assert out.startswith("1 worker(s)")
        assert steps(out) == expected


def test_script_started_by_qrsh_on_each_host_is_refused(
    job: Callable[..., str], tmp_path: Path
) -> None:
    """Grid Engine gives tasks of `qrsh -inherit` no rank, so each would train the whole model."""
    warm = 'env TESTS_WARM="$TESTS_WARM" PYTHONPATH="$PYTHONPATH" OMP_NUM_THREADS=1'
    task = f'{warm} "$VENV/bin/python" {LOSSES}'
    lines = [f"qrsh -inherit {host} {task}; echo exit code $?" for host in ("n1", "n2")]
    out = job(*FOUR, job_script(tmp_path, *lines))
    assert out.count("exit code 1") == 2, out
    assert out.count("JOB_NAME=petask") == 2
    assert "step 0" not in out


def test_deleting_job_ends_ranks_on_both_hosts(cell: GridEngine, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\n"
        "rank = os.environ['RANK']\n"
        "pathlib.Path(f'here-{rank}').touch()\n"
        "time.sleep(600)\n"
    )
    example = str(EXAMPLES / "cluster" / "grid_engine.sh")
    flags = ("-terse", "-V", "-v", VENV, "-cwd", "-j", "y", "-o", "out", *FOUR)
    submitted = cell.run("qsub", *flags, example, "waits.py", cwd=tmp_path, env=SETTINGS)
    try:
        wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 4, 60.0)
    finally:
        cell.run("qdel", submitted.stdout.strip())
    assert left(cell) == []
