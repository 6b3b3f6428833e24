"""Runs torch's elastic agent, for runs that the user starts on each host, as with torchrun.

    on each host:   shardwise run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node1:29500 train.py

The agents wait until between MIN and MAX hosts have joined, and assign ranks. After a failure, they
restart all ranks on the remaining hosts.
"""

import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shardwise.config import FLAGS_VARIABLE, values
from shardwise.errors import LaunchError
from shardwise.net import environment, network
from shardwise.net.python_command import python_words

if TYPE_CHECKING:  # imports torch
    from shardwise.net.torchrun_store import HostStore


@dataclass(frozen=True, kw_only=True)
class ElasticRendezvous:
    """Rendezvous options for torch's elastic agent.

    Args:
        fewest: Minimum number of hosts.
        most: Maximum number of hosts.
        host: Host of the rendezvous, or None for a run on a single host.
        port: Port of the rendezvous.
        node_rank: Index of this host, or None to number hosts in order of arrival.
        name: Name that distinguishes runs that use the same rendezvous endpoint.
        store: If torchrun has started this command on each host, its store, which also is at `host`
            and `port`. The first host then listens on another port.
    """

    fewest: int
    most: int
    host: str | None
    port: int
    node_rank: int | None
    name: str
    store: "HostStore | None" = None

    @property
    def origin(self) -> str:
        """The flag or the environment variable that provides `host`."""
        return "--rdzv-endpoint" if self.store is None else "MASTER_ADDR"

    @classmethod
    def of(
        cls, nnodes: str, endpoint: str | None, node_rank: int | None, name: str
    ) -> "ElasticRendezvous":
        """Return the rendezvous for these flags. Raises LaunchError if a flag is invalid.

        Args:
            nnodes: Value of `--nnodes`, as N or MIN:MAX.
            endpoint: Value of `--rdzv-endpoint`, as HOST:PORT.
            node_rank: Value of `--node-rank`.
            name: Value of `--rdzv-id`.
        """
        count = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes, re.ASCII)
        fewest, most = (int(count[1]), int(count[2] or count[1])) if count else (0, 0)
        if not 0 < fewest <= most:
            raise LaunchError(
                f"--nnodes takes a number of hosts, or MIN:MAX such as 2:4, not {nnodes!r}."
            )
        if node_rank is not None and (fewest < most or node_rank >= most):
            raise LaunchError(
                f"--node-rank {node_rank} does not fit --nnodes {nnodes}: it needs a fixed number "
                "of hosts N, and takes 0 to N - 1. Leave it out to number the hosts automatically."
            )
        if endpoint is None and most > 1:
            raise LaunchError(
                f"--nnodes {nnodes}: the hosts need an address to connect to. Add the same "
                "--rdzv-endpoint HOST:PORT on all of them, where HOST is one of the hosts and "
                "PORT is free on it."
            )
        host, port = (None, 0) if endpoint is None else _place(endpoint)
        return cls(fewest=fewest, most=most, host=host, port=port, node_rank=node_rank, name=name)


def agent_command(
    meeting: ElasticRendezvous,
    command: Sequence[str],
    *,
    per_host: int,
    restarts: int,
    address: str | None,
    log_dir: str | None,
) -> list[str]:
    """Return the command that starts torch's agent on this host. Does no I/O.

    Args:
        meeting: The rendezvous options.
        command: The command of each rank.
        per_host: Number of ranks on this host.
        restarts: Maximum number of restarts.
        address: Address of this host for the other hosts, or None to let torch choose.
        log_dir: Folder for each rank's output, or None.
    """
    found = [*python_words("torch.distributed.run")]
    found += [f"--nnodes={meeting.fewest}:{meeting.most}", f"--nproc-per-node={per_host}"]
    if meeting.host is None:
        found += ["--standalone"]
    else:
        bracketed = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
        # torch's c10d backend ignores --node-rank, so use the static backend with --node-rank.
        numbered = meeting.node_rank is not None
        found += [f"--rdzv-backend={'static' if numbered else 'c10d'}"]
        found += [f"--rdzv-endpoint={bracketed}:{meeting.port}", f"--rdzv-id={meeting.name}"]
        found += [f"--node-rank={meeting.node_rank}"] if numbered else []
    found += [f"--max-restarts={restarts}"]
    found += [f"--local-addr={address}"] if address is not None else []
    found += [f"--log-dir={log_dir}", "--tee=3"] if log_dir is not None else []
    return [*found, "--no-python", *command]  # `command` already includes the interpreter


def own_address(meeting: ElasticRendezvous, name: str | None) -> str | None:
    """Return the address at which other hosts can reach this one.

    If `name` is given, this is the address of that network interface. Otherwise it is the local
    address of the route to the rendezvous. Returns None if there is no rendezvous host, or if the
    address is a loopback address and the run has several hosts.
    """
    if name is not None:
        return network.address_of_interface(name)
    if meeting.host is None:
        return None
    found = network.address_towards(meeting.host)
    local = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    # Other hosts cannot reach a loopback address, so let torch choose one.
    return None if local and meeting.most > 1 else found


def agent_environment(
    base: Mapping[str, str], settings: Mapping[str, str], leads: str | None
) -> dict[str, str]:
    """Return the environment variables for the agent and its ranks.

    Args:
        base: This process's variables.
        settings: Settings from the command line.
        leads: Network interface that leads to the other hosts, or None if unknown.
    """
    # Hide warnings of torch's store about addresses that do not resolve to a name.
    defaults = {"PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if leads is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": leads, "NCCL_SOCKET_IFNAME": leads}
    given = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(settings))}
    kept = {name: value for name, value in base.items() if name not in environment.BY_HAND}
    return defaults | kept | given


def open_agent_warning(meeting: ElasticRendezvous, environ: Mapping[str, str]) -> str:
    """Return a warning that torch's agent accepts connections without authentication."""
    warning = (
        "torch's elastic agent, which --nnodes uses, listens on all interfaces without "
        "authentication: anybody who reaches it can run code as this user. Close its ports as in "
        "docs/security.md."
    )
    if meeting.most > 1 and environment.SECRET_VARIABLE not in environ:
        warning += (
            f" To protect the ranks themselves, set the same {environment.SECRET_VARIABLE} on all "
            "hosts, such as the output of openssl rand -hex 32."
        )
    return warning


def run(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process with the agent, which then handles Ctrl-C and sets the exit code."""
    # exec discards buffered output.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(environ))


def _place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = values.port(port)
    if not host or number is None:
        raise LaunchError(
            f"--rdzv-endpoint takes HOST:PORT, such as node1:29500 or [fd00::1]:29500, not "
            f"{endpoint!r}."
        )
    return host, number
