"""Builds the ssh command that starts an agent on a host, and explains failures. Does no I/O."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePath

from shardwise.errors import LaunchError
from shardwise.launch.run_spec import RunSpec
from shardwise.net.hosts import Host, Share

NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that Python may need to start, so they are part of the command. All others are sent
over the connection, so that they are not visible in process lists."""

WITHOUT_FLAGS: dict[str, Callable[[str], list[str]]] = {
    "qrsh": lambda host: [host],
    "srun": lambda host: [f"--nodelist={host}", "sh", "-c"],
}
"""Programs for --ssh that run a command on a host but do not accept ssh's flags, such as Grid
Engine's `qrsh -inherit HOST COMMAND`. With the words between the program and the command."""

LINK = "shardwise.launch.nodes"
"""The module that takes the place of ssh with `--nnodes` and `--survive`."""

NO_FOLDER = 81
"""Exit code of the remote command if the working directory does not exist."""

NOT_FOUND = (126, 127)
"""Exit codes of a shell if a program is missing or not executable."""

SSH_FAILED = 255
"""Exit code of ssh if ssh itself fails."""

KEPT_SILENT = 2.5
"""Minimum number of seconds of silence before ssh itself closes a connection."""

CONNECT = 10
"""Timeout in seconds for ssh to connect to a host."""


