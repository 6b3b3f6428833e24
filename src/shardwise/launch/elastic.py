"""Runs torch's elastic agent, for runs that are started on each host by itself, like torchrun's.

    on each:   shardwise run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node1:29500 train.py

The agent counts the hosts that have come, numbers the ranks, and after a failure starts all of
them again with the hosts that are there, between MIN and MAX of them.
"""

import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardwise.config import FLAGS_VARIABLE, values
from shardwise.errors import LaunchError
from shardwise.net import environment, network
from shardwise.net.python_command import python_words


@dataclass(frozen=True, kw_only=True)
class ElasticRendezvous:
    """How `fewest` to `most` hosts find each other: at `host` and `port`, None for one host alone.

    With `node_rank` they are numbered beforehand, else in the order of their coming.
    """

    fewest: int
    most: int
    host: str | None
    port: int
    node_rank: int | None
    name: str

    @classmethod
    def of(
        cls, nnodes: str, endpoint: str | None, node_rank: int | None, name: str
    ) -> "ElasticRendezvous":
        """The meeting that flags describe. Raises LaunchError where they cannot be."""
        count = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes, re.ASCII)
        fewest, most = (int(count[1]), int(count[2] or count[1])) if count else (0, 0)
        if not 0 < fewest <= most:
            raise LaunchError(
                f"--nnodes {nnodes}: write a number of hosts, or MIN:MAX, such as 2:4."
            )
        if node_rank is not None and (fewest < most or node_rank >= most):
            raise LaunchError(
                f"--node-rank {node_rank} with --nnodes {nnodes}: numbers from 0 to one less than "
                "the number of hosts, which must be fixed. Leave it out, and they are given."
            )
        if endpoint is None and most > 1:
            raise LaunchError(
                f"--nnodes {nnodes}: hosts must know where to meet. Add --rdzv-endpoint HOST:PORT, "
                "alike on all of them, with a port that is free on HOST, which is one of them."
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
    """The command that is torch's agent for this host, which others reach at `address`. Pure."""
    found = [*python_words("torch.distributed.run")]
    found += [f"--nnodes={meeting.fewest}:{meeting.most}", f"--nproc-per-node={per_host}"]
    if meeting.host is None:
        found += ["--standalone"]
    else:
        bracketed = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
        numbered = meeting.node_rank is not None
        found += [f"--rdzv-backend={'static' if numbered else 'c10d'}"]
        found += [f"--rdzv-endpoint={bracketed}:{meeting.port}", f"--rdzv-id={meeting.name}"]
        found += [f"--node-rank={meeting.node_rank}"] if numbered else []
    found += [f"--max-restarts={restarts}"]
    found += [f"--local-addr={address}"] if address is not None else []
    found += [f"--log-dir={log_dir}", "--tee=3"] if log_dir is not None else []
    return [*found, "--no-python", *command]


def own_address(meeting: ElasticRendezvous, name: str | None) -> str | None:
    """The address of this host for the others: of interface `name`, else of the way to them.

    None where the route does not say: on the host where they meet, by a name that is local to it.
    """
    if name is not None:
        return network.address_of_interface(name)
    if meeting.host is None:
        return None
    found = network.address_towards(meeting.host)
    local = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    return None if local and meeting.most > 1 else found


def agent_environment(
    base: Mapping[str, str], settings: Mapping[str, str], leads: str | None
) -> dict[str, str]:
    """The variables that the agent passes on; `leads` is the interface to the others."""
    # torch's store warns of every rank whose host has no name by its address.
    defaults = {"PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if leads is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": leads, "NCCL_SOCKET_IFNAME": leads}
    given = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(settings))}
    kept = {name: value for name, value in base.items() if name not in environment.BY_HAND}
    return defaults | kept | given


def exposed(meeting: ElasticRendezvous, environ: Mapping[str, str]) -> str:
    """What torch's agent leaves open, for who starts it. Pure."""
    said = (
        "torch's elastic agent, which --nnodes uses, listens on all interfaces and believes who "
        "connects: whoever reaches it can run code as this user. docs/security.md says how to shut "
        "its ports."
    )
    if meeting.most > 1 and environment.SECRET_VARIABLE not in environ:
        said += (
            f" For the ranks themselves, start every host with the same "
            f"{environment.SECRET_VARIABLE}, such as openssl rand -hex 32 prints."
        )
    return said


def run(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the agent, so that Ctrl-C and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(environ))


def _place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = values.port(port)
    if not host or number is None:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint}: write HOST:PORT, such as node1:29500 or [fd00::1]:29500."
        )
    return host, number
