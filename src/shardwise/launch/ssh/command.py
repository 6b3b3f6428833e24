"""Builds the ssh command that starts an agent on a host, and says what its failures mean. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from shardwise.errors import LaunchError
from shardwise.net.hosts import Host, Share

AGENT = "shardwise.launch.ssh.agent"

NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that Python itself may need to start; others travel inside the connection, where
nobody sees them in a list of processes."""

WITHOUT_FLAGS = ("qrsh",)
"""Programs for --ssh that run a command on a host as ssh does, but know none of its flags: Grid
Engine's `qrsh -inherit HOST COMMAND`."""

NO_FOLDER = 81
"""The exit code by which the remote shell says that it cannot go there."""

NOT_FOUND = (126, 127)
"""Those by which every shell says that a program is missing, or none."""

SSH_FAILED = 255
"""The one by which ssh says that it was itself that failed."""

KEPT_SILENT = 2.5
"""Seconds of silence, at least, before ssh itself takes a connection for lost: an agent sends a
sign of life every second."""

CONNECT = 10
"""Seconds that ssh may take to reach a host."""


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """How other hosts are reached and what is used there.

    `ssh` are the words of the program with flags of the user's, `port` its port, None for its
    own. `python` runs the agent in `folder`. `passed` are variables for the ranks. `patience` is
    the seconds of silence after which a host counts as lost.
    """

    folder: str
    python: str
    ssh: tuple[str, ...] = ("ssh",)
    port: int | None = None
    passed: Mapping[str, str] = field(default_factory=dict)
    patience: float = 10.0


def ssh_command(options: SshOptions, host: Host) -> list[str]:
    """Build the command that starts an agent on `host`; it never asks for a password.

    Raises LaunchError for a port if the program has no flag for it.
    """
    program = PurePath(options.ssh[0]).name
    if program in WITHOUT_FLAGS:
        if options.port is not None:
            raise LaunchError(
                f"--ssh-port {options.port}: {program} has no flag for a port. Leave it out."
            )
        return [*options.ssh, host.login, remote_command(options)]
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT),
        "ServerAliveInterval": str(max(1, round(options.patience / 4))),
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    given = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    port = [] if options.port is None else ["-p", str(options.port)]
    return [*options.ssh, "-T", "-x", *given, *port, host.login, "--", remote_command(options)]


def remote_command(options: SshOptions) -> str:
    """Build one line for the login shell of the other host, whichever that is."""
    needed = [f"{name}={options.passed[name]}" for name in NEEDED if name in options.passed]
    agent = shlex.join([*(["env", *needed] if needed else []), *agent_words(options.python)])
    return f"cd {shlex.quote(options.folder)} || exit {NO_FOLDER}; exec {agent}"


def agent_words(python: str) -> list[str]:
    """Build the command that is an agent, on whichever host."""
    return [python, "-P", "-m", AGENT]


def start_failure(options: SshOptions, host: Host, code: int | None, said: str) -> str:
    """Say why the agent on `host` did not start or went away, from its exit code and output."""
    port = [] if options.port is None else ["-p", str(options.port)]
    login = shlex.join([*options.ssh, *port, host.login])
    last = _last_line(said)
    if code == NO_FOLDER:
        return (
            f"{host.name} has no folder {options.folder}, where this run starts. Put the project "
            "there too: on a file system that all hosts share, or as a copy."
        )
    if code in NOT_FOUND:
        return (
            f"{host.name} has no {options.python}. Install the same Python there, or name one that "
            "all hosts have with --python PATH."
        )
    if "No module named" in last:
        return (
            f"{options.python} on {host.name} cannot import {AGENT}. Install the same version of "
            "shardwise there, or pass on where it is with -x PYTHONPATH."
        )
    if code == SSH_FAILED:
        return f"ssh to {host.name} fails: {last or 'no reason given'}. {_advice(last, login)}"
    return (
        f"The agent on {host.name} ended ({'signal' if (code or 0) < 0 else 'exit code'} "
        f"{abs(code or 0)}){': ' + last if last else ''}. Look at: {login} {options.python} "
        f"-m {AGENT}"
    )


def lost_host(options: SshOptions, share: Share, code: int | None, said: str, silent: float) -> str:
    """Say why the agent for the ranks of `share` went away after they had started.

    `silent` is the seconds between its last sign of life and the end of its connection.
    """
    who = f"{share.host.name} ({share.ranks}) is lost"
    if code != SSH_FAILED:
        why = start_failure(options, share.host, code, said)
        return f"{who}: {why.replace('The agent', 'the agent', 1)}"
    reason = _last_line(said)
    if not reason and silent < KEPT_SILENT:
        return (
            f"{who}: its agent ended {silent:.1f} s after its last sign of life. Was it killed "
            f"(kill -9, the out-of-memory killer), or sshd there? {_ends_by_itself(options)}"
        )
    return (
        f"{who}: {reason or _nothing_heard(options)}. Did the host go down, or the network "
        f"between? {_ends_by_itself(options)}"
    )


def silent_host(options: SshOptions, share: Share, pid: int) -> str:
    """Say that the agent for the ranks of `share` has ceased to answer over a connection that is
    still there; `pid` is its process."""
    port = [] if options.port is None else ["-p", str(options.port)]
    login = shlex.join([*options.ssh, *port, share.host.login])
    return (
        f"{share.host.name} ({share.ranks}) is lost: {_nothing_heard(options)}, although the "
        f"connection stands. Is its agent (process {pid}) stopped, or the host too busy? Look at: "
        f"{login} ps -o pid,stat,args -p {pid}. {_ends_by_itself(options)}"
    )


def _nothing_heard(options: SshOptions) -> str:
    return f"nothing was heard of it for {options.patience:g} s"


def _ends_by_itself(options: SshOptions) -> str:
    return f"What runs there ends by itself within {options.patience:g} s."


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1].strip().rstrip(".")


def _advice(said: str, login: str) -> str:
    """What to do about an error of ssh's."""
    if "Permission denied" in said:
        return f"It may not ask for a password here: set up a key, until this works: {login} true"
    if "Host key verification failed" in said:
        return f"Log in once by hand to accept the key of the host: {login}"
    return f"Is it spelt so, and does this work: {login} true"


def refusals(faults: Sequence[str]) -> str:
    """List all that is wrong on any host, one line each."""
    return "\n           ".join(faults)
