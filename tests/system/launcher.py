"""Starts `shardwise` as a user does, and finds every process that it leaves behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 120.0
"""Seconds that a run may take on a busy machine."""


@dataclass
class Ran:
    """The exit code and the output of a run."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        """Return the lines of its standard output, sorted because ranks race."""
        return sorted(self.out.splitlines())


@dataclass
class Launcher:
    """The runs of one test. Their processes have a mark in their environment.

    `enter` is the beginning of a command that enters another place, such as a namespace.
    """

    folder: Path
    enter: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"mark-{uuid.uuid4().hex}")
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start `shardwise WORDS` in the background."""
        settings: dict[str, Any] = {"cwd": self.folder, "text": True, "stdin": subprocess.DEVNULL}
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        environ = settings.pop("env", {})
        settings["env"] = self.environ() | environ
        command = [*self.enter, sys.executable, "-m", "shardwise", *words]
        self.started.append(subprocess.Popen(command, **settings))
        return self.started[-1]

    def environ(self) -> dict[str, str]:
        """Return our environment with the mark, and a separate folder for temporary files."""
        known = {name: value for name, value in os.environ.items() if "SHARDWISE" not in name}
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        return known | {"TEST_MARK": self.mark, "TMPDIR": str(temporary)}

    def run(self, *words: str, **options: Any) -> Ran:
        """Run `shardwise WORDS` to its end."""
        return self.finish(self.start(*words, **options))

    def finish(self, process: "subprocess.Popen[str]", limit: float = LIMIT) -> Ran:
        """Wait for a run to end; kill it and fail after `limit` seconds."""
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = process.communicate()
            raise AssertionError(f"It did not end in {limit} s:\n{out}\n{err}") from None
        return Ran(process.returncode, out, err)

    def left(self) -> list[int]:
        """Return the living processes with our mark."""
        mark = f"TEST_MARK={self.mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile, or belongs to another user
                continue
        return found

    def wait_until_gone(self, limit: float = 8.0) -> list[int]:
        """Return the processes that are still alive after `limit` seconds."""
        until = time.monotonic() + limit
        while (alive := self.left()) and time.monotonic() < until:
            time.sleep(0.05)
        return alive

    def kill_all(self) -> None:
        """Kill the remaining processes, so that no test disturbs the next."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Kill the remaining processes, and close the pipes of all runs.

        A test that failed has not waited for its runs. The garbage collector would warn of them in
        a later test, which would fail too.
        """
        self.kill_all()
        for process in self.started:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def folders_left(self) -> list[Path]:
        """Return temporary folders of the launcher that still exist."""
        return list((self.folder / "temporary").glob("shardwise-*"))


def script(name: str) -> str:
    """Return the path of a script of these tests."""
    return str(SCRIPTS / f"{name}.py")
