"""A control group with little memory, for tests of the kernel's out-of-memory killer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def little_memory(limit: int) -> Iterator[list[str]]:
    """Yield the words that start a command in a group with `limit` bytes of memory.

    Raises OSError if this user or this host cannot create such a group.
    """
    old = (ROOT / "memory").is_dir()
    group = (ROOT / "memory" if old else ROOT) / f"shardwise-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        members = group / "cgroup.procs"
        yield ["sh", "-c", f'echo $$ > {members} && exec "$@"', "sh"]
    finally:
        group.rmdir()
