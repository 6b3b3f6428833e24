"""A run as it was asked for, and how it is shown."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.launch import program, secret
from shardwise.launch.child import Outlet
from shardwise.launch.console import Console
from shardwise.launch.crew import Task
from shardwise.launch.hosts import Share
from shardwise.launch.voice import Voice, logs


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run where: on each host its `shares` of the ranks, with the settings in `flags`.

    `words` are as the user gave them, a `module` and its arguments or a program and its own.
    `port` 0 lets the kernel choose. `grace` is the seconds between asking and killing. `passed`
    are variables for the ranks. `restarts` is how often a run that failed starts again. `shown`
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
    interface: str | None = None
    passed: Mapping[str, str] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    log_dir: str | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=secret.drawn, repr=False)

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
        nor has another way to join them."""
        asks = "--help" in self.words[1:] or self.words[1:] == ("-h",)
        return self.is_python and not asks and not program.joins_itself(self.words[0])

    def console(self, environ: Mapping[str, str]) -> Console:
        """The screen that this run needs."""
        piped = self.log_dir is not None or self.shown is not None or len(self.shares) > 1
        return Console(self.size, environ, piped=piped)

    def voices(self, console: Console) -> list[Voice]:
        """A voice for each rank. Raises LaunchError where logs cannot be written."""
        kept = logs(self.log_dir, self.size, self.words)
        return [
            Voice(rank, console, shown=self.shown is None or rank in self.shown, log=log)
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
    ) -> Task:
        """What the host of `share` is to run; with `reads`, rank 0 has our standard input."""
        shown = self.shown is None or 0 in self.shown
        outlet = Outlet(
            piped=console.piped,
            drawn=console.drawn if shown else (),
            window=console.window(),
            reads=reads,
        )
        return Task(
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
