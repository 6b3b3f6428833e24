"""Commits of a run on the disks of its hosts, where its next start finds them.

The first rank of each host writes the newest one into the user's own temporary folder there, under
a name that all starts of a run share and no other run has. So any host that is left has it. Values
of a script are pickled, so a commit is read only where nobody else can have written it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.launch import environment, private_files


def run_name(environ: Mapping[str, str]) -> str | None:
    """What all starts of this run have in common; None where nobody would start it again."""
    if environment.RUN_VARIABLE in environ:
        return environ[environment.RUN_VARIABLE]
    if "TORCHELASTIC_RUN_ID" in environ:  # torch's agent outlives the ranks that it starts
        return f"{os.getppid()}-{_begun(os.getppid())}"
    return None


def _begun(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "" where not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Commits:
    """The newest commit of this run on this host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = run_name(environ)
        self.path = (
            None if name is None else private_files.folder() / private_files.commit_file(name)
        )

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Put commit `number` in the place of the one before, whole or not at all."""
        if self.path is None:
            return
        aside = self.path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        with private_files.create(aside) as file:
            torch.save({"number": number, "state": dict(state)}, file)
        aside.rename(self.path)

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """The commit that is here, if any; one of another user's is none of ours."""
        file = private_files.opened(self.path) if self.path is not None else None
        if file is None:
            return None
        with file:
            found = torch.load(file, map_location="cpu", weights_only=False)
        return found["number"], found["state"]

    def remove(self) -> None:
        """The run has come to its end."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            private_files.tidy()
