"""Which variables the ranks on other hosts get from here. Pure."""

import difflib
import os
from collections.abc import Collection, Mapping

from shardwise.config import FLAGS_VARIABLE, HOROVOD_TIMELINE, PREFIX
from shardwise.errors import LaunchError
from shardwise.launch import environment, own

NEVER = (own.PREFIX, FLAGS_VARIABLE)
"""Variables of ours that tell a process who it is, or are told each rank anyway."""


DRAWING = ("TERM", "COLORTERM", "NO_COLOR")
"""Variables of the terminal that rank 0 draws on, wherever it is."""


MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""Where ranks meet that nobody told another place."""


def variables(
    environ: Mapping[str, str],
    asked: Collection[str],
    interface: str | None,
    heeded: Collection[str] = (),
) -> dict[str, str]:
    """What `-x NAME` and `-x NAME=VALUE` ask for, settings of ours, the terminal and interface.

    Raises LaunchError for a NAME that is not set here, or that a rank is told anyway, but for
    those that are `heeded`.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name in (*DRAWING, HOROVOD_TIMELINE)
        or (name.startswith(PREFIX) and not name.startswith(NEVER))
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
        told = value if given else environ[name]
        is_told = environment.is_foreign(name) or name == FLAGS_VARIABLE
        if is_told and name not in heeded:
            raise LaunchError(
                f"-x {name}: shardwise run tells each rank who it is, and sets {name} itself: "
                "leave it out."
            )
        if any(each.partition("=")[0] == name and each != word for each in asked):
            raise LaunchError(f"-x {name} is given twice: leave one out.")
        found[name] = told
    return found


def folder(environ: Mapping[str, str]) -> str:
    """The working directory, by the name that the user knows it by: links may differ elsewhere."""
    named, here = environ.get("PWD", ""), os.getcwd()
    return named if os.path.isabs(named) and os.path.realpath(named) == here else here
