"""One script, unchanged, under every launcher: the same bits at the end."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.random_losses.reference import check
from tests.system import cluster as clusters
from tests.system.cluster import Cluster
from tests.system.components import need
from tests.system.launcher import Launcher, Ran, script
from tests.system.warm import WarmPython

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="launchers as on Linux"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "SHARDWISE_QUIET": "on",
    "SHARDWISE_TIMEOUT": "100",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    # root may start Open MPI in a container, and more ranks than there are cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
WARM = pytest.mark.usefixtures("warm_programs")
"""For tests of training results. Tests of how a rank finds its launcher's process do not use it."""

MPI = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Launcher]:
    """Yield a launcher on this host, and check that it leaves no processes and files."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.wait_until_gone()
    launcher.kill_all()
    assert left == []
    assert notes(launcher.folder, launcher.folder / "temporary") == []


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Yield a Slurm cluster of two hosts, and check that ranks leave no rendezvous files."""
    need("slurm", clusters.missing())
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        with clusters.cluster(Path(folder)) as made:
            yield made
        assert notes(Path(folder)) == []


@pytest.fixture(scope="module")
def warm_on_hosts(slurm: Cluster) -> Iterator[dict[str, str]]:
    """Yield the variables of warm programs. The hosts are in another PID namespace, so the warm
    process runs there."""
    warm = WarmPython(processes=1, enter=slurm.enter())
    try:
        yield dict(warm.environ())
    finally:
        warm.close()


def notes(*folders: Path) -> list[Path]:
    """Return the rendezvous files in `folders`."""
    return [note for folder in folders if folder.exists() for note in folder.glob(".shardwise-*")]


