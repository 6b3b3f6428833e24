"""Describes a run as it was asked for: what runs where, and how it is shown."""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from shardwise.launch import program
from shardwise.launch.console import Console
from shardwise.launch.local_workers import HostTask
from shardwise.launch.ssh import command
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.worker import WorkerStreams
from shardwise.launch.worker_output import WorkerOutput, open_logs
from shardwise.messages.printable import in_shell
from shardwise.net import environment
from shardwise.net.hosts import Share
from shardwise.net.python_command import python_words


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run where: on each host its `shares` of the ranks, with the settings in `flags`.

    `words` are as the user gave them, a `module` and its arguments or a program and its own.
    `port` 0 lets the kernel choose. `grace` is the seconds between asking and killing. `passed`
    are variables for the ranks. `restarts` is how often a run that failed starts again;
    `elastic_islands` how many islands it has of which each may end by itself. `shown`
    are the ranks whose output is on the screen, None for all of them; `log_dir` is where that of
    each is kept. `run` is a name that all its starts share, `secret` what only its processes know.
    """

    words: tuple[str, ...]
    shares: tuple[Share, ...]
    flags: Mapping[str, str]
    module: bool = False
    port: int = 0
    grace: float = 5.0
    restarts: int = 0
    elastic_islands: int = 0
    interface: str | None = None
    passed: Mapping[str, str] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    log_dir: str | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=environment.draw_secret, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(share.count for share in self.shares)

    @property
    def is_python(self) -> bool:
        """Whether it runs Python."""
        return self.module or program.is_script(self.words[0])

    @property
    def joins(self) -> bool:
        """Whether its ranks are expected to call sw.init: Python that is not asked for its help,
        nor has another options to join them."""
        asks = "--help" in self.words[1:] or self.words[1:] == ("-h",)
        return self.is_python and not asks and not program.joins_itself(self.words[0])

    def console(
        self, environ: Mapping[str, str], streams: Mapping[int, TextIO] | None = None
    ) -> Console:
        """The screen that this run needs; `streams` take the place of our descriptors 1 and 2."""
        piped = self.log_dir is not None or self.shown is not None or len(self.shares) > 1
        return Console(self.size, environ, piped=piped, streams=streams)

    def outputs(self, console: Console) -> list[WorkerOutput]:
        """Make the output of each rank. Raises LaunchError where logs cannot be written."""
        kept = open_logs(self.log_dir, self.size, self.words)
        return [
            WorkerOutput(rank, console, shown=self.shown is None or rank in self.shown, log=log)
            for rank, log in enumerate(kept)
        ]

    def task(
        self,
        share: Share,
        command: tuple[str, ...],
        console: Console,
        *,
        address: str,
        port: int,
        master_port: int,
        reads: bool = False,
    ) -> HostTask:
        """What the host of `share` is to run; with `reads`, rank 0 has our standard input."""
        shown = self.shown is None or 0 in self.shown
        outlet = WorkerStreams(
            piped=console.piped,
            drawn=console.drawn if shown else (),
            window=console.window(),
            reads=reads,
        )
        return HostTask(
            command=command,
            flags=self.flags,
            size=self.size,
            first=share.first,
            count=share.count,
            address=address,
            port=port,
            master_port=master_port,
            passed=self.passed,
            run=self.run,
            secret=self.secret,
            outlet=outlet,
        )


def dry_run_words(job: Job, options: SshOptions, here: Sequence[Share]) -> str:
    """Say for `--dry-run` which ranks would run where, by which commands.

    `here` are the shares of this host. Pure.
    """
    hosts = len(job.shares)
    rows = [
        (
            share.host.name,
            share.ranks,
            "here" if share in here else shlex.join(command.ssh_command(options, share.host)),
        )
        for share in job.shares
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    listens = f"port {job.port}" if job.port else "a port that is free"
    by = f" of interface {job.interface}" if job.interface else ""
    lines = [
        f"{job.size} rank{'s' * (job.size > 1)} on {hosts} host{'s' * (hosts > 1)}; "
        f"rank 0 listens on {job.shares[0].host.name}, on {listens}{by}",
        *(f"  {name:<{widths[0]}}  {ranks:<{widths[1]}}  {how}" for name, ranks, how in rows),
        f"each rank: {in_shell(_program_words(job, options))}",
        f"in folder: {options.folder}",
        f"settings: {in_shell(f'{name}={value}' for name, value in job.flags.items()) or 'none'}",
    ]
    if job.passed:
        lines.append(f"variables passed on: {', '.join(sorted(job.passed))}")
    if job.log_dir:
        lines.append(f"a log of each rank in: {job.log_dir}")
    return "\n".join(lines)


def _program_words(job: Job, options: SshOptions) -> list[str]:
    if job.module:
        return [*python_words(job.words[0], options.python), *job.words[1:]]
    return [options.python, *job.words] if job.is_python else list(job.words)
