"""A Grid Engine cell of two hosts, n1 and n2, in namespaces of this machine.

sge_qmaster and both sge_execd are the real programs. Debian's installer creates one cell for an
entire machine. Here the cell is created manually, in a separate folder, in the same way as
`inst_sge` does.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system import two_hosts
from tests.system.two_hosts import Hosts

COMPONENTS = ("sge_qmaster", "sge_execd", "qsub", "qconf", "qrsh")
DAEMONS = ("sh", "sleep", "sge_qmaster", "sge_execd")
"""Names of the processes on hosts without a job."""

INSTALLED = Path("/var/lib/gridengine")
PROGRAMS = Path("/usr/lib/gridengine")
DEFAULTS = Path("/usr/share/gridengine")

BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {root}/default/common;{folder}/qmaster
binary_path {programs}
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 1
worker_threads 1
scheduler_threads 1
"""

CONFIGURATION = {
    "execd_spool_dir": "{folder}/spool",
    "mailer": "/bin/true",
    "min_uid": "0",  # jobs of root are permitted
    "min_gid": "0",
    "load_report_time": "00:00:01",
    # Jobs do not inherit the environment of the daemons.
    "execd_params": "INHERIT_ENV=false",
}
"""Differences from Debian's default configuration."""

SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "job_load_adjustments": "NONE",
    "queue_sort_method": "seqno",
}
"""Differences from the scheduler's default configuration."""

PARALLEL_ENVIRONMENT = """\
pe_name            mpi
slots              8
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $round_robin
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""

QUEUE = {
    "qname": "all.q",
    "hostlist": "n1 n2",
    "seq_no": "1,[n2=2]",
    "load_thresholds": "NONE",  # this machine may be busy
    "pe_list": "mpi",
    "slots": "4",
    # Grid Engine removes a job's folder there from each host, and these share /tmp.
    "tmpdir": "{folder}/tmp1,[n2={folder}/tmp2]",
}
"""Differences from the default queue."""

START = """\
export SGE_ND=1  # do not become daemons
sge_qmaster &
until qconf -sh; do sleep 0.02; done >/dev/null 2>&1
qconf -ah n2
qconf -as n1,n2
qconf -ssconf | sed -f "$1/scheduler.sed" >"$1/scheduler"
qconf -Msconf "$1/scheduler"
qconf -Ap "$1/pe"
qconf -sq | sed -f "$1/queue.sed" >"$1/queue"
qconf -Aq "$1/queue"
sge_execd &
on_other sge_execd &
"""


class GridEngine(Hosts):
    """A running cell."""

    def batch(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Submit a job and wait for its end; the exit code is the job's."""
        return self.run("qsub", "-sync", "y", *words, **options)


@contextmanager
def grid_engine(folder: Path) -> Iterator[GridEngine]:
    """Yield a cell whose files are in `folder`, and end it."""
    root = folder / "sge"
    common = root / "default" / "common"
    for made in (common, *(folder / name for name in ("qmaster", "spool", "tmp1", "tmp2"))):
        made.mkdir(parents=True)
    for name in ("bin", "lib", "util", "utilbin"):
        (root / name).symlink_to(INSTALLED / name)
    bootstrap = BOOTSTRAP.format(root=root, folder=folder, programs=PROGRAMS)
    (common / "bootstrap").write_text(bootstrap)
    (common / "act_qmaster").write_text("n1\n")
    (folder / "pe").write_text(PARALLEL_ENVIRONMENT)
    (folder / "scheduler.sed").write_text(_sed(SCHEDULER, folder))
    (folder / "queue.sed").write_text(_sed(QUEUE, folder))
    configuration = (DEFAULTS / "default-configuration").read_text()
    for name, value in CONFIGURATION.items():
        line = f"{name} {value.format(folder=folder)}"
        configuration = re.sub(rf"^{name}\s.*$", line, configuration, flags=re.MULTILINE)
    (folder / "configuration").write_text(configuration)
    environ = {
        "SGE_ROOT": str(root),
        "SGE_CELL": "default",
        # The hosts have their own network, so every port is free.
        "SGE_QMASTER_PORT": "6444",
        "SGE_EXECD_PORT": "6445",
    }
    resources = DEFAULTS / "util" / "resources"
    for words in (
        ("spoolinit", "classic", "libspoolc", f"{common};{folder}/qmaster", "init"),
        ("spooldefaults", "configuration", str(folder / "configuration")),
        ("spooldefaults", "complexes", str(resources / "centry")),
        ("spooldefaults", "usersets", str(resources / "usersets")),
        ("spooldefaults", "managers", "root"),
    ):
        program = str(PROGRAMS / words[0])
        subprocess.run([program, *words[1:]], env=environ, check=True, capture_output=True)
    with two_hosts.start(GridEngine, folder, START, environ, _is_ready) as found:
        yield found


def _sed(changes: dict[str, str], folder: Path) -> str:
    """Return a sed script that sets lines `name value`."""
    return "".join(
        f"s|^{name} .*|{name} {value.format(folder=folder)}|\n" for name, value in changes.items()
    )


def _is_ready(made: GridEngine) -> bool:
    """Return whether both hosts report their load, so that they accept jobs."""
    shown = made.run("qstat", "-f").stdout
    return len(re.findall(r"^all\.q@n[12] .* lx-\S+ *$", shown, flags=re.MULTILINE)) == 2


def missing() -> str | None:
    """Return why a cell is impossible on this machine, or None if it is possible."""
    return two_hosts.missing(*COMPONENTS)
