"""What only the processes of a run know, and prove to each other that they know.

shardwise run draws it and hands it to ranks in their environment, over ssh inside the connection.
Under other launchers rank 0 draws it and leaves it where only the same user can read it; where
hosts share no folder, the user gives one.
"""

import secrets
from collections.abc import Mapping

from shardwise.errors import LaunchError
from shardwise.launch import own

VARIABLE = "SHARDWISE_SECRET"
FEWEST = 16
"""Characters of one that is given by the user; of fewer, one may be guessed."""


def drawn() -> str:
    """A new one."""
    return secrets.token_hex(32)


def told(environ: Mapping[str, str]) -> str | None:
    """The one that our launcher, else the user, has given; None where there is none. Pure.

    Raises LaunchError for one that is too short.
    """
    if own.SECRET in environ:
        return environ[own.SECRET]
    given = environ.get(VARIABLE)
    if given is not None and len(given) < FEWEST:
        raise LaunchError(
            f"{VARIABLE} has {len(given)} characters, and fewer than {FEWEST} can be guessed. "
            f"Draw one for all ranks: export {VARIABLE}=$(openssl rand -hex 32)"
        )
    return given