def ssh_command(spec: RunSpec, host: Host) -> list[str]:
    """Return the command that starts an agent on `host`. It never prompts for a password.

    Raises LaunchError if --ssh-port is given but the ssh program has no flag for a port.
    """
    program = PurePath(spec.ssh[0]).name
    if program in WITHOUT_FLAGS:
        if spec.ssh_port is not None:
            raise LaunchError(
                f"--ssh-port {spec.ssh_port}: {program} has no flag for a port. Leave --ssh-port "
                "out."
            )
        return [*spec.ssh, *WITHOUT_FLAGS[program](host.login), remote_command(spec)]
    settings = {
        "BatchMode": "yes",  # fail instead of asking for a password
        "ConnectTimeout": str(CONNECT),
        # ssh closes a silent connection after about 3/4 of --host-timeout, so before the launcher
        # does, because ssh knows the reason.
        "ServerAliveInterval": str(max(1, round(spec.patience / 4))),
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    given = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    port = [] if spec.ssh_port is None else ["-p", str(spec.ssh_port)]
    return [*spec.ssh, "-T", "-x", *given, *port, host.login, "--", remote_command(spec)]


def remote_command(spec: RunSpec) -> str:
    """Return the command line to run on the host, which any login shell must understand."""
    needed = [f"{name}={spec.passed[name]}" for name in NEEDED if name in spec.passed]
    env = ["env", *needed] if needed else []
    agent = shlex.join([*env, *agent_words(spec, spec.python)])
    # exec replaces the shell, so that no additional process has to wait for the agent.
    return f"cd {shlex.quote(spec.folder)} || exit {NO_FOLDER}; exec {agent}"


def agent_words(spec: RunSpec, python: str) -> list[str]:
    """Return the command that runs an agent with the interpreter `python`."""
    return [python, "-P", "-m", spec.agent]


def advice_for(spec: RunSpec, host: Host) -> str:
    """Return what to check if the connection to `host` fails."""
    if LINK in spec.ssh:
        return "Does the command still run there, and can this host reach its ports?"
    return f"Check that this works: {_login(spec, host)} true"


def start_failure(spec: RunSpec, host: Host, code: int | None, said: str) -> str:
    """Explain why the agent on `host` did not start, or why it has exited.

    Args:
        spec: The run.
        host: The host.
        code: Exit code of ssh or the agent, or None if it is still running.
        said: What ssh and the agent have written to standard error.
    """
    login = _login(spec, host)
    last = _last_line(said)
    if code == NO_FOLDER:
        return (
            f"{host.name} has no folder {spec.folder}, where this run was started. Put the project "
            "there too: on a file system that all hosts share, or as a copy."
        )
    if code in NOT_FOUND:
        return (
            f"{host.name} has no {spec.python}. Install the same Python there, or name one that "
            "all hosts have with --python PATH."
        )
    if "No module named" in last:
        return (
            f"{spec.python} on {host.name} cannot import {spec.agent}. Install the same version of "
            "shardwise there, or pass on its place with -x PYTHONPATH."
        )
    if code == SSH_FAILED:
        if "Permission denied" in last:
            advice = (
                f"ssh must not ask for a password: set up a key, until this works: {login} true"
            )
        elif "Host key verification failed" in last:
            advice = f"Log in once by hand to accept the key of the host: {login}"
        else:
            advice = f"Check its spelling. {advice_for(spec, host)}"
        if LINK in spec.ssh:
            reason = last or "no reason given"
            return f"The connection to {host.name} fails: {reason}. {advice_for(spec, host)}"
        return f"ssh to {host.name} fails: {last or 'no reason given'}. {advice}"
    return (
        f"The agent on {host.name} ended ({'signal' if (code or 0) < 0 else 'exit code'} "
        f"{abs(code or 0)}){': ' + last if last else ''}. "
        f"{_try(spec, host, f'{spec.python} -m {spec.agent}')}"
    )


def lost_host(spec: RunSpec, share: Share, code: int | None, said: str, silent: float) -> str:
    """Explain why a host was lost after its ranks had started.

    Args:
        spec: The run.
        share: The host's ranks.
        code: Exit code of ssh or the agent, or None if it is still running.
        said: What ssh and the agent have written to standard error.
        silent: Seconds between the last data from the agent and the end of the connection.
    """
    who = f"{share.host.name} ({share.ranks}) is lost"
    if code != SSH_FAILED:
        why = start_failure(spec, share.host, code, said)
        return f"{who}: {why.replace('The agent', 'the agent', 1)}"
    reason = _last_line(said)
    # An agent sends a heartbeat every second. If the last one is recent, ssh did not close a silent
    # connection, so the agent itself has exited.
    if not reason and silent < KEPT_SILENT:
        return (
            f"{who}: its agent ended {silent:.1f} s after its last sign of life. It or sshd may "
            f"have been killed (kill -9, the out-of-memory killer). {_own_end(spec)}"
        )
    return (
        f"{who}: {reason or _silence(spec)}. The host or the network to it may be down. "
        f"{_own_end(spec)}"
    )


def shows_end(spec: RunSpec, code: int | None, said: str, silent: float) -> bool:
    """Return whether the end of ssh shows that the agent on the host has exited.

    Otherwise only the connection may be lost. The arguments are those of `lost_host`.
    """
    # If srun or ssh is killed, the agent may keep its standard input open.
    if PurePath(spec.ssh[0]).name in WITHOUT_FLAGS or code is None or code < 0:
        return False
    # ssh fails without a reason if a signal has ended the agent.
    return code != SSH_FAILED or (not _last_line(said) and silent < KEPT_SILENT)


def silent_host(spec: RunSpec, share: Share, pid: int) -> str:
    """Explain that a host was lost because its agent is silent, although the connection works.

    Args:
        spec: The run.
        share: The host's ranks.
        pid: The agent's process id.
    """
    attempt = _try(spec, share.host, f"ps -o pid,stat,args -p {pid}")
    return (
        f"{share.host.name} ({share.ranks}) is lost: {_silence(spec)}, although the connection "
        f"works. Its agent (process {pid}) may be stopped, or the host overloaded. "
        f"{attempt}. {_own_end(spec)}"
    )


def _login(spec: RunSpec, host: Host) -> str:
    """Return the command with which the user can log in to `host`."""
    port = [] if spec.ssh_port is None else ["-p", str(spec.ssh_port)]
    return shlex.join([*spec.ssh, *port, host.login])


def _try(spec: RunSpec, host: Host, words: str) -> str:
    """Return the advice to run the command `words` on `host`."""
    there = LINK in spec.ssh
    return f"Try on {host.name}: {words}" if there else f"Try: {_login(spec, host)} {words}"


def _silence(spec: RunSpec) -> str:
    return f"no sign of life for {spec.patience:g} s"


def _own_end(spec: RunSpec) -> str:
    return f"Its ranks end on their own within {spec.patience:g} s."


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1].strip().rstrip(".")


def refusals(faults: Sequence[str]) -> str:
    """Join the error messages of all hosts, one per line."""
    return "\n           ".join(faults)
