"""The job scripts of examples/cluster, in the environments that the schedulers give them.

Grid Engine's also runs in a real job (test_grid_engine.py).
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.system.launcher import Launcher
from tests.system.test_launchers import EXAMPLES, SETTINGS, run

SCRIPTS = EXAMPLES / "cluster"
ARGUMENTS = ("--dry-run", "train.py", "--epochs", "3")
TRAIN = {"TRAIN": " ".join(ARGUMENTS)}
SLOTS = "n1\nn1\nn2\nn2\n"
FLUX = """\
#!/bin/sh
[ "$*" = "hostlist --expand --delimiter=, instance" ] && echo n1,n2
"""


@pytest.mark.parametrize(
    ("name", "hosts", "environ", "words", "transport"),
    [
        ("pbs.sh", ("PBS_NODEFILE", SLOTS), TRAIN, (), "ssh"),
        ("lsf.sh", ("LSB_DJOB_HOSTFILE", SLOTS), TRAIN, (), "ssh"),
        (
            "grid_engine.sh",
            ("PE_HOSTFILE", "n1 2 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\n"),
            {},
            ARGUMENTS,
            "qrsh -inherit n2 ",
        ),
        ("flux.sh", None, {"RANKS": "2"}, ARGUMENTS, "ssh"),
    ],
    ids=["pbs", "lsf", "grid_engine", "flux"],
)
def test_job_script_starts_ranks_on_hosts_of_job(
    tmp_path: Path,
    name: str,
    hosts: tuple[str, str] | None,
    environ: Mapping[str, str],
    words: tuple[str, ...],
    transport: str,
) -> None:
    (tmp_path / "train.py").touch()
    known = {"VENV": str(Path(sys.executable).parents[1]), "PBS_O_WORKDIR": str(tmp_path)}
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts[1])
        known[hosts[0]] = str(tmp_path / "hosts")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flux").write_text(FLUX)
    (tmp_path / "bin" / "flux").chmod(0o755)
    known["PATH"] = f"{tmp_path}/bin:{SETTINGS['PATH']}"
    ran = run(Launcher(tmp_path), str(SCRIPTS / name), *words, **known, **environ)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("4 ranks on 2 hosts; rank 0 listens on n1"), ran.out
    assert f"  n2  ranks 2-3  {transport}" in ran.out
    assert "train.py --epochs 3\n" in ran.out
