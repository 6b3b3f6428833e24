"""Defines the environment variables that the launcher sets for each rank, and the run's secret.

`launch/run_spec.py` builds a rank's environment, and `launchers/detection.py` reads it back.
"""

import difflib
import os
import secrets
from collections.abc import Collection, Mapping

from shardwise.config import FLAGS_VARIABLE, HOROVOD_TIMELINE
from shardwise.config import PREFIX as SETTINGS_PREFIX
from shardwise.errors import LaunchError
from shardwise.net import authentication
from shardwise.net.identity import Identity

PREFIX = "SHARDWISE_LAUNCH_"
"""Prefix of the variables that `shardwise run` sets."""

OWN_NAMES = {
    name: PREFIX + name.upper() for name in ("rank", "size", "local_rank", "local_size", "port")
}
"""The variables that `shardwise run` sets for the fields of an Identity."""

RANK_VARIABLE = OWN_NAMES["rank"]

JOIN_VARIABLE = PREFIX + "JOIN"
"""Holds MODULE:FUNCTION, the function that joins the ranks, if it is not `comm.connect`."""

SURVIVES_VARIABLE = PREFIX + "SURVIVES"
"""Set if the launcher lets the other ranks continue after one was killed (`--survive`).

Holds the number of spares (`--spares`).
"""

LOST_AFTER_VARIABLE = PREFIX + "LOST_AFTER"
"""Set with `--survive` on several hosts: seconds after which a silent host counts as lost."""

SPARE_VARIABLE = PREFIX + "SPARE"
"""Set in a rank that joins the others while they train: REPLACES or GROWS."""

REPLACES = "replaces"
"""The rank waits until it can replace a lost one (`--spares`)."""

GROWS = "grows"
"""The rank joins as a further one (`shardwise scale-up`)."""

MEMBERS_FILE = "members"
"""File in the reports folder in which ranks of this host publish the addresses of all ranks that a
spare can join."""

OTHER_MEMBERS_FILE = "members_of_others"
"""The same from ranks of other hosts. The file of the later generation counts."""

RUN_VARIABLE = PREFIX + "RUN"
"""Holds the unique name of a run, which stays the same when the run is restarted."""

REPORTS_VARIABLE = PREFIX + "REPORTS"
"""Holds the folder for a rank's error file (see error_file.py)."""

RUN_SECRET_VARIABLE = PREFIX + "SECRET"
"""Holds the secret that `shardwise run` generated for the processes of a run."""

SECRET_VARIABLE = "SHARDWISE_SECRET"
"""Holds the user's secret, for runs started by another launcher."""

SHORTEST_SECRET = 16
"""Minimum length of the user's secret in characters. Shorter secrets can be guessed."""

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
"""Variables of an outer run. A rank of ours that inherited them would take on a wrong identity."""

FOREIGN_PREFIXES = ("TORCHELASTIC_", PREFIX)

OF_THE_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR")
"""Variables that describe the terminal. Rank 0 needs them even on a remote host."""

MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""Variables with the address and port of rank 0, the default meeting place."""


# -- one rank ---------------------------------------------------------------------------------


def identity_variables(identity: Identity) -> dict[str, str]:
    """Return the environment variables that pass `identity` to a rank."""
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
    """Return whether the variable `name` may set a process's rank, size or rendezvous address."""
    return name in FOREIGN or name.startswith(FOREIGN_PREFIXES)


# -- other hosts ------------------------------------------------------------------------------


def passed_variables(
    environ: Mapping[str, str],
    requested: Collection[str],
    interface: str | None,
    overridable: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment variables to pass on to ranks on other hosts. No side effects.

    These are Shardwise's settings, the terminal's variables, and the ones that the user requested.

    Args:
        environ: The environment of this process.
        requested: The user's `-x` arguments, each "NAME" or "NAME=VALUE".
        interface: The network interface for Gloo and NCCL, or None if the user named none.
        overridable: Variables that the launcher sets itself, but that `requested` may override.

    Raises:
        LaunchError: A requested NAME is not set in `environ`, is requested twice, or is set by the
            launcher itself.
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
    """Return the working directory as the user named it, without resolving symbolic links."""
    # On other hosts the links may have other targets, so the resolved path may not exist there.
    named, here = environ.get("PWD", ""), os.getcwd()
    return named if os.path.isabs(named) and os.path.realpath(named) == here else here


# -- the secret of a run ----------------------------------------------------------------------


def draw_secret() -> str:
    """Generate the secret with which a run's processes authenticate each other.

    `shardwise run` passes it to ranks in their environment, and to agents over ssh. Under other
    launchers, rank 0 generates it and writes it to a file that only the same user can read. If the
    hosts share no folder, the user has to supply a secret.
    """
    return secrets.token_hex(32)


def given_secret(environ: Mapping[str, str]) -> str | None:
    """Return the secret from our launcher or from the user, or None if neither supplied one.

    Has no side effects. Raises LaunchError if the user's secret is too short.
    """
    if RUN_SECRET_VARIABLE in environ:
        return environ[RUN_SECRET_VARIABLE]
    given = environ.get(SECRET_VARIABLE)
    if given is not None and len(given) < SHORTEST_SECRET:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(given)} characters, but needs at least "
            f"{SHORTEST_SECRET}, so that it cannot be guessed. Create one for all ranks: export "
            f"{SECRET_VARIABLE}=$(openssl rand -hex 32)"
        )
    return given


def derived_secret(environ: Mapping[str, str], run: str) -> str:
    """Return the secret of the run named `run` that hosts with the user's secret share.

    Has no side effects. Raises LaunchError if the user has not set a secret. The hosts do not need
    to send it to each other, because HMAC-SHA-256 derives it from the user's secret.
    """
    given = given_secret(environ)
    if not given:
        raise LaunchError(f"This host has no {SECRET_VARIABLE}: set it as on the other hosts.")
    return authentication.mac(given.encode(), b"run", run.encode()).hex()


def current_folder() -> str | None:
    """Return the working directory, or None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
