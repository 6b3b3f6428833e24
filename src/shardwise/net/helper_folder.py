"""Puts the sockets of multiprocessing's processes into the run's folder.

    <temporary folder>/shardwise-XXXXXXXX/     folder of the run on this host
        mp/listener-XXXXXXXX                   a socket through which a process sends tensors

Each process that multiprocessing starts, such as a DataLoader worker, makes a temporary folder for
its sockets and removes it when it exits. A killed process cannot remove it. The launcher, or its
orphan reaper, removes the run's folder in every case.
"""

import os
from contextlib import suppress
from multiprocessing import process
from pathlib import Path
from typing import Any

from shardwise.net.environment import REPORTS_VARIABLE

NAME = "mp"

_LONGEST = 107 - len("/listener-XXXXXXXX")
"""Maximum length of the folder's path in bytes. Linux limits the path of a socket to 107 bytes."""


def use_run_folder() -> None:
    """Make this process, and its children, create their sockets in the run's folder.

    Only for a rank that our launcher has started. Does nothing if the path would be too long.
    """
    config: dict[str, Any] = getattr(process.current_process(), "_config", {})
    folder = Path(os.environ[REPORTS_VARIABLE]) / NAME
    if "tempdir" in config or len(os.fsencode(folder)) > _LONGEST:
        return
    # If the disk is full, the script should fail only if it needs the folder.
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        # multiprocessing.util.get_temp_dir reads this entry. Children inherit it.
        config["tempdir"] = str(folder)