def run(launcher: Launcher, *words: str, **variables: str) -> Ran:
    """Run any program to its end, in the launcher's folder and with its mark."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = launcher.environ() | SETTINGS | variables
    process = subprocess.Popen(words, cwd=launcher.folder, env=environ, text=True, **pipes)
    return launcher.finish(process)


@pytest.fixture(scope="module")
def expected(warm: WarmPython) -> str:
    """Return the result of one plain process."""
    with tempfile.TemporaryDirectory() as folder:
        words = (sys.executable, script("parity"))
        ran = run(Launcher(Path(folder)), *words, **warm.environ())
    said, by = ran.out.rstrip().split(" by ")
    assert by == "python of 1", ran.err
    return said


def mpirun(component: str) -> str:
    name = MPI[component]
    need(component, None if shutil.which(name) else f"{name} is not installed")
    return name


OPEN_MPI, MPICH = ("openmpi", "Open MPI"), ("mpich", "MPICH")
BOTH = pytest.mark.parametrize(("component", "name"), [OPEN_MPI, MPICH])
OFTEN_ONE = pytest.mark.parametrize(
    ("component", "name"), [OPEN_MPI, pytest.param(*MPICH, marks=pytest.mark.full)]
)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@BOTH
def test_ranks_of_mpirun_train(
    here: Launcher,
    expected: str,
    component: str,
    name: str,
    ranks: int,
    request: pytest.FixtureRequest,
) -> None:
    if component == "openmpi":  # MPICH's ranks meet by the process that has started them
        request.getfixturevalue("warm_programs")
    ran = run(here, mpirun(component), "-n", str(ranks), sys.executable, script("parity"))
    assert (ran.code, ran.lines()) == (0, [f"{expected} by {name} of {ranks}"]), ran.err


@OFTEN_ONE
def test_example_for_mpirun(here: Launcher, expected: str, component: str, name: str) -> None:
    """This includes a wrapper script around each rank, so that ranks have no common parent."""
    (here.folder / "bin").mkdir()
    for command, words in (("mpirun", f"exec {mpirun(component)}"), ("python", sys.executable)):
        (here.folder / "bin" / command).write_text(f'#!/bin/sh\n{words} "$@"\nexit $?\n')
        (here.folder / "bin" / command).chmod(0o755)
    path = f"PATH={here.folder}/bin:{SETTINGS['PATH']}"
    ran = run(here, "env", path, str(EXAMPLES / "mpirun.sh"), "2", script("parity"))
    assert (ran.code, ran.lines()) == (0, [f"{expected} by {name} of 2"]), ran.err


@pytest.mark.parametrize("component", [pytest.param("openmpi", marks=pytest.mark.full), "mpich"])
def test_mpirun_ends_after_early_failure(here: Launcher, component: str) -> None:
    ran = run(here, mpirun(component), "-n", "2", sys.executable, script("never_joins"))
    assert ran.code != 0
    assert "rank 1 has no data" in ran.err
    if component == "mpich":  # Open MPI ends the others itself
        assert "Rank 1 of the 2 that MPICH started did not reach rank 0" in ran.err
        assert "has ended: look for its output" in ran.err


@WARM
def test_shardwise_run_and_torchrun(here: Launcher, expected: str) -> None:
    for words, name in (
        ((sys.executable, "-m", "shardwise", "run", "-n", "2"), "shardwise run"),
        ((TORCHRUN, "--standalone", "--nproc-per-node=2"), "torchrun"),
    ):
        ran = run(here, *words, script("parity"))
        assert ran.code == 0, ran.err
        assert f"{expected} by {name} of 2" in ran.out


@WARM
def test_ranks_with_variables_of_user_train(here: Launcher, expected: str) -> None:
    """No variable names their hosts, so the ranks find their local ranks when they meet."""
    each = "SHARDWISE_RANK=$r SHARDWISE_SIZE=2 SHARDWISE_RENDEZVOUS=$PWD/"
    line = f"for r in 0 1; do {each} {sys.executable} {script('parity')} & done; wait"
    ran = run(here, "sh", "-c", line)
    assert ran.out == f"{expected} by the user of 2\n", ran.err


@WARM
def test_refuses_two_processes_of_one_rank(here: Launcher) -> None:
    each = "SHARDWISE_RANK=$r SHARDWISE_SIZE=3 SHARDWISE_RENDEZVOUS=$PWD/"
    line = f"for r in 0 1 1; do {each} {sys.executable} {script('parity')} & done; wait"
    ran = run(here, "sh", "-c", line, SHARDWISE_TIMEOUT="20")
    assert "Two processes claim to be rank 1 of 3" in ran.err
    assert ran.out == ""


@WARM
def test_names_rank_without_device(here: Launcher) -> None:
    """Ranks that do not know their local rank meet before they choose a device."""
    each = "SHARDWISE_RANK=$r SHARDWISE_SIZE=2 SHARDWISE_RENDEZVOUS=$PWD/"
    device = "CUDA_VISIBLE_DEVICES= SHARDWISE_DEVICE=$([ $r = 1 ] && echo cuda || echo cpu)"
    line = f"for r in 0 1; do {each} {device} {sys.executable} {script('parity')} & done; wait"
    ran = run(here, "sh", "-c", line)
    assert "rank 0 of 2: Rank 1 cannot take part: 2 ranks run on this host, but only" in ran.err
    assert "rank 1 of 2: 2 ranks run on this host, but only 0 GPU(s) are visible" in ran.err
    assert ran.out == ""


@pytest.mark.full
def test_hydra_without_local_ranks(here: Launcher, expected: str) -> None:
    """Simulates old versions. Ranks find each other by the address of mpiexec."""
    line = f"unset MPI_LOCALRANKID MPI_LOCALNRANKS; exec {sys.executable} {script('parity')}"
    ran = run(here, mpirun("mpich"), "-n", "2", "sh", "-c", line)
    assert (ran.code, ran.lines()) == (0, [f"{expected} by PMI of 2"]), ran.err


def test_prterun(here: Launcher, expected: str) -> None:
    """PRRTE gives ranks only their number, so they ask its PMIx server for the rest."""
    need("prrte", None if shutil.which("prterun") else "prterun is not installed")
    words = ("prterun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable, script("parity"))
    ran = run(here, *words)
    assert (ran.code, ran.lines()) == (0, [f"{expected} by PMIx of 2"]), ran.err


@pytest.mark.full  # as prterun above
def test_ranks_ask_pmix_server(here: Launcher, expected: str) -> None:
    """Simulates prterun, which sets no Open MPI variables."""
    own = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    unset = [word for name in own for word in ("-u", name)]
    words = ("env", *unset, sys.executable, script("parity"))
    ran = run(here, mpirun("openmpi"), "-n", "2", *words)
    assert (ran.code, ran.lines()) == (0, [f"{expected} by PMIx of 2"]), ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("env", "-i", sys.executable, script("parity")), "(started by hydra_pmi_proxy)"),
        (
            (sys.executable, "-m", "shardwise", "run", script("parity")),
            "shardwise run was started 2 times: MPICH says PMI_RANK=",
        ),
    ],
)
def test_refuses_rank_of_unknown_launcher(
    here: Launcher, words: tuple[str, ...], said: str
) -> None:
    ran = run(here, mpirun("mpich"), "-n", "2", *words)
    assert ran.code != 0
    assert ran.err.count(said) == 2, ran.err
    assert ran.out == ""


FAULTS = ("OMP_NUM_THREADS=1", "SHARDWISE_WARN_AFTER=1", "SHARDWISE_TIMEOUT=4")
OTHERS = pytest.mark.parametrize(
    "other", ["openmpi", *(pytest.param(n, marks=pytest.mark.full) for n in ("mpich", "torchrun"))]
)


def started_by(other: str) -> list[str]:
    """Return the command of another launcher for three ranks of a script."""
    if other == "torchrun":
        return [TORCHRUN, "--standalone", "--nproc-per-node=3"]
    return [mpirun(other), "-n", "3", sys.executable]


@WARM
@OTHERS
def test_reports_rank_that_does_not_arrive(here: Launcher, other: str) -> None:
    ran = run(here, "env", *FAULTS, *started_by(other), script("watched"), "loop")
    assert ran.code != 0
    assert re.search(r"ranks 0, 2 have waited \d+ s in step 3 for rank 1\.", ran.err), ran.err
    assert re.search(r"rank 1 is in no collective, at .*watched\.py:(19|20)\n", ran.err), ran.err
    assert re.search(r"for rank 1, which did not join\. Rank 1 is in no collective, at", ran.err)


@WARM
@OTHERS
def test_killed_rank_ends_all(here: Launcher, other: str) -> None:
    ran = run(here, *started_by(other), script("watched"), "kill")
    assert ran.code != 0
    assert "signal 9" in ran.err or "SIGKILL" in ran.err or "EXIT CODE: 9" in ran.out, ran


@WARM
def test_doctor_on_one_host(here: Launcher) -> None:
    words = ("-m", "shardwise", "doctor", "-n", "2", "--offload-optimizer", "nvme:/no/where")
    ran = run(here, sys.executable, *words)
    assert ran.code == 1
    assert "[0] 2 ranks on 1 host, started by shardwise run" in ran.lines()
    assert "all-reduce of 2 ranks over shared memory: " in ran.out
    assert "/no/where: no such folder to offload to: /no/where. Create it." in ran.out


@WARM
def test_doctor_reports_impossible_settings(here: Launcher) -> None:
    words = (sys.executable, "-m", "shardwise", "doctor", "-n", "2", "--exact", "2")
    ran = run(here, *words, "--tensor", "2", "--schedule", "gpipe")
    assert ran.code == 1
    assert ran.out.startswith("[0] wrong: --exact 2 cannot be combined with --tensor 2")
    assert ran.out.count("wrong:") == 1
    assert "Traceback" not in ran.out + ran.err


class TestSlurm:
    @pytest.fixture
    def on(
        self, slurm: Cluster, tmp_path: Path, warm_on_hosts: dict[str, str]
    ) -> Callable[..., str]:
        """Return a function that runs a command on the first host in a new folder, and returns its
        output."""

        def submit(*words: str, **environ: str) -> str:
            ran = slurm.run(*words, cwd=tmp_path, env=SETTINGS | warm_on_hosts | environ)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert notes(tmp_path) == []
            return str(ran.stdout)

        return submit

    def test_srun_on_two_hosts(self, on: Callable[..., str], expected: str) -> None:
        """Three ranks: two on the first host, one on the second."""
        out = on("srun", "-N2", "-n3", "--distribution=block", sys.executable, script("parity"))
        assert out == f"{expected} by Slurm of 3\n"

    @pytest.mark.full
    def test_reports_rank_that_does_not_arrive(self, slurm: Cluster, tmp_path: Path) -> None:
        short = {"SHARDWISE_WARN_AFTER": "1", "SHARDWISE_TIMEOUT": "4"}
        words = ("srun", "-N2", "-n2", sys.executable, script("watched"), "loop")
        ran = slurm.run(*words, cwd=tmp_path, env=SETTINGS | short)
        assert ran.returncode != 0
        said = ran.stdout + ran.stderr
        assert re.search(r"rank 0 has waited \d+ s in step 3 for rank 1\.", said), said
        assert re.search(r"rank 1 is in no collective, at .*watched\.py:(19|20)\n", said), said

    def test_killed_rank_ends_all(
        self, slurm: Cluster, tmp_path: Path, warm_on_hosts: dict[str, str]
    ) -> None:
        words = ("srun", "-N2", "-n2", sys.executable, script("watched"), "kill")
        ran = slurm.run(*words, cwd=tmp_path, env=SETTINGS | warm_on_hosts)
        assert ran.returncode != 0
        assert "Rank 0 of 2 lost rank 1" in ran.stdout + ran.stderr

    def test_survives_lost_rank_of_other_host(
        self, slurm: Cluster, tmp_path: Path, warm_on_hosts: dict[str, str]
    ) -> None:
        """Our launcher starts the ranks, over srun."""
        words = ["-m", "shardwise", "run", "--survive", "1", "--zero", "2", script("survives")]
        command = shlex.join([sys.executable, *words, "steps", "sgd", "out", "1:backward:5"])
        (tmp_path / "job").write_text(f"#!/bin/sh\nexec {command}\n")
        flags = ("--output=said", "--nodes=2", "--ntasks-per-node=1")
        state = slurm.batch(*flags, "job", cwd=tmp_path, env=SETTINGS | warm_on_hosts)
        said = (tmp_path / "said").read_text()
        assert state == "COMPLETED", said
        assert "shardwise: rank 1 ended (" in said
        check(tmp_path, "sgd", [0])

    @pytest.fixture
    def batch(
        self, slurm: Cluster, tmp_path: Path, warm_on_hosts: dict[str, str]
    ) -> Callable[..., list[str]]:
        """Return a function that runs a batch job in a new folder, and returns its sorted lines."""

        def submit(*words: str) -> list[str]:
            environ = SETTINGS | warm_on_hosts
            state = slurm.batch("--output=out", *words, cwd=tmp_path, env=environ)
            written = (tmp_path / "out").read_text()
            assert state == "COMPLETED", written
            assert notes(tmp_path) == []
            return sorted(written.splitlines())

        return submit

    def test_example_for_sbatch(self, batch: Callable[..., list[str]], expected: str) -> None:
        example = str(EXAMPLES / "slurm.sbatch")
        lines = batch("--nodes=2", "--ntasks-per-node=1", example, script("parity"))
        assert lines == [f"0: {expected} by Slurm of 2"]

    def test_shardwise_run_uses_srun_on_two_hosts(
        self, batch: Callable[..., list[str]], expected: str
    ) -> None:
        command = f"{sys.executable} -m shardwise run --zero 2 {script('parity')}"
        lines = batch("--nodes=2", "--ntasks=2", f"--wrap={command}")
        assert lines == [f"0: {expected} by Slurm of 2"]

    def test_shardwise_run_starts_tasks_of_one_host(self, batch: Callable[..., list[str]]) -> None:
        command = f"{sys.executable} -m shardwise run echo here"
        lines = batch("--nodes=1", "--ntasks=2", f"--wrap={command}")
        assert lines == ["[0] here", "[1] here"]

    @pytest.mark.full  # of one host it is above, and two hosts are with srun
    def test_torchrun_on_two_hosts(self, on: Callable[..., str], expected: str) -> None:
        rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500")
        torchrun = (TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *rendezvous)
        out = on("srun", "-N2", "-n2", *torchrun, script("parity"))
        assert out == f"{expected} by torchrun of 2\n"

    @OFTEN_ONE
    def test_mpirun_on_two_hosts(
        self, on: Callable[..., str], expected: str, component: str, name: str
    ) -> None:
        inside = ("salloc", "-Q", "-N2", "-n2")
        out = on(*inside, mpirun(component), sys.executable, script("parity"))
        assert out == f"{expected} by {name} of 2\n"

    @pytest.mark.full  # for two hosts, see test_hosts.py
    def test_doctor_on_two_hosts(self, on: Callable[..., str]) -> None:
        out = on("srun", "-N2", "-n2", sys.executable, "-m", "shardwise", "doctor")
        rows = [line.split() for line in out.splitlines()]
        assert ["n1", "n2"] in rows
        assert ["network", "interface", "cable1", "cable2"] in rows
        assert "all-reduce of 2 ranks over gloo: " in out
        assert rows[-1] == ["Found", "nothing", "that", "would", "make", "a", "run", "fail."]
