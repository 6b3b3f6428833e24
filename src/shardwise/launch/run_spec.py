"""The description of a run. It is created once, and sent to the agent of each host.

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
from shardwise.launch.worker_output import WorkerOutput, open_logs
from shardwise.net import environment
from shardwise.net.hosts import Share
from shardwise.net.identity import Identity


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The program, the hosts and the options of a run.

    Args:
        words: A module or a program with its arguments, as the user gave them.
        module: Whether `words` name a module.
        flags: The settings from the command line, as texts.
        passed: Variables for all ranks. They override the variables of a host.
        size: The number of ranks.
        shares: The ranks of each host. An agent only gets the share of its own host.
        port: The port of rank 0; 0 lets the kernel choose.
        interface: The network interface between hosts, if the user named one.
        folder: The working directory of agents and ranks on other hosts.
        python: The Python interpreter of agents.
        ssh: The words of the ssh command, with the user's flags.
        ssh_port: The port of ssh; None for the default.
        patience: Seconds of silence after which a host counts as lost.
        grace: Seconds between SIGTERM and SIGKILL when the run ends.
        restarts: The limit of restarts after failures.
        parts: The number of parts that may end and restart independently; 0 without such parts.
        agent: The module that runs on each host.
        shown: The ranks whose output is shown; None for all.
        log_dir: The folder of the logs.
        run: A name that all starts of the run share, and no other run has.
        secret: The key that the processes of the run authenticate each other with.
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
        """The ranks of this host. Only for a run on one host, or in an agent."""
        (share,) = self.shares
        return share

    def for_share(self, share: Share) -> "RunSpec":
        """Return the spec for the host of `share`."""
        # Sending all shares to all hosts would cost the square of their number.
        return replace(self, shares=(share,))

    @property
    def is_python(self) -> bool:
        """Whether the program is Python."""
        return self.module or program.is_script(self.words[0])

    @property
    def joins(self) -> bool:
        """Whether the ranks are expected to call sw.init.

        They are not if the program is not Python, only prints its help, or uses torch.distributed.
        """
        asks = "--help" in self.words[1:] or self.words[1:] == ("-h",)
        return self.is_python and not asks and not program.joins_itself(self.words[0])

    def shows(self, rank: int) -> bool:
        """Return whether the output of `rank` is shown on the screen."""
        return self.shown is None or rank in self.shown

    def console(
        self, environ: Mapping[str, str], streams: Mapping[int, TextIO] | None = None
    ) -> Console:
        """Return the screen of this run. `streams` replace descriptors 1 and 2 of this process."""
        piped = self.log_dir is not None or self.shown is not None or len(self.shares) > 1
        return Console(self.size, environ, piped=piped, streams=streams)

    def outputs(self, console: Console) -> list[WorkerOutput]:
        """Return the output of each rank. Raises LaunchError if logs cannot be written."""
        logs = open_logs(self.log_dir, self.size, self.words)
        return [
            WorkerOutput(rank, console, shown=self.shows(rank), log=log)
            for rank, log in enumerate(logs)
        ]

    def streams(self, console: Console, *, reads: bool = False) -> WorkerStreams:
        """Return the streams of rank 0. With `reads` it reads our standard input."""
        drawn = console.drawn if self.shows(0) else ()
        return WorkerStreams(piped=console.piped, drawn=drawn, window=console.window(), reads=reads)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The place of the rendezvous.

    Args:
        address: The address of rank 0.
        port: The port of rank 0.
        master_port: Another free port there, for torch's own rendezvous.
        interface: The network interface of this host to the other hosts; None for one host.
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
) -> dict[str, str]:
    """Return all variables of one rank. Pure.

    Variables that the user has set win over our defaults for threads, interface and fault handler.

    Args:
        spec: The run.
        identity: The rank.
        meeting: The place of the rendezvous.
        base: The variables of this host.
        reports: The folder for error files.
        cores: The number of cores of this host.
        columns: The width of a line on the terminal, if there is one.
    """
    # Drop variables of an outer run: the rank would take its identity from them.
    kept = {
        name: value
        for name, value in {**base, **spec.passed}.items()
        if not environment.is_foreign(name)
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // identity.local_size)),
        "PYTHONFAULTHANDLER": "1",  # print Python stacks after a crash in native code
    }
    if meeting.interface is not None:
        leads = meeting.interface
        defaults |= {"GLOO_SOCKET_IFNAME": leads, "NCCL_SOCKET_IFNAME": leads}
    elif identity.local_size == identity.size:
        # Otherwise Gloo resolves the host's name, which may fail or lead to a slow interface.
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    given = {
        "PYTHONUNBUFFERED": "1",
        FLAGS_VARIABLE: json.dumps(dict(spec.flags)),
        environment.REPORTS_VARIABLE: str(reports),
        environment.RUN_VARIABLE: spec.run,
        environment.RUN_SECRET_VARIABLE: spec.secret,
        # torchrun's variables, for scripts and libraries that read them.
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_size),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.master_port),
    }
    if columns is not None:
        given["COLUMNS"] = str(columns)
    # Weakest first: our defaults, the user's variables, and what a rank of this run must have.
    return defaults | kept | given | environment.identity_variables(identity)
