"""Defines the description of a run. It is created once and sent to the agent on each host.

command line ─▶ RunSpec ─▶ JSON to each agent ─▶ the environment of each rank
"""

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from shardwise.config import FLAGS_VARIABLE
from shardwise.launch import program
from shardwise.launch.console import Console
from shardwise.launch.worker import WorkerStreams
from shardwise.launch.worker_output import WorkerOutput, open_log
from shardwise.net import environment
from shardwise.net.hosts import Share
from shardwise.net.identity import Identity

LOST_SLACK = 7.0
"""Seconds beyond `patience` after which a silent host has certainly ended its ranks.

If the host's agent is stopped, its orphan reaper waits for `REAPER_SLACK` (ssh/agent.py) and two
beats more, and then for `PATIENCE` (orphan_reaper.py) between SIGTERM and SIGKILL.
"""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The program, the hosts and the options of a run.

    Args:
        words: The program or module and its arguments, as given by the user.
        module: True if it is a module.
        flags: Settings from the command line, as text.
        passed: Environment variables for all ranks. They override variables of the host.
        size: Number of ranks.
        shares: The ranks of each host. An agent receives only its host's share.
        port: Port of rank 0, or 0 to let the kernel choose.
        interface: Network interface between hosts, or None if the user did not choose one.
        folder: Working directory of agents and ranks on other hosts.
        python: Python interpreter for the agents.
        ssh: The ssh command, including the user's flags.
        ssh_port: Port of the ssh servers, or None for the default.
        patience: Maximum number of seconds without a message before a host is considered lost.
        grace: Seconds between SIGTERM and SIGKILL when ranks are stopped.
        restarts: Maximum number of restarts after failures.
        parts: Number of parts that stop and restart independently, or 0 if there are no parts.
        agent: Module that runs as the agent on each host.
        shown: Ranks whose output is shown, or None for all.
        log_dir: Folder for log files, or None.
        run: Unique name of the run. It stays the same across restarts.
        secret: Key that the processes of the run use to authenticate each other. If it is "", each
            agent derives it from the user's secret, because the connection to it is not encrypted.
    """

    words: tuple[str, ...]
    module: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    passed: Mapping[str, str] = field(default_factory=dict)
    size: int
    shares: tuple[Share, ...]
    port: int = 0
    interface: str | None = None
    folder: str = ""
    python: str = sys.executable
    ssh: tuple[str, ...] = ("ssh",)
    ssh_port: int | None = None
    patience: float = 10.0
    grace: float = 5.0
    restarts: int = 0
    parts: int = 0
    agent: str = "shardwise.launch.ssh.agent"
    shown: tuple[int, ...] | None = None
    log_dir: str | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=environment.draw_secret, repr=False)

    @property
    def share(self) -> Share:
        """This host's ranks. Valid only in an agent, or if the run has a single host."""
        (share,) = self.shares
        return share

    def for_share(self, share: Share) -> "RunSpec":
        """Return the spec to send to the host of `share`."""
        # Sending all shares to all hosts would need space quadratic in the number of hosts.
        return replace(self, shares=(share,))

    @property
    def is_python(self) -> bool:
        return self.module or program.is_script(self.words[0])

    @property
    def joins(self) -> bool:
        """True if the ranks are expected to call sw.init.

        False if the program is not Python, only prints its help, or uses torch.distributed itself.
        """
        asks = "--help" in self.words[1:] or self.words[1:] == ("-h",)
        return self.is_python and not asks and not program.joins_itself(self.words[0])

    @property
    def survives(self) -> bool:
        """True if the other ranks continue after one of them was killed (`--survive`)."""
        return self.flags.get("survive", "0") != "0"

    @property
    def lost_after(self) -> float:
        """Seconds of silence after which a host has certainly ended its ranks."""
        return self.patience + LOST_SLACK

    @property
    def spares(self) -> int:
        """Number of ranks that wait to replace lost ones (`--spares`)."""
        return int(self.flags.get("spares", "0")) if self.survives and self.size > 1 else 0

    def shows(self, rank: int) -> bool:
        """Return whether the output of `rank` is shown."""
        return self.shown is None or rank in self.shown

    def console(
        self, environ: Mapping[str, str], streams: Mapping[int, TextIO] | None = None
    ) -> Console:
        """Return the console of this run.

        Args:
            environ: Environment variables, which describe the terminal.
            streams: Python streams that replace descriptors 1 and 2 of this process.
        """
        piped = self.log_dir is not None or self.shown is not None or len(self.shares) > 1
        return Console(self.size + self.spares, environ, piped=piped, streams=streams)

    def outputs(self, console: Console) -> list[WorkerOutput]:
        """Create the WorkerOutput of each rank. Raises LaunchError if logs cannot be written."""
        return [self.output_of(rank, console) for rank in range(self.size + self.spares)]

    def output_of(self, rank: int, console: Console) -> WorkerOutput:
        """Create the WorkerOutput of `rank`, which may be one that is added to the run."""
        ranks = max(self.size + self.spares, rank + 1)
        log = open_log(self.log_dir, rank, ranks, self.words)
        return WorkerOutput(rank, console, shown=self.shows(rank), log=log)

    def streams(self, console: Console, *, reads: bool = False) -> WorkerStreams:
        """Return rank 0's standard streams.

        Args:
            console: Writes the output of the run.
            reads: True if rank 0 reads the launcher's standard input.
        """
        drawn = console.drawn if self.shows(0) else ()
        return WorkerStreams(piped=console.piped, drawn=drawn, window=console.window(), reads=reads)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address and ports at which ranks connect to rank 0.

    Args:
        address: Address of rank 0.
        port: Port of rank 0.
        master_port: A second free port on the same host, for torch's own rendezvous.
        interface: This host's network interface to the other hosts, or None on a single host.
    """

    address: str
    port: int
    master_port: int
    interface: str | None = None


def rank_environment(
    spec: RunSpec,
    identity: Identity,
    meeting: Meeting,
    base: Mapping[str, str],
    *,
    reports: Path,
    cores: int,
    columns: int | None = None,
    spare: str = "",
) -> dict[str, str]:
    """Return all environment variables of one rank. Does no I/O.

    Variables that the user has set override the defaults for the number of threads, the network
    interface and faulthandler.

    Args:
        spec: The run.
        identity: The rank.
        meeting: Address and ports of the rendezvous.
        base: Environment variables of this host.
        reports: Folder for error files.
        cores: Number of cores of this host.
        columns: Terminal width, excluding the prefix, or None if there is no terminal.
        spare: If the rank joins the others later: whether it replaces a lost one.
    """
    # Drop variables of an outer run, because they would give the rank a wrong identity.
    kept = {
        name: value
        for name, value in {**base, **spec.passed}.items()
        if not environment.is_foreign(name)
    }
    defaults = {
        # A spare waits until it can take the cores of a lost rank.
        "OMP_NUM_THREADS": str(max(1, cores // (spec.size if spare else identity.local_size))),
        "PYTHONFAULTHANDLER": "1",  # print Python stacks after a crash in native code
    }
    if meeting.interface is not None:
        leads = meeting.interface
        defaults |= {"GLOO_SOCKET_IFNAME": leads, "NCCL_SOCKET_IFNAME": leads}
    elif identity.local_size == identity.size:
        # Use loopback. By default, Gloo resolves the host's name, which may fail or select a slow
        # interface.
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    given = {
        "PYTHONUNBUFFERED": "1",
        FLAGS_VARIABLE: json.dumps(dict(spec.flags)),
        environment.REPORTS_VARIABLE: str(reports),
        environment.RUN_VARIABLE: spec.run,
        environment.RUN_SECRET_VARIABLE: spec.secret,
        # The variables that torchrun sets, for scripts and libraries that read them.
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_size),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.master_port),
    }
    if spec.survives:
        given[environment.SURVIVES_VARIABLE] = str(spec.spares)
        if identity.local_size < identity.size:
            given[environment.LOST_AFTER_VARIABLE] = str(spec.lost_after)
    if spare:
        given[environment.SPARE_VARIABLE] = spare
    if columns is not None:
        given["COLUMNS"] = str(columns)
    # In order of precedence, lowest first: defaults, the user's variables, required variables.
    return defaults | kept | given | environment.identity_variables(identity)
