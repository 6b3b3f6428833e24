"""The environment of a rank: the launcher's own, less what would mislead it, plus who it is."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwise.config import FLAGS_VARIABLE
from shardwise.launch import own, report
from shardwise.launch.identity import Identity

FOREIGN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""Variables of an outer run that would tell a rank that it is someone else."""

FOREIGN_PREFIXES = ("TORCHELASTIC_", own.PREFIX)


def of_rank(
    base: Mapping[str, str],
    identity: Identity,
    *,
    flags: Mapping[str, str],
    reports: Path,
    cores: int,
    columns: int | None = None,
    interface: str | None = None,
    run: str = "",
    secret: str = "",
    master_port: int | None = None,
) -> dict[str, str]:
    """The variables of one rank. Pure; `columns` is the width of its lines, where known.

    `interface` is the network interface that leads to the other hosts, None on one host; `run` is
    the name that all starts of the run share, `secret` what only its processes know; `master_port`
    is where torch's own rendezvous may listen. What the user has set stays: threads per rank, the
    interface, fault handling.
    """
    values = {name: value for name, value in base.items() if not is_foreign(name)}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // identity.local_size)),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code shows its Python lines
    }
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    elif identity.local_size == identity.size:
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    told = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(flags))}
    if run:
        told[own.RUN] = run
    if secret:
        told[own.SECRET] = secret
    if master_port is not None:
        told |= _as_torchrun(identity, master_port)
    if columns is not None:
        told["COLUMNS"] = str(columns)
    return defaults | values | told | own.environment(identity) | dict(report.environment(reports))


def _as_torchrun(identity: Identity, master_port: int) -> dict[str, str]:
    """What scripts and libraries read that know torchrun."""
    return {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_size),
        "MASTER_ADDR": str(identity.address),
        "MASTER_PORT": str(master_port),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_foreign(name: str) -> bool:
    """Whether a variable tells a process which rank it is."""
    return name in FOREIGN or name.startswith(FOREIGN_PREFIXES)
