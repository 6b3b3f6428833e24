"""Flags of the launcher that would change nothing on the way a run starts: refused. Pure."""

from collections.abc import Mapping
from typing import Any

from shardwise.config import flag
from shardwise.errors import LaunchError

_OF_HOSTS = ("ssh", "ssh_port", "python", "host_timeout")
_OF_OURS = ("grace", "port", *_OF_HOSTS)

HERE = "a run on this host alone"
SRUN = "the hosts of a Slurm job, which are srun's"
TORCH = "a run with --nnodes, whose ranks torch's elastic agent starts"

HAVE_NO = {
    HERE: {
        **dict.fromkeys(_OF_HOSTS, "give hosts with -H or --hostfile"),
        "rdzv_id": "give --nnodes, the number of hosts",
        "rendezvous": "start ranks by mpirun or srun, which it is for",
    },
    SRUN: dict.fromkeys(("grace", "rdzv_id", *_OF_HOSTS), "give hosts with -H or --hostfile"),
    TORCH: {
        **dict.fromkeys(_OF_OURS, "give hosts with -H instead of --nnodes"),
        "rendezvous": "start ranks by mpirun or srun, which it is for",
    },
}
"""By way a run starts: what has no effect there, and what to do instead of leaving it out."""


def refuse(way: str, given: Mapping[str, Any]) -> None:
    """Raise LaunchError for a flag in `given` (None where it was not) that has no effect."""
    for name, instead in HAVE_NO[way].items():
        if given.get(name) is not None:
            raise LaunchError(
                f"{flag(name)} {given[name]} has no effect in {way}: leave it out, or {instead}."
            )
