"""Builds the environment variables that the launcher gives each rank.

A rank gets the launcher's own variables, less those that would tell it that it is someone else,
plus who it is, the settings, and the secret of the run. `launcher_detection.py` reads them back.
"""

import difflib
import json
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from shardwise.config import FLAGS_VARIABLE, HOROVOD_TIMELINE
from shardwise.config import PREFIX as SETTINGS_PREFIX
from shardwise.errors import LaunchError
from shardwise.net.identity import Identity

PREFIX = "SHARDWISE_LAUNCH_"
"""What the variables of `shardwise run` begin with."""

OWN_NAMES = {
    name: PREFIX + name.upper() for name in ("rank", "size", "local_rank", "local_size", "port")
}
"""By field of Identity, the variable that `shardwise run` gives it in."""

RANK_VARIABLE = OWN_NAMES["rank"]

RUN_VARIABLE = PREFIX + "RUN"
"""Holds a name that all starts of a run share, and no other run has."""

REPORTS_VARIABLE = PREFIX + "REPORTS"
"""Holds the folder where a rank leaves its error file (see error_file.py)."""

RUN_SECRET_VARIABLE = PREFIX + "SECRET"
"""Holds the secret that `shardwise run` drew for the processes of a run."""

SECRET_VARIABLE = "SHARDWISE_SECRET"
"""Holds the secret that the user gives, for runs that another launcher starts."""

SHORTEST_SECRET = 16
"""Characters of a secret that the user gives; a shorter one may be guessed."""

BY_HAND = {SETTINGS_PREFIX + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "ALONE")}
"""Variables by which a user tells one process who it is (see launcher_detection.py)."""

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
"""Variables of an outer run that would tell a rank that it is someone else."""

FOREIGN_PREFIXES = ("TORCHELASTIC_", PREFIX)

OF_THE_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR")
"""Variables of the terminal that rank 0 draws on, wherever it is."""

MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""Where ranks meet that were given no other place."""


# -- one rank ---------------------------------------------------------------------------------


def of_rank(
    base: Mapping[str, str],
    identity: Identity,
    *,
    flags: Mapping[str, str],
    reports: Path,
    cores: int,
    columns: int | None = None,
    interface: str | None = None,
    run: str = "",
    secret: str = "",
    master_port: int | None = None,
) -> dict[str, str]:
    """Return all variables of one rank. Pure.

    `columns` is the width of its lines, where known. `interface` is the network interface that
    leads to the other hosts, None on one host. `run` is the name that all starts of the run share,
    `secret` what only its processes know. `master_port` is where torch's own rendezvous may listen.
    What the user has set stays: threads per rank, the interface, fault handling.
    """
    kept = {name: value for name, value in base.items() if not is_foreign(name)}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // identity.local_size)),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code shows its Python lines
    }
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    elif identity.local_size == identity.size:
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    given = {
        "PYTHONUNBUFFERED": "1",
        FLAGS_VARIABLE: json.dumps(dict(flags)),
        REPORTS_VARIABLE: str(reports),
    }
    if run:
        given[RUN_VARIABLE] = run
    if secret:
        given[RUN_SECRET_VARIABLE] = secret
    if master_port is not None:
        given |= _as_torchrun(identity, master_port)
    if columns is not None:
        given["COLUMNS"] = str(columns)
    return defaults | kept | given | identity_variables(identity)


def identity_variables(identity: Identity) -> dict[str, str]:
    """Return the variables from which a rank reads `identity` back."""
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


def _as_torchrun(identity: Identity, master_port: int) -> dict[str, str]:
    """Return torchrun's variables, for scripts and libraries that read those."""
    return {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_size),
        "MASTER_ADDR": str(identity.address),
        "MASTER_PORT": str(master_port),
    }


def is_foreign(name: str) -> bool:
    """Whether a variable tells a process which rank it is."""
    return name in FOREIGN or name.startswith(FOREIGN_PREFIXES)


# -- other hosts ------------------------------------------------------------------------------


def passed_variables(
    environ: Mapping[str, str],
    asked: Collection[str],
    interface: str | None,
    heeded: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables that ranks on other hosts get from here. Pure.

    These are what `-x NAME` and `-x NAME=VALUE` ask for, settings of ours, the terminal and the
    interface. Raises LaunchError for a NAME that is not set here, or that each rank is given
    anyway, but for those that are `heeded`.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name in (*OF_THE_TERMINAL, HOROVOD_TIMELINE)
        or (name.startswith(SETTINGS_PREFIX) and not is_foreign(name) and name != FLAGS_VARIABLE)
    }
    if interface is not None:
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    for word in asked:
        name, given, value = word.partition("=")
        if not name:
            raise LaunchError(f"-x {word}: write -x NAME, or -x NAME=VALUE.")
        if not given and name not in environ:
            near = difflib.get_close_matches(name, environ, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Set it, or write -x {name}=VALUE."
            raise LaunchError(f"-x {name}: there is no such variable here. {hint}")
        is_ours = is_foreign(name) or name == FLAGS_VARIABLE
        if is_ours and name not in heeded:
            raise LaunchError(
                f"-x {name}: shardwise run tells each rank who it is, and sets {name} itself: "
                "leave it out."
            )
        if any(each.partition("=")[0] == name and each != word for each in asked):
            raise LaunchError(f"-x {name} is given twice: leave one out.")
        found[name] = value if given else environ[name]
    return found


def working_folder(environ: Mapping[str, str]) -> str:
    """Return the working directory, by the name that the user knows it by.

    Links in it may lead elsewhere on other hosts.
    """
    named, here = environ.get("PWD", ""), os.getcwd()
    return named if os.path.isabs(named) and os.path.realpath(named) == here else here


# -- the secret of a run ----------------------------------------------------------------------


def draw_secret() -> str:
    """Draw a secret for one run, which its processes prove to each other that they know.

    shardwise run hands it to ranks in their environment, over ssh inside the connection. Under
    other launchers rank 0 draws it and leaves it where only the same user can read it; where hosts
    share no folder, the user gives one.
    """
    return secrets.token_hex(32)


def given_secret(environ: Mapping[str, str]) -> str | None:
    """Return the secret that our launcher, else the user, has given; None without one. Pure.

    Raises LaunchError for one that is too short.
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
    """The working folder; None where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
