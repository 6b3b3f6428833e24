"""Names of the environment variables that the launcher gives each rank, and the secret of a run.

`launch/run_spec.py` builds the environment of a rank, and `launchers/detection.py` reads it back.
"""

import difflib
import os
import secrets
from collections.abc import Collection, Mapping

from shardwise.config import FLAGS_VARIABLE, HOROVOD_TIMELINE
from shardwise.config import PREFIX as SETTINGS_PREFIX
from shardwise.errors import LaunchError
from shardwise.net.identity import Identity

PREFIX = "SHARDWISE_LAUNCH_"
"""Prefix of the variables of `shardwise run`."""

OWN_NAMES = {
    name: PREFIX + name.upper() for name in ("rank", "size", "local_rank", "local_size", "port")
}
"""The variables of `shardwise run` for the fields of an Identity."""

RANK_VARIABLE = OWN_NAMES["rank"]

JOIN_VARIABLE = PREFIX + "JOIN"
"""Holds MODULE:FUNCTION if ranks do not join each other by `comm.connect`."""

RUN_VARIABLE = PREFIX + "RUN"
"""Holds a name that all starts of a run share, and no other run has."""

REPORTS_VARIABLE = PREFIX + "REPORTS"
"""Holds the folder for the error file of a rank (see error_file.py)."""

RUN_SECRET_VARIABLE = PREFIX + "SECRET"
"""Holds the secret that `shardwise run` drew for the processes of a run."""

SECRET_VARIABLE = "SHARDWISE_SECRET"
"""Holds the secret that the user gives, for runs that another launcher starts."""

SHORTEST_SECRET = 16
"""Minimum length in characters of a secret that the user gives, because short ones are guessable.
"""

BY_HAND = {SETTINGS_PREFIX + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "ALONE")}
"""Variables for users who start each rank themselves (see launchers/detection.py)."""

FOREIGN = BY_HAND | {
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
"""Variables of an outer run, which would give a rank of ours a wrong identity."""

FOREIGN_PREFIXES = ("TORCHELASTIC_", PREFIX)

OF_THE_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR")
"""Variables of the terminal that rank 0 draws on, also from another host."""

MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""The default meeting place of ranks."""


# -- one rank ---------------------------------------------------------------------------------


def identity_variables(identity: Identity) -> dict[str, str]:
    """Return the variables that pass `identity` to a rank."""
    values = {
        "RANK": identity.rank,
        "SIZE": identity.size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_SIZE": identity.local_size,
        "ADDRESS": identity.address,
        "PORT": identity.port,
        "LISTEN_FD": identity.listen_fd,
    }
    return {PREFIX + name: str(value) for name, value in values.items() if value is not None}


def is_foreign(name: str) -> bool:
    """Return whether a variable tells a process its rank."""
    return name in FOREIGN or name.startswith(FOREIGN_PREFIXES)


# -- other hosts ------------------------------------------------------------------------------


def passed_variables(
    environ: Mapping[str, str],
    requested: Collection[str],
    interface: str | None,
    overridable: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables that ranks on other hosts get from this process. Pure.

    These are settings of ours, variables of the terminal, and the `requested` ones.

    Args:
        environ: The variables of this process.
        requested: The user's `-x NAME` and `-x NAME=VALUE`.
        interface: The network interface for Gloo and NCCL, if the user named one.
        overridable: Variables of the launcher that the user may set here all the same.

    Raises:
        LaunchError: A requested NAME is not set, given twice, or set by the launcher itself.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name in (*OF_THE_TERMINAL, HOROVOD_TIMELINE)
        or (name.startswith(SETTINGS_PREFIX) and not is_foreign(name) and name != FLAGS_VARIABLE)
    }
    if interface is not None:
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    for word in requested:
        name, given, value = word.partition("=")
        if not name:
            raise LaunchError(f"-x {word}: write -x NAME, or -x NAME=VALUE.")
        if not given and name not in environ:
            near = difflib.get_close_matches(name, environ, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Set it, or write -x {name}=VALUE."
            raise LaunchError(f"-x {name}: this variable is not set here. {hint}")
        is_ours = is_foreign(name) or name == FLAGS_VARIABLE
        if is_ours and name not in overridable:
            raise LaunchError(f"-x {name}: shardwise run sets {name} itself: leave it out.")
        if any(each.partition("=")[0] == name and each != word for each in requested):
            raise LaunchError(f"-x {name} is given twice: leave one out.")
        found[name] = value if given else environ[name]
    return found


def working_folder(environ: Mapping[str, str]) -> str:
    """Return the working directory under the name that the user knows, with its symbolic links."""
    # On other hosts the links may point elsewhere, so the resolved name may not exist there.
    named, here = environ.get("PWD", ""), os.getcwd()
    return named if os.path.isabs(named) and os.path.realpath(named) == here else here


# -- the secret of a run ----------------------------------------------------------------------


def draw_secret() -> str:
    """Draw the secret that the processes of a run authenticate each other with.

    `shardwise run` passes it to ranks in their environment, and to agents over ssh. Under other
    launchers rank 0 draws it and writes it to a file that only the same user can read. If the hosts
    share no folder, the user gives a secret.
    """
    return secrets.token_hex(32)


def given_secret(environ: Mapping[str, str]) -> str | None:
    """Return the secret from our launcher, or else from the user; None without one. Pure.

    Raises LaunchError if the user's secret is too short.
    """
    if RUN_SECRET_VARIABLE in environ:
        return environ[RUN_SECRET_VARIABLE]
    given = environ.get(SECRET_VARIABLE)
    if given is not None and len(given) < SHORTEST_SECRET:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(given)} characters, and fewer than {SHORTEST_SECRET} can "
            f"be guessed. Draw one for all ranks: export {SECRET_VARIABLE}=$(openssl rand -hex 32)"
        )
    return given


def current_folder() -> str | None:
    """Return the working directory, or None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
