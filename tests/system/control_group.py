"""A control group with little memory, where the kernel's out-of-memory killer can be met."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def little_memory(limit: int) -> Iterator[list[str]]:
    """The words that start a command in a group of `limit` bytes. Raises OSError where this user
    or this host can make none."""
    old = (ROOT / "memory").is_dir()
    group = (ROOT / "memory" if old else ROOT) / f"shardwise-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        members = group / "cgroup.procs"
        yield ["sh", "-c", f'echo $$ > {members} && exec "$@"', "sh"]
    finally:
        group.rmdir()
